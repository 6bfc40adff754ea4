"""TDA: a training-free dynamic adapter, two key-value caches of confident and of uncertain samples.

TDA, CVPR 2024, after what its program (kdiAAA/TDA) computes.

Symbols:  f -> x   c = f.t / tau -> logits   p -> probs   H(p) -> h   H / log2 K -> normalised
          keys k_j and entropies of the positive cache -> positive_keys, positive_entropy, (K, 3, d) and (K, 3)
          of the negative cache -> negative_keys, negative_entropy; its masks 1[0.03 < p < 1] -> negative_classes

    logits_adapted = c + alpha_pos sum_pos exp(-beta_pos (1 - f.k_j)) onehot(class_j)
                       - alpha_neg sum_neg exp(-beta_neg (1 - f.k_j)) mask_j

The entropy is in nats and log2 K in bits, so `normalised` is at most ln 2. The defaults are what the MOON paper's
tables ran: the whole batch enters the caches, then all of it is predicted with them. With the preset "original", each
sample enters the caches and is then predicted, before the next one, and the scores are the adapted logits.

Fewer than 1 / mask_low classes have p > mask_low, so a mask is stored as the list of its classes (padded with -1): the
size of the negative cache is proportional to K, not K^2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from moontide.core.arrays import Array, device, namespace, to_numpy
from moontide.core.simplex import log_softmax, softmax
from moontide.methods._slots import choose_slots, write
from moontide.options import option
from moontide.protocols import OnlineMethod, State, copy_array, per_class
from moontide.types import Result, Task

BLOCK_ENTRIES = 2**22  # affinities, and entries of masks, held at once
CACHES = ("positive_keys", "positive_entropy", "negative_keys", "negative_entropy", "negative_classes")


@dataclass(frozen=True)
class TDAState(State):
    """The two caches; an entropy is infinite where a slot is empty."""

    positive_keys: Array = field(metadata=per_class(0))  # (K, C, d)
    positive_entropy: Array = field(metadata=per_class(0))  # (K, C)
    negative_keys: Array = field(metadata=per_class(0))  # (K, C', d)
    negative_entropy: Array = field(metadata=per_class(0))  # (K, C')
    negative_classes: Array = field(metadata=per_class(0, "numbers"))  # (K, C', W), -1 where there is no further class


@dataclass(frozen=True)
class TDA(OnlineMethod):
    """Logits raised by similar confident samples and lowered by similar uncertain ones.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> TDA().fit_predict(rng.normal(size=(8, 16)), rng.normal(size=(3, 16))).probs.shape
    (8, 3)
    """

    citation: ClassVar[str] = "TDA, CVPR 2024"
    state_type: ClassVar[type[State]] = TDAState
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tables": {},
        "original": {"access": "sample", "scores": "logits"},
    }

    access: str = option("batch", "all samples of a step enter the caches before any is predicted, or one at a time",
                         choices=("batch", "sample"))  # fmt: skip
    scores: str = option("softmax", "form of the scores: the softmax of the adapted logits, or the logits",
                         choices=("softmax", "logits"))  # fmt: skip
    positive_capacity: int = option(3, "slots per class in the positive cache", low=1)
    negative_capacity: int = option(2, "slots per class in the negative cache", low=1)
    positive_weight: float = option(2.0, "alpha_pos, weight of the positive cache", low=0)
    positive_sharpness: float = option(5.0, "beta_pos, how fast the affinity of positives falls with distance", low=0)
    negative_weight: float = option(0.117, "alpha_neg, weight of the negative cache", low=0)
    negative_sharpness: float = option(1.0, "beta_neg, how fast the affinity of negatives falls with distance", low=0)
    entropy_low: float = option(0.2, "normalised entropy above which a sample enters the negative cache", low=0)
    entropy_high: float = option(0.5, "normalised entropy below which a sample enters the negative cache", low=0)
    mask_low: float = option(0.03, "probability above which a class is lowered by a negative sample", above=0, high=1)
    mask_high: float = option(1.0, "probability below which a class is lowered by a negative sample", above=0)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the options that have no effect given the others."""
        if self.positive_weight == 0:
            yield ("positive_capacity", "positive_sharpness"), "with positive_weight=0"
        if self.negative_weight == 0:
            names = ("negative_capacity", "negative_sharpness", "entropy_low", "entropy_high", "mask_low", "mask_high")
            yield names, "with negative_weight=0"

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the caches and their copies."""
        slots = self.positive_capacity + self.negative_capacity
        return super().peak_bytes(n, k, d, itemsize) + itemsize * 2 * slots * k * d

    def start(self, task: Task) -> TDAState:
        """Make empty caches."""
        xp = namespace(task.text)
        (k, d), kind = task.text.shape, {"dtype": task.text.dtype, "device": device(task.text)}
        positive, negative = (k, self.positive_capacity), (k, self.negative_capacity)
        return TDAState(
            text=task.text,
            logit_scale=task.logit_scale,
            seen=0,
            positive_keys=xp.zeros((*positive, d), **kind),
            positive_entropy=xp.full(positive, xp.inf, **kind),
            negative_keys=xp.zeros((*negative, d), **kind),
            negative_entropy=xp.full(negative, xp.inf, **kind),
            negative_classes=xp.full((*negative, self.mask_width(k)), -1, dtype=xp.int64, device=device(task.text)),
        )

    def _step(self, state: TDAState, x: Array) -> tuple[TDAState, Result]:  # type: ignore[override]
        xp = namespace(x)
        n, k = x.shape[0], state.text.shape[0]
        logits = state.logit_scale * (x @ state.text.T)  # (n, K)
        log_p = log_softmax(logits)
        probs = xp.exp(log_p)
        entropy = -xp.sum(probs * log_p, axis=1)  # (n,)
        classes = self.masked_classes(probs)  # (n, W)
        labels, h = to_numpy(xp.argmax(logits, axis=1)), to_numpy(entropy)  # (n,), (n,)
        normalised = h / math.log2(max(k, 2))  # (n,) K = 1 has no entropy
        uncertain = (self.entropy_low < normalised) & (normalised < self.entropy_high)
        positive = choose_slots(state.positive_entropy, labels, h)  # (n,) slots
        negative = choose_slots(state.negative_entropy, labels, h, uncertain)  # (n,) slots

        after = replace(state, **{name: copy_array(getattr(state, name)) for name in CACHES})

        def enter(rows: slice) -> None:
            write(after.positive_keys, x[rows], labels[rows], positive[rows])
            write(after.positive_entropy, entropy[rows], labels[rows], positive[rows])
            write(after.negative_keys, x[rows], labels[rows], negative[rows])
            write(after.negative_entropy, entropy[rows], labels[rows], negative[rows])
            write(after.negative_classes, classes[rows], labels[rows], negative[rows])

        if self.access == "batch":
            enter(slice(n))
        size = 1 if self.access == "sample" else max(1, BLOCK_ENTRIES // (k * self.positive_capacity))
        for start in range(0, n, size):
            rows = slice(start, start + size)
            if self.access == "sample":
                enter(rows)
            logits[rows] += self.read(after, x[rows])
        return after, Result(softmax(logits), probs, logits if self.scores == "logits" else None)

    def mask_width(self, k: int) -> int:
        """Return how many classes can have a probability above `mask_low`."""
        return min(k, int(1 / self.mask_low))

    def masked_classes(self, probs: Array) -> Array:
        """List the classes with mask_low < p < mask_high of each row, (n, W), filled up with -1."""
        xp = namespace(probs)
        k = probs.shape[1]
        largest = xp.argsort(probs, axis=1, descending=True)[:, : self.mask_width(k)]  # (n, W)
        p = xp.take_along_axis(probs, largest, axis=1)  # (n, W)
        return xp.where((self.mask_low < p) & (p < self.mask_high), largest, -1)

    def read(self, cache: TDAState, x: Array) -> Array:
        """Return what the caches add to the logits, (n, K)."""
        xp = namespace(x)
        n, (k, c, d) = x.shape[0], cache.positive_keys.shape
        near = affinity(x, xp.reshape(cache.positive_keys, (k * c, d)), self.positive_sharpness)  # (n, K C)
        near *= xp.astype(xp.reshape(xp.isfinite(cache.positive_entropy), (-1,)), x.dtype)
        added = self.positive_weight * xp.sum(xp.reshape(near, (n, k, c)), axis=2)  # (n, K)
        held = xp.isfinite(cache.negative_entropy)
        keys, classes = cache.negative_keys[held], cache.negative_classes[held]  # (E, d), (E, W)
        size = max(1, BLOCK_ENTRIES // (k + 1))
        for start in range(0, keys.shape[0], size):
            block = slice(start, start + size)
            near = affinity(x, keys[block], self.negative_sharpness)  # (n, e)
            added -= self.negative_weight * (near @ masks(classes[block], k, x))
        return added


def affinity(x: Array, keys: Array, sharpness: float) -> Array:
    """exp(-beta (1 - f.k)), which is 1 if the key is the sample itself, (n, E).

    >>> import numpy as np
    >>> affinity(np.eye(2), np.eye(2)[:1], 1.0).round(3)
    array([[1.   ],
           [0.368]])
    """
    return namespace(x).exp(sharpness * (x @ keys.T - 1))


def masks(classes: Array, k: int, ref: Array) -> Array:
    """Turn lists of classes (E, W), padded with -1, into rows of zeros and ones (E, K).

    >>> import numpy as np
    >>> masks(np.asarray([[1, -1], [-1, -1]]), 3, np.zeros(1))
    array([[0., 1., 0.],
           [0., 0., 0.]])
    """
    xp = namespace(ref)
    out = xp.zeros((classes.shape[0], k + 1), dtype=ref.dtype, device=device(ref))  # the last column is for -1
    out[xp.arange(classes.shape[0], device=device(ref))[:, None], classes] = 1
    return out[:, :k]
