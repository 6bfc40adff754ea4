"""GDA-CLIP: Gaussian discriminant analysis with one shared covariance, added to the zero-shot logits.

GDA-CLIP, ICLR 2024, after what its program (mrflogs/ICLR24) computes.

Symbols:  f_i -> features[i]   t_k -> text[k]   yhat_ik -> y[i, k]   mu_k -> mu[k]   Sigma^-1 -> P
          w_k, b_k -> w[k], b[k]   alpha -> alpha

The method was published for labelled shots. This is the unsupervised form that the MOON paper compares with: one
closed-form pass in which zero-shot probabilities replace labels, with the covariance of all features of the batch
instead of the one within classes. A single sample keeps its zero-shot prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from moontide.core.arrays import Array, namespace
from moontide.core.simplex import softmax
from moontide.methods._precision import times_ridge_inverse
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

EPS = 1e-6  # least soft count that a class mean is divided by


@dataclass(frozen=True)
class GDACLIP(Method):
    """One pass of Gaussian discriminant analysis, its class means weighted by the zero-shot prediction.

    >>> import numpy as np
    >>> GDACLIP().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "GDA-CLIP, ICLR 2024"

    alpha: float = option(5.0, "weight of the Gaussian logits relative to the zero-shot logits", low=0)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus float64 features, logits, and the d x d covariance and its inverse."""
        return super().peak_bytes(n, k, d, itemsize) + 8 * (2 * n * d + 4 * n * k + 4 * d * d)

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        cosine = task.features @ task.text.T  # (N, K)
        y = softmax(task.logit_scale * cosine)  # (N, K)
        f, wide = (xp.astype(x, xp.float64) for x in (task.features, y))  # the Gaussian logits are large and cancel
        mu = class_means(f, wide)  # (K, d)
        w = times_shared_precision(mu, f)  # (K, d)
        logits = task.logit_scale * cosine + self.alpha * (f @ w.T + biases(mu, w))  # (N, K)
        return Result(xp.astype(softmax(logits), y.dtype), y, details={"mu": xp.astype(mu, y.dtype)})


def class_means(f: Array, y: Array) -> Array:
    """mu_k = sum_i y_ik f_i / max(sum_i y_ik, 1e-6), (K, d).

    >>> import numpy as np
    >>> class_means(np.eye(2), np.ones((2, 1)))
    array([[0.5, 0.5]])
    """
    xp = namespace(f)
    return (y.T @ f) / xp.clip(xp.sum(y, axis=0), min=EPS)[:, None]


def times_shared_precision(mu: Array, f: Array) -> Array:
    """w_k = P mu_k, P = pinv(C + tr(C) / d I) for the covariance C of all features, (K, d); 0 if all rows are equal.

    >>> import numpy as np
    >>> times_shared_precision(np.ones((1, 2)), np.asarray([[0.5, 0.0], [-0.5, 0.0]]))
    array([[1.33333333, 4.        ]])
    """
    n, d = f.shape
    return (n - 1) * times_ridge_inverse(mu, f, 1 / d)  # C = S / (n - 1)


def biases(mu: Array, w: Array) -> Array:
    """b_k = ln(1/K) - mu_k' P mu_k / 2, (K,), of a Gaussian classifier with equal priors and w_k = P mu_k.

    >>> import numpy as np
    >>> biases(np.asarray([[2.0]]), np.asarray([[6.0]]))
    array([-6.])
    """
    return -math.log(mu.shape[0]) - namespace(mu).sum(w * mu, axis=1) / 2
