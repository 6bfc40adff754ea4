"""MOON: mixture of von Mises-Fisher models with dynamic shrinkage.

J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026.

Symbols:  f_i -> features[i]   t_k = mu'_k -> text[k] (the anchor)   y_ik -> zero_shot[i, k]   z_ik -> z[i, k]
          kappa'_k -> anchor_kappa   A_d(kappa'_k) -> anchor_r   mu_k, kappa_k -> mu, kappa   v_k, R_k -> v, resultant
          lambda_k -> confidence   alpha_k -> alpha   gamma_i -> gamma   beta_k -> beta   omega_ij -> graph
          tau -> 1 / task.logit_scale   m -> neighbours   T -> iterations

The defaults are the released solver, which made the paper's numbers; the preset "paper" is what the paper writes.
They differ in: `temper` (the released likelihood is divided by 50, its Laplacian by 2m), `normalise_confidence`,
`update`, `gamma_in_counts`, `graph`, `kappa_cap`, `r_cap`, `final_assignment` and `count_epsilon`.

L_PLE, Eq. ple-ours with these options, is  sum_i gamma_i [ KL-like(z_i, y_i^text_weight) - z_i . log p_i / temper ]
- laplacian_weight/2 sum_i gamma_i z_i . (M z)_i + sum_k alpha_k KL(V'_k || V_k) / temper,  M the scaled affinity. The
E-step minimises it over z with the Laplacian linearised, the exact M-step over (mu, kappa): it never rises for soft
beta, exact update, Newton inverse, accurate normaliser, no caps, positive semi-definite M and a gamma that is fixed. A
fixed gamma that is not constant makes gamma_i M_ij asymmetric, which the paper's proof overlooks; there the statement
holds with `votes="gamma"`, where a neighbour's vote counts by its own gamma too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moontide.core.arrays import Array, namespace
from moontide.core.graph import Graph, nearest_neighbours
from moontide.core.ple import (
    EPS,
    anchor_kl,
    anchor_logits,
    anchor_weights,
    class_confidence,
    concentration,
    e_step,
    empirical_means,
    entropy_weights,
    initial_resultant,
    log_c,
    neighbour_votes,
    objective,
    prototypes,
    sample_weights,
    shrink,
    shrinkage,
)
from moontide.core.simplex import log_sum_exp
from moontide.errors import OptionError
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task


@dataclass(frozen=True)
class MOON(Method):
    """Training-free transduction: class means move from their text anchors as far as the batch gives evidence.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 100, effective_classes=3, seed=0)
    >>> result = MOON().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    >>> bool((result.labels == data.labels).mean() > (result.zero_shot_labels == data.labels).mean())
    True
    """

    citation: ClassVar[str] = "Huang et al., ICML 2026"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {},
        "paper": {
            "update": "exact", "gamma_in_counts": True, "normalise_confidence": False, "graph": "one-sided",
            "laplacian": "sum", "temper": 1.0, "kappa_cap": math.inf, "r_cap": 1.0, "final_assignment": False,
            "count_epsilon": 0.0,
        },
    }  # fmt: skip

    beta: str = option("hard", "counts in beta_k: argmax labels or soft assignments", choices=("hard", "soft"))
    update: str = option("simplified", "M-step with A_d(kappa') taken as 1, or exact", choices=("simplified", "exact"))
    alpha: str | float = option("1/lambda", "anchor weight alpha_k from the class confidence, or one constant for all",
                                choices=("1/lambda", "lambda", "exp(-lambda)"), above=0)  # fmt: skip
    confidence: str = option("geometric", "lambda_k from the mean and maximum of y_ik over the batch",
                             choices=("geometric", "arithmetic", "harmonic", "average", "max"))  # fmt: skip
    normalise_confidence: bool = option(True, "divide lambda by its largest value")
    gamma: str = option("assignments", "entropy weight of a sample: from z, from zero-shot, or 1",
                        choices=("assignments", "zero_shot", "off"))  # fmt: skip
    gamma_in_counts: bool = option(False, "weigh hard counts by gamma")
    votes: str = option("plain", "a neighbour's vote counts 1 or its gamma", choices=("plain", "gamma"))
    update_mu: bool = option(True, "move the mean directions")
    update_kappa: bool = option(True, "re-estimate the concentrations")
    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    kappa_cap: float = option(500.0, "largest re-estimated kappa (inf: none)", above=0)
    r_cap: float = option(0.999, "largest mean resultant length (1: none)", above=0, high=1)
    neighbours: int = option(3, "m, neighbours of a sample in the graph", low=1)
    graph: str = option("symmetric", "a sample hears its neighbours and those it is neighbour of, or only the first",
                        choices=("symmetric", "one-sided"))  # fmt: skip
    laplacian: str = option("mean", "neighbours' votes are averaged or summed", choices=("mean", "sum"))
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    log_normaliser: str = option("asymptotic", "log C_d: the paper's large-kappa form or accurate",
                                 choices=("asymptotic", "accurate"))  # fmt: skip
    inverse: str = option("banerjee", "kappa from r: Banerjee's formula or Newton to full accuracy",
                          choices=("banerjee", "newton"))  # fmt: skip
    iterations: int = option(10, "T, rounds of E-step and M-step", low=1)
    final_assignment: bool = option(True, "one more E-step after the last M-step")
    count_epsilon: float = option(1e-10, "added to soft counts where they divide", low=0)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Name the options that the others switch off."""
        if not isinstance(self.alpha, str):
            yield ("confidence", "normalise_confidence"), "with a constant alpha"
        if self.beta == "soft":
            yield ("gamma_in_counts",), "with beta='soft', which is gamma-weighted already"
        if self.gamma == "off":
            yield ("gamma_in_counts", "votes"), "with gamma='off'"
        if self.laplacian_weight == 0:
            yield ("neighbours", "graph", "laplacian", "votes"), "with laplacian_weight=0"
        if not self.update_kappa:
            yield ("kappa_cap",), "with update_kappa=False"
        if self.m_steps == 0 or not (self.update_mu or self.update_kappa):
            reason = "without an M-step" if self.m_steps == 0 else "with update_mu=False and update_kappa=False"
            yield ("beta", "update", "alpha", "confidence", "normalise_confidence", "gamma_in_counts"), reason
            if self.votes == "plain":
                yield ("gamma",), reason
        if self.m_steps == 0:
            yield ("update_mu", "update_kappa", "kappa_cap"), "without an M-step"

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        f, text, d, scale = task.features, task.text, task.d, self.text_weight * task.logit_scale
        cosine = f @ text.T  # (N, K)
        log_evidence = log_sum_exp(task.logit_scale * cosine)  # (N,)
        y = xp.exp(task.logit_scale * cosine - log_evidence[:, None])  # (N, K)
        log_evidence *= self.text_weight
        alpha = self.alpha_k(y)  # (K,)
        anchor_r = xp.clip(initial_resultant(y, cosine, self.count_epsilon), min=0, max=self.r_cap)  # (K,)
        anchor_kappa = concentration(anchor_r, d, self.inverse, self.r_cap)  # (K,)
        anchor = text * anchor_r[:, None] if self.update == "exact" else text  # (K, d)
        graph, votes_of = self.smoother(task)

        # A class without samples is at its anchor: what it scores there, `rest`, is computed once, and the products of
        # an iteration are made for the L `live` classes only.
        rest_mu, rest_kappa = self.parameters(anchor, text, anchor_kappa)
        logits = anchor_logits(cosine, anchor_kappa, d, self.log_normaliser, scale, self.temper)  # (N, K)
        rest = anchor_logits(cosine, rest_kappa, d, self.log_normaliser, scale, self.temper)  # (N, K)
        mu, kappa, beta, labels = text, anchor_kappa, xp.zeros_like(alpha), xp.argmax(y, axis=1)
        gamma = xp.ones_like(y[:, 0]) if self.gamma == "off" else sample_weights(y)  # (N,)
        said = y * gamma[:, None] if self.votes == "gamma" else y  # (N, K)
        weight, energy = gamma, []  # (N,), L_PLE after each E-step
        for it in range(self.m_steps + 1):
            step = e_step(logits, said, votes_of)
            z, before, labels = step.z, labels, step.labels  # (N, K), (N,), (N,)
            if it:
                energy[-1] -= xp.sum(weight * step.echo) / 2
            if self.gamma == "assignments":
                gamma = entropy_weights(step.entropy, task.k)  # (N,)
            said = z * gamma[:, None] if self.votes == "gamma" else z
            weight = xp.ones_like(gamma) if self.votes == "gamma" else gamma  # `said` has gamma in it already
            kl = anchor_kl(text, anchor_kappa, anchor_r, mu, kappa, d, self.log_normaliser)  # (K,)
            energy.append(objective(step, gamma, log_evidence, alpha, kl, self.temper))
            if it == self.m_steps:
                break
            beta = shrinkage(z, gamma, labels, alpha, self.beta, self.gamma_in_counts)  # (K,)
            live = xp.nonzero(beta)[0]  # (L,)
            v = empirical_means(xp.take(z, live, axis=1), gamma, f, self.count_epsilon)  # (L, d)
            resultant = shrink(v, beta[live], anchor[live, :])  # (L, d)
            mu, kappa = xp.asarray(rest_mu, copy=True), xp.asarray(rest_kappa, copy=True)
            mu[live, :], kappa[live] = self.parameters(resultant, text[live, :], anchor_kappa[live])
            logits = xp.asarray(rest, copy=True)  # (N, K)
            logits[:, live] = f @ prototypes(text[live, :], mu[live, :], kappa[live], scale, self.temper).T
            logits[:, live] += log_c(d, kappa[live], self.log_normaliser) / self.temper
        energy[-1] -= xp.sum(weight * xp.vecdot(said, votes_of(said))) / 2
        details = {"mu": mu, "alpha": alpha, "gamma": gamma, "anchor_kappa": anchor_kappa, "graph": graph}
        same = bool(xp.all(labels == before))
        return Result(z, y, None, tuple(float(e) for e in energy), self.m_steps, same, kappa, beta, details)

    def parameters(self, resultant: Array, mu: Array, kappa: Array) -> tuple[Array, Array]:
        """Eq. update-m: mean direction and concentration of the resultants; what is not updated stays as given."""
        xp = namespace(resultant)
        r = xp.linalg.vector_norm(resultant, axis=1)  # (L,)
        if self.update_mu:
            mu = resultant / xp.clip(r, min=EPS)[:, None]
        if self.update_kappa:
            kappa = xp.clip(concentration(r, resultant.shape[1], self.inverse, self.r_cap), max=self.kappa_cap)
        return mu, kappa

    @property
    def m_steps(self) -> int:
        """The number of M-steps: T where a final E-step follows, else T - 1."""
        return self.iterations - (not self.final_assignment)

    def alpha_k(self, y: Array) -> Array:
        """Return the anchor weight of each class, (K,)."""
        if isinstance(self.alpha, str):
            return anchor_weights(class_confidence(y, self.confidence, self.normalise_confidence), self.alpha)
        return namespace(y).full_like(y[0, :], self.alpha)

    def smoother(self, task: Task) -> tuple[Graph | None, Callable[[Array], Array]]:
        """Return the graph, given or built, and the function z -> votes of the neighbours, (N, K)."""
        if self.laplacian_weight == 0:
            return None, lambda z: namespace(z).zeros_like(z)
        if task.graph is not None and self.neighbours != self.specs()["neighbours"].default:
            raise OptionError(
                "The 'neighbours' option of moon has no effect on a task that brings its own graph; leave it out."
            )
        graph = task.graph or nearest_neighbours(task.features, self.neighbours)
        symmetric, mean = self.graph == "symmetric", self.laplacian == "mean"
        return graph, neighbour_votes(graph, symmetric, mean, self.laplacian_weight)
