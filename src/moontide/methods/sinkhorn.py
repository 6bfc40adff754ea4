"""Sinkhorn balancing: zero-shot probabilities scaled until every class has its share of the batch.

The first stage of InMaP, NeurIPS 2023, after what its program (idstcv/InMaP) computes.

Symbols:  S_ik -> cosine   P_ik, times N -> exp(log_y)   q_k -> exp(log_q)   gamma -> gamma   1 / tau_t -> logit_scale

    P = softmax_k(S / tau_t) / N,   q_k ∝ (sum_i P_ik)^gamma of that first P
    repeat:  P_ik <- q_k P_ik / sum_i P_ik,  then  P_ik <- P_ik / (N sum_k P_ik)

The row step is the last, so rows sum to 1 and the shares of the classes are met approximately. gamma = 0 asks for equal
shares, which ruins batches where most classes are absent: each of them is given N / K samples. gamma = 1 asks for the
current shares, so that nothing changes. Inputs are rounded to float32, as in the published program, and everything is
computed in float64 and in the log domain, so that a class whose probabilities underflow (0 / 0 in that program) needs
no special treatment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moontide.core.arrays import Array, namespace
from moontide.core.simplex import log_softmax, zero_shot
from moontide.methods._precision import single_in_double
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task


@dataclass(frozen=True)
class Sinkhorn(Method):
    """Zero-shot probabilities of a batch, balanced over the classes.

    >>> import numpy as np
    >>> features = np.asarray([[1.0, 0.1], [0.8, 0.6], [0.75, 0.66], [0.1, 1.0]])
    >>> Sinkhorn().fit_predict(features, np.eye(2), logit_scale=10).labels
    array([0, 0, 1, 1])
    """

    citation: ClassVar[str] = "InMaP, NeurIPS 2023"

    gamma: float = option(0.0, "the target shares are the zero-shot shares to this power; 0: equal shares", low=0)
    iterations: int = option(20, "rounds of scaling the columns and then the rows", low=1)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the float64 features and the arrays of the scaling."""
        return super().peak_bytes(n, k, d, itemsize) + 8 * (4 * n * k + n * d)

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        log_y = in_double(task)[2]  # (N, K)
        probs = xp.exp(balanced(log_y, targets(log_y, self.gamma), self.iterations))  # (N, K)
        plain = zero_shot(task.features, task.text, task.logit_scale)  # (N, K)
        return Result(xp.astype(probs, plain.dtype), plain, n_iter=self.iterations)


def in_double(task: Task) -> tuple[Array, Array, Array]:
    """Return features (N, d) and text (K, d) in float64 after rounding to float32, and ln softmax_k(S / tau_t), (N, K).

    >>> import numpy as np
    >>> in_double(Task(np.eye(2), np.eye(2), 1.0))[2].round(3)
    array([[-0.313, -1.313],
           [-1.313, -0.313]])
    """
    f, text = single_in_double(task.features), single_in_double(task.text)
    return f, text, log_softmax(float(np.float32(task.logit_scale)) * (f @ text.T))


def balanced(log_y: Array, log_q: Array, iterations: int) -> Array:
    """Return ln(N P), (N, K), after some rounds that start from `log_y` and aim at the class shares ln q, (K,).

    >>> import numpy as np
    >>> np.exp(balanced(np.log([[0.9, 0.1], [0.6, 0.4]]), np.log([0.5, 0.5]), 20)).round(3)
    array([[0.71, 0.29],
           [0.29, 0.71]])
    """
    for _ in range(iterations):
        log_y = log_softmax(log_y + (log_q - log_column_sums(log_y)))
    return log_y


def targets(log_y: Array, gamma: float) -> Array:
    """ln q_k,  q_k ∝ (sum_i y_ik)^gamma, (K,).

    >>> import numpy as np
    >>> np.exp(targets(np.log([[0.8, 0.2]]), 0.5)).round(3)
    array([0.667, 0.333])
    """
    return log_softmax(gamma * log_column_sums(log_y))


def log_column_sums(log_y: Array) -> Array:
    """ln sum_i y_ik, (K,), without underflow.

    >>> import numpy as np
    >>> log_column_sums(np.asarray([[-1000.0], [-1000.0]])).round(3)
    array([-999.307])
    """
    xp = namespace(log_y)
    top = xp.max(log_y, axis=0)  # (K,)
    return top + xp.log(xp.sum(xp.exp(log_y - top), axis=0))
