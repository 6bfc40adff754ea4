"""Work on blocks of rows in threads: numpy lets other threads run while it computes.

The number of threads is OMP_NUM_THREADS where that is set, else the cores this process may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

LEAST = 2**16  # entries that are worth a thread
_here = False  # whether blocks are computed by the thread that has them


def workers() -> int:
    """Return how many threads to use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(wanted)) if wanted.isdigit() else cores


def row_blocks(n: int, entries: int) -> list[slice]:
    """Cut n rows into one part per thread, or fewer where that would be less than `LEAST` of their entries."""
    most = min(n, entries // LEAST)
    count = min(workers(), most) if most > 1 else 1
    return [slice(n * i // count, n * (i + 1) // count) for i in range(count)]


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="moontide")


def in_threads(function: Callable[[T], R], blocks: Sequence[T]) -> list[R]:
    """Return [function(b) for b in blocks], the first computed here and the others in threads, where there are some.

    Where the caller only waited, the system often put two of them on its core. No block is at work any more when this
    ends, be it by an error or by Ctrl-C: blocks write into arrays of the caller.
    """
    if len(blocks) < 2 or workers() < 2 or _here:
        return [function(block) for block in blocks]
    jobs: list[Future[R]] = []
    try:
        for block in blocks[1:]:  # those begun are in it at any time
            jobs.append(_pool(workers()).submit(function, block))
        return [function(blocks[0]), *(job.result() for job in jobs)]
    finally:
        wait([job for job in jobs if not job.cancel()])


def blocks_stay_here() -> None:
    """Compute blocks one after the other from now on, for a process that is one of several at work.

    They are cut as before, so that sums over them are the same to the last bit.
    """
    global _here
    _here = True
