"""MOON as a map over shards: the E-step in blocks of rows, and a sum of K x d statistics for the M-step.

An iteration is a map over shards (`Shard.step`: E-step, then the statistics of the M-step) and a sum of their
`Statistics`; the M-step itself, K x d, is `core.mixture`. `solve` is that loop, whatever does the mapping.

Products are made for all classes, also those without samples: what such a class scores at its anchor would have to be
kept, N x K numbers of 32 bits, and where a run needs shards there are many more rows than classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import Array, affine, class_counts, clip, like, namespace, row_dots, to_numpy
from moontide.core.mixture import Anchors
from moontide.core.ple import (
    anchor_weights,
    concentration,
    entropy_weights,
    join_confidence,
    log_c,
    means,
    prototypes,
    softmax_rows,
)
from moontide.core.progress import track
from moontide.core.threads import in_threads
from moontide.engine.rows import Rows
from moontide.engine.solvers import Plan, Run
from moontide.engine.sums import LARGER, Doubles, Number, Sums
from moontide.errors import OptionError

if TYPE_CHECKING:
    from moontide.methods.moon import MOON

Floats = NDArray[np.float32]


@dataclass
class Statistics(Sums):
    """What shards add up."""

    n: int
    sums: Doubles  # (K, d) sum_i gamma_i z_ik f_i; in the first pass unused
    soft: Doubles  # (K,) sum_i gamma_i z_ik; in the first pass sum_i y_ik
    counts: Doubles  # (K,) what beta is made of; in the first pass sum_i y_ik (1 - cosine)
    free: float  # sum_i gamma_i (heard_i - log_sum_i + log_evidence_i)
    echo: float  # sum_i gamma_i echo_i of the z before
    changed: int  # labels that differ from the z before
    largest: Doubles = field(metadata=LARGER)  # (K,) max_i y_ik, in the first pass


class Shard(Rows):
    """Some rows of a task for MOON.

    >>> from moontide import MOON
    >>> shard = Shard(MOON(), np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), 100.0)
    >>> shard.first_pass().n
    3
    """

    STATE: ClassVar[tuple[str, ...]] = ("z", "labels", "zero_shot_labels", "gamma", "log_evidence")

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        n = len(self.f)
        self.new = self._empty(*self.z.shape, dtype=self.z.dtype)  # (n, K)
        self.gamma, self.new_gamma, self.log_evidence = self._empty(n), self._empty(n), self._empty(n)
        self.gamma[:] = 1

    def first_pass(self) -> Statistics:
        """Make the zero-shot predictions and what anchors and alpha need of them."""
        total = None
        for rows in track(self.blocks, "zero-shot"):
            y, cosine, evidence = self._zero_shot(rows)  # (b, K), (b, K), (b,)
            self.log_evidence[rows] = self.method.text_weight * evidence
            if self.method.gamma == "zero_shot" or self.method.votes == "gamma":
                h = evidence - row_dots(y, self.logit_scale * cosine)
                self.gamma[rows] = entropy_weights(h, len(self.text))
            xp, none = namespace(y), np.zeros((1, 1))
            far = xp.sum(y * (1 - cosine), axis=0)
            soft, far, largest = (_double(x) for x in (xp.sum(y, axis=0), far, xp.max(y, axis=0)))
            part = Statistics(len(y), none, soft, far, 0.0, 0.0, 0, largest)
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def step(self, prototypes: Floats, offset: Floats) -> Statistics:
        """E-step with the classes given, and the statistics for the next M-step."""
        prototypes, offset = like(prototypes, self.f), like(offset, self.f)
        labels, total = self.labels, None
        self.labels = namespace(labels).empty_like(labels)
        for rows in track(self.blocks, "iteration"):
            logits = affine(self.f[rows], prototypes, offset)  # (b, K)
            part = self._assign(rows, logits, labels[rows])
            total = part if total is None else total + part
        kept = self.keep and self.z is self.y
        self.z, self.new = self.new, self._empty(*self.z.shape, dtype=self.z.dtype) if kept else self.z
        self.gamma, self.new_gamma = self.new_gamma, self.gamma
        return total  # type: ignore[return-value]

    def final_echo(self) -> Number:
        """Return sum_i gamma_i z_i . (M z)_i of the assignments as they are."""
        echoes = (self.gamma[at] @ row_dots(self._wide(at), self._votes(at)) for at in self.blocks)
        return Number(float(sum(echoes)))

    def _assign(self, rows: slice, logits: Array, before: Array) -> Statistics:
        method, k, xp = self.method, len(self.text), namespace(logits)
        p = xp.empty_like(logits)  # (b, K)

        def block(at: slice) -> tuple[Any, ...]:
            part = slice(at.start - rows.start, at.stop - rows.start)
            votes = self._votes(at)  # (b, K)
            p[part], *stats = softmax_rows(logits[part] + votes, votes, self._wide(at))
            return tuple(stats)

        parts = in_threads(block, self._cut(rows))
        labels, log_sum, h, heard, echo = (xp.concat(column) for column in zip(*parts, strict=True))
        weight, changed = self.gamma[rows], int((labels != before).sum())
        gamma = entropy_weights(h, k) if method.gamma == "assignments" else weight
        self.new[rows], self.labels[rows], self.new_gamma[rows] = self._narrow(p), labels, gamma
        soft = _double(gamma @ p)  # (K,)
        counts = soft
        if method.beta == "hard":
            counts = _double(class_counts(labels, k, gamma if method.gamma_in_counts else None))
        sums = _double(p.T @ (self.f[rows] * gamma[:, None]))  # (K, d)
        free = float(gamma @ (heard - log_sum + self.log_evidence[rows]))
        return Statistics(len(p), sums, soft, counts, free, float(weight @ echo), changed, np.zeros(k))

    def _weights(self, edges: slice) -> Array:
        weight = self.votes_of.weight[edges]
        return weight * self.gamma[self.votes_of.neighbour[edges]] if self.method.votes == "gamma" else weight


def _double(x: Array) -> Doubles:
    return to_numpy(x).astype(np.float64)


@dataclass
class Solution:
    """What `solve` knows at the end; the assignments are in the shards."""

    energy: list[float]
    converged: bool
    kappa: Floats
    beta: Floats
    mu: Floats
    alpha: Floats
    anchor_kappa: Floats


def plan(method: MOON) -> Plan:
    """First pass, an E-step before and after each M-step, and the last echo.

    >>> from moontide import MOON
    >>> plan(MOON())
    Plan(calls=13, steps=11)
    """
    if method.precision != "full":
        raise OptionError(f"The 'precision' option of moon must be 'full' on shards. Got {method.precision!r}.")
    return Plan(method.m_steps + 3, method.m_steps + 1)


def solve(method: MOON, run: Run, text: Floats, logit_scale: float) -> Solution:
    """Alternate E-steps on shards and M-steps here. `run(name, *arguments)` calls a method of every shard and adds up.

    >>> from moontide import MOON
    >>> eye = np.eye(3, dtype=np.float32)
    >>> shard = Shard(MOON(), eye, eye, 100.0)
    >>> solve(MOON(), lambda name, *given: getattr(shard, name)(*given), eye, 100.0).converged
    True
    """
    d, m_step = text.shape[1], method.m_step(logit_scale)
    first = run("first_pass")
    soft, far, largest = (x.astype(text.dtype) for x in (first.soft, first.counts, first.largest))  # (K,) each
    r = clip(1 - means(far[:, None], soft, method.count_epsilon)[:, 0], 0, method.r_cap)  # (K,)
    if isinstance(method.alpha, str):
        confidence = join_confidence(soft / first.n, largest, method.confidence, method.normalise_confidence)
        alpha = anchor_weights(confidence, method.alpha)
    else:
        alpha = np.full_like(r, method.alpha)
    anchors = Anchors(text, concentration(r, d, method.inverse, method.r_cap), r, alpha)
    rows = prototypes(text, text, anchors.kappa, m_step.scale, method.temper)
    offset = log_c(d, anchors.kappa, method.log_normaliser) / method.temper
    classes, kl, changed = None, 0.0, 0
    energy: list[float] = []
    for it in range(method.m_steps + 1):
        step = run("step", rows, offset)
        changed = step.changed
        if it:
            energy[-1] -= step.echo / 2
        energy.append(step.free + kl)
        if it < method.m_steps:
            sums, soft, counts = (x.astype(text.dtype) for x in (step.sums, step.soft, step.counts))
            classes = m_step(sums, soft, counts, anchors)
            rows, offset = classes.prototypes, classes.offset
            kl = float((alpha * classes.kl).sum()) / method.temper
    energy[-1] -= run("final_echo").value / 2
    beta, mu, kappa = (np.zeros_like(r), text, anchors.kappa) if classes is None else classes[:3]
    return Solution(energy, changed == 0, kappa, beta, mu, alpha, anchors.kappa)
