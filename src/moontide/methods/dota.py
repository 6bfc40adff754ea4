"""DOTA: class Gaussians with one precision, learnt along a stream from zero-shot probabilities.

DOTA, NeurIPS 2025, after what its program (skylineeeeen/DOTA) computes.

Symbols:  x -> x   l -> logits   y -> y   mu_k -> mu   c_k Sigma_k -> scatter   Lambda -> precision   c_k -> counts
          eps -> ridge   sigma -> variance   eta -> weight_cap   rho -> weight

    l = x.t / tau,  y = softmax(l),  g_k = x'Lambda mu_k - mu_k'Lambda mu_k / 2,  answer l + min(rho mean_k c_k, eta) g
    Sigma_k <- (c_k Sigma_k + y_k (x - mu_k)(x - mu_k)') / (c_k + y_k),  mu_k <- (c_k mu_k + y_k x) / (c_k + y_k)
    c_k <- c_k + y_k,   Lambda <- ((1 - eps) mean_k Sigma_k + eps I)^-1

A sample is predicted, then learnt from with its zero-shot y. At the start c_k = 1, Sigma_k = sigma I and Lambda = I /
sigma. The mean over classes is unweighted, so absent classes contribute sigma I. The published program starts with
every mu_k at a vector of 0.001s, although its comment says text features; `means="text"` starts with those.

The defaults are those of the published program for DTD and Pets; for other data sets it has weight_cap 0.1 to 3 and
weight 0.0025 to 0.05. Its half precision, which changes scores by up to 0.05, is not repeated. A state holds K matrices
d x d. A class whose y_k is lost in float32 when added to c_k >= 1 is not updated, which saves most of the work if there
are many classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from moontide.core.arrays import Array, device, is_torch_array, like, namespace, to_numpy
from moontide.core.simplex import softmax
from moontide.methods._precision import spd_inverse
from moontide.methods._slots import HostArray
from moontide.methods.oga import log_likelihood
from moontide.options import option
from moontide.protocols import OnlineMethod, State, per_class
from moontide.types import Result, Task

NEGLIGIBLE = 6e-8  # half of float32's eps: c_k + y_k = c_k
START = 0.001  # every entry of a mean before the first sample, as published


@dataclass(frozen=True)
class DOTAState(State):
    """The class Gaussians and the precision that they share."""

    mu: Array = field(metadata=per_class(0))  # (K, d)
    scatter: Array = field(metadata=per_class(0))  # (K, d, d)
    counts: Array = field(metadata=per_class(0))  # (K,)
    precision: Array  # (d, d)


@dataclass(frozen=True)
class DOTA(OnlineMethod):
    """Zero-shot logits combined with those of class Gaussians learned from zero-shot probabilities.

    >>> import numpy as np
    >>> DOTA().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "DOTA, NeurIPS 2025"
    state_type: ClassVar[type[State]] = DOTAState

    ridge: float = option(1e-4, "eps, weight of the identity in the shared covariance", above=0, high=1)
    variance: float = option(0.002, "sigma, variance of each class before its first sample", above=0)
    weight: float = option(0.02, "rho, weight of the Gaussians per sample that a class has seen on average", low=0)
    weight_cap: float = option(0.3, "eta, largest weight of the Gaussians", low=0)
    means: str = option("constant", "initial class means: the vector of 0.001s, as published, or the text",
                        choices=("constant", "text"))  # fmt: skip

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the covariances and their copy."""
        return super().peak_bytes(n, k, d, itemsize) + itemsize * (2 * k + 8) * d * d

    def start(self, task: Task) -> DOTAState:
        """Make Gaussians of one variance and a count of 1."""
        xp, text = namespace(task.text), task.text
        kind = {"dtype": text.dtype, "device": device(text)}
        eye = xp.eye(task.d, **kind)  # (d, d)
        return DOTAState(
            text=text,
            logit_scale=task.logit_scale,
            seen=0,
            mu=xp.full(text.shape, START, **kind) if self.means == "constant" else xp.asarray(text, copy=True),
            scatter=xp.tile(self.variance * eye, (task.k, 1, 1)),
            counts=xp.ones((task.k,), **kind),
            precision=eye / self.variance,
        )

    def _step(self, state: DOTAState, x: Array) -> tuple[DOTAState, Result]:  # type: ignore[override]
        xp = namespace(x)
        k, d = state.text.shape
        logits = state.logit_scale * (x @ state.text.T)  # (n, K)
        y = softmax(logits)  # (n, K)
        shares = to_numpy(y).astype(np.float64)  # (n, K) on the host, like the counts: both decide what is updated
        counts = to_numpy(state.counts).astype(np.float64)  # (K,)
        after, precision = state.fork(), state.precision  # the copy is what this step writes to
        total = xp.tensordot(1 / after.counts, after.scatter, axes=1)  # (d, d) sum_k Sigma_k, kept up to date
        ridge = self.ridge * xp.eye(d, dtype=x.dtype, device=device(x))  # (d, d)
        for i in range(x.shape[0]):
            weight = min(self.weight * float(counts.mean()), self.weight_cap)
            logits[i] += weight * log_likelihood(x[i : i + 1, :], after.mu, precision)[0]
            learn(after.mu, after.scatter, counts, total, x[i], shares[i])
            precision = spd_inverse((1 - self.ridge) / k * total + ridge)
        after.precision[:], after.counts[:] = precision, like(counts, x)
        return after, Result(softmax(logits), y, logits)


def learn(mu: Array, scatter: Array, counts: HostArray, total: Array, x: Array, y: HostArray) -> None:
    """Update mu_k, c_k Sigma_k, c_k and sum_k Sigma_k, all in place, by a sample x, (d,), with probabilities y, (K,).

    >>> mu, scatter, counts, total = np.eye(2), np.stack([np.eye(2), np.eye(2)]), np.ones(2), 2 * np.eye(2)
    >>> learn(mu, scatter, counts, total, np.asarray([1.0, 1.0]), np.asarray([1.0, 0.0]))
    >>> mu[0], counts, total
    (array([1. , 0.5]), array([2., 1.]), array([[1.5, 0. ],
           [0. , 2. ]]))
    """
    classes = np.flatnonzero(y > NEGLIGIBLE)  # (m,)
    grown = counts[classes] + y[classes]  # (m,)
    share = like(y[classes] / grown, x)[:, None]  # (m, 1)
    rows = namespace(x).asarray(classes, device=device(x))
    apart = x[None, :] - mu[rows]  # (m, d)
    for j, k in enumerate(classes.tolist()):
        add_scaled_(total, scatter[k], float(1 / grown[j] - 1 / counts[k]))
        add_outer_(scatter[k], apart[j], float(y[k]))
    total += (share * apart).T @ apart
    mu[rows] = mu[rows] + share * apart
    counts[classes] = grown


def add_scaled_(a: Array, b: Array, weight: float) -> None:
    """a <- a + weight b, in one pass over the matrices.

    >>> a = np.zeros((2, 2))
    >>> add_scaled_(a, np.eye(2), 3.0)
    >>> a
    array([[3., 0.],
           [0., 3.]])
    """
    if is_torch_array(a):
        a.add_(b, alpha=weight)
        return
    from scipy.linalg import get_blas_funcs

    get_blas_funcs("axpy", (a,))(b.ravel(), a.ravel(), a=weight)  # views: the arrays are contiguous


def add_outer_(a: Array, x: Array, weight: float) -> None:
    """a <- a + weight x x', in one pass over the matrix.

    >>> a = np.zeros((2, 2))
    >>> add_outer_(a, np.asarray([1.0, 2.0]), 3.0)
    >>> a
    array([[ 3.,  6.],
           [ 6., 12.]])
    """
    if is_torch_array(a):
        a.addr_(x, x, alpha=weight)
        return
    from scipy.linalg import get_blas_funcs

    get_blas_funcs("ger", (a,))(weight, x, x, a=a.T, overwrite_a=1)  # columns first, as BLAS has them
