"""The M-step by vectors and by products alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide import MOON
from moontide.checks.tasks import embeddings
from moontide.core.arrays import affine, unit_rows
from moontide.core.graph import nearest_neighbours
from moontide.core.mixture import Anchors, MStep
from moontide.core.ple import weighted_sums

OPTIONS: list[dict[str, Any]] = [
    {}, {"update": "exact"}, {"update_mu": False}, {"update_kappa": False}, {"kappa_cap": float("inf"), "temper": 1.0},
    {"count_epsilon": 0.0, "inverse": "newton", "log_normaliser": "accurate", "text_weight": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
@given(seed=st.integers(0, 10_000))
def test_products_alone_give_the_same_classes(options: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    f, text = (unit_rows(x) for x in embeddings(20, 6, 32, seed))
    z, gamma = rng.dirichlet(np.ones(6), size=20), rng.uniform(size=20)
    anchors = Anchors(text, rng.uniform(20, 90, 6), rng.uniform(0.3, 0.9, 6), rng.uniform(0.5, 9, 6))
    counts = rng.integers(0, 3, 6).astype(float)
    step = MOON(**options).m_step(100.0)
    wanted = step(*weighted_sums(z, gamma, f), counts, anchors)
    found = step.in_span(z, gamma, counts, anchors, f @ text.T, f @ f.T)
    assert found is not None
    for name in ("beta", "kappa", "kl"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.values, affine(f, wanted.prototypes, wanted.offset), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(step.means_of(found, f, text), wanted.mu, atol=1e-9)


def test_a_mean_near_zero_is_left_to_vectors() -> None:
    f = np.asarray([[1.0, 0.0], [-1.0, 0.0]])
    anchors = Anchors(f[:1], np.ones(1), np.ones(1), np.full(1, 1e-9))
    step, one = MOON().m_step(100.0), np.ones(2)
    assert step.in_span(one[:, None], one, 2 * one[:1], anchors, f @ f[:1].T, f @ f.T) is None


def test_the_whole_run_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    features, text = embeddings(24, 12, 64)
    found = MOON().fit_predict(features, text)
    monkeypatch.setattr(MStep, "in_span", lambda *given: None)
    wanted = MOON().fit_predict(features, text)
    np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-9)
    np.testing.assert_allclose(found.objective, wanted.objective, rtol=1e-9)
    for name in ("mu", "gamma"):
        np.testing.assert_allclose(found.details[name], wanted.details[name], atol=1e-9)


def test_a_search_leaves_the_products_as_they_were() -> None:
    f = unit_rows(np.random.default_rng(0).normal(size=(9, 4)))
    gram = f @ f.T
    graph, plain = nearest_neighbours(f, 3, gram=gram), nearest_neighbours(f, 3)
    np.testing.assert_array_equal(gram, f @ f.T)
    np.testing.assert_array_equal(graph.neighbours, plain.neighbours)
    np.testing.assert_allclose(graph.weights, plain.weights)
