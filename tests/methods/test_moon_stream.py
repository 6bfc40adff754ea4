"""MOON with memory: without one it is MOON, with one it uses what came before, and forgets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide import MOON, Task
from moontide.core.simplex import zero_shot
from moontide.methods.moon_stream import SPANS, StreamMOON, StreamState, presence, share
from moontide.samplers import StreamSampler
from moontide.simulate import Simulated, simulate

FEATURES = Path(__file__).parents[3] / "shared" / "features"


def batches(data: Simulated, size: int) -> list[Any]:
    return [data.features[i : i + size] for i in range(0, len(data.features), size)]


def run(method: StreamMOON, data: Simulated, order: Any, size: int) -> tuple[StreamState, float]:
    """Return the state at the end of a stream, and the accuracy on it."""
    state, right = method.start(Task(data.features, data.text, data.logit_scale)), 0
    for i in range(0, len(order), size):
        now = order[i : i + size]
        state, result = method.step(state, data.features[now])
        right += int((result.labels == data.labels[now]).sum())
    assert isinstance(state, StreamState)
    return state, right / len(order)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("n", "k"), [(1, 20), (16, 300), (64, 100), (300, 10)])
def test_without_memory_it_is_moon_on_each_batch(n: int, k: int, dtype: Any) -> None:
    data = simulate(3 * n, k, effective_classes=min(8, k, n), seed=1)
    f, text = data.features.astype(dtype), data.text.astype(dtype)
    stream, moon = StreamMOON(memory=0), MOON()
    start = state = stream.start(Task(f, text))
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == np.float64 else {"rtol": 1e-3, "atol": 1e-5}
    for i in range(0, 3 * n, n):
        state, result = stream.step(state, f[i : i + n])
        wanted = moon.fit_predict(f[i : i + n], text)
        assert np.array_equal(result.labels, wanted.labels)
        np.testing.assert_allclose(result.probs, wanted.probs, **tolerance)
        np.testing.assert_allclose(result.beta, wanted.beta, **tolerance)
        np.testing.assert_allclose(result.kappa, wanted.kappa, **tolerance)
    for name, value in vars(start).items():  # nothing was remembered
        assert name == "seen" or np.array_equal(value, getattr(state, name)), name


@pytest.mark.parametrize(
    "options", [{"laplacian_weight": 0.0}, {"neighbours": 5, "temper": 20.0}, {"text_weight": 0.5}]
)
def test_without_memory_it_has_the_options_of_moon(options: dict[str, Any]) -> None:
    data = simulate(40, 12, effective_classes=4, seed=3)
    f, text = data.features.astype(np.float64), data.text.astype(np.float64)
    result = StreamMOON(memory=0, **options).fit_predict(f, text)
    np.testing.assert_allclose(result.probs, MOON(**options).fit_predict(f, text).probs, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("size", [1, 16])
def test_memory_pays_where_classes_come_in_bursts(size: int) -> None:
    data = simulate(600, 60, seed=5)
    order = StreamSampler("separate", batch_size=size).draw(data.labels, np.random.default_rng(0))
    alone = run(StreamMOON(memory=0), data, order, size)[1]
    assert run(StreamMOON(), data, order, size)[1] > alone + 0.01


def test_statistics_are_gamma_weighted_sums_of_what_was_kept() -> None:
    data = simulate(32, 6, effective_classes=3, seed=1)
    method = StreamMOON(memory=1e9)  # nothing fades
    state = method.start(Task(data.features, data.text))
    for x in batches(data, 8):
        state, _ = method.step(state, x)
    assert isinstance(state, StreamState)
    assert np.sum(state.hard) == pytest.approx(32)
    assert state.count == pytest.approx(32)
    np.testing.assert_allclose(np.sum(state.present, axis=1), 32, rtol=1e-5)
    assert np.sum(state.origins) == pytest.approx(32, rel=1e-5)
    assert np.all(state.soft <= np.sum(state.bank_z, axis=0) + 1e-4)  # gamma is at most 1
    assert np.all(np.linalg.norm(state.sums, axis=1) <= state.soft + 1e-4)  # sums of weighted unit vectors
    np.testing.assert_allclose(state.image_sum, data.features.sum(axis=0), atol=1e-3)
    np.testing.assert_allclose(state.bank_features[-32:], data.features, atol=1e-6)


def test_the_stream_fades_by_samples_and_a_class_by_its_own() -> None:
    text = np.eye(3)
    method = StreamMOON(memory=4.0)
    state = method.start(Task(text, text))
    state, _ = method.step(state, text[[0, 0]])
    before = state
    for _ in range(5):
        state, _ = method.step(state, text[[1, 1]])
    assert isinstance(state, StreamState)
    assert isinstance(before, StreamState)
    assert state.hard[0] == before.hard[0] == 2  # it was away, and stays known
    np.testing.assert_allclose(state.sums[0], before.sums[0])
    assert state.hard[1] == pytest.approx(sum(2 * np.exp(-0.5 * i) for i in range(5)))
    assert state.count == pytest.approx(sum(2 * np.exp(-0.5 * i) for i in range(6)))
    for span, row in zip(SPANS, state.present, strict=True):
        assert row[0] == pytest.approx(before.present[0][0] * np.exp(-10 * span / 4), abs=1e-6)


def test_the_bank_votes() -> None:
    text, x = np.eye(4), np.asarray([[0.5, 0.5, 0.6, 0.3]])
    x = x / np.linalg.norm(x)
    method = StreamMOON(bank=4)
    state = method.start(Task(text, text, 5.0))
    near = x + np.asarray([[0, 0.02, 0, 0]])
    for _ in range(4):
        state, _ = method.step(state, near)
    assert isinstance(state, StreamState)
    votes_of, told = method.votes(state, x)
    np.testing.assert_allclose(votes_of(np.ones((1, 4))), 0)  # there is no one else in the batch
    assert np.all(told > 0)
    assert np.argmax(told) == np.argmax(np.sum(state.bank_z, axis=0))
    assert StreamMOON(bank=0).votes(StreamMOON(bank=0).start(Task(text, text)), x)[1].tolist() == [[0, 0, 0, 0]]


@given(seed=st.integers(0, 10_000), n=st.integers(1, 6), k=st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_presence_is_a_distribution_learnt_by_em(seed: int, n: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    y, z = (rng.dirichlet(np.full(k, 0.3), size=n) for _ in range(2))
    present, past = rng.random((len(SPANS), k)) * 9, rng.random(len(SPANS) + 1)
    others = z.sum(axis=0) - z

    def explained(theta: Any) -> float:  # the log-posterior of theta, which EM never lowers
        shares = (present[None] + others[:, None]) / (present[None] + others[:, None]).sum(axis=2, keepdims=True)
        likelihood = np.concatenate([np.full((n, 1), 1 / k), (shares * y[:, None]).sum(axis=2)], axis=1)
        weight = past + np.asarray(share(np.zeros(len(SPANS) + 1)))
        return float(np.log(likelihood @ theta).sum() + (weight * np.log(theta)).sum())

    origins = past
    for _ in range(4):
        before = explained(share(origins))
        origins, prior = presence(y, z, present, past, origins)
        assert explained(share(origins)) >= before - 1e-9
        np.testing.assert_allclose(prior.sum(axis=1), 1)
        assert origins.sum() == pytest.approx(past.sum() + n)


def test_long_streams_stay_finite() -> None:
    rng = np.random.default_rng(0)
    text = rng.normal(size=(5, 16)).astype(np.float32)
    method = StreamMOON(memory=0.5)  # everything fades to nothing in a batch
    state = method.start(Task(text, text))
    for _ in range(300):
        state, result = method.step(state, rng.normal(size=(8, 16)))
    assert np.all(np.isfinite(result.probs))


@pytest.mark.skipif(not (FEATURES / "clothing_tiny.npz").exists(), reason="needs ../shared/features/clothing_tiny.npz")
def test_another_space_and_temperature() -> None:
    held = np.load(FEATURES / "clothing_tiny.npz", allow_pickle=False)
    x, text, scale = held["image_features"], held["text_features"], 1 / float(held["temperature"])
    method = StreamMOON()
    state, right, alone = method.start(Task(x[:1], text, scale)), 0, 0
    order = StreamSampler("separate", batch_size=16).draw(held["labels"], np.random.default_rng(0))
    for i in range(0, len(order), 16):
        now = order[i : i + 16]
        state, result = method.step(state, x[now])
        right += int((result.labels == held["labels"][now]).sum())
        y = zero_shot(Task(x[now], text).features, Task(x[now], text).text, scale)
        alone += int((y.argmax(axis=1) == held["labels"][now]).sum())
    assert right > alone
