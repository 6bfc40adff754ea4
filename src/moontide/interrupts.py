"""Ctrl-C and SIGTERM in the command line: one line, the exit status 130 or 143, and no incomplete files.

A run has three parts. While the program is loaded there is nothing to clean up, and a signal ends it at once. While a
command runs, a signal raises KeyboardInterrupt in the main thread, between two steps of Python and so never inside a
compiled loop. Open files are closed and temporary files removed; then the process ends without running finalisers,
which could free memory that threads of libraries still use. After the command signals are ignored, as all is written.

This file is loaded first, and imports nothing that takes time.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # that of `typing`, which takes time to load
if TYPE_CHECKING:
    from typing import Any, NoReturn

ENDINGS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}  # what is printed of a signal
USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}  # what Python does at first
AGAIN = 0.5  # seconds after which a signal is raised once more, until it has come through

_latest = signal.SIGINT


def at_once(number: int = signal.SIGINT, frame: Any = None) -> NoReturn:
    """Signal handler that ends the process at once, before the command has begun."""
    try:
        os.write(2, f"error: {ENDINGS[signal.Signals(number)]}\n".encode())
    finally:
        os._exit(128 + number)


def until_it_came_through(number: int, frame: Any) -> None:
    """Signal handler that raises KeyboardInterrupt repeatedly until it takes effect, but not during the clean-up.

    Python ignores an exception in a callback of a weak reference or in a finaliser, and the run would go on.
    """
    global _latest
    _latest = signal.Signals(number) if number in ENDINGS else _latest
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, until_it_came_through)
        signal.setitimer(signal.ITIMER_REAL, AGAIN)
    handled = sys.exc_info()[1]
    while handled is not None and not isinstance(handled, KeyboardInterrupt):
        handled = handled.__context__
    if handled is None:
        raise KeyboardInterrupt


def ending() -> tuple[str, int]:
    """Return what to print of the latest signal, and the exit status.

    >>> ending()
    ('interrupted', 130)
    """
    return ENDINGS[_latest], 128 + _latest


def on_interrupt(handler: Any) -> None:
    """Set what Ctrl-C and SIGTERM do, unless they are ignored (as in a background job) or another handler is installed.

    >>> on_interrupt(at_once)
    >>> signal.getsignal(signal.SIGINT) is signal.getsignal(signal.SIGTERM) is at_once
    True
    >>> for number, usual in USUAL.items():
    ...     _ = signal.signal(number, usual)
    """
    import threading

    if threading.current_thread() is not threading.main_thread():
        return
    for number, usual in USUAL.items():
        if signal.getsignal(number) in (usual, at_once, until_it_came_through):
            signal.signal(number, handler)


def leave() -> NoReturn:
    """End the process after an interrupted command, running only the functions registered with atexit."""
    import atexit
    from contextlib import suppress

    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)
    with suppress(Exception):
        atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(ending()[1])
