"""EM-Dirichlet: clusters of zero-shot probabilities on the simplex, each class a Dirichlet distribution.

S. Martin et al., CVPR 2024, after what their program (SegoleneMartin/transductive-CLIP) computes.

Symbols:  p_i = softmax(T cos(f_i, t_k)) -> p[i]   ln(p_i + eps) -> log_p[i]   u_ik -> u[i, k]   a_k -> a[k]
          s_k, ybar_k, v_k -> s[k], y[k], v[k]   lambda / N -> complexity   T -> relative_temperature * task.logit_scale

The defaults are the original program (hard variant, 10 iterations, T = 30 at CLIP's logit scale of 100), which the
tables compare with; the preset "soft" is its other variant, with 20 iterations. Its partition-complexity weight
lambda = int(K / 5) N, meant for 5 classes in the batch, lets few clusters survive if K is large. The preset
"stata_port" is the port that is published with StatA: lambda = 0, and a first Dirichlet estimate that starts from the
normaliser of one class. `match` re-assigns clusters to classes, as the original's own evaluation does.

Everything is matrix products of log_p with K x K parameters, in float64 because the estimates of small clusters
diverge. The first estimate, of all classes from all samples, takes a few steps of Newton's method, where the original
takes about 150 steps and stops within 1e-4 of the maximum. The likelihood of a hard cluster of few samples has no
maximum: its parameters grow without end. To end where the original does, its 1000 steps are repeated one by one, which
takes most of the time; if K is large, they are taken at some points of a curve instead of all K values
(`dirichlet_estimate`). The inner loop skips classes without samples and those that have converged. `scores` are
one-hot rows, as in the original; `probs` are the assignments before they are made hard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moontide.core.arrays import Array, device, is_torch_array, namespace, to_numpy
from moontide.core.simplex import one_hot, softmax
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

EPS = 1e-15
MAX_STEPS = 1000  # of the inner loop
CHECK_EVERY = 50  # steps
CURVE_POINTS, CURVE_PER_NAT = 20, 6  # points of a curve: a fixed number, and more per unit of its length
TOLERANCE = 1e-11  # squared relative change of all parameters at which the inner loop stops
NEWTON_STEPS, MM_FIRST = 40, 3  # of the first estimate, and steps of the inner loop that precede them
ENDLESS = 1e6  # sum of the parameters of a class above which they are taken to grow without end
NEWTON_BLOCK = 2**15  # numbers in a block of rows, so that they stay in the cache
SETTLED = 1e-24  # squared relative change of a class below which it has converged


@dataclass(frozen=True)
class EMDirichlet(Method):
    """Mixture of Dirichlet distributions over the zero-shot probabilities, with a bonus for large clusters.

    >>> import numpy as np
    >>> text = np.eye(4)
    >>> EMDirichlet().fit_predict(text[[0, 1, 1, 0, 1]] + 0.1, text).labels
    array([0, 1, 1, 0, 1])
    """

    citation: ClassVar[str] = "Martin et al., CVPR 2024"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "soft": {"variant": "soft", "iterations": 20},
        "stata_port": {"complexity": 0.0, "broadcast_start": True},
    }

    variant: str = option("hard", "assignments between iterations: one class, or all", choices=("hard", "soft"))
    iterations: int = option(
        10, "rounds of estimating and assigning (the original's soft variant: 20)", low=1, high=100
    )
    relative_temperature: float = option(0.3, "T as a share of the logit scale: 0.3 of CLIP's 100 is 30", above=0)
    complexity: str | float = option("original", "weight of the logarithm of the class shares: a number, or the "
                                     "original's integer part of K / 5", choices=("original",), low=0)  # fmt: skip
    broadcast_start: bool = option(False, "start the first estimate from the normaliser of one class, not of K")
    match: bool = option(False, "re-assign clusters to classes by their mean probabilities")

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Count float64 arrays: some N x K, and a dozen K x K of the inner loop."""
        return super().peak_bytes(n, k, d, itemsize) + 8 * (6 * n * k + 12 * k * k)

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        cosine = task.features @ task.text.T  # (N, K)
        weight = task.k // 5 if isinstance(self.complexity, str) else self.complexity
        p = softmax(self.relative_temperature * task.logit_scale * xp.astype(cosine, xp.float64))  # (N, K)
        log_p = xp.log(p + EPS)  # (N, K)
        a = xp.ones((task.k, task.k), dtype=xp.float64, device=device(p))
        constant = log_normaliser(a)  # (K,)
        u, labels = p, xp.argmax(p, axis=1)
        for it in range(self.iterations):
            s = xp.sum(u, axis=0)  # (K,)
            live = xp.nonzero(s > EPS)[0]  # (C,) classes that have samples; the others keep their parameters
            y = (u.T @ log_p)[live] / s[live][:, None]  # (C, K)
            start = a[live]
            if self.broadcast_start and it == 0:
                start = mm_step(start, y, xp.ones_like(y[:, :1]))
            a[live] = (dirichlet_estimate if it else newton_estimate)(start, y)
            v = xp.log(s / task.n + EPS) + 1  # (K,)
            constant[live] = log_normaliser(a[live])
            probs = softmax(log_p @ (a - 1).T + constant + weight * v)  # (N, K)
            before, labels = labels, xp.argmax(probs, axis=1)
            u = one_hot(labels, task.k, p) if self.variant == "hard" else probs
        same = bool(xp.all(labels == before))
        if self.match:
            order = xp.argsort(match_clusters(p, labels))  # (K,) the cluster of each class
            probs, labels = probs[:, order], xp.argmax(probs[:, order], axis=1)
        probs = xp.astype(probs, cosine.dtype)
        zero_shot = softmax(task.logit_scale * cosine)
        return Result(probs, zero_shot, one_hot(labels, task.k, probs), n_iter=self.iterations, converged=same)


