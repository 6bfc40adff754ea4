"""MOON on a CPU in float32: compiled loops, and no work for classes that have no samples.

Three things are private to this backend, and none changes an answer by more than rounding in float32.

- The mean of a class is R_k = a_k S_k + b_k t_k with S_k = sum_i gamma_i z_ik f_i, and all that an E-step needs of it
  follows from products with S_k and t_k: no other vectors of length d are made. In a batch of N <= d samples these are
  sums of f_i . f_j. Where |R_k| or its weight is small, that loses digits, and the M-step is that of `plain`.
- A class without samples is absent: at its anchor, with the logits it has there. In its column of z only the normaliser
  and the votes of neighbours change. So `Absent` keeps the sums of exp(logits) over the absent classes; an E-step works
  on the L present columns, and on the shared entries (i, k) of absent classes where a sample and its neighbours share a
  class: the votes for i in class k add about z_ik sum_j M_ij z_jk to z_ik, and below `NEGLIGIBLE` they are left out.
- All N x K arrays are taken at once, and used again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import affine, column_dots, put, row_dots
from moontide.core.backends import _numba, plain
from moontide.core.graph import Graph
from moontide.core.mixture import VMF, First, Laplacian, Scores, Step, VMFClasses
from moontide.core.ple import Assignment, free_energy, log_classes
from moontide.core.threads import in_threads, row_blocks

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

BELOW_1 = 1 - float(np.finfo(np.float32).eps)
NEGLIGIBLE = 2.0**-28  # 1/32 of the rounding of numbers near 1
SMALL = 2**14  # entries of z below which the dense E-step is faster
SHARE = 1 / 16  # of z large enough for that, at most: with more, nothing is gained

run = plain.run


def nearest(f: Floats, m: int) -> tuple[Any, Graph | None]:
    """Return f_i . f_j (N, N) of N <= d samples, and their graph of up to m neighbours; None for what is not made."""
    n, d = f.shape
    gram: Any = f @ f.T if n <= d else None
    return gram, Graph(*_numba.nearest(gram, min(m, n - 1))) if gram is not None and min(m, n - 1) else None


def products(
    f: Floats, gram: Floats | None, z: Floats, columns: Ints, gamma: Floats, cosine: Floats, some: Ints,
    keep: bool = False,
) -> tuple[tuple[Floats, ...], Callable[[], Floats]]:  # fmt: skip
    """Return what the loops need of the sums S_k = sum_i gamma_i z_ik f_i of L classes, and a function that makes them.

    That is gamma_i z_ik, overwritten unless `keep`, and f_i . t_k, (N, L) each, sum_i gamma_i z_ik and S_k . t_k, (L,)
    each, f_i . S_k, (N, L), and |S_k|^2, (L,); the function returns S, (L, d). The classes are `some` of the
    columns of `cosine`, f_i . t_k, and `columns` of z; `gram` (N, N) is f_i . f_j, if available.
    """
    weight, near, soft, along = _numba.class_weights(z, columns, gamma, cosine, some)
    if gram is not None:
        dots = gram @ weight
        return (weight, near, soft, along, dots, column_dots(weight, dots)), lambda: weight.T @ f
    sums = weight.T @ f  # (L, d)
    dots = np.matmul(f, sums.T, out=None if keep else weight)
    return (weight, near, soft, along, dots, row_dots(sums, sums)), lambda: sums


def m_step(vmf: VMF, step: Any) -> VMFClasses:
    """Eqs. update-m and update-m-real, by products with the sums where options and accuracy permit."""
    o, rows, a = vmf.options, step.rows, step.rows.absent
    given = (rows.z, step.present, rows.gamma, rows.cosine, step.present)
    if a is not None:
        given = (a.z, a.columns, rows.gamma, a.cosine, a.columns)
    if o.inverse == "banerjee" and o.log_normaliser == "asymptotic" and o.update_mu and o.update_kappa:
        text, *anchors = vmf.anchors_of(step.present)
        (_, *of_sums), sums = products(rows.f, rows.gram, *given)
        epsilon, scale = np.float32(o.count_epsilon), np.float32(vmf.scale)
        numbers = o.update == "exact", vmf.d, epsilon, min(o.r_cap, BELOW_1), o.kappa_cap, o.temper, scale
        found, accurate = _numba.m_step(*of_sums, step.counts, *anchors, *numbers)
        if accurate:
            beta, kappa, kl, a, b = found  # (L,) each
            mu = lambda: a[:, None] * sums() + b[:, None] * text  # noqa: E731
            return vmf.classes(step.present, beta, kappa, kl, mu, None, None, of_sums[3])
    weight, _, step.soft, _ = _numba.class_weights(*given)
    step.sums = weight.T @ rows.f
    return plain.m_step(vmf, step)


@dataclass
class LoopStep(Step):
    """A step without sums: `m_step` computes them from the rows."""

    rows: Any = None


class Rows(plain.Rows):
    """The samples of MOON, all in memory."""

    gram: Any  # (N, N) f_i . f_j, where N <= d

    def _neighbours(self) -> Graph:
        self.gram, graph = nearest(self.f, self.method.neighbours if self.method.laplacian_weight else 0)
        return graph or super()._neighbours()

    def __init__(self, *given: Any, **options: Any) -> None:
        self.gram = None
        super().__init__(*given, **options)
        self.absent: Absent | None = None  # z, where few classes are present
        self.other = np.zeros((5, len(self.f)), self.f.dtype)  # of `_numba.e_step` where there are no other columns
        self.classes = np.arange(len(self.text))  # (K,)
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
        found = None if self.absent is None else self.absent.e_step(values)
        if found is None:
            old, anchor = self._dense(), (self.cosine, scores.slope, scores.at_anchor, self.other[0])
            some: tuple[Any, Any] = (scores.present, values) if values is not None else (self.classes[:0], old[:, :0])
            found = self.assign(anchor, *some, old, self.other, self._room(), self.classes)[:3]
            self._replace(found[0].z)
        a, _, moved = found
        self.labels = a.labels
        changed = 0 if old_labels is None else np.count_nonzero(a.labels != old_labels)
        moved = np.inf if old_labels is None else moved
        if self.method.gamma == "assignments":
            self.gamma = a.gamma
        free = free_energy(self.gamma, a.agreement, a.log_sum, self.log_sum_y)
        counts = self._find_present(a, scores)[self.present]  # (L,)
        return LoopStep(None, None, counts, free, weight * a.before, changed, moved, self.present, self)

    def _dense(self) -> Floats:
        """Return z of all classes."""
        if self.absent is not None:
            self.z, self.absent = self.absent.dense(), None
        return self.z  # type: ignore[no-any-return]

    def assign(
        self, anchor: Any, present: Ints, values: Floats, z: Floats, other: Floats, new: Floats, names: Ints,
    ) -> tuple[Assignment, Floats, float, bool]:  # fmt: skip
        """Eq. update-z by `_numba.e_step`; also returns its last row of `found`, how far z moved, and if `bounded`."""
        n, log_k = len(z), log_classes(len(self.text))
        labels, found = np.empty(n, np.int64), np.empty((5, n), z.dtype)
        edges = self.votes_of.weighted(self.vote_weight).edges
        given = anchor, present, values, edges, z, other, new, names, labels, found, log_k
        run = in_threads(lambda at: _numba.e_step(at.start, at.stop, *given), row_blocks(n, z.size))
        moved, bounded = zip(*run, strict=True)
        return Assignment(new, labels, *found[:4]), found[4], max(moved), all(bounded)

    def _find_present(self, a: Assignment, scores: Scores) -> Floats:
        """Find the classes that have samples now, and return the counts of all, (K,)."""
        counts: Floats = self._counts(a.z, self.gamma, a.labels)  # (K,); soft without absent classes (L,)
        if len(counts) < len(self.text):
            counts = put(np.zeros(len(self.text), np.float32), self.present, counts)
        if self.absent is not None and np.count_nonzero(counts) > np.count_nonzero(counts[self.present]):
            self._dense()  # a class that was absent has samples
        if self.absent is None:
            present = np.nonzero(counts)[0]  # (L,)
            self.present = self.present if np.array_equal(present, self.present) else present
            if self.steps and self.votes_of.symmetric and worthwhile(self.z, self.present):
                self.absent = Absent(self, a.log_sum, scores)
        self.steps += 1
        return counts

    def finish(self) -> Laplacian:
        """Return gamma_i z_i . (M z)_i of the assignments as they are, (N,)."""
        if self.absent is not None:
            before = self.absent.assign(self.absent.z)[1].before
            self._dense()
            return Laplacian(self.gamma * before)
        edges = self.votes_of.weighted(self.vote_weight).edges
        return Laplacian(self.gamma * row_dots(self.z, _numba.votes(edges, self.z, self._room())))


def worthwhile(z: Floats, present: Ints) -> bool:
    """Tell whether `Absent` is fit for assignments z, (N, K): few classes present, few large entries."""
    if z.size < SMALL or not 0 < 3 * len(present) <= z.shape[1]:
        return False
    return bool(np.count_nonzero(z > NEGLIGIBLE**0.5) < len(z) * len(present) + SHARE * z.size)


class Absent:
    """The assignments of rows after a dense E-step, with few classes present; takes over their z."""

    def __init__(self, rows: Rows, log_sum: Floats, scores: Scores) -> None:
        z, self.rows, self.present, self.shift, edges = rows.z, rows, rows.present, log_sum, rows.votes_of.edges
        self.p: Floats = rows._room()  # (N, K) exp(logits - shift), 0 if present or shared
        sums = np.zeros((5, len(z)), z.dtype)  # over each row of p, as `other` of `_numba.e_step`
        self.z, self.cosine = (x.take(self.present, axis=1) for x in (z, rows.cosine))  # (N, L)
        self.columns = np.arange(len(self.present))  # (L,)
        z[:, self.present] = 0
        given = rows.cosine, scores.slope, scores.at_anchor, log_sum, self.present, edges, z
        self.entry, starts = _numba.split(*given, self.p, sums, np.float32(NEGLIGIBLE))
        # shared entries (S,), (i, k) at i K + k: q = exp(logits - shift)
        self.q = z.ravel().take(self.entry)
        row, k = np.divmod(self.entry, z.shape[1])  # (S,), (S,)
        logits = rows.cosine.ravel().take(self.entry) * scores.slope[k] + scores.at_anchor[k]
        votes = _numba.shared_votes(self.entry, row, edges, z.view(np.int32).ravel())
        self.others = logits - log_sum[row], starts, *votes, sums
        self.scale = self.each = np.ones_like(log_sum)  # (N,) z = p scale, and what votes count without weights
        one = np.ones_like(self.z[0])  # (L,)
        self.anchor = one, 0 * one, self.shift
        rows.spare.append(z)

    def assign(self, values: Floats) -> tuple[Floats, Assignment, Floats, float, bool]:
        """Return q of the shared entries with these logits (N, L), and what `Rows.assign` returns of the others."""
        rows, by = self.rows, self.each if self.rows.vote_weight is None else self.rows.vote_weight
        q, other = _numba.shared_sums(self.q, self.scale, by, *self.others)
        given = (values, *self.anchor), self.columns[:0], values[:, :0], self.z, other
        return q, *rows.assign(*given, np.empty_like(self.z), self.present)

    def e_step(self, values: Floats) -> tuple[Assignment, Floats, float] | None:
        """Eq. update-z with the logits `values` (N, L) of the present classes; None where that is not accurate.

        The z of the answer is that of the present classes, (N, L).
        """
        q, a, scale, moved, bounded = self.assign(values)
        if not bounded:
            return None
        self.z, self.q, self.scale = a.z, q, scale
        away = np.nonzero(a.labels < 0)[0]  # those of a class that was absent
        if len(away):
            a.labels[away] = self.dense(away).argmax(axis=1)
        return a._replace(log_sum=self.shift + a.log_sum), scale, moved

    def dense(self, which: Any = slice(None)) -> Floats:
        """Return z of all classes for some samples; for all, it is made in place, and nothing may follow."""
        self.p.ravel()[self.entry] = self.q
        z: Floats = self.p[which]
        z *= self.scale[which, None]
        z[:, self.present] = self.z[which]
        return z
