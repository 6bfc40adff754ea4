"""MOON on a CPU in float32: compiled loops, and no work for classes that have no samples.

Three things are private to this backend, and none changes an answer by more than rounding in float32.

- In a batch of N <= d samples, the mean of a class is R_k = sum_i a_ik f_i + b_k t_k, and all that an E-step needs of
  it follows from the products f_i . f_j and f_i . t_k that are at hand: `SpanStep`. A product of N x N x L replaces two
  of N x d x L, and no vectors of length d are made. Where |R_k| is small, that loses digits, and vectors are.
- A class without samples is absent: at its anchor, with the logits it has there. In its column of z only the normaliser
  and the votes of neighbours change. So `Absent` keeps the sums of exp(logits) over the absent classes; an E-step works
  on the L present columns, and on the `Shared` entries (i, k) of absent classes where a sample and its neighbours share
  a class: the votes for i in class k add about z_ik sum_j M_ij z_jk to z_ik, and below `NEGLIGIBLE` they are left out.
- All N x K arrays are taken at once, and used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import affine, put
from moontide.core.backends import _numba, plain
from moontide.core.graph import Affinity, Graph
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
HIGHEST = 60.0  # exp of more is near the end of float32

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
        text, anchor_kappa, anchor_r, alpha = vmf.anchors_of(self.present)
        exact, epsilon = o.update == "exact", np.float32(o.count_epsilon)
        beta, a, b = _numba.span_weights(self.z, self.rows.gamma, self.counts, alpha, anchor_r, exact, epsilon)
        scores = self.rows.gram @ a  # (N, L)
        numbers = (vmf.d, min(o.r_cap, BELOW_1), o.kappa_cap, o.temper, np.float32(vmf.scale))
        r, kappa, kl, shortest = _numba.span_scores(scores, a, b, self.rows.near, anchor_kappa, anchor_r, *numbers)
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
        self.steps, self.near, self.present = 0, self.f[:, :0], np.zeros(0, np.int64)

    def first(self) -> First:
        """Eq. zero-shot and its sums, in one pass."""
        self.cosine = np.matmul(self.f, self.text.T, out=self._spare())
        log_sum, *sums = _numba.zero_shot(self.cosine, np.float32(self.logit_scale), self.z)
        self._first_weights(slice(0, len(self.f)), self.z, log_sum)
        return First(len(self.f), *sums)

    def step(self, scores: Scores) -> Any:
        """E-step with the classes given, dense or of the present classes alone, and what the M-step needs of it."""
        values: Any = scores.values  # (N, L)
        if values is None and scores.prototypes is not None:
            values = affine(self.f, scores.prototypes, scores.offset)
        old_labels, weight = self.labels, self.gamma
        a = None if self.absent is None else self.absent.e_step(values, self.vote_weight)
        if a is None:
            old = self._dense()
            a = self._assign_all(scores, values, old)
            changed = 0 if old_labels is None else int((a.labels != old_labels).sum())
            moved = np.inf if old_labels is None or changed else float(np.abs(a.z - old).max())
            self.new = None if old is self.y else old
            self.z = a.z
        else:
            changed, moved = int((a.labels != old_labels).sum()), self.absent.moved  # type: ignore[union-attr]
        self.labels = a.labels
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

    def _assign_all(self, scores: Scores, values: Floats | None, z: Floats) -> Assignment:
        """Eq. update-z of all classes: the logits are cosine slope + offset, or `values` of the present classes."""
        n, k = z.shape
        new = self._room() if self.new is None else self.new
        present = scores.present
        if values is None:
            present, values = np.zeros(0, np.int64), z[:, :0]
        labels, (log_sum, gamma, agreement, before) = np.empty(n, np.int64), np.empty((4, n), z.dtype)
        edges = self.votes_of.weighted(self.vote_weight).edges
        rows = (labels, log_sum, gamma, agreement, before, log_classes(k))

        def block(part: slice) -> None:
            at_anchor = self.cosine, scores.slope, scores.at_anchor
            _numba.e_step(part.start, part.stop, *at_anchor, present, values, *edges, z, new, *rows)

        in_threads(block, row_blocks(n, n * k))
        return Assignment(new, labels, log_sum, gamma, agreement, before)

    def _find_present(self, a: Assignment, scores: Scores) -> Floats:
        """Find the classes that have samples now, and return the counts of all, (K,)."""
        counts: Floats = self._counts(a.z, self.gamma, a.labels)  # (K,); soft without absent classes (L,)
        if len(counts) < len(self.text):
            counts = put(np.zeros(len(self.text), np.float32), self.present, counts)
        if self.absent is not None and np.count_nonzero(counts) > np.count_nonzero(counts[self.present]):
            self._dense()  # a class that was absent has samples
        if self.absent is None:
            found = np.nonzero(counts)[0]  # (L,)
            if len(found) != len(self.present) or (found != self.present).any():
                self.present = found
                if self.gram is not None:
                    self.near = self.cosine.take(found, axis=1)  # (N, L)
            if self.steps and worthwhile(self.z, self.present):
                self.absent = Absent(self, a.log_sum, scores)
        self.steps += 1
        return counts

    def finish(self) -> Laplacian:
        """Return gamma_i z_i . (M z)_i of the assignments as they are, (N,)."""
        if self.absent is not None:
            products = self.absent.laplacian(self.vote_weight)
        else:
            products = _numba.laplacian(*self.votes_of.weighted(self.vote_weight).edges, self.z)
        self._dense()
        return Laplacian(self.gamma * products)


class Shared(NamedTuple):
    """The entries (i, k) of z that vote for each other, as positions i K + k, rising."""

    entry: Ints  # (S,)
    row: Ints  # (S,) i
    starts: Ints  # (N + 1,) where the entries of each row begin
    first: Ints  # (S + 1,) where the votes for each entry begin
    voter: Ints  # (P,) which entry votes
    weight: Floats  # (P,) M_ij


def reach(votes_of: Affinity) -> Affinity:
    """Return who votes for whom either way, with |M_ij| + |M_ji|, or |M_ij| where that is symmetric."""
    if votes_of.symmetric:
        return Affinity(votes_of.pointer, votes_of.neighbour, np.abs(votes_of.weight))
    one_way = abs(votes_of.matrix.copy())  # a copy, since scipy sorts the entries in place
    both = one_way + one_way.T.tocsr()
    return Affinity(both.indptr.astype(np.int64), both.indices.astype(np.int64), both.data)


def worthwhile(z: Floats, present: Ints) -> bool:
    """Tell whether `Absent` is fit for assignments z, (N, K): few classes present, few large entries."""
    if z.size < SMALL or not 0 < 2 * len(present) <= z.shape[1]:
        return False
    return bool(np.count_nonzero(z > NEGLIGIBLE**0.5) < len(z) * len(present) + SHARE * z.size)


class Absent:
    """The assignments of rows after a dense E-step, with few classes present; takes over their z."""

    def __init__(self, rows: Rows, log_sum: Floats, scores: Scores) -> None:
        z, self.present, self.votes_of, self.shift = rows.z, rows.present, rows.votes_of, log_sum
        near = reach(self.votes_of)
        # (N, K) exp(logits - shift), 0 if present or shared
        self.p: Floats = rows._room() if rows.new is None else rows.new
        self.total, self.inner, self.top = np.empty((3, len(z)), z.dtype)  # (N,) see `_numba.split`
        self.z, entry, starts = _numba.split(
            rows.cosine, scores.slope, scores.at_anchor, log_sum, self.present, *near.edges, z, self.p, self.total,
            self.inner, self.top, np.float32(NEGLIGIBLE),
        )  # fmt: skip
        self.shared_z = z.ravel().take(entry)  # (S,)
        row, k = entry // z.shape[1], entry % z.shape[1]  # (S,), (S,)
        votes = _numba.shared_votes(entry, row, *self.votes_of.edges, z.view(np.int32).ravel())
        self.shared = Shared(entry, row, starts, *votes)
        logits = rows.cosine.ravel().take(entry) * scores.slope[k] + scores.at_anchor[k]
        self.logits = logits - log_sum[row]  # (S,)
        self.scale = np.ones_like(log_sum)  # (N,) z = p scale
        self.moved = np.inf  # the largest change of z of a present class in the last E-step
        rows.new = z

    def e_step(self, values: Floats, vote_weight: Floats | None) -> Assignment | None:
        """Eq. update-z with the logits `values` (N, L) of the present classes; None where that is not accurate.

        The z of the answer is that of the present classes, (N, L).
        """
        (z, shared, labels, log_sum, gamma, agreement, before, scale), highest, moved = self._loop(values, vote_weight)
        if highest > HIGHEST or float(scale.max()) > GROWTH:
            return None
        self.z, self.shared_z, self.scale, self.moved = z, shared, scale, moved
        return Assignment(z, labels, log_sum, gamma, agreement, before)

    def laplacian(self, vote_weight: Floats | None) -> Floats:
        """Return z_i . votes_i of this z, (N,), as the next E-step finds it."""
        return self._loop(self.z, vote_weight)[0][6]  # type: ignore[no-any-return]

    def _loop(self, values: Floats, vote_weight: Floats | None) -> tuple[tuple[Any, ...], float, float]:
        """Make an E-step: z, shared entries, labels, log sums, gamma, both products with the votes, and scale."""
        n, k = self.p.shape
        vote_weight = np.ones(n, np.float32) if vote_weight is None else vote_weight
        out = np.empty_like(self.z), np.empty_like(self.shared_z), np.empty(n, np.int64), *np.empty((5, n), np.float32)
        old = self.p, self.total, self.inner, self.top, self.logits, self.z, self.shared_z

        def block(rows: slice) -> tuple[float, float]:
            found: tuple[float, float] = _numba.present_e_step(
                rows.start, rows.stop, values, vote_weight, self.shift, self.present, *self.votes_of.edges,
                *self.shared, *old, *out, log_classes(k),
            )  # fmt: skip
            return found

        highest, moved = zip(*in_threads(block, row_blocks(n, values.size)), strict=True)
        return out, max(highest), max(moved)

    def dense(self) -> Floats:
        """Return z of all classes, (N, K), made in place of what was kept: the last thing to ask for."""
        self.p *= self.scale[:, None]
        self.p[:, self.present] = self.z
        self.p.ravel()[self.shared.entry] = self.shared_z
        return self.p