def dirichlet_estimate(a: Array, y: Array) -> Array:
    """Maximise the likelihood of one Dirichlet distribution per row, given mean log-probabilities y, from a; (C, K).

    Stops where ||a_new - a||^2 < TOLERANCE ||a||^2 over all rows, looked at every 50 steps. A step at least halves what
    a coordinate remembers of its start, so after 50 of them a_kj is a smooth function of y_kj alone: where there are
    many classes, the further steps are made at the points of a `Curve` only.

    >>> import numpy as np
    >>> y = special(np.ones(1))[1](np.asarray([[2.0, 3.0]])) - special(np.ones(1))[1](np.asarray([[5.0]]))
    >>> dirichlet_estimate(np.ones((1, 2)), y).round(3)
    array([[2., 3.]])
    """
    xp = namespace(a)
    k, curve = a.shape[1], Curve.through(y)
    w = xp.ones_like(a)  # how often a column counts in a sum over all K
    if curve is not None:  # its points take part from the start
        blank = xp.ones_like(curve.points)
        a, y, w = (xp.concat(pair, axis=1) for pair in ((a, blank), (y, curve.points), (w, 0 * blank)))
    out, size = xp.asarray(a[:, :k], copy=True), xp.zeros_like(a[:, 0])  # (C, K) results, (C,) their squared lengths
    rows = xp.arange(a.shape[0], device=device(a))  # those not settled
    for step in range(MAX_STEPS):
        before, a = a, mm_step(a, y, xp.sum(a * w, axis=1, keepdims=True))
        if step and step % CHECK_EVERY == 0:
            change, size[rows] = xp.sum((a - before) ** 2 * w, axis=1), xp.sum(a * a * w, axis=1)  # (C,)
            if bool(xp.sum(change) < TOLERANCE * xp.sum(size)):
                break
            moves = change > SETTLED * size[rows]
            if not bool(xp.all(moves)):
                out[rows[~moves]] = spread(curve, a[~moves], rows[~moves], k)
                rows, a, y, w = rows[moves], a[moves], y[moves], w[moves]
            if curve is not None and step == CHECK_EVERY:
                a, y, w = a[:, k:], curve.points[rows], curve.weights[rows]
    out[rows] = spread(curve, a, rows, k)
    return out


def spread(curve: Curve | None, a: Array, rows: Array, k: int) -> Array:
    """Return the parameters of all K classes in some rows: as they are, or from the points of the curve, (c, K)."""
    return a[:, :k] if curve is None or a.shape[1] > k else curve.values(a, rows)


