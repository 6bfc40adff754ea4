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
    row_dots,
    row_norms,
    row_sums,
    unit_rows,
)
from moontide.core.graph import Graph, nearest_neighbours
from moontide.core.memory import require_memory
from moontide.core.ple import EPS, neighbour_votes
from moontide.core.progress import track
from moontide.core.simplex import log_softmax, one_hot
from moontide.core.smoothing import NEIGHBOURS, check_graph
from moontide.options import option
from moontide.protocols import GivenState, OnlineMethod, State, copy_array, given_inputs, given_shares, per_class
from moontide.types import Result, Task

LARGEST = 1e3  # of the pseudo-count: at 1000 the prior is flat for any batch
LARGE = 2**27  # N x K above which a CPU works in blocks of rows, with assignments in 16 bits
NEWTON = 12  # steps of Newton's method for the calibration
STILL = 1e-4  # assignments that move by less no longer change
REST = 0.01  # a class rests whose largest z_ik is below this share of n_k + a*, and of 0.1
SAME = 1e-6  # how far features may differ and still be those of one sample
TRUSTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18)  # weights of the text, tried on known labels
TEMPERS = (1.0, 0.7, 0.5, 0.35)  # factors of all logits at which those weights are compared
RELUCTANCE = 2.0  # nats that a factor of e in the weight costs: a handful of labels changes little


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
        check_graph(task, self.name, self.neighbours)
        if task.n * task.k > LARGE:
            if device_type(task.features) == "cpu" and task.known is None:
                return self._fit_in_blocks(task)
            whole = 12 * task.n * task.k * task.features.dtype.itemsize
            require_memory(whole, f"{self.name} on {task.n} x {task.k} at once", task.features)
        return self.solve(self.start(task), task.features, task.known, task.graph)

    def _fit_in_blocks(self, task: Task) -> Result:
        """Solve a task whose N x K arrays are too many for memory as one shard; probabilities come in 16 bits."""
        from moontide.engine.solvers import one_shard

        shard, found = one_shard(self, task)
        of = namespace(task.features).asarray  # the shard's arrays are numpy's
        z, y, beta, unknown, labels = map(of, (*shard.unpack(), found.beta, shard.unknown, shard.labels))
        details = {**found.crowd._asdict(), "anchor_weight": found.alpha, "sharpness": found.sharpness}
        result = Result(z, y, None, (), found.steps, found.converged, None, beta, details, unknown)
        result.__dict__["labels"] = labels  # as computed, before rounding to 16 bits
        return result

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

    def _correct(self, state: TIDEState, x: Array, known: Array) -> TIDEState:  # type: ignore[override]
        """Label recent samples where they are, and add others to the labelled samples of the past."""
        xp, recent = namespace(x), state.recent_known
        past = []
        for i in range(x.shape[0]):
            same = xp.all(xp.abs(state.recent - x[i, :]) <= SAME, axis=1)  # (M,)
            recent = xp.where(same, known[i], recent)
            past += [i] if not bool(xp.any(same)) else []
        chosen = xp.asarray(past, dtype=xp.int64, device=device(x))
        state = remember(state, xp.take(x, chosen, axis=0), xp.take(known, chosen))
        return replace(state, recent_known=recent)

    def solve(self, state: TIDEState, f: Array, known: Array | None, graph: Graph | None) -> Result:
        """Label samples together: zero-shot, how many classes are there, then M-steps and E-steps in turn."""
        xp, (n, k), raw = namespace(f), (f.shape[0], state.text.shape[0]), f
        cosine = f @ state.text.T  # (N, K)
        log_y = log_softmax(state.logit_scale * cosine)  # (N, K)
        y = xp.exp(log_y)
        graph = graph or nearest_neighbours(f, self.neighbours)
        votes_of = neighbour_votes(graph, True, True, 1.0)
        labels, shares = Labels.of(known, state, y), given_shares(state.class_prior)
        assigned = labels.clamp(y)  # (N, K)
        votes = votes_of(y)  # (N, K)
        if shares is None:
            near, most = agreement_by_class(y, votes, votes_of(xp.ones_like(y[:, :1])))  # (K,), (K,)
            crowd, there = crowding(y, near, most, graph.m), presence(near, most, xp.sum(y, axis=0))  # (K,)
            log_y -= bias_weight(crowd.pseudo_count) * text_bias(y, (n - 1) / k, there)
        else:
            crowd = Crowd.of_shares(shares)
            log_y -= text_bias(y, (n - 1) * shares, xp.ones_like(shares))
        w = crowd.density
        p, first = xp.mean(y, axis=0), xp.argmax(assigned, axis=1)  # (K,), (N,)
        anchor = anchors(f, state.text, y, cosine, p)  # (K, d)
        scale = metric(f, Groups.of(f, first, k))  # (d,)
        f, anchor = f / scale, unit_rows(anchor / scale)
        lengths = row_norms(f)[:, None]  # (N, 1)
        f = f / lengths
        labels = labels._replace(sums=labels.sums / (scale * xp.mean(lengths)))
        alpha = anchor_weight(f, anchor, Groups.of(f, first, k))
        sharp = self.sharpness * sharpening(w, n / k, alpha)
        left_out = xp.full_like(lengths, 1 - w * w) if labels.mask is None else (1 - w * w) * like(~labels.mask, f)
        prior = None if shares is None else xp.log(shares + EPS)  # (K,)
        at_anchor = f @ anchor.T  # (N, K)
        model = Model(f, anchor, at_anchor, log_y, alpha, sharp, left_out, 2 - w, crowd.smoothing, prior, labels)
        logits = log_y + sharp * at_anchor  # (N, K)
        logits += (2 - w) * (votes if labels.mask is None else votes_of(assigned))
        logits += xp.log(n * p + crowd.smoothing) if prior is None else prior
        z, beta, steps, same = iterate(model, logits, votes_of, self.iterations)
        probs = labels.clamp(calibrated(z, y, w, labels))
        unknown = unknown_score(cosine, raw, state, votes_of)
        details = {**crowd._asdict(), "anchor_weight": alpha, "sharpness": sharp}
        return Result(probs, y, None, (), steps, same, None, beta, details, unknown)


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


