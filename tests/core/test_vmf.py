"""The von Mises-Fisher distribution against mpmath, quadrature and its own draws."""

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from moontide.core.ple import anchor_kl, log_c
from moontide.core.vmf import bessel, log_normaliser
from moontide.errors import InputError, OptionError
from moontide.samplers.vmf import sample

DIMS = [2, 3, 4, 5, 8, 16, 64, 100, 512, 768, 1024, 1280, 2048]
KAPPAS = [0.0, 1e-8, 1e-6, 1e-3, 0.1, 1.0, 10.0, 50.0, 100.0, 500.0, 1e3, 1e4, 1e5, 1e6, 1e8]

dims = st.integers(2, 2048)
kappas = st.floats(-9, 8).map(lambda e: 10.0**e)


def exact_log_normaliser(d: int, kappa: float) -> mp.mpf:
    with mp.workdps(60):
        x, half = mp.mpf(kappa), mp.mpf(d) / 2
        if kappa == 0:
            return mp.loggamma(half) - mp.log(2) - half * mp.log(mp.pi)  # minus log of the area 2 pi^(d/2) / Gamma(d/2)
        return (half - 1) * mp.log(x) - half * mp.log(2 * mp.pi) - mp.log(mp.besseli(half - 1, x))


def exact_kl(d: int, kappa_p: float, kappa_q: float, cosine: float) -> float:
    """Return the closed form of the paper's appendix to 40 digits."""
    with mp.workdps(60):
        half = mp.mpf(d) / 2
        a = mp.besseli(half, kappa_p) / mp.besseli(half - 1, kappa_p)
        log_ratio = exact_log_normaliser(d, kappa_p) - exact_log_normaliser(d, kappa_q)
        return float(log_ratio + kappa_p * a - kappa_q * a * mp.mpf(cosine))


def kl(d: int, cosine: Any, kappa_p: Any, kappa_q: Any) -> Any:
    """Return KL(V_p || V_q) as the code has it, of directions with a cosine."""
    return anchor_kl(cosine, kappa_p, kappa_p * bessel(d, np.asarray(kappa_p)).a_by_x, kappa_q, d, "accurate")


def unit(d: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal(d)
    return x / np.linalg.norm(x)


@pytest.mark.parametrize("d", DIMS)
def test_log_normaliser_on_the_grid(d: int) -> None:
    found = log_normaliser(d, np.asarray(KAPPAS))
    truth = [exact_log_normaliser(d, kappa) for kappa in KAPPAS]
    error = [abs(float((f - t) / max(1, abs(t)))) for f, t in zip(found, truth, strict=True)]
    assert max(error) < 4e-14


@settings(max_examples=150, deadline=None, derandomize=True)
@given(dims, kappas)
def test_log_normaliser_anywhere(d: int, kappa: float) -> None:
    truth = exact_log_normaliser(d, kappa)
    assert abs(log_normaliser(d, kappa) - truth) < 4e-14 * max(1, abs(truth))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dims, st.floats(-1, 4).map(lambda e: 10.0**e))
def test_slope_of_log_normaliser_is_minus_the_bessel_ratio(d: int, kappa: float) -> None:
    step = 1e-3 * kappa
    ends = log_normaliser(d, np.asarray([kappa - step, kappa + step]))
    wanted = -kappa * bessel(d, np.asarray(kappa)).a_by_x
    assert (ends[1] - ends[0]) / (2 * step) == pytest.approx(wanted, rel=2e-6, abs=1e-13 * d / step)


def test_asymptotic_normaliser_is_the_papers_and_floors_kappa() -> None:
    kappa = np.asarray([0.0, 1e-6, 2.0, 500.0])
    np.testing.assert_allclose(log_c(512, kappa[1:], "asymptotic"), 511 / 2 * np.log(kappa[1:]) - kappa[1:])
    found = log_c(512, kappa, "asymptotic")
    assert found[0] == found[1]
    for x in (np.float32(3), torch.tensor([0.0, 3.0])):
        assert log_c(512, x, "asymptotic").dtype == x.dtype
    # where kappa >> d^2, differences of the paper's form are those of log C_d
    pair = np.asarray([1e6, 2e6])
    assert np.diff(log_c(16, pair, "asymptotic")) == pytest.approx(np.diff(log_normaliser(16, pair)), abs=1e-4)


