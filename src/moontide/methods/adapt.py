"""ADAPT: a Gaussian classifier from a bank of confident samples, fused with the zero-shot logits.

ADAPT, NeurIPS 2025, after what its program (AIM-SKKU/ADAPT) computes.

Symbols:  f_i -> x[i]   t_k -> text[k]   c_ik -> logits[i, k]   p_ik -> p[i, k]   H_i -> h[i]   L -> bank   M -> m
          mu_k -> mu[k]   w_k, b_k -> w[k], b[k]   sum over the bank of class k of p f -> sums[k]   alpha, scale

The data are seen all at once (transductive), or sample by sample with a bank that is kept (online). Either way
score_ik = c_ik exp((A_ik - max_k A_ik) / scale),  A_ik = log_softmax_k(f_i . w_k + b_k) + scale / (2M) f_i . sums_k;
the last term is the sum of the similarities to the M samples of the bank, each times its probability of class k.

`scores` are these; online they are divided by the absolute value of the sum of their row (the published program divides
by the sum, which reverses the order of a row whose sum is negative). Cosines may be negative, so `probs` is the softmax
of the undivided scores, which are damped logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from moontide.core.arrays import Array, device, namespace, to_numpy
from moontide.core.simplex import log_softmax, one_hot, softmax
from moontide.methods._precision import Spread, moments, times_precision, whitened
from moontide.methods._slots import NONE, choose_slots
from moontide.methods.gda_clip import biases
from moontide.options import option
from moontide.protocols import OnlineMethod, State, per_class
from moontide.types import Result, Task


@dataclass(frozen=True)
class ADAPTState(State):
    """The bank of at most L samples per class, and the class means."""

    bank: Array = field(metadata=per_class(0))  # (K, L, d) features, zero where a slot is empty
    weight: Array = field(metadata=per_class(0))  # (K, L) probability of the class, zero where a slot is empty
    entropy: Array = field(metadata=per_class(0))  # (K, L) infinite where a slot is empty
    mu: Array = field(metadata=per_class(0))  # (K, d)
    last: Array  # (d,) the sample that entered last


@dataclass(frozen=True)
class ADAPT(OnlineMethod):
    """Class means and a shared covariance from the most confident samples, without iteration.

    >>> import numpy as np
    >>> ADAPT().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "ADAPT, NeurIPS 2025"
    state_type: ClassVar[type[State]] = ADAPTState
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # the original also sets `scale` by dataset, 20 to 100
        "original_transductive": {"mode": "transductive", "bank": 6},
        "original_online": {"mode": "online", "bank": 16, "faithful": True},
    }

    mode: str = option("auto", "process a batch at once or sample by sample; auto: batches at once, streams by sample",
                       choices=("auto", "transductive", "online"))  # fmt: skip
    bank: int = option(12, "L, samples kept per class", low=1)
    alpha: float = option(0.9, "weight of the samples in the class means; the text has 1 - alpha", low=0, high=1)
    scale: float = option(50.0, "weight of the similarities, and divisor of their sum with the Gaussian", above=0)
    faithful: bool = option(False, "online, as first published: a sample that does not enter the bank is given the "
                                   "similarities of the last one that did")  # fmt: skip

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the options that have no effect given the others."""
        if self.mode == "transductive":
            yield ("faithful",), "with mode='transductive'"

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus two banks (state and residuals) and some d x d matrices."""
        banks = 0 if self.mode == "transductive" else 3 * k * self.bank * d
        return super().peak_bytes(n, k, d, itemsize) + itemsize * (banks + 5 * d * d)

    def start(self, task: Task) -> ADAPTState:
        """Create the state before the first sample: no bank, the means at the text."""
        xp = namespace(task.text)
        kind = {"dtype": task.text.dtype, "device": device(task.text)}
        size = 0 if self.mode == "transductive" else self.bank
        return ADAPTState(
            text=task.text,
            logit_scale=task.logit_scale,
            seen=0,
            bank=xp.zeros((task.k, size, task.d), **kind),
            weight=xp.zeros((task.k, size), **kind),
            entropy=xp.full((task.k, size), xp.inf, **kind),
            mu=xp.asarray(task.text, copy=True),
            last=xp.zeros((task.d,), **kind),
        )

    def _fit(self, task: Task) -> Result:
        if self.mode == "online":
            return super()._fit(task)
        return self.transduce(task.features, task.text, task.logit_scale)

    def transduce(self, x: Array, text: Array, logit_scale: float) -> Result:
        """Predict unit rows `x` from all of them at once."""
        logits = logit_scale * (x @ text.T)  # (N, K)
        p, h = confidence(logits)  # (N, K), (N,)
        labels = namespace(x).argmax(p, axis=1)  # (N,)
        rows = most_confident(h, labels, self.bank)  # (M,)
        kept, of = x[rows], labels[rows]  # (M, d), (M,)
        q = one_hot(of, text.shape[0], p) * p[rows]  # (M, K) the bank's probabilities of its own classes
        mu = self.batch_means(x, p, kept, q, text)  # (K, d)
        w = times_precision(mu, kept - mu[of])  # (K, d)
        score = self.fuse(logits, x @ w.T + biases(mu, w), x @ (q.T @ kept).T, rows.shape[0])  # (N, K)
        return Result(softmax(score), p, score, details={"mu": mu})

    def batch_means(self, x: Array, p: Array, kept: Array, q: Array, text: Array) -> Array:
        """mu_k = alpha (sum_bank p f + sum_i p_ik f_i) / (sum_bank p + sum_i p_ik) + (1 - alpha) t_k; no bank: t_k."""
        xp = namespace(x)
        banked = xp.sum(q, axis=0)  # (K,)
        count = xp.where(banked > 0, banked + xp.sum(p, axis=0), xp.ones_like(banked))  # (K,)
        mu = xp.where((banked > 0)[:, None], (q.T @ kept + p.T @ x) / count[:, None], text)  # (K, d)
        return self.alpha * mu + (1 - self.alpha) * text

    def _step(self, state: ADAPTState, x: Array) -> tuple[ADAPTState, Result]:  # type: ignore[override]
        if self.mode == "transductive":
            return state, self.transduce(x, state.text, state.logit_scale)
        xp = namespace(x)
        logits = state.logit_scale * (x @ state.text.T)  # (n, K)
        p, h = confidence(logits)  # (n, K), (n,)
        labels = to_numpy(xp.argmax(p, axis=1))  # (n,) on the host, as the slots
        slots = choose_slots(state.entropy, labels, to_numpy(h)).tolist()
        state = state.fork()  # the copy that this step writes to
        sums = xp.matmul(state.weight[:, None, :], state.bank)[:, 0, :]  # (K, d)
        scores = []
        spread: Spread | None = None
        # Nothing changes between two samples that enter: only the first of a run may enter.
        entered = [i for i in range(1, len(slots)) if slots[i] != NONE]
        for start, stop in pairwise([0, *entered, len(slots)]):
            if slots[start] != NONE:
                k = int(labels[start])
                before = residuals(state, slice(k, k + 1))
                sums[k] = self.enter(state, k, slots[start], x[start], p[start, k], h[start])
                if spread is not None:
                    changes = zip(spread, moments(before), moments(residuals(state, slice(k, k + 1))), strict=True)
                    spread = tuple(m - b + a for m, b, a in changes)
            run = x[start:stop]  # (r, d)
            gaussian, m, spread = gaussian_logits(state, run, spread)  # (r, K)
            similarity = (state.last[None, :] if self.faithful else run) @ sums.T  # (1, K) or (r, K)
            scores.append(self.fuse(logits[start:stop], gaussian, similarity, m))
        score = xp.concat(scores)  # (n, K)
        size = xp.abs(xp.sum(score, axis=1, keepdims=True))  # (n, 1)
        native = score / xp.clip(size, min=float(xp.finfo(x.dtype).smallest_normal))
        return state, Result(softmax(score), p, native)

    def enter(self, state: ADAPTState, k: int, slot: int, f: Array, p: Array, h: Array) -> Array:
        """Put a sample into the bank of class k, and move its mean, all in place; return sum_bank_k p f, (d,).

        mu_k = alpha (sum_bank_k p f + p_new f_new) / (sum_bank_k p + p_new) + (1 - alpha) t_k: the new sample, in the
        bank already, counts twice.
        """
        state.bank[k, slot], state.weight[k, slot], state.entropy[k, slot] = f, p, h
        banked = state.weight[k] @ state.bank[k]  # (d,)
        mean = (banked + p * f) / (namespace(f).sum(state.weight[k]) + p)  # (d,)
        state.mu[k] = self.alpha * mean + (1 - self.alpha) * state.text[k]
        state.last[:] = f
        return banked

    def fuse(self, logits: Array, gaussian: Array, similarity: Array, m: int) -> Array:
        """score = c exp((A - max A) / scale), A = log_softmax(gaussian) + scale / (2 M) similarity, (n, K)."""
        xp = namespace(logits)
        a = log_softmax(gaussian) + self.scale / (2 * m) * similarity  # (n, K)
        return logits * xp.exp((a - xp.max(a, axis=1, keepdims=True)) / self.scale)