def crowding(y: Array, near: Array, most: Array, m: int) -> Crowd:
    """Measure the concentration of the classes from y (N, K) and its `agreement_by_class` (K,) in a graph.

    >>> import numpy as np
    >>> crowding(np.eye(4), np.zeros(4), np.zeros(4), 3).density > 0.99
    True
    """
    xp, (n, k) = namespace(y), y.shape
    own = row_dots(y, y)  # (N,)
    agree = agreements(y, xp.sum(y, axis=0), own, n)  # (N,)
    mean, deviation, sure = (float(x) for x in (xp.mean(agree), xp.std(agree), xp.mean(own)))
    confidence = float(xp.mean(xp.max(y, axis=1)))
    return crowd_of(mean, deviation, sure, confidence, float(xp.sum(near)), float(xp.sum(most)), n, k, m)


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


def anchors(f: Array, text: Array, y: Array, cosine: Array, p: Array) -> Array:
    """Eq. 4: mu'_k = mean image + slope (t_k - mean text), unit rows (K, d).

    The slope is that of least squares of images on their expected text, both centred, held in [0, 1]: text and images
    lie apart, and images follow their text only in part.

    >>> import numpy as np
    >>> anchors(np.eye(2), np.eye(2), np.eye(2), np.eye(2), np.asarray([0.5, 0.5]))
    array([[1., 0.],
           [0., 1.]])
    """
    xp, expected = namespace(f), y @ text  # (N, d)
    along, square = xp.mean(row_dots(y, cosine)), xp.mean(row_dots(expected, expected))
    return anchors_of(text, p, xp.mean(f, axis=0), float(along), float(square))