@dataclass(frozen=True)
class Curve:
    """Chebyshev points between the least and the greatest y of a row, and sums and values of all K from them.

    >>> import numpy as np
    >>> y = np.linspace(-9.0, -1.0, 500)[None, :]
    >>> curve = Curve.through(y)
    >>> curve.points.shape, float(((np.exp(curve.points) * curve.weights).sum() / np.exp(y).sum()).round(9))
    ((1, 68), 1.0)
    >>> float(np.abs(curve.values(np.exp(curve.points), np.asarray([0])) / np.exp(y) - 1).max().round(9))
    0.0
    """

    points: Array  # (C, M) values of y
    weights: Array  # (C, M) sum_j f(y_j) = sum_m weights_m f(points_m)
    x: Array  # (C, K) y as numbers from -1 to 1
    basis: Array  # (M, M) the n-th Chebyshev polynomial at the m-th point, scaled so that it gives coefficients

    @staticmethod
    def through(y: Array) -> Curve | None:
        """Make the curves of all rows, or None where the points are no fewer than half of the classes."""
        xp = namespace(y)
        low, high = xp.min(y, axis=1, keepdims=True), xp.max(y, axis=1, keepdims=True)
        half = xp.clip((high - low) / 2, min=1e-9)  # (C, 1)
        if (
            y.shape[0] == 0
            or (m := CURVE_POINTS + CURVE_PER_NAT * math.ceil(float(xp.max(high - low)))) > y.shape[1] / 2
        ):
            return None
        angle = (xp.arange(m, dtype=y.dtype, device=device(y)) + 0.5) * (math.pi / m)
        orders = xp.arange(m, dtype=y.dtype, device=device(y))[:, None]
        basis = xp.cos(orders * angle[None, :]) * xp.where(orders > 0, 2 / m, 1 / m)  # (M, M)
        x = xp.clip((y - low) / half - 1, min=-1, max=1)
        sums = [xp.sum(part, axis=1) for part in polynomials(x, m)]
        return Curve(low + half * (1 + xp.cos(angle)), xp.stack(sums, axis=1) @ basis, x, basis)

    def values(self, a: Array, rows: Array) -> Array:
        """Return what a positive function with the values a at the points is at y, in some rows, (c, K)."""
        xp = namespace(a)
        factors = xp.log(a) @ self.basis.T  # (c, M)
        total = xp.zeros_like(self.x[rows])
        for n, part in enumerate(polynomials(self.x[rows], self.basis.shape[0])):
            total = total + factors[:, n : n + 1] * part
        return xp.exp(total)


def polynomials(x: Array, m: int) -> Iterator[Array]:
    """Yield the first m Chebyshev polynomials at x.

    >>> import numpy as np
    >>> [float(part) for part in polynomials(np.asarray(0.5), 4)]
    [1.0, 0.5, -0.5, -1.0]
    """
    before, part = x, namespace(x).ones_like(x)
    for _ in range(m):
        yield part
        before, part = part, 2 * x * part - before


