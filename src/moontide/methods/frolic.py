"""Frolic: Gaussian prompt distributions, proxies fitted to them, and a correction of the class bias without labels.

Frolic, NeurIPS 2024, after what its program (zhuhsingyuu/Frolic) computes. Its helper functions are not released; they
are assumed to be InMaP's.

Symbols:  f_i -> f[i]   t_k -> text[k]   v_j, P_j -> variance, precision   g -> gaussian   L -> logits   A -> looks
          x -> prior   lambda -> shrinkage

    A. g_ik = sum_j P_j (f_ij t_kj - t_kj^2 / 2 - f_ij^2 / 2),  P_j = 1 / (0.1 v_j + 0.9), v_j the variance of column j
       of images and texts together
    B. Eleven times, on logits L: of the rows whose two largest logits differ by more than 1 / K, A_.k = mean of
       softmax(L) over those with label k (0 if none); x = A x by power iteration from 1 / K; L <- L - ln(x + 1e-12)
    C. L = 100 (F W_a + F W_b), W_a and W_b InMaP's proxies fitted to softmax(g / tau) and to softmax(cos / tau), then B

`part` is "stack" (C, what the program prints last), "gaussian" (A alone) or "debias" (B on the zero-shot logits).

Known defects of the program, which are kept: a class without any row gains up to 27 logits in each round of B, which
ruins batches with few classes (`prior_floor` bounds it); P_j is nearly the same for all j, so A is nearly zero-shot;
balancing the pseudo-labels in C (Sinkhorn with gamma = 1) has no effect and is left out; and the paper's combination of
A with zero-shot by matching confidences is never called. If no row is left, B stops here, where the program computes
0 / 0. The prompts are the class texts; the program has several sentences per class.

C inherits InMaP's sensitivity to rounding: inputs are rounded to float32, and everything is computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from moontide.core.arrays import Array, class_counts, device, namespace, unit_rows
from moontide.core.simplex import one_hot, softmax, zero_shot
from moontide.methods._precision import single_in_double
from moontide.methods.inmap import hardened, proxies
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

ROUNDS_OF_POWER = 100
TOLERANCE = 1e-3  # L1 change of x at which power iteration stops


@dataclass(frozen=True)
class Frolic(Method):
    """Proxies fitted to Gaussian and to zero-shot pseudo-labels, with the estimated class prior divided out.

    >>> import numpy as np
    >>> Frolic().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "Frolic, NeurIPS 2024"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gaussian": {"part": "gaussian"},
        "debias": {"part": "debias"},
    }

    part: str = option("stack", "the whole method, only the Gaussian logits, or only the bias correction of zero-shot",
                       choices=("stack", "gaussian", "debias"))  # fmt: skip
    shrinkage: float = option(0.9, "lambda, weight of the identity in the covariance", above=0, high=1)
    rounds: int = option(11, "rounds of bias correction", low=0)
    prior_floor: float = option(1e-12, "added to the prior: a class without samples gains up to -ln of it per round",
                                low=1e-30, high=1)  # fmt: skip
    threshold: float = option(0.6, "probability above which a pseudo-label becomes one-hot", low=0)
    tau: float = option(0.04, "temperature of the similarities to the proxies", above=0)
    step_size: float = option(10.0, "length of the first gradient steps of the proxies", above=0)
    iterations: int = option(2000, "gradient steps of the proxies", low=1, high=10_000)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Name the options of the parts that are left out."""
        if self.part != "stack":
            yield ("threshold", "tau", "step_size", "iterations"), f"with part={self.part!r}"
        if self.part == "debias":
            yield ("shrinkage",), "with part='debias'"
        if self.part == "gaussian":
            yield ("rounds", "prior_floor"), "with part='gaussian'"
        if self.rounds == 0:
            yield ("prior_floor",), "with rounds=0"

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the float64 features, logits, proxies and A."""
        return super().peak_bytes(n, k, d, itemsize) + 8 * (6 * n * k + 2 * n * d + 6 * k * d + 2 * k * k)

    def _fit(self, task: Task) -> Result:
        xp, dtype, scale = namespace(task.features), task.features.dtype, float(np.float32(task.logit_scale))
        f, text = single_in_double(task.features), single_in_double(task.text)  # (N, d), (K, d)
        prompts = unit_rows(text)  # (K, d) t~_k, the unit mean of the prompts of a class
        cosine = f @ prompts.T  # (N, K)
        if self.part == "gaussian":
            scores = gaussian_logits(f, prompts, self.shrinkage)  # (N, K) of the size of cosines
            probs = softmax(scale * scores)
        else:
            logits = scale * (self.stacked(f, text, prompts, scale) if self.part == "stack" else cosine)
            scores = debiased(logits, self.rounds, self.prior_floor)  # (N, K)
            probs = softmax(scores)
        plain = zero_shot(task.features, task.text, task.logit_scale)
        return Result(xp.astype(probs, dtype), plain, xp.astype(scores, dtype))

    def stacked(self, f: Array, text: Array, prompts: Array, scale: float) -> Array:
        """Return the sum of the cosines to both sets of proxies, (N, K)."""
        total = 0
        for similarity in (gaussian_logits(f, prompts, self.shrinkage), f @ prompts.T):
            y = hardened(softmax(scale * similarity), self.threshold)  # (N, K)
            total = total + f @ proxies(f, y, text, self.tau, self.step_size, self.iterations).T
        return total


