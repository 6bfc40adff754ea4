"""ZLaP against a dense account of its graph and direct solves; the solver; images that no text reaches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.checks.tasks import embeddings
from moontide.core.graph import Graph, nearest_neighbours
from moontide.methods import zlap
from moontide.methods.zlap import ZLaP, conjugate_gradients, text_weights
from moontide.types import Task


def literal(task: Task, k: int, gamma: float, alpha: float, stretch: bool, inductive: bool) -> np.ndarray:
    """The scores from dense matrices, as the description reads."""
    f, t = task.features, task.text
    texts, n = task.k, task.n
    w = np.zeros((texts + n, texts + n))
    cosine = f @ t.T
    near = np.sort(cosine, axis=1)[:, ::-1][:, : min(k, texts)]
    for i in range(n):
        for j in np.argsort(-(f @ f[i]))[: min(k, n)]:
            if j != i:
                w[texts + i, texts + j] = max(f[i] @ f[j], 0)
        for c in np.argsort(-cosine[i])[:k]:
            s = (cosine[i, c] - near.min()) / (near.max() - near.min()) if stretch else max(cosine[i, c], 0)
            w[texts + i, c] = s**gamma
    both = w + w.T
    degree = both.sum(axis=1)
    degree[degree == 0] = 1
    laplacian = np.eye(texts + n) - alpha * both / np.sqrt(np.outer(degree, degree))
    x = np.linalg.solve(laplacian, np.eye(texts + n, texts))
    return (w @ x if inductive else x)[texts:]


@pytest.mark.parametrize("inductive", [False, True])
@pytest.mark.parametrize("stretch", [False, True])
@pytest.mark.parametrize(
    ("n", "classes", "k", "gamma", "alpha"), [(40, 7, 5, 5.0, 0.3), (9, 3, 4, 2.0, 0.6), (3, 9, 5, 1.0, 0.3)]
)
def test_equals_the_dense_account(
    n: int, classes: int, k: int, gamma: float, alpha: float, stretch: bool, inductive: bool
) -> None:
    task = Task(*embeddings(n, classes, 16))
    method = ZLaP(neighbours=k, gamma=gamma, alpha=alpha, scale_similarities=stretch, inductive=inductive)
    result = method.fit_predict(task)
    wanted = literal(task, k, gamma, alpha, stretch, inductive)
    np.testing.assert_allclose(result.scores, wanted, atol=2e-6)
    np.testing.assert_allclose(result.probs, wanted / wanted.sum(axis=1, keepdims=True), atol=1e-3)
    assert result.converged


@given(n=st.integers(1, 12), columns=st.integers(1, 5), seed=st.integers(0, 5))
def test_conjugate_gradients_solve(n: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng([n, columns, seed])
    a = rng.normal(size=(n, n)) / n
    a = np.eye(n) + a @ a.T
    b = rng.normal(size=(n, columns))
    b[:, 0] = 0  # solved before it starts
    x, steps, solved = conjugate_gradients(lambda p: a @ p, b)
    assert solved
    assert steps <= n + 2
    residual = np.linalg.norm(a @ x - b, axis=0)
    assert (residual <= 1.01e-6 * np.linalg.norm(b, axis=0)).all()


def test_a_column_stops_by_itself() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(30, 30)) / 9
    a = np.eye(30) + a @ a.T
    b = np.eye(30, 4)
    b[:, 1] = np.linalg.eigh(a)[1][:, 0]  # an eigenvector is solved in one step
    together, _, _ = conjugate_gradients(lambda p: a @ p, b)
    for column in range(4):
        alone, _, _ = conjugate_gradients(lambda p: a @ p, b[:, [column]])
        np.testing.assert_allclose(together[:, [column]], alone, atol=1e-13)


def test_a_system_too_hard_for_the_steps_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlap, "MAX_STEPS", 3)
    result = ZLaP(alpha=0.99).fit_predict(*embeddings(40, 7, 16))
    assert not result.converged
    assert result.n_iter == 3


def test_an_image_that_no_text_reaches_keeps_its_zero_shot_prediction() -> None:
    features = np.asarray([[1.0, 0.1, 0.0], [0.9, 0.0, 0.1], [-1.0, -0.1, -0.8]])
    result = ZLaP().fit_predict(features, np.eye(3))
    np.testing.assert_array_equal(result.scores[2], result.zero_shot[2])
    np.testing.assert_array_equal(result.labels, [0, 0, 1])
    assert result.scores[0].max() < 0.5 < result.probs[0].max()


def test_mutual_neighbours_count_twice_and_texts_have_no_edges_of_their_own() -> None:
    graph = zlap.node_graph(Graph(np.asarray([[1], [0]]), np.full((2, 1), 0.5)),
                            Graph(np.asarray([[0], [0]]), np.full((2, 1), 0.25)), 1)  # fmt: skip
    dense = graph.operator(symmetric=True)(np.eye(3))
    np.testing.assert_array_equal(dense, [[0, 0.25, 0.25], [0.25, 0, 1], [0.25, 1, 0]])


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8), st.floats(0.5, 6))
def test_stretched_similarities_fill_the_unit_interval(similarity: list[float], gamma: float) -> None:
    s = np.asarray([similarity])
    w = text_weights(Graph(np.zeros(s.shape, int), s), gamma, True).weights
    if s.max() > s.min():
        assert w.min() == 0
        assert w.max() == 1
    else:
        np.testing.assert_array_equal(w, np.maximum(s, 0) ** gamma)


def test_a_given_graph_gives_the_image_edges() -> None:
    task = Task(*embeddings(20, 4, 16))
    own = ZLaP().fit_predict(task)
    given_one = ZLaP().fit_predict(task.features, task.text, graph=nearest_neighbours(task.features, 4))
    np.testing.assert_allclose(given_one.scores, own.scores, rtol=1e-9)
    none = ZLaP().fit_predict(task.features, task.text, graph=Graph(np.zeros((20, 0), int), np.zeros((20, 0))))
    assert not np.allclose(none.scores, own.scores, atol=1e-4)
