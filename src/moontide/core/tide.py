"""The equations of TIDE (methods/tide.py), one function each; docs/maths.md derives them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from moontide.core.arrays import Array, class_sums, clip, is_torch_array, like, namespace, row_dots, row_sums
from moontide.core.ple import EPS
from moontide.core.simplex import log_softmax, softmax_log_sum
from moontide.core.sums import SAME, Sums

ALL = slice(None)
OUTLASTS = 3.0  # what is left of an excess without the bias of the text is one part in so many or more, if it is real
DOUBTED = 0.25  # what counts of an excess of which nothing is left
LARGEST = 1e3  # of the pseudo-count: at 1000 the prior is flat for any batch
STILL = 1e-4  # assignments that move by less no longer change
NEWTON = 12  # steps of Newton's method for the calibration
COLDEST, WARMEST = 0.02, 5.0  # powers that the assignments are raised to
TRUSTS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18)  # weights of the text, tried on known labels
TEMPERS = (1.0, 0.7, 0.5, 0.35)  # factors of all logits at which those weights are compared
RELUCTANCE = (4.0, 8.0)  # nats that a factor of e of either costs: a handful of labels changes little


def number(x: Array) -> Any:
    """Return one number as Python's float; one on a GPU stays there, as nothing may wait for it."""
    on_gpu = is_torch_array(x) and (x.device.type != "cpu" or os.environ.get("TRITON_INTERPRET") == "1")
    return x if on_gpu else float(x)


def clamped(x: Any, low: float, high: float = math.inf) -> Any:
    """Return a number held in an interval."""
    return clip(x, low, high) if is_torch_array(x) else float(min(max(x, low), high))


class Occupancy(NamedTuple):
    """How concentrated the classes of a batch are (Eqs. 1, 2, 3)."""

    excess: float  # v: by how much two samples agree more often than with equally frequent classes
    agreement: float  # rho: how much neighbours agree, from 0 to 1
    corroboration: float  # chi: rho against what it could be if v is right, from 0 to 1
    pseudo_count: float  # a
    density: float  # w
    smoothing: float  # a*

    @classmethod
    def of(cls, excess: float, agreement: float, corroboration: float, false: float) -> Occupancy:
        """Eq. 3 of v, rho, chi and how many samples of a class are wrong."""
        return cls(excess, agreement, corroboration, *prior_counts(excess * corroboration, false))

    @classmethod
    def of_shares(cls, shares: Array) -> Occupancy:
        """Eq. 3 for class shares (K,) that the user knows: v = K sum_k share_k^2 - 1."""
        return cls.of(clamped(len(shares) * number((shares**2).sum()) - 1, 1 / LARGEST), 1.0, 1.0, 0.0)


def prior_counts(v: float, false: float) -> tuple[float, float, float]:
    """Eq. 3: a = 1 / v, w = a / (1 + a), a* = a max(1, w false), v times chi and `false` the wrong of a class."""
    a = 1 / clamped(v, 1 / LARGEST)
    w = a / (1 + a)
    return a, w, a * clamped(w * false, 1.0)


def agreement_by_class(y: Array, votes: Array, degree: Array) -> tuple[Array, Array]:
    """Return sum_ij W_ij y_ik y_jk and sum_ij W_ij y_ik^2, (K,) each; `votes` is W y (N, K), `degree` W 1 (N, 1)."""
    return (y * votes).sum(0), (degree.T @ (y * y))[0, :]


def agreements(y: Array, total: Array, own: Array, n: int) -> Array:
    """Return the mean over the n - 1 samples j != i of y_i . y_j, from sum_j y_j (K,) and own_i = |y_i|^2, (N,)."""
    return (y @ total - own) / max(n - 1, 1)


def evened(y: Array, total: Array) -> tuple[Array, Array]:
    """Eq. 2: sum_i e_i (K,) and |e_i|^2 (N,), e_ik ~ y_ik / (n_k + 1): predictions if all classes were as frequent.

    `total` (K,) are the n_k, sums of y over all samples. Rows of e sum to 1; e itself is not made.
    """
    weight = 1 / (total + 1)  # (K,)
    scale = 1 / (y @ weight)  # (N,)
    return (scale @ y) * weight, scale * scale * ((y * y) @ (weight * weight))


def outlasting(v: float, left: float) -> Any:
    """Eq. 2: v min(1, max(3 v_e / v, 1/4)), v_e the excess that is `left` of v in the predictions of `evened`."""
    return v * clamped(OUTLASTS * left / v, DOUBTED, 1.0)


