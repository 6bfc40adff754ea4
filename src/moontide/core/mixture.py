"""The class distributions of MOON: anchors V'_k, and the M-step that moves V_k from them (Eq. update-m and -real)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moontide.core import kernels
from moontide.core.arrays import Array, clip, column_dots, namespace, row_dots, row_norms
from moontide.core.compiled import loops_for
from moontide.core.ple import EPS, anchor_kl, concentration, log_c, means, prototypes, shrink, soft_count

BELOW_1 = 1 - float(np.finfo(np.float32).eps)
SHORT = 0.1  # |R_k| below which it is not accurate as the root of a sum of products in float32


class Anchors(NamedTuple):
    """The anchor distribution V'_k of each class and how strongly it holds."""

    text: Array  # (K, d) mu'_k = t_k
    kappa: Array  # (K,) kappa'_k
    r: Array  # (K,) A_d(kappa'_k)
    alpha: Array  # (K,) alpha_k

    def rows(self, which: Array | slice) -> Anchors:
        """Return some of the classes."""
        return self if isinstance(which, slice) else Anchors(*(x[which, ...] for x in self))


class Span(NamedTuple):
    """The same as `Classes`, with a mean R_k = sum_i a_ik f_i + b_k t_k given by its coefficients and scores."""

    beta: Array  # (L,)
    kappa: Array  # (L,)
    kl: Array  # (L,)
    values: Array  # (N, L) scores of the samples
    a: Array  # (N, L)
    b: Array  # (L,)
    r: Array  # (L,) |R_k|


class Classes(NamedTuple):
    """The distribution V_k of each class after an M-step, and what its scores are made of."""

    beta: Array  # (K,)
    mu: Array  # (K, d)
    kappa: Array  # (K,)
    prototypes: Array  # (K, d)
    offset: Array  # (K,) log C_d(kappa_k) / temper
    kl: Array  # (K,) KL(V'_k || V_k)


