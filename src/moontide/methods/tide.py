"""TIDE: transduction that asks the batch how many of the classes are there.

Our own method, beyond J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time
Transduction", ICML 2026. docs/maths.md derives its equations, docs/tide.md measures them.

Symbols:  f_i -> f[i]   t_k -> text[k]   y_ik -> y   z_ik -> z   p_k = mean_i y_ik -> p   gamma_i -> gamma
          W -> votes   v -> excess   rho -> agreement   chi -> corroboration   a -> pseudo_count   w -> density
          a* -> smoothing   pi_k -> presence   mu'_k -> anchor   s -> sharpness   alpha -> anchor_weight
          beta_ik -> beta

MOON pushes classes away that seem absent, as strongly in every batch. TIDE first estimates how concentrated the classes
of the batch are, one number v from pairs of zero-shot predictions (Eq. 1), as far as neighbours in the graph bear it
out (Eq. 2). From it follow the pseudo-count a of a symmetric Dirichlet prior over the class shares and the density
w = a / (1 + a), near 0 where few of the classes are there and near 1 where all are (Eq. 3), and w sets everything else:

    log z_ik = log y_ik - g b_ik + s cos(f_i, R_ik) + (2 - w) (W z)_ik + log(n_k - u z_ik + a*) + const      (Eq. 11)

b is the bias of the text with its weight g (Eq. 5), R_ik the mean of class k, shrunk to its anchor (Eqs. 4, 8) and
without the share u = 1 - w^2 of sample i (Eq. 9), and n_k = sum_i z_ik. Cosines are taken in a metric of the batch
(Eq. 6).

A stream is the same model over the last `memory` samples: a batch is a stream without a past. Known labels are clamped;
what the model gets wrong on them discounts what it believes of the other samples (Eqs. 12, 13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from moontide.core.arrays import (
    Array,
    class_counts,
    class_sums,
    clip,
    columns,
    device,
    device_type,
    exp_,
    is_torch_array,
    like,
    namespace,
    put,
    row_dots,
    row_norms,
    row_sums,
    to_numpy,
    unit_rows,
)
from moontide.core.backends import compiled
from moontide.core.driver import Run, solve
from moontide.core.graph import Graph
from moontide.core.memory import require_memory
from moontide.core.ple import EPS, weighted_sums
from moontide.core.rows import LARGE, NEIGHBOURS, Rows, check_graph
from moontide.core.simplex import log_softmax, one_hot, softmax_log_sum
from moontide.core.sums import LARGER, SAME, Counted, Sums
from moontide.core.threads import in_threads, row_blocks
from moontide.options import option
from moontide.protocols import GivenState, OnlineMethod, Plan, State, copy_array, given_inputs, given_shares, per_class
from moontide.types import Result, Task

ALL = slice(None)
LARGEST = 1e3  # of the pseudo-count: at 1000 the prior is flat for any batch
NEWTON = 12  # steps of Newton's method for the calibration
STILL = 1e-4  # assignments that move by less no longer change
IDLE = 0.01  # a class is left alone whose largest z_ik is below this share of n_k + a*, and of 0.1
NOTHING = -1e30  # the logarithm of a sum of no classes
SAME_SAMPLE = 1e-6  # how far features may differ and still be those of one sample
TRUSTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18)  # weights of the text, tried on known labels
TEMPERS = (1.0, 0.7, 0.5, 0.35)  # factors of all logits at which those weights are compared
RELUCTANCE = (2.0, 8.0)  # nats that a factor of e of either costs: a handful of labels changes little


@dataclass(frozen=True)
class TIDEState(GivenState):
    """The last samples, oldest first, with what is known of them, and the labelled samples before those."""

    recent: Array  # (M, d) features, with rows of zeros in front until M samples were seen
    recent_known: Array = field(metadata=per_class(None, "numbers"))  # (M,) class numbers, -1 where not known
    known_sums: Array = field(metadata=per_class(0))  # (K, d) sum of the labelled features that are no longer recent
    known_counts: Array = field(metadata=per_class(0))  # (K,) their number


@dataclass(frozen=True)
class TIDE(OnlineMethod):
    """Transduction for batches with few of the classes and with all of them, for streams and for known labels.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 100, effective_classes=3, seed=0)
    >>> result = TIDE().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    >>> bool((result.labels == data.labels).mean() > (result.zero_shot_labels == data.labels).mean())
    True
    """

    citation: ClassVar[str] = "ours, beyond Huang et al., ICML 2026"
    accepts: ClassVar[frozenset[str]] = frozenset({"known", "class_prior", "negatives"})
    state_type: ClassVar[type[State]] = TIDEState

    memory: int = option(64, "samples of a stream that are labelled together, the latest included", low=0, high=10_000)
    neighbours: int = option(NEIGHBOURS, "m, neighbours of a sample in the graph", low=1)
    sharpness: float = option(8.0, "weight of the cosine to a class mean where few classes are there", low=0)
    iterations: int = option(10, "T, rounds of M-step and E-step after the first E-step", low=1)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory beyond the inputs: twelve N x K arrays, or three of 2-byte numbers for large N."""
        n += self.memory
        assignments = 6 * n * k if n * k > LARGE else 12 * n * k * itemsize
        return assignments + itemsize * (4 * n * d + 8 * k * d)

    def start(self, task: Task) -> TIDEState:
        """Remember nothing but the class balance and the negatives."""
        xp, k, d = namespace(task.text), task.k, task.d
        kind = {"dtype": task.text.dtype, "device": device(task.text)}
        return TIDEState(
            text=task.text,
            logit_scale=task.logit_scale,
            seen=0,
            recent=xp.zeros((self.memory, d), **kind),
            recent_known=xp.full((self.memory,), -1, dtype=xp.int64, device=device(task.text)),
            known_sums=xp.zeros((k, d), **kind),
            known_counts=xp.zeros((k,), **kind),
            **given_inputs(task),
        )

    def _fit(self, task: Task) -> Result:
        check_graph(task.graph, self.name, self.neighbours)
        return self.solve(self.start(task), task.features, task.known, task.graph)

    def _step(self, state: TIDEState, x: Array, known: Array | None = None) -> tuple[TIDEState, Result]:  # type: ignore[override]
        """Label the samples together with the recent ones, so many of those that they are `memory` samples in all."""
        xp, n = namespace(x), x.shape[0]
        known = xp.full((n,), -1, dtype=xp.int64, device=device(x)) if known is None else known
        old = min(state.seen, max(self.memory - n, 0))
        first = self.memory - old  # of the recent samples, those from here on are labelled again
        window = xp.concat([state.recent[first:, :], x])  # (old + n, d)
        labels = xp.concat([state.recent_known[first:], known])  # (old + n,)
        leaving = remember(state, state.recent[:first, :], state.recent_known[:first])
        result = self.solve(leaving, window, labels, None)
        every, numbers = xp.concat([state.recent, x]), xp.concat([state.recent_known, known])
        state = remember(state, every[:n, :], numbers[:n])
        return replace(state, recent=copy_array(every[n:, :]), recent_known=copy_array(numbers[n:])), rows_of(
            result, old
        )

    def _correct(self, state: TIDEState, x: Array, known: Array, before: Array) -> TIDEState:  # type: ignore[override]
        """Label recent samples where they are; add others to the labelled samples of the past, where they were not."""
        xp, recent = namespace(x), state.recent_known
        past = []
        for i in range(x.shape[0]):
            same = xp.all(xp.abs(state.recent - x[i, :]) <= SAME_SAMPLE, axis=1)  # (M,)
            recent = xp.where(same, known[i], recent)
            past += [i] if not bool(xp.any(same)) else []
        past = [i for i in past if int(known[i]) != int(before[i])]
        chosen = xp.asarray(past, dtype=xp.int64, device=device(x))
        f = xp.take(x, chosen, axis=0)
        state = remember(remember(state, -f, xp.take(before, chosen), -1), f, xp.take(known, chosen))
        return replace(state, recent_known=recent)

    def solve(self, state: TIDEState, f: Array, known: Array | None, graph: Graph | None) -> Result:
        """Label samples together: in memory, or, where there are too many, in blocks with probabilities in 16 bits."""
        (n, k), of, text = (f.shape[0], state.text.shape[0]), namespace(f).asarray, state.text
        labels = Labels.of(known, state, k)
        large = n * k > LARGE and device_type(f) == "cpu" and not labels.any
        if large:
            f, text, labels = to_numpy(f), to_numpy(text), NO_LABELS
        elif n * k > LARGE:
            require_memory(12 * n * k * f.dtype.itemsize, f"{self.name} on {n} x {k} at once", f)
        rows = TIDERows(self, f, text, state.logit_scale, graph, half=large, alone=not large, known=labels)
        given = {"class_prior": given_shares(state.class_prior), "negatives": state.negatives}
        found = solve(self.mixture(text, state.logit_scale, **given, known=labels), rows.call)
        z, y = map(of, rows.unpack())
        details = {**found.crowd._asdict(), "anchor_weight": found.alpha, "sharpness": found.sharpness}
        decided = of(rows.labels) if large else None
        beta, unknown = of(found.beta), of(rows.unknown)
        return Result(z, y, None, (), found.steps, found.converged, None, beta, details, unknown, decided)

    def mixture(self, text: Array, logit_scale: float, **given: Any) -> TIDEMixture:
        """Return what `driver.solve` needs."""
        return TIDEMixture(self, text, **given)

    def plan(self) -> Plan:
        """First pass, comparison, an E-step before and after each M-step, the calibration.

        >>> TIDE().plan()
        Plan(calls=27, steps=11)
        """
        return Plan(self.iterations + NEWTON + 5, self.iterations + 1)


