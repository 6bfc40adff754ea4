"""The simulator: what was asked for comes out exactly, and the geometry is that of CLIP ViT-B/32 on ImageNet-1k.

The expected statistics are those that `benchmarks/simulator_calibration.py` prints for the real features.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide import MOON
from moontide.errors import OptionError
from moontide.simulate import BLOCK, Simulated, simulate


def accuracy(data: Simulated) -> float:
    return float(np.mean(np.argmax(data.features @ data.text.T, axis=1) == data.labels))


@pytest.fixture(scope="module")
def data() -> Simulated:
    return simulate(4000, 1000, seed=0)


def test_types_and_unit_rows(data: Simulated) -> None:
    assert data.features.shape == (4000, 512)
    assert data.text.shape == (1000, 512)
    assert data.features.dtype == data.text.dtype == np.float32
    assert data.labels.dtype == np.int64
    assert data.logit_scale == 100.0
    assert len(set(data.class_names)) == 1000
    for rows in (data.features, data.text):
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.labels = data.labels  # type: ignore[misc]


def test_zero_shot_is_as_good_and_as_sure_as_on_imagenet(data: Simulated) -> None:
    logits = data.logit_scale * data.features @ data.text.T
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    assert 0.55 <= accuracy(data) <= 0.65  # 0.611
    assert np.mean(1 / probs.sum(axis=1)) == pytest.approx(0.59, abs=0.05)  # mean largest probability


def test_image_text_cosines(data: Simulated) -> None:
    cosines = data.features @ data.text.T
    true = data.labels[:, None] == np.arange(1000)
    assert cosines[true].mean() == pytest.approx(0.303, abs=0.01)
    assert cosines[true].std() == pytest.approx(0.034, abs=0.006)
    assert cosines[~true].mean() == pytest.approx(0.187, abs=0.01)
    assert np.where(true, -1, cosines).max(axis=1).mean() == pytest.approx(0.296, abs=0.01)


def test_image_image_cosines(data: Simulated) -> None:
    cosines = data.features @ data.features.T
    same = data.labels[:, None] == data.labels
    assert cosines[~same].mean() == pytest.approx(0.52, abs=0.02)
    np.fill_diagonal(same, False)
    assert cosines[same].mean() == pytest.approx(0.735, abs=0.02)
    assert cosines[same].std() == pytest.approx(0.105, abs=0.02)


def test_text_text_cosines(data: Simulated) -> None:
    cosines = data.text @ data.text.T
    apart = cosines[~np.eye(1000, dtype=bool)].reshape(1000, 999)
    assert apart.mean() == pytest.approx(0.612, abs=0.02)
    assert apart.std() == pytest.approx(0.116, abs=0.02)
    assert apart.max(axis=1).mean() == pytest.approx(0.835, abs=0.02)


def test_two_cones_with_a_gap(data: Simulated) -> None:
    image, text = data.features.mean(axis=0), data.text.mean(axis=0)
    assert np.linalg.norm(image) == pytest.approx(0.722, abs=0.02)
    assert np.linalg.norm(text) == pytest.approx(0.782, abs=0.02)
    assert image @ text / np.linalg.norm(image) / np.linalg.norm(text) == pytest.approx(0.33, abs=0.02)


def test_spread_within_classes_is_anisotropic(data: Simulated) -> None:
    order = np.argsort(data.labels, kind="stable")
    images = data.features[order].reshape(1000, 4, 512)
    residuals = (images - images.mean(axis=1, keepdims=True)).reshape(4000, 512)
    values = np.linalg.svd(residuals, compute_uv=False) ** 2
    assert values.sum() ** 2 / np.sum(values**2) == pytest.approx(114, rel=0.2)  # effective rank
    # inside one class it is far smaller: two disjoint pairs of images differ in similar directions
    first, second = images[:, 0] - images[:, 1], images[:, 2] - images[:, 3]
    rank = np.mean(np.sum(first**2, axis=1)) ** 2 / np.mean(np.sum(first * second, axis=1) ** 2)
    assert rank == pytest.approx(29, rel=0.4)


def test_errors_are_confusions_of_similar_classes(data: Simulated) -> None:
    centres = np.stack([data.features[data.labels == k].mean(axis=0) for k in range(1000)])
    centres -= centres.mean(axis=0)
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    predicted = np.argmax(data.features @ data.text.T, axis=1)
    wrong = predicted != data.labels
    similarity = np.sum(centres[predicted[wrong]] * centres[data.labels[wrong]], axis=1)
    assert similarity.mean() > 0.4  # a random pair: 0


def test_fewer_classes_are_easier(data: Simulated) -> None:
    few = np.mean([accuracy(simulate(200, 10, seed=seed)) for seed in range(5)])
    some = np.mean([accuracy(simulate(500, 100, seed=seed)) for seed in range(3)])
    assert 0.85 < few < 1
    assert accuracy(data) < some < few


def test_moon_gains_with_few_classes_and_loses_with_all() -> None:
    def scores(data: Simulated) -> tuple[float, float]:
        result = MOON().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
        return np.mean(result.zero_shot_labels == data.labels), np.mean(result.labels == data.labels)

    few = [scores(simulate(64, 1000, effective_classes=1 + seed % 4, seed=seed)) for seed in range(12)]
    before, after = np.mean(few, axis=0)
    assert after > before + 0.08  # real: 63 to 79 %
    before, after = scores(simulate(1000, 1000, seed=0))
    assert after < before - 0.04  # real: 61 to 54 %


def test_the_seed_decides_everything() -> None:
    first, again, other = (simulate(50, 20, dim=32, effective_classes=5, seed=seed) for seed in (3, 3, 4))
    for field in ("features", "text", "labels"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
        assert not np.array_equal(getattr(first, field), getattr(other, field))
    np.testing.assert_array_equal(first.text, simulate(7, 20, dim=32, seed=3).text)  # classes do not depend on samples


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_classes_present_and_their_frequencies(draw: st.DataObject) -> None:
    n = draw.draw(st.integers(1, 300))
    k = draw.draw(st.integers(1, 30))
    present = draw.draw(st.integers(1, min(n, k)))
    factor = draw.draw(st.floats(1, 20))
    shape = factor ** -(np.arange(present) / max(present - 1, 1))
    shares = n * shape / shape.sum()
    if shares[-1] < 1:
        factor, shares = 1.0, np.full(present, n / present)
    data = simulate(n, k, dim=8, effective_classes=present, imbalance=factor, seed=n)
    counts = np.sort(np.unique(data.labels, return_counts=True)[1])[::-1]
    assert len(counts) == present
    assert counts.sum() == n
    assert data.labels.min() >= 0
    assert data.labels.max() < k
    assert np.all(np.abs(counts - shares) < 1)


def test_imbalance_is_exact_where_whole_numbers_allow() -> None:
    labels = simulate(70, 50, dim=8, effective_classes=3, imbalance=4).labels
    assert sorted(np.unique(labels, return_counts=True)[1].tolist()) == [10, 20, 40]


def test_all_classes_or_as_many_as_samples_are_present_by_default() -> None:
    assert len(np.unique(simulate(90, 30, dim=8).labels)) == 30
    assert len(np.unique(simulate(20, 30, dim=8).labels)) == 20


@pytest.mark.parametrize(("n", "k", "dim"), [(1, 1, 3), (2 * BLOCK + 1, 2, 4), (3, 1100, 5)])
def test_extreme_sizes(n: int, k: int, dim: int) -> None:
    data = simulate(n, k, dim=dim)
    assert data.features.shape == (n, dim)
    assert data.text.shape == (k, dim)
    np.testing.assert_allclose(np.linalg.norm(data.features, axis=1), 1, atol=1e-5)


def test_class_names() -> None:
    assert simulate(2, 2, dim=8).class_names == ("class 0", "class 1")
    assert simulate(2, 2, dim=8, class_names=["cat", "dog"]).class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"n_samples": 0},
            "The 'n_samples' parameter of simulate must be a whole number of at least 1. Got 0 instead.",
        ),
        (
            {"n_classes": 2.5},
            "'n_classes' parameter of simulate must be a whole number of at least 1. Got 2.5 instead.",
        ),
        ({"n_classes": True}, "'n_classes' parameter of simulate must be a whole number of at least 1. Got True"),
        ({"dim": 2}, "'dim' parameter of simulate must be a whole number of at least 3. Got 2 instead."),
        ({"seed": -1}, "'seed' parameter of simulate must be a whole number of at least 0. Got -1 instead."),
        ({"effective_classes": 0}, "'effective_classes' parameter of simulate must be a whole number of at least 1."),
        ({"effective_classes": 6}, r"at most the number of classes \(5\) and of samples \(8\). Got 6 instead."),
        ({"n_samples": 3, "effective_classes": 4}, r"and of samples \(3\). Got 4 instead."),
        ({"imbalance": 0.5}, "'imbalance' parameter of simulate must be a number of at least 1, or None. Got 0.5"),
        ({"imbalance": float("nan")}, "must be a number of at least 1, or None. Got nan instead."),
        ({"imbalance": float("inf")}, "must be a number of at least 1, or None. Got inf instead."),
        ({"imbalance": "10"}, "must be a number of at least 1, or None. Got '10' instead."),
        ({"imbalance": 1000}, "must leave a sample to each of 5 classes. Got 1000 with 8 samples instead; lower it"),
        ({"class_names": ["cat"]}, r"must be 5 strings, one per class, or None. Got \['cat'\] instead."),
        ({"class_names": "abcde"}, "must be 5 strings, one per class, or None. Got 'abcde' instead."),
    ],
)
def test_bad_arguments(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionError, match=sentence):
        simulate(**{"n_samples": 8, "n_classes": 5, "dim": 8} | options)