@dataclass(frozen=True)
class MStep:
    """The M-step with its options (those of MOON by the same names); `scale` is text weight x logit scale.

    >>> import numpy as np
    >>> step = MStep("simplified", True, True, "banerjee", "asymptotic", 0.999, 500.0, 1e-10, 50.0, 100.0)
    >>> eye = np.eye(2)
    >>> anchors = Anchors(eye, np.ones(2), np.ones(2), np.ones(2))
    >>> step(10 * eye[::-1], np.asarray([10.0, 10.0]), np.asarray([10.0, 0.0]), anchors).beta.round(3)
    array([0.909, 0.   ])
    """

    update: str
    update_mu: bool
    update_kappa: bool
    inverse: str
    log_normaliser: str
    r_cap: float
    kappa_cap: float
    count_epsilon: float
    temper: float
    scale: float

    @property
    def plain(self) -> bool:
        """Whether it is one that the kernels have: of these options, the defaults."""
        return (
            self.inverse == "banerjee" and self.log_normaliser == "asymptotic" and self.update_mu and self.update_kappa
        )

    def __call__(self, sums: Array, soft: Array, counts: Array, anchors: Anchors) -> Classes:
        """Return L classes from their statistics: sums (L, d), what divides them, and the counts n_k of beta_k."""
        xp, exact = namespace(sums), self.update == "exact"
        if self.plain and kernels.usable(sums) and sums.dtype == xp.float32:
            numbers = (self.count_epsilon, self.r_cap, self.kappa_cap, self.scale, self.temper)
            return Classes(*kernels.m_step(sums, soft, counts, anchors, exact, *numbers))
        text, anchor_kappa, anchor_r, alpha = anchors
        d = text.shape[1]
        beta = counts / (counts + alpha + EPS)  # (L,)
        anchor = text * anchor_r[:, None] if exact else text  # (L, d)
        resultant = shrink(means(sums, soft, self.count_epsilon), beta, anchor)  # (L, d)
        r = row_norms(resultant)  # (L,)
        mu = resultant / clip(r, EPS)[:, None] if self.update_mu else text  # (L, d)
        kappa = self.kappa(r, d) if self.update_kappa else anchor_kappa  # (L,)
        offset = log_c(d, kappa, self.log_normaliser) / self.temper  # (L,)
        kl = anchor_kl(row_dots(mu, text), anchor_kappa, anchor_r, kappa, d, self.log_normaliser)  # (L,)
        return Classes(beta, mu, kappa, prototypes(text, mu, kappa, self.scale, self.temper), offset, kl)

    def in_span(
        self, z: Array, gamma: Array, counts: Array, anchors: Anchors, cosine: Array, gram: Array
    ) -> Span | None:
        """Return the classes by the products f_i . f_j (N, N) and f_i . t_k (N, L) alone; None where |R_k| is small.

        For N <= d this is less work: a product of N x N x L instead of two of N x d x L, and no vectors of length d.
        """
        text, anchor_kappa, anchor_r, alpha = anchors
        d, xp = text.shape[1], namespace(z)
        loops = loops_for(z)
        if loops and self.plain:
            beta, a, b = loops.span_weights(
                z, gamma, counts, alpha, anchor_r, self.update == "exact", np.float32(self.count_epsilon)
            )
            scores = gram @ a  # (N, L)
            numbers = (d, min(self.r_cap, BELOW_1), self.kappa_cap, self.temper, np.float32(self.scale))
            r, kappa, kl, shortest = loops.span_scores(scores, a, b, cosine, anchor_kappa, anchor_r, *numbers)
            return Span(beta, kappa, kl, scores, a, b, r) if shortest >= SHORT else None
        beta = counts / (counts + alpha + EPS)  # (L,)
        b = (1 - beta) * anchor_r if self.update == "exact" else 1 - beta  # (L,)
        a = z * gamma[:, None]  # (N, L)
        a *= beta / soft_count(gamma @ z, self.count_epsilon)
        scores = gram @ a  # (N, L)
        scores += b * cosine  # f_i . R_k
        along = column_dots(a, cosine) + b  # (L,) t_k . R_k
        square = column_dots(a, scores) + b * along  # (L,) |R_k|^2
        if square.shape[0] and float(xp.min(square)) < SHORT**2:
            return None
        r = xp.sqrt(square)
        kappa = self.kappa(r, d) if self.update_kappa else anchor_kappa  # (L,)
        offset = log_c(d, kappa, self.log_normaliser) / self.temper  # (L,)
        aligned = along / r if self.update_mu else xp.ones_like(r)  # (L,)
        kl = anchor_kl(aligned, anchor_kappa, anchor_r, kappa, d, self.log_normaliser)
        if self.update_mu:
            scores *= kappa / (self.temper * r)
            scores += self.scale * cosine
        else:
            scores = (self.scale + kappa / self.temper) * cosine
        scores += offset
        return Span(beta, kappa, kl, scores, a, b, r)

    def means_of(self, span: Span, f: Array, text: Array) -> Array:
        """Return the mean directions mu_k = R_k / |R_k|, (L, d)."""
        return (span.a.T @ f + span.b[:, None] * text) / span.r[:, None] if self.update_mu else text

    def kappa(self, r: Array, d: int) -> Array:
        """Return the concentrations of resultant lengths r, capped, (L,)."""
        return clip(concentration(r, d, self.inverse, self.r_cap), high=self.kappa_cap)

    def at_rest(self, anchors: Anchors) -> tuple[Array, Array]:
        """Return kappa and KL of classes without samples: beta is 0, the mean the anchor, only kappa may have moved."""
        kappa, d = anchors.kappa, anchors.text.shape[1]
        if self.update_kappa:
            one = namespace(kappa).ones_like(kappa)  # simplified: A_d is taken as 1
            kappa = self.kappa(anchors.r, d) if self.update == "exact" else one * self.kappa(one[:1], d)  # (K,)
        change = log_c(d, anchors.kappa, self.log_normaliser) - log_c(d, kappa, self.log_normaliser)
        return kappa, change + anchors.r * (anchors.kappa - kappa)
