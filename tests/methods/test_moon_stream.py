"""MOON with memory: without one it is MOON, with one it uses what came before, and forgets it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide import MOON, Task
from moontide.core.ple import sample_weights
from moontide.core.simplex import zero_shot
from moontide.methods.moon_stream import SPANS, StreamMOON, StreamState, learn_origins, prior, share
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


def test_a_batch_without_a_past_is_moons() -> None:
    data = simulate(48, 30, effective_classes=6, seed=2)
    f, text = data.features.astype(np.float64), data.text.astype(np.float64)
    first = StreamMOON().fit_predict(f, text)
    np.testing.assert_allclose(first.probs, MOON().fit_predict(f, text).probs, rtol=1e-8, atol=1e-12)


def test_no_class_is_taken_for_present_where_all_are_equally_likely() -> None:
    data = simulate(640, 400, seed=4)
    order = np.random.default_rng(0).permutation(640)
    mixed, burst = StreamMOON(), StreamSampler("separate", batch_size=16).draw(data.labels, np.random.default_rng(0))
    assert share(run(mixed, data, order, 16)[0].origins)[0] > 0.98
    assert share(run(mixed, data, burst, 16)[0].origins)[0] < 0.5


def test_what_is_kept_adds_up() -> None:
    data = simulate(32, 6, effective_classes=3, seed=1)
    method = StreamMOON(memory=1e9)  # nothing fades
    state = method.start(Task(data.features, data.text))
    answers = []
    for x in batches(data, 8):
        state, result = method.step(state, x)
        answers.append(result.probs)
    assert isinstance(state, StreamState)
    assert state.count == pytest.approx(32)
    for row in state.present:
        np.testing.assert_allclose(row, np.concatenate(answers).sum(axis=0), rtol=1e-4, atol=1e-6)
    assert np.sum(state.origins) == pytest.approx(32, rel=1e-5)
    gamma = sample_weights(np.concatenate(answers))
    labels = np.concatenate(answers).argmax(axis=1)
    np.testing.assert_array_equal(state.hard.round(4), np.bincount(labels, minlength=6))
    seen = state.hard > 0
    wanted = (np.concatenate(answers) * gamma[:, None]).T @ data.features  # (K, d)
    some = np.linalg.norm(state.sums - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert (some[seen] < 0.05).all()  # but for batches in which the class has no sample
    assert not state.sums[~seen].any()
    np.testing.assert_allclose(state.image_sum, data.features.sum(axis=0), atol=1e-3)
    np.testing.assert_allclose(state.bank_features[-32:], data.features, atol=1e-6)
    np.testing.assert_allclose(state.bank_z[-32:], np.concatenate(answers), atol=1e-6)


def test_the_past_fades_by_samples() -> None:
    text = np.eye(3)
    method = StreamMOON(memory=4.0)
    state = method.start(Task(text, text))
    state, _ = method.step(state, text[[0, 0]])
    before = state
    for _ in range(5):
        state, _ = method.step(state, text[[1, 1]])
    assert isinstance(state, StreamState)
    assert isinstance(before, StreamState)
    assert state.count == pytest.approx(sum(2 * np.exp(-0.5 * i) for i in range(6)))
    assert state.hard[0] == pytest.approx(before.hard[0] * np.exp(-10 / 4))
    for span, row in zip(SPANS, state.present, strict=True):
        assert row[0] == pytest.approx(before.present[0][0] * np.exp(-10 * span / 4), abs=1e-6)


def test_what_a_class_looked_like_is_used_as_far_as_classes_come_back() -> None:
    data = simulate(96, 12, effective_classes=3, seed=7)
    method = StreamMOON()
    state = method.start(Task(data.features, data.text))
    for x in batches(data, 16)[:5]:
        state, _ = method.step(state, x)
    assert isinstance(state, StreamState)
    x = batches(data, 16)[5]
    known = method.step(state, x)[1]
    forgotten = replace(state, sums=0 * state.sums, soft=0 * state.soft, hard=0 * state.hard)
    unknown = method.step(forgotten, x)[1]
    live = unknown.beta > 0
    assert (known.beta[live] > unknown.beta[live]).all()
    nothing_returns = replace(state, origins=state.origins * 0 + np.asarray([1e9, 0, 0, 0, 0], np.float32))
    there, not_there = (
        method.step(replace(nothing_returns, sums=c * state.sums, soft=c * state.soft, hard=c * state.hard), x)[1]
        for c in (1, 0)
    )
    np.testing.assert_allclose(there.probs, not_there.probs, atol=1e-4)


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

    def shares(p: Any) -> Any:  # (n, J, K), of the past and of the batch without the sample
        counts = present[None] + (p.sum(axis=0) - p)[:, None]
        return counts / counts.sum(axis=2, keepdims=True)

    def explained(theta: Any) -> float:  # the log-posterior of theta, which EM never lowers
        likelihood = np.concatenate([np.full((n, 1), 2 / (k + 1)), (shares(y) * y[:, None]).sum(axis=2)], axis=1)
        weight = past + np.asarray(share(np.zeros(len(SPANS) + 1)))
        return float(np.log(likelihood @ theta).sum() + (weight * np.log(theta)).sum())

    found = [learn_origins(y, present, past, steps) for steps in range(5)]
    values = [explained(share(origins)) for origins in found]
    assert all(after >= before - 1e-9 for before, after in pairwise(values))
    assert found[-1].sum() == pytest.approx(past.sum() + n)
    theta = share(found[-1])
    wanted = theta[0] / k + np.einsum("j,njk->nk", theta[1:], shares(z))
    np.testing.assert_allclose(prior(z, present, theta), wanted, atol=1e-12)
    np.testing.assert_allclose(wanted.sum(axis=1), 1)


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
