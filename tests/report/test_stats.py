from itertools import product

import numpy as np
import pytest

from moontide.metrics import bootstrap_interval, resamples
from moontide.report.stats import half_width, sign_flip_p


def test_the_interval_is_the_percentile_bootstrap():
    values = np.random.default_rng(3).normal(70, 8, size=200)
    low, high = bootstrap_interval(values)
    assert half_width(values) == pytest.approx((high - low) / 2, rel=0.05)
    assert half_width(values) == pytest.approx(1.96 * values.std() / np.sqrt(200), rel=0.08)


def test_the_interval_of_a_mean_over_datasets_shrinks_with_their_number():
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=n) for n in (50, 60, 70, 80)]
    exact = np.sqrt(sum(part.var() / len(part) for part in parts)) / 4
    assert half_width(*parts) == pytest.approx(1.96 * exact, rel=0.1)


def test_resamples_are_draws_with_replacement():
    counts = resamples(5, 2000) * 5
    assert np.array_equal(counts, counts.round())
    assert set(counts.sum(axis=1)) == {5.0}
    assert counts.mean() == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_that_of_all_sign_patterns(seed):
    d = np.random.default_rng(seed).normal(0.3, 1, size=10)
    means = [abs(np.mean(np.asarray(signs) * d)) for signs in product((-1, 1), repeat=10)]
    exact = np.mean(np.asarray(means) >= abs(d.mean()) - 1e-12)
    assert sign_flip_p(d) == pytest.approx(exact, abs=0.02)


def test_the_p_value_over_datasets_weighs_each_alike():
    few, many = np.full(4, 1.0), np.tile([0.5, 0.0], 50)
    both = sign_flip_p(few, many)
    rng = np.random.default_rng(1)
    flipped = [(few * rng.choice([-1, 1], 4)).mean() + (many * rng.choice([-1, 1], 100)).mean() for _ in range(20000)]
    exact = np.mean(np.abs(flipped) >= few.mean() + many.mean())
    assert both == pytest.approx(exact, abs=0.01)
    assert sign_flip_p(few, np.zeros(1000)) == pytest.approx(2 / 16, abs=0.01)


def test_equal_methods_do_not_differ():
    assert sign_flip_p(np.zeros(30)) == 1
