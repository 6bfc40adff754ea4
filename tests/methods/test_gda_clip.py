"""GDA-CLIP against its formula with a pseudo-inverse, and the ridge precision that the Gaussian methods share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.checks.tasks import embeddings
from moontide.core.simplex import softmax
from moontide.methods._precision import ridge_precision, spd_inverse, times_precision, whitened
from moontide.methods.gda_clip import GDACLIP
from moontide.types import Task

torch = pytest.importorskip("torch")


def rows(n: int, d: int, seed: int) -> np.ndarray:
    """Differences of unit vectors, with a mean that is not 0."""
    return np.random.default_rng([seed, n, d]).normal(size=(n, d)) / d**0.5 + 0.1


def by_moments(x: np.ndarray) -> np.ndarray:
    """P from the moments of its rows: the products of the whitened unit vectors."""
    white = whitened(np.eye(x.shape[1], dtype=x.dtype), x.T @ x, x.sum(axis=0), x.shape[0])
    on_torch = whitened(*map(torch.asarray, (np.eye(x.shape[1], dtype=x.dtype), x.T @ x, x.sum(axis=0))), x.shape[0])
    np.testing.assert_allclose(on_torch, white, atol=1e-9)
    return white @ white.T


@given(n=st.integers(2, 30), d=st.integers(1, 30), seed=st.integers(0, 3))
def test_ridge_precision_is_the_pseudo_inverse(n: int, d: int, seed: int) -> None:
    x = rows(n, d, seed)  # 2n < d is solved by Woodbury's identity
    cov = np.cov(x, rowvar=False).reshape(d, d)
    wanted = d * np.linalg.pinv((n - 1) * cov + np.trace(cov) * np.eye(d))
    np.testing.assert_allclose(ridge_precision(x), wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(by_moments(x), wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(times_precision(x[:2], x), x[:2] @ wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "d"), [(4, 9), (9, 4)])
def test_rows_that_do_not_differ_have_a_precision_of_zero(n: int, d: int, dtype: type) -> None:
    x = np.tile(rows(1, d, 0), (n, 1)).astype(dtype)
    assert not ridge_precision(x).any()
    assert not by_moments(x).any()


def test_one_row_has_covariance_one_by_convention() -> None:
    x = rows(1, 4, 0)
    np.testing.assert_array_equal(ridge_precision(x), np.eye(4))
    np.testing.assert_array_equal(by_moments(x), np.eye(4))


@given(d=st.integers(1, 20), seed=st.integers(0, 3))
def test_cholesky_inverse(d: int, seed: int) -> None:
    x = rows(d, d, seed)
    a = x.T @ x + np.eye(d)
    np.testing.assert_allclose(spd_inverse(a) @ a, np.eye(d), atol=1e-12)
    np.testing.assert_allclose(spd_inverse(torch.asarray(a)), spd_inverse(a), atol=1e-12)


@pytest.mark.parametrize("n", [12, 60])
@pytest.mark.parametrize("scale", [30.0, 100.0])
def test_equals_its_formula(n: int, scale: float) -> None:
    task = Task(*embeddings(n, 6, 24), scale)
    f, y = task.features, softmax(scale * task.features @ task.text.T)
    mu = y.T @ f / y.sum(axis=0)[:, None]
    cov = np.cov(f, rowvar=False)
    p = np.linalg.pinv(cov + np.trace(cov) / 24 * np.eye(24))
    gaussian = f @ p @ mu.T - np.log(6) - 0.5 * np.einsum("kd,de,ke->k", mu, p, mu)
    result = GDACLIP(alpha=2.0).fit_predict(task)
    np.testing.assert_allclose(result.probs, softmax(scale * f @ task.text.T + 2 * gaussian), atol=1e-9)


def test_nothing_is_learnt_from_one_sample_or_from_equal_ones() -> None:
    features, text = embeddings(1, 6, 24)
    for n in (1, 5):
        result = GDACLIP().fit_predict(np.tile(features, (n, 1)), text)
        np.testing.assert_allclose(result.probs, result.zero_shot, atol=1e-12)


def test_weight_zero_is_zero_shot() -> None:
    result = GDACLIP(alpha=0.0).fit_predict(*embeddings(30, 6, 24))
    np.testing.assert_array_equal(result.probs, result.zero_shot)
