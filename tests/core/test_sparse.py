"""The E-step that leaves resting classes alone, against the one that computes everything."""

from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide import MOON
from moontide.core import compiled, ple, sparse
from moontide.core.arrays import unit_rows
from moontide.core.graph import Graph, nearest_neighbours
from moontide.methods import moon
from moontide.simulate import simulate

seeds = st.integers(0, 10_000)


@pytest.fixture(autouse=True, params=["loops", "passes"])
def also_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Use it for small problems, too; with compiled loops and, as where these are missing, in numpy."""
    monkeypatch.setattr(sparse, "SMALL", 0)
    if request.param == "passes":
        monkeypatch.setattr(compiled, "_loops", lambda: None)
    else:
        pytest.importorskip("numba")


def problem(seed: int, n: int = 40, k: int = 30) -> tuple[np.random.Generator, ple.AnchorLogits, Graph]:
    """Logits that spread as CLIP's do, float32, and a graph of m = 3."""
    rng = np.random.default_rng(seed)
    cosine = rng.normal(0.2, 0.05, size=(n, k)).astype(np.float32)
    slope = rng.uniform(80, 120, size=k).astype(np.float32)
    graph = nearest_neighbours(unit_rows(rng.normal(size=(n, 8)).astype(np.float32)), 3)
    return rng, ple.AnchorLogits(cosine, slope, rng.normal(size=k).astype(np.float32)), graph


@settings(max_examples=60)
@given(seeds, st.booleans(), st.booleans(), st.floats(0.1, 3))
def test_every_e_step_is_the_plain_one(seed: int, symmetric: bool, weighted: bool, strength: float) -> None:
    rng, rest, graph = problem(seed)
    votes_of = ple.neighbour_votes(graph, symmetric, True, strength)
    exact = ple.neighbour_votes(Graph(graph.neighbours, graph.weights.astype(float)), symmetric, True, strength)
    n, k = rest.cosine.shape
    live = np.sort(rng.choice(k, 5, replace=False))
    weight = rng.uniform(size=n).astype(np.float32) if weighted else None
    values = rest[:][:, live]
    step = ple.e_step(rest[:], np.full((n, k), 1 / k, np.float32), votes_of, live, values)
    z = step.z.astype(float)
    few = sparse.Resting(rest, step.z.copy(), step.log_sum, live, votes_of)
    for _ in range(4):
        values = values + rng.normal(0, 0.5, size=values.shape).astype(np.float32)
        found = few.e_step(values, weight)
        assert found is not None
        said = z if weight is None else z * weight[:, None]
        wanted = ple.e_step(rest[:].astype(float), said, exact, live, values.astype(float))
        z = wanted.z
        np.testing.assert_allclose(found.z, z[:, live], atol=1e-5)
        sure = np.diff(np.sort(z, axis=1)[:, -2:], axis=1)[:, 0] > 1e-5
        np.testing.assert_array_equal(found.labels[sure], wanted.labels[sure])
        for name in ("log_sum", "gamma", "heard", "echo"):
            np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=1e-5, err_msg=name)
        assert found.counts.sum() == n
    np.testing.assert_allclose(few.dense(), z, atol=1e-5)


@settings(max_examples=30)
@given(seeds, st.booleans())
def test_shared_entries_are_all_that_matter(seed: int, symmetric: bool) -> None:
    _, rest, graph = problem(seed, 20, 12)
    votes_of, live = graph.operator(symmetric), np.asarray([2, 7])
    step = ple.e_step(rest[:], np.zeros_like(rest.cosine), votes_of)
    few = sparse.Resting(rest, step.z.copy(), step.log_sum, live, votes_of)
    z, matrix = step.z.copy(), votes_of.matrix.toarray()
    z[:, live] = 0
    either = np.abs(matrix) if symmetric else np.abs(matrix) + np.abs(matrix).T
    wanted = np.flatnonzero(z * (either @ z) > sparse.NEGLIGIBLE)
    np.testing.assert_array_equal(few.shared.entry, wanted)
    said = np.zeros_like(z)
    said.ravel()[wanted] = z.ravel()[wanted]
    found = np.asarray([
        few.hears[few.shared.voter[a:b]] @ few.shared.weight[a:b]
        for a, b in zip(few.shared.first, few.shared.first[1:], strict=False)
    ])  # fmt: skip
    np.testing.assert_allclose(found, (matrix @ said).ravel()[wanted], atol=1e-6)


