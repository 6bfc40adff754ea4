"""MOON with Gaussians: MOON's dynamic shrinkage on StatA's mixture, "MOON_Gaussian" of the MOON paper's comparison.

J. Huang et al., "Von Mises-Fisher Components Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026, sec. "Comparisons with variants"; StatA: M. Zanella et al., CVPR 2025.

Symbols:  as in `moon` (lambda_k, alpha_k, gamma_i, beta_k, v_k) and in `stata` (Sigma' -> anchor, Sigma_k -> spread)

No program of this variant is published. Here it is the released MOON with only the distribution replaced: the
likelihood and the variances Sigma', T_k, Sigma_k are StatA's, with T_k weighted by gamma_i z_ik like v_k. All else is
MOON's: alpha_k = 1 / lambda_k with the normalised geometric confidence, gamma_i from z_i, hard counts without gamma,
mu_k = normalise(beta_k v_k + (1 - beta_k) t_k) where v_k keeps its length (StatA scales it to unit length first), one
update of the assignments per E-step, and a likelihood divided by 50.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moontide.core import formulas
from moontide.core.arrays import Array, namespace, unit_rows
from moontide.core.ple import EPS, anchor_weights, class_confidence, sample_weights, shrink
from moontide.core.simplex import log_softmax
from moontide.methods._alternation import Components, Smoothed, counted
from moontide.methods._gaussian import (
    anchored_variance,
    class_variance,
    class_weights,
    log_density,
    pooled_variance,
    row_weights,
    weighted_moments,
)
from moontide.options import option
from moontide.types import Result, Task


@dataclass(frozen=True)
class MOONGaussian(Smoothed):
    """Transduction with Gaussians that are shrunk towards the text, less so in confident classes.

    >>> import numpy as np
    >>> features = np.asarray([[1.0, 0.1, 0.5], [0.9, 0.2, 0.5], [0.2, 0.9, 0.5]])
    >>> MOONGaussian().fit_predict(features, np.eye(3)).labels
    array([0, 0, 1])
    """

    citation: ClassVar[str] = "Huang et al., ICML 2026"

    beta: str = option("hard", "counts in beta_k: argmax labels or soft assignments", choices=("hard", "soft"))

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        f, text = task.features, task.text
        log_y = log_softmax(task.logit_scale * (f @ text.T))  # (N, K)
        y = xp.exp(log_y)  # (N, K)
        centre = xp.mean(f, axis=0)  # (d,)
        around = f - centre  # (N, d)
        anchor = pooled_variance(*weighted_moments(y, around, row_weights(f, faithful=False)), text - centre)  # (1, d)
        alpha = anchor_weights(class_confidence(xp.mean(y, axis=0), xp.max(y, axis=0)))  # (K,)

        def m_step(log_z: Array) -> Components:
            z = xp.exp(log_z)  # (N, K)
            gamma = sample_weights(z)  # (N,)
            beta = formulas.shrinkage(counted(z, gamma, self.beta), alpha)  # (K,)
            weights = class_weights(log_z + xp.log(gamma + EPS)[:, None])  # (K, N)
            v = weights @ f  # v_k = sum_i gamma_i z_ik f_i / sum_i gamma_i z_ik, (K, d)
            mu = unit_rows(shrink(v, beta, text))  # mu_k = beta_k v_k + (1 - beta_k) t_k, (K, d)
            squares = weights @ around**2  # (K, d)
            variance = class_variance(squares, v - centre, mu - centre)  # (K, d)
            spread = anchored_variance(variance, beta, text - mu, anchor)  # (K, d)
            return Components(mu, spread, beta)

        return self._alternate(
            task,
            log_y,
            Components(text, anchor, xp.zeros_like(alpha)),
            lambda classes: log_density(f, classes.mu, classes.spread),
            m_step,
        )
