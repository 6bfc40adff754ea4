"""GDA-CLIP: Gaussian discriminant analysis with one shared covariance, added to the zero-shot logits.

Z. Wang et al., "A Hard-to-Beat Baseline for Training-free CLIP-based Adaptation", ICLR 2024.

Symbols:  f_i -> features[i]   t_k -> text[k]   yhat_ik -> y[i, k]   mu_k -> mu[k]   Sigma^-1 -> precision
          w_k, b_k -> w[k], b[k]   alpha -> alpha

The method was published for labelled shots. This is the unsupervised form that the MOON paper compares with: one
closed-form pass in which zero-shot probabilities stand for labels, and the covariance is that of all features of the
batch, not the one within classes. Of a single sample nothing can be learnt, and its zero-shot prediction is returned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from moontide.core.arrays import Array, namespace
from moontide.core.precision import ridge_inverse
from moontide.core.simplex import softmax
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

    citation: ClassVar[str] = "Wang et al., ICLR 2024"

    alpha: float = option(5.0, "weight of the Gaussian logits beside the zero-shot logits", low=0)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Add the d x d covariance, its factor and its inverse to the usual estimate."""
        return super().peak_bytes(n, k, d, itemsize) + itemsize * 4 * d * d

    def _fit(self, task: Task) -> Result:
        f = task.features
        logits = task.logit_scale * (f @ task.text.T)  # (N, K)
        y = softmax(logits)  # (N, K)
        mu = class_means(f, y)  # (K, d)
        w, b = discriminant(mu, shared_precision(f))  # (K, d), (K,)
        return Result(softmax(logits + self.alpha * (f @ w.T + b)), y, details={"mu": mu})


def class_means(f: Array, y: Array) -> Array:
    """mu_k = sum_i y_ik f_i / max(sum_i y_ik, 1e-6), (K, d).

    >>> import numpy as np
    >>> class_means(np.eye(2), np.ones((2, 1)))
    array([[0.5, 0.5]])
    """
    xp = namespace(f)
    return (y.T @ f) / xp.clip(xp.sum(y, axis=0), min=EPS)[:, None]


def shared_precision(f: Array) -> Array:
    """P = pinv(C + tr(C) / d I) for the covariance C of all features, (d, d); 0 where they are all equal.

    >>> import numpy as np
    >>> shared_precision(np.asarray([[0.5, 0.0], [-0.5, 0.0]]))
    array([[1.33333333, 0.        ],
           [0.        , 4.        ]])
    """
    n, d = f.shape
    return (n - 1) * ridge_inverse(f, 1 / d)  # C = S / (n - 1)


def discriminant(mu: Array, precision: Array) -> tuple[Array, Array]:
    """w_k = P mu_k, (K, d), and b_k = ln(1/K) - mu_k' P mu_k / 2, (K,), of a Gaussian classifier with equal priors.

    >>> import numpy as np
    >>> discriminant(np.asarray([[2.0]]), np.asarray([[3.0]]))
    (array([[6.]]), array([-6.]))
    """
    w = mu @ precision  # (K, d), P is symmetric
    return w, -math.log(mu.shape[0]) - namespace(mu).sum(w * mu, axis=1) / 2
