"""TIDE: transduction that finds out how many of the classes are there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from moontide.core.arrays import Array, class_counts, clip, namespace, row_dots, unit_rows
from moontide.core.graph import nearest_neighbours
from moontide.core.ple import neighbour_votes
from moontide.core.simplex import one_hot, softmax, zero_shot
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task


@dataclass(frozen=True)
class TIDE(Method):
    """Transduction whose strength comes from one number, how many of the classes the batch seems to have.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 100, effective_classes=3, seed=0)
    >>> result = TIDE().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    >>> bool((result.labels == data.labels).mean() > (result.zero_shot_labels == data.labels).mean())
    True
    """

    citation: ClassVar[str] = "ours, beyond Huang et al., ICML 2026"
    accepts: ClassVar[frozenset[str]] = frozenset({"known", "class_prior", "negatives"})

    iterations: int = option(10, "T, rounds of M-step and E-step after the first E-step", low=1)
    sharpness: float = option(10.0, "weight of the cosine to a class mean where few classes are there", low=0)

    def _fit(self, task: Task) -> Result:
        f, t, n, k, d = task.features, task.text, task.n, task.k, task.d
        xp = namespace(f)
        y = zero_shot(f, t, task.logit_scale)  # (N, K)
        p = xp.mean(y, axis=0)
        a = min(1 / excess(y), 1e3)
        w = a / (1 + a)
        smooth = a * max(1.0, n / k * w)
        labelled = xp.zeros((n, 1), dtype=xp.bool) if task.known is None else (task.known >= 0)[:, None]
        hot = y if task.known is None else one_hot(task.known, k, y)

        def clamp(z: Array) -> Array:
            return xp.where(labelled, hot, z)

        centre, text_centre = xp.mean(f, axis=0), p @ t
        tau = y @ t - text_centre
        slope = min(max(float(xp.sum((f - centre) * tau) / max(float(xp.sum(tau * tau)), 1e-9)), 0.0), 1.0)
        anchor = unit_rows(centre + slope * (t - text_centre))
        votes = neighbour_votes(nearest_neighbours(f, 3), True, True, 2 - w)
        log_y = xp.log(y + 1e-30) - 0.5 * w * xp.log((n * p + 1) / (n / k + 1))
        count = xp.sum(y, axis=0)
        mean = (y.T @ f) / clip(count, 1e-9)[:, None]
        var = clip(xp.mean(f**2, axis=0) - xp.sum(count[:, None] * mean**2, axis=0) / n, 0)
        scale_d = xp.sqrt((n * var + d * xp.mean(var)) / ((n + d) * xp.mean(var)) + 1e-12)
        f, anchor = unit_rows(f / scale_d), unit_rows(anchor / scale_d)
        s = self.sharpness * (1 + 2 * w)
        at_anchor = f @ anchor.T
        z = clamp(softmax(log_y + s * at_anchor + votes(clamp(y)) + xp.log(n * p + smooth)))
        out = (1 - w) * xp.astype(~labelled, f.dtype)
        for _ in range(self.iterations):
            gamma = 1 + xp.sum(z * xp.log(z + 1e-30), axis=1) / math.log(max(k, 2))
            weight = gamma[:, None] * z
            sums, soft, counts = weight.T @ f, xp.sum(weight, axis=0), xp.sum(z, axis=0)
            label = xp.argmax(z, axis=1)
            hard = clip(class_counts(label, k) - out * one_hot(label, k, z), 0)
            beta = hard / (hard + 1)
            mine = out * weight
            dots, squares, along = f @ sums.T, row_dots(sums, sums), row_dots(sums, anchor)
            b, rest = beta / clip(soft - mine, 1e-9), 1 - beta
            top = b * (dots - mine) + rest * at_anchor
            norm2 = b * b * (squares - 2 * mine * dots + mine**2) + 2 * b * rest * (along - mine * at_anchor) + rest**2
            pull = xp.log(clip(counts - out * z, 0) + smooth)
            z = clamp(softmax(log_y + s * top / xp.sqrt(clip(norm2, 1e-12)) + votes(z) + pull))
        return Result(z, y, n_iter=self.iterations, unknown=1 - xp.max(y, axis=1))


def excess(y: Array) -> float:
    """Return by how much two samples agree more often than with equally frequent classes, less its standard error."""
    n, k = y.shape
    if n < 2 or k < 2:
        return 1e-3
    xp = namespace(y)
    total, own = xp.sum(y, axis=0), row_dots(y, y)
    agree = (y @ total - own) / (n - 1)
    u = float(xp.mean(agree)) - 2 * float(xp.std(agree)) / n**0.5
    sure = (float(xp.mean(own)) - 1 / k) / (1 - 1 / k)
    return max((k * u - 1) / max(sure, 1e-6), 1e-3)
