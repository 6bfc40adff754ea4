"""DOTA against a literal account with one matrix inverse for each sample."""

from __future__ import annotations

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.methods.dota import DOTA
from moontide.streams import run_stream
from moontide.types import Task


@pytest.mark.parametrize("means", ["constant", "text"])
@pytest.mark.parametrize(("scale", "k"), [(100.0, 5), (10.0, 30)], ids=["few classes are touched", "all are"])
def test_equals_the_literal_account(scale: float, k: int, means: str) -> None:
    eps, sigma, eta, rho = 1e-2, 0.01, 0.5, 0.05
    task = Task(*embeddings(50, k, 12), scale)
    mu = np.full((k, 12), 0.001) if means == "constant" else task.text.copy()
    cov, c, precision, wanted = np.tile(sigma * np.eye(12), (k, 1, 1)), np.ones(k), np.eye(12) / sigma, []
    for x in task.features:
        logits = scale * task.text @ x
        y = np.exp(logits - logits.max())
        y /= y.sum()
        g = mu @ precision @ x - 0.5 * np.einsum("kd,de,ke->k", mu, precision, mu)
        wanted.append(logits + min(rho * c.mean(), eta) * g)
        apart = x - mu
        outer = apart[:, :, None] * apart[:, None, :]
        cov = (c[:, None, None] * cov + y[:, None, None] * outer) / (c + y)[:, None, None]
        mu = (c[:, None] * mu + y[:, None] * x) / (c + y)[:, None]
        c = c + y
        precision = np.linalg.inv((1 - eps) * cov.mean(axis=0) + eps * np.eye(12))
    method = DOTA(ridge=eps, variance=sigma, weight_cap=eta, weight=rho, means=means)
    state, result = run_stream(method, task, 8)
    np.testing.assert_allclose(result.scores, wanted, rtol=1e-5, atol=1e-4)  # classes of y < 6e-8 are left alone
    np.testing.assert_allclose(state.scatter / state.counts[:, None, None], cov, atol=1e-6)
    np.testing.assert_allclose(state.mu, mu, atol=1e-6)
    np.testing.assert_allclose(state.precision, precision, rtol=1e-4, atol=1e-3)


def test_before_the_first_sample_all_classes_are_equally_likely() -> None:
    task = Task(*embeddings(1, 5, 12))
    result = DOTA(weight=10.0, weight_cap=10.0).fit_predict(task)
    np.testing.assert_allclose(result.probs, result.zero_shot, atol=1e-6)
