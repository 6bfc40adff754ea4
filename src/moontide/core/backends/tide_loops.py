"""TIDE on a CPU in float32, by compiled loops: samples in memory whose labels are not known.

- All operations of a row are done while it is in the cache.
- After the second E-step, the classes that next to no sample is assigned to are left alone: of their logits nothing
  changes but the prior, and `Absent` has what an E-step needs of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.core import tide as eq
from moontide.core.arrays import class_counts, class_sums, columns, row_dots
from moontide.core.backends import _numba, tide_plain
from moontide.core.graph import Graph
from moontide.core.ple import weighted_sums
from moontide.core.sums import Counted
from moontide.core.threads import in_threads, row_blocks
from moontide.core.tide import Assigned, Classes, Compared, Confident, Predicted

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

IDLE = 0.03  # a class is left alone whose largest z_ik is below this share of n_k + a*, and of 0.1
NOTHING = np.float32(-1e30)  # the logarithm of a sum of no classes
one = np.float32
run = tide_plain.run


class Absent(NamedTuple):
    """The R classes without labels and with next to no assignments: all that changes is their prior.

    Their logits are c_ik + log(n_k + a*) with c_ik that never change. What an iteration needs of them, sums over
    classes or samples, is products of matrices by vectors; their part in votes and leave-one-out is neglected.
    """

    classes: Ints  # (R,) numbers
    top: Floats  # (N,) max_k c_ik
    shares: Floats  # (N, R) e_ik = exp(c_ik - top_i)
    logs: Floats  # (N, R) e_ik (c_ik - top_i)

    def log_sum(self, pull: Floats) -> tuple[Floats, Floats]:
        """Return log sum_k exp(logits_ik) over these classes and the entropy of their distribution, (N,) each.

        `pull` (R,) is n_k + a*.
        """
        total = self.shares @ pull  # (N,)
        log_total = np.log(total)
        entropy = log_total - (self.logs @ pull + self.shares @ (pull * np.log(pull))) / total
        return self.top + log_total, entropy

    def counts(self, pull: Floats, log_total: Floats) -> Floats:
        """Return the n_k that follow from log sum_k exp(logits_ik) over all classes, (N,): (R,)."""
        return pull * (self.shares.T @ np.exp(self.top - log_total))  # type: ignore[no-any-return]


def idle_classes(z: Floats, labels: Ints, smoothing: float) -> NDArray[np.bool_] | None:
    """Return a mask of the classes of z (N, K) that may be left alone, (K,), where they are many; None otherwise."""
    bound = IDLE * np.minimum(z.sum(axis=0) + smoothing, 0.1)  # (K,)
    idle = (z.max(axis=0) <= bound) & (class_counts(labels, z.shape[1]) == 0)
    return idle if int(idle.sum()) > z.shape[1] // 4 else None


class TIDERows(tide_plain.TIDERows):
    """The samples of TIDE, all in memory.

    >>> eye = np.eye(3, dtype=np.float32)
    >>> from moontide import TIDE
    >>> TIDERows(TIDE(), eye, eye, 100.0, alone=True).first(None).counts
    array([1., 1., 1.], dtype=float32)
    """

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.present: Ints | None = None  # (L,) the classes that z has, where the others are left alone
        self.absent: Absent | None = None  # those
        self.done = 0

    def _neighbours(self) -> Graph:
        n, d = self.f.shape
        m = min(self.method.neighbours, n - 1)
        return Graph(*_numba.nearest(self.f @ self.f.T, m)) if m and n <= d else super()._neighbours()

    def _in_blocks(self, loop: Callable[..., Any], *given: Any) -> list[Any]:
        """Call a loop for the rows, in threads, and return what it returns of each block."""
        return in_threads(lambda at: loop(at.start, at.stop, *given), row_blocks(len(self.f), self.z.size))

    def first(self, negatives: Any) -> Predicted:  # type: ignore[override]
        """Make the zero-shot predictions, and score how unlike all of the classes each sample is (Eq. 15)."""
        f, n = self.f, len(self.f)
        self.log_y = np.matmul(f, self.text.T, out=self._spare())  # (n, K)
        self.labels, (evidence, self.sure, self.unknown) = np.empty(n, np.int64), np.empty((3, n), f.dtype)
        found = self._in_blocks(
            _numba.tide_first, self.log_y, one(self.logit_scale), self.y, self.labels, evidence, self.sure, self.unknown
        )
        total, self.own = (sum(x[1:], x[0]) for x in zip(*found, strict=True))
        if negatives is not None and len(negatives):
            self.unknown += eq.negative_odds(f, negatives, evidence, self.logit_scale)
        self.some, self.places = np.unique(self.labels, return_inverse=True)  # (H,), (n,)
        return Predicted.of_labels(f, total, self.sure[:, None], self.places, len(self.some), self.some)

    def compare(self, total: Any, n: int, scale: Any) -> Compared:
        """Compare the zero-shot predictions with those of all n samples and of the neighbours (Eqs. 1, 2)."""
        agree, edges = np.empty(n, self.f.dtype), self._edges()
        found = self._in_blocks(_numba.tide_compare, self.y, total, *edges, agree)
        near, most, even, even_own = (sum(x[1:], x[0]) for x in zip(*found, strict=True))
        self.in_metric, lengths = self._scaled(slice(0, n), scale)
        agree /= max(n - 1, 1)
        sums = class_sums(self.places, self.in_metric, len(self.some))
        return Compared(
            _sum(agree), _sum(agree.astype(float) ** 2), self.own, _sum(self.sure), _sum(lengths), near, most, even,
            even_own, sums,
        )  # fmt: skip

    def _edges(self) -> tuple[Any, Any, Any]:
        return self.votes_of.pointer, self.votes_of.neighbour, self.votes_of.weight

    def _keep(self, fixed: eq.Fixed) -> None:
        """Keep what all E-steps need: log_y becomes the logits at the anchors, without votes and prior."""
        self.at_anchor = np.matmul(self.in_metric, fixed.anchor.T, out=self._spare())  # (n, K)
        offset = np.log((fixed.total + 1) / (fixed.expected + 1)).astype(self.f.dtype)  # (K,)
        self._in_blocks(
            _numba.tide_keep, self.log_y, self.y, self.at_anchor, fixed.total, offset, fixed.presence**2,
            one(fixed.bias_weight), one(fixed.sharpness),
        )  # fmt: skip

    def step(self, fixed: eq.Fixed, classes: Classes) -> Assigned:
        """E-step with the classes given, Eq. 11, and the sums of Eq. 8 for the next M-step."""
        if self.at_anchor is None:
            self._keep(fixed)
        if self.done == 2 and fixed.prior is None:
            self._leave_alone(fixed.smoothing)
        self.done += 1
        f, k, n, before = self.in_metric, len(self.text), len(self.f), self.labels
        new = self._room() if self.new is None else self.new
        pull: Any = None
        counts, absent = classes.counts, (np.full(n, NOTHING), np.zeros(n, f.dtype))
        if self.absent is not None:
            counts, pull = counts[self.present], counts[self.absent.classes] + one(fixed.smoothing)  # (L,), (R,)
            absent = self.absent.log_sum(pull)
        labels, (entropy, log_sum, moved) = np.empty_like(before), np.empty((3, n), f.dtype)
        self._in_blocks(
            _numba.tide_step, self.log_y, counts, one(fixed.smoothing), self.gamma[:0] if fixed.prior is None else
            fixed.prior, *map(one, (fixed.left_out, fixed.vote_weight, fixed.sharpness, fixed.alpha)), *self._edges(),
            self.z, new, *self._means(fixed, classes), *absent, self.gamma, self._places(classes.some, before), labels,
            entropy, log_sum, moved,
        )  # fmt: skip
        kept, self.z, self.new = self.keep and self.z is self.y, new, self.z
        self.new = None if kept else self.new
        self.labels = labels = labels if self.present is None else self.present[labels]
        self.gamma = np.clip(1 - entropy / one(math.log(max(k, 2))), 0, 1)
        hard = class_counts(labels, k).astype(f.dtype)  # (K,)
        some = np.nonzero(hard)[0]  # (H,)
        self.share = self._columns(self.z, some)  # (n, H)
        sums, soft = weighted_sums(self.share, self.gamma, f)
        counts = self.z.sum(0)
        if self.absent is not None:
            full = np.zeros(k, f.dtype)
            full[self.present], full[self.absent.classes] = counts, self.absent.counts(pull, log_sum)
            counts, self.pull, self.log_total = full, pull, log_sum
        right = _sum(np.take_along_axis(self.y, labels[:, None], axis=1))
        changed, most = int((labels != before).sum()), float(moved.max())
        return Assigned(sums, soft, hard[some], counts, hard, right, n, changed, most, some)

    def _means(self, fixed: eq.Fixed, classes: Classes) -> tuple[Any, ...]:
        """Return what `_numba.tide_step` needs of the classes with labels; in the first E-step there are none."""
        sums, some = classes.sums, classes.some
        none = self.z[:, :0]
        if not len(some):
            return some, none, none, none, *(classes.hard for _ in range(4))
        anchor = fixed.anchor[some]
        given = self._columns(self.at_anchor, some), self.share, self.in_metric @ sums.T  # (n, H) each
        return self._at(some), *given, row_dots(sums, sums), row_dots(sums, anchor), classes.soft, classes.hard

    def _at(self, some: Ints) -> Ints:
        """Return classes as columns of z."""
        return some if self.present is None else np.searchsorted(self.present, some)

    def _columns(self, x: Floats, some: Ints) -> Floats:
        """Return the columns of some classes."""
        return x if len(some) == x.shape[1] else columns(x, self._at(some))

    def _places(self, some: Ints, labels: Ints) -> Ints:
        return np.searchsorted(some, labels) if len(some) else labels

    def _leave_alone(self, smoothing: float) -> None:
        """Leave the classes alone that next to no sample is assigned to, where they are many."""
        idle = idle_classes(self.z, self.labels, smoothing)
        if idle is None:
            return
        n, present, gone = len(self.f), np.nonzero(~idle)[0], np.nonzero(idle)[0]  # (L,), (R,)
        near, cosines, kept = np.empty((3, n, len(present)), self.f.dtype)
        shares, logs = np.empty((2, n, len(gone)), self.f.dtype)
        top = np.empty(n, self.f.dtype)
        _numba.tide_split(self.log_y, self.at_anchor, self.z, present, gone, near, cosines, kept, top, shares, logs)
        self.present, self.absent = present, Absent(gone, top, shares, logs)
        self.z, self.log_y, self.at_anchor, self.new = kept, near, cosines, np.empty_like(kept)

    def _dense(self) -> None:
        """Make z of all classes, (n, K)."""
        if self.absent is None:
            return
        full = self._spare()
        full = np.empty((len(self.f), len(self.text)), self.f.dtype) if full is None else full
        absent, scale = self.absent, np.exp(self.absent.top - self.log_total)
        _numba.tide_join(self.z, self.present, absent.shares, absent.classes, self.pull, scale, full)
        self.z, self.absent, self.present = full, None, None

    def confidence(self, power: float) -> Confident:
        """Add up the confidences under a temperature, and their slopes (Eq. 14)."""
        self._dense()
        return super().confidence(power)

    def finish(self, power: float | None) -> Counted:
        """Calibrate the assignments by a temperature; None leaves them."""
        self._dense()
        return super().finish(power)


def _sum(x: Any) -> float:
    return float(x.sum(dtype=float))
