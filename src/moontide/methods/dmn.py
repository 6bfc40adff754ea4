"""DMN: dual memory networks, in their training-free zero-shot form: a static memory (the text) and a dynamic one.

DMN, CVPR 2024, after what its program (YBZh/DMN) computes.

Symbols:  f -> x   1 / tau -> logit_scale   p_text -> probs   H = -sum p ln(p + 1e-8) -> entropy
          slots m_j of class k -> keys[k]   M -> capacity   beta of the read-out -> sharpness   c_k -> `read`

    w_j = exp(-beta (1 - f.m_j)) over the M slots of a class and its text,  c_k = normalise(sum_j w_j m_j)
    p_dyn = softmax_k(f.c_k / tau)

The defaults are what the MOON paper's tables ran: 10 slots, the whole batch is stored and then all of it is read, and
the scores are f.t_k / tau + 10 p_dyn. The preset "original" stores and reads one sample at a time, with 50 slots, and
its scores are p_text + p_dyn; the published weight of p_dyn was searched on test labels, which is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from moontide.core.arrays import Array, device, namespace, to_numpy
from moontide.core.simplex import entropy as entropy_of
from moontide.core.simplex import softmax
from moontide.methods._slots import NONE, HostArray, choose_slots, write
from moontide.options import option
from moontide.protocols import OnlineMethod, State, copy_array, per_class
from moontide.types import Result, Task

BLOCK_ENTRIES = 2**22  # weights held at once
BLOCK_ROWS = 256  # samples read together with access="sample"


@dataclass(frozen=True)
class DMNState(State):
    """The dynamic memory; an empty slot is a zero key of infinite entropy."""

    keys: Array = field(metadata=per_class(0))  # (K, M, d)
    entropy: Array = field(metadata=per_class(0))  # (K, M)


@dataclass(frozen=True)
class DMN(OnlineMethod):
    """Text logits combined with those of class prototypes, read from the memory with weights of the sample's own.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> DMN().fit_predict(rng.normal(size=(8, 16)), rng.normal(size=(3, 16))).probs.shape
    (8, 3)
    """

    citation: ClassVar[str] = "DMN, CVPR 2024"
    state_type: ClassVar[type[State]] = DMNState
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tables": {},
        "original": {"access": "sample", "capacity": 50, "fusion": "probabilities", "dynamic_weight": 1.0},
    }

    access: str = option("batch", "all samples of a step are stored before any is read, or one at a time",
                         choices=("batch", "sample"))  # fmt: skip
    fusion: str = option("logits", "p_dyn is added to the text logits or to the text probabilities",
                         choices=("logits", "probabilities"))  # fmt: skip
    capacity: int = option(10, "M, slots per class", low=1)
    sharpness: float = option(5.5, "beta, how fast the weight of a slot falls with distance", low=0)
    dynamic_weight: float = option(10.0, "weight of p_dyn in the scores", above=0)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the memory and its copy."""
        return super().peak_bytes(n, k, d, itemsize) + itemsize * 2 * self.capacity * k * d

    def start(self, task: Task) -> DMNState:
        """Make an empty memory."""
        xp = namespace(task.text)
        (k, d), kind = task.text.shape, {"dtype": task.text.dtype, "device": device(task.text)}
        keys, entropy = xp.zeros((k, self.capacity, d), **kind), xp.full((k, self.capacity), xp.inf, **kind)
        return DMNState(task.text, task.logit_scale, 0, keys, entropy)

    def _step(self, state: DMNState, x: Array) -> tuple[DMNState, Result]:  # type: ignore[override]
        xp = namespace(x)
        logits = state.logit_scale * (x @ state.text.T)  # (n, K)
        probs = softmax(logits)
        entropy = entropy_of(probs, 1e-8)  # (n,)
        labels = to_numpy(xp.argmax(logits, axis=1))  # (n,)
        slots = choose_slots(state.entropy, labels, to_numpy(entropy))  # (n,)

        after = replace(state, keys=copy_array(state.keys), entropy=copy_array(state.entropy))
        write(after.entropy, entropy, labels, slots)
        used = int(xp.max(xp.sum(xp.astype(xp.isfinite(after.entropy), xp.int64), axis=1)))  # slots fill from the first
        keys = after.keys[:, :used]  # (K, m, d) a view: all other slots are empty
        if self.access == "batch":
            write(keys, x, labels, slots)
            cosine = self.read(x, keys, after.text)  # (n, K)
        else:
            cosine = self.store_and_read(x, keys, after.text, labels, slots)
        dynamic = softmax(state.logit_scale * cosine)  # (n, K)
        scores = (logits if self.fusion == "logits" else probs) + self.dynamic_weight * dynamic  # (n, K)
        fused = softmax(scores) if self.fusion == "logits" else scores / (1 + self.dynamic_weight)
        return after, Result(fused, probs, scores)

    def read(self, x: Array, keys: Array, text: Array) -> Array:
        """Return f.c_k for every sample and class, in blocks of classes, (n, K)."""
        size = max(1, BLOCK_ENTRIES // (x.shape[0] * keys.shape[1]))
        starts = range(0, keys.shape[0], size)
        blocks = [prototype_cosine(x, keys[s : s + size], text[s : s + size], self.sharpness) for s in starts]
        return namespace(x).concat(blocks, axis=1)

    def store_and_read(self, x: Array, keys: Array, text: Array, labels: HostArray, slots: HostArray) -> Array:
        """Store the samples in `keys` one by one and read each after it was stored, (n, K).

        Storing a sample changes one class, for this sample and later ones. So a block of samples reads all classes
        once, and after each store that one class again.
        """
        blocks = []
        for start in range(0, x.shape[0], BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            rows = x[block]  # (b, d)
            cosine = self.read(rows, keys, text)  # (b, K)
            for i, (k, slot) in enumerate(zip(labels[block], slots[block], strict=True)):
                if slot != NONE:
                    keys[k, slot] = rows[i]
                    cosine[i:, k] = self.read(rows[i:], keys[k : k + 1], text[k : k + 1])[:, 0]
            blocks.append(cosine)
        return namespace(x).concat(blocks)


def prototype_cosine(x: Array, keys: Array, text: Array, sharpness: float) -> Array:
    """f.c_k, c_k = normalise(sum_j w_j m_j), w_j = exp(-beta (1 - f.m_j)), for some classes, (n, k).

    The length of c_k comes from the products m_j.m_l, |sum_j w_j m_j|^2 = w' (m m') w, so that no array (n, k, d) is
    needed. Empty slots are zero vectors and add nothing.

    >>> import numpy as np
    >>> x, text = np.asarray([[1.0, 0.0]]), np.asarray([[0.6, 0.8]])
    >>> prototype_cosine(x, np.zeros((1, 2, 2)), text, 5.5).round(6)
    array([[0.6]])
    """
    xp = namespace(x)
    k, m, d = keys.shape
    to_text, to_keys = text @ x.T, xp.reshape(xp.reshape(keys, (k * m, d)) @ x.T, (k, m, x.shape[0]))  # (k,n), (k,m,n)
    w_text, w = xp.exp(sharpness * (to_text - 1)), xp.exp(sharpness * (to_keys - 1))  # (k, n), (k, m, n)
    dot = w_text * to_text + xp.sum(w * to_keys, axis=1)  # (k, n)
    mixed = xp.matmul(xp.matmul(keys, text[:, :, None])[:, None, :, 0], w)[:, 0]  # (k, n) sum_j w_j m_j.t
    square = w_text**2 + 2 * w_text * mixed + xp.sum(w * xp.matmul(keys @ xp.matrix_transpose(keys), w), axis=1)
    return (dot / xp.sqrt(xp.clip(square, min=float(xp.finfo(x.dtype).eps) ** 2))).T
