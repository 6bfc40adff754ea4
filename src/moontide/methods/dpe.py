"""DPE: prototypes of the text and of cached images, both of which take one gradient step per sample of a stream.

DPE, NeurIPS 2024, after what its program (zhangce01/DPE-CLIP) computes.

Symbols:  x -> x   G -> text_prototypes, one row per class, not of unit length   m -> updates   W -> w
          cached features, entropies -> keys, entropy   Q -> q   a, b -> cache_weight, sharpness   h -> normalised
          lr -> step   align weight -> alignment   AdamW eps -> damping   update threshold -> threshold

For each sample, with unit(.) scaling rows to unit length:

    l = x.unit(G) / tau; the sample enters the cache of its class argmax l (see `methods._slots`) by its entropy h(l).
    Q_c = mean of the cache of class c;   z = l + a exp(-b (1 - x.unit(Q_c))) at the classes c with a cache
    L = H(softmax z) + 0.5 NCE,   NCE = mean_c -ln softmax_c'(unit(Q_c).unit(G_c') / 0.01) at c' = c
    R = -lr g / (|g| + 1e-3) entry by entry, g the gradient of L in G and in Q: AdamW's first step, from residuals of 0
    The answer is z of G + R_G and Q + R_Q. If its h < 0.1:  m <- m + 1,  G <- (m G + unit(G + R_G)) / (m + 1)

h is the entropy in nats over log2 K. The first step of AdamW has a closed form, so features are enough; its weight
decay acts on zeros. The published program averages L over several views of an image, which is not done here. The
defaults are its constants for ImageNet; other data sets differ in a (3 to 15), b (1 to 8), lr (5e-5 to 6e-4) and the
weight of NCE (0.2 to 1.5). The division by |g| + 1e-3 magnifies rounding, so everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from moontide.core.arrays import Array, clip, device, namespace, row_dots, row_norms, unit_rows
from moontide.core.simplex import log_softmax, softmax, zero_shot
from moontide.methods._slots import NONE, choose_slots
from moontide.options import option
from moontide.protocols import OnlineMethod, State, per_class
from moontide.types import Result, Task


@dataclass(frozen=True)
class DPEState(State):
    """The prototypes and the cache, in float64; an entropy is infinite where a slot is empty."""

    text_prototypes: Array = field(metadata=per_class(0))  # (K, d)
    keys: Array = field(metadata=per_class(0))  # (K, C, d) zero where a slot is empty
    entropy: Array = field(metadata=per_class(0))  # (K, C)
    updates: int


@dataclass(frozen=True)
class DPE(OnlineMethod):
    """Text and image prototypes that lower the entropy of each sample and stay aligned with each other.

    >>> import numpy as np
    >>> DPE().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "DPE, NeurIPS 2024"
    state_type: ClassVar[type[State]] = DPEState

    capacity: int = option(3, "slots per class in the cache", low=1)
    cache_weight: float = option(6.0, "a, weight of the image prototypes", low=0)
    sharpness: float = option(5.0, "b, how fast the affinity to image prototypes falls with distance", low=0)
    text_step: float = option(6e-4, "learning rate of the text prototypes", low=0)
    image_step: float = option(6e-4, "learning rate of the image prototypes", low=0)
    alignment: float = option(0.5, "weight of NCE relative to the entropy", low=0)
    alignment_tau: float = option(0.01, "temperature in NCE", above=0)
    damping: float = option(1e-3, "added to |g| before dividing a gradient by it", above=0)
    threshold: float = option(0.1, "normalised entropy below which a sample updates the text prototypes", low=0)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the options that have no effect given the others."""
        if self.alignment == 0:
            yield ("alignment_tau",), "with alignment=0"

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus float64 cache, copy, gradients and cosines of prototypes."""
        return super().peak_bytes(n, k, d, itemsize) + 8 * ((2 * self.capacity + 12) * k * d + 4 * k * k)

    def start(self, task: Task) -> DPEState:
        """Make an empty cache; the text prototypes are the text."""
        xp = namespace(task.text)
        kind = {"dtype": xp.float64, "device": device(task.text)}
        return DPEState(
            text=task.text,
            logit_scale=task.logit_scale,
            seen=0,
            text_prototypes=xp.astype(task.text, xp.float64, copy=True),
            keys=xp.zeros((task.k, self.capacity, task.d), **kind),
            entropy=xp.full((task.k, self.capacity), xp.inf, **kind),
            updates=0,
        )

    def _step(self, state: DPEState, x: Array) -> tuple[DPEState, Result]:  # type: ignore[override]
        xp = namespace(x)
        after = state.fork()  # the copy that this step writes to
        rows = []
        for f in xp.astype(x, xp.float64):
            w = unit_rows(after.text_prototypes)  # (K, d)
            self.enter(after, f, state.logit_scale * (w @ f))
            of = xp.nonzero(xp.isfinite(after.entropy[:, 0]))[0]  # (C,) classes with a cache: slots fill from the first
            filled = xp.sum(xp.astype(xp.isfinite(after.entropy[of]), f.dtype), axis=1)  # (C,)
            q = xp.sum(after.keys[of], axis=1) / filled[:, None]  # (C, d)
            w, z = self.adapt(f, after.text_prototypes, q, of, state.logit_scale)  # (K, d), (K,)
            rows.append(z)
            if normalised_entropy(z) < self.threshold:
                m = after.updates + 1
                after = replace(after, text_prototypes=(m * after.text_prototypes + w) / (m + 1), updates=m)
        scores = xp.stack(rows)  # (n, K)
        probs = xp.astype(softmax(scores), x.dtype)
        return after, Result(probs, zero_shot(x, state.text, state.logit_scale), xp.astype(scores, x.dtype))

    def enter(self, cache: DPEState, x: Array, logits: Array) -> None:
        """Put a sample into the cache of its class if its entropy is low enough."""
        k, h = int(namespace(x).argmax(logits)), normalised_entropy(logits)
        slot = choose_slots(cache.entropy[k : k + 1], np.zeros(1, np.int64), np.asarray([h]))[0]
        if slot != NONE:
            cache.keys[k, int(slot)], cache.entropy[k, int(slot)] = x, h

    def adapt(self, x: Array, g: Array, q: Array, of: Array, logit_scale: float) -> tuple[Array, Array]:
        """Take the gradient step for a sample; return the unit text prototypes after it, (K, d), and the logits z."""
        xp = namespace(x)
        w, u = unit_rows(g), unit_rows(q)  # (K, d), (C, d)
        near = affinity(u, x, self.cache_weight, self.sharpness)  # (C,)
        z = joined(logit_scale * (w @ x), near, of)  # (K,)
        log_p = log_softmax(z)
        p = xp.exp(log_p)
        slope = -p * (log_p - xp.sum(p * log_p))  # (K,) dH/dz_k = -p_k (ln p_k + H)
        by_w = logit_scale * slope[:, None] * x[None, :]  # (K, d)
        by_u = (self.sharpness * near * slope[of])[:, None] * x[None, :]  # (C, d)
        # dNCE / d cosines = (softmax - I) / (C tau), and the cosines are u w'
        pull = softmax(u @ w[of].T / self.alignment_tau) - xp.eye(u.shape[0], dtype=x.dtype, device=device(x))  # (C, C)
        pull *= self.alignment / (u.shape[0] * self.alignment_tau)
        by_w[of] = by_w[of] + pull.T @ u
        by_u = by_u + pull @ w[of]
        w = unit_rows(g + self.first_step(through_unit(by_w, w, g), self.text_step))
        u = unit_rows(q + self.first_step(through_unit(by_u, u, q), self.image_step))
        return w, joined(logit_scale * (w @ x), affinity(u, x, self.cache_weight, self.sharpness), of)

    def first_step(self, gradient: Array, step: float) -> Array:
        """R = -lr g / (|g| + eps), entry by entry."""
        return -step * gradient / (namespace(gradient).abs(gradient) + self.damping)


