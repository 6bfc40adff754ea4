"""StatA: a Gaussian mixture whose classes are anchored to the statistics of their text.

M. Zanella, C. Fuchs, C. De Vleeschouwer, I. Ben Ayed, "Realistic Test-Time Adaptation of Vision-Language Models",
CVPR 2025. Equations as in the MOON paper, app. "Revisiting StatA".

Symbols:  f_i -> features[i]   t_k = mu'_k -> text[k]   Sigma' -> anchor   log y_ik -> log_y   log z_ik -> log_z
          v_k -> v   T_k -> class_variance   beta_k -> beta   mu_k -> mu   Sigma_k -> spread   omega_ij -> graph
          tau -> 1 / task.logit_scale   m -> neighbours   T -> iterations

The defaults are the published program, which made the numbers of both papers. Beyond the equations it divides the
log-likelihood by 50 (`temper`) and the Laplacian by 2m, repeats the assignment 5 times with one likelihood
(`inner_iterations`), scales v_k and then mu_k to unit length, and has one more E-step after the last M-step.

For more than 2500 samples that program gets Sigma' wrong (see `core.gaussian.row_weights`). The equation is followed
here for any N; `faithful=True` repeats the defect, and changes nothing up to 2500 samples. Where the program gives NaN,
in float32 for a class whose z_ik all underflow or a dimension without variance, nothing does here: class means are
formed from log z, and variances have a floor of 1e-6 / d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from moontide.core.arrays import Array, namespace, unit_rows
from moontide.core.gaussian import anchored_variance, class_weights, log_density, pooled_variance
from moontide.core.ple import shrink, shrinkage
from moontide.core.simplex import log_softmax, softmax, softmax_evidence_
from moontide.core.smoothing import NEIGHBOURS, smoother
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task


@dataclass(frozen=True)
class StatA(Method):
    """Transduction with class means and variances that are shrunk towards text by one weight alpha for all classes.

    >>> import numpy as np
    >>> features = np.asarray([[1.0, 0.1, 0.5], [0.9, 0.2, 0.5], [0.2, 0.9, 0.5]])
    >>> result = StatA().fit_predict(features, np.eye(3))
    >>> result.labels, result.beta.round(2)
    (array([0, 0, 1]), array([0.67, 0.5 , 0.  ]))
    """

    citation: ClassVar[str] = "Zanella et al., CVPR 2025"

    beta: str = option("hard", "counts in beta_k: argmax labels or soft assignments", choices=("hard", "soft"))
    alpha: float = option(1.0, "anchor weight, the same for all classes", low=0)
    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    neighbours: int = option(NEIGHBOURS, "m, neighbours of a sample in the graph", low=1)
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    iterations: int = option(10, "T, M-steps; an E-step is before each and after the last", low=1)
    inner_iterations: int = option(5, "updates of the assignments in an E-step", low=1)
    faithful: bool = option(False, "above 2500 samples, repeat the published program's error in the anchor variance")

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Name the options that the others switch off."""
        if self.laplacian_weight == 0:
            yield ("neighbours", "inner_iterations"), "with laplacian_weight=0"

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        f, text = task.features, task.text
        log_y = log_softmax(task.logit_scale * (f @ text.T))  # (N, K)
        anchor = pooled_variance(xp.exp(log_y), f, text, self.faithful)  # (1, d)
        ones = xp.ones_like(log_y[:, 0])  # (N,)

        def m_step(log_z: Array) -> Mixture:
            beta = shrinkage(xp.exp(log_z), ones, xp.argmax(log_z, axis=1), self.alpha, self.beta, False)  # (K,)
            weights = class_weights(log_z)  # (K, N)
            v = weights @ f  # v_k = sum_i z_ik f_i / sum_i z_ik, (K, d)
            mu = unit_rows(shrink(unit_rows(v), beta, text))  # mu_k = beta_k v_k + (1 - beta_k) t_k, (K, d)
            return Mixture(mu, anchored_variance(weights, f, v, mu, beta, text, anchor), beta)

        return alternate(
            log_y,
            Mixture(text, anchor, xp.zeros_like(text[:, 0])),
            lambda mixture: log_density(f, mixture.mu, mixture.spread),
            m_step,
            smoother(task, self.name, self.neighbours, self.laplacian_weight)[1],
            text_weight=self.text_weight,
            temper=self.temper,
            iterations=self.iterations,
            inner_iterations=self.inner_iterations,
        )


class Mixture(NamedTuple):
    """The parameters of a mixture between two E-steps.

    >>> Mixture(mu=[[1.0, 0.0]], spread=[[0.1, 0.1]], beta=[0.5]).beta
    [0.5]
    """

    mu: Array  # (K, d)
    spread: Array  # variances (K, d), or (1, d) for all classes; in a von Mises-Fisher mixture concentrations (K,)
    beta: Array  # (K,) share of the batch in each mean


def alternate(
    log_y: Array,
    mixture: Mixture,
    log_likelihood: Callable[[Mixture], Array],
    m_step: Callable[[Array], Mixture],
    votes_of: Callable[[Array], Array],
    *,
    text_weight: float,
    temper: float,
    iterations: int,
    inner_iterations: int,
) -> Result:
    """Run `iterations` M-steps, an E-step before each and after the last, from the zero-shot log y and a mixture.

    `log_likelihood` gives log p_ik of a mixture as a new array (N, K), which is overwritten; `m_step` takes log z.

    >>> import numpy as np
    >>> log_y, start = np.log([[0.5, 0.5]]), Mixture(0, np.asarray([[0.0, 1.0]]), 0)
    >>> still = dict(text_weight=1.0, temper=1.0, iterations=1, inner_iterations=1)
    >>> result = alternate(log_y, start, lambda m: 1 * m.spread, lambda log_z: start, np.zeros_like, **still)
    >>> result.probs.round(3)
    array([[0.269, 0.731]])
    """
    xp = namespace(log_y)

    def e_step(log_z: Array) -> Array:
        scores = log_likelihood(mixture)  # (N, K)
        scores /= temper
        scores += text_weight * log_y
        return assignments(scores, votes_of, log_z, inner_iterations)

    log_z = e_step(log_y)  # (N, K)
    for _ in range(iterations):
        before = xp.argmax(log_z, axis=1)  # (N,)
        mixture = m_step(log_z)
        log_z = e_step(log_z)
    return Result(
        probs=softmax(log_z),
        zero_shot=xp.exp(log_y),
        n_iter=iterations,
        converged=bool(xp.all(before == xp.argmax(log_z, axis=1))),
        beta=mixture.beta,
        details={"mu": mixture.mu, "spread": mixture.spread},
    )


def assignments(scores: Array, votes_of: Callable[[Array], Array], log_z: Array, inner_iterations: int) -> Array:
    """Eq. update-z, repeated with the same scores = log prior + log p / temper: log z = scores + votes(z), normalised.

    >>> import numpy as np
    >>> np.exp(assignments(np.log([[0.1, 0.3]]), np.zeros_like, np.zeros((1, 2)), 5)).round(3)
    array([[0.25, 0.75]])
    """
    logits = log_z
    for it in range(inner_iterations):
        z = softmax_evidence_(logits)[0] if it else softmax(logits)  # (N, K)
        logits = votes_of(z)
        logits += scores
    return log_softmax(logits)
