"""InMaP: class proxies among the images, learnt from balanced pseudo-labels.

InMaP, NeurIPS 2023, after what its program (idstcv/InMaP) computes.

Symbols:  f_i -> f[i]   t_k -> text[k]   Y -> y   w_k -> w[k]   tau_t -> 1 / logit_scale   tau_i -> tau
          alpha -> threshold   gamma -> gamma   eta -> step_size

Pseudo-labels Y are zero-shot probabilities balanced by Sinkhorn (see `sinkhorn.py`), made one-hot where the largest is
above alpha. The proxies start at the text and take 2000 gradient steps:

    G = F' (softmax_k(F W / tau_i) - Y),   W <- W - eta / (N tau_i) G,   columns of W to unit length,

and eta is halved for good whenever the length of G grows. Scores are the cosines F W; probabilities are
softmax(F W / tau_i).

When eta is halved depends on rounding, so in float32 two programs stop at different points (up to 5e-2 apart on small
batches). Here inputs are rounded to float32, as in the published program, and everything is computed in float64.
Nearly all time goes into the steps, 4 N d K operations each, or 2 N N K if N <= d.

The presets: "gamma1" keeps the zero-shot shares of the classes, so that balancing changes nothing; "no_sinkhorn" leaves
balancing out, which the published program prints as "image proxy".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moontide.core.arrays import Array, device, namespace, row_norms
from moontide.core.simplex import one_hot, softmax, zero_shot
from moontide.methods.sinkhorn import balanced, in_double, targets
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

LOST = 1e4  # coordinates of a unit proxy above which the sums of products of samples have lost its digits
STILL = 1e-17  # length of a step that changes no proxy in float64: the halving has come to its end


@dataclass(frozen=True)
class InMaP(Method):
    """Class proxies fitted to the images of a batch by gradient descent on balanced pseudo-labels.

    >>> import numpy as np
    >>> InMaP().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "InMaP, NeurIPS 2023"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gamma1": {"gamma": 1.0},
        "no_sinkhorn": {"sinkhorn_iterations": 0},
    }

    gamma: float = option(0.0, "the target shares are the zero-shot shares to this power; 0: equal shares", low=0)
    sinkhorn_iterations: int = option(20, "rounds of balancing the pseudo-labels; 0: no balancing", low=0)
    threshold: float = option(0.6, "alpha, probability above which a pseudo-label becomes one-hot", low=0)
    tau: float = option(0.04, "tau_i, temperature of the similarities to the proxies", above=0)
    step_size: float = option(10.0, "eta, length of the first gradient steps", above=0)
    iterations: int = option(2000, "gradient steps", low=1, high=10_000)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the options that have no effect given the others."""
        if self.sinkhorn_iterations == 0:
            yield ("gamma",), "with sinkhorn_iterations=0"

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the float64 features, probabilities and proxies."""
        return super().peak_bytes(n, k, d, itemsize) + 8 * (4 * n * k + n * d + 5 * k * d)

    def _fit(self, task: Task) -> Result:
        xp, dtype = namespace(task.features), task.features.dtype
        f, text, log_y = in_double(task)  # (N, d), (K, d), (N, K)
        y = xp.exp(balanced(log_y, targets(log_y, self.gamma), self.sinkhorn_iterations))  # (N, K)
        w = proxies(f, hardened(y, self.threshold), text, self.tau, self.step_size, self.iterations)  # (K, d)
        cosine = f @ w.T  # (N, K)
        return Result(
            probs=xp.astype(softmax(cosine / self.tau), dtype),
            zero_shot=zero_shot(task.features, task.text, task.logit_scale),
            native_scores=xp.astype(cosine, dtype),
            n_iter=self.iterations,
            details={"proxies": xp.astype(w, dtype)},
        )


def hardened(y: Array, threshold: float) -> Array:
    """Replace the rows whose largest entry is above the threshold by one-hot rows, (N, K).

    >>> import numpy as np
    >>> hardened(np.asarray([[0.7, 0.3], [0.6, 0.4]]), 0.6)
    array([[1. , 0. ],
           [0.6, 0.4]])
    """
    xp = namespace(y)
    sure = xp.max(y, axis=1, keepdims=True) > threshold  # (N, 1)
    return xp.where(sure, one_hot(xp.argmax(y, axis=1), y.shape[1], y), y)


def proxies(f: Array, y: Array, text: Array, tau: float, step: float, iterations: int) -> Array:
    """Fit unit proxies to the labels y by gradient steps from the text; steps are halved whenever G grew, (K, d).

    >>> import numpy as np
    >>> proxies(np.eye(2), np.eye(2), np.asarray([[0.6, 0.8], [0.8, 0.6]]), 1.0, 10.0, 200).round(3)
    array([[ 0.707, -0.707],
           [-0.707,  0.707]])
    """
    if f.shape[0] <= f.shape[1]:
        found = proxies_in_span(f, y, text, tau, step, iterations)
        if found is not None:
            return found
    xp = namespace(f)
    w = text  # (K, d)
    eta, before = (xp.asarray(x, dtype=f.dtype, device=device(f)) for x in (step, xp.inf))
    for _ in range(iterations):
        gradient = (softmax((f @ w.T) / tau) - y).T @ f  # (K, d)
        size = xp.linalg.vector_norm(gradient)
        eta, before = xp.where(size > before, eta / 2, eta), size
        rate = eta / (f.shape[0] * tau)
        if float(rate * size) < STILL:
            break
        w = w - rate * gradient
        w = w / xp.clip(row_norms(w), min=1e-12)[:, None]
    return w


def proxies_in_span(f: Array, y: Array, text: Array, tau: float, step: float, iterations: int) -> Array | None:
    """Return what `proxies` returns, faster for fewer samples than dimensions: w_k = s_k t_k + sum_i a_ik f_i, (K, d).

    A step takes 2 N N K operations instead of 4 N d K: cosines and lengths follow from the products of samples. If
    samples and text nearly depend on each other, s and a can grow without a limit; then the answer is None.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> f, text = rng.normal(size=(3, 4)), rng.normal(size=(2, 4))
    >>> one, many = (proxies_in_span(f, np.eye(2)[[0, 1, 0]], text, 1.0, 10.0, n) for n in (1, 2))
    >>> bool(np.allclose((one**2).sum(axis=1), 1)), bool(np.allclose(one, many))
    (True, False)
    """
    xp = namespace(f)
    gram, to_text = f @ f.T, f @ text.T  # (N, N), (N, K)
    squares = xp.sum(text * text, axis=1)  # (K,)
    s, a = xp.ones_like(squares), xp.zeros_like(to_text)  # (K,), (N, K)
    near = xp.zeros_like(a)  # (N, K) gram @ a
    eta, before = (xp.asarray(x, dtype=f.dtype, device=device(f)) for x in (step, xp.inf))
    for _ in range(iterations):
        residual = softmax((s * to_text + near) / tau) - y  # (N, K)
        moved = gram @ residual  # (N, K)
        size = xp.sqrt(xp.clip(xp.sum(residual * moved), min=0))  # of the gradient
        eta, before = xp.where(size > before, eta / 2, eta), size
        rate = eta / (f.shape[0] * tau)
        if float(rate * size) < STILL:
            break
        a, near = a - rate * residual, near - rate * moved
        square = s * s * squares + xp.sum(a * (2 * s * to_text + near), axis=0)  # (K,)
        length = xp.sqrt(xp.clip(square, min=1e-24))
        s, a, near = s / length, a / length, near / length
        if not float(xp.maximum(xp.max(s), xp.max(xp.abs(a)))) < LOST:
            return None
    return s[:, None] * text + a.T @ f
