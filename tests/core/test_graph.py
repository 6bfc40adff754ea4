"""The neighbour graph against a search by sorting, and its operator against the dense matrix."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moontide.core import graph as module
from moontide.core.arrays import to_numpy, unit_rows
from moontide.core.graph import Graph, nearest_neighbours
from moontide.errors import InputError
from moontide.types import adapt_graph

# Small integers: products are exact, so equally near samples are equal to the last bit, and there are many of them.
features = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 20), st.integers(1, 4)), elements=st.integers(-2, 2).map(float)
)
neighbours = st.integers(0, 6)


def by_sorting(f: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    n = len(f)
    similarity = f @ f.T
    ordered = [sorted((j for j in range(n) if j != i), key=lambda j: (-similarity[i, j], j)) for i in range(n)]
    found = np.asarray([row[:m] for row in ordered], dtype=int).reshape(n, min(m, n - 1))
    return found, np.take_along_axis(similarity, found, axis=1)


@given(features, neighbours, st.integers(1, 25))
def test_it_finds_what_sorting_finds(f: np.ndarray, m: int, block: int) -> None:
    """The m nearest others, ties to the lower index, whatever the block size, also where N <= m."""
    wanted, weights = by_sorting(f, m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ROWS", block)
        for array in (f, torch.asarray(f)):
            found = nearest_neighbours(array, m)
            np.testing.assert_array_equal(to_numpy(found.neighbours), wanted)
            np.testing.assert_array_equal(to_numpy(found.weights), weights)


@settings(max_examples=20)
@given(st.integers(0, 100), st.integers(1, 30))
def test_it_finds_what_sorting_finds_among_embeddings(seed: int, block: int) -> None:
    f = unit_rows(np.random.default_rng(seed).normal(size=(40, 8)))
    wanted, weights = by_sorting(f, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_ROWS", block)
        found = nearest_neighbours(f, 3)
    np.testing.assert_array_equal(found.neighbours, wanted)
    np.testing.assert_allclose(found.weights, weights, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_sample_is_never_its_own_neighbour_among_duplicates(dtype: str) -> None:
    f = unit_rows(np.random.default_rng(0).normal(size=(10, 16)).astype(dtype))
    f = np.repeat(f, 5, axis=0)  # every row five times
    found = nearest_neighbours(f, 4)
    assert not (found.neighbours == np.arange(50)[:, None]).any()
    np.testing.assert_array_equal(np.sort(found.neighbours, axis=1) // 5, np.arange(50)[:, None] // 5 * np.ones(4))
    np.testing.assert_allclose(found.weights, 1, atol=1e-6)
    assert found.weights.dtype == dtype


def test_one_sample_has_no_neighbour() -> None:
    found = nearest_neighbours(np.ones((1, 4)), 3)
    assert found.neighbours.shape == (1, 0)
    assert found.m == 0
    np.testing.assert_array_equal(found.operator(symmetric=True)(np.ones((1, 5))), np.zeros((1, 5)))


def test_memory_stays_far_below_n_by_n() -> None:
    n = 4000
    f = unit_rows(np.random.default_rng(0).normal(size=(n, 16)).astype("float32"))
    tracemalloc.start()
    nearest_neighbours(f, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < n * n * 4 / 3


@given(st.integers(1, 12), st.integers(0, 5), st.integers(1, 4), st.booleans(), st.integers(0, 1000))
def test_the_operator_is_the_matrix(n: int, m: int, k: int, symmetric: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns, weights = rng.integers(n, size=(n, m)), rng.normal(size=(n, m))
    dense = np.zeros((n, n))
    np.add.at(dense, (np.arange(n)[:, None], columns), weights)  # an edge that is there twice counts twice
    z = rng.normal(size=(n, k))
    wanted = (dense + dense.T) @ z if symmetric else dense @ z
    np.testing.assert_allclose(Graph(columns, weights).operator(symmetric)(z), wanted, atol=1e-12)
    on_torch = Graph(torch.asarray(columns), torch.asarray(weights)).operator(symmetric)(torch.asarray(z))
    np.testing.assert_allclose(to_numpy(on_torch), wanted, atol=1e-12)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_operator_keeps_float32(symmetric: bool) -> None:
    f = unit_rows(np.random.default_rng(0).normal(size=(9, 4)).astype("float32"))
    for array in (f, torch.asarray(f)):
        assert nearest_neighbours(array, 2).operator(symmetric)(array).dtype == array.dtype


def test_a_graph_of_wrong_shape_or_range_is_refused() -> None:
    with pytest.raises(InputError, match=r"must be \(N, m\) arrays of one shape. Got \(2, 1\) and \(2, 2\) instead"):
        Graph(np.zeros((2, 1), int), np.zeros((2, 2)))
    with pytest.raises(InputError, match="arrays of one shape"):
        Graph(np.zeros(2, int), np.zeros(2))
    for index in (-1, 2):
        with pytest.raises(InputError, match="row numbers from 0 to 1"):
            adapt_graph(Graph(np.asarray([[0], [index]]), np.zeros((2, 1))), np.ones((2, 3)))


def test_a_given_graph_is_brought_to_the_features() -> None:
    given_graph = Graph(np.asarray([[1], [0]], dtype="int32"), np.asarray([[0.5], [0.5]]))
    adapted = adapt_graph(given_graph, torch.ones((2, 3), dtype=torch.float32))
    assert adapted.neighbours.dtype == torch.int64
    assert adapted.weights.dtype == torch.float32
    back = adapt_graph(adapted, np.ones((2, 3)))
    np.testing.assert_array_equal(back.weights, given_graph.weights)
    assert back.weights.dtype == np.float64
    with pytest.raises(InputError, match=r"'graph' must have one row per sample \(3\). Got 2 instead"):
        adapt_graph(given_graph, np.ones((3, 3)))