class Crowd(NamedTuple):
    """How concentrated the classes of a batch are (Eqs. 1, 2, 3).

    >>> import numpy as np
    >>> Crowd.of_shares(np.asarray([0.5, 0.5])).density > 0.99
    True
    """

    excess: float  # v: by how much two samples agree more often than with equally frequent classes
    agreement: float  # rho: how much neighbours agree, from 0 to 1
    corroboration: float  # chi: rho against what it could be if v is right, from 0 to 1
    pseudo_count: float  # a
    density: float  # w
    smoothing: float  # a*

    @classmethod
    def of(cls, excess: float, agreement: float, corroboration: float, false: float) -> Crowd:
        """Eq. 3: a = 1 / (v chi), w = a / (1 + a), a* = a max(1, w (1 - q) N / K), q = mean_i max_k y_ik.

        A symmetric Dirichlet with K parameters a has E[K sum_k share_k^2] - 1 = (K - 1) / (K a + 1), near 1 / a. What
        neighbours do not bear out is discounted. Of the N / K samples that a class has on average, (1 - q) N / K are
        `false`, as zero-shot predictions are right as often as they are sure. The prior counts no finer than that.
        """
        a = min(1 / max(excess * corroboration, 1 / LARGEST), LARGEST)
        w = a / (1 + a)
        return cls(excess, agreement, corroboration, a, w, a * max(1.0, w * false))

    @classmethod
    def of_shares(cls, shares: Array) -> Crowd:
        """Return the same for class shares (K,) that the user knows: v = K sum_k share_k^2 - 1."""
        v = shares.shape[0] * float(namespace(shares).sum(shares**2)) - 1
        return cls.of(max(v, 1 / LARGEST), 1.0, 1.0, 0.0)


def agreement_by_class(y: Array, votes: Array, degree: Array) -> tuple[Array, Array]:
    """Return sum_ij W_ij y_ik y_jk and the most it can be, sum_ij W_ij y_ik^2, (K,) each.

    `votes` is W y (N, K) and `degree` W 1 (N, 1).

    >>> import numpy as np
    >>> agreement_by_class(np.eye(2), np.asarray([[0.0, 1.0], [0.5, 0.5]]), np.ones((2, 1)))
    (array([0. , 0.5]), array([1., 1.]))
    """
    xp = namespace(y)
    return xp.sum(y * votes, axis=0), (degree.T @ (y * y))[0, :]


def agreements(y: Array, total: Array, own: Array, n: int) -> Array:
    """Return the mean over the n - 1 samples j != i of y_i . y_j, from sum_j y_j (K,) and own_i = |y_i|^2, (N,).

    >>> import numpy as np
    >>> agreements(np.asarray([[1.0, 0.0]]), np.asarray([2.0, 1.0]), np.asarray([1.0]), 3)
    array([0.5])
    """
    return (y @ total - own) / max(n - 1, 1)


def crowd_of(
    u: float, deviation: float, sure: float, confidence: float, near: float, most: float, n: int, k: int, m: int
) -> Crowd:
    """Measure the concentration of the classes of n samples from what their predictions add up to.

    `u` and `deviation` are mean and standard deviation of the agreements, `sure` is the mean of |y_i|^2, `confidence`
    that of max_k y_ik, `near` is sum_ij W_ij y_i . y_j and `most` is sum_ij W_ij |y_i|^2.

    >>> crowd_of(0.25, 0.0, 1.0, 1.0, 0.0, 1.0, 100, 4, 3).density > 0.99
    True
    """
    false = (1 - confidence) * n / k
    if n < 2 or k < 2:
        return Crowd.of(1 / LARGEST, 1.0, 1.0, false)
    v = excess(u - 2 * deviation / math.sqrt(n), sure, k)
    rho = mean_agreement(near, most)
    return Crowd.of(v, rho, corroboration(rho, (n - 1) * u / sure, min(m, n - 1)), false)


def mean_agreement(near: float, most: float) -> float:
    """Return rho = near / most, held in [0.02, 1].

    >>> mean_agreement(1.0, 2.0)
    0.5
    """
    return min(max(near / max(most, EPS), 0.02), 1.0)


def excess(agree: float, sure: float, k: int) -> float:
    """Eq. 1: v = (K U - 1) / q, q = (mean |y_i|^2 - 1 / K) / (1 - 1 / K).

    U is the mean of y_i . y_j over pairs of samples, an unbiased Simpson index of the classes, less its standard error
    (of a mean over pairs: twice that of the mean of the N agreements), as only a sure excess should push classes away;
    q is what two samples of one class agree at most.

    >>> excess(0.5, 1.0, 4)
    1.0
    """
    q = (sure - 1 / k) / (1 - 1 / k)
    return float(max((k * agree - 1) / max(q, 1e-6), 1 / LARGEST))


def corroboration(rho: float, company: float, m: int) -> float:
    """Eq. 2: chi = min(1, rho / min(1, company / m)), rho = sum_ij W_ij y_i . y_j / sum_ij W_ij |y_i|^2.

    Where a text draws images of other classes, predictions agree and images do not look alike. `company`, (N - 1) U
    over mean |y_i|^2, is how many other samples of its class a sample has if U is right: with fewer than m, not all of
    its neighbours can agree.

    >>> corroboration(0.4, 6.0, 3), corroboration(0.1, 0.3, 3)
    (0.4, 1.0)
    """
    return min(1.0, rho / min(max(company / m, 1e-6), 1.0))


def anchors(text: Array, p: Array, centre: Array, along: float, square: float, scale: Array | float = 1.0) -> Array:
    """Eq. 4: mu'_k = mean image + slope (t_k - mean text), unit rows (K, d), in the metric `scale` (d,).

    The slope is that of least squares of images on their expected text, both centred, held in [0, 1]: text and images
    lie apart, and images follow their text only in part. From means over the samples: p of y_i (K,), `centre` of f_i
    (d,); with the expected text x_i = sum_k y_ik t_k, `along` is the mean of f_i . x_i and `square` that of |x_i|^2.

    >>> import numpy as np
    >>> anchors(np.eye(2), np.asarray([0.5, 0.5]), np.asarray([0.5, 0.5]), 1.0, 1.0)
    array([[1., 0.],
           [0., 1.]])
    """
    xp, text_centre = namespace(text), p @ text  # (d,)
    along -= float(xp.sum(centre * text_centre))
    square -= float(xp.sum(text_centre * text_centre))
    slope = min(max(along / square, 0.0), 1.0) if square > 1e-6 else 0.0
    found = text * (slope / scale)  # (K, d)
    found += (centre - slope * text_centre) / scale
    return unit_rows(found)


