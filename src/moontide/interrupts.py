"""Ctrl-C in the command line: one line, the status 130, no file in part, and no interpreter taken apart under threads.

A run has three parts. While the program is loaded there is nothing to clean up, and Ctrl-C leaves at once. While a
command runs, it raises KeyboardInterrupt in the main thread, between two steps of Python and so never inside a compiled
loop; what is open is closed and temporary files go, and then the process ends without the finalisers, which could free
what threads of libraries still use. After the command Ctrl-C is ignored: all is written.

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
    """Leave the process, as a handler of signals: nothing has begun."""
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(INTERRUPTED)


def until_it_came_through(number: int, frame: Any) -> None:
    """Raise KeyboardInterrupt, as a handler of signals, again and again but never while it is being cleaned up after.

    An exception in a callback of a weak reference or in a finaliser is ignored by Python, and the run would go on.
    """
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, until_it_came_through)
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
    if not isinstance(sys.exc_info()[1], KeyboardInterrupt):
        raise KeyboardInterrupt


def on_interrupt(handler: Any) -> None:
    """Set what Ctrl-C does, unless it is ignored, as in a background job, or somebody else has a handler.

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
    """End the process after an interrupted command: do what is registered for the exit, and no more."""
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
