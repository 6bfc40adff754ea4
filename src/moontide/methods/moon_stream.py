"""MOON for streams: every batch also draws on what earlier ones said of the classes.

Beyond J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026, which runs MOON anew on every batch; docs/streams.md has the reasons and the measurements.

Symbols:  f_i -> x[i]   t_k -> text[k]   y_ik -> y   z_ik -> z   r_ik -> kept.z   gamma_i -> gamma   alpha_k -> alpha
          S_k, n_k, c_k -> sums, soft, hard   mean image -> centre   beta_k, mu_k, kappa_k -> classes
          p_jk -> present   theta_j -> theta   pi_ik -> prior   M -> memory   m -> neighbours   T -> iterations

As in MOON, R_k = beta_k v_k + (1 - beta_k) t_k with beta_k = c_k / (c_k + alpha_k), v_k = S_k / n_k, hard counts c_k
and alpha_k = 1 / lambda_k, only that all of them go on from batch to batch:

    S_k <- exp(-c'_k / M) S_k + sum_i gamma_i r_ik f_i,  n_k and c_k likewise, for classes with c'_k > 0 samples in it;
    the mean and the maximum of y_ik, of which lambda_k is made, and the mean image fade by exp(-n / M) in n samples;
    the graph joins the batch with a bank of the last samples, whose votes are added once.

M counts samples of the class for its mean, since what a class looks like does not change while it is away, and samples
of the stream for all else. Two things that are accidents in a batch are made explicit, because they would add up:

    z_ik ∝ pi_ik y_ik exp(kappa_k mu_k.(f_i - mean image) / temper + log C_d(kappa_k) / temper + votes_ik)

The mean image is subtracted, or a class that was ever seen would be ahead of those that were not by the modality gap
alone, 2 to 6 nats. In its place pi_ik = theta_0 / K + sum_j theta_j p_jk says which classes are present: p_j are the
class shares of the last M / SPANS[j] samples and of the batch without sample i, and the weights theta are learnt along
the stream by EM on zero-shot predictions. What is remembered of a sample, r_ik, is z_ik without pi_ik, so that presence
never confirms itself. With `memory=0` nothing is remembered, neither is done, and it is MOON on each batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from moontide.core.arrays import Array, affine, clip, columns, device, like, namespace, put, put_columns
from moontide.core.graph import Affinity, Graph, nearest_neighbours
from moontide.core.mixture import Anchors, Classes, MStep
from moontide.core.ple import (
    EPS,
    Assignment,
    anchor_logits,
    anchor_weights,
    concentration,
    e_step,
    initial_resultant,
    join_confidence,
    neighbour_votes,
    weighted_sums,
)
from moontide.core.simplex import softmax
from moontide.options import option
from moontide.protocols import OnlineMethod, State, copy_array, per_class
from moontide.types import Result, Task

COUNT_EPSILON = 1e-10  # added to soft counts where they divide, as in the released MOON
SPANS = (1, 4, 16, 64)  # presence is counted over the last M, M / 4, M / 16 and M / 64 samples
PRIOR = (0.5, *[0.5 / len(SPANS)] * len(SPANS))  # theta before the first sample, with the weight of one sample


@dataclass(frozen=True)
class StreamState(State):
    """What faded sums hold of the stream so far; the bank is oldest first, with zeros in front until it is full."""

    sums: Array = field(metadata=per_class(0))  # (K, d) S_k
    soft: Array = field(metadata=per_class(0))  # (K,) n_k
    hard: Array = field(metadata=per_class(0))  # (K,) c_k
    y_sum: Array = field(metadata=per_class(0))  # (K,)
    y_max: Array = field(metadata=per_class(0))  # (K,)
    present: Array = field(metadata=per_class(1))  # (J, K)
    origins: Array  # (J + 1,) samples explained by no span, and by each
    image_sum: Array  # (d,)
    count: float  # samples in y_sum and image_sum
    bank_features: Array  # (B, d)
    bank_z: Array = field(metadata=per_class(1, "shares"))  # (B, K)


@dataclass(frozen=True)
class StreamMOON(OnlineMethod):
    """MOON that remembers: class statistics that fade, a bank for the graph, and which classes are present.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 20, effective_classes=2, seed=0)
    >>> method = StreamMOON()
    >>> state = method.start(Task(data.features, data.text))
    >>> for i in range(0, 64, 8):
    ...     state, result = method.step(state, data.features[i : i + 8])
    >>> state.seen, result.probs.shape
    (64, (8, 20))
    """

    citation: ClassVar[str] = "beyond Huang et al., ICML 2026"
    state_type: ClassVar[type[State]] = StreamState

    memory: float = option(128.0, "M, samples remembered; 0: none, MOON on each batch", low=0)
    bank: int = option(128, "B, last samples that the graph reaches", low=0)
    neighbours: int = option(3, "m, neighbours of a sample in the graph", low=1)
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    kappa_cap: float = option(500.0, "largest kappa (inf: none)", above=0)
    r_cap: float = option(0.999, "largest mean resultant length (1: none)", above=0, high=1)
    iterations: int = option(10, "T, rounds of E-step and M-step before the last E-step", low=1)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Name the options that the others switch off."""
        if self.memory == 0:
            yield ("bank",), "with memory=0"
        if self.laplacian_weight == 0:
            yield ("neighbours", "bank"), "with laplacian_weight=0"

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Add the bank and its copy to the usual estimate."""
        return super().peak_bytes(n, k, d, itemsize) + itemsize * 2 * self.bank * (k + d)

    def start(self, task: Task) -> StreamState:
        """Remember nothing."""
        xp = namespace(task.text)
        bank = self.bank if self.memory and self.laplacian_weight else 0

        def zeros(*shape: int) -> Array:
            return xp.zeros(shape, dtype=task.text.dtype, device=device(task.text))

        k, d, spans = task.k, task.d, len(SPANS)
        return StreamState(
            text=task.text, logit_scale=task.logit_scale, seen=0,
            sums=zeros(k, d), soft=zeros(k), hard=zeros(k), y_sum=zeros(k), y_max=zeros(k), present=zeros(spans, k),
            origins=zeros(spans + 1), image_sum=zeros(d), count=0.0,
            bank_features=zeros(bank, d), bank_z=zeros(bank, k),
        )  # fmt: skip

    def _step(self, state: StreamState, x: Array) -> tuple[StreamState, Result]:  # type: ignore[override]
        xp, remembers, d = namespace(x), self.memory > 0, x.shape[1]
        cosine = x @ state.text.T  # (n, K)
        y = softmax(state.logit_scale * cosine)  # (n, K)
        now = self.faded(state, x, y)
        r = clip(initial_resultant(y, cosine, COUNT_EPSILON), 0, self.r_cap)  # (K,)
        alpha = anchor_weights(join_confidence(now.y_sum / now.count, now.y_max, "geometric", True))  # (K,)
        anchors = Anchors(state.text, concentration(r, d, "banerjee", self.r_cap), r, alpha)
        m_step = MStep(
            "simplified", True, True, "banerjee", "asymptotic", self.r_cap, self.kappa_cap, COUNT_EPSILON, self.temper,
            self.text_weight * state.logit_scale,
        )  # fmt: skip
        centre = now.image_sum * (remembers / now.count)  # (d,)

        def score(c: Classes) -> Array:  # (n, L)
            return affine(x, c.prototypes, c.offset - (c.mu @ centre) * c.kappa / self.temper)

        past = m_step(state.sums, state.soft, state.hard, anchors)
        logits = rest = score(past)  # (n, K)
        if not (state.seen and remembers):  # no class has a mean yet: MOON's first E-step
            logits = anchor_logits(cosine, anchors.kappa, d, "asymptotic", m_step.scale, self.temper)
        votes_of, told = self.votes(state, x)
        z, labels, origins, bias = y, xp.argmax(y, axis=1), now.origins, told
        for it in range(self.iterations + 1):
            if remembers:
                origins, prior = presence(y, z, now.present, now.origins, origins)
                bias = told + xp.log(prior)  # (n, K)
            said, before = z, labels
            step = e_step(logits + bias, said, votes_of)
            z, labels = step.z, step.labels
            if it == self.iterations:
                break
            live, counts, sums, soft = statistics(step, x)
            total = state.sums[live, :] + sums, state.soft[live] + soft, state.hard[live] + counts
            classes = m_step(*total, anchors.rows(live))
            logits = put_columns(rest, live, score(classes))
        beta, kappa = put(past.beta, live, classes.beta), put(past.kappa, live, classes.kappa)
        result = Result(
            z, y, None, (), self.iterations, bool(xp.all(labels == before)), kappa, beta,
            {"alpha": alpha, "theta": share(origins)},
        )  # fmt: skip
        if not remembers:
            return state, result
        return self.remember(now, x, e_step(logits + told, said, votes_of), origins), result

    def faded(self, state: StreamState, x: Array, y: Array) -> StreamState:
        """Let what is counted in samples of the stream fade, and add the batch to the means of images and of y."""
        xp, n = namespace(x), x.shape[0]
        last, *_ = spans = [math.exp(-n * span / self.memory) if self.memory else 0.0 for span in SPANS]
        return replace(
            state,
            y_sum=last * state.y_sum + xp.sum(y, axis=0),
            y_max=xp.maximum(last * state.y_max, xp.max(y, axis=0)),
            image_sum=last * state.image_sum + xp.sum(x, axis=0),
            count=last * state.count + n,
            origins=last * state.origins,
            present=like(spans, x)[:, None] * state.present,
        )

    def remember(self, now: StreamState, x: Array, kept: Assignment, origins: Array) -> StreamState:
        """Add the batch to what is remembered of the classes, and let it into the bank."""
        xp, n = namespace(x), x.shape[0]
        live, counts, sums, soft = statistics(kept, x)
        old = xp.exp(-counts / self.memory)  # (L,)
        return replace(
            now,
            sums=put(now.sums, live, old[:, None] * now.sums[live, :] + sums),
            soft=put(now.soft, live, old * now.soft[live] + soft),
            hard=put(now.hard, live, old * now.hard[live] + counts),
            present=now.present + xp.sum(kept.z, axis=0),
            origins=origins,
            bank_features=copy_array(xp.concat([now.bank_features, x])[n:, :]),
            bank_z=copy_array(xp.concat([now.bank_z, kept.z])[n:, :]),
        )

    def votes(self, state: StreamState, x: Array) -> tuple[Affinity, Array]:
        """Return the map z -> votes inside the batch, and the votes of the bank, (n, K)."""
        xp = namespace(x)
        first = max(state.bank_z.shape[0] - state.seen, 0)
        bank = state.bank_z[first:, :]  # (b, K)
        b = bank.shape[0]
        graph = nearest_neighbours(
            xp.concat([state.bank_features[first:, :], x]), self.neighbours if self.laplacian_weight else 0
        )
        silent = xp.zeros((x.shape[0], bank.shape[1]), dtype=x.dtype, device=device(x))
        told = neighbour_votes(graph, True, True, self.laplacian_weight)(xp.concat([bank, silent]))[b:, :]  # (n, K)
        near, weights = graph.neighbours[b:, :] - b, graph.weights[b:, :]  # (n, m)
        inside = Graph(clip(near, 0), xp.where(near < 0, xp.zeros_like(weights), weights))
        return neighbour_votes(inside, True, True, self.laplacian_weight), told


def statistics(step: Assignment, x: Array) -> tuple[Array, Array, Array, Array]:
    """Return the L classes with samples, their hard counts, gamma-weighted sums and soft counts: (L,), (L, d), (L,)."""
    live = namespace(x).nonzero(step.counts)[0]  # (L,)
    return live, step.counts[live], *weighted_sums(columns(step.z, live), step.gamma, x)


def share(origins: Array) -> Array:
    """theta_j: the share of the samples that each span explains, with PRIOR as one sample more, (J + 1,).

    >>> import numpy as np
    >>> share(np.asarray([3.0, 0.0, 0.0, 0.0, 0.0]))
    array([0.875  , 0.03125, 0.03125, 0.03125, 0.03125])
    """
    weight = origins + like(PRIOR, origins)
    return weight / namespace(origins).sum(weight)


def presence(y: Array, z: Array, present: Array, past: Array, origins: Array) -> tuple[Array, Array]:
    """One EM step for theta, and the prior pi_ik = theta_0 / K + sum_j theta_j p_jk of each sample, (J + 1,), (n, K).

    p_jk = (present_jk + sum_l z_lk - z_ik) / (their sum): the faded counts and the rest of the batch. Sample i is from
    span j with probability ∝ theta_j sum_k p_jk y_ik, and from none of them, thus from any class, ∝ theta_0 / K.

    >>> import numpy as np
    >>> y, present, none = np.asarray([[0.9, 0.1]]), np.asarray([[2.0, 0.0]] * 4), np.zeros(5)
    >>> origins, prior = presence(y, y, present, none, none)
    >>> origins.round(2), prior.round(2)
    (array([0.36, 0.16, 0.16, 0.16, 0.16]), array([[0.79, 0.21]]))
    """
    xp, (n, k) = namespace(y), y.shape
    theta = share(origins)  # (J + 1,)
    others = clip(xp.sum(z, axis=0) - z, 0)  # (n, K)
    totals = clip(xp.sum(present, axis=1) + (n - 1), EPS)  # (J,) rows of z sum to 1
    in_span = (y @ present.T + xp.vecdot(y, others)[:, None]) / totals  # (n, J) sum_k p_jk y_ik
    explains = theta * xp.concat([xp.full_like(y[:, :1], 1 / k), in_span], axis=1)  # (n, J + 1)
    origins = past + xp.sum(explains / xp.sum(explains, axis=1, keepdims=True), axis=0)  # (J + 1,)
    theta = share(origins)
    weight = theta[1:] / totals  # (J,)
    return origins, theta[0] / k + weight @ present + xp.sum(weight) * others
