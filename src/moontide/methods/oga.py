"""OGA: online Gaussian adaptation, class Gaussians with a shared precision, estimated from a small memory per class.

C. Fuchs et al., CVPR Workshops 2025, after what their program (cfuchs2023/OGA) computes.

Symbols:  f -> x   yhat -> y   mu_k -> mu   Sigma^-1 = P -> precision   C -> capacity   tau -> tau
          stored features of a class -> keys[k]   H = -sum y ln(y + 1e-9) -> entropy

A sample enters the memory of its zero-shot class if its entropy is below that of a stored one; an empty slot counts as
ln K. Then mu_k is the mean of the stored features (t_k while there are fewer than 2), P the inverse covariance of all
stored features around their class mean (d I while no class has more than 2), and

    l_k = f'P mu_k - mu_k'P mu_k / 2,    z_k ∝ yhat_k softmax_k(tau l)_k

The term -f'P f / 2 of the Gaussian is the same for all classes and drops out. The MOON paper calls tau a threshold of
memory updates; it is the temper of the likelihood.

The published program divides the sum of the stored features by the capacity C instead of their number, which shortens
the means of classes that are not full, and it keeps memory, entropies and means in half precision. Its results depend
on both, so `faithful=True` repeats them; `faithful=False` is the equation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from moontide.core.arrays import Array, device, namespace, to_numpy
from moontide.core.simplex import entropy as entropy_of
from moontide.core.simplex import softmax
from moontide.methods._precision import ridge_precision
from moontide.methods._slots import NONE, choose_slots, write
from moontide.options import option
from moontide.protocols import OnlineMethod, State, copy_array, per_class
from moontide.types import Result, Task


@dataclass(frozen=True)
class OGAState(State):
    """The memory (in half precision if faithful), and the model estimated from it."""

    keys: Array = field(metadata=per_class(0))  # (K, C, d)
    entropy: Array = field(metadata=per_class(0))  # (K, C), infinite where a slot is empty
    mu: Array = field(metadata=per_class(0))  # (K, d)
    precision: Array  # (d, d)


@dataclass(frozen=True)
class OGA(OnlineMethod):
    """Zero-shot predictions times the likelihood under Gaussians of confident samples.

    The default is the published program, whose class means are divided by the capacity (`faithful=True`).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> OGA().fit_predict(rng.normal(size=(8, 16)), rng.normal(size=(3, 16))).probs.shape
    (8, 3)
    """

    citation: ClassVar[str] = "Fuchs et al., CVPRW 2025"
    state_type: ClassVar[type[State]] = OGAState
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"tables": {}, "original": {"tau": 0.05}}

    access: str = option("batch", "all samples of a step enter the memory before any is predicted, or one at a time",
                         choices=("batch", "sample"))  # fmt: skip
    tau: float = option(0.01, "temper of the likelihood", above=0)
    capacity: int = option(8, "C, slots per class", low=2)
    faithful: bool = option(True, "means divided by C instead of the filled slots, memory and means in half precision")

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the memory, its copy and the residuals, and the d x d precision."""
        return super().peak_bytes(n, k, d, itemsize) + itemsize * (4 * self.capacity * k * d + 4 * d * d)

    def start(self, task: Task) -> OGAState:
        """Make an empty memory; the means are the text."""
        xp = namespace(task.text)
        kind = {"dtype": xp.float16 if self.faithful else task.text.dtype, "device": device(task.text)}
        return OGAState(
            text=task.text,
            logit_scale=task.logit_scale,
            seen=0,
            keys=xp.zeros((task.k, self.capacity, task.d), **kind),
            entropy=xp.full((task.k, self.capacity), xp.inf, **kind),
            mu=task.text,
            precision=task.d * xp.eye(task.d, dtype=task.text.dtype, device=device(task.text)),
        )

    def _step(self, state: OGAState, x: Array) -> tuple[OGAState, Result]:  # type: ignore[override]
        xp = namespace(x)
        n, k = x.shape[0], state.text.shape[0]
        logits = state.logit_scale * (x @ state.text.T)  # (n, K)
        y = softmax(logits)
        entropy = entropy_of(y, 1e-9)  # (n,)
        labels, h = to_numpy(xp.argmax(logits, axis=1)), to_numpy(entropy)  # (n,), (n,)
        slots = choose_slots(state.entropy, labels, h, h < to_numpy(state.entropy).dtype.type(math.log(k)))  # (n,)

        after = replace(state, keys=copy_array(state.keys), entropy=copy_array(state.entropy))
        size = n if self.access == "batch" else 1
        for start in range(0, n, size):
            rows = slice(start, start + size)
            if (slots[rows] != NONE).any():
                write(after.keys, x[rows], labels[rows], slots[rows])
                write(after.entropy, entropy[rows], labels[rows], slots[rows])
                mu, precision = self.estimate(after)
                after = replace(after, mu=mu, precision=precision)
            logits[rows] += self.tau * log_likelihood(x[rows], after.mu, after.precision)
        return after, Result(softmax(logits), y)

    def estimate(self, memory: OGAState) -> tuple[Array, Array]:
        """Estimate the means (K, d) and the precision (d, d) from the memory."""
        xp = namespace(memory.keys)
        text = memory.text
        filled = xp.isfinite(memory.entropy)  # (K, C)
        counts = xp.sum(xp.astype(filled, text.dtype), axis=1)  # (K,)
        keys = xp.astype(memory.keys, text.dtype)  # (K, C, d)
        divisor = self.capacity if self.faithful else xp.clip(counts, min=1)[:, None]
        mean = xp.sum(keys, axis=1) / divisor  # (K, d)
        if self.faithful:
            mean = xp.astype(xp.astype(mean, xp.float16), text.dtype)
        mu = xp.where(counts[:, None] >= 2, mean, text)  # (K, d)
        if float(xp.max(counts)) <= 2:
            return mu, memory.precision
        return mu, precision_of((keys - mu[:, None, :])[filled])


def precision_of(residuals: Array) -> Array:
    """P = d pinv((n - 1) M + tr(M) I) for n <= 4 d residual rows of covariance M, otherwise pinv(M); (n, d) -> (d, d).

    >>> import numpy as np
    >>> precision_of(np.asarray([[1.0], [-1.0]] * 3)).round(6)
    array([[0.833333]])
    """
    xp = namespace(residuals)
    n, d = residuals.shape
    if n <= 4 * d:
        return ridge_precision(residuals)
    residuals = residuals - xp.mean(residuals, axis=0)
    values, vectors = xp.linalg.eigh(residuals.T @ residuals / (n - 1))  # (d,), (d, d)
    kept = values > d * float(xp.finfo(values.dtype).eps) * xp.max(values)
    inverse = xp.where(kept, 1 / xp.where(kept, values, 1), 0)  # (d,)
    return (vectors * inverse) @ vectors.T


def log_likelihood(x: Array, mu: Array, precision: Array) -> Array:
    """l_k = f'P mu_k - mu_k'P mu_k / 2, (n, K).

    >>> import numpy as np
    >>> log_likelihood(np.eye(2)[:1], np.eye(2), 2 * np.eye(2))
    array([[ 1., -1.]])
    """
    w = mu @ precision  # (K, d), P is symmetric
    return x @ w.T - namespace(x).sum(w * mu, axis=1) / 2