def occupancy_of(found: Compared, n: int, k: int, m: int) -> Occupancy:
    """Eqs. 1, 2 and 3 from sums over all n samples, with m neighbours each."""
    u, false = found.agree / n, (1 - found.confidence / n) * n / k
    if n < 2 or k < 2:
        return Occupancy.of(1 / LARGEST, 1.0, 1.0, false)
    error = (clamped(found.agree_square / n - u * u, 0.0) / n) ** 0.5  # of u
    classes = number((found.even**2).sum()), number(found.near.sum()), number(found.most.sum())
    return Occupancy.of(*corroborated_excess(u, error, found.own, found.even_own, *classes, n, k, min(m, n - 1)), false)


def corroborated_excess(
    u: float, error: float, own: float, even_own: float, even: float, near: float, most: float, n: int, k: int, m: int
) -> tuple[float, float, float]:
    """Eqs. 1 and 2 from the sums of `Compared`: v, rho and chi; `even` is sum_k (sum_i e_ik)^2."""
    sure, left, rho = own / n, (even - even_own) / n / (n - 1), mean_agreement(near, most)
    v = outlasting(excess(u - 2 * error, sure, k), excess(left, even_own / n, k))
    return v, rho, corroboration(rho, (n - 1) * u / sure, m)


def mean_agreement(near: float, most: float) -> float:
    """Return rho = sum_k near_k / sum_k most_k of `agreement_by_class`, held in [0.02, 1]."""
    return clamped(near / clamped(most, EPS), 0.02, 1.0)  # type: ignore[no-any-return]


def excess(agree: float, sure: float, k: int) -> Any:
    """Eq. 1: v = (K U - 1) / q, q = (mean |y_i|^2 - 1 / K) / (1 - 1 / K).

    U, `agree`, is the mean of y_i . y_j over pairs of samples less its standard error, `sure` the mean of |y_i|^2.
    """
    q = (sure - 1 / k) / (1 - 1 / k)
    return clamped((k * agree - 1) / clamped(q, 1e-6, 1.0), 1 / LARGEST)


def corroboration(rho: float, others: float, m: int) -> Any:
    """Eq. 2: chi = min(1, rho / min(1, others / m)), `others` the samples beside one of its class if U is right."""
    return clamped(rho / clamped(others / m, 1e-6, 1.0), 0.0, 1.0)


def anchors(text: Array, p: Array, first: Predicted) -> tuple[Any, Array]:
    """Eq. 4: slope and offset (d,) of the anchors, mu'_k = mean image + slope (t_k - mean text) = slope t_k + offset.

    The slope, held in [0, 1], is that of least squares of images on their expected text x_i, both centred, with
    x_i = y_il t_l + (1 - y_il) mean text, l the label of i.
    """
    xp, n, centre, mean_text = namespace(text), first.n, first.centre / first.n, p @ text  # (d,), (d,)
    apart = text[first.some, ...] - mean_text  # (H, d)
    mean = first.sure @ apart / n  # (d,) of x_i - mean text
    along = number(xp.sum(first.sure_sums * apart)) / n - number(xp.sum(centre * mean))
    square = number(xp.sum(first.sure_squares * row_dots(apart, apart))) / n - number(xp.sum(mean * mean))
    slope = clamped(along / clamped(square, 1e-6), 0.0, 1.0) * (square > 1e-6)
    return slope, centre - slope * mean_text


def anchor_rows(text: Array, slope: Any, offset: Array, scale: Array) -> Array:
    """Eq. 4: return the anchors slope t_k + offset in the metric `scale` (d,), unit rows, (K, d)."""
    found = text * (slope / scale)  # (K, d)
    found += offset / scale
    return found / clip(row_dots(found, found) ** 0.5, EPS)[:, None]


def presence(near: Array, most: Array, total: Array, rho: float) -> Array:
    """Eq. 5, its pi_k: how far neighbours agree on class k, against how far they do on average, (K,).

    pi_k = min(1, (n_k rho_k + rho) / ((n_k + 1) rho)), n_k = `total`, rho_k = near_k / most_k (`agreement_by_class`).
    """
    return clip((total * (near / clip(most, EPS)) + rho) / ((total + 1) * rho), 0, 1)


def bias_weight(pseudo_count: float) -> float:
    """Eq. 5, its weight: g = a / (a + 1/2)."""
    return pseudo_count / (pseudo_count + 0.5)


