"""Rows of a task with their graph and assignments, worked on in blocks: what the shards of every method share.

Nothing is of size n x K but the assignments, two of them, which are in 16 bits for large tasks: in numpy multiples of
1 / 65535, exact to 8e-6 of a probability (its half-precision numbers take fifty times as long to make), in torch
float16, exact to 5e-4. Everything is computed in float32, and summed over blocks and shards in float64. Memory is
O(n (d + m + 2 K)). The arrays are numpy's, or torch's on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import Array, device, is_torch_array, like, namespace, to_numpy
from moontide.core.graph import Affinity, Graph, nearest_neighbours
from moontide.core.ple import neighbour_votes
from moontide.core.progress import track
from moontide.core.simplex import softmax_evidence
from moontide.core.threads import workers
from moontide.engine.sums import TOGETHER, Doubles, Sums

BLOCK_ENTRIES = 2**22  # n x K entries worked on at once, 16 MB in float32
ONE = 65535  # a probability of 1 in 16 bits of fixed point
SEED = 0


@dataclass
class Counted(Sums):
    """What the zero-shot pass adds up."""

    n: int


@dataclass
class Sample(Sums):
    """Some rows of all shards; `key` (shard, row) sorts them, so that their order does not depend on the workers."""

    key: NDArray[np.int64] = field(metadata=TOGETHER)  # (s, 2)
    rows: NDArray[np.float32] = field(metadata=TOGETHER)  # (s, d)
    weights: Doubles = field(metadata=TOGETHER)  # (s, m) of their neighbours in the graph

    def sorted(self) -> Sample:
        """Return the rows in the order of their keys."""
        order = np.lexsort(self.key.T[::-1])
        return Sample(self.key[order], self.rows[order], self.weights[order])


@dataclass
class Nearest(Sums):
    """The largest cosines of some rows to all others."""

    cosines: Doubles  # (s, m)

    def __add__(self, other: Nearest) -> Nearest:
        """Keep the m largest of both."""
        both = np.concatenate([self.cosines, other.cosines], axis=1)
        return Nearest(-np.sort(-both, axis=1)[:, : self.cosines.shape[1]])


def draw(shard: int, n: int, share: float) -> NDArray[np.int64]:
    """Draw a share of the n rows of a shard, at least one: the keys (shard, row), (s, 2).

    >>> draw(7, 4, 0.5)
    array([[7, 0],
           [7, 2]])
    """
    rng = np.random.default_rng([SEED, shard])
    at = np.sort(rng.choice(n, max(1, min(n, round(share * n))), replace=False))
    return np.stack([np.full_like(at, shard), at], axis=1)


class Rows:
    """Some rows of a task. By itself this is zero-shot; the other methods add a `step`.

    >>> from moontide import method
    >>> eye = np.eye(3, dtype=np.float32)
    >>> shard = Rows(method("zero_shot"), eye, eye, 100.0)
    >>> shard.first_pass().n, shard.labels
    (3, array([0, 1, 2]))
    """

    STATE: ClassVar[tuple[str, ...]] = ("z", "labels", "zero_shot_labels")  # what the next step needs, and predictions
    COLUMNS: ClassVar[tuple[str, ...]] = ("label", "confidence", "before")  # of the predictions
    CHANGES: ClassVar[tuple[str, ...]] = ("first_pass", "step")  # the functions that change it
    SCORES: ClassVar[int] = 0  # n x K arrays of 32 bits that a step makes beside the assignments

    def __init__(
        self,
        method: Any,
        features: Array,
        text: Array,
        logit_scale: float,
        graph: Graph | None = None,
        half: bool = True,
        keep: bool = True,
    ) -> None:
        xp = namespace(features)
        self.method, self.f, self.text, self.logit_scale = method, features, like(text, features), logit_scale
        self.number = 0  # of the shard among all
        self.kept = np.arange(len(features))  # the numbers of these rows in the file that they are from
        self.keep = keep  # the zero-shot probabilities `y`
        n, k = len(features), len(text)
        weight = getattr(method, "laplacian_weight", 1.0)
        self.graph = graph or nearest_neighbours(features, getattr(method, "neighbours", 0) if weight else 0)
        symmetric = getattr(method, "graph", "symmetric") == "symmetric"
        mean = getattr(method, "laplacian", "mean") == "mean"
        self.votes_of = neighbour_votes(self.graph, symmetric, mean, weight)
        narrow = xp.float16 if is_torch_array(features) else xp.uint16
        self.y = self.z = self._empty(n, k, dtype=narrow if half else xp.float32)  # as `_narrow` makes them
        self.zero_shot_labels = self._empty(n, dtype=xp.int64)
        self.labels = self.zero_shot_labels
        size = max(1, BLOCK_ENTRIES // k)
        self.blocks = [slice(i, min(i + size, n)) for i in range(0, n, size)]

    def first_pass(self) -> Sums:
        """Make the zero-shot predictions."""
        for rows in track(self.blocks, "zero-shot"):
            self._zero_shot(rows)
        return Counted(len(self.f))

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what `restore` needs to go on from here."""
        return {name: to_numpy(getattr(self, name)) for name in self.STATE}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go back to a saved state."""
        xp = namespace(self.f)
        for name in self.STATE:
            setattr(self, name, xp.asarray(state[name], device=device(self.f)))
        self.y = self.z

    def predictions(self) -> dict[str, NDArray[Any]]:
        """Return the `COLUMNS`, (n,) each: labels, their probabilities and the zero-shot labels."""
        top = self._floats(namespace(self.z).take_along_axis(self.z, self.labels[:, None], axis=1))[:, 0]
        columns = self.labels, top, self.zero_shot_labels
        return dict(zip(Rows.COLUMNS, map(to_numpy, columns), strict=True))

    def unpack(self) -> tuple[Array, Array]:
        """Return z and y as floating-point numbers of the same size, made in place: the shard ends with this."""
        if self.z.dtype == np.uint16:
            table = self._floats(np.arange(ONE + 1, dtype=np.uint16)).astype(np.float16)
            for stored in {id(x): x for x in (self.z, self.y)}.values():
                for rows in self.blocks:
                    stored.view(np.float16)[rows] = table[stored[rows]]
            self.z, self.y = self.z.view(np.float16), self.y.view(np.float16)
        return self.z, self.y

    def sample(self, share: float) -> Sample:
        """Draw a share of the rows, with the weights of their neighbours (none: -inf)."""
        key = draw(self.number, len(self.f), share)
        at = key[:, 1]
        weights = np.full((len(at), getattr(self.method, "neighbours", 0)), -np.inf)
        weights[:, : self.graph.m] = to_numpy(self.graph.weights[at])
        return Sample(key, to_numpy(self.f[at]), weights)

    def nearest(self, rows: NDArray[np.float32], count: int) -> Nearest:
        """Return the `count` largest cosines of given rows to those of this shard."""
        best = np.full((len(rows), count), -np.inf)
        asked = like(rows, self.f)
        for at in self.blocks:
            near = to_numpy(asked @ self.f[at].T)  # (s, b)
            best = np.partition(np.concatenate([best, near], axis=1), -count, axis=1)[:, -count:]
        return Nearest(np.sort(best, axis=1)[:, ::-1])

    def _zero_shot(self, rows: slice) -> tuple[Array, Array, Array]:
        """Make and keep y of some rows; return it with the cosines and the log of what y was divided by."""
        cosine = self.f[rows] @ self.text.T  # (b, K)
        y, evidence = softmax_evidence(self.logit_scale * cosine)  # (b, K), (b,)
        self.z[rows], self.labels[rows] = self._narrow(y), namespace(y).argmax(y, axis=1)
        return y, cosine, evidence

    def _empty(self, *shape: int, dtype: Any = None) -> Array:
        """Return an uninitialised array beside the features."""
        xp = namespace(self.f)
        return xp.empty(shape, dtype=dtype or xp.float32, device=device(self.f))

    def _wide(self, rows: Any) -> Array:
        """Return the assignments of some rows in float32."""
        return self._floats(self.z[rows])

    def _narrow(self, p: Array) -> Array:
        """Return probabilities as what is stored when it is put into `z`."""
        if self.z.dtype != np.uint16:
            return p
        stored = p * np.float32(ONE)
        stored += np.float32(0.5)  # made whole by cutting off
        return stored

    def _floats(self, stored: Array) -> Array:
        """Return stored assignments in float32."""
        xp = namespace(stored)
        p = xp.astype(stored, xp.float32, copy=False)
        if stored.dtype == np.uint16:
            p *= np.float32(1 / ONE)
        return p

    def _votes(self, rows: slice) -> Array:
        """Return the votes for some rows from the assignments of their neighbours, (b, K)."""
        xp = namespace(self.f)
        if self.graph.m == 0:
            return xp.zeros((rows.stop - rows.start, len(self.text)), dtype=xp.float32, device=device(self.f))
        pointer = self.votes_of.pointer[rows.start : rows.stop + 1]
        edges = slice(int(pointer[0]), int(pointer[-1]))
        voters, at = xp.unique_inverse(self.votes_of.neighbour[edges])
        return Affinity(pointer - edges.start, at, self._weights(edges), len(voters))(self._wide(voters))

    def _weights(self, edges: slice) -> Array:
        """Return how much the votes along some edges count."""
        return self.votes_of.weight[edges]

    def _cut(self, rows: slice) -> list[slice]:
        """Cut a block into parts for threads; a GPU takes it whole."""
        b = rows.stop - rows.start
        size = b if is_torch_array(self.f) else -(-b // (4 * workers()))
        return [slice(i, min(i + size, rows.stop)) for i in range(rows.start, rows.stop, size)]