@pytest.mark.parametrize(("kappa_p", "kappa_q"), [(0.0, 3.0), (3.0, 0.0), (2.0, 5.0), (5.0, 5.0)])
def test_kl_is_the_integral_on_the_circle_and_the_sphere(kappa_p: float, kappa_q: float) -> None:
    c = 0.3
    # d = 2: the angle t from mu_p; x = (cos t, sin t), mu_q = (c, sqrt(1 - c^2))
    log_p2, log_q2 = (log_normaliser(2, kappa) for kappa in (kappa_p, kappa_q))

    def on_circle(t: float) -> float:
        log_p = log_p2 + kappa_p * math.cos(t)
        return math.exp(log_p) * (log_p - log_q2 - kappa_q * (c * math.cos(t) + math.sqrt(1 - c * c) * math.sin(t)))

    truth = integrate.quad(on_circle, -math.pi, math.pi, epsabs=1e-12)[0]
    assert kl(2, c, kappa_p, kappa_q) == pytest.approx(truth, abs=1e-10)
    # d = 3: given w = mu_p . x, the mean of mu_q . x is c w, and w has the density 2 pi C exp(kappa w)
    log_p3, log_q3 = (log_normaliser(3, kappa) for kappa in (kappa_p, kappa_q))

    def on_sphere(w: float) -> float:
        log_p = log_p3 + kappa_p * w
        return 2 * math.pi * math.exp(log_p) * (log_p - log_q3 - kappa_q * c * w)

    truth = integrate.quad(on_sphere, -1, 1, epsabs=1e-12)[0]
    assert kl(3, c, kappa_p, kappa_q) == pytest.approx(truth, abs=1e-10)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(dims, kappas, kappas)
def test_kl_is_the_papers_closed_form(d: int, kappa_p: float, kappa_q: float) -> None:
    # the terms are as large as this, and may cancel
    large = sum(kappa + abs(log_normaliser(d, kappa)) for kappa in (kappa_p, kappa_q))
    for cosine in (1, 0, -1):
        truth = exact_kl(d, kappa_p, kappa_q, cosine)
        assert kl(d, cosine, kappa_p, kappa_q) == pytest.approx(truth, rel=1e-13, abs=1e-13 * large)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(2, 600), kappas)
def test_kl_is_zero_for_equal(d: int, kappa: float) -> None:
    assert kl(d, 1.0, kappa, kappa) == 0


@pytest.mark.parametrize("d", [2, 3, 64, 512])
def test_kl_falls_towards_kappa_p_and_rises_after_it(d: int) -> None:
    for kappa in (1.0, 100.0, 1e4):
        found = kl(d, 1.0, kappa, kappa * np.asarray([0.5, 0.8, 0.99, 1.0, 1.01, 1.2, 2.0]))
        assert list(np.sign(np.diff(found))) == [-1, -1, -1, 1, 1, 1]


def test_kl_is_of_each_class_and_equal_in_numpy_and_torch() -> None:
    d, rng = 16, np.random.default_rng(1)
    cosine, kappa = rng.uniform(-1, 1, 12), rng.uniform(0, 300, (2, 12))
    r = kappa[0] * bessel(d, kappa[0]).a_by_x
    found = kl(d, cosine, *kappa)
    np.testing.assert_allclose(found[7], kl(d, cosine[7], *kappa[:, 7]), rtol=1e-12)
    for dtype, rtol in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        given = (torch.from_numpy(x).to(dtype) for x in (cosine, kappa[0], r, kappa[1]))
        with_torch = anchor_kl(*given, d, "accurate")
        assert with_torch.dtype == dtype
        np.testing.assert_allclose(with_torch.numpy(), found, rtol=rtol, atol=1e-4 if rtol > 1e-6 else 1e-10)


