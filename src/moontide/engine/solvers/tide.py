"""TIDE as a map over shards: the E-step in blocks of rows, and sums for everything that looks at all samples.

Equations and symbols as in `methods.tide`, whose functions this calls block by block. Before the iterations there are
two passes: zero-shot with what the anchors and the metric need, then what needs those totals. The temperature of the
calibration takes one pass over the assignments for each step of Newton's method.

Zero-shot predictions and cosines to the anchors are made again in every step, as keeping them would take two N x K
arrays of 32 bits. In 16 bits, the fourth root of an assignment is stored: it is exact to 3e-5 near 1 (float16: 1e-3)
and keeps what is far below 1 / 65535, of which the calibration raises powers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import (
    Array,
    class_counts,
    class_sums,
    columns,
    device,
    exp_,
    like,
    namespace,
    row_dots,
    row_norms,
    to_numpy,
    unit_rows,
)
from moontide.core.ple import EPS, entropy_weights, weighted_sums
from moontide.core.progress import track
from moontide.core.simplex import log_softmax, softmax
from moontide.core.threads import in_threads
from moontide.engine.rows import Counted, Rows
from moontide.engine.solvers import Plan, Run
from moontide.engine.sums import LARGER, Doubles, Sums
from moontide.methods.tide import (
    NEWTON,
    STILL,
    TIDE,
    Crowd,
    Groups,
    Labels,
    Means,
    Model,
    agreement_by_class,
    agreements,
    anchor_weight_of,
    anchors_of,
    assign,
    bias_of,
    bias_weight,
    calibration,
    class_pull,
    confidences,
    cosine_to_means,
    crowd_of,
    expected_right,
    log_ratios,
    metric_of,
    presence,
    sharpening,
    unlikeness,
    with_neighbours,
)
from moontide.protocols import given_shares

Floats = NDArray[np.float32]


@dataclass
class Predicted(Sums):
    """What anchors and metric need of the zero-shot predictions."""

    n: int
    total: Doubles  # (K,) sum_i y_i
    centre: Doubles  # (d,) sum_i f_i
    square: Doubles  # (d,) sum_i f_i^2
    along: float  # sum_i f_i . x_i, x_i = sum_k y_ik t_k
    expected: float  # sum_i |x_i|^2
    sums: Doubles  # (K, d) sum of the samples with each zero-shot label
    counts: Doubles  # (K,) their number


@dataclass
class Compared(Sums):
    """What needs the sums of all predictions, and the metric."""

    agree: float  # sum over the samples of their agreements
    agree_square: float  # sum of those squared
    own: float  # sum_i |y_i|^2
    confidence: float  # sum_i max_k y_ik
    near: Doubles  # (K,) sum_ij W_ij y_ik y_jk
    most: Doubles  # (K,) sum_ij W_ij y_ik^2
    sums: Doubles  # (K, d) sum of the samples with each zero-shot label, in the metric


@dataclass
class Assigned(Sums):
    """What an E-step adds up."""

    sums: Doubles  # (K, d) sum_i gamma_i z_ik f_i
    soft: Doubles  # (K,) sum_i gamma_i z_ik
    hard: Doubles  # (K,) labels of each class
    counts: Doubles  # (K,) sum_i z_ik
    right: float  # sum_i of the zero-shot probability of the label
    changed: int  # labels that differ from the z before
    moved: float = field(metadata=LARGER)  # largest difference to the z before


@dataclass
class Confident(Sums):
    """What the calibration adds up."""

    confidence: float
    slope: float  # its derivative by the logarithm of the temperature


class Fixed(NamedTuple):
    """What stays the same for all shards while z is estimated."""

    scale: Floats  # (d,) the metric
    anchor: Floats  # (K, d) in the metric
    total: Floats  # (K,) sum_i y_i
    expected: Any  # (K,) or one number: what `total` would be without the bias of the text
    presence: Floats  # (K,)
    bias_weight: float
    alpha: float
    sharpness: float
    left_out: float
    vote_weight: float
    smoothing: float
    prior: Floats | None  # (K,)

    def like(self, ref: Array) -> Fixed:
        """Return it with arrays of the kind of `ref`."""
        return self._replace(**{name: like(x, ref) for name, x in self._asdict().items() if isinstance(x, np.ndarray)})


class Classes(NamedTuple):
    """What an M-step has of all samples: the H classes with labels, as the others are at their anchors."""

    some: Any  # (H,) their numbers
    sums: Floats  # (H, d)
    soft: Floats  # (H,)
    hard: Floats  # (H,)
    counts: Floats  # (K,)

    @classmethod
    def of(cls, step: Assigned, dtype: Any) -> Classes:
        """Take them from the sums of an E-step."""
        some = np.flatnonzero(step.hard)
        held = (step.sums[some], step.soft[some], step.hard[some], step.counts)
        return cls(some, *(x.astype(dtype) for x in held))

    def like(self, ref: Array) -> Classes:
        """Return them with arrays of the kind of `ref`; all classes are a slice, which takes no copies."""
        every = len(self.some) == len(self.counts)
        some = slice(None) if every else namespace(ref).asarray(self.some, device=device(ref))
        return Classes(some, *(like(x, ref) for x in self[1:]))

    def means(self, z: Array, gamma: Array, labels: Array) -> Means:
        """Return the statistics for some samples with assignments (b, K), weights (b,) and labels (b,)."""
        xp, every = namespace(z), isinstance(self.some, slice)
        weight = columns(z, self.some) * gamma[:, None]  # (b, H)
        places = labels if every else xp.searchsorted(self.some, labels)
        return Means(weight, self.sums, self.soft, self.hard, places, xp.ones_like(gamma))


class Shard(Rows):
    """Some rows of a task for TIDE.

    >>> eye = np.eye(3, dtype=np.float32)
    >>> Shard(TIDE(), eye, eye, 100.0).first_pass(None).counts
    array([1., 1., 1.])
    """

    STATE: ClassVar[tuple[str, ...]] = (*Rows.STATE, "gamma", "unknown")
    COLUMNS: ClassVar[tuple[str, ...]] = (*Rows.COLUMNS, "unknown")
    CHANGES: ClassVar[tuple[str, ...]] = ("first_pass", "step", "finish")

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.new = self._empty(*self.z.shape, dtype=self.z.dtype)  # (n, K)
        self.gamma, self.unknown = self._empty(len(self.f)), self._empty(len(self.f))
        self.gamma[:] = 1

    def first_pass(self, negatives: Floats | None) -> Predicted:  # type: ignore[override]
        """Make the zero-shot predictions, and score how unlike all of the classes each sample is (Eq. 15)."""
        total, k = None, len(self.text)
        names = self.text[:0] if negatives is None else like(negatives, self.f)  # (G, d)
        for rows in track(self.blocks, "zero-shot"):
            f = self.f[rows]  # (b, d)
            y, cosine, _ = self._zero_shot(rows)  # (b, K), (b, K)
            self.unknown[rows] = unlikeness(cosine, f, self.logit_scale, names)
            expected = y @ self.text  # (b, d)
            part = Predicted(
                len(y), _double(y.sum(axis=0)), _double(f.sum(axis=0)), _double((f * f).sum(axis=0)),
                _add_up(row_dots(y, cosine)), _add_up(row_dots(expected, expected)),
                _double(class_sums(self.labels[rows], f, k)), _double(class_counts(self.labels[rows], k)),
            )  # fmt: skip
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def compare(self, total: Floats, n: int, scale: Floats) -> Compared:
        """Compare the zero-shot predictions with those of all n samples and of the neighbours (Eqs. 1, 2)."""
        joined, all_of_them = None, like(total, self.f)
        degree = self.votes_of(namespace(self.f).ones_like(self.f[:, :1]))  # (n, 1)
        for rows in track(self.blocks, "classes"):

            def block(at: slice) -> tuple[Array, ...]:
                y = self._wide(at)  # (b, K)
                own = row_dots(y, y)  # (b,)
                by_class = agreement_by_class(y, self._votes(at), degree[at])  # (K,), (K,)
                return agreements(y, all_of_them, own, n), own, namespace(y).max(y, axis=1), *by_class

            *parts, near, most = zip(*in_threads(block, self._cut(rows)), strict=True)
            agree, own, confidence = (namespace(self.f).concat(column) for column in parts)
            sums = class_sums(self.labels[rows], self._in_metric(rows, like(scale, self.f)), len(self.text))
            square = float((_double(agree) ** 2).sum())
            part = Compared(
                _add_up(agree), square, _add_up(own), _add_up(confidence),
                sum(map(_double, near)), sum(map(_double, most)), _double(sums),
            )  # fmt: skip
            joined = part if joined is None else joined + part
        return joined  # type: ignore[return-value]

    def step(self, fixed: Fixed, classes: Classes) -> Assigned:
        """E-step with the classes given, Eq. 11, and the sums of Eq. 8 for the next M-step."""
        fixed, classes = fixed.like(self.f), classes.like(self.f)
        before, total = self.labels, None
        self.labels = namespace(before).empty_like(before)
        for rows in track(self.blocks, "iteration"):
            part = self._assign(rows, fixed, classes, before)
            total = part if total is None else total + part
        kept = self.keep and self.z is self.y
        self.z, self.new = self.new, self._empty(*self.z.shape, dtype=self.z.dtype) if kept else self.z
        return total  # type: ignore[return-value]

    def confidence(self, power: float) -> Confident:
        """Add up the confidences under a temperature, and their slopes (Eq. 14)."""

        def block(at: slice) -> Confident:
            log_z = log_ratios(self._wide(at), self.labels[at][:, None])  # (b, K)
            return Confident(*(_add_up(x) for x in confidences(exp_(power * log_z), log_z, power)))

        parts = [part for rows in self.blocks for part in in_threads(block, self._cut(rows))]
        return sum(parts[1:], parts[0])

    def finish(self, power: float) -> Counted:
        """Calibrate the assignments, and average the scores for the unknown with those of neighbours."""

        def block(at: slice) -> None:
            self.z[at] = self._narrow(softmax(power * log_ratios(self._wide(at), self.labels[at][:, None])))

        for rows in self.blocks:
            in_threads(block, self._cut(rows))
        self.unknown = with_neighbours(self.unknown, self.votes_of)
        return Counted(len(self.f))

    def predictions(self) -> dict[str, NDArray[Any]]:
        """Return the `COLUMNS`, (n,) each."""
        return {**super().predictions(), "unknown": to_numpy(self.unknown)}

    def _assign(self, rows: slice, fixed: Fixed, classes: Classes, before: Array) -> Assigned:
        """Make the assignments of some rows, and what they add up to."""
        xp, k, f = namespace(self.f), len(self.text), self._in_metric(rows, fixed.scale)  # (b, d)
        # products use all cores by themselves, what follows in threads does not
        cosine, at_anchor = self.f[rows] @ self.text.T, f @ fixed.anchor.T  # (b, K), (b, K)
        dots = f @ classes.sums.T  # (b, H)

        def block(at: slice) -> tuple[Any, ...]:
            part = slice(at.start - rows.start, at.stop - rows.start)
            z, gamma = self._wide(at), self.gamma[at]  # (b, K), (b,)
            log_y = log_softmax(self.logit_scale * cosine[part])  # (b, K)
            y = xp.exp(log_y)
            log_y -= fixed.bias_weight * bias_of(y, fixed.total, fixed.expected, fixed.presence)
            left_out = fixed.left_out * xp.ones_like(gamma)[:, None]  # (b, 1)
            model = Model(
                f[part], fixed.anchor, at_anchor[part], log_y, fixed.alpha, fixed.sharpness, left_out,
                fixed.vote_weight, fixed.smoothing, fixed.prior, NO_LABELS,
            )  # fmt: skip
            logits = log_y + fixed.vote_weight * self._votes(at)
            logits += class_pull(model, classes.counts, z, left_out)
            logits += fixed.sharpness * at_anchor[part]
            if len(classes.hard):
                means = classes.means(z, gamma, before[at])
                nearer = cosine_to_means(model, means, classes.some, left_out, dots[part])  # (b, H)
                logits[:, classes.some] += fixed.sharpness * (nearer - columns(at_anchor[part], classes.some))
            p, entropy, _ = assign(logits, None)  # (b, K), (b,)
            labels = xp.argmax(p, axis=1)
            self.new[at] = self._narrow(p)
            moved = float(xp.max(xp.abs(p - z)))
            return moved, labels, entropy, xp.take_along_axis(y, labels[:, None], axis=1)[:, 0]

        moved, *rest = zip(*in_threads(block, self._cut(rows)), strict=True)
        labels, entropy, right = (xp.concat(column) for column in rest)  # (b,) each
        self.labels[rows], self.gamma[rows] = labels, entropy_weights(entropy, k)
        z = self._floats(self.new[rows])  # (b, K) as stored, so that a sample is left out as it was counted
        sums, soft = weighted_sums(z, self.gamma[rows], f)  # (K, d), (K,)
        hard, counts = _double(class_counts(labels, k)), _double(z.sum(axis=0))
        changed = int((labels != before[rows]).sum())
        return Assigned(_double(sums), _double(soft), hard, counts, _add_up(right), changed, max(moved))

    def _in_metric(self, rows: slice, scale: Array) -> Array:
        """Return some rows in the metric, of unit length, (b, d)."""
        f = self.f[rows] / scale
        f /= row_norms(f)[:, None]
        return f

    def _narrow(self, p: Array) -> Array:
        """Return the fourth root of probabilities where they are stored in 16 bits."""
        xp = namespace(p)
        return p if self.z.dtype == xp.float32 else super()._narrow(xp.sqrt(xp.sqrt(p)))

    def _floats(self, stored: Array) -> Array:
        """Return stored assignments in float32."""
        p = super()._floats(stored)
        return p if stored.dtype == namespace(stored).float32 else (p * p) ** 2


NO_LABELS = Labels(None, None, None, None, None)  # none is known on shards


def _double(x: Array) -> Doubles:
    return to_numpy(x).astype(np.float64)


def _add_up(x: Array) -> float:
    """Return the sum of one number per sample, in float64."""
    return float(_double(x).sum())


@dataclass
class Solution:
    """What `solve` knows at the end; the assignments are in the shards."""

    converged: bool
    steps: int
    beta: Floats
    crowd: Crowd
    alpha: float
    sharpness: float


def plan(method: TIDE) -> Plan:
    """First pass, comparison, an E-step before and after each M-step, the calibration.

    >>> plan(TIDE())
    Plan(calls=27, steps=11)
    """
    return Plan(method.iterations + NEWTON + 5, method.iterations + 1)


def solve(
    method: TIDE,
    run: Run,
    text: Floats,
    logit_scale: float,
    class_prior: Floats | None = None,
    negatives: Floats | None = None,
) -> Solution:
    """Alternate E-steps on shards and M-steps here. `run(name, *arguments)` calls a method of every shard and adds up.

    >>> eye = np.eye(3, dtype=np.float32)
    >>> shard = Shard(TIDE(), eye, eye, 100.0)
    >>> solve(TIDE(), lambda name, *given: getattr(shard, name)(*given), eye, 100.0).converged
    True
    """
    k, first = len(text), run("first_pass", negatives)
    n = first.n
    scale = metric_of(first.square / n, Groups.of_sums(first.sums, first.counts, n), n).astype(text.dtype)  # (d,)
    found = run("compare", first.total.astype(text.dtype), n, scale)
    shares = None if class_prior is None else given_shares(class_prior)  # (K,)
    crowd = crowd_of_sums(found, n, k, method.neighbours) if shares is None else Crowd.of_shares(shares)
    there = presence(found.near, found.most, first.total)  # (K,)
    w = crowd.density
    anchor = anchors_of(text, first.total / n, first.centre / n, first.along / n, first.expected / n)  # (K, d)
    anchor = unit_rows(anchor / scale)
    alpha = anchor_weight_of(anchor, Groups.of_sums(found.sums, first.counts, n), n)
    fixed = Fixed(
        scale,
        anchor.astype(text.dtype),
        first.total.astype(text.dtype),
        (n - 1) / k if shares is None else (n - 1) * shares,
        np.ones(k, text.dtype) if shares is not None else there.astype(text.dtype),
        bias_weight(crowd.pseudo_count) if shares is None else 1.0,
        alpha,
        method.sharpness * sharpening(w, n / k, alpha),
        1 - w * w,
        2 - w,
        crowd.smoothing,
        None if shares is None else np.log(shares + EPS),
    )
    none = np.zeros(0, text.dtype)  # in the first E-step all classes are at their anchors, and no sample is left out
    step: Assigned = run("step", fixed._replace(left_out=0.0), Classes(none, text[:0], none, none, fixed.total))
    steps, moves = 0, True
    while moves and steps < method.iterations:
        step = run("step", fixed, Classes.of(step, text.dtype))
        steps, moves = steps + 1, step.changed > 0 or step.moved >= STILL

    def means_at(power: float) -> tuple[float, float]:
        sums = run("confidence", power)
        return sums.confidence / n, sums.slope / n

    run("finish", calibration(expected_right(step.right / n, w, n), means_at))
    beta = (step.hard / (step.hard + alpha)).astype(text.dtype)  # (K,)
    return Solution(step.changed == 0, steps, beta, crowd, alpha, fixed.sharpness)


def crowd_of_sums(found: Compared, n: int, k: int, m: int) -> Crowd:
    """Return how concentrated the classes are (Eqs. 1, 2, 3) from sums over all n samples.

    >>> sums = Compared(50.0, 25.0, 100.0, 100.0, np.ones(2), np.ones(2), np.zeros((2, 1)))
    >>> crowd_of_sums(sums, 100, 2, 3).density > 0.99
    True
    """
    mean = found.agree / n
    deviation = math.sqrt(max(found.agree_square / n - mean * mean, 0.0))
    return crowd_of(mean, deviation, found.own / n, found.confidence / n, found.near.sum(), found.most.sum(), n, k, m)