def presence(near: Array, most: Array, total: Array) -> Array:
    """Eq. 5, its pi_k: how far neighbours agree on class k, against how far they do on average, (K,).

    pi_k = min(1, (n_k rho_k + rho) / ((n_k + 1) rho)), n_k = sum_i y_ik, where rho_k = near_k / most_k is the agreement
    of neighbours on the class (`agreement_by_class`) and rho = sum_k near_k / sum_k most_k that on all. Images of a
    class that is there look alike, and so the little of it that each is predicted to be agrees. What is predicted of a
    class that is absent comes from single images of other classes. One pseudo-sample has the average.

    >>> import numpy as np
    >>> presence(np.asarray([9.0, 0.1]), np.asarray([10.0, 1.0]), np.asarray([9.0, 9.0])).round(2)
    array([1.  , 0.21])
    """
    xp = namespace(near)
    rho = mean_agreement(float(xp.sum(near)), float(xp.sum(most)))
    return clip((total * (near / clip(most, EPS)) + rho) / ((total + 1) * rho), 0, 1)


def bias_weight(pseudo_count: float) -> float:
    """Eq. 5, its weight: g = a / (a + 1/2).

    The log share of class k among the predictions is its true log share, of variance near 1 / a, plus the bias of the
    text, of variance 2. The bias is expected to be the part 2 / (2 + 1 / a) of what is seen.

    >>> bias_weight(0.5)
    0.5
    """
    return pseudo_count / (pseudo_count + 0.5)


def text_bias(y: Array, total: Array, expected: Array | float, presence: Array) -> Array:
    """Eq. 5: b_ik = log((sum_j y_jk - y_ik + 1) / (expected_k + 1)), (N, K): how much more often a class is predicted.

    `total` (K,) is sum_j y_j over all samples; `expected` is (N - 1) / K, or (N - 1) times the known share of a class.
    The other samples alone are counted, with one pseudo-sample, so that a sample does not count against itself. Where a
    class is predicted too seldom, b is multiplied by pi_k^2 (`presence`): a class that is absent is not to be helped.

    >>> import numpy as np
    >>> text_bias(np.asarray([[1.0, 0.0]]), np.asarray([2.0, 0.0]), 0.5, np.asarray([1.0, 0.5])).round(2)
    array([[ 0.29, -0.1 ]])
    """
    xp = namespace(y)
    bias = xp.log((total + 1 - y) / (expected + 1))
    return xp.where(bias < 0, bias * presence**2, bias)


class Groups(NamedTuple):
    """Samples by their labels: what an analysis of variance needs."""

    mean: Array  # (K, d) zero where there is no sample
    count: Array  # (K,)
    freedom: int  # N less the number of classes with samples

    @classmethod
    def of(cls, f: Array, labels: Array, k: int) -> Groups:
        """Collect the groups of samples with one label."""
        return cls.of_sums(class_sums(labels, f, k), like(class_counts(labels, k), f), f.shape[0])

    @classmethod
    def of_sums(cls, sums: Array, count: Array, n: int) -> Groups:
        """Return the groups of n samples from the sum of the samples of each, (K, d), and their number, (K,)."""
        return cls(sums / clip(count, 1)[:, None], count, n - int(namespace(sums).sum(count > 0)))


def metric(square: Array, groups: Groups, n: int) -> Array:
    """Eq. 6: the standard deviation of each dimension within classes, shrunk to their mean by d pseudo-samples, (d,).

    Dividing by it makes the classes round, as a von Mises-Fisher distribution wants them. Relative to the mean: a scale
    does not matter to a cosine. `square` is the mean of f_i^2 over the n samples, (d,).

    >>> import numpy as np
    >>> metric(np.full(2, 0.5), Groups.of(np.eye(2), np.asarray([0, 1]), 2), 2)
    array([1., 1.])
    """
    xp, d = namespace(square), square.shape[0]
    between = xp.sum(groups.count[:, None] * groups.mean**2, axis=0) / n  # (d,)
    variance = clip(square - between, 0)  # (d,)
    average = clip(xp.mean(variance), EPS)
    return xp.sqrt((groups.freedom * variance / average + d) / (groups.freedom + d))


def anchor_weight(anchor: Array, groups: Groups, n: int) -> float:
    """Eq. 7: alpha = sigma^2 / tau^2, held in [0.3, 30]: the empirical Bayes weight of an anchor in a class mean.

    sigma^2 is the variance within classes and tau^2 that of the class means about their anchors, both by an analysis of
    variance of the zero-shot labels of n unit rows. Where every sample has a class of its own, there is none and alpha
    is 1. Only classes with samples count, so that the others may be left out of both.

    >>> import numpy as np
    >>> anchor_weight(np.eye(2), Groups(np.eye(2), np.ones(2), 0), 2)
    1.0
    """
    xp = namespace(anchor)
    if groups.freedom < 1:
        return 1.0
    mean, count, freedom = groups
    within: float = (n - float(xp.sum(count * row_dots(mean, mean)))) / freedom
    about = float(xp.sum(count * row_dots(mean - anchor, mean - anchor)))
    tau2: float = (about - (n - freedom) * within) / n
    return min(max(within / max(tau2, 1e-3), 0.3), 30.0)


class Labels(NamedTuple):
    """Known labels of the samples at hand, and sums of labelled samples of the past."""

    known: Any  # (N,) class numbers, -1 where not known; None: none of these is
    mask: Any  # (N, 1)
    hot: Any  # (N, K)
    sums: Array  # (K, d)
    counts: Array  # (K,)

    @classmethod
    def of(cls, known: Array | None, state: TIDEState, k: int) -> Labels:
        """Collect what is known of samples of k classes."""
        past = (state.known_sums, state.known_counts)
        if known is None or not bool(namespace(known).any(known >= 0)):
            return cls(None, None, None, *past)
        return cls(known, (known >= 0)[:, None], one_hot(known, k, state.text), *past)

    def clamp(self, z: Array) -> Array:
        """Return assignments with the known ones in their place."""
        return z if self.mask is None else namespace(z).where(self.mask, self.hot, z)

    @property
    def any(self) -> bool:
        """Whether some label is known, here or in the past."""
        past = self.counts is not None and bool(namespace(self.counts).any(self.counts > 0))
        return self.known is not None or past


NO_LABELS = Labels(None, None, None, None, None)


class Model(NamedTuple):
    """What stays the same while z is estimated, of some samples."""

    f: Array  # (N, d) in the metric
    anchor: Array  # (K, d) in the metric
    at_anchor: Array  # (N, K) cosines of both
    log_y: Array  # (N, K) less the bias of the text
    alpha: float
    sharpness: float
    left_out: Array  # (N, 1) share of a sample that is left out of its class
    vote_weight: float
    smoothing: float
    prior: Array | None  # (K,) log shares of the classes, where known


class Means(NamedTuple):
    """Statistics of the H classes with labels after an M-step; a class without any is at its anchor."""

    weight: Array  # (N, H) gamma_i z_ik, discounted for samples without a known label
    sums: Array  # (H, d)
    soft: Array  # (H,)
    hard: Array  # (H,)
    places: Array  # (N,) the label of each sample, as a place in the H classes
    own: Array  # (N,) what a sample adds to the hard count of its label


def cosine_to_means(model: Model, means: Means, some: Any, left_out: Array, dots: Array | None = None) -> Array:
    """Eqs. 8 and 9: cos(f_i, R_ik), R_ik = beta_ik S_k / s_k + (1 - beta_ik) mu'_k, beta = c / (c + alpha), (N, H).

    All of them without the share `left_out` of sample i: S_k - u gamma_i z_ik f_i, and so on. Nothing but f_i . S_k is
    N x H x d work, as |S_k - u f_i|^2 = |S_k|^2 - 2 u f_i . S_k + u^2; it is `dots` (N, H) where it is at hand.
    """
    xp, f = namespace(model.f), model.f
    anchor, at_anchor = rows_at(model.anchor, some), columns(model.at_anchor, some)  # (H, d), (N, H)
    mine = left_out * means.weight  # (N, H)
    each = xp.arange(f.shape[0], device=device(f))
    hard = xp.zeros_like(mine) + means.hard  # (N, H)
    hard[each, means.places] = clip(hard[each, means.places] - left_out[:, 0] * means.own, 0)
    beta = hard / (hard + model.alpha)  # (N, H)
    rest = 1 - beta
    beta /= clip(means.soft - mine, 1e-9)
    dots = f @ means.sums.T if dots is None else dots  # (N, H)
    top = beta * (dots - mine) + rest * at_anchor  # f_i . R_ik
    square = row_dots(means.sums, means.sums) + mine * (mine - 2 * dots)  # |S_k - mine f_i|^2
    along = row_dots(means.sums, anchor) - mine * at_anchor  # (S_k - mine f_i) . mu'_k
    square = beta * (beta * square + 2 * rest * along) + rest * rest
    return top / xp.sqrt(clip(square, EPS))


