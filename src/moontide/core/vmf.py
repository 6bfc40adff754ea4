"""The von Mises-Fisher distribution on the unit sphere of R^d: normaliser and Kullback-Leibler divergence.

    p(x; mu, kappa) = C_d(kappa) exp(kappa mu . x)      Eq. likelihood
    C_d(kappa) -> log_normaliser    A_d(kappa) -> bessel.bessel_ratio    KL(V_p || V_q) -> kl (app. "Derivation of KL")

`log_normaliser` and `kl` take numpy or torch arrays, compute in float64 and return the dtype they were given. They rest
on `bessel.bessel`, which says how I_nu is computed. Measured against mpmath for d = 2 ... 2048 and kappa = 0 ... 1e8
(tests/core/test_vmf.py): log C_d to 4e-14 max(1, |log C_d|) and KL to 1e-11 max(1, KL).

Equations as in "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction".
"""

from __future__ import annotations

import math
from typing import Any

from moontide.core.arrays import Array, like
from moontide.core.bessel import bessel, widen


def log_normaliser(d: int, kappa: Any) -> Array:
    """Log C_d(kappa) = nu log kappa - d/2 log(2 pi) - log I_nu(kappa), nu = d/2 - 1; at 0, minus log the sphere's area.

    >>> import numpy as np
    >>> np.exp(-log_normaliser(3, np.asarray([0.0, 1.0]))) / math.pi  # 4 and 4 sinh(1)
    array([4.        , 4.70080477])
    """
    xp, x, dtype = widen(kappa)
    return xp.astype(-(bessel(d, x).log_i + x + d / 2 * math.log(2 * math.pi)), dtype)


def kl(d: int, mu_p: Array, kappa_p: Any, mu_q: Array, kappa_q: Any) -> Array:
    """KL(V_p || V_q) of vMF distributions with directions (..., d) and concentrations (...), in the dtype of `mu_p`.

    The paper's log(C_d(kappa_p) / C_d(kappa_q)) + kappa_p A_d(kappa_p) - kappa_q A_d(kappa_p) mu_q . mu_p, as a sum
    of two parts that are never negative: one is 0 for equal kappa, one for equal mu, and neither subtracts large terms.

    >>> import numpy as np
    >>> mu = np.eye(3)[:2]
    >>> kl(3, mu, [10.0, 10.0], mu[:1], [10.0, 10.0]).round(6)
    array([0., 9.])
    """
    xp, mu_p, dtype = widen(mu_p)
    mu_q, kappa_p, kappa_q = (like(a, mu_p) for a in (mu_q, kappa_p, kappa_q))
    p, q = bessel(d, kappa_p), bessel(d, kappa_q)
    # log(C_d(kappa_p) / C_d(kappa_q)) - A_d(kappa_p) (kappa_q - kappa_p), where log C_d = -kappa - log_i + constant
    spread = q.log_i - p.log_i + p.one_minus_a * (kappa_q - kappa_p)  # (...)
    turn = xp.sum((mu_p - mu_q) ** 2, axis=-1) / 2  # 1 - mu_p . mu_q, (...)
    return xp.astype(xp.clip(spread, min=0.0) + kappa_q * (kappa_p * p.a_by_x) * turn, dtype)
