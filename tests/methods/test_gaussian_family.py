"""StatA, TransCLIP, StatA with vMF and MOON with Gaussians, against their equations written out densely."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moontide
from moontide.core.graph import nearest_neighbours
from moontide.core.ple import anchor_weights, class_confidence, sample_weights, shrink
from moontide.core.simplex import softmax, zero_shot
from moontide.errors import OptionError
from moontide.methods import _gaussian as gaussian
from moontide.methods.transclip import image_means
from moontide.types import Task

CLOTHING = Path(__file__).parents[3] / "shared" / "features" / "clothing_tiny.npz"
FAMILY: list[tuple[str, dict[str, Any]]] = [
    ("stata", {}),
    ("stata", {"beta": "soft"}),
    ("stata", {"alpha": 0.0}),
    ("transclip", {}),
    ("transclip", {"initial_means": "images"}),
    ("stata_vmf", {}),
    ("moon_gaussian", {}),
]
seeds = st.integers(0, 2**32 - 1)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def blobs(n: int, k: int, d: int, seed: int = 0, present: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Unit features around a common direction and around those of the first `present` of k classes, and the text."""
    rng = np.random.default_rng(seed)
    text = unit(rng.standard_normal((k, d)))
    owner = rng.integers(present or k, size=n)
    return unit(text[owner] + 2 * np.ones(d) / d**0.5 + rng.standard_normal((n, d)) / d**0.5), text


def squares(f: np.ndarray, mu: np.ndarray) -> np.ndarray:
    """The dense (N, K, d) array of squares that the package never makes."""
    return (f[:, None, :] - mu[None, :, :]) ** 2


def dense_log_density(f: np.ndarray, mu: np.ndarray, variance: np.ndarray) -> np.ndarray:
    return -(squares(f, mu) / variance + np.log(variance)).sum(axis=2) / 2


