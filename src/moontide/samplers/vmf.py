"""Draws from the von Mises-Fisher distribution, for simulations and tests.

A. T. A. Wood, "Simulation of the von Mises Fisher distribution", Communications in Statistics 23 (1994), after
G. Ulrich, "Computer generation of distributions on the m-sphere", Applied Statistics 33 (1984).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moontide.core.arrays import as_matrix, to_numpy, unit_rows
from moontide.errors import InputError, OptionError


def _one_minus_cosine(d: int, kappa: float, n: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw v = 1 - w, w = mu . x, for `n` vMF vectors by Wood's rejection; v keeps its digits if w is close to 1."""
    b = (d - 1) / (2 * kappa + math.hypot(2 * kappa, d - 1))
    v0 = 2 * b / (1 + b)  # 1 - x_0
    kept = np.empty(0)
    while kept.size < n:
        size = n - kept.size
        g, h = rng.standard_gamma((d - 1) / 2, (2, size))  # Z = g / (g + h) ~ Beta((d-1)/2, (d-1)/2)
        v = 2 * b * g / (h + b * g)  # w = (1 - (1 + b) Z) / (1 - (1 - b) Z)
        # accept if kappa w + (d - 1) log(1 - x_0 w) - c >= log U, c = kappa x_0 + (d - 1) log(1 - x_0^2)
        excess = kappa * (v0 - v) + (d - 1) * np.log((v0 + v - v0 * v) / (v0 * (2 - v0)))
        kept = np.concatenate([kept, v[excess >= -rng.standard_exponential(size)]])
    return kept


def sample(mu: Any, kappa: float, n: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Draw `n` unit rows from vMF(mu, kappa), as numpy in the dtype of `mu`; `mu` need not be of length 1.

    >>> x = sample([0.0, 0.0, 2.0], 1e4, 1000, np.random.default_rng(0))
    >>> x.shape, x.mean(axis=0).round(3) + 0.0
    ((1000, 3), array([0., 0., 1.]))
    """
    mu = to_numpy(as_matrix(mu, "mu", ndim=1))
    d = mu.shape[0]
    if d < 2:
        raise InputError(f"'mu' must have at least 2 entries, the dimension of the sphere's space. Got {d} instead.")
    if not 0 <= kappa < math.inf:
        raise OptionError(f"'kappa' must be a finite number of at least 0. Got {kappa} instead.")
    if n < 0:
        raise OptionError(f"'n' must be a number of draws of at least 0. Got {n} instead.")
    pole = unit_rows(mu[None, :].astype(np.float64), "mu")[0]  # (d,)
    v = _one_minus_cosine(d, kappa, n, rng)[:, None]  # (n, 1)
    tangent = unit_rows(rng.standard_normal((n, d - 1)))
    sign = -1.0 if pole[0] >= 0 else 1.0
    x = np.concatenate([sign * (1 - v), np.sqrt(v * (2 - v)) * tangent], axis=1)  # around sign * e_1, (n, d)
    # Householder reflection that takes sign * e_1 to mu; the sign makes its axis at least sqrt(2) long
    axis = pole.copy()
    axis[0] -= sign
    x -= (x @ axis)[:, None] * (2 / (axis @ axis)) * axis
    return x.astype(mu.dtype)
