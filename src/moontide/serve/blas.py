"""The threads of OpenBLAS, which a server does without."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def products_stay_here() -> list[int]:
    """Let each OpenBLAS of this process compute on the thread that calls it; returns the numbers of its threads so far.

    Its own threads spin while they wait for more, which takes the cores from every other thread of a server.
    OPENBLAS_NUM_THREADS, where it is set, is left to its user; on systems without /proc nothing is found.
    """
    maps, before = Path("/proc/self/maps"), []
    if "OPENBLAS_NUM_THREADS" in os.environ or not maps.exists():
        return []
    for path in {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "openblas" in line.lower()}:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_{}64_", "scipy_openblas_{}", "openblas_{}64_", "openblas_{}"):
            if hasattr(library, name.format("set_num_threads")):
                before.append(int(getattr(library, name.format("get_num_threads"))()))
                getattr(library, name.format("set_num_threads"))(1)
                break
    return before
