"""Eq. update-z where little of z changes: the E-step of a batch that leaves most classes without samples.

A class without samples rests at its anchor and keeps its logits: in its column of z only the normaliser and the votes
of neighbours change. So exp(logits) of the resting classes is kept with its row sums, and an E-step works on

- the columns of the L `live` classes, (N, L), as any E-step does, and
- `Votes`: the few entries (i, k) of resting classes where a sample and a neighbour share a class. A vote of j for i in
  class k adds no more than about z_ik M_ij z_jk to z_ik; where that is below `NEGLIGIBLE`, it is left out.

The result is that of `ple.e_step` to rounding in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import row_sums
from moontide.core.graph import BLOCK_ENTRIES, Affinity
from moontide.core.ple import AnchorLogits, Assignment, entropy_weights

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

NEGLIGIBLE = 2.0**-28  # 1/32 of the rounding of numbers near 1
GROWTH = 16.0  # where a row of resting classes has grown by more, shared entries are looked for again
SMALL = 2**14  # entries of z below which the plain E-step is faster
SHARE = 1 / 16  # of z large enough for that, at most: with more, nothing is gained
TINY = float(np.finfo(np.float32).tiny)
HIGHEST = 60.0  # exp of more is near the end of float32


class Votes(NamedTuple):
    """Which entries (i, k) of z hear which (j, k), as positions i K + k; sorted by hearer."""

    hearer: Ints  # (S,) each once
    first: Ints  # (S,) where the votes for each begin
    voter: Ints  # (P,)
    weight: Floats  # (P,) M_ij
    sums: Any  # (N, S) sparse: adds up the hearers of a row


def shared_entries(z: Floats, votes_of: Affinity) -> Votes:
    """Find the entries where z_ik M_ij z_jk is not negligible.

    >>> z = np.asarray([[0.5, 0.0], [0.5, 0.5]], np.float32)
    >>> shared_entries(z, Affinity(np.asarray([0, 1, 2]), np.asarray([1, 0]), np.ones(2, np.float32))).hearer
    array([0, 2])
    """
    from scipy.sparse import csr_array

    n, k = z.shape
    flat, edges = z.ravel(), votes_of.matrix
    least = (NEGLIGIBLE / max(abs(edges.data).max(initial=0), NEGLIGIBLE)) ** 0.5  # one of z_ik and z_jk is as large
    large = np.flatnonzero(flat > least)
    hearer, voter, weight = _along(edges, large, k)
    strong = np.abs(weight) * flat.take(hearer) * flat.take(voter) > NEGLIGIBLE
    found = [(hearer[strong], voter[strong], weight[strong])]
    voter, hearer, weight = _along(votes_of.transposed, large, k)
    strong = np.abs(weight) * flat.take(hearer) * flat.take(voter) > NEGLIGIBLE
    strong &= flat.take(hearer) <= least  # the others are found already
    found.append((hearer[strong], voter[strong], weight[strong]))
    hearer, voter, weight = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(hearer, kind="stable")
    hearer = hearer[order]
    first = np.flatnonzero(np.diff(hearer, prepend=-1))
    pointer = np.searchsorted(hearer[first], k * np.arange(n + 1))
    sums = csr_array((np.ones_like(z, shape=len(first)), np.arange(len(first)), pointer), shape=(n, len(first)))
    return Votes(hearer[first], first, voter[order], weight[order], sums)


def _along(edges: Any, entries: Ints, k: int) -> tuple[Ints, Ints, Floats]:
    """Follow the edges of each entry i K + k to j K + k: both, once for each edge, and its weight."""
    row = entries // k
    start = edges.indptr[row]
    count = edges.indptr[row + 1] - start
    edge = np.arange(count.sum()) + np.repeat(start - np.cumsum(count) + count, count)
    entries = np.repeat(entries, count)
    return entries, entries + (edges.indices[edge] - np.repeat(row, count)) * k, edges.data[edge]


def worthwhile(z: Floats, live: Ints) -> bool:
    """Tell whether `Resting` is fit for assignments z, (N, K): float32 in numpy, few live classes, few large entries.

    >>> worthwhile(np.zeros((1, 9)), np.asarray([0]))
    False
    """
    if type(z) is not np.ndarray or z.dtype != np.float32 or z.size < SMALL or 2 * len(live) > z.shape[1]:
        return False
    return bool(np.count_nonzero(z > NEGLIGIBLE**0.5) < len(z) * len(live) + SHARE * z.size)


class Resting:
    """Assignments with few live classes, from an E-step with the logits `rest` (N, K); takes over its z.

    >>> zeros, live = np.zeros((1, 3), np.float32), np.asarray([1])
    >>> alone = Affinity(np.asarray([0, 0]), np.zeros(0, int), zeros[0, :0])
    >>> few = Resting(AnchorLogits(zeros, zeros[0], zeros[0]), zeros + 1 / 3, zeros[0, :1] + 1.0986, live, alone)
    >>> few.e_step(np.full((1, 1), 20, np.float32)).labels, few.dense().round(3)
    (array([1]), array([[0., 1., 0.]], dtype=float32))
    """

    def __init__(self, rest: AnchorLogits, z: Floats, log_sum: Floats, live: Ints, votes_of: Affinity) -> None:
        self.live, self.votes_of, self.shift = live, votes_of, log_sum[:, None]
        self.z = z.take(live, axis=1)  # (N, L)
        z[:, live] = 0
        self.shared = shared = shared_entries(z, votes_of)
        self.row = shared.hearer // z.shape[1], shared.voter // z.shape[1]  # (S,), (P,)
        self.hears, self.says = (z.ravel().take(at) for at in (shared.hearer, shared.voter))  # (S,), (P,) of z
        self.p = z  # (N, K) exp(logits - shift) of resting classes, without votes but for shared entries
        self.total, self.inner = np.empty_like(log_sum), np.empty_like(log_sum)  # (N,) sums of p and p log p, no votes
        for start in range(0, len(z), size := max(1, BLOCK_ENTRIES // z.shape[1])):
            rows = slice(start, start + size)
            logits = rest[rows]  # (b, K)
            logits -= self.shift[rows]
            logits[:, live] = 0
            p = np.exp(logits, out=z[rows])
            p[:, live] = 0
            self.total[rows], self.inner[rows] = row_sums(p), np.vecdot(p, logits)
        self.top = z.max(axis=1)  # (N,)
        self.alone = z.ravel().take(shared.hearer)  # (S,) of p without votes
        self.logits = np.log(np.maximum(self.alone, TINY))
        z.ravel()[shared.hearer] = self.hears
        self.scale = np.ones_like(log_sum)  # (N,) z = p scale

    @property
    def largest(self) -> float:
        """The largest z of a resting class."""
        return max(float((self.top * self.scale).max()), float(self.hears.max(initial=0)))

    def covers(self, counts: Floats) -> bool:
        """Tell whether all classes with samples are among the live ones; `counts` is (K,)."""
        return bool(np.count_nonzero(counts) == np.count_nonzero(counts[self.live]))

    def votes(self, weight: Floats | None) -> tuple[Floats, Floats, Floats]:
        """Return the votes for live classes (N, L) and for shared entries (S,), and z_i . votes_i, (N,).

        `weight` (N,) is what the vote of each sample counts.
        """
        shared, z, hears, says = self.shared, self.z, self.hears, self.says
        if weight is not None:
            z, hears, says = z * weight[:, None], hears * weight[self.row[0]], says * weight[self.row[1]]
        live = self.votes_of(z)  # (N, L)
        cast = shared.weight * says  # (P,)
        votes = np.add.reduceat(cast, shared.first) if len(cast) else cast  # (S,)
        return live, votes, np.vecdot(z, live) + shared.sums @ (hears * votes)

    def e_step(self, values: Floats, weight: Floats | None = None) -> Assignment | None:
        """Eq. update-z with the logits `values` (N, L) of the live classes; None where that is not accurate.

        The z of the answer is that of the live classes, (N, L).
        """
        shared, k, n = self.shared, self.p.shape[1], len(self.p)
        live, votes, echo = self.votes(weight)
        a = values - self.shift  # (N, L)
        a += live
        best = np.argmax(a, axis=1)  # (N,)
        top = a[np.arange(n), best]  # (N,)
        if top.max() > HIGHEST:
            return None
        p, logits = np.exp(a), self.logits + votes  # (N, L), (S,)
        heard = np.exp(logits)  # (S,)
        change, inner, heard_rest = (
            shared.sums @ x for x in (heard - self.alone, heard * logits - self.alone * self.logits, heard * votes)
        )  # (N,) each
        rest = self.total + change  # sum of p over the resting classes
        total = rest + row_sums(p)
        scale = 1 / total
        if scale.max() > GROWTH:
            return None
        flat = self.p.ravel()
        flat[shared.hearer] = heard
        labels = self.live[best]
        unsure = np.flatnonzero(np.exp(top) <= rest)  # rows where a resting class may be the largest
        if len(unsure):
            rows = self.p[unsure]  # (u, K)
            rows[:, self.live] = p[unsure]
            labels[unsure] = np.argmax(rows, axis=1)
        log_total = np.log(total)
        h = log_total - (self.inner + inner + np.vecdot(p, a)) * scale  # (N,)
        p *= scale[:, None]
        self.before, self.z, self.scale = self.z, p, scale
        self.hears, self.says = heard * scale[self.row[0]], flat.take(shared.voter) * scale[self.row[1]]
        return Assignment(
            p, labels, self.shift[:, 0] + log_total, entropy_weights(h, k), np.vecdot(p, live) + heard_rest * scale,
            echo, np.bincount(labels, minlength=k).astype(p.dtype),
        )  # fmt: skip

    @property
    def moved(self) -> float:
        """The largest change of z of a live class in the last E-step."""
        return float(np.abs(self.z - self.before).max())

    def dense(self) -> Floats:
        """Return z of all classes, (N, K), made in place of what was kept: the last thing to ask for."""
        self.p *= self.scale[:, None]
        self.p[:, self.live] = self.z
        return self.p