def sharpening(density: float, per_class: float, alpha: float) -> float:
    """Eq. 10: s / s_0 = 1 + 3 w beta, beta = x / (x + alpha) for a class of x = N / K samples.

    Where few classes are there, the prior does most of the work. Where all are, what tells them apart is the class
    means, as far as they are made of samples.

    >>> sharpening(1.0, 2.0, 2.0), sharpening(0.0, 2.0, 2.0)
    (2.5, 1.0)
    """
    return 1 + 3 * density * per_class / (per_class + alpha)


def reliability(right: int, known: int, per_class: float) -> float:
    """Eq. 12: 1 / (1 + N / K (1 - r)^2), r = (right + 1) / (known + 2): what a label of the model counts, against 1.

    A class mean of n labels of which the share 1 - r is wrong is off by a bias that no n removes: it is worth at most
    as many known labels as make its variance as large as that bias squared.

    >>> reliability(98, 98, 10.0) > 0.99, round(reliability(49, 98, 10.0), 2)
    (True, 0.29)
    """
    r = (right + 1) / (known + 2)
    return 1 / (1 + per_class * (1 - r) ** 2)


def trust(base: Array, cosine: Array, known: Array, sharpness: float) -> float:
    """Eq. 13: the weight of text, votes and prior, against that of class means, under which known labels are likeliest.

    Of each labelled sample, `base` and `cosine` (n, K) are as they would be without it. Round weights are tried, with a
    penalty on leaving 1, so that few labels change little. Each is judged at the best of a few temperatures of the sum,
    with a penalty as well: predictions that are only too sure would gain by any smaller weight.

    >>> import numpy as np
    >>> trust(np.asarray([[0.0, 9.0]]), np.asarray([[5.0, 0.0]]), np.asarray([0]), 1.0) < 1
    True
    """
    xp, best = namespace(base), (-math.inf, 1.0)
    for text in TRUSTS:
        logits = text * base + sharpness * cosine  # (n, K)
        for temper in TEMPERS:
            fit = float(xp.sum(xp.take_along_axis(log_softmax(temper * logits), known[:, None], axis=1)))
            fit -= RELUCTANCE[0] * math.log(text) ** 2 + RELUCTANCE[1] * math.log(temper) ** 2
            best = max(best, (fit, text))
    return best[1]


class Absent(NamedTuple):
    """The R classes without labels and with next to no assignments: all that changes is their prior.

    Their logits are c_ik + log(n_k + a*) with c_ik that never change. What an iteration needs of them, sums over
    classes or samples, is products of matrices by vectors; their part in votes and leave-one-out is neglected.
    """

    classes: Array  # (R,) numbers
    top: Array  # (N,) max_k c_ik
    shares: Array  # (N, R) e_ik = exp(c_ik - top_i)
    logs: Array  # (N, R) e_ik (c_ik - top_i)

    @classmethod
    def of(cls, classes: Array, logits: Array) -> Absent:
        """Leave classes alone whose logits without the prior are (N, R)."""
        xp = namespace(logits)
        top = xp.max(logits, axis=1)
        logits = logits - top[:, None]
        shares = xp.exp(logits)
        return cls(classes, top, shares, shares * logits)

    def log_sum(self, pull: Array, rows: slice) -> tuple[Array, Array]:
        """Return log sum_k exp(logits_ik) over these classes and the entropy of their distribution, of some samples.

        `pull` (R,) is n_k + a*.
        """
        xp, shares = namespace(pull), self.shares[rows]
        total = shares @ pull  # (b,)
        log_total = xp.log(total)
        entropy = log_total - (self.logs[rows] @ pull + shares @ (pull * xp.log(pull))) / total
        return self.top[rows] + log_total, entropy

    def counts(self, pull: Array, log_total: Array) -> Array:
        """Return the n_k that follow from log sum_k exp(logits_ik) over all classes, (N,): (R,)."""
        return pull * (self.shares.T @ namespace(log_total).exp(self.top - log_total))


def idle_classes(z: Array, labels: Array, smoothing: float) -> Array | None:
    """Return a mask of the classes of z (N, K) that may be left alone, (K,), where they are many; None otherwise.

    Only numpy gains by it: a GPU is quicker with all classes than with waiting for their number.
    """
    if is_torch_array(z):
        return None
    xp = namespace(z)
    bound = IDLE * xp.minimum(xp.sum(z, axis=0) + smoothing, 0.1 + 0 * z[0, :])  # (L,)
    idle = (xp.max(z, axis=0) <= bound) & (class_counts(labels, z.shape[1]) == 0)
    return idle if int(xp.sum(idle)) > z.shape[1] // 4 else None


def assign(logits: Array, absent: tuple[Array, Array] | None = None) -> tuple[Array, Array, Array]:
    """Eq. 11, its softmax: z (N, L), and of all K classes the entropy and log sum of exp, (N,); overwrites the logits.

    `absent` are log sum of exp and entropy of the classes that the logits are without, (N,) each.

    >>> import numpy as np
    >>> assign(np.zeros((1, 2)))[0]
    array([[0.5, 0.5]])
    """
    xp = namespace(logits)
    top = xp.max(logits, axis=1)  # (N,)
    if absent is not None:
        top = xp.maximum(top, absent[0])
    logits -= top[:, None]
    z = xp.exp(logits)
    total, entropy = row_sums(z), -row_dots(z, logits)  # (N,), (N,)
    if absent is not None:
        idle = absent[0] - top
        mass = xp.exp(idle)  # (N,)
        entropy = entropy + mass * (absent[1] - idle)
        total = total + mass
    z /= total[:, None]
    log_total = xp.log(total)
    return z, entropy / total + log_total, top + log_total


def learn_from_known(
    model: Model, known: Array, means: Means, some: Any, base: Array, counts: Array, z: Array, per_class: float
) -> tuple[float, float]:
    """Return the weight of the text and the reliability of other labels, from n' labelled samples (Eqs. 12, 13).

    What is asked is what the model makes of each labelled sample where its label is not known: without its own part in
    class means and counts, and with the votes of its neighbours. `base` (n', K) are text and votes.
    """
    xp = namespace(z)
    cosine = 1 * model.at_anchor  # (n', K)
    cosine[:, some] = cosine_to_means(model, means, some, model.left_out)
    base = base + class_pull(model, counts, z, model.left_out)
    text = trust(base, cosine, known, model.sharpness)
    found = xp.argmax(text * base + model.sharpness * cosine, axis=1)
    return text, reliability(int(xp.sum(found == known)), int(known.shape[0]), per_class)


def class_pull(model: Model, counts: Array, z: Array, left_out: Any) -> Array:
    """Eq. 11, its prior: log(n_k - u z_ik + a*), (N, L), the collapsed mixture's; or the log shares that are known."""
    if model.prior is not None:
        return model.prior + 0 * z
    pull = clip(counts - left_out * z, 0)
    pull += model.smoothing
    return namespace(z).log(pull)


def expected_right(q: float, density: float, n: int) -> float:
    """Eq. 14: the share of n labels expected right whose mean probability under zero-shot is q.

    The assignments become z^T, rows scaled to sum 1, with T such that their mean confidence is this share. Zero-shot
    predictions are calibrated on average: of labels with mean probability q under y the share q is right. The batch is
    a second look. If it were independent, (1 - q)^2 would be wrong; it is not, and less so the denser the classes are:
    (1 - q)^r, r = 1 + (0.7 - 0.55 w) (1 - 1/N), which for one sample is zero-shot's q.

    >>> expected_right(0.5, 0.5, 1)
    0.5
    """
    return 1 - math.pow(max(1 - q, 0.0), 1 + (0.7 - 0.55 * density) * (1 - 1 / n))


def log_ratios(z: Array, label: Array) -> Array:
    """Return log(z_ik / z_il), l the label of sample i, (N, K); `label` is (N, 1).

    >>> import numpy as np
    >>> log_ratios(np.asarray([[0.5, 0.5]]), np.asarray([[0]]))
    array([[0., 0.]])
    """
    xp = namespace(z)
    log_z = xp.log(z + 1e-30)
    log_z -= xp.take_along_axis(log_z, label, axis=1)
    return log_z


