"""MOON for streams: every batch also draws on what earlier ones said of the classes.

Beyond J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026, which runs MOON anew on every batch; docs/streams.md has the reasons and the measurements.

Symbols:  f_i -> x[i]   t_k -> text[k]   y_ik -> y   z_ik -> z   gamma_i -> gamma   S_k, n_k, c_k -> sums, soft, hard
          mu_k, kappa_k -> classes   mean image -> centre   p_jk -> present   theta_j -> theta   pi_ik -> prior
          w -> past   M -> memory   m -> neighbours   T -> iterations

What goes on from batch to batch fades by exp(-n / M) in n samples: the gamma-weighted sums S_k, soft counts n_k and
hard counts c_k of the classes, which classes were there, and the mean image; besides them a bank of the last samples,
which are neighbours in the graph and whose votes are added once. The M-step is MOON's, with its anchors and alpha_k, on
the statistics of the batch and w (1 - theta_0) of those remembered, for classes that have samples in the batch; and

    z_ik ∝ pi_ik^w y_ik exp(kappa_k mu_k.(f_i - w mean image) / temper + log C_d(kappa_k) / temper + votes_ik)

The prior pi_ik = theta_0 / K + sum_j theta_j p_jk says which classes are present: p_j are the class shares of the last
M / SPANS[j] samples and of the batch without sample i, and the weights theta are learnt along the stream by EM; theta_0
is the share of the samples whose class is not from the past. In a batch MOON says the same by accident: images are
nearer to each other than to any text, so a class whose mean has moved to the images is 2 to 6 nats ahead. Without the
mean image it is not. The past is weighed by w, its share in the M samples that are remembered: a batch with no past, or
with `memory=0`, is MOON's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from moontide.core.arrays import Array, affine, clip, columns, device, like, namespace, put, put_columns
from moontide.core.graph import Affinity, Graph, nearest_neighbours
from moontide.core.mixture import Anchors, MStep
from moontide.core.ple import (
    EPS,
    Assignment,
    anchor_logits,
    anchor_weights,
    concentration,
    e_step,
    join_confidence,
    neighbour_votes,
    resultant_of,
    weighted_sums,
    zero_shot_moments,
)
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
    present: Array = field(metadata=per_class(1))  # (J, K)
    origins: Array  # (J + 1,) samples explained by no span, and by each
    image_sum: Array  # (d,)
    count: float  # samples in image_sum
    bank_features: Array  # (B, d)
    bank_z: Array = field(metadata=per_class(1, "shares"))  # (B, K)


@dataclass(frozen=True)
class StreamMOON(OnlineMethod):
    """MOON that remembers: class statistics that fade, which classes are present, and a bank for the graph.

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

    memory: float = option(128.0, "M, samples remembered; 0: none, MOON on each batch", low=0, high=1e9)
    bank: int = option(128, "B, last samples that the graph reaches", low=0, high=100_000)
    neighbours: int = option(3, "m, neighbours of a sample in the graph", low=1)
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    kappa_cap: float = option(500.0, "largest kappa (inf: none)", above=0, high=math.inf)
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
            sums=zeros(k, d), soft=zeros(k), hard=zeros(k), present=zeros(spans, k), origins=zeros(spans + 1),
            image_sum=zeros(d), count=0.0,
            bank_features=zeros(bank, d), bank_z=zeros(bank, k),
        )  # fmt: skip

    def _step(self, state: StreamState, x: Array) -> tuple[StreamState, Result]:  # type: ignore[override]
        xp, (n, d), text = namespace(x), x.shape, state.text
        cosine = x @ text.T  # (n, K)
        y, _, of = zero_shot_moments(cosine, state.logit_scale)  # (n, K)
        now = self.faded(state, x)
        past = 1 - n / now.count
        centre = now.image_sum * (past / now.count)  # (d,)
        r = clip(resultant_of(of.total, of.along, COUNT_EPSILON), 0, self.r_cap)  # (K,)
        alpha = anchor_weights(join_confidence(of.total / n, of.largest, "geometric", True))  # (K,)
        anchors = Anchors(text, concentration(r, d, "banerjee", self.r_cap), r, alpha)
        m_step = MStep(
            "simplified", True, True, "banerjee", "asymptotic", self.r_cap, self.kappa_cap, COUNT_EPSILON, self.temper,
            self.text_weight * state.logit_scale,
        )  # fmt: skip

        def at_anchor(kappa: Array) -> Array:  # (n, K)
            return anchor_logits(cosine, kappa, d, "asymptotic", m_step.scale, self.temper)

        rest_kappa, _ = m_step.at_rest(anchors)  # (K,)
        rest = at_anchor(rest_kappa) - (text @ centre) * rest_kappa / self.temper  # (n, K)
        votes_of, told = self.votes(state, x)
        origins = learn_origins(y, now.present, now.origins, self.iterations)  # (J + 1,)
        theta = share(origins)
        back = past * (1 - theta[0])  # (), the weight of what is remembered of a class
        logits, z, labels = at_anchor(anchors.kappa), y, xp.argmax(y, axis=1)
        for it in range(self.iterations + 1):
            bias = told + past * xp.log(prior(z, now.present, theta))  # (n, K)
            before = labels
            step = e_step(logits + bias, z, votes_of)
            z, labels = step.z, step.labels
            if it == self.iterations:
                break
            live, *batch = statistics(step, x)
            kept = (now.sums[live, :], now.soft[live], now.hard[live])  # (L, d), (L,), (L,)
            sums, soft, hard = (new + back * old for new, old in zip(batch, kept, strict=True))
            classes = m_step(sums, soft, hard, anchors.rows(live))
            offset = classes.offset - (classes.mu @ centre) * classes.kappa / self.temper  # (L,)
            logits = put_columns(rest, live, affine(x, classes.prototypes, offset))
        beta, kappa = put(xp.zeros_like(r), live, classes.beta), put(rest_kappa, live, classes.kappa)
        result = Result(
            z, y, None, (), self.iterations, bool(xp.all(labels == before)), kappa, beta,
            {"alpha": alpha, "theta": theta},
        )  # fmt: skip
        if not self.memory:
            return state, result
        last, sums, soft, hard = statistics(step, x)
        state = replace(
            now,
            sums=put(now.sums, last, now.sums[last, :] + sums),
            soft=put(now.soft, last, now.soft[last] + soft),
            hard=put(now.hard, last, now.hard[last] + hard),
            present=now.present + xp.sum(z, axis=0),
            origins=origins,
            bank_features=copy_array(xp.concat([now.bank_features, x])[n:, :]),
            bank_z=copy_array(xp.concat([now.bank_z, z])[n:, :]),
        )
        return state, result

    def faded(self, state: StreamState, x: Array) -> StreamState:
        """Let what is remembered fade, and add the batch to the mean image."""
        n = x.shape[0]
        last, *_ = spans = [math.exp(-n * span / self.memory) if self.memory else 0.0 for span in SPANS]
        return replace(
            state,
            sums=last * state.sums,
            soft=last * state.soft,
            hard=last * state.hard,
            image_sum=last * state.image_sum + namespace(x).sum(x, axis=0),
            count=last * state.count + n,
            origins=last * state.origins,
            present=like(spans, x)[:, None] * state.present,
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
    """Return the L classes with samples, their gamma-weighted sums, soft counts and hard counts: (L,), (L, d), (L,)."""
    live = namespace(x).nonzero(step.counts)[0]  # (L,)
    return live, *weighted_sums(columns(step.z, live), step.gamma, x), step.counts[live]


def share(origins: Array) -> Array:
    """theta_j: the share of the samples that each span explains, with PRIOR as one sample more, (J + 1,).

    >>> import numpy as np
    >>> share(np.asarray([3.0, 0.0, 0.0, 0.0, 0.0]))
    array([0.875  , 0.03125, 0.03125, 0.03125, 0.03125])
    """
    weight = origins + like(PRIOR, origins)
    return weight / namespace(origins).sum(weight)


def learn_origins(y: Array, present: Array, past: Array, iterations: int) -> Array:
    """Add to `past` how many samples each span explains, and none of them, by EM for theta, (J + 1,).

    Sample i is from span j with probability ∝ theta_j sum_k p_jk y_ik, p_jk from `present` and y of the rest of the
    batch: y, not z, which has heard of sample i. It is from none of them ∝ theta_0 2 / (K + 1), which is how often two
    samples agree if all classes are there with shares drawn uniformly from the simplex: that zero-shot predictions
    prefer some classes is no sign that these are present.

    >>> import numpy as np
    >>> y, present = np.asarray([[0.9, 0.1, 0.0]]), np.asarray([[2.0, 0.0, 0.0]] * 4)
    >>> learn_origins(y, present, np.zeros(5), 1).round(2)
    array([0.36, 0.16, 0.16, 0.16, 0.16])
    """
    xp, (n, k) = namespace(y), y.shape
    others = clip(xp.sum(y, axis=0) - y, 0)  # (n, K)
    totals = clip(xp.sum(present, axis=1) + (n - 1), EPS)  # (J,) rows of y sum to 1
    in_span = (y @ present.T + xp.vecdot(y, others)[:, None]) / totals  # (n, J) sum_k p_jk y_ik
    agree = xp.concat([xp.full_like(y[:, :1], 2 / (k + 1)), in_span], axis=1)  # (n, J + 1)
    origins = past
    for _ in range(iterations):
        explains = share(origins) * agree  # (n, J + 1)
        origins = past + xp.sum(explains / xp.sum(explains, axis=1, keepdims=True), axis=0)
    return origins


def prior(z: Array, present: Array, theta: Array) -> Array:
    """pi_ik = theta_0 / K + sum_j theta_j p_jk with p_jk = (present_jk + sum_l z_lk - z_ik) / (their sum), (n, K).

    >>> import numpy as np
    >>> prior(np.asarray([[1.0, 0.0]]), np.asarray([[2.0, 0.0], [0.0, 1.0]]), np.asarray([0.2, 0.6, 0.2]))
    array([[0.7, 0.3]])
    """
    xp, (n, k) = namespace(z), z.shape
    others = clip(xp.sum(z, axis=0) - z, 0)  # (n, K)
    weight = theta[1:] / clip(xp.sum(present, axis=1) + (n - 1), EPS)  # (J,)
    return theta[0] / k + weight @ present + xp.sum(weight) * others