def text_bias(y: Array, total: Array, expected: Array | float, presence: Array) -> Array:
    """Eq. 5: b_ik = log((sum_j y_jk - y_ik + 1) / (expected_k + 1)), (N, K): how much more often a class is predicted.

    `total` (K,) is sum_j y_j over all samples; `expected` is (N - 1) / K, or (N - 1) times the known share of a class.
    Where a class is predicted too seldom, b is multiplied by pi_k^2.
    """
    xp = namespace(y)
    bias = xp.log((total + 1 - y) / (expected + 1))
    return xp.where(bias < 0, bias * presence**2, bias)


def degrees_of_freedom(count: Array, n: int) -> Any:
    """Return n less the number of classes with samples, of which `count` (K,) has the numbers."""
    return n - number(namespace(count).sum(count > 0))


def metric(square: Array, sums: Array, count: Array, n: int) -> Array:
    """Eq. 6: the standard deviation of each dimension within classes, shrunk to their mean by d pseudo-samples, (d,).

    `square` is the mean of f_i^2 over the n samples, (d,), `sums` (K, d) and `count` (K,) are per class.
    """
    xp, d, free = namespace(square), square.shape[0], degrees_of_freedom(count, n)
    between = (1 / clip(count, 1)) @ (sums * sums) / n  # (d,)
    variance = clip(square - between, 0)  # (d,)
    return xp.sqrt((free * variance / clip(xp.mean(variance), EPS) + d) / (free + d))


def anchor_weight(anchor: Array, sums: Array, count: Array, n: int) -> Any:
    """Eq. 7: alpha = sigma^2 / tau^2, held in [0.3, 30]: the empirical Bayes weight of an anchor in a class mean.

    sigma^2 is the variance within classes, tau^2 that of class means about their anchors, by an analysis of variance of
    n unit samples with `sums` (K, d) and `count` (K,) by zero-shot labels. 1 if no class has two samples.
    """
    xp, free = namespace(anchor), degrees_of_freedom(count, n)
    square = number(xp.sum(row_dots(sums, sums) / clip(count, 1)))  # sum_k c_k |mean_k|^2
    within = (n - square) / clamped(free, 1.0)
    along, own = row_dots(sums, anchor), count * row_dots(anchor, anchor)  # (K,) each
    about = square + number(xp.sum(own - 2 * along))  # sum_k c_k |mean_k - anchor_k|^2
    tau2 = (about - (n - free) * within) / n
    return clamped(within / clamped(tau2, 1e-3), 0.3, 30.0) ** clamped(free, 0.0, 1.0)  # x^0 = 1


class Labels(NamedTuple):
    """Known labels of samples at hand, n' of them, and sums of labelled samples of the past."""

    there: Array  # (n',) which samples
    known: Array  # (n',) their class numbers
    sums: Array  # (K, d)
    counts: Array  # (K,)

    @classmethod
    def of(cls, known: Array, state: Any) -> Labels | None:
        """Collect what is known, of `known` (N,) what is not -1; None where that is nothing."""
        there = namespace(known).nonzero(known >= 0)[0]
        if not len(there) and not bool((state.known_counts > 0).any()):
            return None
        return cls(there, known[there], state.known_sums, state.known_counts)

    def clamp(self, z: Array, labels: Array) -> None:
        """Put what is known into assignments (N, K) and labels (N,)."""
        z[self.there, :] = 0
        z[self.there, self.known], labels[self.there] = 1, self.known


def cosine_to_means(
    dots: Array, at_anchor: Array, mine: Array, hard: Array, classes: Assigned, along: Array, alpha: Any
) -> Array:
    """Eqs. 8 and 9: cos(f_i, R_ik), R_ik = beta_ik S_k / s_k + (1 - beta_ik) mu'_k, beta = c / (c + alpha), (N, H).

    All of them are without the share u of sample i, as in S_k - u gamma_i z_ik f_i: `mine` is u gamma_i z_ik and `hard`
    are the counts c_ik without it, (N, H). `dots` are f_i . S_k, `at_anchor` f_i . mu'_k and `along` (H,) S_k . mu'_k.
    """
    beta = hard / (hard + alpha)  # (N, H)
    other = 1 - beta
    beta /= clip(classes.soft - mine, 1e-9)
    top = beta * (dots - mine) + other * at_anchor  # f_i . R_ik
    square = row_dots(classes.sums, classes.sums) + mine * (mine - 2 * dots)  # |S_k - mine f_i|^2
    square = beta * (beta * square + 2 * other * (along - mine * at_anchor)) + other * other
    return top / namespace(dots).sqrt(clip(square, EPS))


