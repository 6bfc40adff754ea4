"""Progress of long work, without passing a progress bar through every function.

A command (or a notebook) uses `with reporting(show):` and gets show(what, done, total) calls from within; elsewhere
`track` is a plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
Show = Callable[[str, int, int], None]

_show: ContextVar[Show | None] = ContextVar("moontide_progress", default=None)


@contextmanager
def reporting(show: Show) -> Iterator[None]:
    """Send the progress of what runs inside to `show(what, done, total)`.

    >>> with reporting(lambda what, done, total: print(what, done, total)):
    ...     _ = list(track([1, 2], "graph"))
    graph 0 2
    graph 1 2
    graph 2 2
    """
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def report(what: str, done: int, total: int) -> None:
    """Report the progress of work that is not a loop over items."""
    show = _show.get()
    if show is not None:
        show(what, done, total)


def track(items: Sequence[T], what: str) -> Iterator[T]:
    """Yield the items and report how many are done."""
    report(what, 0, len(items))
    for done, item in enumerate(items, start=1):
        yield item
        report(what, done, len(items))


def follow_compiler() -> set[Any]:
    """Return a set: whenever Numba compiles one of the functions in it, report how many of them are compiled."""
    from numba.core import event

    functions, compiled = set[Any](), set[Any]()

    class Compiling(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            if event.data["dispatcher"].py_func in functions:
                report("compiling, once", len(compiled), len(functions))

        def on_end(self, event: Any) -> None:
            compiled.update(functions & {event.data["dispatcher"].py_func})

    event.register("numba:compile", Compiling())
    return functions
