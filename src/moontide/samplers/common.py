"""Shared by both samplers: labels as an array, the long tail, checks of parameters, the generator of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moontide.errors import InputError, OptionError

Indices = NDArray[np.int64]


def rng_for(suite: str, dataset: str, scenario: str, run: int) -> np.random.Generator:
    """Return the generator of one run: the same four words give the same draws in every process and on every machine.

    The seed is the SHA-256 of the words, so runs can be done in any order, alone or in parallel. numpy may change how
    a generator turns bits into draws from one release to the next; records of results keep its version.

    >>> first, again, other = (rng_for("paper", "dtd", "low", run).random() for run in (0, 0, 1))
    >>> first == again, first == other
    (True, False)
    """
    words = json.dumps([suite, dataset, scenario, int(run)])
    return np.random.default_rng(int.from_bytes(hashlib.sha256(words.encode()).digest(), "big"))


def as_labels(labels: ArrayLike) -> NDArray[np.integer]:
    """Return `labels` as a one-dimensional array of whole numbers, at least one.

    >>> as_labels([2, 0, 1]).tolist()
    [2, 0, 1]
    """
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise InputError(
            f"'labels' must be a non-empty one-dimensional array of whole numbers, one per sample. "
            f"Got shape {array.shape} of type {array.dtype}; pass the class index of every sample."
        )
    return array


def check_count(name: str, value: object, others: str = "") -> None:
    """Refuse a parameter that is not a whole number of at least 1; `others` lists other valid values for the error.

    >>> check_count("batch_size", 0)
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: 'batch_size' must be a whole number of at least 1. Got 0 instead.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise OptionError(f"'{name}' must be a whole number of at least 1{others}. Got {value!r} instead.")


def check_imbalance(value: float | None) -> None:
    """Refuse an `imbalance` that is neither None nor a finite number of at least 1.

    >>> check_imbalance(0.5)
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: 'imbalance' must be a number of at least 1, or None. Got 0.5 instead.
    """
    if value is not None and not (isinstance(value, int | float | np.floating) and 1 <= value < np.inf):
        raise OptionError(f"'imbalance' must be a number of at least 1, or None. Got {value!r} instead.")


def long_tailed_counts(sizes: Sequence[int], imbalance: float, total: int | None = None) -> Indices:
    """Return how many samples to take of each class, so that frequencies decay from the first class to the last.

    Class r of k gets c * imbalance^(-r / (k - 1)) samples: the first has `imbalance` times as many as the last. The
    scale c is the largest for which the total is at most `total` and no class needs more samples than it has, so that
    the shape is kept. Counts are rounded down, then those with the largest remainders up.

    >>> long_tailed_counts([50, 50, 50], imbalance=4, total=35).tolist()
    [20, 10, 5]
    >>> long_tailed_counts([50, 8, 50], imbalance=4).tolist()
    [16, 8, 4]
    """
    ranks = np.arange(len(sizes)) / max(len(sizes) - 1, 1)
    shape = float(imbalance) ** -ranks  # (k,) from 1 down to 1 / imbalance
    scale = float(np.min(np.asarray(sizes) / shape))
    if total is not None:
        scale = min(scale, total / float(np.sum(shape)))
    exact = scale * shape
    counts = np.floor(exact).astype(np.int64)
    left = int(np.sum(exact) + 1e-9) - int(np.sum(counts))
    counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
    return np.minimum(counts, sizes)


def long_tailed(
    labels: NDArray[np.integer], classes: Indices, imbalance: float, total: int | None, rng: np.random.Generator
) -> Indices:
    """Return indices of a long-tailed subset of `classes`, larger classes more frequent, ties in the order given.

    >>> labels = np.repeat([0, 1, 2], [50, 50, 60])
    >>> kept = long_tailed(labels, np.array([1, 0, 2]), 4, 35, np.random.default_rng(0))
    >>> np.bincount(labels[kept]).tolist()
    [5, 10, 20]
    """
    members = sorted((np.flatnonzero(labels == c) for c in classes), key=len, reverse=True)  # stable
    counts = long_tailed_counts([len(m) for m in members], imbalance, total)
    return np.concatenate([rng.choice(m, n, replace=False) for m, n in zip(members, counts, strict=True)])