def anchors_of(text: Array, p: Array, centre: Array, along: float, square: float) -> Array:
    """Eq. 4 from means over the samples: p of y_i (K,), `centre` of f_i (d,), `along` and `square`.

    With the expected text x_i = sum_k y_ik t_k, `along` is the mean of f_i . x_i and `square` that of |x_i|^2.

    >>> import numpy as np
    >>> anchors_of(np.eye(2), np.asarray([0.5, 0.5]), np.asarray([0.5, 0.5]), 1.0, 1.0)
    array([[1., 0.],
           [0., 1.]])
    """
    xp, text_centre = namespace(text), p @ text  # (d,)
    along -= float(xp.sum(centre * text_centre))
    square -= float(xp.sum(text_centre * text_centre))
    slope = min(max(along / square, 0.0), 1.0) if square > 1e-6 else 0.0
    return unit_rows(centre + slope * (text - text_centre))


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


def text_bias(y: Array, expected: Array | float, presence: Array) -> Array:
    """Eq. 5: b_ik = log((sum_j y_jk - y_ik + 1) / (expected_k + 1)), (N, K): how much more often a class is predicted.

    `expected` is (N - 1) / K, or (N - 1) times the known share of the class. The other samples alone are counted, with
    one pseudo-sample, so that a sample does not speak against itself. Where a class is predicted too seldom, b is
    multiplied by pi_k^2 (`presence`): a class that is absent is not to be helped.

    >>> import numpy as np
    >>> text_bias(np.asarray([[1.0, 0.0], [1.0, 0.0]]), 0.5, np.ones(2)).round(2)
    array([[ 0.29, -0.41],
           [ 0.29, -0.41]])
    """
    return bias_of(y, namespace(y).sum(y, axis=0), expected, presence)


def bias_of(y: Array, total: Array, expected: Array | float, presence: Array) -> Array:
    """Eq. 5 of some of the samples, (b, K), from sum_j y_j over all of them, (K,).

    >>> import numpy as np
    >>> bias_of(np.asarray([[1.0, 0.0]]), np.asarray([2.0, 0.0]), 0.5, np.asarray([1.0, 0.5])).round(2)
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


def metric(f: Array, groups: Groups) -> Array:
    """Eq. 6: the standard deviation of each dimension within classes, shrunk to their mean by d pseudo-samples, (d,).

    Dividing by it makes the classes round, as a von Mises-Fisher distribution wants them. Relative to the mean: a scale
    does not matter to a cosine.

    >>> import numpy as np
    >>> metric(np.eye(2), Groups.of(np.eye(2), np.asarray([0, 1]), 2))
    array([1., 1.])
    """
    return metric_of(namespace(f).mean(f * f, axis=0), groups, f.shape[0])


def metric_of(square: Array, groups: Groups, n: int) -> Array:
    """Eq. 6 from the mean of f_i^2 over the n samples, (d,).

    >>> import numpy as np
    >>> metric_of(np.full(2, 0.5), Groups.of(np.eye(2), np.asarray([0, 1]), 2), 2)
    array([1., 1.])
    """
    xp, d = namespace(square), square.shape[0]
    between = xp.sum(groups.count[:, None] * groups.mean**2, axis=0) / n  # (d,)
    variance = clip(square - between, 0)  # (d,)
    average = clip(xp.mean(variance), EPS)
    return xp.sqrt((groups.freedom * variance / average + d) / (groups.freedom + d))


def anchor_weight(f: Array, anchor: Array, groups: Groups) -> float:
    """Eq. 7: alpha = sigma^2 / tau^2, held in [0.3, 30]: the empirical Bayes weight of an anchor in a class mean.

    sigma^2 is the variance within classes and tau^2 that of the class means about their anchors, both by an analysis of
    variance of the zero-shot labels. Where every sample has a class of its own, there is none and alpha is 1.

    >>> import numpy as np
    >>> anchor_weight(np.eye(2), np.eye(2), Groups.of(np.eye(2), np.asarray([0, 1]), 2))
    1.0
    """
    return anchor_weight_of(anchor, groups, f.shape[0])


def anchor_weight_of(anchor: Array, groups: Groups, n: int) -> float:
    """Eq. 7 from the groups of all n samples.

    >>> import numpy as np
    >>> anchor_weight_of(np.eye(2), Groups(np.eye(2), np.ones(2), 0), 2)
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

    known: Array | None  # (N,) class numbers, -1 where not known
    mask: Array | None  # (N, 1)
    hot: Array | None  # (N, K)
    sums: Array  # (K, d)
    counts: Array  # (K,)

    @classmethod
    def of(cls, known: Array | None, state: TIDEState, y: Array) -> Labels:
        """Collect what is known of samples with predictions y (N, K)."""
        past = (state.known_sums, state.known_counts)
        if known is None or not bool(namespace(known).any(known >= 0)):
            return cls(None, None, None, *past)
        return cls(known, (known >= 0)[:, None], one_hot(known, y.shape[1], y), *past)

    def clamp(self, z: Array) -> Array:
        """Return assignments with the known ones in their place."""
        return z if self.mask is None else namespace(z).where(self.mask, self.hot, z)

    @property
    def any(self) -> bool:
        """Whether some label is known, here or in the past."""
        return self.known is not None or bool(namespace(self.counts).any(self.counts > 0))


