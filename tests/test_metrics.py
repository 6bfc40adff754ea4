"""Metrics against what their definitions give by hand or by slower code."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.errors import InputError
from moontide.metrics import (
    accuracy,
    bootstrap_interval,
    check_labels,
    expected_calibration_error,
    reliability,
    tail_accuracy,
)

shares = st.lists(st.floats(0, 1), min_size=1, max_size=60)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_accuracy_counts_equal_entries(pairs):
    labels, predictions = zip(*pairs, strict=True)
    assert accuracy(labels, predictions) == pytest.approx(sum(a == b for a, b in pairs) / len(pairs))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=80))
def test_calibration_error_is_the_sum_over_bins(rows):
    labels, predictions, confidence = (np.asarray(column) for column in zip(*rows, strict=True))
    expected = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if b == 0:
            inside |= confidence == 0
        if inside.any():
            gap = np.mean(labels[inside] == predictions[inside]) - confidence[inside].mean()
            expected += inside.mean() * abs(gap)
    assert expected_calibration_error(labels, predictions, confidence) == pytest.approx(expected, abs=1e-9)


def test_calibration_error_of_a_calibrated_and_of_a_boasting_model():
    labels = np.asarray([0] * 7 + [1] * 3)
    assert expected_calibration_error(labels, np.zeros(10), np.full(10, 0.7)) == pytest.approx(0)
    assert expected_calibration_error(labels, np.zeros(10), np.ones(10)) == pytest.approx(0.3)


@given(shares)
def test_tail_is_the_mean_of_the_worst_tenth(values):
    count = max(1, -(-len(values) // 10))
    assert tail_accuracy(values) == pytest.approx(np.mean(sorted(values)[:count]))


@pytest.mark.parametrize("runs", [10, 30, 70, 100, 1000])
def test_tail_takes_exactly_a_tenth_of_round_numbers(runs):
    values = np.arange(runs) / runs
    assert tail_accuracy(values) == pytest.approx(values[: runs // 10].mean())


@given(shares)
def test_interval_lies_inside_the_values_and_repeats(values):
    low, high = bootstrap_interval(values, draws=50)
    assert min(values) - 1e-12 <= low <= high <= max(values) + 1e-12
    assert (low, high) == bootstrap_interval(values, draws=50)


def test_interval_has_the_width_of_the_normal_one():
    values = np.random.default_rng(0).normal(size=400)
    low, high = bootstrap_interval(values)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    assert low < values.mean() < high


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accuracy([0, 1], [0]), "same shape"),
        (lambda: accuracy([], []), "at least one"),
        (lambda: expected_calibration_error([0, 1], [0, 1], [0.5]), "same length"),
        (lambda: tail_accuracy([]), "must not be empty"),
        (lambda: tail_accuracy([0.5], share=0), "above 0"),
        (lambda: bootstrap_interval([]), "must not be empty"),
        (lambda: bootstrap_interval([1.0], level=1), "between 0 and 1"),
        (lambda: check_labels([0, 1], 3, 2), "each of the 3 samples"),
        (lambda: check_labels([0.0, 1.0], 2, 2), "must be integers"),
        (lambda: check_labels([0, -1, 2], 3, 2), "Got -1 in row 1 (and 1 more)"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_words(call, words):
    with pytest.raises(InputError, match=r".*") as caught:
        call()
    assert words in str(caught.value)


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=30), st.integers(1, 20))
def test_reliability_has_every_sample_once_in_a_bin_that_holds_its_confidence(samples, bins):
    right, confidence = (np.asarray(column) for column in zip(*samples, strict=True))
    table = reliability(np.ones(len(right)), right.astype(int), confidence, bins)
    sure, shares, counts = table.T
    assert counts.sum() == len(samples)
    assert shares @ counts == pytest.approx(right.sum())
    assert sure @ counts == pytest.approx(confidence.sum())
    full = np.flatnonzero(counts)
    assert np.all(sure[full] >= full / bins - 1e-9)
    assert np.all(sure[full] <= (full + 1) / bins + 1e-9)
