"""Sinkhorn balancing and InMaP against literal accounts, away from the settings of the golden files."""

from __future__ import annotations

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.methods.inmap import InMaP, hardened, proxies
from moontide.methods.sinkhorn import Sinkhorn
from moontide.types import Task


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def literal_sinkhorn(f: np.ndarray, t: np.ndarray, scale: float, gamma: float, rounds: int) -> np.ndarray:
    n, k = len(f), len(t)
    p = softmax(scale * f @ t.T) / n
    q = p.sum(axis=0) ** gamma if gamma > 0 else np.full(k, 1 / k)
    q /= q.sum()
    for _ in range(rounds):
        p = q * p / p.sum(axis=0)
        p = p / (n * p.sum(axis=1, keepdims=True))
    return n * p


@pytest.mark.parametrize(("gamma", "rounds", "scale"), [(0.0, 20, 100.0), (0.3, 7, 30.0), (2.0, 3, 50.0)])
def test_sinkhorn_equals_the_literal_account(gamma: float, rounds: int, scale: float) -> None:
    f, t = embeddings(60, 8, 24)
    result = Sinkhorn(gamma=gamma, iterations=rounds).fit_predict(f, t, logit_scale=scale)
    np.testing.assert_allclose(result.probs, literal_sinkhorn(f, t, scale, gamma, rounds), atol=1e-6)


def test_gamma_0_gives_every_class_an_equal_share_and_gamma_1_changes_nothing() -> None:
    f, t = embeddings(60, 8, 24)
    even = Sinkhorn(iterations=500).fit_predict(f, t)
    np.testing.assert_allclose(even.probs.sum(axis=0), 60 / 8, atol=1e-3)
    same = Sinkhorn(gamma=1.0).fit_predict(f, t)
    np.testing.assert_allclose(same.probs, same.zero_shot, atol=1e-6)


def test_a_class_whose_probabilities_underflow_gets_its_share() -> None:
    f, t = embeddings(40, 5, 24)
    t[2] = -f.mean(axis=0)  # so far off that its probabilities underflow
    probs = Sinkhorn(iterations=200).fit_predict(f, t, logit_scale=500.0).probs
    assert probs[:, 2].sum() == pytest.approx(40 / 5, rel=0.2)


def test_only_rows_above_the_threshold_become_one_hot() -> None:
    y = np.asarray([[0.6, 0.4], [0.61, 0.39], [0.5, 0.5]])
    assert hardened(y, 0.6).tolist() == [[0.6, 0.4], [1.0, 0.0], [0.5, 0.5]]


def test_inmap_equals_the_literal_account() -> None:
    f, t = (x.astype("float32").astype("float64") for x in embeddings(50, 6, 24, seed=2))
    y = literal_sinkhorn(f, t, 100.0, 0.5, 5)
    y[y.max(axis=1) > 0.7] = np.eye(6)[y[y.max(axis=1) > 0.7].argmax(axis=1)]
    w, eta, before = t.copy(), 4.0, np.inf
    for _ in range(60):
        g = softmax(f @ w.T / 0.1).T @ f - y.T @ f
        if np.linalg.norm(g) > before:
            eta /= 2
        before = np.linalg.norm(g)
        w = w - eta / (50 * 0.1) * g
        w /= np.linalg.norm(w, axis=1, keepdims=True)
    method = InMaP(gamma=0.5, sinkhorn_iterations=5, threshold=0.7, tau=0.1, step_size=4.0, iterations=60)
    result = method.fit_predict(f, t)
    np.testing.assert_allclose(result.scores, f @ w.T, atol=1e-7)
    np.testing.assert_allclose(result.probs, softmax(f @ w.T / 0.1), atol=1e-6)


def test_the_gradient_of_the_proxies_vanishes() -> None:
    f, t = embeddings(200, 3, 8, seed=1)
    y = softmax(20 * f @ t.T)

    def tangent(w: np.ndarray) -> float:
        g = (softmax(f @ w.T / 0.3) - y).T @ f
        return float(np.linalg.norm(g - w * (w * g).sum(axis=1, keepdims=True)))

    assert tangent(proxies(f, y, t, 0.3, 10.0, 2000)) < 1e-3 * tangent(t)


def test_without_balancing_is_gamma_1() -> None:
    task = Task(*embeddings(40, 5, 24))
    plain, gamma1 = (InMaP.from_preset(preset).fit_predict(task) for preset in ("no_sinkhorn", "gamma1"))
    np.testing.assert_allclose(plain.scores, gamma1.scores, atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 8])
def test_samples_that_depend_on_each_other_give_numbers(n: int) -> None:
    """All on one line: their coordinates in the span of the samples grow without a limit."""
    rng = np.random.default_rng(0)
    line = rng.normal(size=(1, 30))
    f, t = rng.choice([-1.0, 1.0], size=(n, 1)) * line, rng.choice([-1.0, 1.0], size=(4, 1)) * line
    for method in (InMaP(), InMaP(gamma=1.0), InMaP(step_size=1e6)):
        probs = method.fit_predict(f, t, logit_scale=10.0).probs
        np.testing.assert_allclose(probs.sum(axis=1), 1)


def test_outside_the_span_the_steps_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    f, t = embeddings(5, 3, 24)
    y = np.eye(3)[[0, 1, 2, 0, 1]]
    inside = proxies(f, y, t, 0.1, 1.0, 50)
    monkeypatch.setattr("moontide.methods.inmap.LOST", 0.0)
    np.testing.assert_allclose(proxies(f, y, t, 0.1, 1.0, 50), inside, atol=1e-9)
