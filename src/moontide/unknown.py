"""Scores for "none of the classes", from embeddings alone: MCM, NegLabel and TANL.

    MCM      NeurIPS 2022, program deeplearning-wisc/MCM
    NegLabel ICLR 2024, program XueJiang16/NegLabel
    TANL     test-time activated negative labels, 2026, as in the package YBZh/OpenOOD-VLM

All take image embeddings (N, d) and class-name embeddings (K, d), of any length, and return one score per image: the
higher, the more likely is one of the K classes (`Result.unknown` has the opposite direction). The user chooses the
threshold, usually the score that 95 % of known images exceed. The predicted class is that of zero-shot.

Symbols:  f_i, t_k, u -> features, text, negatives   tau, 1 / tau -> tau, logit_scale   G -> groups
          TANL: Q+, Q- -> known_rows, unknown_rows   H -> history   S -> scores   a -> activation   n_sel -> selected
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from moontide.core.arrays import Array, as_real, device, like, namespace, to_numpy, unit_rows
from moontide.core.simplex import softmax, softmax_log_sum
from moontide.errors import InputError, OptionError
from moontide.options import Options, option

BLOCK_ROWS = 1024  # images whose similarities to the negatives are held at once


def mcm(features: Array, text: Array, tau: float = 1.0) -> Array:
    """Score by maximum concept matching: max_k softmax_k(f_i.t_k / tau), (N,).

    tau = 1 applies the softmax to the cosines themselves, as published: scores are slightly above 1 / K, and only their
    order matters. A tau of 0.01 gives the maximum softmax probability (MSP), which some packages call MCM.

    >>> mcm(np.asarray([[1.0, 0.0], [1.0, 1.0]]), np.eye(2)).round(3)
    array([0.731, 0.5  ])
    """
    _positive("tau", tau)
    f, t = _unit(features, "features"), _unit(text, "text_features", features)
    return namespace(f).max(softmax((f @ t.T) / tau), axis=1)


def mine_negatives(candidates: Array, text: Array, share: float = 0.15, quantile: float = 0.95) -> Array:
    """Choose negative names: the rows of `candidates` (M, d) that are furthest from the classes, furthest first.

    q(u) is the quantile, interpolated linearly, of the K cosines u.t_k; the floor(share M) rows of lowest q are kept.
    NegLabel does this separately for the nouns and the adjectives of WordNet, and combines what is kept.

    >>> mine_negatives(np.asarray([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), np.asarray([[1.0, 0.0]]), share=0.7)
    array([2, 1])
    """
    for name, value in (("share", share), ("quantile", quantile)):
        if not 0 <= value <= 1:
            raise OptionError(f"{name!r} must be a number from 0 to 1. Got {value!r} instead.")
    u, t = _unit(candidates, "candidates"), _unit(text, "text_features", candidates)
    xp, kept = namespace(u), math.floor(share * u.shape[0])
    if kept == 0:
        raise InputError(f"'share' must keep at least one candidate. Got {share:g} of {u.shape[0]}; raise it.")
    cosine = xp.sort(u @ t.T, axis=1)  # (M, K)
    at = quantile * (t.shape[0] - 1)
    low, high = math.floor(at), math.ceil(at)
    q = cosine[:, low] + (at - low) * (cosine[:, high] - cosine[:, low])  # (M,)
    return xp.argsort(q, stable=True)[:kept]


def neglabel(
    features: Array,
    text: Array,
    negatives: Array,
    *,
    logit_scale: float = 100.0,
    groups: int | None = None,
    seed: int = 0,
) -> Array:
    """Score by the share of the classes in the softmax beside negative names, the mean over groups of these, (N,).

    s_ig = sum_k e^(f.t_k / tau) / (sum_k e^(f.t_k / tau) + sum_{u in group g} e^(f.u / tau)),  score_i = mean_g s_ig

    `negatives` (M, d) are divided at random (`seed`) into `groups` of equal size, and a remainder is left out. None
    means 100 groups as published, or fewer if these would have less than 100 names.

    >>> neglabel(np.eye(2), np.eye(2)[:1], np.eye(2)[1:])
    array([1.00000000e+00, 3.72007598e-44])
    """
    f, t = _unit(features, "features"), _unit(text, "text_features", features)
    u = _unit(negatives, "negatives", features)
    _positive("logit_scale", logit_scale)
    xp, m = namespace(f), u.shape[0]
    count = max(1, min(100, m // 100)) if groups is None else groups
    if not 1 <= count <= m:
        raise OptionError(f"'groups' must be an integer from 1 to the {m} negatives. Got {groups!r} instead.")
    size = m // count
    order = np.random.default_rng(seed).permutation(size * count)
    u = xp.take(u, xp.asarray(order, device=device(u)), axis=0)  # (G size, d)
    parts = []
    for start in range(0, f.shape[0], BLOCK_ROWS):
        x = f[start : start + BLOCK_ROWS, :]
        known = softmax_log_sum(logit_scale * (x @ t.T))[1]  # (n,) ln sum_k e^(f.t_k / tau)
        other = xp.reshape(logit_scale * (x @ u.T), (x.shape[0], count, size))
        parts.append(xp.mean(share_of(known[:, None], softmax_log_sum(other)[1]), axis=1))
    return xp.concat(parts)


def share_of(a: Array, b: Array) -> Array:
    """e^a / (e^a + e^b), without overflow.

    >>> share_of(np.asarray([1000.0]), np.asarray([1000.0]))
    array([0.5])
    """
    xp = namespace(a)
    small = xp.exp(-xp.abs(a - b))
    return xp.where(a >= b, 1 / (1 + small), small / (1 + small))


@dataclasses.dataclass(frozen=True)
class TANLState:
    """The state of TANL: arrays of the same kind as the text; (P, M) and (Q, M) with P and Q at most `queue`."""

    text: Array  # (K, d) unit rows
    negatives: Array  # (M, d) unit rows
    logit_scale: float
    known_rows: Array  # (P, M) probabilities of the negative names in samples that are surely known
    unknown_rows: Array  # (Q, M) those in samples that are surely unknown
    history: Array  # (H,) scores so far


@dataclasses.dataclass(frozen=True)
class TANL(Options):
    """Score a stream of batches by negative names that the samples themselves activate.

    Rows are softmax over [T; U] of f.[T; U] / tau, negative columns only; the activation of a name is a = mean of
    unknown rows - mean of known rows; sel = the n_sel names of highest activation, highest first. S(f; sel) is the
    share of the classes in the softmax over [T; sel], for gamma > 0 the mean of it over the first gamma, 2 gamma, ...,
    n_sel names of sel. For each batch:

        s = S with a as it is; H gets s; th splits H in two (Otsu)
        surely known: s > th + gap (1 - th), surely unknown: s < th - gap th
        a' from alpha times the means so far and 1 - alpha times those of the sure rows of this batch (if there are any)
        the answer is S with a'; then the sure rows enter the queues

    At the start, the class names stand for known images, and `noise` (embeddings of noise images, as published) for
    unknown ones. Without noise, the negative names stand for unknown images, which differs from the publication.

    >>> rng = np.random.default_rng(0)
    >>> tanl, text, negatives = TANL(selected=9), rng.normal(size=(3, 8)), rng.normal(size=(9, 8))
    >>> state = tanl.start(text, negatives)
    >>> state, scores = tanl.step(state, np.concatenate([text, negatives]))
    >>> bool(scores[:3].min() > scores[3:].max()), state.history.shape
    (True, (24,))
    """

    selected: int = option(1000, "n_sel, negative names that are used", low=1, high=10**6)
    gap: float = option(
        0.5, "how far from the threshold a sample is sure, as a share of the way to 0 or 1", low=0, high=1
    )
    alpha: float = option(
        0.0, "weight of the samples so far beside those of the batch in the activation", low=0, high=1
    )
    gamma: int = option(2, "names by which the prefixes grow that are averaged; 0: all selected names at once", low=0)
    queue: int = option(300, "sure rows that are remembered of each kind", low=1, high=100_000)
    history: int = option(20000, "scores that the threshold comes from", low=1, high=10**6)

    def start(
        self, text: Array, negatives: Array, *, noise: Array | None = None, logit_scale: float = 100.0, seed: int = 0
    ) -> TANLState:
        """Make the state before the first batch; `seed` determines which class names and negatives are kept."""
        _positive("logit_scale", logit_scale)
        t = _unit(text, "text_features")
        u = _unit(negatives, "negatives", text)
        xp, rng = namespace(t), np.random.default_rng(seed)

        def some(x: Array) -> Array:
            return xp.take(x, xp.asarray(rng.permutation(x.shape[0])[-self.queue :], device=device(x)), axis=0)

        known = some(t)  # (P, d)
        unknown = some(u) if noise is None else _unit(noise, "noise", text)[-self.queue :, :]  # (Q, d)
        rows = [activations(x, t, u, logit_scale) for x in (known, unknown)]
        state = TANLState(t, u, float(logit_scale), rows[0], rows[1], xp.zeros((0,), dtype=t.dtype, device=device(t)))
        names = self.select(xp.mean(rows[0], axis=0), xp.mean(rows[1], axis=0))  # (n_sel,)
        return dataclasses.replace(state, history=self.scores(state, xp.concat([known, unknown]), names))

    def step(self, state: TANLState, features: Array) -> tuple[TANLState, Array]:
        """Score a batch, (n,), and return the state after it; `state` itself is not modified."""
        f = _unit(features, "features", state.text)
        xp = namespace(f)
        means = xp.mean(state.known_rows, axis=0), xp.mean(state.unknown_rows, axis=0)  # (M,), (M,)
        s = self.scores(state, f, self.select(*means))  # (n,)
        history = xp.concat([state.history, s])[-self.history :]
        th = otsu(history)
        rows = activations(f, state.text, state.negatives, state.logit_scale)  # (n, M)
        sure = rows[s > th + self.gap * (1 - th)], rows[s < th - self.gap * th]  # (p, M), (q, M)
        now = [
            self.alpha * mean + (1 - self.alpha) * (xp.mean(new, axis=0) if new.shape[0] else mean)
            for mean, new in zip(means, sure, strict=True)
        ]
        queues = [
            xp.concat([old, new])[-self.queue :, :]
            for old, new in zip((state.known_rows, state.unknown_rows), sure, strict=True)
        ]
        after = dataclasses.replace(state, known_rows=queues[0], unknown_rows=queues[1], history=history)
        return after, self.scores(state, f, self.select(now[0], now[1]))

    def select(self, known: Array, unknown: Array) -> Array:
        """Return the names of highest activation a = unknown - known, highest first, (n_sel,)."""
        return namespace(known).argsort(known - unknown, stable=True)[: self.selected]

    def scores(self, state: TANLState, f: Array, names: Array) -> Array:
        """S(f; names), (n,)."""
        xp = namespace(f)
        known = softmax_log_sum(state.logit_scale * (f @ state.text.T))[1]  # (n,)
        u = xp.take(state.negatives, names, axis=0)  # (n_sel, d)
        logits = state.logit_scale * (f @ u.T)  # (n, n_sel)
        step = self.gamma or names.shape[0]
        ends = list(range(step, names.shape[0] + 1, step)) or [names.shape[0]]
        top = xp.max(logits, axis=1, keepdims=True)  # (n, 1)
        sums = xp.cumulative_sum(xp.exp(logits - top), axis=1)  # (n, n_sel)
        sums = xp.take(sums, xp.asarray(ends, device=device(f)) - 1, axis=1)  # (n, prefixes)
        tiny = float(xp.finfo(f.dtype).smallest_normal)  # a prefix may be nothing beside the nearest name
        return xp.mean(share_of(known[:, None], top + xp.log(xp.clip(sums, min=tiny))), axis=1)


def activations(f: Array, text: Array, negatives: Array, logit_scale: float) -> Array:
    """Return the negative columns of softmax over [T; U] of f.[T; U] / tau, (n, M).

    >>> activations(np.eye(2)[:1], np.eye(2)[:1], np.eye(2)[:1], 1.0)
    array([[0.5]])
    """
    xp = namespace(f)
    return softmax(logit_scale * (f @ xp.concat([text, negatives]).T))[:, text.shape[0] :]


def otsu(scores: Array) -> float:
    """Return the threshold th in 0, 0.01, ..., 0.99 that splits scores at s >= th with the least variance within parts.

    Parts are weighted by their size; a split with an empty part counts as infinite. Among equals the middle one is
    returned.

    >>> otsu(np.asarray([0.1, 0.2, 0.8, 0.9]))
    0.51
    """
    ordered = np.sort(to_numpy(scores).astype(np.float64))  # (H,)
    thresholds = np.arange(100) / 100
    low = np.searchsorted(ordered, thresholds, side="left")  # (100,) how many are below
    n, sums, squares = len(ordered), np.append(0, np.cumsum(ordered)), np.append(0, np.cumsum(ordered**2))
    within: Any = np.full(100, np.inf)
    split = (low > 0) & (low < n)
    a = low[split]
    above = sums[-1] - sums[a]
    within[split] = (squares[-1] - sums[a] ** 2 / a - above**2 / (n - a)) / n
    equal = np.flatnonzero(within == within.min())
    return float(thresholds[equal[len(equal) // 2]])


def _unit(x: Array, name: str, ref: Array | None = None) -> Array:
    """Check a matrix of embeddings and scale its rows to length 1, in the kind of `ref`."""
    x = unit_rows(as_real(x, name), name)
    if ref is None:
        return x
    ref = as_real(ref, "features")
    if x.shape[1] != ref.shape[1]:
        raise InputError(f"{name!r} must have the dimension of the others, {ref.shape[1]}. Got {x.shape[1]} instead.")
    return like(x, ref)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise OptionError(f"{name!r} must be a number above 0. Got {value!r} instead.")
