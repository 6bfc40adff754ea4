"""StatA as a map over shards: diagonal Gaussians whose K x d sums of z f and z f^2 add up.

Equations and symbols as in `methods.stata`. All squares are taken around the mean of the features, `centre`, which is
the first thing that is added up. The five assignments of an E-step hear the neighbours inside the shard.

A class's mean is sum_i z_ik f_i / sum_i z_ik here, where `methods.stata` forms it from log z: they differ for classes
whose z_ik all underflow, which have no share beta_k in anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import Array, affine, class_counts, like, namespace, to_numpy, unit_rows
from moontide.core.gaussian import FLOOR
from moontide.core.ple import EPS, means, shrink
from moontide.core.progress import track
from moontide.core.simplex import softmax
from moontide.core.threads import in_threads
from moontide.engine.rows import Rows
from moontide.engine.solvers import Plan, Run
from moontide.engine.sums import Doubles, Sums
from moontide.errors import OptionError
from moontide.methods.stata import Mixture, StatA

Floats = NDArray[np.float32]


@dataclass
class Centre(Sums):
    """The sum of the features."""

    n: int
    sums: Doubles  # (d,)


@dataclass
class Moments(Sums):
    """What shards add up, f around the centre."""

    n: int
    sums: Doubles  # (K, d) sum_i z_ik f_i
    squares: Doubles  # (K, d) sum_i z_ik f_i^2; in the first pass (1, d) sum_i f_i^2
    soft: Doubles  # (K,) sum_i z_ik
    counts: Doubles  # (K,) labels of each class
    changed: int  # labels that differ from the z before


class Shard(Rows):
    """Some rows of a task for StatA.

    >>> shard = Shard(StatA(), np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), 100.0)
    >>> shard.mean().sums
    array([1., 1., 1.])
    """

    SCORES: ClassVar[int] = 1

    def mean(self) -> Centre:
        """Add up the features."""
        return Centre(len(self.f), np.sum([_double(self.f[at].sum(axis=0)) for at in self.blocks], axis=0))

    def first_pass(self, centre: Floats) -> Moments:  # type: ignore[override]
        """Make the zero-shot predictions and what the anchor variance needs of them."""
        total = None
        for rows in track(self.blocks, "zero-shot"):
            y, _, _ = self._zero_shot(rows)
            f = self.f[rows] - like(centre, self.f)  # (b, d)
            square = _double((f**2).sum(axis=0))[None, :]  # (1, d)
            soft = _double(y.sum(axis=0))
            part = Moments(len(y), _double(y.T @ f), square, soft, np.zeros_like(soft), 0)
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def step(self, centre: Floats, linear: Floats, quadratic: Floats, offset: Floats) -> Moments:
        """E-step with scores f linear' - f^2 quadratic' + offset, and the statistics for the next M-step."""
        centre, linear, quadratic, offset = (like(x, self.f) for x in (centre, linear, quadratic, offset))
        scores = self._empty(*self.z.shape)  # (n, K)
        for rows in self.blocks:
            f = self.f[rows] - centre  # (b, d)
            scores[rows] = affine(f, linear, offset)
            scores[rows] -= f**2 @ quadratic.T  # (b, K) or (b, 1)
        before, self.labels = self.labels, self._empty(len(self.f), dtype=self.labels.dtype)
        new = self._empty(*self.z.shape, dtype=self.z.dtype)  # (n, K)
        for _ in range(self.method.inner_iterations - 1):
            for rows in self.blocks:
                new[rows] = self._narrow(self._assign(rows, scores[rows]))
            self.z, new = new, self.z
        total = None
        for rows in track(self.blocks, "iteration"):
            p, f = self._assign(rows, scores[rows]), self.f[rows] - centre  # (b, K), (b, d)
            new[rows], self.labels[rows] = self._narrow(p), namespace(p).argmax(p, axis=1)
            counts = _double(class_counts(self.labels[rows], len(self.text)))
            changed = int((self.labels[rows] != before[rows]).sum())
            part = Moments(len(p), _double(p.T @ f), _double(p.T @ f**2), _double(p.sum(axis=0)), counts, changed)
            total = part if total is None else total + part
        self.z = new
        return total  # type: ignore[return-value]

    def _assign(self, rows: slice, scores: Array) -> Array:
        """Eq. update-z of some rows: softmax(scores + votes), (b, K)."""
        parts = in_threads(
            lambda at: softmax(scores[at.start - rows.start : at.stop - rows.start] + self._votes(at)), self._cut(rows)
        )
        return namespace(scores).concat(parts)


def _double(x: Array) -> Doubles:
    return to_numpy(x).astype(np.float64)


@dataclass
class Solution:
    """What `solve` knows at the end; the assignments are in the shards."""

    converged: bool
    beta: Floats
    mu: Floats
    spread: Floats


def plan(method: StatA) -> Plan:
    """Mean, first pass, and an E-step before and after each M-step.

    >>> plan(StatA())
    Plan(calls=13, steps=11)
    """
    if method.faithful:
        raise OptionError("The 'faithful' option of stata depends on the order of rows; leave it out on shards.")
    return Plan(method.iterations + 3, method.iterations + 1)


def solve(method: StatA, run: Run, text: Floats, logit_scale: float) -> Solution:
    """Alternate E-steps on shards and M-steps here. `run(name, *arguments)` calls a method of every shard and adds up.

    >>> eye = np.eye(3, dtype=np.float32)
    >>> shard = Shard(StatA(), eye, eye, 100.0)
    >>> solve(StatA(), lambda name, *given: getattr(shard, name)(*given), eye, 100.0).converged
    True
    """
    mean = run("mean")
    centre = (mean.sums / mean.n).astype(text.dtype)  # (d,)
    c, t = centre.astype(np.float64), text.astype(np.float64)  # (d,), (K, d)
    first = run("first_pass", centre)
    far = t - c  # (K, d)
    # Sigma'_j = sum_ik y_ik (f_ij - t_kj)^2 / N, the square expanded
    anchor = (first.squares + first.soft @ far**2 - 2 * (far * first.sums).sum(axis=0)) / first.n  # (1, d)
    anchor = np.maximum(anchor, FLOOR / text.shape[1])
    classes = Mixture(t, anchor, np.zeros(len(t)))
    step: Moments = run("step", centre, *scores(classes, t, c, method, logit_scale))
    for _ in range(method.iterations):
        classes = m_step(step, t, c, anchor, method)
        step = run("step", centre, *scores(classes, t, c, method, logit_scale))
    mu, spread, beta = (x.astype(text.dtype) for x in classes)
    return Solution(step.changed == 0, beta, mu, spread)


def m_step(step: Moments, text: Doubles, centre: Doubles, anchor: Doubles, method: StatA) -> Mixture:
    """Eq. stata-shrinkage: means and variances of the classes from their statistics.

    >>> none, t = np.zeros((1, 2)), np.asarray([[1.0, 0.0]])
    >>> m_step(Moments(0, none, none, none[:, 0], none[:, 0], 0), t, none[0], none + 1, StatA()).mu
    array([[1., 0.]])
    """
    counts = step.soft if method.beta == "soft" else step.counts
    beta = counts / (counts + method.alpha + EPS)  # (K,)
    v = means(step.sums, step.soft, 0.0)  # v_k around the centre, (K, d)
    mu = unit_rows(shrink(unit_rows(v + centre), beta, text))  # mu_k = beta_k v_k + (1 - beta_k) t_k, (K, d)
    within = means(step.squares, step.soft, 0.0) - v**2  # (K, d)
    variance = np.maximum(within, 0) + (v + centre - mu) ** 2  # T_k, (K, d)
    spread = shrink(variance, beta, anchor + (text - mu) ** 2)  # (K, d)
    return Mixture(mu, np.maximum(spread, FLOOR / text.shape[1]), beta)


def scores(
    classes: Mixture, text: Doubles, centre: Doubles, method: StatA, logit_scale: float
) -> tuple[Floats, Floats, Floats]:
    """Fold zero-shot logits and the tempered Gaussian likelihood into f linear' - f^2 quadratic' + offset.

    >>> one = np.ones((1, 1))
    >>> scores(Mixture(one, one, one[0]), one, np.zeros(1), StatA(temper=1.0), 100.0)[0]
    array([[101.]], dtype=float32)
    """
    scale, away, spread = method.text_weight * logit_scale, classes.mu - centre, classes.spread
    scaled = away / spread  # (K, d)
    linear = scaled / method.temper + scale * text  # (K, d)
    quadratic = 0.5 / (spread * method.temper)  # (K, d) or (1, d)
    offset = scale * (text @ centre) - (away * scaled + np.log(spread)).sum(axis=1) / (2 * method.temper)  # (K,)
    return linear.astype(np.float32), quadratic.astype(np.float32), offset.astype(np.float32)