def sharpening(density: float, per_class: float, alpha: float) -> float:
    """Eq. 10: s / s_0 = 1 + 3 w beta, beta = x / (x + alpha) for a class of x = N / K samples."""
    return 1 + 3 * density * per_class / (per_class + alpha)


def reliability(right: int, known: int, per_class: float) -> float:
    """Eq. 12: 1 / (1 + N / K (1 - r)^2), r = (right + 2) / (known + 2): what a label of the model counts, against 1."""
    return 1 / (1 + per_class * (1 - (right + 2) / (known + 2)) ** 2)


def trust(base: Array, cosine: Array, known: Array, sharpness: float) -> float:
    """Eq. 13: the weight h of text, votes and prior, against that of class means, expected from the known labels.

    Of each labelled sample, `base` and `cosine` (n, K) are as they would be without it. h is exp(E[log h']) over a list
    of weights h' and temperatures, each as likely as it makes the known labels, less a penalty for leaving 1.
    """
    xp, fits = namespace(base), np.empty((len(TRUSTS), len(TEMPERS)))
    for i, text in enumerate(TRUSTS):
        logits = text * base + sharpness * cosine  # (n, K)
        for j, temper in enumerate(TEMPERS):
            fit = float(xp.sum(xp.take_along_axis(log_softmax(temper * logits), known[:, None], axis=1)))
            fits[i, j] = fit - RELUCTANCE[0] * math.log(text) ** 2 - RELUCTANCE[1] * math.log(temper) ** 2
    likely = np.exp(fits - fits.max()).sum(axis=1)  # of each weight
    return float(np.exp(likely @ np.log(TRUSTS) / likely.sum()))


def assign(logits: Array) -> tuple[Array, Array]:
    """Eq. 11, its softmax: z (N, K) and the entropy of each row, (N,); overwrites the logits."""
    xp = namespace(logits)
    logits -= xp.max(logits, axis=1)[:, None]
    z = xp.exp(logits)
    total = row_sums(z)  # (N,)
    z /= total[:, None]
    return z, xp.log(total) - row_dots(z, logits)


def class_pull(fixed: Fixed, counts: Array, z: Array, left_out: Any) -> Array:
    """Eq. 11, its prior: log(n_k - u z_ik + a*), (N, K), the collapsed mixture's; or the log shares that are known."""
    if fixed.prior is not None:
        return fixed.prior + 0 * z
    pull = clip(counts - left_out * z, 0)
    pull += fixed.smoothing
    return namespace(z).log(pull)


def expected_right(q: float, density: float, n: int) -> Any:
    """Eq. 14: the share of n labels expected right, 1 - (1 - q)^(1 + (0.7 - 0.55 w) (1 - 1/n)), q their mean y."""
    return 1 - clamped(1 - q, 0.0, 1.0) ** (1 + (0.7 - 0.55 * density) * (1 - 1 / n))


def log_ratios(z: Array, label: Array) -> Array:
    """Return log(z_ik / z_il), l the label of sample i, (N, K); `label` is (N, 1)."""
    log_z = namespace(z).log(z + 1e-30)
    log_z -= namespace(z).take_along_axis(log_z, label, axis=1)
    return log_z


def confidences(log_z: Array, power: float) -> tuple[Array, Array]:
    """Return the probability of the label under z^T and its derivative by log T, (N,) each, from `log_ratios`."""
    p, log_sum = softmax_log_sum(power * log_z)  # (N, K), (N,)
    confidence = namespace(p).exp(-log_sum)
    return confidence, -power * row_dots(p, log_z) * confidence


def calibration(target: Any, sums_at: Callable[[float], Iterable[Any]], n: int) -> float:
    """Eq. 14, its T in [0.02, 5] with which z^T has the mean confidence `target`, by Newton's method on log T.

    An interval is halved where that leads outside. `sums_at(T)` returns sums over the n samples of `confidences`.
    """
    low, high, power = COLDEST, WARMEST, 1.0
    for _ in range(NEWTON):
        confidence, rise = map(float, sums_at(power))
        gap = float(target) - confidence / n
        if abs(gap) < 1e-5 or high - low < 1e-3 * low:
            break
        low, high = (power, high) if gap > 0 else (low, power)
        step = power * math.exp(clamped(gap / max(rise / n, 1e-6), -1.0, 1.0))
        power = step if low <= step <= high else math.sqrt(low * high)
    return power


