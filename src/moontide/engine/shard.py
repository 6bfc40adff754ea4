"""A shard of rows: MOON's E-step in blocks, with nothing of size N x K but the assignments, in 16 bits.

An iteration is a map over shards (`Shard.step`: E-step, then the statistics of the M-step) and a sum of their
`Statistics`; the M-step itself, K x d, is `MOON.m_step`. `solve` is that loop, whatever does the mapping. Memory is
O(n (d + m + 3 K / 2)): unit features, graph, and zero-shot, old and new assignments as 2-byte numbers.

The 16 bits are exact to 5e-4 of a probability; everything is computed and summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import affine, class_counts, clip, row_dots
from moontide.core.graph import Graph, nearest_neighbours
from moontide.core.ple import (
    anchor_weights,
    concentration,
    entropy_weights,
    join_confidence,
    log_c,
    means,
    neighbour_votes,
    prototypes,
    softmax_rows,
)
from moontide.core.progress import track
from moontide.core.simplex import softmax_evidence
from moontide.core.threads import in_threads, workers

if TYPE_CHECKING:
    from moontide.methods.moon import MOON

BLOCK_ENTRIES = 2**22  # N x K entries worked on at once, 16 MB in float32

Floats = NDArray[np.float32]


@dataclass
class Statistics:
    """What shards add up; `+` joins two."""

    n: int
    sums: Floats  # (K, d) sum_i gamma_i z_ik f_i; in the first pass unused
    soft: Floats  # (K,) sum_i gamma_i z_ik; in the first pass sum_i y_ik
    counts: Floats  # (K,) what beta is made of; in the first pass sum_i y_ik (1 - cosine)
    free: float  # sum_i gamma_i (heard_i - log_sum_i + log_evidence_i)
    echo: float  # sum_i gamma_i echo_i of the z before
    changed: int  # labels that differ from the z before
    largest: Floats  # (K,) max_i y_ik, in the first pass

    def __add__(self, other: Statistics) -> Statistics:
        """Add up all but `largest`, of which the larger is kept."""
        joined = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Statistics(**{**joined, "largest": np.maximum(self.largest, other.largest)})


class Shard:
    """Some rows of a task, with their graph and assignments.

    >>> from moontide import MOON
    >>> shard = Shard(MOON(), np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), 100.0)
    >>> shard.first_pass().n
    3
    """

    def __init__(
        self, method: MOON, features: Floats, text: Floats, logit_scale: float, graph: Graph | None = None
    ) -> None:
        self.method, self.f, self.text, self.logit_scale = method, features, text, logit_scale
        n, k = len(features), len(text)
        m = method.neighbours if method.laplacian_weight else 0
        self.graph = graph or nearest_neighbours(features, m)
        symmetric, mean = method.graph == "symmetric", method.laplacian == "mean"
        self.votes_of = neighbour_votes(self.graph, symmetric, mean, method.laplacian_weight)
        self.y = np.empty((n, k), np.float16)  # zero-shot
        self.z, self.new = self.y, np.empty((n, k), np.float16)
        self.labels = np.empty(n, np.int64)
        self.gamma, self.new_gamma = np.ones(n, np.float32), np.empty(n, np.float32)
        self.log_evidence = np.empty(n, np.float32)
        size = max(1, BLOCK_ENTRIES // k)
        self.blocks = [slice(i, min(i + size, n)) for i in range(0, n, size)]

    def first_pass(self) -> Statistics:
        """Make the zero-shot predictions and what anchors and alpha need of them."""
        total = None
        for rows in track(self.blocks, "zero-shot"):
            cosine = self.f[rows] @ self.text.T  # (b, K)
            y, evidence = softmax_evidence(self.logit_scale * cosine)
            self.y[rows], self.labels[rows] = y, y.argmax(axis=1)
            self.log_evidence[rows] = self.method.text_weight * evidence
            if self.method.gamma == "zero_shot" or self.method.votes == "gamma":
                h = evidence - np.einsum("nk,nk->n", y, self.logit_scale * cosine)
                self.gamma[rows] = entropy_weights(h, len(self.text))
            far = (y * (1 - cosine)).sum(axis=0)
            none = np.zeros((1, 1), np.float32)
            part = Statistics(len(y), none, y.sum(axis=0), far, 0.0, 0.0, 0, y.max(axis=0))
            total = part if total is None else total + part
        return total  # type: ignore[return-value]

    def step(self, prototypes: Floats, offset: Floats) -> Statistics:
        """E-step with the classes given, and the statistics for the next M-step."""
        total = None
        for rows in track(self.blocks, "iteration"):
            logits = affine(self.f[rows], prototypes, offset)  # (b, K)
            part = self._assign(rows, logits)
            total = part if total is None else total + part
        self.z, self.new = self.new, np.empty_like(self.z) if self.z is self.y else self.z
        self.gamma, self.new_gamma = self.new_gamma, self.gamma
        return total  # type: ignore[return-value]

    def final_echo(self) -> float:
        """Return sum_i gamma_i z_i . (M z)_i of the assignments as they are."""
        echoes = (self.gamma[at] @ row_dots(self.z[at].astype(np.float32), self._votes(at)) for at in self.blocks)
        return float(sum(echoes))

    def _assign(self, rows: slice, logits: Floats) -> Statistics:
        method, k = self.method, len(self.text)
        p = np.empty_like(logits)  # (b, K)

        def block(part: slice) -> tuple[Any, ...]:
            at = slice(rows.start + part.start, rows.start + part.stop)
            votes = self._votes(at)  # (b, K)
            p[part], *stats = softmax_rows(logits[part] + votes, votes, self.z[at].astype(np.float32))
            return tuple(stats)

        b = len(logits)
        size = -(-b // (4 * workers()))
        parts = in_threads(block, [slice(i, min(i + size, b)) for i in range(0, b, size)])
        labels, log_sum, h, heard, echo = (np.concatenate(column) for column in zip(*parts, strict=True))
        before, changed = self.gamma[rows], int((labels != self.labels[rows]).sum())
        gamma = entropy_weights(h, k) if method.gamma == "assignments" else before
        self.new[rows], self.labels[rows], self.new_gamma[rows] = p, labels, gamma
        soft = gamma @ p  # (K,)
        counts = class_counts(labels, k, gamma if method.gamma_in_counts else None).astype(np.float32)
        sums = p.T @ (self.f[rows] * gamma[:, None])  # (K, d)
        free = float(gamma @ (heard - log_sum + self.log_evidence[rows]))
        counts = soft if method.beta == "soft" else counts
        return Statistics(b, sums, soft, counts, free, float(before @ echo), changed, np.zeros(k, np.float32))

    def _votes(self, rows: slice) -> Floats:
        """Return the votes for some rows from the 16-bit assignments of their neighbours, (b, K)."""
        from scipy.sparse import csr_array

        start, stop = self.votes_of.pointer[rows.start], self.votes_of.pointer[rows.stop]
        who, weight = self.votes_of.neighbour[start:stop], self.votes_of.weight[start:stop]
        if self.method.votes == "gamma":
            weight = weight * self.gamma[who]
        voters, at = np.unique(who, return_inverse=True)
        pointer = self.votes_of.pointer[rows.start : rows.stop + 1] - start
        matrix = csr_array((weight, at, pointer), shape=(rows.stop - rows.start, len(voters)))
        votes: Floats = matrix @ self.z[voters].astype(np.float32)
        return votes


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


def solve(method: MOON, run: Callable[..., Any], text: Floats, logit_scale: float) -> Solution:
    """Alternate E-steps on shards and M-steps here. `run(name, *arguments)` calls a method of every shard and adds up.

    >>> from moontide import MOON
    >>> eye = np.eye(3, dtype=np.float32)
    >>> shard = Shard(MOON(), eye, eye, 100.0)
    >>> solve(MOON(), lambda name, *given: getattr(shard, name)(*given), eye, 100.0).converged
    True
    """
    from moontide.methods.moon import Anchors

    d, scale = text.shape[1], method.text_weight * logit_scale
    first = run("first_pass")
    far = means(first.counts[:, None], first.soft, method.count_epsilon)[:, 0]  # (K,)
    r = clip(1 - far, 0, method.r_cap)  # (K,)
    if isinstance(method.alpha, str):
        average, largest = first.soft / first.n, first.largest
        confidence = join_confidence(average, largest, method.confidence, method.normalise_confidence)
        alpha = anchor_weights(confidence, method.alpha)
    else:
        alpha = np.full_like(r, method.alpha)
    anchors = Anchors(text, concentration(r, d, method.inverse, method.r_cap), r, alpha)
    rows = prototypes(text, text, anchors.kappa, scale, method.temper)
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
            classes = method.m_step(step.sums, step.soft, step.counts, anchors, scale)
            rows, offset = classes.prototypes, classes.offset
            kl = float((alpha * classes.kl).sum()) / method.temper
    energy[-1] -= run("final_echo") / 2
    beta, mu, kappa = (np.zeros_like(r), text, anchors.kappa) if classes is None else classes[:3]
    return Solution(energy, changed == 0, kappa, beta, mu, alpha, anchors.kappa)
