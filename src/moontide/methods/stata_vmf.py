"""StatA with a von Mises-Fisher mixture, "StatA_vMF" of the MOON paper's comparison.

J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026, sec. "Comparisons with variants"; StatA: M. Zanella et al., CVPR 2025.

Symbols:  as in `moon` (kappa'_k -> anchor_kappa, mu_k, kappa_k, v_k, R_k -> resultant) and in `stata` (log_y, log_z)

No program of this variant is published. Here it is StatA with only the distribution replaced: one constant alpha for
all classes, no gamma_i, and five updates of the assignments per E-step. The likelihood, kappa' and the M-step
R_k = beta_k v_k + (1 - beta_k) t_k, mu_k = R_k / |R_k|, kappa_k = A_d^{-1}(|R_k|) are those of the released MOON, with
its caps and its large-kappa normaliser. v_k keeps its length, without which kappa_k would have no meaning;
`unit_means` scales it to unit length, as StatA does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from moontide.core import formulas
from moontide.core.arrays import Array, namespace, unit_rows
from moontide.core.mixture import First
from moontide.core.ple import (
    concentration,
    initial_resultant,
    log_c,
    means,
    shrink,
    weighted_sums,
)
from moontide.core.simplex import log_softmax
from moontide.methods._alternation import Anchored, Components, counted
from moontide.options import option
from moontide.types import Result, Task

COUNT_EPSILON = 1e-10  # added to soft counts where they divide, as in the released MOON


@dataclass(frozen=True)
class StatAvMF(Anchored):
    """Transduction with class directions that are shrunk towards text by one weight alpha for all classes.

    >>> import numpy as np
    >>> features = np.asarray([[1.0, 0.1, 0.5], [0.9, 0.2, 0.5], [0.2, 0.9, 0.5]])
    >>> StatAvMF().fit_predict(features, np.eye(3)).labels
    array([0, 0, 1])
    """

    citation: ClassVar[str] = "Huang et al., ICML 2026"

    unit_means: bool = option(False, "scale v_k to unit length before it is shrunk, as StatA does")
    kappa_cap: float = option(500.0, "largest re-estimated kappa (inf: none)", above=0, high=math.inf)
    r_cap: float = option(0.999, "largest mean resultant length (1: none)", above=0, high=1)

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        f, text, d = task.features, task.text, task.d
        cosine = f @ text.T  # (N, K)
        log_y = log_softmax(task.logit_scale * cosine)  # (N, K)
        y = First.of(xp.exp(log_y), cosine)
        anchor_r = initial_resultant(y.total, y.along, COUNT_EPSILON)  # (K,)
        ones = xp.ones_like(log_y[:, 0])  # (N,)
        anchor_kappa = concentration(anchor_r, d, "banerjee", self.r_cap)  # (K,)

        def log_likelihood(classes: Components) -> Array:
            kappa = classes.spread  # (K,)
            return f @ (kappa[:, None] * classes.mu).T + log_c(d, kappa, "asymptotic")  # (N, K)

        def m_step(log_z: Array) -> Components:
            z = xp.exp(log_z)  # (N, K)
            beta = formulas.shrinkage(counted(z, ones, self.beta), self.alpha)  # (K,)
            v = means(*weighted_sums(z, ones, f), COUNT_EPSILON)  # (K, d)
            resultant = shrink(unit_rows(v) if self.unit_means else v, beta, text)  # (K, d)
            r = xp.linalg.vector_norm(resultant, axis=1)  # (K,)
            kappa = xp.clip(concentration(r, d, "banerjee", self.r_cap), max=self.kappa_cap)  # (K,)
            return Components(unit_rows(resultant), kappa, beta)

        result = self._alternate(
            task,
            log_y,
            Components(text, anchor_kappa, xp.zeros_like(anchor_kappa)),
            log_likelihood,
            m_step,
            self.inner_iterations,
        )
        return replace(result, kappa=result.details["spread"])
