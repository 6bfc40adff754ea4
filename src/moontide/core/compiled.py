"""Fused CPU kernels in Numba (the extra `fast`); numpy does the same where it is missing.

A solve on a CPU is a few large products and many passes over what they give: numpy makes a pass over all rows for each
operation, a compiled loop makes all operations of a row while that is in the cache. They are compiled at their first
use on a machine, which takes seconds, and kept in Numba's cache. NUMBA_DISABLE_JIT=1 switches them off.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import numpy as np

from moontide.core.arrays import Array


def loops_for(x: Array) -> ModuleType | None:
    """Return the kernels, where they can take `x`: float32 in numpy, row by row.

    >>> loops_for(np.zeros((1, 1))) is None
    True
    """
    return _loops() if type(x) is np.ndarray and x.dtype == np.float32 and x.flags.c_contiguous else None


@cache
def _loops() -> ModuleType | None:
    if find_spec("numba") is None:
        return None
    try:
        from numba import config

        if config.DISABLE_JIT:
            return None
        from moontide.core import _numba
    except ImportError as error:  # as where it does not know this numpy
        warnings.warn(f"Numba cannot be used, so that numpy does its work, slower: {error}", UserWarning, stacklevel=2)
        return None
    return _numba
