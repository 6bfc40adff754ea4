"""The m-nearest-neighbour affinity graph that smooths assignments (the Laplacian term of L_PLE).

W has m entries per row, the cosines to the m nearest other samples (Alg. 1, line 3). Neither W nor the similarities are
ever held as N x N: the search goes block by block and the result is two (N, m) arrays.

Up to `EXACT_ROWS` rows every pair is compared. Above, on a CPU, an inverted file is used (J. Sivic and A. Zisserman,
"Video Google: A Text Retrieval Approach to Object Matching in Videos", ICCV 2003), and its recall is measured.

Well defined where the published programs are not: a sample is never its own neighbour, also among duplicate rows; of
equally near samples the one with the lower index wins; for N <= m every other sample is a neighbour (m = N - 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import Array, class_sums, device, is_torch_array, like, namespace, to_numpy, unit_rows
from moontide.core.backends import fused
from moontide.errors import InputError
from moontide.progress import track

EXACT_ROWS = 100_000
SLOTS = 8  # neighbours that the fused search of a GPU can keep of a sample
BLOCK_ROWS = 1000  # similarities are made in square blocks of so many rows (4 MB in float32: they stay in cache)
LIST = 1000  # rows of a list of the inverted file
PROBES = 8  # lists that a row is compared with
TRAIN = 64  # rows of a list that centres are trained on
ROUNDS = 4  # of k-means
SAMPLE = 512  # rows on which recall is measured
FILE_ROWS = 4096  # rows that the inverted file compares at once

Floats = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Graph:
    """A sparse affinity: sample i is joined to `neighbours[i]` with `weights[i]`, both (N, m)."""

    neighbours: Array  # (N, m) integers
    weights: Array  # (N, m)
    recall: float = 1.0  # share of the true neighbours found, measured on a sample where the search is approximate

    def __post_init__(self) -> None:
        """Check the shapes."""
        shape, other = tuple(self.neighbours.shape), tuple(self.weights.shape)
        if shape != other or len(shape) != 2:
            rule = "'neighbours' and 'weights' of a Graph must be (N, m) arrays of one shape"
            raise InputError(f"{rule}. Got {shape} and {other} instead.")

    @property
    def m(self) -> int:
        """The number of neighbours of each sample."""
        return int(self.neighbours.shape[1])

    def operator(self, symmetric: bool) -> Affinity:
        """Return the map z -> W z, or z -> W z + W' z where `symmetric`, for z of shape (N, K)."""
        n, m = self.neighbours.shape
        xp = namespace(self.neighbours)
        each = xp.arange(n + 1, device=device(self.neighbours))
        rows, cols = xp.repeat(each[:-1], m), xp.reshape(self.neighbours, (-1,))  # (N m,)
        weight = xp.reshape(self.weights, (-1,))
        if symmetric:
            rows, cols, weight = xp.concat([rows, cols]), xp.concat([cols, rows]), xp.concat([weight, weight])
            order = xp.argsort(xp.astype(rows, xp.int16 if n < 2**15 else xp.int32), stable=True)  # sorted by digits
            rows, cols, weight = rows[order], cols[order], weight[order]
        pointer = xp.searchsorted(rows, each)  # (N + 1,)
        return Affinity(pointer, cols, weight, symmetric=symmetric)


@dataclass(frozen=True)
class Affinity:
    """The graph as a sparse matrix by rows: the votes for sample i are edges pointer[i] to pointer[i + 1]."""

    pointer: Array  # (N + 1,)
    neighbour: Array  # (E,)
    weight: Array  # (E,)
    width: int | None = None  # how many samples vote, where that is not N
    symmetric: bool = False  # whether it is known to be
    _parts: dict[tuple[int, int], Affinity] = field(default_factory=dict, repr=False, compare=False)  # see `rows`

    @cached_property
    def matrix(self) -> Any:
        """The matrix in the library's own form: scipy's or torch's."""
        n = self.pointer.shape[0] - 1
        shape = n, n if self.width is None else self.width
        if is_torch_array(self.weight):
            import torch

            rows = torch.repeat_interleave(torch.diff(self.pointer), output_size=self.weight.shape[0])
            edges = torch.stack([rows, self.neighbour])
            return torch.sparse_coo_tensor(edges, self.weight, shape, check_invariants=False).coalesce()
        from scipy.sparse import csr_array

        return csr_array((self.weight, self.neighbour, self.pointer), shape=shape)

    def __call__(self, z: Array) -> Array:
        """Return the votes of the neighbours, (N, K)."""
        return self.matrix @ z

    def rows(self, which: slice) -> Affinity:
        """Return the votes of all samples for some of them; those of a slice are kept for the next time."""
        n, key = self.pointer.shape[0] - 1, (which.start, which.stop)
        if key == (0, n):
            return self
        if key not in self._parts:
            pointer = self.pointer[which.start : which.stop + 1]
            edges = slice(int(pointer[0]), int(pointer[-1]))
            of = pointer - edges.start, self.neighbour[edges], self.weight[edges]
            self._parts[key] = Affinity(*of, self.width or n)
        return self._parts[key]

    def weighted(self, by: Array | None) -> Affinity:
        """Return the votes with that of each sample multiplied by its entry of `by`, (N,); None: 1."""
        if by is None:
            return self
        return Affinity(self.pointer, self.neighbour, self.weight * by[self.neighbour], self.width)

    @property
    def edges(self) -> tuple[Array, ...]:
        """The arrays `pointer`, `neighbour` and `weight`, for loops and kernels."""
        return self.pointer, self.neighbour, self.weight


