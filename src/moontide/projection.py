"""Rows in the plane in which they differ most: the map of a stream, and where the t-SNE map of a report begins."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import unit_rows
from moontide.memory import require_memory

DENSE = 512  # rows or columns up to which the map is made from all axes

Floats = npt.NDArray[np.float32]


def principal_plane(x: Floats) -> npt.NDArray[np.float64]:
    """Return the first two principal components of the rows x (n, d) at unit length, (n, 2).

    The largest entry of an axis is positive, so that the same rows lie the same way every time.

    >>> principal_plane(np.asarray([[1, 0], [1, 0], [0.6, 0.8]], np.float32))[:, 0].round(2)
    array([-0.3, -0.3,  0.6])
    """
    n, d = x.shape
    require_memory(4 * 8 * n * d, f"The map of {n} samples", x)
    x = unit_rows(x).astype(np.float64)
    x = x - x.mean(axis=0)
    if min(n, d) > DENSE:  # by products with a few vectors (randomised subspace iteration)
        axes = np.random.default_rng(0).normal(size=(d, 16))
        for _ in range(8):
            axes = np.linalg.qr(x.T @ np.linalg.qr(x @ axes)[0])[0]  # (d, 16)
        axes = axes @ np.linalg.svd(x @ axes, full_matrices=False)[2].T
    elif d <= n:
        axes = np.linalg.eigh(x.T @ x)[1][:, ::-1]
    else:
        axes = x.T @ np.linalg.eigh(x @ x.T)[1][:, ::-1][:, :2]
        axes = axes / np.maximum(np.linalg.norm(axes, axis=0), 1e-12)
    axes = np.pad(axes[:, :2], ((0, 0), (0, max(0, 2 - axes.shape[1]))))  # (d, 2); one axis: the other is 0
    largest = np.abs(axes).argmax(axis=0)
    flat: npt.NDArray[np.float64] = x @ (axes * np.where(axes[largest, [0, 1]] < 0, -1, 1))
    return flat
