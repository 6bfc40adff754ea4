"""Ctrl-C in the command line: one line, the exit status 130, and no incomplete files.

A run has three parts. While the program is loaded there is nothing to clean up, and Ctrl-C ends it at once. While a
command runs, Ctrl-C raises KeyboardInterrupt in the main thread, between two steps of Python and so never inside a
compiled loop. Open files are closed and temporary files removed; then the process ends without running finalisers,
which could free memory that threads of libraries still use. After the command Ctrl-C is ignored: everything is written.

This file is loaded first, and imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # that of `typing`, which takes time to load
if TYPE_CHECKING:
    from typing import Any, NoReturn

INTERRUPTED = 130  # the exit status after Ctrl-C
AGAIN = 0.5  # seconds after which Ctrl-C is raised once more, until it has come through


def at_once(number: int = signal.SIGINT, frame: Any = None) -> NoReturn:
    """Signal handler that ends the process at once, before the command has begun."""
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def until_it_came_through(number: int, frame: Any) -> None:
    """Signal handler that raises KeyboardInterrupt repeatedly until it takes effect, but not during the clean-up.

    Python ignores an exception in a callback of a weak reference or in a finaliser, and the run would go on.
    """
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, until_it_came_through)
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
    if not isinstance(sys.exc_info()[1], KeyboardInterrupt):
        raise KeyboardInterrupt


def on_interrupt(handler: Any) -> None:
    """Set what Ctrl-C does, unless it is ignored (as in a background job) or another handler is installed.

    >>> on_interrupt(at_once)
    >>> signal.getsignal(signal.SIGINT) is at_once
    True
    >>> on_interrupt(signal.default_int_handler)
    """
    import threading

    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, at_once, until_it_came_through):
        signal.signal(signal.SIGINT, handler)


def leave() -> NoReturn:
    """End the process after an interrupted command, running only the functions registered with atexit."""
    import atexit
    from contextlib import suppress

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    with suppress(Exception):
        atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(INTERRUPTED)