class Model(NamedTuple):
    """What stays the same while z is estimated."""

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
    labels: Labels

    def of_classes(self, some: Array) -> Model:
        """Return the model of some of the classes, (L,)."""
        known = self.labels._replace(sums=rows(self.labels.sums, some), counts=self.labels.counts[some])
        return self._replace(
            anchor=rows(self.anchor, some),
            at_anchor=columns(self.at_anchor, some),
            log_y=columns(self.log_y, some),
            prior=None if self.prior is None else self.prior[some],
            labels=known,
        )


class Means(NamedTuple):
    """Statistics of the H classes with labels after an M-step; a class without any is at its anchor."""

    weight: Array  # (N, H) gamma_i z_ik, discounted for samples without a known label
    sums: Array  # (H, d)
    soft: Array  # (H,)
    hard: Array  # (H,)
    places: Array  # (N,) the label of each sample, as a place in the H classes
    own: Array  # (N,) what a sample adds to the hard count of its label


def m_step(model: Model, z: Array, gamma: Array, labels: Array, reliability: float) -> tuple[Any, Means]:
    """Eq. 8, its sums: S_k = sum_i gamma_i z_ik f_i, s_k = sum_i gamma_i z_ik and hard counts c_k; and the H classes.

    A sample without a known label counts `reliability` times as much as one with it.
    """
    xp, known, one = namespace(z), model.labels, namespace(z).ones_like(gamma)
    trusted = reliability * one if known.mask is None else xp.where(known.mask[:, 0], one, reliability * one)  # (N,)
    hard = like(class_counts(labels, z.shape[1], trusted), z) + known.counts  # (L,)
    some: Any = slice(None) if is_torch_array(z) else xp.nonzero(hard)[0]  # (H,)
    weight = columns(z, some) * (gamma * trusted)[:, None]  # (N, H)
    sums = weight.T @ model.f + rows(known.sums, some)  # (H, d)
    soft = xp.sum(weight, axis=0) + known.counts[some]
    places = labels if isinstance(some, slice) else xp.searchsorted(some, labels)
    return some, Means(weight, sums, soft, hard[some], places, trusted)


