"""The Bessel functions against mpmath, and their inverse against themselves."""

import mpmath as mp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide.core import formulas
from moontide.core.vmf import _coefficients, bessel, inverse_bessel_ratio, log_normaliser

DIMS = [2, 3, 4, 5, 8, 16, 49, 50, 64, 100, 512, 768, 1024, 1280, 2048]
KAPPAS = [0.0, 1e-8, 1e-6, 1e-3, 0.1, 1.0, 3.0, 10.0, 20.0, 50.0, 100.0, 500.0, 1e3, 1e4, 1e5, 1e6, 1e8]

dims = st.integers(2, 2048)
kappas = st.floats(-9, 8).map(lambda e: 10.0**e)


def exact(d: int, kappa: float) -> tuple[mp.mpf, mp.mpf, mp.mpf]:
    """Return log(I_nu(x) exp(-x) x^-nu), A_d(x)/x and 1 - A_d(x) to 40 digits."""
    with mp.workdps(60):
        x, nu = mp.mpf(kappa), mp.mpf(d) / 2 - 1
        if kappa == 0:
            return -nu * mp.log(2) - mp.loggamma(nu + 1), mp.mpf(1) / d, mp.mpf(1)
        i, i_next = mp.besseli(nu, x), mp.besseli(nu + 1, x)
        return mp.log(i) - x - nu * mp.log(x), i_next / i / x, 1 - i_next / i


def ratio(d: int, kappa: float | np.ndarray) -> np.ndarray:
    """Return A_d(kappa), from the form that keeps its digits: near 1 that is 1 - A_d."""
    _, a_by_x, one_minus_a = bessel(d, np.asarray(kappa))
    return np.where(kappa * a_by_x < 0.5, kappa * a_by_x, 1 - one_minus_a)


def errors(d: int, kappas: list[float]) -> np.ndarray:
    """Return the relative errors (absolute below 1 for the logarithm) of the three parts of `bessel`, (K, 3)."""
    found = np.stack(bessel(d, np.asarray(kappas)), axis=1)
    truth = [exact(d, kappa) for kappa in kappas]
    return np.asarray(
        [
            [abs(float((f[0] - t[0]) / max(1, abs(t[0])))), abs(float(f[1] / t[1] - 1)), abs(float(f[2] / t[2] - 1))]
            for f, t in zip(found, truth, strict=True)
        ]
    )


@pytest.mark.parametrize("d", DIMS)
def test_bessel_on_the_grid(d: int) -> None:
    np.testing.assert_array_less(errors(d, KAPPAS).max(axis=0), [4e-14, 2e-15, 3e-13])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(dims, kappas)
def test_bessel_anywhere(d: int, kappa: float) -> None:
    np.testing.assert_array_less(errors(d, [kappa])[0], [4e-14, 2e-15, 3e-13])


def test_coefficients_are_those_of_dlmf() -> None:
    # log(1 + U_1/N + U_2/N^2 + ...) with U_1 = (3t - 5t^3)/24, U_2 = (81t^2 - 462t^4 + 385t^6)/1152, u = t/N, p = t^2
    _, g = _coefficients()
    np.testing.assert_allclose(g[:2, 1], [3 / 24, -5 / 24])
    u1, u2 = np.asarray([3, -5, 0]) / 24, np.asarray([81, -462, 385]) / 1152
    np.testing.assert_allclose(g[:3, 2], u2 - np.convolve(u1[:2], u1[:2]) / 2)


@pytest.mark.parametrize("d", DIMS)
def test_ratio_is_right_and_increases_from_0_towards_1(d: int) -> None:
    r = ratio(d, np.asarray(KAPPAS))
    truth = np.asarray([float(kappa * exact(d, kappa)[1]) for kappa in KAPPAS])
    np.testing.assert_allclose(r, truth, rtol=2e-15)
    assert r[0] == 0
    assert np.all(np.diff(r) > 0)
    assert r[-1] < 1


def test_ratio_in_three_dimensions_is_the_langevin_function() -> None:
    kappa = np.asarray([0.5, 2.0, 40.0])
    np.testing.assert_allclose(ratio(3, kappa), 1 / np.tanh(kappa) - 1 / kappa, rtol=1e-14)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(dims, kappas)
def test_inverse_returns_kappa_as_well_as_float64_carries_it(d: int, kappa: float) -> None:
    r = ratio(d, kappa)
    back = inverse_bessel_ratio(d, r)
    assert abs(ratio(d, back) - r) <= 1e-14 * r
    # half a unit in the last place of r, 2^-54 near 1, over kappa A_d'(kappa) ~ (d - 1) / (2 kappa)
    assert abs(back - kappa) <= (1e-12 + 1.12e-16 * kappa / (d - 1)) * kappa


@settings(max_examples=200, deadline=None, derandomize=True)
@given(dims, st.floats(-10, 0).map(lambda e: 10.0**e), st.booleans())
def test_inverse_returns_r_over_the_whole_open_interval(d: int, small: float, near_one: bool) -> None:
    r = np.asarray(1 - small * (1 - 2.0**-53) if near_one else small / 2)
    _, a_by_x, one_minus_a = bessel(d, inverse_bessel_ratio(d, r))
    if near_one:  # the stricter form: 1 - A_d has the digits that A_d has not
        assert one_minus_a == pytest.approx(float(1 - r), rel=1e-12)
    else:
        assert a_by_x * inverse_bessel_ratio(d, r) == pytest.approx(float(r), rel=1e-13)


@pytest.mark.parametrize("d", [2, 3, 512])
def test_inverse_at_both_ends(d: int) -> None:
    assert inverse_bessel_ratio(d, 0.0) == 0
    last = inverse_bessel_ratio(d, 1 - 2.0**-53)  # kappa -> (d - 1) / (2 (1 - r))
    assert last == pytest.approx((d - 1) * 2.0**52, rel=1e-12)


def test_banerjee_is_the_plain_formula_and_near_the_inverse_in_high_dimension() -> None:
    r = np.asarray([0.0, 0.1, 0.5, 0.9, 0.999])
    kappa = formulas.banerjee(512, r)
    np.testing.assert_allclose(kappa, (r * 512 - r**3) / (1 - r**2), rtol=1e-12)
    np.testing.assert_allclose(kappa, inverse_bessel_ratio(512, r), rtol=4e-4)


@pytest.mark.parametrize("d", [2, 5, 512])
@pytest.mark.parametrize(("function", "top"), [(log_normaliser, 300.0), (inverse_bessel_ratio, 0.99)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_equals_torch_and_dtype_and_shape_are_kept(function, top: float, d: int, dtype: str) -> None:
    x = np.linspace(0, top, 12, dtype=dtype).reshape(3, 4)
    with_numpy, with_torch = function(d, x), function(d, torch.from_numpy(x))
    assert with_numpy.dtype == x.dtype
    assert with_torch.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(with_torch.numpy(), with_numpy, rtol=1e-12 if dtype == "float64" else 1e-6)
    wide = function(d, x.astype(np.float64))  # float32 differs by its last rounding only
    np.testing.assert_array_equal(with_numpy, wide.astype(dtype))


def test_numbers_and_integers_give_float64() -> None:
    assert log_normaliser(8, 2.0).dtype == np.float64
    assert log_normaliser(8, np.asarray([2])).dtype == np.float64
    assert log_normaliser(8, np.asarray([2]))[0] == log_normaliser(8, 2.0)
    assert log_normaliser(8, np.empty(0)).shape == (0,)
