"""Frolic's parts against literal accounts."""

from __future__ import annotations

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.methods.frolic import Frolic, debiased
from moontide.methods.inmap import InMaP
from moontide.types import Task


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def literal_debias(logits: np.ndarray, rounds: int) -> np.ndarray:
    k = logits.shape[1]
    for _ in range(rounds):
        top = np.sort(logits, axis=1)
        p = softmax(logits)[top[:, -1] - top[:, -2] > 1 / k]
        a = np.zeros((k, k))
        for c in range(k):
            if (p.argmax(axis=1) == c).any():
                a[:, c] = p[p.argmax(axis=1) == c].mean(axis=0)
        x = np.full(k, 1 / k)
        for _ in range(100):
            new = a @ x
            new = np.maximum(0, new / np.abs(new).sum())
            if np.abs(new - x).sum() < 1e-3:
                break
            x = new
        logits = logits - np.log(x + 1e-12)
    return logits


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_the_bias_correction_equals_the_literal_account(rounds: int, scale: float) -> None:
    f, t = embeddings(80, 6, 24)
    found = Frolic(part="debias", rounds=rounds).fit_predict(f, t, logit_scale=scale)
    np.testing.assert_allclose(found.scores, literal_debias(scale * f @ t.T, rounds), atol=1e-4)


def test_the_gaussian_logits_equal_the_literal_account() -> None:
    f, t = embeddings(50, 6, 24)
    p = 1 / (0.7 * np.concatenate([f, t]).var(axis=0, ddof=1) + 0.3)
    wanted = np.asarray([[-0.5 * (p * (x - y) ** 2).sum() for y in t] for x in f])
    found = Frolic(part="gaussian", shrinkage=0.3).fit_predict(f, t)
    np.testing.assert_allclose(found.scores, wanted, atol=1e-6)
    np.testing.assert_allclose(found.probs, softmax(100 * wanted), atol=1e-4)


def test_the_stack_is_two_inmaps_without_balancing() -> None:
    task = Task(*embeddings(50, 6, 24))
    learnt = InMaP(sinkhorn_iterations=0, iterations=50).fit_predict(task)
    near = Frolic(rounds=0, iterations=50, shrinkage=1.0).fit_predict(task)  # covariance I: the Gaussian is the cosine
    np.testing.assert_allclose(near.scores, 200 * learnt.scores, atol=1e-3)


def test_the_floor_bounds_what_an_absent_class_gains() -> None:
    f, t = embeddings(60, 6, 24)
    logits = 100 * f @ t.T
    alone = logits[logits.argmax(axis=1) == 2]
    gain = (debiased(alone, 1, 1e-12) - alone)[:, [0, 1, 3, 4, 5]].max()
    bounded = (debiased(alone, 1, 0.01) - alone)[:, [0, 1, 3, 4, 5]].max()
    assert gain > bounded
    assert bounded <= -np.log(0.01)


def test_rows_without_a_clear_label_stop_the_correction() -> None:
    logits = np.zeros((4, 3))
    assert np.array_equal(debiased(logits, 3, 1e-12), logits)
