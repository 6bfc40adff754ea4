"""TIDE on a CPU in float32, by compiled loops: samples in memory whose labels are not known.

- All operations of a row are done while it is in the cache.
- Class means and anchors are not made: products of samples with class sums, or in a small batch of samples with each
  other, and of samples with the text give all that an E-step needs of them.
- After the second E-step, the classes to which almost no sample is assigned are idle (`Idle`): their part in votes
  and leave-one-out is neglected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.core import tide as eq
from moontide.core.backends import _numba, loops, tide_plain
from moontide.core.graph import Graph
from moontide.core.ple import log_classes
from moontide.core.sums import Counted
from moontide.core.threads import in_threads, row_blocks
from moontide.core.tide import Assigned, Compared, Confident, Predicted

Floats = NDArray[np.float32]
IDLE = 0.03  # a class is idle if its largest z_ik is below this share of n_k + a*, and of 0.1
FEW = 256  # with so many classes or fewer, none is idle
one = np.float32
run, occupancy_of, power = tide_plain.run, tide_plain.occupancy_of, tide_plain.power


class Idle(NamedTuple):
    """The R idle classes, with logits c_ik + log q_k, q_k = n_k + a*."""

    classes: NDArray[np.int64]  # (R,) numbers
    shares: Floats  # (N, R) e_ik = exp(c_ik)
    logs: Floats  # (N, R) e_ik c_ik


class TIDERows(tide_plain.TIDERows):
    """The samples of TIDE, all in memory."""

    gram: Any = None  # (N, N) f_i . f_j in the metric, where N <= d
    idle: Idle | None = None
    e_steps = 0

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.room: list[Floats] = []  # that is free after `_prepare`
        if self.cosine is None:
            self.cosine = np.matmul(self.f, self.text.T, out=self._spare())
            self.room = [self.cosine]
        self.present = np.arange(len(self.text))  # (L,) classes of the columns of z
        self.other = np.zeros((2, len(self.f)), one)  # sums of q = exp(logit) and q log q over the idle classes

    def _neighbours(self) -> Graph:
        return loops.nearest(self.f, self.method.neighbours)[1] or super()._neighbours()

    def _in_blocks(self, loop: Callable[..., Any], *given: Any) -> Any:
        """Call a loop for the rows, in threads, and return what it returns of each block, added up."""
        blocks = row_blocks(len(self.f), self.z.size)
        if len(blocks) == 1:
            return loop(0, len(self.f), *given)
        found = in_threads(lambda at: loop(at.start, at.stop, *given), blocks)
        return [sum(x[1:], x[0]) for x in zip(*found, strict=True)] if found[0] is not None else None

    def first(self, negatives: Any) -> Predicted:  # type: ignore[override]
        """Make the zero-shot predictions, and score how unlike all of the classes each sample is (Eq. 15)."""
        f, n = self.f, len(self.f)
        self.labels, (self.log_sum, self.sure, self.unknown) = np.empty(n, np.int64), np.empty((3, n), one)
        given = self.cosine, one(self.logit_scale), self.y, self.labels, self.log_sum, self.sure, self.unknown
        total, _, _, self.own = self._in_blocks(_numba.zero_shot, *given)
        if negatives is not None and len(negatives):
            self.unknown += eq.negative_odds(f, negatives, self.log_sum, self.logit_scale)
        some = np.nonzero(np.bincount(self.labels))[0]  # (H,)
        self.group = np.searchsorted(some, self.labels)  # (n,) position of the label in `some`
        weights = self.gamma, self.sure, self.sure**2
        order = np.argsort(self.group, kind="stable")
        self.members = np.searchsorted(self.group[order], np.arange(len(some) + 1)), order
        self.counts, sure, squares = (np.bincount(self.group, by).astype(one) for by in weights)  # (H,) each
        sums, sure_sums = (self._group_sums(f, by) for by in (self.gamma, self.sure))
        centre, square = self.gamma @ f, self.gamma @ (f * f)
        return Predicted(n, total, centre, square, sums, self.counts, sure, squares, sure_sums, some)

    def _group_sums(self, x: Floats, weight: Floats) -> Floats:
        """Return sum_i weight_i x_i over the samples with each zero-shot label, (H, d)."""
        out = np.empty((len(self.counts), x.shape[1]), one)
        return _numba.votes((*self.members, weight[self.members[1]]), x, out)  # type: ignore[no-any-return]

    def compare(self, total: Any, n: int, scale: Any) -> Compared:
        """Compare the zero-shot predictions with those of all n samples and of the neighbours (Eqs. 1, 2)."""
        agree = np.empty(n, one)
        near, most, even, even_own = self._in_blocks(_numba.tide_compare, self.y, total, self.votes_of.edges, agree)
        self.in_metric, lengths = self._scaled(slice(0, n), scale)
        agree /= max(n - 1, 1)
        sums = self._group_sums(self.in_metric, self.gamma)
        numbers = (agree, agree.astype(float) ** 2, self.sure, lengths)
        agreed, squares, sure, length = (float(x.sum(dtype=float)) for x in numbers)
        return Compared(agreed, squares, self.own, sure, even_own, near, most, even / (total + 1), length, sums)

    def _prepare(self, fixed: eq.Fixed) -> None:
        """Keep what all E-steps need: the cosines to the anchors, and logits there without votes and prior."""
        f, offset = self.in_metric / fixed.scale, fixed.offset  # f_i . mu'_k is a sum of products with text and offset
        if len(f) <= f.shape[1]:
            self.gram = self.in_metric @ self.in_metric.T  # (n, n)
        self.at_anchor = np.matmul(f, self.text.T, out=self._spare())  # (n, K)
        self.log_y, slope = self._room(), one(fixed.slope)
        expected = np.zeros_like(fixed.total) + one(1) / (fixed.expected + one(1))  # (K,)
        anchors = slope, f @ offset, _numba.anchor_lengths(self.text, slope, offset, 1 / fixed.scale)
        bias = fixed.total, expected, fixed.presence**2, one(fixed.bias_weight)
        zero_shot = one(self.logit_scale), self.log_sum, self.y
        given = self.cosine, zero_shot, self.at_anchor, anchors, bias, one(fixed.sharpness), self.log_y
        self._in_blocks(_numba.tide_keep, *given)
        self.spare += self.room

    def step(self, fixed: eq.Fixed, classes: Assigned) -> Assigned:
        """E-step with the classes given, Eq. 11; the sums of Eq. 8 that it needs are made here, and not returned."""
        if self.at_anchor is None:
            self._prepare(fixed)
        if self.e_steps == 2 and fixed.prior is None and self.z.shape[1] > FEW:
            most = IDLE * np.minimum(classes.counts + fixed.smoothing, 0.1)  # (K,)
            self._set_idle((self.z.max(axis=0) <= most) & (classes.labels == 0))
        self.e_steps += 1
        n, some, idle, counts = len(self.f), classes.some, self.idle, classes.counts
        columns = some if idle is None else np.searchsorted(self.present, some)  # (H,) of z
        given = self.in_metric, self.gram, self.z, columns, self.gamma, self.at_anchor, columns
        means, _ = loops.products(*given, keep=True)
        if idle is not None:
            self.pull = counts[idle.classes] + one(fixed.smoothing)  # (R,)
            self.other[0] = idle.shares @ self.pull
            self.other[1] = idle.logs @ self.pull + idle.shares @ (self.pull * np.log(self.pull))
            counts = counts[self.present]
        without, smoothing = fixed.left_out, fixed.smoothing
        if fixed.prior is not None:  # in place of the counts
            counts, without, smoothing = np.exp(fixed.prior), 0.0, 0.0
        numbers = without, fixed.left_out, smoothing, fixed.vote_weight, fixed.sharpness, fixed.alpha, eq.STILL
        labels, gamma, log_sum = found = np.empty(n, np.int64), *np.empty((2, n), one)
        new = self._room() if idle is None else np.empty_like(self.z)
        counts, hard, right, changed, moved = self._in_blocks(
            _numba.tide_step, self.log_y, self.y, counts, tuple(map(one, numbers)), self.votes_of.edges, self.z, new,
            (some, columns, classes.hard, *means), self.present, self.other, self.labels, found,
            log_classes(len(self.text)),
        )  # fmt: skip
        if idle is None:
            self._replace(new)
        else:
            self.z, self.by, total, counts = new, np.exp(-log_sum), counts, np.empty_like(hard)  # (n,), (L,), (K,)
            counts[self.present], counts[idle.classes] = total, self.pull * (self.by @ idle.shares)
        self.labels, self.gamma, some = labels, gamma, np.nonzero(hard)[0]  # (n,), (n,), (H,)
        return Assigned(hard[:0], hard[:0], hard[some], counts, hard, right, n, changed, moved, some)

    def _set_idle(self, idle: NDArray[np.bool_]) -> None:
        """Set many classes idle from here on; of each row, logits are then less their largest."""
        gone, arrays = np.nonzero(idle)[0], (self.z, self.log_y, self.at_anchor)  # (R,)
        if 4 * len(gone) <= len(idle):
            return
        shares, logs = (self._room().ravel()[: len(self.f) * len(gone)].reshape(-1, len(gone)) for _ in range(2))
        present = np.nonzero(~idle)[0]  # (L,)
        kept = np.empty((3, len(self.f), len(present)), one)
        self._in_blocks(_numba.tide_idle, present, gone, arrays, kept, shares, logs)
        self.present, self.idle, self.spare = present, Idle(gone, shares, logs), [*self.spare, *arrays]
        self.z, self.log_y, self.at_anchor = kept

    def confidence(self, power: float) -> Confident:
        """Add up the confidences under a temperature, and their slopes (Eq. 14)."""
        if self.log_z is None:
            z, away = self.z, (self.present[:0], self.z[:, :0], self.gamma, self.gamma)
            if self.idle is not None:
                away = *self.idle[:2], self.pull, self.by
                self.z = self._room()  # of all classes again
            self.log_z = self._room()
            self._in_blocks(_numba.tide_logs, z, self.labels, self.present, *away, self.log_z)
        return Confident(*self._in_blocks(_numba.tide_confidence, self.log_z, one(power), self.z[:, :0]))

    def finish(self, power: float | None) -> Counted:
        """Calibrate the assignments by a temperature, and average scores for the unknown with those of neighbours."""
        self._in_blocks(_numba.tide_confidence, self.log_z, one(power), self.z)
        edges = self.votes_of.edges
        self.unknown = eq.with_neighbours(self.unknown, lambda x: _numba.votes(edges, x, np.empty_like(x)))
        return Counted(len(self.f))
