"""EM-Dirichlet against a literal account, its inner solver against the likelihood, and cluster matching."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import gammaln, psi

from moontide.checks.tasks import embeddings
from moontide.core.simplex import softmax
from moontide.methods import em_dirichlet
from moontide.methods.em_dirichlet import (
    EMDirichlet,
    dirichlet_estimate,
    log_normaliser,
    match_clusters,
    mm_step,
    newton_estimate,
)
from moontide.types import Task


def literal(task: Task, iterations: int, hard: bool, weight: float, broadcast: bool) -> np.ndarray:
    """The assignments u, every class solved, empty ones too, and an N x K x K likelihood."""
    n, k = task.n, task.k
    p = softmax(30 * task.features @ task.text.T)
    log_p = np.log(p + 1e-15)
    u, a = p, np.ones((1, 1) if broadcast else (k, k))
    for _ in range(iterations):
        s = u.sum(axis=0)
        empty = s <= 1e-15
        y = np.where(empty[:, None], -10, u.T @ log_p / np.maximum(s, 1e-15)[:, None])
        old, new = a, a
        for step in range(1000):
            q = np.abs(2 * (psi(new + 1) * new - gammaln(new + 1)) / new**2)
            b = psi(new + 1) - psi(new.sum(axis=1, keepdims=True)) - q * new - y
            before, new = new, (-b + np.sqrt(b**2 + 4 * q)) / (2 * q)
            if step and step % 50 == 0 and ((new - before) ** 2).sum() / (before**2).sum() < 1e-11:
                break
        a = np.where(empty[:, None], old, new)
        logits = gammaln(a.sum(axis=1)) - gammaln(a).sum(axis=1) + ((a - 1)[None] * log_p[:, None, :]).sum(axis=2)
        soft = softmax(logits + weight * (np.log(s / n + 1e-15) + 1))
        u = np.eye(k)[soft.argmax(axis=1)] if hard else soft
    return soft


@pytest.mark.parametrize(
    ("method", "hard", "weight", "broadcast"),
    [
        (EMDirichlet(iterations=4), True, 2, False),
        (EMDirichlet(variant="soft", iterations=4), False, 2, False),
        (EMDirichlet.from_preset("stata_port", iterations=4), True, 0, True),
        (EMDirichlet(iterations=4, complexity=0.5), True, 0.5, False),
    ],
)
def test_equals_the_literal_account(method: EMDirichlet, hard: bool, weight: float, broadcast: bool) -> None:
    task = Task(*embeddings(50, 11, 16))
    wanted = literal(task, 4, hard, weight, broadcast)
    result = method.fit_predict(task)
    np.testing.assert_allclose(result.probs, wanted, atol=1e-4)
    np.testing.assert_array_equal(result.scores, np.eye(11)[wanted.argmax(axis=1)])


def test_presets_are_the_published_settings() -> None:
    assert EMDirichlet() == EMDirichlet(iterations=10, variant="hard", complexity="original")
    assert EMDirichlet.from_preset("soft").iterations == 20


def log_likelihood(a: np.ndarray, log_p: np.ndarray) -> np.ndarray:
    return log_p @ (a - 1).T + log_normaliser(a)


laws = st.lists(st.floats(0.05, 50), min_size=2, max_size=6)


@given(laws, st.integers(0, 1000))
def test_a_step_never_lowers_the_likelihood(law: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    log_p = np.log(rng.dirichlet(law, size=7) + 1e-15)
    a = rng.uniform(0.1, 20, size=(1, len(law)))
    before = log_likelihood(a, log_p).sum()
    after = log_likelihood(mm_step(a, log_p.mean(axis=0), a.sum(keepdims=True)), log_p).sum()
    assert after >= before - 1e-9 * abs(before)


@given(st.lists(st.floats(0.1, 8), min_size=2, max_size=6))
def test_the_estimate_is_where_the_gradient_vanishes(law: list[float]) -> None:
    a = np.asarray([law])
    y = psi(a) - psi(a.sum(keepdims=True))  # the expected log-probabilities of the law
    np.testing.assert_allclose(dirichlet_estimate(np.ones_like(a), y), a, rtol=2e-2)


def test_classes_do_not_disturb_each_other() -> None:
    rng = np.random.default_rng(0)
    y = np.stack([np.log(rng.dirichlet([3.0, 1.0, 2.0], size=n) + 1e-15).mean(axis=0) for n in (1, 4, 50)])
    together = dirichlet_estimate(np.ones((3, 3)), y)  # the first, of one sample, never comes to rest
    alone = dirichlet_estimate(np.ones((1, 3)), y[:1])
    np.testing.assert_allclose(together[:1], alone, rtol=1e-12)
    np.testing.assert_allclose(psi(together) - psi(together.sum(axis=1, keepdims=True)), y, atol=1e-2)


@pytest.mark.parametrize("estimate", [dirichlet_estimate, newton_estimate])
@pytest.mark.parametrize("samples", [1, 3, 40])
def test_many_classes_are_solved_as_if_one_by_one(estimate, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The curve through the mean log-probabilities stands for all classes: the steps are those of every class."""
    rng = np.random.default_rng(samples)
    logits = 30 * rng.normal(0.2, 0.04, size=(3, samples, 400))
    y = np.log(softmax(logits.reshape(-1, 400)) + 1e-15).reshape(3, samples, 400).mean(axis=1)
    start = np.exp(rng.normal(size=y.shape)) * 20
    found = estimate(start, y)
    monkeypatch.setattr(em_dirichlet, "CURVE_POINTS", 10**9)
    np.testing.assert_allclose(found, estimate(start, y), rtol=1e-6)


@given(laws, st.integers(0, 1000))
def test_log_likelihood_is_that_of_scipy(law: list[float], seed: int) -> None:
    p = np.random.default_rng(seed).dirichlet(np.asarray(law) + 1, size=3)
    wanted = [stats.dirichlet.logpdf(row, law) for row in p]
    np.testing.assert_allclose(log_likelihood(np.asarray([law]), np.log(p))[:, 0], wanted, rtol=1e-9, atol=1e-9)


def test_the_temperature_follows_the_logit_scale() -> None:
    features, text = embeddings(50, 11, 16)
    wanted = EMDirichlet().fit_predict(features, text, logit_scale=100.0)
    found = EMDirichlet(relative_temperature=0.6).fit_predict(features, text, logit_scale=50.0)
    np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-12)


@given(st.permutations(range(5)))
def test_matching_undoes_a_permutation_of_clusters(order: list[int]) -> None:
    p = softmax(5 * np.random.default_rng(0).normal(size=(60, 5)))
    cluster = np.asarray(order)[p.argmax(axis=1)]
    np.testing.assert_array_equal(match_clusters(p, cluster)[cluster], p.argmax(axis=1))


def test_matching_relabels_whole_clusters() -> None:
    task = Task(*embeddings(60, 25, 8, seed=3))
    plain, matched = EMDirichlet().fit_predict(task), EMDirichlet(match=True).fit_predict(task)
    p = softmax(30 * task.features @ task.text.T)
    agreement = [sum(p[r.labels == k, k].mean() for k in np.unique(r.labels)) for r in (plain, matched)]
    assert agreement[1] > agreement[0]
    assert len(set(zip(plain.labels, matched.labels, strict=True))) == len(np.unique(plain.labels))
    np.testing.assert_array_equal(matched.probs.argmax(axis=1), matched.labels)