def cosine_to_means(model: Model, means: Means, some: Any, left_out: Array, dots: Array | None = None) -> Array:
    """Eqs. 8 and 9: cos(f_i, R_ik), R_ik = beta_ik S_k / s_k + (1 - beta_ik) mu'_k, beta = c / (c + alpha), (N, H).

    All of them without the share `left_out` of sample i: S_k - u gamma_i z_ik f_i, and so on. Nothing but f_i . S_k is
    N x H x d work, as |S_k - u f_i|^2 = |S_k|^2 - 2 u f_i . S_k + u^2; it is `dots` (N, H) where it is at hand.
    """
    xp, f = namespace(model.f), model.f
    anchor, at_anchor = rows(model.anchor, some), columns(model.at_anchor, some)  # (H, d), (N, H)
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
    penalty on leaving 1, so that few labels change little. Each is judged at the best of a few temperatures of the sum:
    predictions that are only too sure would gain by any smaller weight.

    >>> import numpy as np
    >>> trust(np.asarray([[0.0, 9.0]]), np.asarray([[5.0, 0.0]]), np.asarray([0]), 1.0) < 1
    True
    """
    xp, best = namespace(base), (-math.inf, 1.0)
    for text in TRUSTS:
        logits = text * base + sharpness * cosine  # (n, K)
        for temper in TEMPERS:
            fit = float(xp.sum(xp.take_along_axis(log_softmax(temper * logits), known[:, None], axis=1)))
            best = max(best, (fit - RELUCTANCE * math.log(text) ** 2, text))
    return best[1]


class Rest(NamedTuple):
    """The R classes that rest: without labels and with next to no assignments, all that changes is their prior.

    Their logits are c_ik + log(n_k + a*) with c_ik that never change. What an iteration needs of them, sums over
    classes or samples, is products of matrices by vectors; their part in votes and leave-one-out is neglected.
    """

    classes: Array  # (R,) numbers
    top: Array  # (N, 1) max_k c_ik
    shares: Array  # (N, R) e_ik = exp(c_ik - top_i)
    logs: Array  # (N, R) e_ik (c_ik - top_i)
    pull: Array  # (R,) n_k + a*

    @classmethod
    def of(cls, classes: Array, logits: Array, pull: Array) -> Rest:
        """Let classes rest whose logits without the prior are (N, R)."""
        xp = namespace(logits)
        top = xp.max(logits, axis=1, keepdims=True)
        logits = logits - top
        shares = xp.exp(logits)
        return cls(classes, top, shares, shares * logits, pull)

    def log_sum(self) -> tuple[Array, Array]:
        """Return log sum_k exp(logits_ik) over the resting classes and the entropy of their distribution, (N,) each."""
        xp = namespace(self.pull)
        total = self.shares @ self.pull  # (N,)
        log_total = xp.log(total)
        entropy = log_total - (self.logs @ self.pull + self.shares @ (self.pull * xp.log(self.pull))) / total
        return self.top[:, 0] + log_total, entropy

    def counted(self, log_total: Array, smoothing: float) -> Rest:
        """Return them with the counts n_k that follow from log sum_k exp(logits_ik) over all classes, (N,)."""
        counts = self.pull * (self.shares.T @ namespace(log_total).exp(self.top[:, 0] - log_total))  # (R,)
        return self._replace(pull=counts + smoothing)


def resting(z: Array, labels: Array, smoothing: float) -> Array | None:
    """Return a mask of the classes of z (N, L) that may rest, (L,), where they are many; None otherwise.

    Only numpy gains by it: a GPU is quicker with all classes than with waiting for their number.
    """
    if is_torch_array(z):
        return None
    xp = namespace(z)
    bound = REST * xp.minimum(xp.sum(z, axis=0) + smoothing, 0.1 + 0 * z[0, :])  # (L,)
    idle = (xp.max(z, axis=0) <= bound) & (class_counts(labels, z.shape[1]) == 0)
    return idle if int(xp.sum(idle)) > z.shape[1] // 4 else None


def assign(logits: Array, rest: Rest | None) -> tuple[Array, Array, Array]:
    """Eq. 11, its softmax: z (N, L) of classes that do not rest, and of all K the entropy and log sum of exp, (N,)."""
    xp = namespace(logits)
    top = xp.max(logits, axis=1, keepdims=True)  # (N, 1)
    idle, idle_entropy = (None, None) if rest is None else rest.log_sum()  # (N,), (N,)
    if idle is not None:
        top = xp.maximum(top, idle[:, None])
    shifted = logits - top
    z = xp.exp(shifted)
    total = row_sums(z)  # (N,)
    entropy = -row_dots(z, shifted)
    if idle is not None and idle_entropy is not None:
        mass = xp.exp(idle - top[:, 0])  # (N,)
        entropy = entropy + mass * (idle_entropy - (idle - top[:, 0]))
        total = total + mass
    z /= total[:, None]
    log_total = xp.log(total)
    return z, entropy / total + log_total, top[:, 0] + log_total


def iterate(model: Model, logits: Array, votes_of: Any, iterations: int) -> tuple[Array, Array, int, bool]:
    """Alternate M-steps and E-steps from first logits (N, K); return z (N, K), beta (K,), steps and convergence."""
    xp, (n, k), known = namespace(logits), logits.shape, model.labels
    log_k, steps, rest, live = math.log(max(k, 2)), 0, None, None
    z, entropy, log_total = assign(logits, None)
    z = known.clamp(z)
    text, sharpness, reliable = 1.0, model.sharpness, 1.0
    for _ in track(range(iterations), "iterations"):
        steps += 1
        labels, counts, before = xp.argmax(z, axis=1), xp.sum(z, axis=0), z  # (N,), (L,)
        wanted = steps > 1 and rest is None and model.prior is None and not known.any
        idle = resting(z, labels, model.smoothing) if wanted else None
        if idle is not None:
            live = xp.nonzero(~idle)[0]  # (L,)
            at_rest = model.log_y[:, idle] + sharpness * model.at_anchor[:, idle]
            rest = Rest.of(xp.nonzero(idle)[0], at_rest, counts[idle] + model.smoothing)
            model, z, counts = model.of_classes(live), columns(z, live), counts[live]
            labels, before = xp.searchsorted(live, labels), z
        gamma = clip(1 - entropy / log_k, 0, 1)  # (N,)
        if known.mask is not None:
            gamma = xp.where(known.mask[:, 0], xp.ones_like(gamma), gamma)
        some, means = m_step(model, z, gamma, labels, reliable)
        base = votes_of(z)  # (N, L)
        base *= model.vote_weight
        base += model.log_y
        if known.known is not None:
            text, reliable = learn_from_known(model, known.known, means, some, base, counts, z)
        base += class_pull(model, counts, z, model.left_out)
        if text != 1:
            base *= text
        base += sharpness * model.at_anchor
        nearer = cosine_to_means(model, means, some, model.left_out) - columns(model.at_anchor, some)
        base[:, some] += sharpness * nearer
        z, entropy, log_total = assign(base, rest)
        z = known.clamp(z)
        rest = None if rest is None else rest.counted(log_total, model.smoothing)
        same = bool(xp.all(xp.argmax(z, axis=1) == labels))
        if same and float(xp.max(xp.abs(z - before))) < STILL:
            break
    hard = like(class_counts(xp.argmax(z, axis=1), z.shape[1]), z) + model.labels.counts  # (L,)
    beta = hard / (hard + model.alpha)
    if rest is None or live is None:
        return z, beta, steps, same
    full, all_beta = xp.empty((n, k), dtype=z.dtype), xp.zeros((k,), dtype=z.dtype)
    full[:, live], all_beta[live] = z, beta
    full[:, rest.classes] = rest.shares * rest.pull * xp.exp(rest.top[:, 0] - log_total)[:, None]
    full /= row_sums(full)[:, None]
    return full, all_beta, steps, same


def learn_from_known(
    model: Model, known: Array, means: Means, some: Any, base: Array, counts: Array, z: Array
) -> tuple[float, float]:
    """Return the weight of the text and the reliability of other labels, from known ones (Eqs. 12, 13).

    What is asked is what the model makes of each labelled sample where its label is not known: without its own part in
    class means and counts, and with the votes of its neighbours.
    """
    xp, (n, k) = namespace(z), z.shape
    there = xp.nonzero(known >= 0)[0]  # (n',)
    labels = known[there]
    cosine = 1 * model.at_anchor[there, :]  # (n', K)
    cosine[:, some] = cosine_to_means(model, means, some, xp.ones_like(model.left_out))[there, :]
    base = base[there, :] + class_pull(model, counts, z, 1.0)[there, :]
    text = trust(base, cosine, labels, model.sharpness)
    found = xp.argmax(text * base + model.sharpness * cosine, axis=1)
    return text, reliability(int(xp.sum(found == labels)), int(labels.shape[0]), n / k)


def class_pull(model: Model, counts: Array, z: Array, left_out: Any) -> Array:
    """Eq. 11, its prior: log(n_k - u z_ik + a*), (N, L), the collapsed mixture's; or the log shares that are known."""
    if model.prior is not None:
        return model.prior + 0 * z
    pull = clip(counts - left_out * z, 0)
    pull += model.smoothing
    return namespace(z).log(pull)


