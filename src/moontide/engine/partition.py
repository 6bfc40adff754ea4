"""`--graph global`: rows are put into groups, so that near samples meet in one shard whatever file they are from.

A shared coarse quantiser (centres of spherical k-means on a sample of all rows) gives each row a list; lists are joined
into groups of about equal size by cutting the centres in two again and again, across the direction in which they spread
most. Neighbours are then searched inside a group. What that misses is measured: see `recall`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.ann import SAMPLE, TRAIN, coarse_centres, nearest_lists, share_found

LISTS = 64  # lists of a group
MOST_LISTS = 4096
LEAST_ROWS = 16  # rows of a list, at least

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def quantiser(run: Callable[..., Any], n: int, groups: int) -> tuple[Floats, Ints]:
    """Return the centres (C, d) and the group of each (C,), from a sample of the n rows that `run` reaches."""
    lists = max(groups, min(LISTS * groups, MOST_LISTS, n // LEAST_ROWS))
    found = run("sample", min(1.0, TRAIN * lists / n), 0)
    sample = found.rows[np.lexsort(found.key.T[::-1])]  # in an order that does not depend on the workers
    lists = min(lists, len(sample))
    centres = coarse_centres(sample, lists, np.random.default_rng(0))
    sizes = np.bincount(nearest_lists(sample, centres, 1)[:, 0], minlength=lists)
    return centres, balanced_groups(centres, sizes, groups)


def balanced_groups(centres: Floats, sizes: Ints, groups: int) -> Ints:
    """Join centres that are near into groups with about equal sums of `sizes`, (C,)."""
    out = np.zeros(len(centres), np.int64)

    def cut(which: Ints, first: int, count: int) -> None:
        out[which] = first
        if count == 1 or len(which) < 2:
            return
        around = centres[which] - centres[which].mean(axis=0)
        axis = np.linalg.svd(around, full_matrices=False)[2][0]  # (d,)
        which = which[np.argsort(around @ axis, kind="stable")]
        left = count // 2
        share = np.cumsum(sizes[which]) / max(1, sizes[which].sum())
        at = int(np.clip(np.searchsorted(share, left / count - 1e-9) + 1, 1, len(which) - 1))
        cut(which[:at], first, left)
        cut(which[at:], first + left, count - left)

    cut(np.arange(len(centres)), 0, groups)
    return out


def recall(run: Callable[..., Any], n: int, m: int) -> float | None:
    """Return the share of the m true neighbours among all n rows that the shards' graphs have; None without a graph."""
    if m == 0:
        return None
    sample = run("sample", min(1.0, SAMPLE / n), m)
    return share_found(sample.weights, run("nearest", sample.rows, m + 1).cosines)
