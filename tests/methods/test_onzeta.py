"""OnZeta against a literal account, and what its horizon and its answer mean."""

from __future__ import annotations

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.methods.onzeta import OnZeta
from moontide.streams import run_stream
from moontide.types import Task


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x - x.max())
    return p / p.sum()


def literal(task: Task, n: int, cw: float, cr: float, alpha: float, beta: float, tau: float) -> tuple[np.ndarray, ...]:
    text = task.text.astype("float32").astype("float64")
    w, rho, mixed, labels = text.copy(), np.zeros(task.k), [], []
    for i, x in enumerate(task.features, 1):
        p = softmax(task.logit_scale * text @ x) * np.exp(rho)
        p /= p.sum()
        rho = np.maximum(0, rho - cr / np.sqrt(i) * (p - alpha / task.k))
        v = softmax(w @ x / tau)
        b = beta * np.sqrt(min(i / n, 1))
        mixed.append(b * v + (1 - b) * p)
        labels.append(p)
        w = w - cw / (np.sqrt(i) * tau) * np.outer(v - p, x)
        w /= np.linalg.norm(w, axis=1, keepdims=True)
    return np.asarray(mixed), np.asarray(labels), rho


@pytest.mark.parametrize("n", [60, 25, 200])
def test_equals_the_literal_account(n: int) -> None:
    task = Task(*embeddings(60, 6, 24), 64.0)
    wanted, labels, rho = literal(task, n, 0.05, 5.0, 0.7, 0.6, 0.1)
    method = OnZeta(horizon=n, proxy_step=0.05, dual_step=5.0, balance=0.7, proxy_weight=0.6, tau=0.1)
    state, result = run_stream(method, task, 7)
    np.testing.assert_allclose(result.probs, wanted, atol=1e-9)
    np.testing.assert_allclose(state.dual, rho, atol=1e-9)
    alone = OnZeta(answer="label", dual_step=5.0, balance=0.7).fit_predict(task)
    np.testing.assert_allclose(alone.probs, labels, atol=1e-9)


def test_a_batch_is_a_stream_of_its_own_length() -> None:
    task = Task(*embeddings(40, 6, 24))
    whole = OnZeta().fit_predict(task)
    assert np.array_equal(whole.probs, run_stream(OnZeta(horizon=40), task, 40)[1].probs)
    assert not np.allclose(whole.probs, run_stream(OnZeta(), task, 40)[1].probs)


def test_without_a_horizon_the_proxies_have_their_full_weight() -> None:
    task = Task(*embeddings(40, 6, 24))
    np.testing.assert_array_equal(
        run_stream(OnZeta(), task, 40)[1].probs, run_stream(OnZeta(horizon=1), task, 40)[1].probs
    )


def test_rare_classes_are_lifted_to_their_share() -> None:
    f, t = embeddings(400, 4, 24)
    f = f[np.argsort(f @ t[0])[200:]]  # mostly of one class
    mean = OnZeta(answer="label").fit_predict(f, t).probs.mean(axis=0)
    plain = OnZeta(answer="label", balance=0.0).fit_predict(f, t)
    assert plain.probs.mean(axis=0).min() < 0.15
    assert mean.min() > 0.2
    np.testing.assert_allclose(plain.probs, plain.zero_shot, atol=1e-6)


def test_a_class_that_never_comes_does_not_overflow() -> None:
    f, t = np.tile([[1.0, 0.0]], (3000, 1)), np.asarray([[1.0, 0.0], [-1.0, 0.0]])
    assert np.isfinite(OnZeta().fit_predict(f, t, logit_scale=1000.0).probs).all()