def neighbour_votes(graph: Graph, symmetric: bool, mean: bool, weight: float) -> Affinity:
    """Eq. ple-ours, Laplacian: z -> weight x (W z), or (W + W') z, divided by the number of votes where `mean`."""
    share = weight / (max(graph.m, 1) * (1 + symmetric)) if mean else weight
    return Graph(graph.neighbours, graph.weights * share).operator(symmetric)


def nearest_neighbours(features: Array, m: int, precision: str = "full") -> Graph:
    """Find the m largest cosines of each unit row of `features` to the others in O(N m + block) memory.

    On a GPU, `precision` "tf32" or "half" uses the tensor cores (products rounded to 10 bits, sums in float32).
    """
    xp = namespace(features)
    n = features.shape[0]
    m = min(m, n - 1)
    if 0 < m <= SLOTS and fused(features):
        from moontide.core.backends._triton import top_m

        return Graph(*top_m(features, m, SLOTS, precision))
    if n > EXACT_ROWS and m and not is_torch_array(features):
        return Graph(*inverted_file(features, m))
    neighbours = xp.zeros((n, m), dtype=xp.int64, device=device(features))
    weights = xp.full((n, m), -xp.inf, dtype=features.dtype, device=device(features))
    if m == 0:
        return Graph(neighbours, weights)
    ids = xp.arange(n, device=device(features))
    size = BLOCK_ROWS * (8 if str(device(features)) != "cpu" else 1)
    blocks = [slice(start, min(start + size, n)) for start in range(0, n, size)]
    for i, rows in track(list(enumerate(blocks)), "neighbours"):
        for columns in blocks[i:]:  # the similarity is symmetric: one product serves both blocks
            similarity = features[rows, :] @ features[columns, :].T  # (b, c)
            if columns is rows:
                local = xp.arange(similarity.shape[0], device=device(features))
                similarity[local, local] = -xp.inf  # never its own neighbour
            else:
                offer(columns, ids[rows], xp.asarray(similarity.T, copy=True), neighbours, weights)
            offer(rows, ids[columns], similarity, neighbours, weights)
    return Graph(neighbours, weights)


def offer(rows: Array | slice, ids: Array, similarity: Array, neighbours: Array, weights: Array) -> None:
    """Merge the best of a block of similarities (rows x candidates `ids`) into the lists of `rows`; overwrites it.

    What is in the lists goes before equals: offered by rising candidate, ties go to the lower index.
    """
    xp = namespace(similarity)
    m = neighbours.shape[1]
    best, largest = largest_entries(similarity, min(m, similarity.shape[1]))  # (b, m), (b, m)
    values = xp.concat([weights[rows, :], largest], axis=1)  # (b, 2m)
    found = xp.concat([neighbours[rows, :], ids[best]], axis=1)
    order = xp.argsort(values, axis=1, descending=True, stable=True)[:, :m]
    weights[rows, :] = xp.take_along_axis(values, order, axis=1)
    neighbours[rows, :] = xp.take_along_axis(found, order, axis=1)


def largest_entries(x: Array, count: int) -> tuple[Array, Array]:
    """Return columns and values of the largest entries of each row, largest first; ties: the lower; overwrites them."""
    xp = namespace(x)
    rows = xp.arange(x.shape[0], device=device(x))  # (b,)
    columns = xp.empty((x.shape[0], count), dtype=xp.int64, device=device(x))
    values = xp.empty((x.shape[0], count), dtype=x.dtype, device=device(x))
    for i in range(count):
        columns[:, i] = best = xp.argmax(x, axis=1)  # (b,) the first of equals
        values[:, i] = x[rows, best]
        x[rows, best] = -xp.inf
    return columns, values


