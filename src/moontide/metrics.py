"""Metrics that compare predictions with labels. Only this module and `evaluate.py` see labels."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.errors import InputError

IntArray = npt.NDArray[np.int64]
BLOCK = 2**22  # weights of bootstrap draws that are held at once


def check_labels(labels: Any, n: int, k: int) -> IntArray:
    """Check that there is one class number from 0 to K - 1 for each of the N samples.

    >>> check_labels([0, 1], 2, 2)
    array([0, 1])
    >>> check_labels([0, 7], 2, 2)
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'labels' must be class numbers from 0 to 1. Got 7 in row 1.
    """
    y: npt.NDArray[Any] = np.asarray(labels)
    if y.shape != (n,):
        hint = "; are image and text features swapped?" if y.shape == (k,) else "."
        raise InputError(f"'labels' must have one entry for each of the {n} samples. Got shape {y.shape} instead{hint}")
    if not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"'labels' must be integers, the class numbers from 0. Got dtype {y.dtype} instead.")
    bad = np.flatnonzero((y < 0) | (y >= k))
    if bad.size:
        more = f" (and {bad.size - 1} more)" if bad.size > 1 else ""
        hint = " They seem to count from 1: subtract 1." if y.min() == 1 and y.max() == k else ""
        raise InputError(
            f"'labels' must be class numbers from 0 to {k - 1}. Got {y[bad[0]]} in row {bad[0]}{more}.{hint}"
        )
    return y.astype(np.int64)


def accuracy(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> float:
    """Return the share of predictions that equal the labels, from 0 to 1.

    >>> accuracy([0, 1, 2, 2], [0, 1, 2, 0])
    0.75
    """
    labels, predictions = np.asarray(labels), np.asarray(predictions)
    if labels.shape != predictions.shape or labels.size == 0:
        raise InputError(
            "'labels' and 'predictions' must have the same shape and at least one entry. "
            f"Got {labels.shape} and {predictions.shape} instead."
        )
    return float(np.mean(labels == predictions))


def reliability(
    labels: npt.ArrayLike, predictions: npt.ArrayLike, confidence: npt.ArrayLike, bins: int = 15
) -> npt.NDArray[np.float64]:
    """Return mean confidence, accuracy and number of samples, (B, 3), of the equal-width bins (b/B, (b+1)/B].

    The first two are 0 in a bin without samples.

    >>> reliability([0, 1, 1, 1], [0, 1, 0, 1], [0.4, 0.8, 0.8, 1.0], bins=2).round(9)
    array([[0.4       , 1.        , 1.        ],
           [0.86666667, 0.66666667, 3.        ]])
    """
    confidence = np.asarray(confidence, dtype=np.float64)
    hit = np.equal(labels, predictions).astype(np.float64)
    if hit.shape != confidence.shape or hit.size == 0:
        raise InputError(
            "'labels', 'predictions' and 'confidence' must have the same length and at least one entry. "
            f"Got {hit.shape} labels and {confidence.shape} confidences instead."
        )
    where = np.searchsorted(np.arange(1, bins) / bins, confidence)  # the bin of each sample
    counts = np.bincount(where, minlength=bins)
    sums = [np.bincount(where, values, minlength=bins) for values in (confidence, hit)]
    return np.stack([*(total / np.maximum(counts, 1) for total in sums), counts.astype(np.float64)], axis=1)


def expected_calibration_error(
    labels: npt.ArrayLike, predictions: npt.ArrayLike, confidence: npt.ArrayLike, bins: int = 15
) -> float:
    """Return the top-label ECE: sum over equal-width bins (b/B, (b+1)/B] of |accuracy - mean confidence| n_bin / N.

    >>> round(expected_calibration_error([0, 1, 1, 1], [0, 1, 0, 1], [0.9, 0.9, 0.9, 0.9]), 9)
    0.15
    """
    sure, right, counts = reliability(labels, predictions, confidence, bins).T
    return float(np.abs(right - sure) @ counts / counts.sum())


def calibration_gaps(hit: npt.ArrayLike, confidence: npt.ArrayLike, bins: int = 15) -> npt.NDArray[np.float64]:
    """Return hits minus confidences, summed in each bin, (B,); these sums can be added over batches.

    The ECE of all samples is the sum of the absolute values of these sums, divided by the number of samples. The mean
    of the ECEs of small batches is larger, because hits and confidence always differ in a bin with few samples.

    >>> float(calibration_gaps([True, False], [0.9, 0.8], bins=1).round(9)[0])
    -0.7
    """
    sure, right, counts = reliability(np.asarray(hit, dtype=bool), True, confidence, bins).T
    return np.asarray((right - sure) * counts)


def tail_accuracy(accuracies: npt.ArrayLike, share: float = 0.1) -> float:
    """Return the expected tail accuracy: the mean of the worst `share` of the runs (at least one, rounded up).

    >>> tail_accuracy([0.5, 0.7, *[0.9] * 18])
    0.6
    """
    values = np.sort(np.asarray(accuracies, dtype=np.float64).ravel())
    if values.size == 0 or not 0 < share <= 1:
        raise InputError(
            f"'accuracies' must not be empty and 'share' must be above 0 and at most 1. "
            f"Got {values.size} runs and share {share} instead."
        )
    worst = max(1, math.ceil(round(share * values.size, 9)))
    return float(values[:worst].mean())


def bootstrap_interval(
    values: npt.ArrayLike, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean of `values`.

    >>> low, high = bootstrap_interval([0.6, 0.7, 0.8, 0.9])
    >>> 0.6 <= low < 0.75 < high <= 0.9
    True
    """
    x = np.asarray(values, dtype=np.float64).ravel()
    if x.size == 0 or not 0 < level < 1 or draws < 1:
        raise InputError(
            "'values' must not be empty, 'level' must lie between 0 and 1, and 'draws' must be at least 1. "
            f"Got {x.size} values, level {level} and {draws} draws instead."
        )
    size = max(1, BLOCK // x.size)
    means = [resamples(x.size, min(size, draws - i), seed + i) @ x for i in range(0, draws, size)]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@lru_cache(maxsize=16)
def resamples(n: int, draws: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Return the weights of n values in each bootstrap draw, (draws, n); they depend on n only, so draws are paired.

    >>> resamples(4, 9).shape, bool(np.allclose(resamples(4, 9).sum(axis=1), 1))
    ((9, 4), True)
    """
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws) / n
