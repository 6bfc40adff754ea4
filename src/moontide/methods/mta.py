"""MTA: robust mean shift over augmented views of each image.

M. Zanella et al., CVPR 2024, after what their program (MaxZanella/MTA) computes.

Symbols:  x_p -> views[:, p]   h_p^2 -> bandwidth   K_p -> kernel   w_pq -> affinity   y_p -> inlierness   m -> mode
          lambda -> affinity_weight   lambda_y -> entropy_weight

Each image is labelled separately: its views vote for a mode m, which is classified. Starting from m = x_0 and
y_p = 1 / V,

    (a)  y = softmax_p((K_p(m) + lambda sum_q w_pq y_q) / lambda_y)           until y moves less than the tolerance
    (b)  m = normalise(sum_p K_p(m) y_p x_p / sum_p K_p(m) y_p)               until m moves less than the tolerance

are repeated, with K_p(m) = exp(-|x_p - m|^2 / (2 h_p^2)), h_p^2 half the mean squared distance of view p to the nearest
30 % of the other views, and w_pq = s_p.s_q of the zero-shot predictions s. Images are computed together, but each one
stops when it has converged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from moontide.core.arrays import Array, as_matrix, like, namespace, unit_rows
from moontide.core.simplex import softmax, zero_shot
from moontide.errors import InputError, OptionError
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task
from moontide.views import make_views

BLOCK_ENTRIES = 2**22  # entries of views, of their predictions and of their affinities held at once
FLOOR = 1e-6  # smallest bandwidth h_p^2: equal views have none of their own


@dataclass(frozen=True)
class MTA(Method):
    """The class of the densest point among augmented views of an image.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> views = rng.normal(size=(4, 8, 16))
    >>> MTA().fit_predict(views[:, 0], rng.normal(size=(3, 16)), views=views).probs.shape
    (4, 3)
    """

    citation: ClassVar[str] = "Zanella et al., CVPR 2024"
    needs: ClassVar[frozenset[str]] = frozenset({"views"})

    views: int = option(64, "views to create per image, from images and an encoder instead of views", low=2)
    seed: int = option(0, "seed of the random crops", low=0, high=2**32 - 1)
    nearest: float = option(0.3, "share of the other views that sets the bandwidth of a view", above=0, high=1)
    affinity_weight: float = option(4.0, "lambda, weight of views with similar predictions", low=0)
    entropy_weight: float = option(0.2, "lambda_y, how evenly views count", above=0)
    iterations: int = option(5, "rounds of both updates", low=1)
    inner_iterations: int = option(5, "the most steps of each update per round", low=1)
    tolerance: float = option(1e-6, "step length at which an update has converged", low=0)

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        views = self.check(task)  # (N, V, d)
        n, v, d = views.shape
        size = max(1, BLOCK_ENTRIES // (v * (v + task.k + d)))
        blocks = (views[start : start + size] for start in range(0, n, size))
        mode = xp.concat([self.modes(block, task.text, task.logit_scale) for block in blocks])  # (N, d)
        scores = task.logit_scale * (mode @ task.text.T)  # (N, K)
        y = zero_shot(task.features, task.text, task.logit_scale)  # (N, K)
        return Result(softmax(scores), y, scores, details={"mode": mode})

    def require(self, task: Task) -> None:
        """Take images with an encoder in place of views."""
        made = {"images", "encoder"} <= task.extras.keys() and "views" not in task.extras
        changed = [name for name in ("views", "seed") if getattr(self, name) != self.specs()[name].default]
        if changed and not made:
            raise OptionError(
                f"The '{changed[0]}' option of mta has no effect if views=... is given; it is for views made from "
                "images=... and encoder=... . Leave it out."
            )
        super().require(task.trusted(extras={**task.extras, "views": task.extras["images"]}) if made else task)

    def check(self, task: Task) -> Array:
        """Return the views as unit rows, or raise an error that names why they cannot be used."""
        given = task.extras.get("views")
        if given is None:
            given = make_views(task.extras["encoder"], task.extras["images"], self.views, self.seed)
        views = like(unit_rows(as_matrix(given, "views", 3), "views"), task.features)
        if views.shape[2] != task.d:
            raise InputError(
                f"'views' must have the dimension of the features, {task.d}. Got {views.shape[2]} instead."
            )
        if int(self.nearest * (views.shape[1] - 1)) < 1:
            raise InputError(
                f"'views' must hold at least {math.ceil(1 / self.nearest) + 1} views per image, so that the nearest "
                f"{self.nearest:.0%} of the others are at least one. Got {views.shape[1]} instead; make more views."
            )
        return views

    def modes(self, x: Array, text: Array, scale: float) -> Array:
        """Find the mode of each image from its views x (b, V, d), (b, d)."""
        xp = namespace(x)
        h = bandwidth(x, int(self.nearest * (x.shape[1] - 1)))  # (b, V)
        s = softmax(scale * (x @ text.T))  # (b, V, K)
        w = s @ xp.matrix_transpose(s)  # (b, V, V)
        y, m = xp.full_like(h, 1 / x.shape[1]), x[:, 0, :]  # (b, V), (b, d)
        for _ in range(self.iterations):
            kernel = xp.exp(log_kernel(x, m, h))  # (b, V)
            y = self.settle(self.inlierness, y, kernel, w)
            m = self.settle(mean_shift, m, x, y, h)
        return m

    def inlierness(self, y: Array, kernel: Array, w: Array) -> Array:
        """y_p = softmax_p((K_p + lambda sum_q w_pq y_q) / lambda_y), (b, V)."""
        return softmax((kernel + self.affinity_weight * (w @ y[:, :, None])[:, :, 0]) / self.entropy_weight)

    def settle(self, update: Callable[..., Array], value: Array, *given: Array) -> Array:
        """Repeat value <- update(value, *given), each row until it moves less than the tolerance."""
        xp = namespace(value)
        moving = xp.ones_like(value[:, :1], dtype=xp.bool)  # (b, 1)
        for _ in range(self.inner_iterations):
            new = update(value, *given)
            step = xp.linalg.vector_norm(new - value, axis=1, keepdims=True)  # (b, 1)
            value = xp.where(moving, new, value)
            moving = moving & (step >= self.tolerance)
            if not bool(xp.any(moving)):
                break
        return value


def bandwidth(x: Array, k: int) -> Array:
    """h_p^2 = 1/2 mean of the squared distances of view p to its k nearest other views, at least the floor, (b, V).

    >>> import numpy as np
    >>> bandwidth(np.asarray([[[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]]]), 1)
    array([[0.4, 0.4, 1.6]])
    """
    xp = namespace(x)
    square = xp.sort(2 - 2 * (x @ xp.matrix_transpose(x)), axis=2)[:, :, 1 : k + 1]  # (b, V, k) the first is itself
    return xp.clip(xp.mean(square, axis=2) / 2, min=FLOOR)


def log_kernel(x: Array, m: Array, h: Array) -> Array:
    """Log K_p(m) = -|x_p - m|^2 / (2 h_p^2), (b, V).

    >>> import numpy as np
    >>> log_kernel(np.eye(2)[None], np.eye(2)[:1], np.ones((1, 2)))
    array([[ 0., -1.]])
    """
    cosine = (x @ m[:, :, None])[:, :, 0]  # (b, V) |x_p - m|^2 = 2 - 2 x_p.m
    return namespace(x).clip(cosine - 1, max=0) / h


def mean_shift(m: Array, x: Array, y: Array, h: Array) -> Array:
    """m = normalise(sum_p K_p(m) y_p x_p / sum_p K_p(m) y_p), weights by softmax of logarithms, never 0 / 0, (b, d).

    >>> import numpy as np
    >>> x = np.asarray([[[0.6, 0.8], [0.6, -0.8]]])
    >>> mean_shift(np.asarray([[1.0, 0.0]]), x, np.full((1, 2), 0.5), np.ones((1, 2)))
    array([[1., 0.]])
    """
    xp = namespace(x)
    weights = softmax(xp.log(xp.clip(y, min=float(xp.finfo(y.dtype).smallest_normal))) + log_kernel(x, m, h))  # (b, V)
    return unit_rows((weights[:, None, :] @ x)[:, 0, :])
