"""Uncertainty of a mean over runs, and whether two methods differ on the same runs. All draws are seeded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moontide.metrics import resamples

Floats = npt.NDArray[np.float64]

BOOTSTRAP, FLIPS, SEED = 2000, 10_000, 0
_BLOCK = 2**24  # signs held at once


def half_width(*values: Floats) -> float | None:
    """Return half the 95 % percentile bootstrap interval of the mean (over datasets) of means (over runs).

    A dataset with one run counts as a constant; if all have one run, there is no interval.

    >>> half_width(np.asarray([0.5, 0.7] * 50)) < 0.03, half_width(np.asarray([0.5]))
    (True, None)
    """
    if max(map(len, values)) < 2:
        return None
    draws = np.mean([resamples(len(v), BOOTSTRAP, SEED) @ v for v in values], axis=0)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(high - low) / 2


def sign_flip_p(*differences: Floats) -> float | None:
    """Return the two-sided p-value that paired differences, one array per dataset, have mean zero.

    The sign-flip permutation test: if neither method were better, every difference could have had the other sign. The
    p-value is the share of FLIPS random sign patterns, and the observed one, whose mean (over datasets) of means (over
    runs) is at least as far from zero as observed.

    >>> sign_flip_p(np.full(20, 0.1)) < 0.001, sign_flip_p(np.asarray([0.1, -0.1] * 10)), sign_flip_p(np.ones(1))
    (True, 1.0, None)
    """
    weighted = np.concatenate([d / (len(d) * len(differences)) for d in differences])
    if weighted.size < 2:
        return None
    rng = np.random.default_rng(SEED)
    observed = abs(weighted.sum())
    step = max(1, _BLOCK // weighted.size)
    far = 0
    for start in range(0, FLIPS, step):
        rows = min(step, FLIPS - start)
        signs = 2.0 * rng.integers(2, size=(rows, weighted.size), dtype=np.int8) - 1
        far += int(np.sum(np.abs(signs @ weighted) >= observed * (1 - 1e-12)))
    return (1 + far) / (1 + FLIPS)
