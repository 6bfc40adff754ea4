"""Eq. update-z where little of z changes: the E-step of a batch that leaves most classes without samples.

A class without samples rests at its anchor and keeps its logits: in its column of z only the normaliser and the votes
of neighbours change. So the sums of exp(logits) over the resting classes are kept, and an E-step works on

- the columns of the L `live` classes, (N, L), as any E-step does, and
- `Shared`: the few entries (i, k) of resting classes where a sample and its neighbours share a class. The votes for i
  in class k add no more than about z_ik sum_j M_ij z_jk to z_ik; where that is below `NEGLIGIBLE`, they are left out.

The result is that of `ple.e_step` to rounding in float32. With a larger limit than `NEGLIGIBLE` less is shared, and
`Resting.dropped` bounds by how much the z of a sample is off.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import row_sums
from moontide.core.compiled import loops_for
from moontide.core.graph import Affinity
from moontide.core.ple import AnchorLogits, Assignment, entropy_weights, log_classes
from moontide.core.threads import in_threads, row_blocks

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

NEGLIGIBLE = 2.0**-28  # 1/32 of the rounding of numbers near 1
COARSE = 2.0**-14  # the limit where results need not be exact
GROWTH = 16.0  # where a row of resting classes has grown by more, shared entries are looked for again
SMALL = 2**14  # entries of z below which the plain E-step is faster
SHARE = 1 / 16  # of z large enough for that, at most: with more, nothing is gained
HIGHEST = 60.0  # exp of more is near the end of float32


class Shared(NamedTuple):
    """The entries (i, k) of z that hear each other, as positions i K + k, rising."""

    entry: Ints  # (S,)
    row: Ints  # (S,) i
    starts: Ints  # (N + 1,) where the entries of each row begin
    first: Ints  # (S + 1,) where the votes for each entry begin
    voter: Ints  # (P,) which entry votes
    weight: Floats  # (P,) M_ij


def reach(votes_of: Affinity) -> Affinity:
    """Return who hears or is heard by whom, with |M_ij| + |M_ji|, or |M_ij| where that is symmetric.

    >>> reach(Affinity(np.asarray([0, 1, 1]), np.asarray([1]), np.ones(1, np.float32))).neighbour
    array([1, 0])
    """
    if votes_of.symmetric:
        return Affinity(votes_of.pointer, votes_of.neighbour, np.abs(votes_of.weight))
    one_way = abs(votes_of.matrix.copy())  # a copy, since scipy sorts the entries in place
    both = one_way + one_way.T.tocsr()
    return Affinity(both.indptr.astype(np.int64), both.indices.astype(np.int64), both.data)


def worthwhile(z: Floats, live: Ints) -> bool:
    """Tell whether `Resting` is fit for assignments z, (N, K): float32 in numpy, few live classes, few large entries.

    >>> worthwhile(np.zeros((1, 9)), np.asarray([0]))
    False
    """
    if type(z) is not np.ndarray or z.dtype != np.float32 or z.size < SMALL or not 0 < 2 * len(live) <= z.shape[1]:
        return False
    return bool(np.count_nonzero(z > NEGLIGIBLE**0.5) < len(z) * len(live) + SHARE * z.size)


class Resting:
    """Assignments with few live classes, from an E-step with the logits `rest` (N, K); takes over its z, and `out`.

    >>> zeros, live = np.zeros((1, 3), np.float32), np.asarray([1])
    >>> alone = Affinity(np.asarray([0, 0]), np.zeros(0, int), zeros[0, :0])
    >>> few = Resting(AnchorLogits(zeros, zeros[0], zeros[0]), zeros + 1 / 3, zeros[0, :1] + 1.0986, live, alone)
    >>> few.e_step(np.full((1, 1), 20, np.float32)).labels, few.dense().round(3)
    (array([1]), array([[0., 1., 0.]], dtype=float32))
    """

    def __init__(
        self,
        rest: AnchorLogits,
        z: Floats,
        log_sum: Floats,
        live: Ints,
        votes_of: Affinity,
        out: Floats | None = None,
        negligible: float = NEGLIGIBLE,
    ) -> None:
        self.live, self.votes_of, self.shift, self.loops = live, votes_of, log_sum, loops_for(z)
        near = reach(votes_of)
        self.p = p = np.empty_like(z) if out is None else out  # (N, K) exp(logits - shift), 0 if live or shared
        self.total, self.inner, self.top, spoken = np.empty((4, len(z)), z.dtype)  # (N,) see `split_rows`
        split = (p, self.total, self.inner, self.top, spoken, np.float32(negligible))
        if self.loops:
            edges = (near.pointer, near.neighbour, near.weight)
            self.z, entry, starts = self.loops.rest(*rest, log_sum, live, *edges, z, *split)
        else:
            self.z, entry, starts = split_rows(rest, log_sum, live, near, z, *split)
        self.hears = z.ravel().take(entry)  # (S,) z of shared entries
        self.shared = shared_entries(entry, starts, votes_of, z)
        row, k = self.shared.row, entry % z.shape[1]
        self.logits = rest.cosine.ravel().take(entry) * rest.slope[k] + rest.offset[k] - log_sum[row]  # (S,)
        self.scale = np.ones_like(log_sum)  # (N,) z = p scale
        self.largest_scale = 1.0
        self.unheard = self._unheard(spoken) if negligible > NEGLIGIBLE else 0.0
        self.moved = np.inf  # the largest change of z of a live class in the last E-step

    @property
    def dropped(self) -> float:
        """By how much the z of any sample, all classes together, is off in one E-step for what is left out, at most.

        Both z_ik and the z_jk of the votes left out have grown by no more than the largest scale since z was split.
        """
        return self.unheard * self.largest_scale**2

    def _unheard(self, spoken: Floats) -> float:
        """Return the same, had z not grown.

        A vote v for an entry multiplies it by exp(v) <= 1 + v (exp(m) - 1) / m, m being the largest v there can be. So
        the votes left out of a row add sum_k z_ik v_ik (exp(m) - 1) / m to what z is divided by, at most, and z is off
        by twice that; exp(2 m) times that where votes against z_ik and z_jk are among those left out.
        """
        votes, sums = self._matrices
        votes = abs(votes) if self.votes_of.symmetric else abs(votes) + abs(votes).T
        kept = sums @ (self.hears * (votes @ self.hears))  # (N,) of what is spoken
        left = max(0.0, float((spoken - kept).max()))
        most = float(reach(self.votes_of).matrix.sum(axis=1).max())  # m
        against = most if self.votes_of.weight.min(initial=0) < 0 else 0.0
        return 2 * left * float(np.exp(2 * against) * (np.expm1(most) / most if most else 1))

    def covers(self, counts: Floats) -> bool:
        """Tell whether all classes with samples are among the live ones; `counts` is (K,)."""
        return bool(np.count_nonzero(counts) == np.count_nonzero(counts[self.live]))

    @cached_property
    def _matrices(self) -> tuple[Any, Any]:
        """Who of the shared entries votes for whom, (S, S), and the sums of those of a row, (N, S)."""
        from scipy.sparse import csr_array

        shared, s, n = self.shared, len(self.hears), len(self.p)
        votes = csr_array((shared.weight, shared.voter, shared.first), shape=(s, s))
        return votes, csr_array((np.ones_like(self.hears), np.arange(s), shared.starts), shape=(n, s))

    def e_step(self, values: Floats, voice: Floats | None = None) -> Assignment | None:
        """Eq. update-z with the logits `values` (N, L) of the live classes; None where that is not accurate.

        The z of the answer is that of the live classes, (N, L). `voice` (N,) is what the vote of each sample counts,
        1 if not given.
        """
        z, hears, labels, log_sum, gamma, heard, echo, scale = out = self._room()
        voice = np.ones_like(scale) if voice is None else voice
        highest, moved = (self._in_loops if self.loops else self._in_passes)(values, voice, out)
        if highest > HIGHEST or (grown := float(scale.max())) > GROWTH:
            return None
        k, self.largest_scale = self.p.shape[1], max(self.largest_scale, grown)
        self.z, self.hears, self.scale, self.moved = z, hears, scale, moved
        counts = np.bincount(labels, minlength=k).astype(z.dtype)  # (K,)
        return Assignment(z, labels, log_sum, gamma, heard, echo, counts)

    def echo(self, voice: Floats) -> Floats:
        """Return z_i . votes_i of this z, (N,), as the next E-step finds it."""
        out = self._room()
        (self._in_loops if self.loops else self._in_passes)(self.z, voice, out)
        return out[6]  # type: ignore[no-any-return]

    def _room(self) -> tuple[Any, ...]:
        """Make the arrays for z, shared entries, labels, log sums, gamma, heard, echo and scale of an E-step."""
        n = len(self.p)
        return np.empty_like(self.z), np.empty_like(self.hears), np.empty(n, np.int64), *np.empty((5, n), self.z.dtype)

    def _in_loops(self, values: Floats, voice: Floats, out: tuple[Any, ...]) -> tuple[float, float]:
        edges = self.votes_of.pointer, self.votes_of.neighbour, self.votes_of.weight
        old = self.p, self.total, self.inner, self.top, self.logits, self.z, self.hears
        log_k = log_classes(self.p.shape[1])

        def block(rows: slice) -> tuple[float, float]:
            found: tuple[float, float] = self.loops.rest_e_step(  # type: ignore[union-attr]
                rows.start, rows.stop, values, voice, self.shift, self.live, *edges, *self.shared, *old, *out, log_k
            )
            return found

        highest, moved = zip(*in_threads(block, row_blocks(len(values), values.size)), strict=True)
        return max(highest), max(moved)

    def _in_passes(self, values: Floats, voice: Floats, out: tuple[Any, ...]) -> tuple[float, float]:
        """The same, an operation at a time."""
        z, hears, labels, log_sum, gamma, heard, echo, scale = out
        said, shared = self.z * voice[:, None], self.hears * voice[self.shared.row]  # (N, L), (S,)
        live, votes = self.votes_of(said), self._matrices[0] @ shared  # (N, L), (S,)
        echo[:] = np.vecdot(said, live) + self._matrices[1] @ (shared * votes)
        a = values - self.shift[:, None] + live  # (N, L)
        best = np.argmax(a, axis=1)  # (N,)
        top = a[np.arange(len(a)), best]  # (N,)
        highest = float(top.max())
        if highest > HIGHEST:
            return highest, 0
        np.exp(a, out=z)
        logits = self.logits + votes  # (S,)
        np.exp(logits, out=hears)
        rows = self._matrices[1] @ np.stack([hears, hears * logits, hears * votes], axis=1)  # (N, 3)
        rest = self.total + rows[:, 0]  # (N,) sum of p over the resting classes
        total = rest + row_sums(z)
        scale[:] = 1 / total
        labels[:] = self.live[best]
        unsure = np.flatnonzero(np.exp(top) < rest)  # rows where a resting class may be the largest
        if len(unsure):
            p = self.p[unsure]  # (u, K)
            p[:, self.live] = z[unsure]
            mine = np.isin(self.shared.row, unsure)
            p[np.searchsorted(unsure, self.shared.row[mine]), self.shared.entry[mine] % p.shape[1]] = hears[mine]
            labels[unsure] = np.argmax(p, axis=1)
        log_total = np.log(total)
        log_sum[:] = self.shift + log_total
        h = log_total - (self.inner + rows[:, 1] + np.vecdot(z, a)) * scale  # (N,)
        gamma[:] = entropy_weights(h, self.p.shape[1])
        heard[:] = (np.vecdot(z, live) + rows[:, 2]) * scale
        z *= scale[:, None]
        hears *= scale[self.shared.row]
        return highest, float(np.abs(z - self.z).max())

    def dense(self) -> Floats:
        """Return z of all classes, (N, K), made in place of what was kept: the last thing to ask for."""
        self.p *= self.scale[:, None]
        self.p[:, self.live] = self.z
        self.p.ravel()[self.shared.entry] = self.hears
        return self.p


def split_rows(
    rest: AnchorLogits, shift: Floats, live: Ints, near: Affinity, z: Floats, p: Floats, total: Floats, inner: Floats,
    top: Floats, spoken: Floats, negligible: np.float32,
) -> tuple[Floats, Ints, Ints]:  # fmt: skip
    """Split z: return its live columns, which become 0 in z, and the positions and row starts of shared entries.

    `p` becomes exp(logits - shift) of the other entries; `total`, `inner` and `top` its row sums, those of p log p, and
    the row maxima; `spoken` sum_k z_ik sum_j M_ij z_jk of the row.
    """
    kept, (n, k) = z.take(live, axis=1), z.shape
    z[:, live] = 0
    found = []
    for rows, matrix in near.blocks(k):
        votes = matrix @ z * z[rows]  # (b, K)
        shared = np.flatnonzero(votes > negligible)
        logits, out = rest[rows], p[rows]  # (b, K), (b, K)
        logits -= shift[rows, None]
        logits[:, live] = 0  # their anchor may score beyond the range of exp
        np.exp(logits, out=out)
        out[:, live] = 0
        out.ravel()[shared] = 0
        spoken[rows] = row_sums(votes)
        total[rows], inner[rows], top[rows] = row_sums(out), np.vecdot(out, logits), out.max(axis=1)
        found.append(shared + rows.start * k)
    entry = np.concatenate(found)
    return kept, entry, np.searchsorted(entry, k * np.arange(n + 1))


def shared_entries(entry: Ints, starts: Ints, votes_of: Affinity, spare: Floats) -> Shared:
    """Find which of the shared entries vote for which; `spare` (N, K) is overwritten.

    >>> votes_of = Affinity(np.asarray([0, 1, 2]), np.asarray([1, 0]), np.ones(2, np.float32))
    >>> shared_entries(np.asarray([0, 2]), np.asarray([0, 1, 2]), votes_of, np.zeros((2, 2), np.float32)).voter
    array([1, 0])
    """
    k = spare.shape[1]
    row = entry // k  # (S,)
    if loops := loops_for(votes_of.weight):
        edges = votes_of.pointer, votes_of.neighbour, votes_of.weight
        return Shared(entry, row, starts, *loops.joined(entry, row, *edges, spare.view(np.int32).ravel()))
    begin = votes_of.pointer[row]  # (S,)
    count = votes_of.pointer[row + 1] - begin  # (S,) edges of each entry
    edge = np.arange(count.sum()) + np.repeat(begin - np.cumsum(count) + count, count)  # (E,)
    position = np.repeat(entry - row * k, count) + votes_of.neighbour[edge] * k  # (E,) where the voter would be
    at = np.searchsorted(entry, position)
    there = entry.take(at, mode="clip") == position if len(entry) else at > 0
    first = np.append(0, np.cumsum(np.bincount(np.repeat(np.arange(len(entry)), count)[there], minlength=len(entry))))
    return Shared(entry, row, starts, first, at[there], votes_of.weight[edge[there]])