@given(seeds, st.integers(1, 9), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_log_density_is_the_dense_formula(seed: int, n: int, k: int, d: int, shared: bool) -> None:
    rng = np.random.default_rng(seed)
    f, mu, variance = rng.normal(size=(n, d)), rng.normal(size=(k, d)), rng.uniform(0.01, 1, (1 if shared else k, d))
    expected = dense_log_density(f, mu, variance)
    np.testing.assert_allclose(gaussian.log_density(f, mu, variance), expected, rtol=1e-9, atol=1e-9)


def test_float32_keeps_its_digits_where_features_lie_far_from_the_origin() -> None:
    rng = np.random.default_rng(0)
    f = 1 + 1e-3 * rng.standard_normal((50, 20))
    mu, variance = f[:4], np.full((4, 20), 1e-6)
    low = gaussian.log_density(*(a.astype(np.float32) for a in (f, mu, variance)))
    as_stored = [a.astype(np.float32).astype(np.float64) for a in (f, mu, variance)]
    np.testing.assert_allclose(low, dense_log_density(*as_stored), rtol=1e-4, atol=1e-3)


def pooled_of(z: np.ndarray, f: np.ndarray, mu: np.ndarray, faithful: bool = False) -> np.ndarray:
    return gaussian.pooled_variance(*gaussian.weighted_moments(z, f, gaussian.row_weights(f, faithful)), mu)[0]


@given(seeds, st.integers(1, 9), st.integers(1, 5), st.integers(1, 7))
def test_variances_are_the_dense_formulas(seed: int, n: int, k: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    f, mu, z = rng.normal(size=(n, d)), rng.normal(size=(k, d)), softmax(rng.normal(size=(n, k)))
    weights = gaussian.class_weights(np.log(z))
    np.testing.assert_allclose(weights, (z / z.sum(axis=0)).T, rtol=1e-12)
    per_class = np.einsum("ki,ikj->kj", weights, squares(f, mu))
    np.testing.assert_allclose(gaussian.class_variance(weights @ f**2, weights @ f, mu), per_class, rtol=1e-9)
    pooled = np.einsum("ik,ikj->j", z, squares(f, mu)) / n
    np.testing.assert_allclose(pooled_of(z, f, mu), pooled, rtol=1e-9)


@given(seeds, st.floats(0.1, 10), st.integers(1, 5))
def test_m_step_minimises_the_anchored_likelihood(seed: int, alpha: float, d: int) -> None:
    rng = np.random.default_rng(seed)
    f, z, text, anchor = (
        rng.normal(size=(6, d)),
        rng.uniform(size=6),
        rng.normal(size=(1, d)),
        rng.uniform(1, 2, (1, d)),
    )

    def objective(mu: np.ndarray, variance: np.ndarray) -> float:
        # -sum_i z_i log N(f_i; mu, variance) + alpha KL(N(text, anchor) || N(mu, variance)), without constants
        kl = ((anchor + (text - mu) ** 2) / variance + np.log(variance / anchor)).sum() / 2
        return float(-z @ dense_log_density(f, mu, variance)[:, 0] + alpha * kl)

    beta, weights = np.asarray([z.sum() / (z.sum() + alpha)]), (z / z.sum())[None, :]
    v = weights @ f
    mu = shrink(v, beta, text)
    variance = gaussian.anchored_variance(gaussian.class_variance(weights @ f**2, v, mu), beta, text - mu, anchor)
    best = objective(mu, variance)
    for _ in range(20):
        step = rng.normal(scale=0.05, size=(2, 1, d))
        assert objective(mu + step[0], variance * np.exp(step[1])) > best


def test_faithful_repeats_the_chunked_division_and_the_default_does_not() -> None:
    n, k, d = 5200, 3, 4
    f, text = blobs(n, k, d)
    z = zero_shot(f, text, 100.0)
    terms = np.einsum("ik,ikj->ij", z, squares(f, text))  # (N, d)
    running = np.zeros(d)
    for start in range(0, n, 2500):
        running = (running + terms[start : start + 2500].sum(axis=0)) / n
    np.testing.assert_allclose(pooled_of(z, f, text, True), running, rtol=1e-8)
    np.testing.assert_allclose(pooled_of(z, f, text), terms.mean(axis=0), rtol=1e-9)


@pytest.mark.parametrize("name", ["stata", "transclip"])
@pytest.mark.parametrize(("n", "differs"), [(2500, False), (2600, True)])
def test_faithful_changes_the_answer_above_2500_samples_only(name: str, n: int, differs: bool) -> None:
    f, text = blobs(n, 4, 8)
    plain, faithful = (moontide.method(name, faithful=flag).fit_predict(f, text).probs for flag in (False, True))
    assert np.array_equal(plain, faithful) != differs


def dense_stata(f: np.ndarray, text: np.ndarray, scale: float, iterations: int, hard: bool) -> np.ndarray:
    """StatA as in its page of equations, every array dense."""
    n, k = len(f), len(text)
    y = z = zero_shot(f, text, scale)
    graph = nearest_neighbours(f, 3)
    w = np.zeros((n, n))
    np.put_along_axis(w, graph.neighbours, graph.weights, axis=1)
    anchor = np.einsum("ik,ikj->j", y, squares(f, text)) / n
    mu, variance = text, np.tile(anchor, (k, 1))
    for it in range(iterations + 1):
        log_p = dense_log_density(f, mu, variance)
        for _ in range(5):
            a = log_p + 50 / 6 * (w.T @ z + w @ z)
            z = y * np.exp((a - a.max(axis=1, keepdims=True)) / 50)
            z = z / z.sum(axis=1, keepdims=True)
        if it < iterations:
            count = np.bincount(z.argmax(axis=1), minlength=k) if hard else z.sum(axis=0)
            beta = (count / (count + 1))[:, None]
            mu = unit(beta * unit(z.T @ f) + (1 - beta) * text)
            scatter = np.einsum("ik,ikj->kj", z, squares(f, mu)) / z.sum(axis=0)[:, None]
            variance = beta * scatter + (1 - beta) * (anchor + (text - mu) ** 2)
    return z


@given(seeds, st.integers(5, 40), st.integers(1, 6), st.integers(2, 12), st.sampled_from(["hard", "soft"]))
def test_stata_is_its_dense_equations(seed: int, n: int, k: int, d: int, beta: str) -> None:
    f, text = blobs(n, k, d, seed)
    result = moontide.method("stata", beta=beta, iterations=3).fit_predict(f, text, logit_scale=20.0)
    np.testing.assert_allclose(result.probs, dense_stata(f, text, 20.0, 3, beta == "hard"), atol=1e-8)


def test_moon_gaussian_is_its_equations_after_one_m_step() -> None:
    f, text = blobs(30, 6, 10, present=2)
    y = zero_shot(f, text, 20.0)
    anchor = np.einsum("ik,ikj->j", y, squares(f, text)) / len(f)
    z = softmax(np.log(y) + dense_log_density(f, text, anchor[None]) / 50)
    weighted = z * sample_weights(z)[:, None]
    count = np.bincount(z.argmax(axis=1), minlength=6)
    beta = (count / (count + anchor_weights(class_confidence(y.mean(axis=0), y.max(axis=0)))))[:, None]
    mu = unit(beta * (weighted.T @ f) / weighted.sum(axis=0)[:, None] + (1 - beta) * text)
    scatter = np.einsum("ik,ikj->kj", weighted, squares(f, mu)) / weighted.sum(axis=0)[:, None]
    variance = beta * scatter + (1 - beta) * (anchor + (text - mu) ** 2)
    expected = softmax(np.log(y) + dense_log_density(f, mu, variance) / 50)
    method = moontide.method("moon_gaussian", iterations=1, laplacian_weight=0.0)
    result = method.fit_predict(f, text, logit_scale=20.0)
    np.testing.assert_allclose(result.probs, expected, atol=1e-9)
    np.testing.assert_allclose(result.beta, beta[:, 0], rtol=1e-9)


def test_stata_vmf_with_one_pass_is_moon_with_static_shrinkage() -> None:
    f, text = blobs(60, 8, 16, present=3)
    one_pass = moontide.method("stata_vmf", inner_iterations=1).fit_predict(f, text)
    static = moontide.method("moon", alpha=1.0, gamma="off").fit_predict(f, text)
    np.testing.assert_allclose(one_pass.probs, static.probs, atol=1e-9)
    np.testing.assert_allclose(one_pass.kappa, static.kappa)
    once, five_times = (
        moontide.method("stata_vmf", inner_iterations=t, iterations=1).fit_predict(f, text, logit_scale=10.0).probs
        for t in (1, 5)
    )
    assert np.abs(once - five_times).max() > 1e-3


@pytest.mark.parametrize("n", [5, 30])
def test_image_means_are_those_of_the_eight_likeliest(n: int) -> None:
    f, text = blobs(n, 4, 6)
    y = zero_shot(f, text, 10.0)
    likeliest = [np.argsort(-y[:, k])[:8] for k in range(4)]
    expected = unit(np.stack([y[rows, k] @ f[rows] for k, rows in enumerate(likeliest)]))
    np.testing.assert_allclose(image_means(np.log(y), f), expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["stata", "moon_gaussian"])
def test_a_class_whose_assignments_underflow_stays_at_its_anchor(name: str) -> None:
    f, text = blobs(40, 5, 8, present=2)
    text[4] = -f.mean(axis=0)
    result = moontide.method(name).fit_predict(f.astype(np.float32), text.astype(np.float32), logit_scale=300.0)
    assert (result.probs[:, 4] == 0).all()
    assert result.beta[4] == 0
    anchor = pooled_of(zero_shot(f, unit(text), 300.0), f, unit(text))
    np.testing.assert_allclose(result.details["mu"][4], unit(text)[4], rtol=1e-5)
    np.testing.assert_allclose(result.details["spread"][4], anchor, rtol=1e-4)


def test_a_class_of_transclip_whose_assignments_underflow_has_a_mean() -> None:
    f, text = blobs(40, 5, 8, present=2)
    text[4] = -f.mean(axis=0)
    low, full = (
        moontide.method("transclip").fit_predict(f.astype(t), text.astype(t), logit_scale=300.0)
        for t in (np.float32, np.float64)
    )
    assert (low.probs[:, 4] == 0).all()
    np.testing.assert_allclose(low.details["mu"], full.details["mu"], atol=1e-3)


@pytest.mark.parametrize(("name", "options"), FAMILY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_spread_at_all_is_finite(name: str, options: dict[str, Any], dtype: type) -> None:
    text = np.eye(3, 6, dtype=dtype)
    result = moontide.method(name, **options).fit_predict(np.tile(text[:1], (4, 1)), text)
    assert np.isfinite(result.probs).all()
    assert (result.labels == 0).all()


@pytest.mark.parametrize(("name", "options"), FAMILY)
@pytest.mark.skipif(not CLOTHING.exists(), reason="needs ../shared/features/clothing_tiny.npz")
def test_float32_is_finite_and_near_float64_in_another_embedding_space(name: str, options: dict[str, Any]) -> None:
    data = np.load(CLOTHING, allow_pickle=False)
    f, text, scale = data["image_features"], data["text_features"], 1 / float(data["temperature"])
    low, full = (
        moontide.method(name, **options).fit_predict(f.astype(t), text.astype(t), logit_scale=scale)
        for t in (np.float32, np.float64)
    )
    assert np.isfinite(low.probs).all()
    assert low.probs.dtype == np.float32
    np.testing.assert_allclose(low.probs, full.probs, atol=5e-3)


@pytest.mark.parametrize("name", ["stata", "transclip", "stata_vmf", "moon_gaussian"])
def test_an_option_without_effect_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match=f"'neighbours' option of {name} has no effect with laplacian_weight=0"):
        moontide.method(name, laplacian_weight=0.0, neighbours=5)
    f, text = blobs(6, 2, 4)
    with pytest.raises(OptionError, match=f"'neighbours' option of {name} has no effect on a task that brings its own"):
        moontide.method(name, neighbours=2).fit_predict(Task(f, text, graph=nearest_neighbours(f, 3)))


@pytest.mark.parametrize("name", ["stata", "transclip", "stata_vmf", "moon_gaussian"])
def test_converged_says_that_the_last_m_step_changed_no_label(name: str) -> None:
    f, text = blobs(300, 20, 16)
    runs = [moontide.method(name, iterations=t).fit_predict(f, text, logit_scale=5.0) for t in range(1, 9)]
    for before, after in pairwise(runs):
        assert after.converged == bool((before.labels == after.labels).all())
    assert not all(run.converged for run in runs)
