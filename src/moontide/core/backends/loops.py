"""MOON on a CPU in float32: compiled loops, and no work for classes that have no samples.

Three things are private to this backend, and none changes an answer by more than rounding in float32.

- In a batch of N <= d samples, the mean of a class is R_k = sum_i a_ik f_i + b_k t_k, and all that an E-step needs of
  it follows from the products f_i . f_j and f_i . t_k that are at hand: `SpanStep`. A product of N x N x L replaces two
  of N x d x L, and no vectors of length d are made. Where |R_k| is small, that loses digits, and vectors are.
- A class without samples is absent: at its anchor, with the logits it has there. In its column of z only the normaliser
  and the votes of neighbours change. So `Absent` keeps the sums of exp(logits) over the absent classes; an E-step works
  on the L present columns, and on the shared entries (i, k) of absent classes where a sample and its neighbours share a
  class: the votes for i in class k add about z_ik sum_j M_ij z_jk to z_ik, and below `NEGLIGIBLE` they are left out.
- All N x K arrays are taken at once, and used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import affine, put
from moontide.core.backends import _numba, plain
from moontide.core.graph import Graph
from moontide.core.mixture import VMF, First, Laplacian, Scores, Step, VMFClasses
from moontide.core.ple import Assignment, free_energy, log_classes, weighted_sums
from moontide.core.threads import in_threads, row_blocks

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

BELOW_1 = 1 - float(np.finfo(np.float32).eps)
SHORT = 0.1  # |R_k| below which it is not accurate as the root of a sum of products in float32
NEGLIGIBLE = 2.0**-28  # 1/32 of the rounding of numbers near 1
GROWTH = 16.0  # where a row of absent classes has grown by more, shared entries are looked for again
SMALL = 2**14  # entries of z below which the dense E-step is faster
SHARE = 1 / 16  # of z large enough for that, at most: with more, nothing is gained
TINY = 1e-26  # sums over rows of more than its inverse are near the end of float32

run = plain.run


def m_step(vmf: VMF, step: Any) -> VMFClasses:
    """Eqs. update-m and update-m-real, in the span of the samples where that is less work and accurate."""
    if isinstance(step, SpanStep):
        found = step.classes(vmf)
        if found is not None:
            return found
        step.sums, step.soft = weighted_sums(step.z, step.rows.gamma, step.rows.f)
    return plain.m_step(vmf, step)


@dataclass
class SpanStep(Step):
    """A step whose sums are not made unless they are needed."""

    z: Any = None  # (N, L)
    rows: Any = None

    def classes(self, vmf: VMF) -> VMFClasses | None:
        """Return the classes by products alone; None where options have no loop, or some |R_k| is small."""
        o, f = vmf.options, self.rows.f
        if not (o.inverse == "banerjee" and o.log_normaliser == "asymptotic" and o.update_mu and o.update_kappa):
            return None
        text, anchor_kappa, anchor_r, alpha = vmf.anchors.of(self.present)
        exact, epsilon = o.update == "exact", np.float32(o.count_epsilon)
        beta, a, b = _numba.span_weights(self.z, self.rows.gamma, self.counts, alpha, anchor_r, exact, epsilon)
        scores = self.rows.gram @ a  # (N, L)
        numbers = (vmf.d, min(o.r_cap, BELOW_1), o.kappa_cap, o.temper, np.float32(vmf.scale))
        near = self.rows.cosine.take(self.present, axis=1)  # (N, L)
        r, kappa, kl, shortest = _numba.span_scores(scores, a, b, near, anchor_kappa, anchor_r, *numbers)
        if shortest < SHORT:
            return None
        mu = lambda: (a.T @ f + b[:, None] * text) / r[:, None]  # noqa: E731
        return vmf.classes(self.present, beta, kappa, kl, mu, None, None, scores)


class Rows(plain.Rows):
    """The samples of MOON, all in memory."""

    gram: Any  # (N, N) f_i . f_j, where N <= d

    def _neighbours(self) -> Graph:
        n, d = self.f.shape
        self.gram = self.f @ self.f.T if n <= d else None
        m = min(self.method.neighbours if self.method.laplacian_weight else 0, n - 1)
        return Graph(*_numba.nearest(self.gram, m)) if self.gram is not None and m else super()._neighbours()

    def __init__(self, *given: Any, **options: Any) -> None:
        self.gram = None
        super().__init__(*given, **options)
        self.absent: Absent | None = None  # z, where few classes are present
        self.steps, self.present = 0, np.zeros(0, np.int64)

    def first(self) -> First:
        """Eq. zero-shot and its sums, in one pass."""
        self.cosine = np.matmul(self.f, self.text.T, out=self._spare())
        n, (log_sum, *others) = len(self.f), np.empty((3, len(self.f)), np.float32)
        given = self.cosine, np.float32(self.logit_scale), self.z, np.empty(n, np.int64), log_sum, *others
        *sums, _ = _numba.zero_shot(0, n, *given)
        self._first_weights(slice(0, n), self.z, log_sum)
        return First(n, *sums)

    def step(self, scores: Scores) -> Any:
        """E-step with the classes given, dense or of the present classes alone, and what the M-step needs of it."""
        values: Any = scores.values  # (N, L)
        if values is None and scores.prototypes is not None:
            values = affine(self.f, scores.prototypes, scores.offset)
        old_labels, weight = self.labels, self.gamma
        old, a = (None, None) if self.absent is None else (self.absent.z, self.absent.e_step(values))
        if a is None:
            old = self._dense()
            a = self._dense_e_step(scores, values, old)
            self.new = None if old is self.y else old
            self.z = a.z
        self.labels = a.labels
        changed = 0 if old_labels is None else int((a.labels != old_labels).sum())
        moved = np.inf if old_labels is None or changed else float(np.abs(a.z - old).max())
        if self.method.gamma == "assignments":
            self.gamma = a.gamma
        free = free_energy(self.gamma, a.agreement, a.log_sum, self.log_sum_y)
        counts = self._find_present(a, scores)[self.present]  # (L,)
        z = self.z.take(self.present, axis=1) if self.absent is None else self.absent.z  # (N, L)
        terms = free, weight * a.before, changed, moved
        if self.gram is not None:
            return SpanStep(None, None, counts, *terms, self.present, z, self)
        return Step(*weighted_sums(z, self.gamma, self.f), counts, *terms, self.present)

    def _dense(self) -> Floats:
        """Return z of all classes."""
        if self.absent is not None:
            self.z, self.absent = self.absent.dense(), None
        return self.z  # type: ignore[no-any-return]

    def _dense_e_step(self, scores: Scores, values: Floats | None, z: Floats) -> Assignment:
        """Eq. update-z of all classes: the logits are cosine slope + offset, or `values` of the present classes."""
        new = self._room() if self.new is None else self.new
        present = scores.present
        if values is None:
            present, values = np.zeros(0, np.int64), z[:, :0]
        rest = np.zeros((4, len(z)), z.dtype)
        return self.assign((self.cosine, scores.slope, scores.at_anchor, present, values), z, rest, new)

    def assign(self, logits: tuple[Any, ...], z: Floats, rest: Floats, new: Floats) -> Assignment:
        """Eq. update-z, written to `new`, from the `logits`, previous `z` and `rest` of `_numba.e_step`."""
        n = len(z)
        labels, (log_sum, gamma, agreement, before) = np.empty(n, np.int64), np.empty((4, n), z.dtype)
        given = *logits, *self.votes_of.weighted(self.vote_weight).edges, z, rest, new
        rows = labels, log_sum, gamma, agreement, before, log_classes(len(self.text))
        in_threads(lambda at: _numba.e_step(at.start, at.stop, *given, *rows), row_blocks(n, z.size))
        return Assignment(new, *rows[:5])

    def _find_present(self, a: Assignment, scores: Scores) -> Floats:
        """Find the classes that have samples now, and return the counts of all, (K,)."""
        counts: Floats = self._counts(a.z, self.gamma, a.labels)  # (K,); soft without absent classes (L,)
        if len(counts) < len(self.text):
            counts = put(np.zeros(len(self.text), np.float32), self.present, counts)
        if self.absent is not None and np.count_nonzero(counts) > np.count_nonzero(counts[self.present]):
            self._dense()  # a class that was absent has samples
        if self.absent is None:
            self.present = np.nonzero(counts)[0]  # (L,)
            if self.steps and self.votes_of.symmetric and worthwhile(self.z, self.present):
                self.absent = Absent(self, a.log_sum, scores)
        self.steps += 1
        return counts

    def finish(self) -> Laplacian:
        """Return gamma_i z_i . (M z)_i of the assignments as they are, (N,)."""
        edges = self.votes_of.weighted(self.vote_weight).edges
        return Laplacian(self.gamma * _numba.laplacian(*edges, self._dense()))


def worthwhile(z: Floats, present: Ints) -> bool:
    """Tell whether `Absent` is fit for assignments z, (N, K): few classes present, few large entries."""
    if z.size < SMALL or not 0 < 3 * len(present) <= z.shape[1]:
        return False
    return bool(np.count_nonzero(z > NEGLIGIBLE**0.5) < len(z) * len(present) + SHARE * z.size)


class Absent:
    """The assignments of rows after a dense E-step, with few classes present; takes over their z."""

    def __init__(self, rows: Rows, log_sum: Floats, scores: Scores) -> None:
        z, self.rows, self.present, self.shift = rows.z, rows, rows.present, log_sum
        # (N, K) exp(logits - shift), 0 if present or shared
        self.p: Floats = rows._room() if rows.new is None else rows.new
        self.sums = np.zeros((4, len(z)), z.dtype)  # over each row of p, as `rest` of `_numba.e_step`
        self.top = np.empty(len(z), z.dtype)  # (N,) the largest of each row of p
        self.z, self.entry, starts = _numba.split(
            rows.cosine, scores.slope, scores.at_anchor, log_sum, self.present, *rows.votes_of.edges, z, self.p,
            self.sums, self.top, np.float32(NEGLIGIBLE),
        )  # fmt: skip
        self.shared = self.q = z.ravel().take(
            self.entry
        )  # (S,) shared entries, (i, k) at i K + k: q = exp(logits - shift)
        self.row, k = np.divmod(self.entry, z.shape[1])  # (S,), (S,)
        logits = rows.cosine.ravel().take(self.entry) * scores.slope[k] + scores.at_anchor[k]
        self.logits = logits - log_sum[self.row]  # (S,)
        votes = _numba.shared_votes(self.entry, self.row, *rows.votes_of.edges, z.view(np.int32).ravel())
        self.others = self.logits, starts, *votes, self.sums, self.top
        self.scale = np.ones_like(log_sum)  # (N,) z = p scale
        rows.new = z

    def e_step(self, values: Floats) -> Assignment | None:
        """Eq. update-z with the logits `values` (N, L) of the present classes; None where that is not accurate.

        The z of the answer is that of the present classes, (N, L).
        """
        rows, one = self.rows, np.ones_like(values[0])
        by = np.ones_like(self.shared) if rows.vote_weight is None else rows.vote_weight[self.row]  # (S,)
        q, rest, most = _numba.shared_sums(self.shared, by, *self.others)
        logits = values - self.shift[:, None], one, 0 * one, self.present[:0], values[:, :0]
        a = rows.assign(logits, self.z, rest, np.empty_like(self.z))
        scale = np.exp(-a.log_sum)  # (N,)
        if not (scale.min() > TINY and scale.max() <= GROWTH):  # also for NaN
            return None
        self.z, self.q, self.shared, self.scale = a.z, q, q * scale[self.row], scale
        labels = self.present[a.labels]
        away = np.nonzero(most * scale > a.z[np.arange(len(labels)), a.labels])[0]  # those of a class that was absent
        if len(away):
            labels[away] = self.dense(away).argmax(axis=1)
        return a._replace(labels=labels, log_sum=self.shift + a.log_sum)

    def dense(self, which: Any = slice(None)) -> Floats:
        """Return z of all classes for some samples; for all, it is made in place: the last thing to ask for."""
        self.p.ravel()[self.entry] = self.q
        z: Floats = self.p[which]
        z *= self.scale[which, None]
        z[:, self.present] = self.z[which]
        return z