@settings(max_examples=40)
@given(seeds, st.booleans(), st.integers(4, 24), st.floats(0.1, 3))
def test_what_is_dropped_stays_within_its_bound(seed: int, symmetric: bool, bits: int, strength: float) -> None:
    rng, rest, graph = problem(seed)
    votes_of, live = ple.neighbour_votes(graph, symmetric, True, strength), np.asarray([3, 11, 20])
    values = rest[:][:, live]
    z = ple.e_step(rest[:], np.full_like(rest.cosine, 1 / 30), votes_of, live, values)
    few = sparse.Resting(rest, z.z.copy(), z.log_sum, live, votes_of, None, 2.0**-bits)
    for _ in range(2):
        values = values + rng.normal(0, 0.5, size=values.shape).astype(np.float32)
        before = copy(few)
        before.p = few.p.copy()
        said = before.dense()
        assert few.e_step(values) is not None
        after = copy(few)
        after.p = few.p.copy()
        exact = ple.e_step(rest[:], said, votes_of, live, values).z
        off = np.abs(after.dense() - exact).sum(axis=1).max()
        assert off <= few.dropped + 1e-5


def test_exact_is_the_default_and_what_else_costs_is_told() -> None:
    data = simulate(150, 300, effective_classes=10, seed=0)
    exact = MOON().fit_predict(data.features, data.text)
    found = MOON(exact=False).fit_predict(data.features, data.text)
    assert "dropped" not in exact.details
    assert 0 < float(found.details["dropped"]) < 0.1
    off = np.abs(found.probs - exact.probs).max()
    assert 0 < off < 0.01


def test_what_it_cannot_do_accurately_it_leaves() -> None:
    rng, rest, graph = problem(0)
    votes_of, live = ple.neighbour_votes(graph, True, True, 1.0), np.asarray([0, 1])
    values = rest[:][:, live]
    step = ple.e_step(rest[:], ple.e_step(rest[:], np.zeros_like(rest.cosine), votes_of).z, votes_of)
    for change in (100, -100):  # beyond the range of float32; rows whose largest class vanishes
        few = sparse.Resting(rest, step.z.copy(), step.log_sum, live, votes_of)
        assert few.e_step(values + np.float32(change) * (rng.uniform(size=values.shape) < 0.9)) is None
        np.testing.assert_allclose(few.dense(), step.z, atol=1e-5)  # as if nothing had been asked


OPTIONS: list[dict[str, Any]] = [
    {}, {"votes": "gamma"}, {"graph": "one-sided", "laplacian": "sum"}, {"gamma": "zero_shot"}, {"temper": 20.0},
    {"laplacian_weight": 0.0}, {"gamma_in_counts": True, "update": "exact"}, {"laplacian_weight": 4.0},
    {"iterations": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("n", "k", "present"), [(40, 100, 4), (150, 300, 10)])
def test_moon_gives_what_it_gives_with_every_class_in_every_step(
    options: dict[str, Any], n: int, k: int, present: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moon, "STILL", 0)  # as many iterations in both
    method = MOON(**options)
    for seed in range(3):
        data = simulate(n, k, effective_classes=present, seed=seed)
        found = method.fit_predict(data.features, data.text)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moon, "worthwhile", lambda z, live: False)
            plain = method.fit_predict(data.features, data.text)
        np.testing.assert_allclose(found.probs, plain.probs, atol=1e-5)
        np.testing.assert_array_equal(found.labels, plain.labels)
        np.testing.assert_allclose(found.objective, plain.objective, rtol=1e-5)
        np.testing.assert_allclose(found.details["gamma"], plain.details["gamma"], atol=1e-5)
        for name in ("beta", "kappa"):
            np.testing.assert_allclose(getattr(found, name), getattr(plain, name), rtol=1e-5)


def test_it_is_used_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(moon, "worthwhile", lambda z, live: asked.append(sparse.worthwhile(z, live)) or asked[-1])
    data = simulate(60, 200, effective_classes=5, seed=0)
    MOON().fit_predict(data.features, data.text)
    assert asked == [True]
    MOON(temper=1e4, text_weight=0.0).fit_predict(data.features, data.text)  # every z_ik near 1 / K
    MOON().fit_predict(data.features.astype(np.float64), data.text)
    assert not any(asked[1:])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_iterations_that_would_repeat_the_last_are_left_out(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = simulate(60, 100, effective_classes=5, seed=0)
    features = data.features.astype(dtype)
    short = MOON(iterations=300).fit_predict(features, data.text)
    assert 3 < short.n_iter < 300
    assert short.converged
    assert len(short.objective) == short.n_iter + 1
    monkeypatch.setattr(moon, "STILL", 0)
    full = MOON(iterations=300).fit_predict(features, data.text)
    assert full.n_iter == 300
    np.testing.assert_allclose(short.probs, full.probs, atol=1e-5)
    np.testing.assert_allclose(short.objective[-1], full.objective[-1], rtol=1e-6)