def gaussian_logits(f: Array, text: Array, shrinkage: float) -> Array:
    """g_ik = sum_j P_j (f_ij t_kj - t_kj^2 / 2 - f_ij^2 / 2),  P_j = 1 / ((1 - lambda) v_j + lambda), (N, K).

    >>> import numpy as np
    >>> gaussian_logits(np.eye(2), np.eye(2), 1.0)
    array([[ 0., -1.],
           [-1.,  0.]])
    """
    xp = namespace(f)
    variance = xp.var(xp.concat([f, text]), axis=0, correction=1)  # (d,)
    precision = 1 / ((1 - shrinkage) * variance + shrinkage)  # (d,)
    return (f * precision) @ text.T - (text**2 @ precision)[None, :] / 2 - (f**2 @ precision)[:, None] / 2


def debiased(logits: Array, rounds: int, floor: float) -> Array:
    """L <- L - ln(x + floor) in each round, where x is the class prior implied by the rows with a clear label, (N, K).

    >>> import numpy as np
    >>> debiased(np.log([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8]]), 1, 1e-12).round(3)  # x = 1 / K: a constant
    array([[ 0.47 , -0.916],
           [ 0.47 , -0.916],
           [-0.916,  0.47 ]])
    """
    xp = namespace(logits)
    for _ in range(rounds if logits.shape[1] > 1 else 0):
        kept = logits[margins(logits) > 1 / logits.shape[1]]  # (M, K)
        if kept.shape[0] == 0:
            break
        logits = logits - xp.log(stationary(confusions(kept)) + floor)
    return logits


def margins(logits: Array) -> Array:
    """Return the difference of the two largest logits of each row, (N,).

    >>> import numpy as np
    >>> margins(np.asarray([[1.0, 4.0, 3.0]]))
    array([1.])
    """
    top = namespace(logits).sort(logits, axis=1)[:, -2:]  # (N, 2)
    return top[:, 1] - top[:, 0]


def confusions(logits: Array) -> Array:
    """A_jk = mean of softmax_j(L_i) over the rows i of label k, 0 if there is none, (K, K).

    >>> import numpy as np
    >>> confusions(np.log([[0.8, 0.2], [0.6, 0.4]]))
    array([[0.7, 0. ],
           [0.3, 0. ]])
    """
    xp = namespace(logits)
    labels, k = xp.argmax(logits, axis=1), logits.shape[1]
    counts = xp.astype(class_counts(labels, k), logits.dtype)  # (K,)
    return (softmax(logits).T @ one_hot(labels, k, logits)) / xp.clip(counts, min=1)


def stationary(a: Array) -> Array:
    """Solve x = A x, sum_k x_k = 1, by power iteration from 1 / K; x before the first step below the tolerance, (K,).

    >>> import numpy as np
    >>> stationary(np.asarray([[0.9, 0.3], [0.1, 0.7]])).round(2)
    array([0.75, 0.25])
    """
    xp, k = namespace(a), a.shape[0]
    x = xp.full((k,), 1 / k, dtype=a.dtype, device=device(a))  # (K,)
    for _ in range(ROUNDS_OF_POWER):
        new = a @ x
        new = xp.clip(new / xp.sum(xp.abs(new)), min=0)
        if float(xp.sum(xp.abs(new - x))) < TOLERANCE:
            break
        x = new
    return x
