"""The samples of TIDE for any array: in memory, in blocks, on shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from moontide.core import tide as eq
from moontide.core.arrays import (
    Array,
    class_counts,
    class_sums,
    clip,
    columns,
    exp_,
    is_torch_array,
    like,
    namespace,
    row_dots,
    row_norms,
    to_numpy,
)
from moontide.core.ple import weighted_sums
from moontide.core.rows import Rows
from moontide.core.simplex import log_softmax, softmax_log_sum
from moontide.core.sums import Counted
from moontide.core.threads import in_threads
from moontide.core.tide import ALL, NO_LABELS, Assigned, Classes, Compared, Confident, Labels, Model, Predicted

IDLE = 0.01  # a class is left alone whose largest z_ik is below this share of n_k + a*, and of 0.1
NOTHING = -1e30  # the logarithm of a sum of no classes


class TIDERows(Rows):
    """The samples of TIDE.

    In memory, what an E-step needs of zero-shot predictions and cosines is kept; in blocks it is made again in every
    step, as keeping it would take two N x K arrays of 32 bits. In 16 bits, the fourth root of an assignment is stored:
    it is exact to 3e-5 near 1 (float16: 1e-3) and keeps what is far below 1 / 65535, of which the calibration raises
    powers. `known` labels are for samples in memory.

    >>> import numpy as np
    >>> eye = np.eye(3, dtype=np.float32)
    >>> from moontide import TIDE
    >>> TIDERows(TIDE(), eye, eye, 100.0).first(None).counts
    array([1., 1., 1.])
    """

    STATE: ClassVar[tuple[str, ...]] = (*Rows.STATE, "gamma", "unknown")
    COLUMNS: ClassVar[tuple[str, ...]] = (*Rows.COLUMNS, "unknown")
    CHANGES: ClassVar[tuple[str, ...]] = ("first", "step", "finish")

    def __init__(self, *given: Any, known: Labels = NO_LABELS, **options: Any) -> None:
        super().__init__(*given, **options)
        self.gamma, self.unknown = namespace(self.f).ones_like(self.f[:, 0]), self._empty(len(self.f))
        self.known, self.trusted = known, self.gamma
        self.new: Any = None  # room for the next z
        self.cosine: Any = None  # (n, K), these five in memory only
        self.log_y: Any = None  # (n, K)
        self.at_anchor: Any = None  # (n, K)
        self.in_metric: Any = None  # (n, d)
        self.log_z: Any = None  # (n, K) for the calibration

    def first(self, negatives: Array | None) -> Predicted:  # type: ignore[override]
        """Make the zero-shot predictions, and score how unlike all of the classes each sample is (Eq. 15)."""
        names = self.text[:0] if negatives is None else like(negatives, self.f)  # (G, d)

        def block(rows: slice) -> Predicted:
            f = self.f[rows]  # (b, d)
            y, cosine, _ = self._zero_shot(rows)  # (b, K), (b, K)
            self.unknown[rows] = eq.unlikeness(cosine, f, self.logit_scale, names)
            some, places, _ = self._labelled(self.labels[rows])
            return Predicted.of(f, y, self.labels[rows], some, places)

        found: Predicted = self._add_up(block, "zero-shot")
        return found

    def _zero_shot(self, rows: slice) -> tuple[Array, Array, Array]:
        if not self.alone:
            return super()._zero_shot(rows)
        xp = namespace(self.f)
        self.cosine = xp.matmul(self.f, self.text.T, out=self._spare())  # (n, K)
        self.log_y = log_softmax(self.logit_scale * self.cosine)  # (n, K)
        self.y = xp.exp(self.log_y, out=self.z)
        self.z = self.known.clamp(self.y)
        self.labels = xp.argmax(self.z, axis=1)
        return self.y, self.cosine, self.labels

    def _labelled(self, labels: Array) -> tuple[Any, Array, int]:
        """Return the classes with labels (H,), the labels as places among them, and H; on shards and GPUs all K."""
        if not self.alone or is_torch_array(self.f):
            return ALL, labels, len(self.text)
        some, places = np.unique(labels, return_inverse=True)  # the array API's takes several times as long
        return some, places, len(some)

    def compare(self, total: Array, n: int, scale: Array) -> Compared:
        """Compare the zero-shot predictions with those of all n samples and of the neighbours (Eqs. 1, 2)."""
        xp, total, scale = namespace(self.f), like(total, self.f), like(scale, self.f)
        degree = self.votes_of(xp.ones_like(self.f[:, :1]))  # (n, 1)

        def part(at: slice) -> tuple[Array, ...]:
            y = self.y[at] if self.alone else self._wide(at)  # (b, K)
            votes = self.votes_of.rows(at)(self.y) if self.alone else self._votes(at)  # (b, K)
            own = row_dots(y, y)  # (b,)
            by_class = eq.agreement_by_class(y, votes, degree[at])  # (K,), (K,)
            even, even_own = eq.evened(y, total)  # (K,), (b,)
            return eq.agreements(y, total, own, n), own, xp.max(y, axis=1), even_own, *by_class, even

        def block(rows: slice) -> Compared:
            *parts, near, most, even = zip(*in_threads(part, self._cut(rows)), strict=True)
            agree, own, confidence, even_own = (xp.concat(column) for column in parts)
            f, lengths = self._scaled(rows, scale)
            _, places, count = self._labelled(self.labels[rows])
            if self.alone:
                self.in_metric = f
            square = _total(xp.astype(agree, xp.float64) ** 2)
            return Compared(
                _total(agree), square, _total(own), _total(confidence), _total(lengths), sum(near[1:], near[0]),
                sum(most[1:], most[0]), sum(even[1:], even[0]), _total(even_own), class_sums(places, f, count),
            )  # fmt: skip

        found: Compared = self._add_up(block, "classes")
        return found

    def _scaled(self, rows: slice, scale: Array) -> tuple[Array, Array]:
        """Return some rows in the metric, of unit length, (b, d), and the lengths they had, (b,)."""
        f = self.f[rows] / scale
        lengths = row_norms(f)  # (b,)
        f /= lengths[:, None]
        return f, lengths

    def step(self, fixed: eq.Fixed, classes: Classes) -> Assigned:
        """E-step with the classes given, Eq. 11, and the sums of Eq. 8 for the next M-step."""
        fixed, classes = (fixed, classes) if self.alone else (fixed.like(self.f), classes.like(self.f))
        if self.alone and self.at_anchor is None:
            self._keep(fixed)
        text = 1.0
        if self.known.known is not None and len(classes.hard):
            text = self._learn(fixed, classes)
        before, weight, trusted = self.labels, self.gamma, self.trusted
        if self.new is None or self.new.shape != self.z.shape:
            self.new = self._empty(*self.z.shape, dtype=self.z.dtype)
        labels, gamma = namespace(before).empty_like(before), namespace(weight).empty_like(weight)

        def block(rows: slice) -> Assigned:
            return self._assign(rows, fixed, classes, text, (before, weight, trusted), labels, gamma)

        total: Assigned = self._add_up(block, "iteration")
        kept = self.keep and self.z is self.y
        self.z, self.new = self.new, None if kept else self.z
        self.labels, self.gamma = labels, gamma
        return total

    def _keep(self, fixed: eq.Fixed) -> None:
        """Keep what all E-steps need of samples in memory."""
        xp = namespace(self.f)
        self.at_anchor = xp.matmul(self.in_metric, fixed.anchor.T, out=self._spare())  # (n, K)

        def part(at: slice) -> tuple[()]:
            bias = eq.text_bias(self.y[at], fixed.total, fixed.expected, fixed.presence)
            bias *= fixed.bias_weight
            self.log_y[at] -= bias
            return ()

        self._in_parts(part, self.blocks[0])

    def _models(self, rows: slice, fixed: eq.Fixed) -> Callable[[slice], tuple[Model, Array]]:
        """Return the function that gives the model of a part of some rows, and its zero-shot predictions (b, K)."""
        xp = namespace(self.f)
        free = xp.ones_like(self.gamma) if self.known.mask is None else like(~self.known.mask[:, 0], self.f)
        anchor = fixed.anchor
        given = {key: getattr(fixed, key) for key in ("alpha", "sharpness", "vote_weight", "smoothing", "prior")}
        if self.alone:

            def kept(at: slice) -> tuple[Model, Array]:
                left_out = fixed.left_out * free[at][:, None]
                model = Model(
                    self.in_metric[at], anchor, self.at_anchor[at], self.log_y[at], left_out=left_out, **given
                )
                return model, self.y[at]

            return kept
        f, _ = self._scaled(rows, fixed.scale)  # (b, d)
        # products use all cores by themselves, what follows in threads does not
        cosine, at_anchor = self.f[rows] @ self.text.T, f @ fixed.anchor.T  # (b, K), (b, K)

        def made(at: slice) -> tuple[Model, Array]:
            here = slice(at.start - rows.start, at.stop - rows.start)
            log_y = log_softmax(self.logit_scale * cosine[here])  # (b, K)
            y = xp.exp(log_y)
            log_y -= fixed.bias_weight * eq.text_bias(y, fixed.total, fixed.expected, fixed.presence)
            left_out = fixed.left_out * free[at][:, None]
            return Model(f[here], anchor, at_anchor[here], log_y, left_out=left_out, **given), y

        return made

    def _assign(
        self, rows: slice, fixed: eq.Fixed, classes: Classes, text: float, old: tuple[Array, ...], labels: Array,
        gammas: Array,
    ) -> Assigned:  # fmt: skip
        """Make the assignments of some rows, and what they add up to."""
        xp, k, model_of, (before, weight, trusted) = namespace(self.f), len(self.text), self._models(rows, fixed), old
        f = self.in_metric if self.alone else self._scaled(rows, fixed.scale)[0]  # (b, d)
        dots, among = f @ classes.sums.T, classes.some  # (b, H), (H,)

        def part(at: slice) -> tuple[Array, ...]:
            z, (model, y) = self._wide(at), model_of(at)  # (b, K), (b, K)
            logits = self._votes(at)  # (b, K)
            logits *= fixed.vote_weight
            logits += model.log_y
            logits += eq.class_pull(model, classes.counts, z, model.left_out)
            if text != 1:
                logits *= text
            logits += fixed.sharpness * model.at_anchor
            if len(classes.hard):
                means = classes.means(z, weight[at], before[at], trusted[at], among)
                here = slice(at.start - rows.start, at.stop - rows.start)
                nearer = eq.cosine_to_means(model, means, among, model.left_out, dots[here])  # (b, H)
                nearer -= columns(model.at_anchor, among)
                nearer *= fixed.sharpness
                logits[:, among] += nearer
            p, entropy = eq.assign(logits)  # (b, K), (b,)
            if self.known.mask is not None:
                p = xp.where(self.known.mask[at], self.known.hot[at], p)
            own = xp.argmax(p, axis=1)
            self.new[at] = self._narrow(p)
            right = xp.take_along_axis(y, own[:, None], axis=1)[:, 0]
            return own, entropy, right, xp.max(xp.abs(p - z), axis=1)

        own, entropy, right, moved = self._in_parts(part, rows)
        labels[rows] = own
        gamma = clip(1 - entropy / math.log(max(k, 2)), 0, 1)  # (b,)
        free, known_not = xp.ones_like(gamma), len(gamma)
        if self.known.mask is not None:
            free = like(~self.known.mask[:, 0], gamma)
            known_not = int(free.sum())
            gamma = gamma * free + (1 - free)
            self.trusted = self.reliable * free + (1 - free)
        gammas[rows] = gamma
        z = self._floats(self.new[rows])  # (b, K) as stored, so that a sample is left out as it was counted
        hard = like(class_counts(own, k, self.trusted[rows]), gamma)  # (K,)
        given = hard if self.known.counts is None else hard + self.known.counts
        some = ALL if not self.alone or is_torch_array(z) else xp.nonzero(given)[0]  # (H,)
        sums, soft = weighted_sums(columns(z, some), gamma * self.trusted[rows], f)  # (H, d), (H,)
        return Assigned(
            sums, soft, hard[some], z.sum(0), like(class_counts(own, k), gamma), _total(right * free), known_not,
            int((own != before[rows]).sum()), eq.number(xp.max(moved)), some,
        )  # fmt: skip

    reliable = 1.0  # what a label of the model counts, against a known one

    def _learn(self, fixed: eq.Fixed, classes: Classes) -> float:
        """Return the weight of the text, and keep the reliability of other labels, from known ones (Eqs. 12, 13)."""
        xp, every = namespace(self.f), slice(0, len(self.f))
        there = xp.nonzero(self.known.known >= 0)[0]  # (n',)
        model, _ = self._models(every, fixed)(every)
        model = model._replace(
            f=model.f[there, :], at_anchor=model.at_anchor[there, :], log_y=model.log_y[there, :],
            left_out=xp.ones_like(model.left_out[there, :]),
        )  # fmt: skip
        z, votes = self.z[there, :], self._votes(every)[there, :]  # (n', K)
        given = self.gamma[there], self.labels[there], self.trusted[there]
        means = classes.means(z, *given, classes.some)
        base = fixed.vote_weight * votes + model.log_y  # (n', K)
        text, self.reliable = eq.learn_from_known(
            model, self.known.known[there], means, classes.some, base, classes.counts, z, fixed.per_class
        )
        return text

    def confidence(self, power: float) -> Confident:
        """Add up the confidences under a temperature, and their slopes (Eq. 14), of samples with no known label."""
        if self.alone and self.log_z is None:
            self.log_z = eq.log_ratios(self.z, self.labels[:, None])  # (n, K)

        def part(at: slice) -> tuple[Array, ...]:
            log_z = self.log_z[at] if self.alone else eq.log_ratios(self._wide(at), self.labels[at][:, None])  # (b, K)
            return eq.confidences(exp_(power * log_z), log_z, power)

        def block(rows: slice) -> Confident:
            free = 1.0 if self.known.mask is None else like(~self.known.mask[:, 0], self.f)
            return Confident(*(_total(x * free) for x in self._in_parts(part, rows)))

        found: Confident = self._add_up(block, "confidence")
        return found

    def finish(self, power: float | None) -> Counted:
        """Calibrate the assignments by a temperature, and average the scores for the unknown with those of neighbours.

        None leaves the assignments, where all labels are known.
        """

        def part(at: slice) -> tuple[()]:
            log_z = self.log_z[at] if self.alone else eq.log_ratios(self._wide(at), self.labels[at][:, None])
            self.z[at] = self._narrow(softmax_log_sum(power * log_z)[0])
            return ()

        for rows in self.blocks if power is not None else ():
            self._in_parts(part, rows)
        self.z = self.known.clamp(self.z)
        self.unknown = eq.with_neighbours(self.unknown, self.votes_of)
        return Counted(len(self.f))

    def predictions(self) -> dict[str, Any]:
        """Return the `COLUMNS`, (n,) each."""
        return {**super().predictions(), "unknown": to_numpy(self.unknown)}

    def _narrow(self, p: Array) -> Array:
        """Return the fourth root of probabilities where they are stored in 16 bits."""
        xp = namespace(p)
        return p if self.z.dtype == self.f.dtype else super()._narrow(xp.sqrt(xp.sqrt(p)))

    def _floats(self, stored: Array) -> Array:
        """Return stored assignments as they are computed with."""
        p = super()._floats(stored)
        return p if stored.dtype == self.f.dtype else (p * p) ** 2


def _total(x: Array) -> Any:
    """Return the sum of one number per sample, in float64."""
    xp = namespace(x)
    return eq.number(xp.sum(x, dtype=xp.float64))


def run(solve: Callable[[Array, Array], tuple[Any, ...]], key: Any, f: Array, text: Array) -> tuple[Any, ...]:
    """Return solve(f, text)."""
    return solve(f, text)
