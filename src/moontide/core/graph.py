"""The m-nearest-neighbour affinity graph that smooths assignments (the Laplacian term of L_PLE).

W has m entries a row, the cosines to the m nearest other samples (Alg. 1, line 3). Neither W nor the similarities are
ever held as N x N: the search goes block by block and the result is two (N, m) arrays.

Well defined where the published programs are not: a sample is never its own neighbour, also among duplicate rows; of
equally near samples the one with the lower index wins; for N <= m every other sample is a neighbour (m = N - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moontide.core.arrays import Array, device, is_torch_array, namespace, to_numpy
from moontide.errors import InputError

BLOCK_ROWS = 1000  # similarities are made in square blocks of so many rows (4 MB in float32: they stay in cache)


@dataclass(frozen=True)
class Graph:
    """A sparse affinity: sample i is joined to `neighbours[i]` with `weights[i]`, both (N, m).

    >>> import numpy as np
    >>> g = Graph(np.asarray([[1], [0]]), np.asarray([[0.5], [0.5]]))
    >>> g.operator(symmetric=True)(np.eye(2))
    array([[0., 1.],
           [1., 0.]])
    """

    neighbours: Array  # (N, m) integers
    weights: Array  # (N, m)

    def __post_init__(self) -> None:
        """Check shapes and index range."""
        if self.neighbours.ndim != 2 or tuple(self.neighbours.shape) != tuple(self.weights.shape):
            raise InputError(
                "'neighbours' and 'weights' of a Graph must be (N, m) arrays of one shape. "
                f"Got {tuple(self.neighbours.shape)} and {tuple(self.weights.shape)} instead."
            )
        n, m = self.neighbours.shape
        xp = namespace(self.neighbours)
        if m and not (int(xp.min(self.neighbours)) >= 0 and int(xp.max(self.neighbours)) < n):
            raise InputError(f"'neighbours' of a Graph must be row numbers from 0 to {n - 1}.")

    @property
    def m(self) -> int:
        """The number of neighbours of each sample."""
        return int(self.neighbours.shape[1])

    def operator(self, symmetric: bool) -> Callable[[Array], Array]:
        """Return the map z -> W z, or z -> W z + W' z where `symmetric`, for z of shape (N, K)."""
        n, m = self.neighbours.shape
        if m == 0:
            return lambda z: namespace(z).zeros_like(z)
        xp = namespace(self.neighbours)
        rows = xp.repeat(xp.arange(n, device=device(self.neighbours)), m)  # (N m,)
        cols = xp.reshape(self.neighbours, (-1,))
        data = xp.reshape(self.weights, (-1,))
        if symmetric:
            rows, cols, data = xp.concat([rows, cols]), xp.concat([cols, rows]), xp.concat([data, data])
        if is_torch_array(data):
            import torch

            w = torch.sparse_coo_tensor(torch.stack([rows, cols]), data, (n, n), check_invariants=False).coalesce()
            return lambda z: torch.sparse.mm(w, z)
        from scipy.sparse import coo_array

        csr = coo_array((data, (rows, cols)), shape=(n, n)).tocsr()
        return lambda z: csr @ z


def nearest_neighbours(features: Array, m: int) -> Graph:
    """Find the m largest cosines of each unit row of `features` to the others, exactly, in O(N m + block) memory.

    >>> import numpy as np
    >>> f = np.asarray([[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])
    >>> nearest_neighbours(f, 1).neighbours
    array([[1],
           [0],
           [1]])
    """
    xp = namespace(features)
    n = features.shape[0]
    m = min(m, n - 1)
    neighbours = xp.zeros((n, m), dtype=xp.int64, device=device(features))
    weights = xp.full((n, m), -xp.inf, dtype=features.dtype, device=device(features))
    if m == 0:
        return Graph(neighbours, weights)

    def offer(rows: slice, columns: slice, similarity: Array) -> None:
        """Merge the best of a block into the lists; blocks come by rising column, so that ties keep the lower index."""
        local = xp.arange(similarity.shape[0], device=device(features))  # (b,)
        candidates, found = [weights[rows, :]], [neighbours[rows, :]]
        for _ in range(min(m, similarity.shape[1])):  # argmax returns the first of equals
            best = xp.argmax(similarity, axis=1)  # (b,)
            candidates.append(similarity[local, best][:, None])
            found.append(best[:, None] + columns.start)
            similarity[local, best] = -xp.inf
        order = xp.argsort(xp.concat(candidates, axis=1), axis=1, descending=True, stable=True)[:, :m]
        weights[rows, :] = xp.take_along_axis(xp.concat(candidates, axis=1), order, axis=1)
        neighbours[rows, :] = xp.take_along_axis(xp.concat(found, axis=1), order, axis=1)

    blocks = [slice(start, min(start + BLOCK_ROWS, n)) for start in range(0, n, BLOCK_ROWS)]
    for i, rows in enumerate(blocks):
        for columns in blocks[i:]:  # the similarity is symmetric: one product serves both blocks
            similarity = features[rows, :] @ features[columns, :].T  # (b, c)
            if columns is rows:
                local = xp.arange(similarity.shape[0], device=device(features))
                similarity[local, local] = -xp.inf  # never its own neighbour
            else:
                offer(columns, rows, xp.asarray(similarity.T, copy=True))
            offer(rows, columns, similarity)
    return Graph(neighbours, weights)


def adapt_graph(graph: Graph, features: Array) -> Graph:
    """Bring a precomputed graph to the namespace, device and dtype of `features`, and check that it covers its rows.

    >>> import numpy as np
    >>> adapt_graph(Graph(np.zeros((1, 0), int), np.zeros((1, 0))), np.ones((2, 3)))
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'graph' must have one row a sample (2). Got 1 instead.
    """
    if graph.neighbours.shape[0] != features.shape[0]:
        raise InputError(
            f"'graph' must have one row a sample ({features.shape[0]}). Got {graph.neighbours.shape[0]} instead."
        )
    xp = namespace(features)
    move = (lambda x: x) if is_torch_array(features) and is_torch_array(graph.weights) else to_numpy
    return Graph(
        xp.asarray(move(graph.neighbours), dtype=xp.int64, device=device(features)),
        xp.asarray(move(graph.weights), dtype=features.dtype, device=device(features)),
    )
