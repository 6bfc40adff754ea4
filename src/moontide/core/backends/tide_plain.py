"""The samples of TIDE for any array: in memory, in blocks, on shards."""

from __future__ import annotations

from typing import Any, ClassVar

from moontide.core import tide as eq
from moontide.core.arrays import Array, class_counts, class_sums, columns, is_torch_array, like, namespace, row_dots
from moontide.core.backends.plain import run as run
from moontide.core.driver import Run
from moontide.core.ple import entropy_weights, weighted_sums, zero_shot
from moontide.core.rows import Rows
from moontide.core.simplex import softmax_log_sum
from moontide.core.sums import Counted
from moontide.core.threads import in_threads
from moontide.core.tide import ALL, Assigned, Compared, Confident, Labels, Predicted
from moontide.core.tide import occupancy_of as occupancy_of


class TIDERows(Rows):
    """The samples of TIDE.

    In memory, what E-steps need of zero-shot predictions and cosines is kept; in blocks every step computes it again.
    In 16 bits, the fourth root of an assignment is stored: it is exact to 3e-5 near 1 (float16: 1e-3) and keeps
    what is far below 1 / 65535, of which the calibration raises powers. `known` labels are for samples in memory.
    """

    STATE: ClassVar[tuple[str, ...]] = (*Rows.STATE, "gamma", "unknown")
    COLUMNS: ClassVar[tuple[str, ...]] = (*Rows.COLUMNS, "unknown")
    CHANGES: ClassVar[tuple[str, ...]] = ("first", "step", "finish")

    anchor: Any = None  # (K, d)
    # in memory only
    log_sum: Any = None  # (n,) the log of what y was divided by
    in_metric: Any = None  # (n, d)
    at_anchor: Any = None  # (n, K) cosines to the anchors
    log_y: Any = None  # (n, K) less the bias of the text
    log_z: Any = None  # (n, K) for the calibration

    def __init__(self, *given: Any, known: Labels | None = None, cosine: Array | None = None, **options: Any) -> None:
        super().__init__(*given, **options)
        self.known: Any = known
        self.cosine: Any = cosine  # (n, K)
        self.unknown, ones = self._empty(len(self.f)), namespace(self.f).ones_like(self.f[:, 0])
        self.gamma, self.trusted = ones, ones  # (n,) entropy weights, and what labels count
        self.free = 1 * ones  # (n,) 1 where no label is known
        if known is not None:
            self.free[known.there] = 0

    def first(self, negatives: Array | None) -> Predicted:  # type: ignore[override]
        """Make the zero-shot predictions, and score how unlike all of the classes each sample is (Eq. 15)."""

        def block(rows: slice) -> Predicted:
            y, cosine, log_sum = self._zero_shot(rows)  # (b, K), (b, K), (b,)
            self.unknown[rows] = eq.unlikeness(cosine)
            if negatives is not None and len(negatives):
                self.unknown[rows] += eq.negative_odds(self.f[rows], like(negatives, y), log_sum, self.logit_scale)
            if self.in_memory:
                self.cosine, self.log_sum = cosine, log_sum
            if self.known is not None:
                self.labels[self.known.there] = self.known.known
            sure = namespace(y).take_along_axis(y, self.labels[rows][:, None], axis=1)[:, 0]  # (b,)
            return Predicted.of(self.f[rows], y, self.labels[rows], sure)

        return self._add_up(block, "zero-shot")  # type: ignore[no-any-return]

    def compare(self, total: Array, n: int, scale: Array) -> Compared:
        """Compare the zero-shot predictions with those of all n samples and of the neighbours (Eqs. 1, 2)."""
        xp, total, scale = namespace(self.f), like(total, self.f), like(scale, self.f)
        degree = self.votes_of(xp.ones_like(self.f[:, :1]))  # (n, 1)

        def part(at: slice) -> tuple[Any, ...]:
            y = self._wide(at)  # (b, K)
            own = row_dots(y, y)  # (b,)
            agree = eq.agreements(y, total, own, n)  # (b,)
            even, even_own = eq.evened(y, total)  # (K,), (b,)
            numbers = agree, xp.astype(agree, xp.float64) ** 2, own, xp.max(y, axis=1), even_own
            return *map(_total, numbers), *eq.agreement_by_class(y, self._votes(at), degree[at]), even

        def block(rows: slice) -> Compared:
            numbers = map(sum, zip(*in_threads(part, self._cut(rows)), strict=True))
            f, lengths = self._scaled(rows, scale)
            found: Any = *numbers, _total(lengths), class_sums(self.labels[rows], f, len(self.text))
            return Compared(*found)

        return self._add_up(block, "classes")  # type: ignore[no-any-return]

    def _scaled(self, rows: slice, scale: Array) -> tuple[Array, Array]:
        """Return some rows in the metric, of unit length, (b, d), and the lengths they had, (b,)."""
        f = self.f[rows] / scale
        lengths = row_dots(f, f) ** 0.5  # (b,)
        f /= lengths[:, None]
        return f, lengths

    def step(self, fixed: eq.Fixed, classes: Assigned) -> Assigned:
        """E-step with the classes given, Eq. 11, and the sums of Eq. 8 for the next M-step."""
        if not self.in_memory:
            fixed, classes = fixed.like(self.f), classes.like(self.f)
        elif self.at_anchor is None:
            self._prepare(fixed)
        text, trusted = 1.0, self.trusted
        if self.known is not None and len(self.known.there) and len(classes.hard):
            text, trusted = self._learn(fixed, classes)
        new = self._room()
        # copies, as the arrays at the start stay with the zero-shot predictions
        self.labels, self.gamma = 1 * self.labels, 1 * self.gamma
        given = fixed, classes, text, trusted, new
        total: Assigned = self._add_up(lambda rows: self._assign(rows, *given), "iteration")
        self.trusted = trusted
        self._replace(new)
        return total

    def _prepare(self, fixed: eq.Fixed) -> None:
        """Keep what all E-steps need of samples in memory."""
        self.in_metric, self.at_anchor, self.log_y, _ = self._prepared(self.blocks[0], fixed)
        self.cosine = None
        if self.known is not None:
            self.z = 1 * self.z
            self.known.clamp(self.z, self.labels)

    def _prepared(self, rows: slice, fixed: eq.Fixed) -> tuple[Array, ...]:
        """Return some rows in the metric, their cosines to the anchors, log y less the bias of the text, and y."""
        if self.anchor is None:
            self.anchor = eq.anchor_rows(self.text, fixed.slope, fixed.offset, fixed.scale)
        f, _ = self._scaled(rows, fixed.scale)  # (b, d)
        # products use all cores by themselves, what follows in threads does not
        at_anchor = f @ self.anchor.T  # (b, K)
        cosine = self.cosine if self.in_memory else self.f[rows] @ self.text.T  # (b, K)

        def part(at: slice) -> tuple[Array, Array]:
            near = cosine[at.start - rows.start : at.stop - rows.start]  # (b, K)
            y, log_sum = (self.y[at], self.log_sum[at]) if self.in_memory else zero_shot(near, self.logit_scale)
            bias = eq.text_bias(y, fixed.total, fixed.expected, fixed.presence)
            return self.logit_scale * near - log_sum[:, None] - fixed.bias_weight * bias, y

        return f, at_anchor, *self._in_parts(part, rows)

    def _assign(
        self, rows: slice, fixed: eq.Fixed, classes: Assigned, text: float, trusted: Array, new: Array
    ) -> Assigned:
        """Write the assignments of some rows to `new`, with the weight of the `text`, and add up what follows."""
        xp, k = namespace(self.f), len(self.text)
        made = (self.in_metric, self.at_anchor, self.log_y, self.y) if self.in_memory else self._prepared(rows, fixed)
        f, at_anchor, log_y, y = made  # (b, d), (b, K), (b, K), (b, K)
        dots = f @ classes.sums.T  # (b, H)

        def part(at: slice) -> tuple[Array, ...]:
            here, z = slice(at.start - rows.start, at.stop - rows.start), self._wide(at)  # (b, K)
            left_out, near = fixed.left_out * self.free[at], at_anchor[here]  # (b,), (b, K)
            logits = self._votes(at)  # (b, K)
            logits *= fixed.vote_weight
            logits += log_y[here]
            logits += eq.class_pull(fixed, classes.counts, z, left_out[:, None])
            logits *= text
            logits += fixed.sharpness * near
            if len(classes.hard):
                near = columns(near, classes.some)  # (b, H)
                nearer = self._cosines(at, fixed, classes, left_out, dots[here], near) - near
                logits[:, classes.some] += fixed.sharpness * nearer
            p, entropy = eq.assign(logits)  # (b, K), (b,)
            own = xp.argmax(p, axis=1)
            new[at] = self._narrow(p)
            right = xp.take_along_axis(y[here], own[:, None], axis=1)[:, 0]
            return own, entropy, right, xp.sum(xp.abs(p - z) >= eq.STILL, axis=1)

        own, entropy, right, moved = self._in_parts(part, rows)
        if self.known is not None:
            self.known.clamp(new, own)
        free, trusted, changed = self.free[rows], trusted[rows], int((own != self.labels[rows]).sum())
        gamma = entropy_weights(entropy, k) * free + (1 - free)  # (b,)
        self.labels[rows], self.gamma[rows] = own, gamma
        z = self._floats(new[rows])  # (b, K) as stored, so that a sample is left out as it was counted
        hard = like(class_counts(own, k, trusted), gamma)  # (K,)
        given = hard if self.known is None else hard + self.known.counts
        some = ALL if not self.in_memory or is_torch_array(z) else xp.nonzero(given)[0]  # (H,)
        return Assigned(
            *weighted_sums(columns(z, some), gamma * trusted, f), hard[some], z.sum(0),
            like(class_counts(own, k), gamma), _total(right * free),
            len(gamma) if self.known is None else int(free.sum()), changed, _total(moved * free), some,
        )  # fmt: skip

    def _cosines(self, at: Any, fixed: eq.Fixed, classes: Assigned, left_out: Array, dots: Array, near: Array) -> Array:
        """Return the cosines of some samples to class means without their share `left_out` (b,) in these, (b, H)."""
        xp, z, labels, own = namespace(self.f), self._wide(at), self.labels[at], left_out * self.trusted[at]
        mine = columns(z, classes.some) * (own * self.gamma[at])[:, None]  # (b, H)
        column = labels if isinstance(classes.some, slice) else xp.searchsorted(classes.some, labels)  # (b,)
        each, hard = xp.arange(len(z), device=z.device), xp.zeros_like(mine) + classes.hard  # (b,), (b, H)
        hard[each, column] = (hard[each, column] - own).clip(min=0)
        along = row_dots(classes.sums, self.anchor[classes.some, ...])  # (H,)
        return eq.cosine_to_means(dots, near, mine, hard, classes, along, fixed.alpha)

    def _learn(self, fixed: eq.Fixed, classes: Assigned) -> tuple[float, Array]:
        """Return the weight of the text and what labels count, (n,), from known ones (Eqs. 12, 13).

        The model predicts each labelled sample without its own part in class means and counts.
        """
        xp, some, (there, known, *_) = namespace(self.f), classes.some, self.known  # (n',), (n',)
        near, whole = self.at_anchor[there, :], 1 - self.free[there]
        cosine, dots = 1 * near, self.in_metric[there, :] @ classes.sums.T  # (n', K), (n', H)
        cosine[:, some] = self._cosines(there, fixed, classes, whole, dots, columns(near, some))
        base = fixed.vote_weight * self._votes(self.blocks[0])[there, :] + self.log_y[there, :]
        base = base + eq.class_pull(fixed, classes.counts, self.z[there, :], 1.0)
        text = eq.trust(base, cosine, known, fixed.sharpness)
        found = xp.argmax(text * base + fixed.sharpness * cosine, axis=1)
        reliable = eq.reliability(int(xp.sum(found == known)), len(known), len(self.f) / len(self.text))
        return text, reliable * self.free + (1 - self.free)

    def confidence(self, power: float) -> Confident:
        """Add up the confidences under a temperature, and their slopes (Eq. 14), of samples with no known label."""

        def block(rows: slice) -> Confident:
            found = self._in_parts(lambda at: eq.confidences(self._log_ratios(at), power), rows)  # (b,), (b,)
            return Confident(*(_total(x * self.free[rows]) for x in found))

        return self._add_up(block, "confidence")  # type: ignore[no-any-return]

    def _log_ratios(self, at: slice) -> Array:
        """Return log(z_ik / z_il) of some samples with the labels l, (b, K); in memory they are made once."""
        if not self.in_memory:
            return eq.log_ratios(self._wide(at), self.labels[at][:, None])
        if self.log_z is None:
            self.log_z = eq.log_ratios(self.z, self.labels[:, None])
        return self.log_z[at]

    def finish(self, power: float | None) -> Counted:
        """Calibrate the assignments by a temperature, if any, and average the unknown scores with the neighbours'."""

        def part(at: slice) -> tuple[()]:
            self.z[at] = self._narrow(softmax_log_sum(power * self._log_ratios(at))[0])
            return ()

        for rows in self.blocks if power is not None else ():
            self._in_parts(part, rows)
        if self.known is not None:
            self.known.clamp(self.z, self.labels)
        self.unknown = eq.with_neighbours(self.unknown, self.votes_of)
        return Counted(len(self.f))

    def _narrow(self, p: Array) -> Array:
        return p if self.z.dtype == self.f.dtype else super()._narrow((p**0.5) ** 0.5)

    def _floats(self, stored: Array) -> Array:
        p = super()._floats(stored)
        return p if stored.dtype == self.f.dtype else (p * p) ** 2


def _total(x: Array) -> Any:
    """Return the sum of one number per sample, in float64."""
    return eq.number(x.sum(dtype=namespace(x).float64))


def power(run: Run, step: Assigned, density: float, n: int) -> float:
    """Eq. 14: the power that assignments are raised to, so that they are as sure as is expected of n labels."""
    target = eq.expected_right(step.right / step.free, density, n)
    return eq.calibration(target, lambda power: vars(run("confidence", power)).values(), step.free)