def unlikeness(cosine: Array) -> Array:
    """Eq. 15 of samples by themselves, from cosines (N, K): 1 - (max_k f_i . t_k - mean_k f_i . t_k), (N,)."""
    xp = namespace(cosine)
    return 1 - (xp.max(cosine, axis=1) - xp.mean(cosine, axis=1))


def negative_odds(f: Array, negatives: Array, log_sum: Array, scale: float) -> Array:
    """Eq. 15, what negatives (G, d) add, (N,): half the log odds of their share, in units of a cosine.

    The share is that in a softmax over classes and negatives; `log_sum` (N,) is log sum_k exp(scale f_i . t_k).
    """
    return (softmax_log_sum(scale * (f @ negatives.T))[1] - log_sum) / (2 * scale)


def with_neighbours(score: Array, votes_of: Any) -> Array:
    """Eq. 15, its mean of a sample's score and the mean score of its neighbours, (N,)."""
    xp = namespace(score)
    both = votes_of(xp.stack([score, xp.ones_like(score)], axis=1))  # (N, 2)
    around = xp.where(both[:, 1] > 0, both[:, 0] / clip(both[:, 1], EPS), score)
    return (score + around) / 2


@dataclass
class Predicted(Sums):
    """What anchors and metric need of the zero-shot predictions; of the H classes with labels only, where `some`."""

    n: int
    total: Array  # (K,) sum_i y_i
    centre: Array  # (d,) sum_i f_i
    square: Array  # (d,) sum_i f_i^2
    sums: Array  # (H, d) sum of the samples with each zero-shot label
    counts: Array  # (H,) their number
    sure: Array  # (H,) sum of the probability y_il of their label
    sure_squares: Array  # (H,) sum of y_il^2
    sure_sums: Array  # (H, d) sum of y_il f_i
    some: Any = field(default_factory=lambda: ALL, metadata=SAME)  # (H,) class numbers; a slice: all

    @classmethod
    def of(cls, f: Array, y: Array, labels: Array, sure: Array) -> Predicted:
        """Add up samples f (n, d) with predictions y (n, K), labels and their probabilities `sure`, (n,)."""
        xp, (n, d), k, sure = namespace(f), f.shape, y.shape[1], sure[:, None]
        sums = class_sums(labels, xp.concat([sure * f, xp.ones_like(sure), sure, sure * sure], axis=1), k)  # (K, d + 3)
        numbers = class_sums(labels, f, k), sums[:, d], sums[:, d + 1], sums[:, d + 2], sums[:, :d]
        return cls(n, y.sum(0), f.sum(0), (f * f).sum(0), *numbers)


@dataclass
class Compared(Sums):
    """What needs the sums of all predictions, and the metric."""

    agree: float  # sum over the samples of their agreements
    agree_square: float  # sum of those squared
    own: float  # sum_i |y_i|^2
    confidence: float  # sum_i max_k y_ik
    even_own: float  # sum_i |e_i|^2, the predictions of `evened`
    near: Array  # (K,) sum_ij W_ij y_ik y_jk
    most: Array  # (K,) sum_ij W_ij y_ik^2
    even: Array  # (K,) sum_i e_i
    length: float  # sum_i of the length of f_i in the metric
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
    moved: float  # how many z_ik differ from those before by STILL or more
    some: Any = field(default_factory=lambda: ALL, metadata=SAME)  # (H,) class numbers; a slice: all

    def like(self, ref: Array) -> Assigned:
        """Return it with arrays of the kind of `ref`."""
        some = self.some if isinstance(self.some, slice) else namespace(ref).asarray(self.some, device=ref.device)
        arrays = {name: like(getattr(self, name), ref) for name in ("sums", "soft", "hard", "counts")}
        return replace(self, some=some, **arrays)


@dataclass
class Confident(Sums):
    """What the calibration adds up: confidences, and their derivatives by the logarithm of the temperature."""

    confidence: float
    slope: float


class Fixed(NamedTuple):
    """What stays the same for all samples while z is estimated."""

    scale: Array  # (d,) the metric
    slope: Any  # of the anchors
    offset: Array  # (d,) of the anchors
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

    def like(self, ref: Array) -> Fixed:
        """Return it with arrays of the kind of `ref`; from shards they come in float64."""
        return self._replace(**{name: like(x, ref) for name, x in self._asdict().items() if hasattr(x, "dtype")})