def inverted_file(features: Floats, m: int, seed: int = 0) -> tuple[Ints, Floats, float]:
    """Return neighbours and weights, (N, m) each, of unit rows, and the recall measured on a sample.

    The rows are put into lists of about `LIST` by their nearest coarse centre; a row is compared with the members of
    the `PROBES` lists nearest to it. Cost grows as N x LIST x PROBES x d, and N x (N / LIST) x d for finding the lists.
    """
    n = len(features)
    rng = np.random.default_rng(seed)
    centres = coarse_centres(features, max(1, n // LIST), rng)  # (C, d)
    probes = nearest_lists(features, centres, min(PROBES, len(centres)))  # (N, P), the row's own list first
    neighbours, weights = np.zeros((n, m), np.int64), np.full((n, m), -np.inf, features.dtype)
    members = _grouped(probes[:, 0], np.arange(n), len(centres))
    askers = _grouped(probes.ravel(), np.repeat(np.arange(n), probes.shape[1]), len(centres))
    for c in track(range(len(centres)), "neighbours"):
        candidates = features[members[c]]  # (c, d)
        for start in range(0, len(askers[c]) if len(candidates) else 0, FILE_ROWS):
            rows = askers[c][start : start + FILE_ROWS]
            similarity = features[rows] @ candidates.T  # (b, c)
            own = np.flatnonzero(probes[rows, 0] == c)
            similarity[own, np.searchsorted(members[c], rows[own])] = -np.inf  # never its own neighbour
            offer(rows, members[c], similarity, neighbours, weights)
    rows = rng.choice(n, min(SAMPLE, n), replace=False)
    recall = share_found(weights[rows], nearest_cosines(features[rows], features, m + 1))
    weights[np.isneginf(weights)] = 0  # where the lists of a row hold fewer than m others: no vote
    return neighbours, weights, recall


def coarse_centres(features: Floats, count: int, rng: np.random.Generator) -> Floats:
    """Return `count` unit centres: spherical k-means on a sample of the rows, (C, d)."""
    sample = features[np.sort(rng.choice(len(features), min(len(features), count * TRAIN), replace=False))]
    centres = sample[rng.choice(len(sample), count, replace=False)]
    for _ in range(ROUNDS if count > 1 else 0):
        own = nearest_lists(sample, centres, 1)[:, 0]
        sums = class_sums(own, sample, count)
        empty = np.bincount(own, minlength=count) == 0
        sums[empty] = sample[rng.choice(len(sample), int(empty.sum()))]
        centres = unit_rows(sums)
    return centres


def nearest_lists(features: Floats, centres: Floats, count: int) -> Ints:
    """Return the numbers of the `count` centres nearest to each row, nearest first, (N, P)."""
    blocks = (features[start : start + FILE_ROWS] for start in range(0, len(features), FILE_ROWS))
    return np.concatenate([largest_entries(block @ centres.T, count)[0] for block in blocks])


def nearest_cosines(rows: Floats, features: Array, count: int) -> Floats:
    """Return the `count` largest cosines of unit rows (s, d) to `features` (N, d), largest first; -inf: no more."""
    best, asked = np.full((len(rows), count), -np.inf, rows.dtype), like(rows, features)
    for start in range(0, len(features), FILE_ROWS):
        near = to_numpy(asked @ features[start : start + FILE_ROWS].T)  # (s, b)
        best = np.partition(np.concatenate([best, near], axis=1), -count, axis=1)[:, -count:]
    return np.sort(best, axis=1)[:, ::-1]


def share_found(weights: Floats, cosines: Floats) -> float:
    """Return the share of the true neighbours of some rows that are in a graph, ties counted as found.

    `weights` (s, m) are those of the graph, `cosines` (s, m + 1) the largest there are: the first is of the row itself.
    """
    best = cosines[:, 1:]
    true = np.isfinite(best)  # fewer than m others: all of them
    found = weights >= np.where(true, best, np.inf).min(axis=1, keepdims=True) - 1e-5
    return float(found.sum() / true.sum())


def _grouped(keys: Ints, values: Ints, count: int) -> list[Ints]:
    order = np.argsort(keys, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(keys, minlength=count))[:-1])
