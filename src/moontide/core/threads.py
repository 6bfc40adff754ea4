"""Work on blocks of rows in threads: numpy lets other threads run while it computes.

The number of threads is OMP_NUM_THREADS where that is set, else the cores this process may use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def workers() -> int:
    """Return how many threads to use.

    >>> workers() >= 1
    True
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(wanted)) if wanted.isdigit() else cores


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="moontide")


def in_threads(function: Callable[[T], R], blocks: Sequence[T]) -> list[R]:
    """Return [function(b) for b in blocks], computed in threads where there are several of both.

    >>> in_threads(lambda x: x + 1, [1, 2])
    [2, 3]
    """
    if len(blocks) < 2 or workers() < 2:
        return [function(block) for block in blocks]
    return list(_pool(workers()).map(function, blocks))
