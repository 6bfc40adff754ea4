"""`--graph global`: rows are put into groups, so that near samples meet in one shard whatever file they are from.

A shared coarse quantiser (centres of spherical k-means on a sample of all rows) gives each row a list; lists are joined
into groups of about equal size by cutting the centres in two again and again, across the direction in which they spread
most. Neighbours are then searched inside a group. What that misses is measured: see `recall`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moontide.core.graph import SAMPLE, TRAIN, Floats, Ints, coarse_centres, nearest_lists, share_found

LISTS = 64  # lists of a group
MOST_LISTS = 4096
LEAST_ROWS = 16  # rows of a list, at least


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
    n = len(centres)
    if groups == 1 or n < 2:
        return np.zeros(n, np.int64)
    around = centres - centres.mean(axis=0)
    axis = np.linalg.svd(around, full_matrices=False)[2][0]  # (d,), in which they spread most
    order = np.argsort(around @ axis, kind="stable")
    left = groups // 2
    share = np.cumsum(sizes[order]) / max(1, sizes.sum())
    at = int(np.clip(np.searchsorted(share, left / groups - 1e-9) + 1, 1, n - 1))
    out, (one, other) = np.empty(n, np.int64), np.split(order, [at])
    out[one] = balanced_groups(centres[one], sizes[one], left)
    out[other] = left + balanced_groups(centres[other], sizes[other], groups - left)
    return out


def recall(run: Callable[..., Any], n: int, m: int) -> float | None:
    """Return the share of the m true neighbours among all n rows that the shards' graphs have; None without a graph."""
    if m == 0:
        return None
    sample = run("sample", min(1.0, SAMPLE / n), m)
    return share_found(sample.weights, run("nearest", sample.rows, m + 1).cosines)