def confidences(e: Array, log_z: Array, power: float) -> tuple[Array, Array]:
    """Return the probability of the label under z^T and its derivative by log T, (N,) each.

    `log_z` (N, K) are the `log_ratios` and `e` is exp(T log_z).

    >>> import numpy as np
    >>> confidences(np.ones((1, 2)), np.zeros((1, 2)), 1.0)[0]
    array([0.5])
    """
    confidence = 1 / row_sums(e)  # (N,)
    return confidence, -power * row_dots(e, log_z) * confidence**2


def calibration(target: float, means_at: Callable[[float], tuple[float, float]]) -> float:
    """Eq. 14, its T, held in [0.02, 5], by Newton's method on log T.

    `means_at(T)` returns the means over the samples of `confidences`; its last call is with the T that is returned.

    >>> round(calibration(0.2, lambda power: (power / 10, power / 10)), 3)
    2.0
    """
    power = 1.0
    for _ in range(NEWTON):
        confidence, rise = means_at(power)
        gap = target - confidence
        if abs(gap) < 1e-5:
            return power
        power *= math.exp(min(max(gap / max(rise, 1e-6), -1.0), 1.0))
        if not 0.02 < power < 5:
            power = min(max(power, 0.02), 5.0)
            break
    means_at(power)
    return power


def unlikeness(cosine: Array, f: Array, scale: float, negatives: Array) -> Array:
    """Eq. 15 of a sample alone, from its cosines to the classes (N, K), itself (N, d) and negatives (G, d): (N,).

    1 - (max_k f_i . t_k - mean_k f_i . t_k), what the maximum softmax at temperature 1 sorts by. Negatives add half the
    log odds of the share that they take in a softmax over classes and negatives, in units of a cosine.

    >>> import numpy as np
    >>> unlikeness(np.asarray([[1.0, 0.0]]), np.eye(2)[:1], 100.0, np.zeros((0, 2)))
    array([0.5])
    """
    xp = namespace(cosine)
    score = 1 - (xp.max(cosine, axis=1) - xp.mean(cosine, axis=1))  # (N,)
    if negatives.shape[0]:
        score = score + (log_sum_exp(scale * (f @ negatives.T)) - log_sum_exp(scale * cosine)) / (2 * scale)
    return score


def with_neighbours(score: Array, votes_of: Any) -> Array:
    """Eq. 15, its mean of a sample's score and the mean score of its neighbours, (N,).

    >>> import numpy as np
    >>> with_neighbours(np.asarray([1.0, 0.0]), lambda x: x[::-1])
    array([0.5, 0.5])
    """
    xp = namespace(score)
    both = votes_of(xp.stack([score, xp.ones_like(score)], axis=1))  # (N, 2)
    around = xp.where(both[:, 1] > 0, both[:, 0] / clip(both[:, 1], EPS), score)
    return (score + around) / 2


def log_sum_exp(x: Array) -> Array:
    """Return log sum_k exp(x_k) of each row, (N,).

    >>> import numpy as np
    >>> log_sum_exp(np.zeros((1, 1)))
    array([0.])
    """
    xp = namespace(x)
    top = xp.max(x, axis=1, keepdims=True)
    return (top + xp.log(row_sums(xp.exp(x - top)))[:, None])[:, 0]


def remember(state: TIDEState, f: Array, known: Array, count: int = 1) -> TIDEState:
    """Return the state with the labelled ones of some samples added to the class sums, (n, d) and (n,).

    With -f and the count -1 they are taken out again.
    """
    xp = namespace(f)
    if not bool(xp.any(known >= 0)):
        return state
    hot = one_hot(known, state.text.shape[0], f)  # (n, K)
    sums, counts = state.known_sums + hot.T @ f, state.known_counts + count * xp.sum(hot, axis=0)
    return replace(state, known_sums=sums, known_counts=counts)


def rows_at(x: Array, which: Any) -> Array:
    """Return some rows of a matrix; `slice(None)` is all of them, without a copy.

    >>> import numpy as np
    >>> rows_at(np.eye(2), np.asarray([1]))
    array([[0., 1.]])
    """
    return x if isinstance(which, slice) else namespace(x).take(x, which, axis=0)


def rows_of(result: Result, first: int) -> Result:
    """Return the result of the samples from number `first` on."""
    if not first or result.unknown is None:
        return result
    return replace(
        result, probs=result.probs[first:, :], zero_shot=result.zero_shot[first:, :], unknown=result.unknown[first:]
    )


# The samples, and what is made of their sums


@dataclass
class Predicted(Sums):
    """What anchors and metric need of the zero-shot predictions; of the H classes with labels only, where `some`."""

    n: int
    total: Array  # (K,) sum_i y_i
    centre: Array  # (d,) sum_i f_i
    square: Array  # (d,) sum_i f_i^2
    along: float  # sum_i f_i . x_i, x_i = sum_k y_ik t_k
    expected: float  # sum_i |x_i|^2
    sums: Array  # (H, d) sum of the samples with each zero-shot label
    counts: Array  # (H,) their number
    some: Any = field(default_factory=lambda: ALL, metadata=SAME)  # (H,) class numbers; a slice: all


@dataclass
class Compared(Sums):
    """What needs the sums of all predictions, and the metric."""

    agree: float  # sum over the samples of their agreements
    agree_square: float  # sum of those squared
    own: float  # sum_i |y_i|^2
    confidence: float  # sum_i max_k y_ik
    length: float  # sum_i of the length of f_i in the metric
    near: Array  # (K,) sum_ij W_ij y_ik y_jk
    most: Array  # (K,) sum_ij W_ij y_ik^2
    sums: Array  # (H, d) sum of the samples with each zero-shot label, in the metric


@dataclass
class Assigned(Sums):
    """What an E-step adds up."""

    sums: Array  # (H, d) sum_i gamma_i z_ik f_i
    soft: Array  # (H,) sum_i gamma_i z_ik
    hard: Array  # (H,) labels of each class, those that the model gave discounted
    counts: Array  # (K,) sum_i z_ik
    labels: Array  # (K,) labels of each class
    right: float  # sum of the zero-shot probability of the label over the samples whose label is not known
    free: int  # their number
    changed: int  # labels that differ from the z before
    moved: float = field(metadata=LARGER)  # largest difference to the z before
    some: Any = field(default_factory=lambda: ALL, metadata=SAME)  # (H,) class numbers; a slice: all


@dataclass
class Confident(Sums):
    """What the calibration adds up."""

    confidence: float
    slope: float  # its derivative by the logarithm of the temperature


class Fixed(NamedTuple):
    """What stays the same for all samples while z is estimated."""

    scale: Array  # (d,) the metric
    anchor: Array  # (K, d) in the metric
    total: Array  # (K,) sum_i y_i
    expected: Any  # (K,) or one number: what `total` would be without the bias of the text
    presence: Array  # (K,)
    bias_weight: float
    alpha: float
    sharpness: float
    left_out: float
    vote_weight: float
    smoothing: float
    prior: Array | None  # (K,)
    per_class: float  # N / K

    def like(self, ref: Array) -> Fixed:
        """Return it with arrays of the kind of `ref`."""
        return self._replace(**{name: like(x, ref) for name, x in self._asdict().items() if hasattr(x, "dtype")})


class Classes(NamedTuple):
    """What an M-step has of all samples: the H classes with labels, as the others are at their anchors."""

    some: Any  # (H,) their numbers; a slice: all
    sums: Array  # (H, d)
    soft: Array  # (H,)
    hard: Array  # (H,)
    counts: Array  # (K,)

    def like(self, ref: Array) -> Classes:
        """Return them with arrays of the kind of `ref`; all classes are a slice, which takes no copies."""
        some = self.some
        if not isinstance(some, slice):
            every = len(some) == len(self.counts)
            some = ALL if every else namespace(ref).asarray(some, device=device(ref))
        return Classes(some, *(like(x, ref) for x in self[1:]))

    def means(self, z: Array, gamma: Array, labels: Array, trusted: Array, at: Any) -> Means:
        """Return the statistics for some samples: z (b, L), weights (b,), labels (b,), and what these count (b,).

        `at` (H,) says where the classes are among the L.
        """
        places = labels if isinstance(self.some, slice) else namespace(z).searchsorted(self.some, labels)
        return Means(columns(z, at) * (gamma * trusted)[:, None], self.sums, self.soft, self.hard, places, trusted)


