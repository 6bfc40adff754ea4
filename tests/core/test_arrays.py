"""Arrays of numpy and torch, and the sentences about those that cannot be used."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from moontide.core.arrays import (
    affine,
    as_matrix,
    class_counts,
    class_sums,
    clip,
    column_dots,
    columns,
    device_type,
    like,
    put,
    row_dots,
    row_norms,
    row_sums,
    to_numpy,
    unit_rows,
)
from moontide.core.simplex import entropy, log_softmax, one_hot, softmax, zero_shot
from moontide.errors import InputError

finite = st.floats(-1e3, 1e3)
matrices = hnp.arrays(np.float64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=finite)


@pytest.mark.parametrize(
    ("got", "kept"),
    [
        ("float16", "float32"),
        ("float32", "float32"),
        ("float64", "float64"),
        ("int64", "float32"),
        ("uint8", "float32"),
    ],
)
def test_numbers_are_computed_in_single_or_double_precision(got: str, kept: str) -> None:
    assert as_matrix(np.ones((2, 3), dtype=got), "x").dtype == kept
    assert as_matrix(torch.ones((2, 3), dtype=getattr(torch, got)), "x").dtype == getattr(torch, kept)


def test_bfloat16_and_gradients_are_accepted() -> None:
    assert as_matrix(torch.ones((2, 3), dtype=torch.bfloat16), "x").dtype == torch.float32
    assert not as_matrix(torch.ones((2, 3), requires_grad=True), "x").requires_grad
    assert as_matrix([[1.0, 2.0]], "x").shape == (1, 2)


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (np.ones(3), r"'x' must be a 2-D array. Got 1-D with shape \(3,\) instead."),
        (np.ones((1, 2, 3)), r"'x' must be a 2-D array. Got 3-D with shape \(1, 2, 3\) instead."),
        (np.ones((0, 3)), r"'x' must not be empty. Got shape \(0, 3\)."),
        (np.ones((3, 0)), r"'x' must not be empty. Got shape \(3, 0\)."),
        (np.asarray([["a", "b"]]), "'x' must hold real numbers. Got dtype <U1 instead"),
        (np.ones((2, 2), dtype=complex), "'x' must hold real numbers. Got dtype complex128 instead"),
        (np.ones((2, 2), dtype=bool), "'x' must hold real numbers. Got dtype bool instead"),
        (np.asarray([[1.0], [None]], dtype=object), "'x' must hold real numbers. Got dtype object instead"),
        ([[1.0, 2.0], [3.0]], "'x' must be a rectangular array of numbers"),
        (np.diag([1.0, np.nan, np.inf, 1.0]), r"'x' must be finite.*\b[Rr]ows 1, 2\b"),
        (np.full((1, 2), -np.inf), r"'x' must be finite.*\b[Rr]ow 0\b"),
        (np.full((20, 2), np.nan), "[Rr]ows 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
        (torch.full((1, 2), torch.nan), r"'x' must be finite.*\b[Rr]ow 0\b"),
    ],
)
def test_what_no_method_can_use_is_refused_in_words(x: object, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        as_matrix(x, "x")


def test_the_number_of_axes_can_be_another() -> None:
    assert as_matrix(np.ones((1, 2, 3)), "views", ndim=3).shape == (1, 2, 3)
    with pytest.raises(InputError, match=r"'views' must be finite.*\b[Rr]ow 1\b"):
        as_matrix(np.where(np.arange(2)[:, None, None] == 1, np.nan, np.ones((2, 2, 3))), "views", ndim=3)


@given(matrices, st.sampled_from(["float32", "float64"]), st.integers(-30, 30))
def test_unit_rows_have_length_one_whatever_they_had(x: np.ndarray, dtype: str, power: int) -> None:
    x = (x * 10.0**power).astype(dtype)
    zero = ~x.any(axis=1)
    for unit in (unit_rows(x), to_numpy(unit_rows(torch.asarray(x)))):
        assert unit.dtype == dtype
        np.testing.assert_allclose(np.linalg.norm(unit, axis=1), ~zero, rtol=1e-6)
        largest = np.argmax(np.abs(x), axis=1)[:, None]
        assert (np.take_along_axis(unit * np.sign(x), largest, axis=1)[:, 0] >= 0).all()


def test_zero_rows_are_named() -> None:
    with pytest.raises(InputError, match=r"'x' must not have all-zero rows, .* [Rr]ows 0, 2\b.*; remove them."):
        unit_rows(np.asarray([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), "x")
    with pytest.raises(InputError, match=r"'views' .* [Rr]ow 1\b"):
        unit_rows(np.asarray([[[1.0], [1.0]], [[1.0], [0.0]]]), "views")
    assert (unit_rows(np.zeros((1, 2))) == 0).all()


def test_like_follows_namespace_and_dtype() -> None:
    ref = torch.zeros(1, dtype=torch.float32)
    assert torch.equal(like(np.ones(2), ref), torch.ones(2))
    assert like(torch.ones(2), np.zeros(1)).dtype == np.float64
    assert isinstance(to_numpy(ref), np.ndarray)


@given(st.lists(st.integers(0, 4), min_size=1), st.integers(0, 1000))
def test_class_counts_are_sums(labels: list[int], seed: int) -> None:
    weights = np.random.default_rng(seed).random(len(labels))
    hot = np.eye(5)[labels]
    for convert in (np.asarray, torch.asarray):
        np.testing.assert_array_equal(to_numpy(class_counts(convert(labels), 5)), hot.sum(0))
        counts = to_numpy(class_counts(convert(labels), 5, convert(weights)))
        np.testing.assert_allclose(counts, weights @ hot, rtol=1e-12)
        np.testing.assert_array_equal(to_numpy(one_hot(convert(labels), 5, convert(weights))), hot)


@given(matrices)
def test_softmax_is_what_it_is(x: np.ndarray) -> None:
    p = softmax(x)
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(np.exp(log_softmax(x)), p, atol=1e-15)
    np.testing.assert_allclose(softmax(x + 1e3), p, rtol=1e-9)
    np.testing.assert_allclose(to_numpy(softmax(torch.asarray(x))), p, atol=1e-15)
    h = entropy(p)
    assert ((h >= -1e-9) & (h <= np.log(x.shape[1]) + 1e-9)).all()


def test_zero_shot_is_the_softmax_of_scaled_cosines() -> None:
    rng = np.random.default_rng(0)
    f, t = unit_rows(rng.normal(size=(5, 4))), unit_rows(rng.normal(size=(3, 4)))
    e = np.exp(7.0 * f @ t.T)
    np.testing.assert_allclose(zero_shot(f, t, 7.0), e / e.sum(axis=1, keepdims=True), rtol=1e-12)


@pytest.mark.parametrize("convert", [np.asarray, torch.asarray])
@given(matrices)
def test_helpers_are_what_numpy_writes_out(convert: Any, x: np.ndarray) -> None:
    y, (n, k) = np.cos(x), x.shape
    labels, some = np.arange(n) % 3, np.asarray([k - 1])
    expected = [
        (clip(convert(x), -1.5, 2), np.clip(x, -1.5, 2)),
        (clip(convert(x), high=0), np.minimum(x, 0)),
        (row_dots(convert(x), convert(y)), (x * y).sum(1)),
        (column_dots(convert(x), convert(y)), (x * y).sum(0)),
        (row_norms(convert(x)), np.sqrt((x * x).sum(1))),
        (row_sums(convert(x)), x.sum(1)),
        (class_sums(convert(labels), convert(x), 3), np.eye(3)[labels].T @ x),
        (columns(convert(x), convert(some)), x[:, some]),
        (put(convert(x[0]), convert(some), convert(np.ones(1))), np.where(np.arange(k) == k - 1, 1, x[0])),
        (affine(convert(x), convert(y), convert(y[:, 0].copy())), x @ y.T + y[:, 0]),
    ]
    for found, wanted in expected:
        np.testing.assert_allclose(to_numpy(found), wanted, atol=1e-8)
    assert columns(x, slice(None)) is x
    assert device_type(convert(x)) == "cpu"
