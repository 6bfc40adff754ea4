"""Nearest neighbours of many rows, approximately: an inverted file, all of it matrix products.

The rows are put into lists of about `LIST` by their nearest coarse centre; a row is compared with the members of the
`PROBES` lists nearest to it. Cost grows as N x LIST x PROBES x d, plus N x (N / LIST) x d for finding the lists. How
many of the true neighbours were found is measured on a sample of rows and kept in `Graph.recall`.

J. Sivic and A. Zisserman, "Video Google: A Text Retrieval Approach to Object Matching in Videos", ICCV 2003.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import Array, like, to_numpy, unit_rows
from moontide.core.graph import largest_entries, offer
from moontide.progress import track

LIST = 1000  # rows of a list
PROBES = 8  # lists that a row is compared with
TRAIN = 64  # rows of a list that centres are trained on
ROUNDS = 4  # of k-means
SAMPLE = 512  # rows on which recall is measured
BLOCK_ROWS = 4096

Floats = NDArray[Any]
Ints = NDArray[np.int64]


def inverted_file(features: Floats, m: int, seed: int = 0) -> tuple[Ints, Floats, float]:
    """Return neighbours and weights, (N, m) each, of unit rows, and the recall measured on a sample."""
    n = len(features)
    rng = np.random.default_rng(seed)
    centres = coarse_centres(features, max(1, n // LIST), rng)  # (C, d)
    probes = nearest_lists(features, centres, min(PROBES, len(centres)))  # (N, P), the row's own list first
    neighbours, weights = np.zeros((n, m), np.int64), np.full((n, m), -np.inf, features.dtype)
    members = _grouped(probes[:, 0], np.arange(n), len(centres))
    askers = _grouped(probes.ravel(), np.repeat(np.arange(n), probes.shape[1]), len(centres))
    for c in track(range(len(centres)), "neighbours"):
        candidates = features[members[c]]  # (c, d)
        for start in range(0, len(askers[c]) if len(candidates) else 0, BLOCK_ROWS):
            rows = askers[c][start : start + BLOCK_ROWS]
            similarity = features[rows] @ candidates.T  # (b, c)
            own = np.flatnonzero(probes[rows, 0] == c)
            similarity[own, np.searchsorted(members[c], rows[own])] = -np.inf  # never its own neighbour
            offer(rows, members[c], similarity, neighbours, weights)
    rows = rng.choice(n, min(SAMPLE, n), replace=False)
    recall = share_found(weights[rows], nearest_cosines(features[rows], features, m + 1))
    weights[np.isneginf(weights)] = 0  # where the lists of a row hold fewer than m others: no vote
    return neighbours, weights, recall


def coarse_centres(features: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Return `count` unit centres: spherical k-means on a sample of the rows, (C, d)."""
    sample = features[np.sort(rng.choice(len(features), min(len(features), count * TRAIN), replace=False))]
    centres = sample[rng.choice(len(sample), count, replace=False)]
    for _ in range(ROUNDS if count > 1 else 0):
        own = nearest_lists(sample, centres, 1)[:, 0]
        sums = np.zeros_like(centres)
        np.add.at(sums, own, sample)
        empty = np.bincount(own, minlength=count) == 0
        sums[empty] = sample[rng.choice(len(sample), int(empty.sum()))]
        centres = unit_rows(sums)
    return centres


def nearest_lists(features: Floats, centres: Floats, count: int) -> Ints:
    """Return the numbers of the `count` centres nearest to each row, nearest first, (N, P)."""
    out = np.empty((len(features), count), np.int64)
    for start in range(0, len(features), BLOCK_ROWS):
        near = features[start : start + BLOCK_ROWS] @ centres.T  # (b, C)
        out[start : start + BLOCK_ROWS] = largest_entries(near, count)[0]
    return out


def nearest_cosines(rows: Floats, features: Array, count: int) -> Floats:
    """Return the `count` largest cosines of unit rows (s, d) to `features` (N, d), largest first; -inf: no more."""
    best, asked = np.full((len(rows), count), -np.inf, rows.dtype), like(rows, features)
    for start in range(0, len(features), BLOCK_ROWS):
        near = to_numpy(asked @ features[start : start + BLOCK_ROWS].T)  # (s, b)
        best = np.partition(np.concatenate([best, near], axis=1), -count, axis=1)[:, -count:]
    return np.sort(best, axis=1)[:, ::-1]


def share_found(weights: Floats, cosines: Floats) -> float:
    """Return the share of the true neighbours of some rows that are in a graph, ties counted as found.

    `weights` (s, m) are those of the graph, `cosines` (s, m + 1) the largest there are: the first is of the row itself.
    """
    best = cosines[:, 1:]
    true = np.isfinite(best)  # fewer than m others: all of them
    found = weights >= np.where(true, best, np.inf).min(axis=1, keepdims=True) - 1e-5
    return float(found.sum() / true.sum())


def _grouped(keys: Ints, values: Ints, count: int) -> list[Ints]:
    order = np.argsort(keys, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(keys, minlength=count))[:-1])
