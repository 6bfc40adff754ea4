"""The m-nearest-neighbour affinity graph that smooths assignments (the Laplacian term of L_PLE).

W has m entries per row, the cosines to the m nearest other samples (Alg. 1, line 3). Neither W nor the similarities are
ever held as N x N: the search goes block by block and the result is two (N, m) arrays.

Well defined where the published programs are not: a sample is never its own neighbour, also among duplicate rows; of
equally near samples the one with the lower index wins; for N <= m every other sample is a neighbour (m = N - 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moontide.core.arrays import Array, device, is_torch_array, namespace
from moontide.core.backends import fused
from moontide.errors import InputError
from moontide.progress import track

EXACT_ROWS = 100_000  # rows up to which every pair is compared; above, `core.ann`
SLOTS = 8  # neighbours that the fused search of a GPU can keep of a sample
BLOCK_ROWS = 1000  # similarities are made in square blocks of so many rows (4 MB in float32: they stay in cache)


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
        """Return the votes for some samples, from all; those of a slice are kept for the next time."""
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
        pointer, neighbour, weight = self.edges
        return self if by is None else Affinity(pointer, neighbour, weight * by[neighbour], self.width)

    @property
    def edges(self) -> tuple[Array, Array, Array]:
        """The three arrays, for loops and kernels."""
        return self.pointer, self.neighbour, self.weight

    def from_voters(self) -> tuple[Array, Affinity]:
        """Return the samples that vote at all, (V,), and the votes as a map from their assignments alone."""
        voters, at = namespace(self.neighbour).unique_inverse(self.neighbour)
        return voters, Affinity(self.pointer, at, self.weight, int(voters.shape[0]))


def neighbour_votes(graph: Graph, symmetric: bool, mean: bool, weight: float) -> Affinity:
    """Eq. ple-ours, Laplacian: z -> weight x (W z), or (W + W') z, divided by the number of votes where `mean`."""
    share = weight / (max(graph.m, 1) * (1 + symmetric)) if mean else weight
    return Graph(graph.neighbours, graph.weights * share).operator(symmetric)


def nearest_neighbours(features: Array, m: int, precision: str = "full") -> Graph:
    """Find the m largest cosines of each unit row of `features` to the others in O(N m + block) memory.

    Exactly up to `EXACT_ROWS` rows; above, on a CPU, by an inverted file whose recall is in the graph. On a GPU,
    `precision` "tf32" or "half" uses the tensor cores (products rounded to 10 bits, sums in float32).
    """
    xp = namespace(features)
    n = features.shape[0]
    m = min(m, n - 1)
    if 0 < m <= SLOTS and fused(features):
        from moontide.core.backends._triton import top_m

        return Graph(*top_m(features, m, precision))
    if n > EXACT_ROWS and m and not is_torch_array(features):
        from moontide.core.ann import inverted_file

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
    """Return columns and values of the largest entries of each row, sorted, of equals the first; overwrites them."""
    xp = namespace(x)
    rows = xp.arange(x.shape[0], device=device(x))  # (b,)
    columns = xp.empty((x.shape[0], count), dtype=xp.int64, device=device(x))
    values = xp.empty((x.shape[0], count), dtype=x.dtype, device=device(x))
    for i in range(count):
        columns[:, i] = best = xp.argmax(x, axis=1)  # (b,) the first of equals
        values[:, i] = x[rows, best]
        x[rows, best] = -xp.inf
    return columns, values