def confidence(logits: Array) -> tuple[Array, Array]:
    """Return the probabilities, (n, K), and their entropies H = -sum_k p_k ln p_k, (n,).

    >>> import numpy as np
    >>> confidence(np.asarray([[0.0, 0.0]]))
    (array([[0.5, 0.5]]), array([0.69314718]))
    """
    xp = namespace(logits)
    log_p = log_softmax(logits)  # (n, K)
    p = xp.exp(log_p)
    return p, -xp.sum(p * log_p, axis=1)


def most_confident(h: Array, labels: Array, size: int) -> Array:
    """Return the rows of the at most `size` lowest entropies of each predicted class, class by class.

    >>> import numpy as np
    >>> most_confident(np.asarray([0.3, 0.1, 0.2, 0.4]), np.asarray([1, 1, 1, 0]), 2)
    array([3, 1, 2])
    """
    xp = namespace(h)
    rows = xp.argsort(h, stable=True)  # (N,) by entropy
    rows = rows[xp.argsort(labels[rows], stable=True)]  # by class, then by entropy
    of = labels[rows]
    rank = xp.arange(h.shape[0], device=device(h)) - xp.searchsorted(of, of)  # rank within the class
    return rows[rank < size]


def residuals(state: ADAPTState, classes: slice = slice(None)) -> Array:
    """Return f - mu_k of the filled slots of some classes, (M, d)."""
    xp = namespace(state.bank)
    of, slots = xp.nonzero(xp.isfinite(state.entropy[classes]))
    return state.bank[classes][of, slots] - state.mu[classes][of]


def gaussian_logits(state: ADAPTState, x: Array, spread: Spread | None) -> tuple[Array, int, Spread | None]:
    """Return f.w_k + b_k, (n, K), the number M of samples in the bank, and `spread`, the moments of their residuals.

    w_k = P mu_k is computed from the residuals if there are few of them. Otherwise P comes from their moments, computed
    once, and after whitening f and mu_k, f.w_k + b_k = f.mu_k - |mu_k|^2 / 2 - ln K.
    """
    xp = namespace(x)
    if spread is None:
        rows = residuals(state)  # (M, d)
        if 2 * rows.shape[0] < rows.shape[1]:
            w = times_precision(state.mu, rows)  # (K, d)
            return x @ w.T + biases(state.mu, w), rows.shape[0], None
        spread = moments(rows)
    white = whitened(xp.concat([x, state.mu]), *spread)  # (n + K, d)
    f, mu = white[: x.shape[0]], white[x.shape[0] :]  # (n, d), (K, d)
    return f @ mu.T + biases(mu, mu), spread[2], spread
