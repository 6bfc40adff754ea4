"""MOON and TIDE in blocks of rows against the same at once, and the sum over shards against one shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moontide import MOON, TIDE, method
from moontide.core import graph as graphs
from moontide.core.backends import plain
from moontide.core.driver import solve
from moontide.core.graph import Graph, nearest_neighbours
from moontide.core.mixture import First
from moontide.methods import moon, tide
from moontide.simulate import simulate

DATA = simulate(300, 40, effective_classes=8, seed=3)


@pytest.mark.parametrize(
    "options",
    [{}, {"beta": "soft"}, {"gamma": "zero_shot", "votes": "gamma"}, {"gamma": "off"}, {"gamma_in_counts": True},
     {"alpha": 2.0}, {"update": "exact"}, {"laplacian_weight": 0.0}, {"iterations": 1, "final_assignment": False}],
)  # fmt: skip
def test_blocks_give_what_the_whole_gives(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    method = MOON(**options)
    whole = method.fit_predict(DATA.features, DATA.text)
    monkeypatch.setattr(moon, "LARGE", 0)
    monkeypatch.setattr("moontide.core.rows.BLOCK_ENTRIES", 40 * 70)  # blocks of 70 rows
    blocks = method.fit_predict(DATA.features, DATA.text)
    np.testing.assert_array_equal(blocks.labels, whole.labels)
    np.testing.assert_allclose(blocks.probs, whole.probs, atol=5e-4)  # stored in 16 bits
    np.testing.assert_allclose(blocks.zero_shot, whole.zero_shot, atol=5e-4)
    np.testing.assert_allclose(blocks.beta, whole.beta, atol=1e-4)
    np.testing.assert_allclose(blocks.kappa, whole.kappa, rtol=1e-4)
    np.testing.assert_allclose(blocks.objective, whole.objective, rtol=1e-4)
    assert blocks.converged == whole.converged


def test_shards_with_their_own_graphs_add_up_to_one() -> None:
    method, cut = MOON(), 130
    parts = [DATA.features[:cut], DATA.features[cut:]]
    shards = [plain.Rows(method, f, DATA.text, 100.0, half=True) for f in parts]

    def run(name: str, *given: Any) -> Any:
        first, second = (getattr(shard, name)(*given) for shard in shards)
        return first + second

    apart = solve(method.mixture(DATA.text, 100.0), run)
    inside = [nearest_neighbours(f, 3) for f in parts]
    graph = Graph(
        np.concatenate([inside[0].neighbours, inside[1].neighbours + cut]),
        np.concatenate([g.weights for g in inside]),
    )
    together = MOON().fit_predict(DATA.features, DATA.text, graph=graph)
    np.testing.assert_array_equal(np.concatenate([s.labels for s in shards]), together.labels)
    np.testing.assert_allclose(apart.beta, together.beta, atol=1e-6)
    np.testing.assert_allclose(apart.energy, together.objective, rtol=1e-4)


@pytest.mark.parametrize("given", [{}, {"class_prior": np.arange(1.0, 41)}, {"negatives": DATA.features[:3]}])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_tide_in_blocks_gives_what_the_whole_gives(
    given: dict[str, Any], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = pytest.importorskip("torch").tensor if library == "torch" else np.asarray
    features, text = kind(DATA.features), kind(DATA.text)
    whole = TIDE().fit_predict(features, text, **given)
    monkeypatch.setattr(tide, "LARGE", 0)
    monkeypatch.setattr("moontide.core.rows.BLOCK_ENTRIES", 40 * 70)  # blocks of 70 rows
    blocks = TIDE().fit_predict(features, text, **given)
    assert type(blocks.probs) is type(whole.probs)
    assert blocks.probs.dtype.itemsize == 2
    np.testing.assert_array_equal(blocks.labels, whole.labels)
    np.testing.assert_array_equal(blocks.zero_shot_labels, whole.zero_shot_labels)
    np.testing.assert_allclose(blocks.probs, whole.probs, atol=5e-4)  # stored in 16 bits
    np.testing.assert_allclose(blocks.zero_shot, whole.zero_shot, atol=5e-4)
    for name in ("beta", "unknown"):
        np.testing.assert_allclose(getattr(blocks, name), getattr(whole, name), atol=1e-5)
    assert blocks.details.keys() == whole.details.keys()
    for name, value in whole.details.items():
        assert blocks.details[name] == pytest.approx(value, rel=1e-4)
    assert blocks.converged == whole.converged


def test_known_labels_are_not_lost_on_a_large_task(monkeypatch: pytest.MonkeyPatch) -> None:
    known = np.where(np.arange(300) < 20, DATA.labels, -1)
    whole = TIDE().fit_predict(DATA.features, DATA.text, known=known)
    monkeypatch.setattr(tide, "LARGE", 0)
    large = TIDE().fit_predict(DATA.features, DATA.text, known=known)
    np.testing.assert_array_equal(large.probs, whole.probs)


@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_tide_of_few_samples_and_classes_in_blocks(n: int, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    features, text = DATA.features[:n], DATA.text[:classes]
    whole = TIDE().fit_predict(features, text)
    monkeypatch.setattr(tide, "LARGE", 0)
    blocks = TIDE().fit_predict(features, text)
    np.testing.assert_array_equal(blocks.labels, whole.labels)
    np.testing.assert_allclose(blocks.probs, whole.probs, atol=5e-4)
    np.testing.assert_allclose(blocks.unknown, whole.unknown, atol=1e-5)


@pytest.mark.parametrize("name", ["moon", "stata", "tide"])
def test_torch_gives_what_numpy_gives(name: str) -> None:
    torch = pytest.importorskip("torch")
    chosen = method(name)
    found = []
    for features in (DATA.features, torch.tensor(DATA.features)):
        shard: Any = chosen.rows_type(chosen, features, DATA.text, 100.0)
        solution: Any = solve(chosen.mixture(DATA.text, 100.0), shard.call)
        again: Any = chosen.rows_type(chosen, features, DATA.text, 100.0)
        again.restore(shard.state())
        for column, values in shard.predictions().items():
            np.testing.assert_array_equal(again.predictions()[column], values)
        beta = solution[1] if name == "tide" else solution.beta
        found.append({**shard.predictions(), "beta": beta})
    np.testing.assert_array_equal(found[0]["label"], found[1]["label"])
    for column in found[0]:
        np.testing.assert_allclose(found[0][column], found[1][column], atol=1e-4)


def test_sums_keep_the_larger_maximum() -> None:
    one = np.ones(1, np.float32)
    joined = First(1, one, one, 2 * one) + First(2, one, one, 1 * one)
    assert (joined.n, joined.largest[0], joined.total[0]) == (3, 2.0, 2.0)


def test_the_inverted_file_finds_nearly_all_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "LIST", 100)
    features = simulate(2000, 50, seed=1).features
    exact = nearest_neighbours(features, 3)
    neighbours, weights, recall = graphs.inverted_file(features, 3)
    found = (neighbours[:, :, None] == exact.neighbours[:, None, :]).any(axis=2).mean()
    assert recall > 0.95
    assert abs(found - recall) < 0.02  # measured on a sample
    assert not (neighbours == np.arange(2000)[:, None]).any()
    assert all(len(set(row)) == 3 for row in neighbours)
    np.testing.assert_allclose(weights, (features[:, None] * features[neighbours]).sum(axis=2), atol=1e-5)


def test_large_tasks_use_it_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.core.graph.EXACT_ROWS", 200)
    monkeypatch.setattr(graphs, "LIST", 20)
    monkeypatch.setattr(graphs, "PROBES", 2)
    data = simulate(300, 40, dim=64, effective_classes=8, seed=3)  # more samples than dimensions
    graph = nearest_neighbours(data.features, 3)
    assert 0.3 < graph.recall < 1
    result = MOON().fit_predict(data.features, data.text)
    assert result.details["graph"].recall == graph.recall
