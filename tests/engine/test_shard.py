"""MOON in blocks of rows against MOON at once, and the sum over shards against one shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moontide import MOON, method
from moontide.core import ann
from moontide.core.graph import Graph, nearest_neighbours
from moontide.engine.solvers import solver
from moontide.engine.solvers.moon import Shard, Statistics, solve
from moontide.methods import moon
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
    monkeypatch.setattr("moontide.engine.rows.BLOCK_ENTRIES", 40 * 70)  # blocks of 70 rows
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
    shards = [Shard(method, f, DATA.text, 100.0) for f in parts]

    def run(name: str, *given: Any) -> Any:
        first, second = (getattr(shard, name)(*given) for shard in shards)
        return first + second

    apart = solve(method, run, DATA.text, 100.0)
    inside = [nearest_neighbours(f, 3) for f in parts]
    graph = Graph(
        np.concatenate([inside[0].neighbours, inside[1].neighbours + cut]),
        np.concatenate([g.weights for g in inside]),
    )
    together = MOON().fit_predict(DATA.features, DATA.text, graph=graph)
    np.testing.assert_array_equal(np.concatenate([s.labels for s in shards]), together.labels)
    np.testing.assert_allclose(apart.beta, together.beta, atol=1e-6)
    np.testing.assert_allclose(apart.energy, together.objective, rtol=1e-4)


@pytest.mark.parametrize("name", ["moon", "stata"])
def test_torch_gives_what_numpy_gives(name: str) -> None:
    torch = pytest.importorskip("torch")
    chosen, on_shards = method(name), solver(name)
    found = []
    for features in (DATA.features, torch.tensor(DATA.features)):
        shard: Any = on_shards.Shard(chosen, features, DATA.text, 100.0, half=False)
        solution: Any = on_shards.solve(
            chosen, lambda call, *given, shard=shard: getattr(shard, call)(*given), DATA.text, 100.0
        )
        again: Any = on_shards.Shard(chosen, features, DATA.text, 100.0, half=False)
        again.restore(shard.state())
        for column, values in shard.predictions().items():
            np.testing.assert_array_equal(again.predictions()[column], values)
        found.append({**shard.predictions(), "beta": solution.beta})
    np.testing.assert_array_equal(found[0]["label"], found[1]["label"])
    for column in found[0]:
        np.testing.assert_allclose(found[0][column], found[1][column], atol=1e-4)


def test_statistics_keep_the_larger_maximum() -> None:
    one = np.ones(1, np.float32)
    a = Statistics(1, one[:, None], one, one, 0.5, 0.0, 1, 2 * one)
    b = Statistics(2, one[:, None], one, one, 0.5, 0.0, 1, 1 * one)
    joined = a + b
    assert (joined.n, joined.free, joined.changed, joined.largest[0], joined.soft[0]) == (3, 1.0, 2, 2.0, 2.0)


def test_the_inverted_file_finds_nearly_all_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ann, "LIST", 100)
    features = simulate(2000, 50, seed=1).features
    exact = nearest_neighbours(features, 3)
    neighbours, weights, recall = ann.inverted_file(features, 3)
    found = (neighbours[:, :, None] == exact.neighbours[:, None, :]).any(axis=2).mean()
    assert recall > 0.95
    assert abs(found - recall) < 0.02  # measured on a sample
    assert not (neighbours == np.arange(2000)[:, None]).any()
    assert all(len(set(row)) == 3 for row in neighbours)
    np.testing.assert_allclose(weights, (features[:, None] * features[neighbours]).sum(axis=2), atol=1e-5)


def test_large_tasks_use_it_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.core.graph.EXACT_ROWS", 200)
    monkeypatch.setattr(ann, "LIST", 20)
    monkeypatch.setattr(ann, "PROBES", 2)
    graph = nearest_neighbours(DATA.features, 3)
    assert 0.3 < graph.recall < 1
    result = MOON().fit_predict(DATA.features, DATA.text)
    assert result.details["graph"].recall == graph.recall
