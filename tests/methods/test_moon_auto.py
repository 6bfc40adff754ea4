"""moon_auto: its equations against plain sums, and what it promises of few and of all classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

import moontide
from moontide.core.graph import Graph
from moontide.methods import moon_auto
from moontide.methods.moon_auto import AutoMOON, Presence
from moontide.metrics import accuracy, expected_calibration_error
from moontide.samplers import BatchSampler, rng_for
from moontide.simulate import simulate
from moontide.store.files import read_task

IMAGENET = Path(__file__).parents[3] / "shared" / "features" / "imagenet1k_vitb32.npz"


def assignments(n: int, k: int, seed: int, sharp: float = 3.0) -> np.ndarray:
    logits = sharp * np.random.default_rng(seed).normal(size=(n, k))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@given(n=st.integers(2, 30), k=st.integers(2, 20), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_excess_is_the_sum_over_pairs(n: int, k: int, seed: int) -> None:
    y = assignments(n, k, seed)
    pairs = np.mean([y[i] @ y[j] for i in range(n) for j in range(n) if i != j])
    sure = (np.mean([p @ p for p in y]) - 1 / k) / (1 - 1 / k)
    assert moon_auto.excess(y) == pytest.approx(max(0, (k * pairs - 1) / sure), rel=1e-9, abs=1e-9)


def test_excess_of_sure_predictions_counts_the_classes() -> None:
    labels = np.repeat(np.arange(5), 40)
    v = float(moon_auto.excess(np.eye(20)[labels]))
    assert 1 / (1 + v) == pytest.approx(5 / 20, rel=0.05)


def test_one_sample_or_one_class_has_no_excess() -> None:
    assert float(moon_auto.excess(np.asarray([[0.9, 0.1]]))) == 0
    assert float(moon_auto.excess(np.ones((5, 1)))) == 0


@given(n=st.integers(1, 12), seed=st.integers(0, 99), expected=st.floats(0.05, 12))
@settings(max_examples=50, deadline=None)
def test_evidence_is_the_integral_over_the_share(n: int, seed: int, expected: float) -> None:
    z = np.clip(assignments(n, 2, seed)[:, :1], 1e-6, 1 - 1e-4)  # (n, 1)
    odds = z[:, 0] / (1 - z[:, 0])
    top = max(float(np.log1p(t * odds).sum() - t * (1 + expected)) for t in np.linspace(0, 60, 6001))
    integral = quad(lambda t: np.exp(np.log1p(t * odds).sum() - t * (1 + expected) - top), 0, 80, limit=500)[0]
    exact = top + np.log(integral) + np.log1p(expected)
    found = float(moon_auto.evidence(z, np.asarray(expected))[1][0])
    assert found == pytest.approx(exact, abs=0.7 + 0.1 * abs(exact))  # Laplace, at a guess of the place


@given(n=st.integers(1, 20), k=st.integers(1, 8), seed=st.integers(0, 99), own=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_the_cosine_leaves_a_sample_out_of_its_own_mean(n: int, k: int, seed: int, own: float) -> None:
    rng = np.random.default_rng(seed)
    f, centre = rng.normal(size=(n, 6)), rng.normal(size=6)
    f, centre = f / np.linalg.norm(f, axis=1, keepdims=True), centre / np.linalg.norm(centre)
    w = assignments(n, k, seed)
    found = moon_auto.cosine_to_others(*moon_auto.class_dots(f, w.T @ f, centre, 0.5), (1 - own) * w)
    for i in range(n):
        for c in range(k):
            counted = w[:, c].copy()
            counted[i] *= own
            mean = counted @ f + 0.5 * centre
            assert found[i, c] == pytest.approx(f[i] @ mean / np.linalg.norm(mean), abs=1e-9)


def test_agreement_is_one_for_equal_and_zero_for_other_predictions() -> None:
    votes_of = Graph(np.asarray([[1], [0], [1]]), np.ones((3, 1))).operator(symmetric=True)
    assert float(moon_auto.agreement(np.full((3, 4), 0.25), votes_of)) == pytest.approx(1)
    assert float(moon_auto.agreement(np.eye(3), votes_of)) == 0


@given(share=st.floats(0.01, 1), n=st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_presence_grows_with_evidence_to_certainty(share: float, n: int) -> None:
    p = np.exp(moon_auto.log_presence(np.asarray([-1.0, 0.0, 1.0, 30.0]), np.asarray(share), n, 100))
    assert np.all(np.diff(p) >= 0)
    assert p[-1] > 0.99
    assert (p[0] < 1) == (share < 1)


def test_the_share_follows_the_classes_with_evidence() -> None:
    bounds = Presence(np.asarray(0.05), np.asarray(1.0))
    found = [float(moon_auto.present_share(np.full(m, 20.0), bounds, 1000, 40)) for m in (2, 10, 30, 40)]
    assert found == sorted(found)
    assert found[0] < 0.2
    assert found[-1] == pytest.approx(1)


@pytest.mark.parametrize("few", [2, 5, 20])
def test_it_gains_where_few_classes_are_there(few: int) -> None:
    gains = []
    for seed in range(5):
        data = simulate(64, 100, effective_classes=few, seed=seed)
        result = AutoMOON().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
        gains.append(accuracy(data.labels, result.labels) - accuracy(data.labels, result.zero_shot_labels))
    assert np.mean(gains) > 0.02


def test_the_share_that_is_reported_tells_few_from_all() -> None:
    few = simulate(200, 100, effective_classes=4, seed=0)
    every = simulate(2000, 20, effective_classes=20, seed=0)
    shares = [
        float(AutoMOON().fit_predict(d.features, d.text, logit_scale=d.logit_scale).details["share"])
        for d in (few, every)
    ]
    assert shares[0] < 0.15
    assert shares[1] > 0.5


def test_few_live_classes_give_what_all_do() -> None:
    """float32 goes by the few live classes, float64 by all: the answers are the same."""
    data = simulate(300, 200, effective_classes=6, seed=1)
    found = [
        AutoMOON().fit_predict(data.features.astype(t), data.text.astype(t), logit_scale=data.logit_scale)
        for t in (np.float32, np.float64)
    ]
    assert np.array_equal(found[0].labels, found[1].labels)
    np.testing.assert_allclose(found[0].probs, found[1].probs, atol=2e-4)


def test_unknown_is_higher_for_samples_of_a_class_that_is_not_in_the_list() -> None:
    data = simulate(400, 40, effective_classes=20, seed=3)
    left_out = np.unique(data.labels)[:5]
    text = np.delete(data.text, left_out, axis=0)
    result = AutoMOON().fit_predict(data.features, text, logit_scale=data.logit_scale)
    strange = np.isin(data.labels, left_out)
    assert result.unknown is not None
    assert np.median(result.unknown[strange]) > np.median(result.unknown[~strange])


def test_batches_are_joined_with_their_unknown() -> None:
    data = simulate(40, 10, seed=0)
    parts = [AutoMOON().fit_predict(data.features[s], data.text) for s in (slice(0, 20), slice(20, 40))]
    joined = moontide.Result.concatenate(parts)
    assert joined.unknown is not None
    assert joined.unknown.shape == (40,)


@pytest.mark.skipif(not IMAGENET.exists(), reason=f"needs the ImageNet feature pack at {IMAGENET}")
def test_on_real_features_it_gains_with_few_classes_and_does_not_lose_with_all() -> None:
    with pytest.warns(UserWarning, match="more than once"):
        task, labels, _ = read_task(IMAGENET)
    labels = np.asarray(labels)
    gains: dict[str, list[float]] = {"few": [], "all": []}
    sure, right = [], []
    for name, sampler in (("few", BatchSampler(64, (2, 10))), ("all", BatchSampler(1000))):
        for run in range(20 if name == "few" else 3):
            rows = sampler.draw(labels, rng_for("test-auto", "imagenet", name, run))
            result = AutoMOON().fit_predict(task.features[rows], task.text, logit_scale=task.logit_scale)
            gains[name].append(accuracy(labels[rows], result.labels) - accuracy(labels[rows], result.zero_shot_labels))
            if name == "few":
                sure.append(result.confidence)
                right.append(result.labels == labels[rows])
    assert np.mean(gains["few"]) > 0.1
    assert np.mean(gains["all"]) > -0.003
    hit = np.concatenate(right)
    assert expected_calibration_error(hit, np.ones_like(hit), np.concatenate(sure)) < 0.1
