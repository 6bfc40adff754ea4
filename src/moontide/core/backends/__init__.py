"""Three implementations of the same equations; one of them is chosen once for each task.

- `plain`    array API: numpy and torch, float32 and float64, any device; the equations of `core.ple` as they stand.
- `loops`    Numba on a CPU, float32 in numpy (the extra `fast`): compiled loops over rows and products.
- `kernels`  Triton on a GPU, float32: fused kernels, and a run that repeats is replayed as one CUDA graph.

Each has `Rows`, the samples of MOON (`first`, `step`, `finish`), `m_step` and `run`; those of TIDE are in `tide_plain`,
`tide_loops` and `tide_kernels`.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np

from moontide.core.arrays import Array, is_torch_array

MAX_CLASSES = 16384  # a row of K logits is held in the registers of a GPU


def choose(features: Array, k: int, family: str = "", plain: bool = False) -> ModuleType:
    """Return the backend for features (N, d) and k classes: of MOON, or of the `family` "tide_"; `plain` asks for it.

    >>> choose(np.zeros((1, 2)), 3).__name__
    'moontide.core.backends.plain'
    """
    kind = "kernels" if fused(features) and k <= MAX_CLASSES else "loops" if compiled(features) else "plain"
    return import_module(f"{__name__}.{family}{'plain' if plain else kind}")


def fused(x: Array) -> bool:
    """Tell whether Triton can take `x`: float32 on a CUDA device, or any float32 tensor in Triton's interpreter."""
    if not is_torch_array(x) or find_spec("triton") is None or x.element_size() > 4:
        return False
    return x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def compiled(x: Array) -> ModuleType | None:
    """Return the loops of Numba if they can take `x`: float32 in numpy, row by row; NUMBA_DISABLE_JIT=1: never.

    They are compiled at their first use on a machine, which takes seconds, and kept in Numba's cache.
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
        from moontide.core.backends import _numba
    except ImportError as error:  # as where it does not know this numpy
        warnings.warn(f"Numba cannot be used, so that numpy does its work, slower: {error}", UserWarning, stacklevel=2)
        return None
    return _numba
