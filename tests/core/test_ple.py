"""The equations of the paper one by one, and its theorem: the anchored M-step is shrinkage in mean-parameter space."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from moontide.core import formulas, ple
from moontide.core.arrays import to_numpy, unit_rows
from moontide.core.graph import Affinity, Graph, nearest_neighbours, neighbour_votes
from moontide.core.mixture import First
from moontide.core.simplex import softmax
from moontide.core.vmf import bessel, log_normaliser

seeds = st.integers(0, 10_000)


def simplex_rows(n: int, k: int, seed: int, spread: float = 2.0) -> np.ndarray:
    return softmax(spread * np.random.default_rng([seed, n, k]).normal(size=(n, k)))


def sphere(n: int, d: int, seed: int) -> np.ndarray:
    return unit_rows(np.random.default_rng([seed, n, d]).normal(size=(n, d)))


def affinity(matrix: np.ndarray) -> Affinity:
    n = len(matrix)
    return Graph(np.tile(np.arange(n), (n, 1)), matrix).operator(symmetric=False)


# One by one


@given(seeds, st.integers(1, 8))
def test_sample_weights_are_one_minus_normalised_entropy(seed: int, k: int) -> None:
    p = simplex_rows(6, k, seed)
    entropy = -(p * np.log(p)).sum(axis=1)
    wanted = 1 - entropy / math.log(k) if k > 1 else np.ones(6)
    np.testing.assert_allclose(ple.sample_weights(p), wanted, atol=1e-9)
    np.testing.assert_allclose(ple.entropy_weights(entropy, k), wanted, atol=1e-9)
    np.testing.assert_allclose(to_numpy(ple.sample_weights(torch.asarray(p))), wanted, atol=1e-9)


@given(seeds)
def test_class_confidence_is_a_mean_of_mean_and_maximum(seed: int) -> None:
    y = simplex_rows(9, 4, seed)
    average, largest = y.mean(axis=0), y.max(axis=0)
    wanted = {
        "geometric": np.sqrt(average * largest),
        "arithmetic": (average + largest) / 2,
        "harmonic": 2 / (1 / average + 1 / largest),
        "average": average,
        "max": largest,
    }
    for mean, value in wanted.items():
        np.testing.assert_allclose(ple.class_confidence(average, largest, mean, normalise=False), value, rtol=1e-6)
        np.testing.assert_allclose(ple.class_confidence(average, largest, mean), value / value.max(), rtol=1e-6)
    assert (wanted["harmonic"] <= wanted["geometric"] + 1e-15).all()
    assert (wanted["geometric"] <= wanted["arithmetic"] + 1e-15).all()


def test_anchor_weights_have_three_forms() -> None:
    confidence = np.asarray([1.0, 0.25])
    np.testing.assert_allclose(ple.anchor_weights(confidence), [1, 4])
    np.testing.assert_allclose(ple.anchor_weights(confidence, "lambda"), [1, 0.25])
    np.testing.assert_allclose(ple.anchor_weights(confidence, "exp(-lambda)"), np.exp([-1, -0.25]))
    assert np.isfinite(ple.anchor_weights(np.zeros(1))).all()


@given(seeds)
def test_the_initial_resultant_is_one_minus_half_the_mean_squared_distance(seed: int) -> None:
    f, t, y = sphere(8, 5, seed), sphere(3, 5, seed + 1), simplex_rows(8, 3, seed)
    distance = ((f[:, None, :] - t[None, :, :]) ** 2).sum(axis=2)
    wanted = 1 - (y * distance).sum(axis=0) / (2 * y.sum(axis=0))
    moments = First.of(y, f @ t.T)
    np.testing.assert_allclose(ple.initial_resultant(moments.total, moments.along, 0.0), wanted, rtol=1e-9)
    assert (ple.initial_resultant(np.zeros(3), np.zeros(3), 0.0) == 1).all()  # a class without weight: no 0 / 0


@given(st.integers(2, 1280), st.floats(0, 0.999))
def test_concentration_inverts_the_bessel_ratio(d: int, r: float) -> None:
    kappa = ple.concentration(np.asarray([r]), d, "newton", 1.0)
    np.testing.assert_allclose(kappa * bessel(d, kappa).a_by_x, r, rtol=1e-9, atol=1e-12)
    banerjee = ple.concentration(np.asarray([r]), d, "banerjee", 1.0)
    np.testing.assert_allclose(banerjee, (r * d - r**3) / (1 - r**2), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("inverse", ["newton", "banerjee"])
def test_concentration_is_finite_at_both_ends(dtype: str, inverse: str) -> None:
    kappa = ple.concentration(np.asarray([-0.1, 0.0, 1.0, 1.1], dtype=dtype), 512, inverse, 1.0)
    assert np.isfinite(kappa).all()
    assert kappa.dtype == dtype
    np.testing.assert_array_equal(kappa[:2], 0)
    assert ple.concentration(np.ones(1, dtype), 512, inverse, 0.5) < 400


def test_log_c_has_two_forms() -> None:
    kappa = np.asarray([1.0, 500.0])
    np.testing.assert_array_equal(ple.log_c(512, kappa, "accurate"), log_normaliser(512, kappa))
    np.testing.assert_allclose(ple.log_c(512, kappa, "asymptotic"), 255.5 * np.log(kappa) - kappa)


@given(seeds)
def test_logits_are_prior_and_likelihood(seed: int) -> None:
    """Up to a constant of the row, both ways of computing them are text_weight log y + log p / temper."""
    rng = np.random.default_rng(seed)
    f, t, mu = sphere(6, 5, seed), sphere(3, 5, seed + 1), sphere(3, 5, seed + 2)
    kappa, scale, temper = rng.uniform(1, 100, 3), rng.uniform(1, 100), rng.uniform(0.5, 50)
    for centre in (mu, t):
        density = kappa * (f @ centre.T) + log_normaliser(5, kappa)  # log p
        wanted = scale * f @ t.T + density / temper
        found = f @ ple.prototypes(t, centre, kappa, scale, temper).T + ple.log_c(5, kappa, "accurate") / temper
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)
    at_anchor = ple.at_anchor(f @ t.T, scale + kappa / temper, ple.log_c(5, kappa, "accurate") / temper)
    np.testing.assert_allclose(at_anchor, wanted, rtol=1e-9, atol=1e-9)


@given(seeds)
def test_the_e_step_is_a_softmax_with_votes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, before, m = 3 * rng.normal(size=(5, 4)), simplex_rows(5, 4, seed), rng.normal(size=(5, 5))
    step = ple.e_step(logits.copy(), affinity(m)(before), before)
    z = softmax(logits + m @ before)
    np.testing.assert_allclose(step.z, z, rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(step.labels, z.argmax(axis=1))
    np.testing.assert_allclose(step.log_sum, np.log(np.exp(logits + m @ before).sum(axis=1)), rtol=1e-9)
    np.testing.assert_allclose(step.gamma, ple.sample_weights(z), atol=1e-9)
    np.testing.assert_allclose(step.agreement, (z * (m @ before)).sum(axis=1), atol=1e-9)
    np.testing.assert_allclose(step.before, (before * (m @ before)).sum(axis=1), atol=1e-9)


@given(seeds)
def test_the_e_step_minimises_its_surrogate(seed: int) -> None:
    """No other point of the simplex has a smaller KL(z || y) - z . (log p + votes)."""
    rng = np.random.default_rng(seed)
    logits, votes, others = 3 * rng.normal(size=(1, 4)), rng.normal(size=(1, 4)), simplex_rows(50, 4, seed)
    step = ple.e_step(logits.copy(), votes, votes)

    def surrogate(z: np.ndarray) -> np.ndarray:
        return (z * (np.log(z) - logits - votes)).sum(axis=1)

    assert (surrogate(others) >= surrogate(step.z) - 1e-12).all()
    np.testing.assert_allclose(surrogate(step.z), -step.log_sum, rtol=1e-9)


@given(seeds)
def test_shrinkage_is_the_share_of_the_samples(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts, alpha = rng.uniform(0, 9, 3), rng.uniform(0.5, 3, 3)
    np.testing.assert_allclose(formulas.shrinkage(counts, alpha), counts / (counts + alpha), rtol=1e-9)


@given(seeds)
def test_means_are_weighted_means(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, gamma, f = simplex_rows(7, 3, seed), rng.uniform(size=7), sphere(7, 4, seed)
    wanted = np.stack([np.average(f, axis=0, weights=gamma * z[:, k]) for k in range(3)])
    np.testing.assert_allclose(ple.means(*ple.weighted_sums(z, gamma, f), 0.0), wanted, rtol=1e-9, atol=1e-12)
    assert (ple.means(*ple.weighted_sums(0 * z, gamma, f), 0.0) == 0).all()  # no 0 / 0


def test_neighbour_votes_are_summed_or_averaged() -> None:
    graph = nearest_neighbours(sphere(6, 3, 0), 2)
    w = np.zeros((6, 6))
    np.put_along_axis(w, graph.neighbours, graph.weights, axis=1)
    z = simplex_rows(6, 2, 0)
    for symmetric, matrix, votes in ((True, w + w.T, 4), (False, w, 2)):
        np.testing.assert_allclose(neighbour_votes(graph, symmetric, False, 0.5)(z), 0.5 * matrix @ z)
        np.testing.assert_allclose(neighbour_votes(graph, symmetric, True, 0.5)(z), 0.5 * matrix @ z / votes)
    alone = Graph(np.zeros((1, 0), int), np.zeros((1, 0)))
    assert (neighbour_votes(alone, True, True, 1.0)(z[:1]) == 0).all()


# The theorem of app. "Generality of KL-Anchored PLE", against a general minimiser


def lowest(loss: Callable[[np.ndarray], float], start: np.ndarray) -> tuple[np.ndarray, float]:
    found = minimize(loss, start, method="BFGS", options={"gtol": 1e-8})
    return found.x, found.fun


@settings(max_examples=10)
@given(seeds, st.integers(2, 5), st.floats(0.1, 20), st.floats(0.5, 60))
def test_the_von_mises_fisher_m_step_is_the_minimiser(seed: int, d: int, alpha: float, anchor_kappa: float) -> None:
    """Over eta = kappa mu in R^d, -sum_i w_i log p(f_i | eta) + alpha KL(V' || V) is lowest at the shrunk resultant."""
    rng = np.random.default_rng(seed)
    f, anchor_mu, w = sphere(8, d, seed), sphere(1, d, seed + 1), rng.uniform(size=(8, 1))
    beta = formulas.shrinkage(w.sum(axis=0), alpha)
    v = ple.means(*ple.weighted_sums(w, np.ones(8), f), 0.0)
    anchor_r = anchor_kappa * bessel(d, np.asarray(anchor_kappa)).a_by_x
    resultant = ple.shrink(v, beta, anchor_mu * anchor_r)
    r = np.linalg.norm(resultant, axis=1)
    best = (ple.concentration(r, d, "newton", 1.0)[:, None] * resultant / r)[0]  # eta = kappa mu

    def loss(eta: np.ndarray) -> float:
        kappa = np.linalg.norm(eta)
        likelihood = f @ eta + log_normaliser(d, kappa)
        aligned = anchor_mu[0] @ eta / max(kappa, 1e-300)
        kl = ple.anchor_kl(aligned, anchor_kappa, anchor_r, kappa, d, "accurate")
        return float(-w[:, 0] @ likelihood + alpha * kl)

    found, value = lowest(loss, anchor_kappa * anchor_mu[0])
    assert loss(best) <= value + 1e-9 * max(1, abs(value))
    np.testing.assert_allclose(best, found, rtol=1e-2, atol=1e-3 * np.linalg.norm(best))
    for step in 1e-2 * np.linalg.norm(best) * sphere(20, d, seed + 2):
        assert loss(best + step) > loss(best)


@settings(max_examples=15)
@given(seeds, st.integers(1, 3), st.floats(0.1, 20))
def test_the_gaussian_m_step_is_the_minimiser(seed: int, d: int, alpha: float) -> None:
    """The same `shrink`, in the Gaussian's mean parameters E[x] and E[xx'], gives its anchored M-step."""
    rng = np.random.default_rng(seed)
    x, w = rng.normal(size=(8, d)) * rng.uniform(0.5, 2), rng.uniform(size=(8, 1))
    anchor_mean, root = rng.normal(size=d), rng.normal(size=(d, d)) + 2 * np.eye(d)
    anchor_cov = root @ root.T

    def statistic(mean: np.ndarray, cov: np.ndarray | float) -> np.ndarray:
        """Return E[x] and E[xx'] in one vector."""
        return np.concatenate([mean, (cov + np.outer(mean, mean)).ravel()])

    beta = formulas.shrinkage(w.sum(axis=0), alpha)
    statistics = np.stack([statistic(row, 0.0) for row in x])
    v = ple.means(*ple.weighted_sums(w, np.ones(8), statistics), 0.0)
    shrunk = ple.shrink(v, beta, statistic(anchor_mean, anchor_cov)[None, :])[0]
    mean = shrunk[:d]
    cov = shrunk[d:].reshape(d, d) - np.outer(mean, mean)
    lower = np.tril_indices(d)

    def loss(parameters: np.ndarray) -> float:
        m, factor = parameters[:d], np.zeros((d, d))  # covariance = factor factor'
        factor[lower] = parameters[d:]
        log_det = 2 * np.log(np.abs(np.diag(factor)) + 1e-300).sum()
        precision = np.linalg.pinv(factor @ factor.T)
        nll = sum(wi * (log_det + (row - m) @ precision @ (row - m)) / 2 for wi, row in zip(w[:, 0], x, strict=True))
        apart = anchor_mean - m
        divergence = (np.trace(precision @ anchor_cov) + apart @ precision @ apart + log_det) / 2  # KL and a constant
        return float(nll + alpha * divergence)

    best = np.concatenate([mean, np.linalg.cholesky(cov)[lower]])
    found, value = lowest(loss, np.concatenate([anchor_mean, np.linalg.cholesky(anchor_cov)[lower]]))
    assert loss(best) <= value + 1e-9 * max(1, abs(value))
    np.testing.assert_allclose(mean, found[:d], atol=1e-3)
    # and it is the update that the paper gives for StatA
    empirical = np.average(x, axis=0, weights=w[:, 0])
    np.testing.assert_allclose(mean, beta * empirical + (1 - beta) * anchor_mean, atol=1e-9)
    scatter = np.average((x - mean) ** 2, axis=0, weights=w[:, 0])
    anchored = np.diag(anchor_cov) + (anchor_mean - mean) ** 2
    np.testing.assert_allclose(np.diag(cov), beta * scatter + (1 - beta) * anchored, rtol=1e-9)


@given(seeds, st.sampled_from(["float32", "float64"]))
def test_a_class_without_samples_stays_exactly_at_its_anchor(seed: int, dtype: str) -> None:
    f, t = sphere(6, 5, seed).astype(dtype), sphere(2, 5, seed + 1).astype(dtype)
    z = np.asarray([[1, 0]] * 6, dtype=dtype)
    beta = formulas.shrinkage(z.sum(axis=0), np.ones(2, dtype))
    resultant = ple.shrink(ple.means(*ple.weighted_sums(z, np.ones(6, dtype), f), 0.0), beta, t)
    np.testing.assert_array_equal(beta[1], 0)
    np.testing.assert_array_equal(resultant[1], t[1])
    assert (resultant[0] != t[0]).any()


@given(seeds, st.floats(0, 1))
def test_the_deviation_from_the_anchor_is_beta_times_that_of_the_batch(seed: int, beta: float) -> None:
    v, anchor = sphere(3, 5, seed), sphere(3, 5, seed + 1)
    moved = np.linalg.norm(ple.shrink(v, np.full(3, beta), anchor) - anchor, axis=1)
    np.testing.assert_allclose(moved, beta * np.linalg.norm(v - anchor, axis=1), atol=1e-12)
