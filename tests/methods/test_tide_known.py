"""TIDE with known labels and with a class balance: what is given is held to, and helps with the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide.methods.tide import TIDE
from moontide.simulate import Simulated, simulate


def shots(labels: Any, each: int, seed: int) -> Any:
    """Return labels of some samples of each class, -1 for the others; those of fewer are among those of more."""
    rng, known = np.random.default_rng(seed), np.full(len(labels), -1)
    for k in np.unique(labels):
        members = np.flatnonzero(labels == k)
        known[rng.permutation(members)[: min(each, len(members) - 1)]] = k
    return known


def accuracy(labels: Any, data: Simulated, rows: Any) -> float:
    return float((labels == data.labels)[rows].mean())


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), n=st.integers(1, 30), k=st.integers(2, 12))
def test_known_labels_are_held_to_even_where_they_are_wrong(seed: int, n: int, k: int) -> None:
    data = simulate(n, k, dim=16, seed=seed)
    known = np.random.default_rng(seed).integers(-1, k, n)
    found = TIDE().fit_predict(data.features, data.text, known=known)
    there = known >= 0
    np.testing.assert_array_equal(found.probs[there], np.eye(k)[known[there]])
    assert np.isfinite(found.probs).all()
    np.testing.assert_allclose(found.probs.sum(axis=1), 1, atol=1e-5)


def test_the_label_of_an_unlabelled_sample_does_not_reach_the_answer_by_another_way() -> None:
    data = simulate(60, 6, dim=32, seed=0)
    known = shots(data.labels, 2, 0)
    found = TIDE().fit_predict(data.features, data.text, known=known)
    order = np.random.default_rng(0).permutation(60)
    again = TIDE().fit_predict(data.features[order], data.text, known=known[order])
    np.testing.assert_allclose(again.probs, found.probs[order], atol=1e-4)


def test_labels_of_two_confused_classes_tell_them_apart() -> None:
    gains = []
    for seed in range(6):
        data = simulate(120, 6, seed=seed)
        text = data.text.copy()
        text[[0, 1]] = text[[1, 0]]  # the names of two classes are the wrong way round
        pair = np.isin(data.labels, [0, 1])
        known = np.where(pair, shots(data.labels, 4, seed), -1)
        rows = pair & (known < 0)
        without = accuracy(TIDE().fit_predict(data.features, text).labels, data, rows)
        gains.append(accuracy(TIDE().fit_predict(data.features, text, known=known).labels, data, rows) - without)
    assert min(gains) > -0.05
    assert np.mean(gains) > 0.3


def test_labels_of_all_classes_help_with_the_other_samples() -> None:
    gains = []
    for seed in range(4):
        data = simulate(600, 100, seed=seed)
        known = shots(data.labels, 4, seed)
        plain, informed = (TIDE().fit_predict(data.features, data.text, known=k).labels for k in (None, known))
        gains.append(accuracy(informed, data, known < 0) - accuracy(plain, data, known < 0))
    assert np.mean(gains) > 0.005


def test_a_true_class_balance_helps_on_a_skewed_batch() -> None:
    gains = []
    for seed in range(4):
        data = simulate(400, 100, imbalance=10, seed=seed)
        shares = np.bincount(data.labels, minlength=100)
        plain, informed = (TIDE().fit_predict(data.features, data.text, class_prior=p).labels for p in (None, shares))
        gains.append(accuracy(informed, data, slice(None)) - accuracy(plain, data, slice(None)))
    assert np.mean(gains) > 0.01


def test_a_class_with_a_share_of_zero_is_not_predicted() -> None:
    data = simulate(100, 10, seed=0)
    found = TIDE().fit_predict(data.features, data.text, class_prior=[0] * 5 + [1] * 5)
    assert set(found.labels) <= {5, 6, 7, 8, 9}
