"""OTTER's transport against a general solver, an assignment solver, and its own dual."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from moontide.checks.tasks import embeddings
from moontide.errors import InputError
from moontide.methods.otter import OTTER, cheapest_chain, transport


def by_linear_programme(cost: np.ndarray, room: np.ndarray) -> float:
    n, k = cost.shape
    sums = np.concatenate([np.kron(np.eye(n), np.ones((1, k))), np.kron(np.ones((1, n)), np.eye(k))])
    return float(linprog(cost.ravel(), A_eq=sums, b_eq=np.append(np.ones(n), room), method="highs").fun)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 10**6), st.booleans())
def test_the_plan_is_of_least_cost(n: int, k: int, seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(0, 3, size=(n, k)).astype(float) if ties else rng.normal(size=(n, k))
    room = n * rng.dirichlet(np.ones(k))
    plan = transport(cost, np.ones(n), room)
    assert plan.min() >= 0
    np.testing.assert_allclose(plan.sum(axis=1), 1, atol=1e-9)
    np.testing.assert_allclose(plan.sum(axis=0), room, atol=1e-9)
    assert (cost * plan).sum() == pytest.approx(by_linear_programme(cost, room), abs=1e-7)
    if not ties:
        assert ((plan > 0).sum(axis=1) > 1).sum() <= k - 1  # images that are split


@pytest.mark.parametrize("seed", range(20))
def test_a_tiny_share_among_equal_costs_takes_no_longer(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Costs of rank 1 have many chains of equal cost; those through the tiny share would move 1e-7 at a time."""
    rng = np.random.default_rng(seed)
    n, k, calls = 12, 6, [0]
    cost = (
        np.add.outer(rng.normal(size=n), rng.normal(size=k)) if seed % 2 else rng.integers(0, 3, (n, k)).astype(float)
    )
    shares = rng.random(k)
    shares[:2] = 1e-8, 1e-6

    def counted(*given: Any) -> Any:
        calls[0] += 1
        assert calls[0] < 20 * (n + k)
        return cheapest_chain(*given)

    monkeypatch.setattr("moontide.methods.otter.cheapest_chain", counted)
    room = n * shares / shares.sum()
    plan = transport(cost, np.ones(n), room)
    np.testing.assert_allclose(plan.sum(axis=0), room, atol=1e-9)
    assert (cost * plan).sum() == pytest.approx(by_linear_programme(cost, room), abs=1e-7)


def test_whole_numbers_make_an_assignment() -> None:
    f, t = embeddings(60, 6, 24)
    counts = np.asarray([20, 3, 0, 17, 10, 10])
    result = OTTER().fit_predict(f.astype("float32"), t, class_prior=counts)
    columns = np.repeat(np.arange(6), counts)
    rows, chosen = linear_sum_assignment(-(f @ t.T)[:, columns])
    assert np.array_equal(result.labels[rows], columns[chosen])
    assert set(np.unique(result.probs)) == {0.0, 1.0}


def test_the_logit_scale_has_no_effect_and_the_default_balance_is_even() -> None:
    f, t = embeddings(60, 6, 24)
    found = OTTER().fit_predict(f, t)
    assert np.array_equal(found.labels, OTTER().fit_predict(f, t, logit_scale=3.0).labels)
    assert np.bincount(found.labels).tolist() == [10] * 6


def test_fewer_images_than_classes_are_split_evenly_and_take_the_lower_class() -> None:
    result = OTTER().fit_predict(np.asarray([[1.0, 0.0]]), np.eye(2)[[0, 1, 1, 0]])
    np.testing.assert_allclose(result.probs, 0.25)
    assert result.labels.tolist() == [0]


def test_other_methods_refuse_a_class_balance() -> None:
    import moontide

    with pytest.raises(InputError, match="The method inmap cannot use a class balance"):
        moontide.method("inmap").fit_predict(np.eye(2), np.eye(2), class_prior=[1, 1])