def affinity(u: Array, x: Array, weight: float, sharpness: float) -> Array:
    """a exp(-b (1 - x.u_c)), (C,).

    >>> affinity(np.eye(2), np.asarray([1.0, 0.0]), 6.0, 5.0).round(3)
    array([6.  , 0.04])
    """
    return weight * namespace(x).exp(sharpness * (u @ x - 1))


def joined(logits: Array, near: Array, of: Array) -> Array:
    """Add the affinities to the logits of their classes, (K,), written over the logits.

    >>> joined(np.zeros(3), np.asarray([6.0]), np.asarray([1]))
    array([0., 6., 0.])
    """
    logits[of] = logits[of] + near
    return logits


def through_unit(gradient: Array, unit: Array, raw: Array) -> Array:
    """Turn the gradient by unit(r) into the one by r: (g - u (u.g)) / |r|, row by row.

    >>> through_unit(np.asarray([[1.0, 1.0]]), np.asarray([[1.0, 0.0]]), np.asarray([[2.0, 0.0]]))
    array([[0. , 0.5]])
    """
    along = row_dots(unit, gradient)[:, None]  # (m, 1)
    return (gradient - along * unit) / clip(row_norms(raw), 1e-12)[:, None]


def normalised_entropy(logits: Array) -> float:
    """h = H(softmax l) / log2 K, H in nats, (K,) -> a number; 0 if there is one class.

    >>> round(normalised_entropy(np.zeros(4)), 4)
    0.6931
    """
    log_p = log_softmax(logits)
    xp = namespace(logits)
    return -float(xp.sum(xp.exp(log_p) * log_p)) / math.log2(max(logits.shape[0], 2))