class TIDERows(Rows):
    """The samples of TIDE.

    In memory, what an E-step needs of zero-shot predictions and cosines is kept; in blocks it is made again in every
    step, as keeping it would take two N x K arrays of 32 bits. In 16 bits, the fourth root of an assignment is stored:
    it is exact to 3e-5 near 1 (float16: 1e-3) and keeps what is far below 1 / 65535, of which the calibration raises
    powers. `known` labels are for samples in memory.

    >>> import numpy as np
    >>> eye = np.eye(3, dtype=np.float32)
    >>> TIDERows(TIDE(), eye, eye, 100.0).first(None).counts
    array([1., 1., 1.])
    """

    STATE: ClassVar[tuple[str, ...]] = (*Rows.STATE, "gamma", "unknown")
    COLUMNS: ClassVar[tuple[str, ...]] = (*Rows.COLUMNS, "unknown")
    CHANGES: ClassVar[tuple[str, ...]] = ("first", "step", "finish")

    def __init__(self, *given: Any, known: Labels = NO_LABELS, **options: Any) -> None:
        super().__init__(*given, **options)
        self.gamma, self.unknown = namespace(self.f).ones_like(self.f[:, 0]), self._empty(len(self.f))
        self.known, self.trusted, self.done = known, self.gamma, 0
        # compiled loops, for samples in memory without known labels
        self.loops: Any = compiled(self.f) if self.alone and not known.any else None
        self.present: Any = ALL  # (L,) the classes that z has, where the others are left alone
        self.absent: Absent | None = None  # those
        self.new: Any = None  # room for the next z
        self.cosine: Any = None  # (n, K), these five in memory only
        self.log_y: Any = None  # (n, K)
        self.at_anchor: Any = None  # (n, K)
        self.in_metric: Any = None  # (n, d)
        self.log_z: Any = None  # (n, K) for the calibration

    def first(self, negatives: Array | None) -> Predicted:  # type: ignore[override]
        """Make the zero-shot predictions, and score how unlike all of the classes each sample is (Eq. 15)."""
        names = self.text[:0] if negatives is None else like(negatives, self.f)  # (G, d)

        def block(rows: slice) -> Predicted:
            f = self.f[rows]  # (b, d)
            y, cosine, _ = self._zero_shot(rows)  # (b, K), (b, K)
            self.unknown[rows] = unlikeness(cosine, f, self.logit_scale, names)
            expected = y @ self.text  # (b, d)
            some, places, count = self._labelled(self.labels[rows])
            return Predicted(
                len(y), y.sum(0), f.sum(0), (f * f).sum(0), _total(row_dots(y, cosine)),
                _total(row_dots(expected, expected)), class_sums(places, f, count),
                like(class_counts(places, count), f), some,
            )  # fmt: skip

        found: Predicted = self._add_up(block, "zero-shot")
        return found

    def _zero_shot(self, rows: slice) -> tuple[Array, Array, Array]:
        if not self.alone:
            return super()._zero_shot(rows)
        xp = namespace(self.f)
        self.cosine = xp.matmul(self.f, self.text.T, out=self._spare())  # (n, K)
        self.log_y = log_softmax(self.logit_scale * self.cosine)  # (n, K)
        self.y = xp.exp(self.log_y, out=self.z)
        self.z = self.known.clamp(self.y)
        self.labels = xp.argmax(self.z, axis=1)
        return self.y, self.cosine, self.labels

    def _labelled(self, labels: Array) -> tuple[Any, Array, int]:
        """Return the classes with labels (H,), the labels as places among them, and H; on shards and GPUs all K."""
        if not self.alone or is_torch_array(self.f):
            return ALL, labels, len(self.text)
        some, places = np.unique(labels, return_inverse=True)  # the array API's takes several times as long
        return some, places, len(some)

    def compare(self, total: Array, n: int, scale: Array) -> Compared:
        """Compare the zero-shot predictions with those of all n samples and of the neighbours (Eqs. 1, 2)."""
        xp, total, scale = namespace(self.f), like(total, self.f), like(scale, self.f)
        degree = self.votes_of(xp.ones_like(self.f[:, :1]))  # (n, 1)

        def part(at: slice) -> tuple[Array, ...]:
            y = self.y[at] if self.alone else self._wide(at)  # (b, K)
            votes = self.votes_of.rows(at)(self.y) if self.alone else self._votes(at)  # (b, K)
            own = row_dots(y, y)  # (b,)
            by_class = agreement_by_class(y, votes, degree[at])  # (K,), (K,)
            return agreements(y, total, own, n), own, xp.max(y, axis=1), *by_class

        def block(rows: slice) -> Compared:
            *parts, near, most = zip(*in_threads(part, self._cut(rows)), strict=True)
            agree, own, confidence = (xp.concat(column) for column in parts)
            f, lengths = self._scaled(rows, scale)
            _, places, count = self._labelled(self.labels[rows])
            if self.alone:
                self.in_metric = f
            square = float((to_numpy(agree).astype(float) ** 2).sum())
            return Compared(
                _total(agree), square, _total(own), _total(confidence), _total(lengths), sum(near[1:], near[0]),
                sum(most[1:], most[0]), class_sums(places, f, count),
            )  # fmt: skip

        found: Compared = self._add_up(block, "classes")
        return found

    def _scaled(self, rows: slice, scale: Array) -> tuple[Array, Array]:
        """Return some rows in the metric, of unit length, (b, d), and the lengths they had, (b,)."""
        f = self.f[rows] / scale
        lengths = row_norms(f)  # (b,)
        f /= lengths[:, None]
        return f, lengths

    def step(self, fixed: Fixed, classes: Classes) -> Assigned:
        """E-step with the classes given, Eq. 11, and the sums of Eq. 8 for the next M-step."""
        fixed, classes = (fixed, classes) if self.alone else (fixed.like(self.f), classes.like(self.f))
        if self.alone and self.at_anchor is None:
            self._keep(fixed)
        if self.alone and self.done == 2 and fixed.prior is None and not self.known.any:
            self._leave_alone(fixed)
        self.done += 1
        text = 1.0
        if self.known.known is not None and len(classes.hard):
            text = self._learn(fixed, classes)
        before, weight, trusted = self.labels, self.gamma, self.trusted
        if self.new is None or self.new.shape != self.z.shape:
            self.new = self._empty(*self.z.shape, dtype=self.z.dtype)
        labels, gamma = namespace(before).empty_like(before), namespace(weight).empty_like(weight)

        def block(rows: slice) -> Assigned:
            return self._assign(rows, fixed, classes, text, (before, weight, trusted), labels, gamma)

        total: Assigned = self._add_up(block, "iteration")
        kept = self.keep and self.z is self.y
        self.z, self.new = self.new, None if kept else self.z
        self.labels, self.gamma = labels, gamma
        return total

    def _keep(self, fixed: Fixed) -> None:
        """Keep what all E-steps need of samples in memory."""
        xp = namespace(self.f)
        self.at_anchor = xp.matmul(self.in_metric, fixed.anchor.T, out=self._spare())  # (n, K)

        def part(at: slice) -> tuple[()]:
            bias = text_bias(self.y[at], fixed.total, fixed.expected, fixed.presence)
            bias *= fixed.bias_weight
            self.log_y[at] -= bias
            return ()

        self._in_parts(part, self.blocks[0])

    def _leave_alone(self, fixed: Fixed) -> None:
        """Leave the classes alone that next to no sample is assigned to, where they are many."""
        idle = idle_classes(self.z, self.labels, fixed.smoothing)
        if idle is None:
            return
        xp = namespace(self.z)
        self.present, gone = xp.nonzero(~idle)[0], xp.nonzero(idle)[0]  # (L,), (R,)
        self.absent = Absent.of(gone, columns(self.log_y, gone) + fixed.sharpness * columns(self.at_anchor, gone))
        self.z, self.log_y, self.at_anchor = (columns(x, self.present) for x in (self.z, self.log_y, self.at_anchor))

    def _models(self, rows: slice, fixed: Fixed) -> Callable[[slice], tuple[Model, Array]]:
        """Return the function that gives the model of a part of some rows, and its zero-shot predictions (b, K)."""
        xp = namespace(self.f)
        free = xp.ones_like(self.gamma) if self.known.mask is None else like(~self.known.mask[:, 0], self.f)
        anchor = rows_at(fixed.anchor, self.present)
        given = {key: getattr(fixed, key) for key in ("alpha", "sharpness", "vote_weight", "smoothing", "prior")}
        if self.alone:

            def kept(at: slice) -> tuple[Model, Array]:
                left_out = fixed.left_out * free[at][:, None]
                model = Model(
                    self.in_metric[at], anchor, self.at_anchor[at], self.log_y[at], left_out=left_out, **given
                )
                return model, self.y[at]

            return kept
        f, _ = self._scaled(rows, fixed.scale)  # (b, d)
        # products use all cores by themselves, what follows in threads does not
        cosine, at_anchor = self.f[rows] @ self.text.T, f @ fixed.anchor.T  # (b, K), (b, K)

        def made(at: slice) -> tuple[Model, Array]:
            here = slice(at.start - rows.start, at.stop - rows.start)
            log_y = log_softmax(self.logit_scale * cosine[here])  # (b, K)
            y = xp.exp(log_y)
            log_y -= fixed.bias_weight * text_bias(y, fixed.total, fixed.expected, fixed.presence)
            left_out = fixed.left_out * free[at][:, None]
            return Model(f[here], anchor, at_anchor[here], log_y, left_out=left_out, **given), y

        return made

    def _assign(
        self, rows: slice, fixed: Fixed, classes: Classes, text: float, old: tuple[Array, ...], labels: Array,
        gammas: Array,
    ) -> Assigned:  # fmt: skip
        """Make the assignments of some rows, and what they add up to."""
        xp, k, model_of, (before, weight, trusted) = namespace(self.f), len(self.text), self._models(rows, fixed), old
        f = self.in_metric if self.alone else self._scaled(rows, fixed.scale)[0]  # (b, d)
        dots, counts = f @ classes.sums.T, classes.counts[self.present]  # (b, H), (L,)
        among = classes.some if self.absent is None else xp.searchsorted(self.present, classes.some)  # (H,)
        pull = None if self.absent is None else classes.counts[self.absent.classes] + fixed.smoothing  # (R,)

        def part(at: slice) -> tuple[Array, ...]:
            z, (model, y) = self._wide(at), model_of(at)  # (b, L), (b, K)
            logits = self._votes(at)  # (b, L)
            logits *= fixed.vote_weight
            logits += model.log_y
            logits += class_pull(model, counts, z, model.left_out)
            if text != 1:
                logits *= text
            logits += fixed.sharpness * model.at_anchor
            if len(classes.hard):
                means = classes.means(z, weight[at], before[at], trusted[at], among)
                here = slice(at.start - rows.start, at.stop - rows.start)
                nearer = cosine_to_means(model, means, among, model.left_out, dots[here])  # (b, H)
                nearer -= columns(model.at_anchor, among)
                nearer *= fixed.sharpness
                logits[:, among] += nearer
            idle = None if self.absent is None else self.absent.log_sum(pull, at)
            p, entropy, log_total = assign(logits, idle)  # (b, L), (b,), (b,)
            if self.known.mask is not None:
                p = xp.where(self.known.mask[at], self.known.hot[at], p)
            own = xp.argmax(p, axis=1)
            own = own if isinstance(self.present, slice) else self.present[own]
            self.new[at] = self._narrow(p)
            right = xp.take_along_axis(y, own[:, None], axis=1)[:, 0]
            return own, entropy, log_total, right, xp.max(xp.abs(p - z), axis=1)

        if self.loops is not None:
            own, entropy, self.log_total, right, moved = self._in_loops(fixed, classes, counts, among, pull, dots, old)
        else:
            own, entropy, self.log_total, right, moved = self._in_parts(part, rows)
        labels[rows] = own
        gamma = clip(1 - entropy / math.log(max(k, 2)), 0, 1)  # (b,)
        free = xp.ones_like(gamma)
        if self.known.mask is not None:
            free = like(~self.known.mask[:, 0], gamma)
            gamma = gamma * free + (1 - free)
            self.trusted = self.reliable * free + (1 - free)
        gammas[rows] = gamma
        z = self._floats(self.new[rows])  # (b, L) as stored, so that a sample is left out as it was counted
        hard = like(class_counts(own, k, self.trusted[rows]), gamma)  # (K,)
        given = hard if self.known.counts is None else hard + self.known.counts
        some = ALL if not self.alone or is_torch_array(z) else xp.nonzero(given)[0]  # (H,)
        among = some if self.absent is None else xp.searchsorted(self.present, some)
        sums, soft = weighted_sums(columns(z, among), gamma * self.trusted[rows], f)  # (H, d), (H,)
        counts = z.sum(0)
        if self.absent is not None:
            counts = put(xp.zeros_like(hard), self.present, counts)
            counts[self.absent.classes], self.pull = self.absent.counts(pull, self.log_total), pull
        return Assigned(
            sums, soft, hard[some], counts, like(class_counts(own, k), gamma), _total(right * free), int(free.sum()),
            int((own != before[rows]).sum()), float(xp.max(moved)), some,
        )  # fmt: skip

    def _in_loops(
        self, fixed: Fixed, classes: Classes, counts: Array, among: Any, pull: Array | None, dots: Array,
        old: tuple[Array, ...],
    ) -> tuple[Array, ...]:  # fmt: skip
        """Make the assignments of all samples by compiled loops; return (n,) each.

        These are labels, entropies, log sums of exp, y of the label and largest changes.
        """
        xp, (before, weight, _), n, one = namespace(self.f), old, len(self.f), self.f.dtype.type
        anchor = rows_at(fixed.anchor, classes.some)
        sums = dots, row_dots(classes.sums, classes.sums), row_dots(classes.sums, anchor), classes.soft, classes.hard
        places = before if isinstance(classes.some, slice) else xp.searchsorted(classes.some, before)
        among = xp.arange(len(self.text)) if isinstance(among, slice) else among
        numbers = (one(x) for x in (fixed.left_out, fixed.vote_weight, fixed.sharpness, fixed.alpha))
        prior = weight[:0] if fixed.prior is None else fixed.prior
        given = self.log_y, self.at_anchor, counts, one(fixed.smoothing), prior, *numbers
        if self.absent is None:
            absent: tuple[Array, Array] = xp.full_like(weight, NOTHING), xp.zeros_like(weight)
        else:
            absent = self.absent.log_sum(pull, slice(0, n))
        edges = self.votes_of.pointer, self.votes_of.neighbour, self.votes_of.weight
        labels, (entropy, log_sum, moved) = xp.empty_like(before), (xp.empty_like(weight) for _ in range(3))
        rows = edges, (self.z, self.new, among), sums, absent, (weight, places, labels, entropy, log_sum, moved)

        def block(part: slice) -> None:
            self.loops.tide_step(part.start, part.stop, *given, *(x for group in rows for x in group))

        in_threads(block, row_blocks(n, self.z.size))
        labels = labels if isinstance(self.present, slice) else self.present[labels]
        return labels, entropy, log_sum, xp.take_along_axis(self.y, labels[:, None], axis=1)[:, 0], moved

    reliable = 1.0  # what a label of the model counts, against a known one

    def _learn(self, fixed: Fixed, classes: Classes) -> float:
        """Return the weight of the text, and keep the reliability of other labels, from known ones (Eqs. 12, 13)."""
        xp, every = namespace(self.f), slice(0, len(self.f))
        there = xp.nonzero(self.known.known >= 0)[0]  # (n',)
        model, _ = self._models(every, fixed)(every)
        model = model._replace(
            f=model.f[there, :], at_anchor=model.at_anchor[there, :], log_y=model.log_y[there, :],
            left_out=xp.ones_like(model.left_out[there, :]),
        )  # fmt: skip
        z, votes = self.z[there, :], self._votes(every)[there, :]  # (n', K)
        given = self.gamma[there], self.labels[there], self.trusted[there]
        means = classes.means(z, *given, classes.some)
        base = fixed.vote_weight * votes + model.log_y  # (n', K)
        text, self.reliable = learn_from_known(
            model, self.known.known[there], means, classes.some, base, classes.counts, z, fixed.per_class
        )
        return text

    def confidence(self, power: float) -> Confident:
        """Add up the confidences under a temperature, and their slopes (Eq. 14), of samples with no known label."""
        if self.alone and self.log_z is None:
            self._dense()
            self.log_z = log_ratios(self.z, self.labels[:, None])  # (n, K)

        def part(at: slice) -> tuple[Array, ...]:
            log_z = self.log_z[at] if self.alone else log_ratios(self._wide(at), self.labels[at][:, None])  # (b, K)
            return confidences(exp_(power * log_z), log_z, power)

        def block(rows: slice) -> Confident:
            free = 1.0 if self.known.mask is None else like(~self.known.mask[:, 0], self.f)
            return Confident(*(_total(x * free) for x in self._in_parts(part, rows)))

        found: Confident = self._add_up(block, "confidence")
        return found

    def finish(self, power: float | None) -> Counted:
        """Calibrate the assignments by a temperature, and average the scores for the unknown with those of neighbours.

        None leaves the assignments, where all labels are known.
        """
        if self.alone:
            self._dense()

        def part(at: slice) -> tuple[()]:
            log_z = self.log_z[at] if self.alone else log_ratios(self._wide(at), self.labels[at][:, None])
            self.z[at] = self._narrow(softmax_log_sum(power * log_z)[0])
            return ()

        for rows in self.blocks if power is not None else ():
            self._in_parts(part, rows)
        self.z = self.known.clamp(self.z)
        self.unknown = with_neighbours(self.unknown, self.votes_of)
        return Counted(len(self.f))

    def _dense(self) -> None:
        """Make z of all classes, (n, K)."""
        if self.absent is None:
            return
        absent, xp = self.absent, namespace(self.z)
        full = xp.empty((len(self.f), len(self.text)), dtype=self.z.dtype)
        full[:, self.present] = self.z
        full[:, absent.classes] = absent.shares * self.pull * xp.exp(absent.top - self.log_total)[:, None]
        full /= row_sums(full)[:, None]
        self.z, self.absent, self.present = full, None, ALL

    def predictions(self) -> dict[str, Any]:
        """Return the `COLUMNS`, (n,) each."""
        return {**super().predictions(), "unknown": to_numpy(self.unknown)}

    def _narrow(self, p: Array) -> Array:
        """Return the fourth root of probabilities where they are stored in 16 bits."""
        xp = namespace(p)
        return p if self.z.dtype == self.f.dtype else super()._narrow(xp.sqrt(xp.sqrt(p)))

    def _floats(self, stored: Array) -> Array:
        """Return stored assignments as they are computed with."""
        p = super()._floats(stored)
        return p if stored.dtype == self.f.dtype else (p * p) ** 2


