"""MOON in the array API: the equations of `core.ple`, as they stand, on rows in memory or block by block.

In memory on a CPU, products are computed only for the classes that have samples. Elsewhere they are computed for all
classes: counting would make a GPU wait, and on shards there are many more rows than classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from moontide.core import formulas, ple
from moontide.core.arrays import Array, affine, class_counts, clip, columns, device_type, like, namespace, row_dots
from moontide.core.mixture import ALL, VMF, First, Laplacian, Scores, Step, VMFClasses
from moontide.core.rows import Rows as Base

Solve = Callable[[Array, Array], tuple[Any, ...]]


def run(solve: Solve, f: Array, text: Array, key: Any = None, precision: str = "full") -> tuple[Any, ...]:
    """Return solve(f, text)."""
    return solve(f, text)


def m_step(vmf: VMF, step: Step) -> VMFClasses:
    """Eqs. update-m and update-m-real: the class distributions that follow from the sums of an E-step."""
    o, (text, anchor_kappa, anchor_r, alpha) = vmf.options, vmf.anchors_of(step.present)
    sums, soft, counts = (like(x, text) for x in (step.sums, step.soft, step.counts))
    beta = formulas.shrinkage(counts, alpha)  # (L,)
    v = ple.means(sums, soft, o.count_epsilon)  # (L, d)
    resultant = ple.shrink(v, beta, text * anchor_r[:, None] if o.update == "exact" else text)  # (L, d)
    r = row_dots(resultant, resultant) ** 0.5  # (L,) A_d(kappa_k)
    mu = resultant / clip(r, ple.EPS)[:, None] if o.update_mu else text  # (L, d)
    kappa = vmf.kappa(r) if o.update_kappa else anchor_kappa  # (L,)
    kl = ple.anchor_kl(row_dots(mu, text), anchor_kappa, anchor_r, kappa, vmf.d, o.log_normaliser)  # (L,)
    vectors = ple.prototypes(text, mu, kappa, vmf.scale, o.temper)  # (L, d)
    return vmf.classes(step.present, beta, kappa, kl, mu, vectors, vmf.logits_at(kappa)[1])


class Rows(Base):
    """The samples of MOON."""

    STATE: ClassVar[tuple[str, ...]] = ("z", "labels", "zero_shot_labels", "gamma", "log_sum_y")

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        n = len(self.f)
        self.gamma, self.log_sum_y = namespace(self.f).ones_like(self.f[:, 0]), self._empty(n)
        self.cosine: Any = None  # (n, K) in memory
        self.counted = self.in_memory and device_type(self.f) == "cpu"  # whether absent classes are left out

    @property
    def vote_weight(self) -> Array | None:
        """What the vote of each sample counts, (n,); None: 1."""
        return self.gamma if self.method.votes == "gamma" else None

    def first(self) -> First:
        """Eq. zero-shot, and what Eqs. init and as-lambda need of it."""

        def block(rows: slice) -> First:
            y, cosine, log_sum = self._zero_shot(rows)  # (b, K), (b, K), (b,)
            self._first_weights(rows, y, log_sum)
            return First.of(y, cosine)

        return self._add_up(block, "zero-shot")  # type: ignore[no-any-return]

    def _first_weights(self, rows: slice, y: Array, log_sum: Array) -> None:
        if self.in_memory and not self.method.m_steps:  # to count the labels that the only E-step changes
            self.labels = namespace(y).argmax(y, axis=1)
        if self.method.gamma == "zero_shot" or self.method.votes == "gamma":  # asked for before the first E-step
            self.gamma[rows] = ple.sample_weights(y)
        self.log_sum_y[rows] = self.method.text_weight * log_sum

    def _zero_shot(self, rows: slice) -> tuple[Array, Array, Array]:
        if not self.in_memory:
            return super()._zero_shot(rows)
        self.cosine = namespace(self.f).matmul(self.f, self.text.T, out=self._spare())  # (n, K)
        self.y, log_sum = ple.zero_shot(self.cosine, self.logit_scale, self.z)
        self.z = self.y
        return self.y, self.cosine, log_sum

    def step(self, scores: Scores) -> Step:
        """E-step with the classes given, and the sums of the new assignments."""
        if not self.in_memory:
            scores = Scores(scores.present, *(x if x is None else like(x, self.f) for x in scores[1:]))
        xp, new, found = namespace(self.f), self._room(), []

        def block(rows: slice) -> Step:
            a = self._assign(rows, scores, new)
            gamma = a.gamma if self.method.gamma == "assignments" else self.gamma[rows]  # (b,)
            free = ple.free_energy(gamma, a.agreement, a.log_sum, self.log_sum_y[rows])
            changed = 0 if self.labels is None else (a.labels != self.labels[rows]).sum()
            still = self.counted and self.labels is not None and not changed
            moved = float(xp.max(xp.abs(a.z - self.z))) if still else math.inf
            laplacian = self.gamma[rows] * a.before
            counts = self._counts(a.z, gamma, a.labels)  # (K,)
            present = xp.nonzero(counts)[0] if self.counted else ALL
            sums, soft = ple.weighted_sums(columns(a.z, present), gamma, self.f[rows])  # (L, d), (L,)
            found.append((a.labels, gamma))
            return Step(sums, soft, counts[present], free, laplacian, changed, moved, present)

        total: Step = self._add_up(block, "iteration")
        self._replace(new)
        self.labels, self.gamma = self._joined(found)
        return total

    def _counts(self, z: Array, gamma: Array, labels: Array) -> Array:
        """Return the n_k that beta_k is made of: soft, hard, or hard and gamma-weighted, (K,)."""
        if self.method.beta == "soft":
            return gamma @ z
        counts = class_counts(labels, len(self.text), gamma if self.method.gamma_in_counts else None)
        return namespace(gamma).astype(counts, gamma.dtype, copy=False)

    def _assign(self, rows: slice, scores: Scores, new: Array) -> ple.Assignment:
        """E-step of some rows, written to `new`."""
        present, b = scores.present, rows.stop - rows.start
        # products use all cores by themselves, what follows in threads does not
        values: Any = None if scores.prototypes is None else affine(self.f[rows], scores.prototypes, scores.offset)
        whole = values is not None and isinstance(present, slice)
        cosine: Any = None if whole else self.f[rows] @ self.text.T if self.cosine is None else self.cosine  # (b, K)
        z = new[rows] if new.dtype == self.f.dtype else self._empty(b, len(self.text))  # (b, K)

        def part(at: slice) -> tuple[Array, ...]:
            here = slice(at.start - rows.start, at.stop - rows.start)
            logits = values[here] if whole else ple.at_anchor(cosine[here], scores.slope, scores.at_anchor)  # (b, K)
            if not whole and values is not None:
                logits[:, present] = values[here]
            return ple.e_step(logits, self._votes(at, self.vote_weight), self._wide(at), z[here])[1:]

        found = self._in_parts(part, rows)
        if new.dtype != self.f.dtype:
            new[rows] = self._narrow(z)
        return ple.Assignment(z, *found)

    def finish(self) -> Laplacian:
        """Return gamma_i z_i . (M z)_i of the assignments as they are."""

        def part(at: slice) -> tuple[Array]:
            return (self.gamma[at] * row_dots(self._wide(at), self._votes(at, self.vote_weight)),)

        return self._add_up(lambda rows: Laplacian(*self._in_parts(part, rows)), "objective")  # type: ignore[no-any-return]