def newton_estimate(a: Array, y: Array) -> Array:
    """Maximise what `dirichlet_estimate` maximises by Newton's method, in blocks of rows, (C, K).

    The Hessian is psi'(sum a) - diag(psi'(a)), inverted in closed form; no step is to less than a quarter. Rows that do
    not settle, as their maximum is at infinity, are left to `dirichlet_estimate`.

    >>> import numpy as np
    >>> y = special(np.ones(1))[1](np.asarray([[2.0, 3.0]])) - special(np.ones(1))[1](np.asarray([[5.0]]))
    >>> newton_estimate(np.ones((1, 2)), y).round(6)
    array([[2., 3.]])
    """
    xp = namespace(a)
    if a.shape[1] == 1:  # a single class: any parameter will do, and there is no curvature
        return dirichlet_estimate(a, y)
    out = xp.empty_like(a)
    rows = max(1, NEWTON_BLOCK // a.shape[1])
    for start in range(0, a.shape[0], rows):
        part, done = slice(start, start + rows), False
        b, target, curve = a[part], y[part], Curve.through(y[part])
        w = xp.ones_like(b)
        if curve is not None:  # the maximum is a function of y, whatever the start
            b, target, w = xp.ones_like(curve.points), curve.points, curve.weights
        for _ in range(MM_FIRST):
            b = mm_step(b, target, xp.sum(b * w, axis=1, keepdims=True))
        for _ in range(NEWTON_STEPS):
            total = xp.sum(b * w, axis=1, keepdims=True)  # (c, 1)
            if float(xp.max(total)) > ENDLESS:
                break
            slope, curvature = psi_and_derivative(b)  # (c, K), (c, K)
            total_slope, total_curvature = psi_and_derivative(total)  # (c, 1), (c, 1)
            gradient = total_slope - slope + target  # (c, K)
            shared = xp.sum(w * gradient / curvature, axis=1, keepdims=True) / (
                xp.sum(w / curvature, axis=1, keepdims=True) - 1 / total_curvature
            )
            before, b = b, xp.maximum(b + (gradient - shared) / curvature, b / 4)
            settled = xp.sum((b - before) ** 2, axis=1) <= SETTLED * xp.sum(b * b, axis=1)  # (c,)
            if done := bool(xp.all(settled)):
                break
        if done:
            out[part] = b if curve is None else curve.values(b, xp.arange(b.shape[0], device=device(b)))
        else:
            out[part] = dirichlet_estimate(a[part], y[part])
    return out


def psi_and_derivative(x: Array) -> tuple[Array, Array]:
    """Return the digamma and trigamma functions of positive numbers, by the asymptotic series at x + 8.

    >>> import numpy as np
    >>> [float(v.round(9)) for v in psi_and_derivative(np.asarray(1.0))]
    [-0.577215665, 1.644934067]
    """
    first, second = 1 / x, 1 / (x * x)
    for i in range(1, 8):
        inverse = 1 / (x + i)
        first, second = first + inverse, second + inverse * inverse
    xp, z = namespace(x), 1 / (x + 8)
    w = z * z
    tail = w * (1 / 12 - w * (1 / 120 - w * (1 / 252 - w * (1 / 240 - w * (1 / 132 - w * 691 / 32760)))))
    bent = z * w * (1 / 6 - w * (1 / 30 - w * (1 / 42 - w * (1 / 30 - w * (5 / 66 - w * 691 / 2730)))))
    return xp.log(x + 8) - z / 2 - tail - first, second + z + w / 2 + bent


def mm_step(a: Array, y: Array, total: Array) -> Array:
    """One majorisation-minimisation step of the Dirichlet likelihood, all coordinates of all rows at once; (C, K).

    q = 2 (lnGamma(1) - lnGamma(a + 1) + a psi(a + 1)) / a^2,  b = psi(a + 1) - psi(total) - q a - y,
    a_new = (-b + sqrt(b^2 + 4q)) / (2q). As y >= ln EPS, a stays above 0.01, and q needs no limit at a = 0.

    >>> import numpy as np
    >>> mm_step(np.ones((1, 1)), np.zeros((1, 1)), np.ones((1, 1)))
    array([[1.]])
    """
    log_gamma, psi = special(a)
    above = a + 1
    slope = psi(above)
    half_q = (slope - log_gamma(above) / a) / a
    half_b = (slope - psi(total) - y) / 2 - half_q * a
    return ((half_b * half_b + 2 * half_q) ** 0.5 - half_b) / (2 * half_q)


def log_normaliser(a: Array) -> Array:
    """lnGamma(sum_j a_kj) - sum_j lnGamma(a_kj), (K,): with sum_j (a_kj - 1) ln p_ij it makes ln Dir(p_i; a_k).

    >>> import numpy as np
    >>> log_normaliser(np.asarray([[1.0, 1.0], [2.0, 1.0]])).round(6)
    array([0.      , 0.693147])
    """
    xp = namespace(a)
    log_gamma, _ = special(a)
    return log_gamma(xp.sum(a, axis=1)) - xp.sum(log_gamma(a), axis=1)


def match_clusters(p: Array, labels: Array) -> Array:
    """Return the class of each cluster, (K,), that maximises the sum of its mean probability over all clusters.

    >>> import numpy as np
    >>> match_clusters(np.asarray([[0.9, 0.1], [0.2, 0.8]]), np.asarray([1, 0]))
    array([1, 0])
    """
    from scipy.optimize import linear_sum_assignment

    xp = namespace(p)
    members = one_hot(labels, p.shape[1], p)  # (N, K)
    centroids = (members.T @ p) / xp.clip(xp.sum(members, axis=0), min=1)[:, None]  # (K, K), zero for empty clusters
    return xp.asarray(linear_sum_assignment(to_numpy(centroids), maximize=True)[1], device=device(p))


def special(ref: Array) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
    """Return lnGamma and its derivative psi for arrays of the kind of `ref`.

    >>> import numpy as np
    >>> special(np.ones(1))[0](np.asarray([3.0])).round(6)
    array([0.693147])
    """
    if is_torch_array(ref):
        import torch

        return torch.special.gammaln, torch.special.digamma
    from scipy.special import gammaln, psi

    return gammaln, psi