TIDE.rows_type = TIDERows


def _total(x: Array) -> float:
    """Return the sum of one number per sample, in float64."""
    return float(to_numpy(x).astype(float).sum())


class Solution(NamedTuple):
    """What is known of the classes at the end; the assignments are with the samples."""

    converged: bool
    steps: int
    beta: Array  # (K,)
    crowd: Crowd
    alpha: float
    sharpness: float


class TIDEMixture:
    """TIDE for `driver.solve`: what it makes of the sums over its samples, equation by equation."""

    def __init__(
        self,
        options: TIDE,
        text: Array,
        class_prior: Array | None = None,
        negatives: Array | None = None,
        known: Labels = NO_LABELS,
    ) -> None:
        self.options, self.text, self.negatives, self.known = options, text, negatives, known
        self.shares = class_prior  # (K,)
        self.m_steps = options.iterations
        self.started = False

    def begin(self, run: Run) -> Classes:
        """Zero-shot predictions, how many classes are there, anchors and metric (Eqs. 1 to 7 and 10)."""
        o, text, shares, k, first = self.options, self.text, self.shares, len(self.text), run("first", self.negatives)
        self.n = n = first.n
        groups = Groups.of_sums(first.sums, first.counts, n)
        scale = metric(first.square / n, groups, n)  # (d,)
        found = run("compare", first.total, n, scale)
        self.crowd = crowd_of_sums(found, n, k, o.neighbours) if shares is None else Crowd.of_shares(shares)
        w = self.crowd.density
        mean = first.total / n, first.centre / n, first.along / n, first.expected / n
        anchor = anchors(like(text, scale), *mean, scale)  # (K, d)
        groups = Groups.of_sums(found.sums, first.counts, n)
        self.alpha = anchor_weight(rows_at(anchor, first.some), groups, n)
        sharpness = o.sharpness * sharpening(w, n / k, self.alpha)
        there = presence(found.near, found.most, first.total) if shares is None else 0 * first.total + 1  # (K,)
        self.fixed = Fixed(
            scale, anchor, first.total, (n - 1) / k if shares is None else (n - 1) * like(shares, scale), there,
            bias_weight(self.crowd.pseudo_count) if shares is None else 1.0, self.alpha, sharpness, 1 - w * w, 2 - w,
            self.crowd.smoothing, None if shares is None else namespace(scale).log(like(shares, scale) + EPS), n / k,
        ).like(text)  # fmt: skip
        if self.known.sums is not None:
            mean_length = found.length / n
            self.known = self.known._replace(sums=self.known.sums / (self.fixed.scale * mean_length))
        none = self.fixed.total[:0]  # in the first E-step all classes are at their anchors, and no sample is left out
        self.first = self.fixed._replace(left_out=0.0), Classes(_none(text), text[:0, :], none, none, self.fixed.total)
        return self.first[1]

    def shown(self, classes: Classes) -> tuple[Fixed, Classes]:
        """Return what the E-step of Eq. 11 needs."""
        return self.first if classes is self.first[1] else (self.fixed, classes)

    def still(self, step: Assigned) -> bool:
        """Tell whether no label changed and no assignment moved by much, after the first E-step."""
        before, self.started = self.started, True
        return before and step.changed == 0 and step.moved < STILL

    def update(self, classes: Classes, step: Assigned) -> Classes:
        """Eq. 8: the classes with labels, from the sums of their samples and of labelled samples of the past."""
        some, sums, soft, hard = step.some, *(like(x, self.text) for x in (step.sums, step.soft, step.hard))
        if isinstance(some, slice) and not is_torch_array(hard):
            some = namespace(hard).nonzero(hard)[0]
            sums, soft, hard = sums[some], soft[some], hard[some]
        if self.known.sums is not None:
            sums = sums + rows_at(self.known.sums, some)
            soft, hard = soft + self.known.counts[some], hard + self.known.counts[some]
        return Classes(some, sums, soft, hard, like(step.counts, self.text))

    def terms(self, classes: Classes, step: Assigned) -> None:
        """Keep nothing: TIDE has no objective."""

    def finish(self, run: Run, classes: Classes, step: Assigned, trace: list[None]) -> Solution:
        """Eq. 14, the calibration, and the shares of the samples in the class means."""

        def means_at(power: float) -> tuple[float, float]:
            sums = run("confidence", power)
            return sums.confidence / step.free, sums.slope / step.free

        power = None
        if step.free:
            power = calibration(expected_right(step.right / step.free, self.crowd.density, self.n), means_at)
        run("finish", power)
        hard = like(step.labels, self.text)
        hard = hard if self.known.counts is None else hard + self.known.counts  # (K,)
        beta, sharpness = hard / (hard + self.alpha), self.fixed.sharpness
        return Solution(step.changed == 0, len(trace) - 1, beta, self.crowd, self.alpha, sharpness)


def _none(ref: Array) -> Array:
    """Return no class numbers, (0,)."""
    xp = namespace(ref)
    return xp.zeros((0,), dtype=xp.int64, device=device(ref))


def crowd_of_sums(found: Compared, n: int, k: int, m: int) -> Crowd:
    """Return how concentrated the classes are (Eqs. 1, 2, 3) from sums over all n samples.

    >>> import numpy as np
    >>> sums = Compared(50.0, 25.0, 100.0, 100.0, 100.0, np.ones(2), np.ones(2), np.zeros((2, 1)))
    >>> crowd_of_sums(sums, 100, 2, 3).density > 0.99
    True
    """
    mean = found.agree / n
    deviation = math.sqrt(max(found.agree_square / n - mean * mean, 0.0))
    near, most = float(found.near.sum()), float(found.most.sum())
    return crowd_of(mean, deviation, found.own / n, found.confidence / n, near, most, n, k, m)