def test_log_normaliser_in_torch_and_float32() -> None:
    kappa = np.asarray(KAPPAS)
    found = log_normaliser(512, kappa)
    np.testing.assert_allclose(log_normaliser(512, torch.from_numpy(kappa)).numpy(), found, rtol=1e-13)
    narrow = log_normaliser(512, kappa.astype(np.float32))
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, found, rtol=1e-6)


@pytest.mark.parametrize("kappa", [0.0, 0.5, 20.0, 1e3, 1e8])
@pytest.mark.parametrize("d", [2, 3, 16, 512])
def test_draws_have_the_mean_length_and_direction_of_the_distribution(d: int, kappa: float) -> None:
    n, mu = 4000, unit(d, 3)
    x = sample(mu, kappa, n, np.random.default_rng(d))
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-14)
    _, a_by_x, one_minus_a = bessel(d, np.asarray(kappa))
    # 1 - mu . x has the mean 1 - A_d; its variance A_d' is taken from the draws
    v = np.sum((x - mu) ** 2, axis=1) / 2
    assert abs(v.mean() - one_minus_a) < 4 * v.std() / math.sqrt(n)
    # across mu every coordinate has the mean 0 and the variance A_d / kappa: a chi-square of d - 1 degrees
    across = (x - mu).mean(axis=0)
    across -= (across @ mu) * mu
    z = (n * (across @ across) / a_by_x - (d - 1)) / math.sqrt(2 * (d - 1))
    assert abs(z) < 4


@pytest.mark.parametrize("kappa", [0.0, 0.5, 20.0, 1e6])
def test_draws_follow_the_known_laws_on_circle_and_sphere(kappa: float) -> None:
    n = 4000
    x = sample([1.0, 0.0], kappa, n, np.random.default_rng(0))
    law = stats.vonmises(kappa) if kappa else stats.uniform(-math.pi, 2 * math.pi)
    assert stats.kstest(np.arctan2(x[:, 1], x[:, 0]), law.cdf).pvalue > 1e-3
    # on the sphere P(v <= t) = (1 - exp(-kappa t)) / (1 - exp(-2 kappa)), v = 1 - mu . x
    mu = np.asarray([0.0, -1.0, 0.0])
    v = np.sum((sample(mu, kappa, n, np.random.default_rng(1)) - mu) ** 2, axis=1) / 2
    p = np.expm1(-kappa * v) / np.expm1(-2 * kappa) if kappa else v / 2
    assert stats.kstest(p, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("first", [1.0, -1.0, 0.0])
def test_draws_surround_any_direction(first: float) -> None:
    mu = np.asarray([first, 0.0, 1.0 - abs(first)])
    np.testing.assert_allclose(sample(mu, 1e8, 20, np.random.default_rng(0)), np.tile(mu, (20, 1)), atol=1e-3)


def test_draws_repeat_with_the_seed_and_keep_the_dtype() -> None:
    mu = np.asarray([0.6, 0.8], dtype=np.float32)
    first, second = (sample(mu, 5.0, 9, np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert first.dtype == np.float32
    assert sample(mu, 5.0, 0, np.random.default_rng(7)).shape == (0, 2)
    assert mu.tolist() == np.asarray([0.6, 0.8], dtype=np.float32).tolist()


@pytest.mark.parametrize(
    ("mu", "kappa", "n", "error", "words"),
    [
        ([1.0, 0.0], -1.0, 3, OptionError, "'kappa' must be a finite number of at least 0. Got -1.0"),
        ([1.0, 0.0], math.nan, 3, OptionError, "'kappa' must be a finite number"),
        ([1.0, 0.0], math.inf, 3, OptionError, "'kappa' must be a finite number"),
        ([1.0, 0.0], 1.0, -3, OptionError, "'n' must be a number of draws of at least 0. Got -3"),
        ([1.0], 1.0, 3, InputError, "'mu' must have at least 2 entries"),
        ([0.0, 0.0], 1.0, 3, InputError, "'mu' must not have all-zero rows"),
        ([math.nan, 0.0], 1.0, 3, InputError, "'mu' must be finite"),
    ],
)
def test_bad_input_to_sample_is_named(mu, kappa: float, n: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        sample(mu, kappa, n, np.random.default_rng(0))