def calibrated(z: Array, y: Array, density: float, labels: Labels) -> Array:
    """Eq. 14: z^T, rows scaled to sum 1, with T such that the mean confidence is the share of labels expected right.

    Zero-shot predictions are calibrated on average: of labels with mean probability q under y the share q is right. The
    batch is a second look. If it were independent, (1 - q)^2 would be wrong; it is not, and less so the denser the
    classes are: (1 - q)^r, r = 1 + (0.7 - 0.55 w) (1 - 1/N), which for one sample is zero-shot's q.

    >>> import numpy as np
    >>> y = np.asarray([[0.7, 0.3]])
    >>> calibrated(np.asarray([[0.9, 0.1]]), y, 1.0, Labels(None, None, None, None, None)).round(2)
    array([[0.7, 0.3]])
    """
    xp, n = namespace(z), z.shape[0]
    label = xp.argmax(z, axis=1)[:, None]
    q = xp.take_along_axis(y, label, axis=1)[:, 0]  # (N,)
    free = xp.ones_like(q) if labels.mask is None else like(~labels.mask[:, 0], q)  # (N,)
    total = float(xp.sum(free))
    if total == 0:
        return z
    log_z, e = log_ratios(z, label), z  # (N, K), (N, K)

    def means_at(power: float) -> tuple[float, float]:
        nonlocal e
        e = exp_(power * log_z)
        confidence, slope = (float(xp.sum(x * free)) / total for x in confidences(e, log_z, power))
        return confidence, slope

    calibration(expected_right(float(xp.sum(q * free)) / total, density, n), means_at)
    e /= row_sums(e)[:, None]
    return e


def expected_right(q: float, density: float, n: int) -> float:
    """Eq. 14, the share of n labels expected right whose mean probability under zero-shot is q.

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


def unknown_score(cosine: Array, f: Array, state: TIDEState, votes_of: Any) -> Array:
    """Eq. 15: how unlike all of the classes a sample is, averaged with its neighbours, (N,).

    Images of one unknown class are neighbours of each other.
    """
    return with_neighbours(unlikeness(cosine, f, state.logit_scale, state.negatives), votes_of)


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


def remember(state: TIDEState, f: Array, known: Array) -> TIDEState:
    """Return the state with the labelled ones of some samples added to the class sums, (n, d) and (n,)."""
    xp = namespace(f)
    if not bool(xp.any(known >= 0)):
        return state
    hot = one_hot(known, state.text.shape[0], f)  # (n, K)
    sums, counts = state.known_sums + hot.T @ f, state.known_counts + xp.sum(hot, axis=0)
    return replace(state, known_sums=sums, known_counts=counts)


def rows(x: Array, which: Any) -> Array:
    """Return some rows of a matrix; `slice(None)` is all of them, without a copy.

    >>> import numpy as np
    >>> rows(np.eye(2), np.asarray([1]))
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
