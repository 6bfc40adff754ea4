"""StatA: a Gaussian mixture whose classes are anchored to the statistics of their text.

M. Zanella, C. Fuchs, C. De Vleeschouwer, I. Ben Ayed, "Realistic Test-Time Adaptation of Vision-Language Models",
CVPR 2025. Equations as in the MOON paper, app. "Revisiting StatA".

Symbols:  f_i -> features[i]   t_k = mu'_k -> text[k]   Sigma' -> anchor   log y_ik -> log_y   log z_ik -> log_z
          v_k -> v   T_k -> class_variance   beta_k -> beta   mu_k -> mu   Sigma_k -> spread   omega_ij -> graph
          tau -> 1 / task.logit_scale   m -> neighbours   T -> iterations

The defaults are the published program, which made the numbers of both papers. Beyond the equations it divides the
log-likelihood by 50 (`temper`) and the Laplacian by 2m, repeats the assignment 5 times with one likelihood
(`inner_iterations`), scales v_k and then mu_k to unit length, and has one more E-step after the last M-step.

That program has two defects, which docs/methods.md names; `faithful=True` repeats the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from moontide.core import driver, formulas
from moontide.core.arrays import Array, affine, class_counts, is_torch_array, like, namespace, put, row_dots, unit_rows
from moontide.core.mixture import ALL
from moontide.core.ple import means, shrink
from moontide.core.rows import Rows, check_graph
from moontide.core.simplex import softmax
from moontide.core.sums import SAME, Doubles, Sums
from moontide.errors import OptionError
from moontide.methods import _gaussian as gaussian
from moontide.methods._alternation import Anchored, Components
from moontide.options import option
from moontide.protocols import Plan
from moontide.types import Result, Task

TINY = 1e-20  # probabilities below count for nothing, and products of them take a hundred times as long


@dataclass
class GaussianSums(Sums):
    """Sums over the samples for the M-step, of features f around a centre: their mean, at first that of the text."""

    n: int
    sums: Doubles  # (L, d) sum_i z_ik f_i
    squares: Doubles  # (L, d) sum_i z_ik f_i^2; of zero-shot predictions (1, d) sum_i f_i^2
    soft: Doubles  # (L,) sum_i z_ik
    counts: Doubles  # (K,) labels of each class
    changed: Any  # labels that differ from the z before
    present: Any = field(default_factory=lambda: ALL, metadata=SAME)  # (L,) class numbers; a slice: all


class StatARows(Rows):
    """The samples of StatA: scores are quadratic in f, which is taken around the mean of all samples.

    Where beta is made of labels, it is 0 for a class without any, which stays at its anchor: in memory in numpy, sums
    and new scores are made only of the other classes, and of those that had labels one step before.
    """

    SCORES: ClassVar[int] = 1
    around: Array | None = None  # in memory, what `_centred` returns
    scores: Array | None = None  # (n, K), where they are kept
    counts: Any = 0  # (K,) labels one step before

    def first(self, centre: Array) -> GaussianSums:  # type: ignore[override]
        """Make the zero-shot predictions and what the anchor variance needs of them."""
        centre = like(centre, self.f)
        weight = len(self.f) * gaussian.row_weights(self.f, self.method.faithful)  # (n,) of 1, but for `faithful`

        def block(at: slice) -> GaussianSums:
            y, _, _ = self._zero_shot(at)
            return GaussianSums(len(y), *gaussian.weighted_moments(y, self.f[at] - centre, weight[at]), 0 * y[0], 0)

        return self._add_up(block, "zero-shot")  # type: ignore[no-any-return]

    def step(self, present: Any, centre: Array, linear: Array, spread: Array, offset: Array) -> GaussianSums:
        """E-step with scores f linear' - f^2 / (2 temper spread)' + offset, repeated; then the sums for an M-step."""
        centre, linear, spread, offset = (like(x, self.f) for x in (centre, linear, spread, offset))
        xp, k, before = namespace(self.f), len(self.text), self.labels
        scores = self.scores  # (n, K)
        if scores is None:
            scores = self._room() if self.in_memory else self._empty(len(self.f), k)
        for at in self.blocks:
            f = self._centred(at, centre)  # (b, d)
            offsets = offset - f**2 @ ((0.5 / self.method.temper) / spread).T  # (b, L)
            scores[at, present] = affine(f, linear, offsets)
            del offsets  # before the next arrays of that size
        kept = self.in_memory and not is_torch_array(self.f)
        self.scores = scores if kept else None
        for _ in range(self.method.inner_iterations - 1):
            new = self._room()
            for at in self.blocks:
                self._assign(at, scores, new)
            self._replace(new)
        new, labels = self._room(), xp.empty_like(before)

        def block(at: slice) -> GaussianSums:
            f, p = self._centred(at, centre), self._assign(at, scores, new)  # (b, d), (b, K)
            p *= p >= TINY
            labels[at] = xp.argmax(p, axis=1)
            counts = xp.astype(class_counts(labels[at], k), self.f.dtype)
            sparse = kept and self.method.beta == "hard"
            some, self.counts = np.nonzero(counts + self.counts)[0] if sparse else ALL, counts  # (L,)
            p, changed = p[:, some], (labels[at] != before[at]).sum()
            return GaussianSums(len(p), p.T @ f, p.T @ f**2, p.sum(0), counts, changed, some)

        found: GaussianSums = self._add_up(block, "iteration")
        self._replace(new)
        self.labels = labels
        return found

    def _centred(self, rows: slice, centre: Array) -> Array:
        """Return some features around the mean of all, (b, d)."""
        if self.around is not None:
            return self.around
        f = self.f[rows] - centre
        self.around = f if self.in_memory else None
        return f

    def _assign(self, rows: slice, scores: Array, new: Array) -> Array:
        """Eq. update-z of some rows, written to `new`: softmax(scores + votes), (b, K)."""

        def part(at: slice) -> tuple[Array, ...]:
            logits = self._votes(at)
            logits += scores[at]
            if new.dtype == logits.dtype:
                softmax(logits, new[at])
                return ()
            p = softmax(logits)
            new[at] = self._narrow(p)
            return (p,)  # what is stored in 16 bits is not exact

        return (*self._in_parts(part, rows), new[rows])[0]


@dataclass(frozen=True)
class StatA(Anchored):
    """Transduction with class means and variances that are shrunk towards text by one weight alpha for all classes.

    >>> features = np.asarray([[1.0, 0.1, 0.5], [0.9, 0.2, 0.5], [0.2, 0.9, 0.5]])
    >>> result = StatA().fit_predict(features, np.eye(3))
    >>> result.labels, result.beta.round(2)
    (array([0, 0, 1]), array([0.67, 0.5 , 0.  ]))
    """

    citation: ClassVar[str] = "Zanella et al., CVPR 2025"
    rows_type: ClassVar[type[Rows]] = StatARows

    faithful: bool = option(False, "above 2500 samples, repeat the published program's error in the anchor variance")

    def _fit(self, task: Task) -> Result:
        check_graph(task.graph, self.name, self.neighbours)
        rows = StatARows(self, task.features, task.text, task.logit_scale, task.graph, in_memory=True)
        found = driver.solve(self.mixture(task.text, task.logit_scale), rows.call)
        details = {"mu": found.mu, "spread": found.spread}
        return Result(*rows.unpack(), None, (), self.iterations, found.converged, None, found.beta, details)

    def mixture(self, text: Array, logit_scale: float) -> GaussianMixture:  # type: ignore[override]
        """Return what `driver.solve` needs."""
        return GaussianMixture(self, text, logit_scale)

    def plan(self) -> Plan:
        """First pass, and an E-step before and after each M-step."""
        if self.faithful:
            raise OptionError("The 'faithful' option of stata depends on the order of rows; leave it out on shards.")
        return Plan(self.iterations + 2, self.iterations + 1)


class GaussianMixture(driver.Mixture[Components, Components]):
    """StatA for `driver.solve`: what it makes of the sums over its samples."""

    def __init__(self, options: StatA, text: Array, logit_scale: float) -> None:
        self.options, self.text, self.scale = options, text, options.text_weight * logit_scale
        self.m_steps, self.present = options.iterations, ALL  # (L,) classes that are not at their anchors; a slice: all

    def begin(self, run: driver.Run) -> Components:
        """App. "Revisiting StatA": Sigma'_j = sum_ik y_ik (f_ij - t_kj)^2 / N, the square expanded."""
        centre = self.text.mean(0)  # (d,)
        first = run("first", centre)
        self.t = like(self.text, first.sums)
        sums, squares, soft = (x / first.n for x in (first.sums, first.squares, first.soft))
        self.anchor = gaussian.pooled_variance(sums, squares, soft, self.t - centre)  # (1, d)
        self.centre = centre + sums.sum(0) / soft.sum()  # (d,) the mean of the samples, as sum_k y_ik = 1
        return Components(self.t, self.anchor, 0 * self.t[:, 0])

    def broadcast(self, classes: Components) -> tuple[Array, ...]:
        """Fold zero-shot logits and the tempered likelihood into f linear' - f^2 / (2 temper spread)' + offset."""
        temper, away, t = self.options.temper, classes.mu - self.centre, self.t[self.present]
        scaled, spread = away / classes.spread, classes.spread  # (L, d), (L, d) or (1, d)
        inside = row_dots(away, scaled) + namespace(spread).log(spread).sum(1)  # (L,)
        offset = self.scale * (t @ self.centre) - inside / (2 * temper)  # (L,)
        scaled /= temper
        scaled += self.scale * t
        return self.present, self.centre, scaled, spread, offset

    def update(self, step: GaussianSums) -> Components:
        """Eq. stata-shrinkage: means and variances of the classes from their statistics."""
        self.present, xp = step.present, namespace(step.sums)
        counts = step.soft if self.options.beta == "soft" else step.counts[step.present]  # (L,)
        beta, t = formulas.shrinkage(counts, self.options.alpha), self.t[step.present]  # (L,), (L, d)
        parts = (self._classes(step, k, beta[k], t[k]) for k in gaussian.cached_classes(t))
        mu, spread = (x[0] if len(x) == 1 else xp.concat(x) for x in zip(*parts, strict=True))  # (L, d), (L, d)
        return Components(mu, spread, beta)

    def _classes(self, step: GaussianSums, k: slice, beta: Array, t: Array) -> tuple[Array, Array]:
        """Return mu and Sigma of some classes."""
        v = means(step.sums[k], step.soft[k], 0.0)  # v_k around the centre
        mu = unit_rows(shrink(unit_rows(v + self.centre), beta, t))  # mu_k = beta_k v_k + (1 - beta_k) t_k
        variance = gaussian.class_variance(means(step.squares[k], step.soft[k], 0.0), v, mu - self.centre)
        return mu, gaussian.anchored_variance(variance, beta, t - mu, self.anchor)

    def finish(self, run: driver.Run, classes: Components, step: GaussianSums, trace: list[None]) -> Components:
        """Return the classes in the dtype of the text, and whether the last E-step changed no label."""
        anchors = self.t, self.anchor + 0 * self.t, 0 * self.t[:, 0]
        mu, spread, beta = (like(put(x, self.present, y), self.text) for x, y in zip(anchors, classes, strict=False))
        return Components(mu, spread, beta, int(step.changed) == 0)
