"""TIDE on a stream: the batch method over the last samples, with what became known of them and of those before."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moontide
from moontide import Stream, Task
from moontide.methods.tide import TIDE, TIDEState, given_by, remember
from moontide.protocols import NONE, change_classes
from moontide.simulate import simulate
from moontide.streams import load_state, run_stream, save_state

DATA = simulate(90, 12, dim=48, effective_classes=5, seed=3)
FEATURES, TEXT, LABELS = DATA.features.astype(float), DATA.text.astype(float), DATA.labels
TASK = Task(FEATURES, TEXT)


def stepped(method: TIDE, cuts: list[int], known: Any = None) -> tuple[TIDEState, list[Any]]:
    """Return the state after pushes of these rows, and the probabilities of each push."""
    state, answers = method.start(TASK), []
    for a, b in pairwise(cuts):
        state, result = method.step(state, FEATURES[a:b], None if known is None else known[a:b])
        answers.append(result)
    return state, answers


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 90), min_size=1, max_size=6, unique=True), memory=st.sampled_from([0, 5, 20, 200]))
def test_a_step_is_the_batch_method_over_the_last_samples(cuts: list[int], memory: int) -> None:
    cuts, method = [0, *sorted(cuts)], TIDE(memory=memory)
    for (a, b), found in zip(pairwise(cuts), stepped(method, cuts)[1], strict=True):
        first = min(a, max(b - memory, 0))
        wanted = TIDE().fit_predict(FEATURES[first:b], TEXT)
        np.testing.assert_allclose(found.probs, wanted.probs[a - first :], atol=1e-9)
        np.testing.assert_allclose(found.zero_shot, wanted.zero_shot[a - first :], atol=1e-12)
        np.testing.assert_allclose(found.unknown, wanted.unknown[a - first :], atol=1e-9)
        assert found.probs.shape == (b - a, 12)


@pytest.mark.parametrize(("memory", "size"), [(0, 10), (8, 10), (10, 10)])
def test_without_room_for_a_past_every_batch_is_labelled_on_its_own(memory: int, size: int) -> None:
    _, found = run_stream(TIDE(memory=memory), TASK, size)
    wanted = np.concatenate([TIDE().fit_predict(part).probs for part in TASK.batches(size)])
    np.testing.assert_allclose(found.probs, wanted, atol=1e-9)


def test_small_batches_gain_by_the_samples_before_them() -> None:
    right = dict.fromkeys((0, 64), 0.0)
    for seed in range(5):
        data = simulate(200, 60, effective_classes=4, seed=seed)
        for memory in right:
            _, found = run_stream(TIDE(memory=memory), Task(data.features, data.text), 4)
            right[memory] += (found.labels == data.labels).mean() / 5
    assert right[64] > right[0] + 0.03


def test_the_state_holds_the_last_samples_and_no_more() -> None:
    state, _ = stepped(TIDE(memory=20), [0, 7, 9])
    assert not state.recent[:11].any()
    np.testing.assert_allclose(state.recent[11:], TASK.features[:9], atol=1e-12)
    state, _ = stepped(TIDE(memory=20), [0, 7, 90])
    np.testing.assert_allclose(state.recent, TASK.features[70:], atol=1e-12)
    assert (state.recent.shape, state.recent_known.shape) == ((20, 48), (20,))


def test_a_saved_state_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    known = np.where(np.arange(90) % 3, -1, LABELS)
    method = TIDE(memory=16)
    state, _ = stepped(method, [0, 10, 30, 34], known)
    save_state(tmp_path / "tide.safetensors", method, state)
    again, loaded = load_state(tmp_path / "tide.safetensors")
    assert again == method
    for name, value in vars(state).items():
        np.testing.assert_array_equal(getattr(loaded, name), value, err_msg=name)
    found, wanted = again.step(loaded, FEATURES[34:50])[1], method.step(state, FEATURES[34:50])[1]
    np.testing.assert_array_equal(found.probs, wanted.probs)


@pytest.mark.parametrize("cuts", [[0, 10, 11, 12, 40], [0, 30, 31, 90], [0, 3, 4, 60, 61]])
def test_cosines_that_a_stream_keeps_change_nothing_to_the_last_bit(cuts: list[int], tmp_path: Path) -> None:
    pytest.importorskip("numba")
    features, method = FEATURES.astype(np.float32), TIDE(memory=16)
    state = method.start(Task(features, TEXT.astype(np.float32)))
    for a, b in pairwise(cuts):
        save_state(tmp_path / "tide.safetensors", method, state)
        _, loaded = load_state(tmp_path / "tide.safetensors")
        wanted = method.step(loaded, features[a:b])[1]  # nothing was kept
        state, found = method.step(state, features[a:b])
        for name in ("probs", "zero_shot", "unknown"):
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)
        first = min(a, max(b - 16, 0))
        whole = method.fit_predict(features[first:b], TEXT.astype(np.float32))
        np.testing.assert_allclose(found.probs, whole.probs[a - first :], atol=1e-4)
    fewer = change_classes(method, state, range(10))
    assert fewer.cosine is None
    assert method.step(fewer, features[:1])[1].probs.shape == (1, 10)


def test_known_labels_are_clamped_and_kept_while_they_are_recent() -> None:
    known = np.full(90, -1)
    known[[2, 5, 12]] = (LABELS[[2, 5, 12]] + 1) % 12  # wrong on purpose: a known label is not disputed
    method = TIDE(memory=40)
    state, answers = stepped(method, [0, 10, 20], known)
    np.testing.assert_array_equal(answers[0].probs[2], np.eye(12)[known[2]])
    np.testing.assert_array_equal(answers[1].labels[2], known[12])
    after, found = method.step(state, FEATURES[20:30])
    wanted = method.fit_predict(FEATURES[:30], TEXT, known=known[:30])
    np.testing.assert_allclose(found.probs, wanted.probs[20:], atol=1e-9)
    np.testing.assert_array_equal(after.recent_known[10:], known[:30])
    assert not after.known_counts.any()


def test_labelled_samples_are_remembered_after_they_left_the_window() -> None:
    known = np.where(np.arange(90) < 30, LABELS, -1)
    method = TIDE(memory=16)
    state, _ = stepped(method, [0, 30, 50], known)
    assert (state.recent_known == -1).all()
    np.testing.assert_array_equal(state.known_counts, np.bincount(LABELS[:30], minlength=12))
    for k in range(12):
        np.testing.assert_allclose(state.known_sums[k], TASK.features[:30][LABELS[:30] == k].sum(0), atol=1e-9)
    with_them, without = (
        method.step(s, FEATURES[50:])[1] for s in (state, stepped(method, [0, 30, 50])[0])
    )  # the last 40 are more than memory: nothing but the class sums is left of the past
    assert not np.allclose(with_them.probs, without.probs, atol=1e-3)
    rest = TASK.features[50:]
    wanted = method.solve(state, rest, given_by(state, np.full(len(rest), -1)), None)
    np.testing.assert_allclose(with_them.probs, wanted.probs, atol=1e-9)


@pytest.mark.parametrize("n", [10, 40])
def test_labelled_samples_that_a_batch_leaves_no_room_for_are_of_the_past_at_once(n: int) -> None:
    method = TIDE(memory=16)
    state, _ = stepped(method, [0, 12], LABELS)
    _, found = method.step(state, FEATURES[12 : 12 + n])
    kept = max(16 - n, 0)  # of the labelled ones, those that are labelled together with the batch
    first = 12 - kept
    past = remember(method.start(TASK), TASK.features[:first], LABELS[:first])
    known = np.where(np.arange(first, 12 + n) < 12, LABELS[first : 12 + n], -1)
    wanted = method.solve(past, TASK.features[first : 12 + n], given_by(past, known), None)
    np.testing.assert_allclose(found.probs, wanted.probs[kept:], atol=1e-9)


@given(rows=st.sets(st.integers(0, 29), min_size=1, max_size=8))
@settings(max_examples=10)
def test_a_correction_of_recent_samples_is_as_if_they_had_come_with_the_label(rows: set[int]) -> None:
    which, method = sorted(rows), TIDE(memory=40)
    known = np.full(90, -1)
    known[which] = LABELS[which]
    wanted, _ = stepped(method, [0, 10, 30], known)
    found = method.correct(stepped(method, [0, 10, 30])[0], FEATURES[which], LABELS[which])
    for name, value in vars(wanted).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_sample_is_found_again_however_often_it_was_scaled(library: str, dtype: str) -> None:
    make = np.asarray if library == "numpy" else pytest.importorskip("torch").asarray
    raw = (FEATURES * np.random.default_rng(0).uniform(0.5, 3, (90, 1))).astype(dtype)
    stream = Stream("tide", make(TEXT.astype(dtype)))
    stream.push(make(raw[:60]))
    for i in range(60):
        stream.correct(make(raw[i : i + 1]), LABELS[i : i + 1])
    assert stream.state.recent_known[4:].tolist() == LABELS[:60].tolist()
    assert not bool(stream.state.known_counts.any())


def test_a_label_is_taken_back_while_its_sample_is_recent() -> None:
    method, none = TIDE(memory=40), np.asarray([-1, -1])
    plain, _ = stepped(method, [0, 10, 30])
    labelled = method.correct(plain, FEATURES[[3, 20]], LABELS[[3, 20]])
    again = method.correct(labelled, FEATURES[[3, 20]], none)
    for name, value in vars(plain).items():
        np.testing.assert_array_equal(getattr(again, name), value, err_msg=name)
    assert (labelled.recent_known >= 0).sum() == 2


def test_an_old_sample_has_one_label_however_often_it_is_corrected() -> None:
    method = TIDE(memory=16)
    state, _ = stepped(method, [0, 30, 60])
    rows, right, wrong, none = [3, 50], LABELS[[3, 50]], (LABELS[[3, 50]] + 1) % 12, np.full(2, -1)
    once = method.correct(state, FEATURES[rows], right)
    found = method.correct(state, FEATURES[rows], wrong)
    found = method.correct(found, FEATURES[rows], right, wrong)
    found = method.correct(found, FEATURES[rows], right, right)
    for name, value in vars(once).items():
        np.testing.assert_allclose(getattr(found, name), value, atol=1e-12, err_msg=name)
    for name, value in vars(state).items():
        back = getattr(method.correct(found, FEATURES[rows], none, right), name)
        assert (back is None) == (value is None), name
        if value is not None:
            np.testing.assert_allclose(back, value, atol=1e-12, err_msg=name)


def test_a_correction_of_an_old_sample_counts_as_a_labelled_one_of_the_past() -> None:
    method = TIDE(memory=16)
    state, _ = stepped(method, [0, 30, 60])
    found = method.correct(state, FEATURES[[3, 50]], LABELS[[3, 50]])
    np.testing.assert_array_equal(found.known_counts, np.bincount(LABELS[[3]], minlength=12))
    np.testing.assert_allclose(found.known_sums[LABELS[3]], TASK.features[3], atol=1e-12)
    assert found.recent_known.tolist() == [*[-1] * 6, LABELS[50], *[-1] * 9]
    unheard = method.correct(state, FEATURES[[3]], np.asarray([-1]))
    np.testing.assert_array_equal(unheard.known_counts, 0)


def test_class_numbers_of_known_samples_follow_their_classes() -> None:
    stream = Stream(TIDE(memory=8), TEXT, class_names=[f"class {i}" for i in range(12)], batch_size=8)
    known = np.asarray([3, 5, -1, 7, 3, -1, 0, 11])
    stream.push(FEATURES[:8], known)
    stream.push(FEATURES[8:18], np.asarray([*[-1] * 7, 11, 5, 2]))  # two wait
    stream.remove_classes(["class 3", 5])
    assert stream.state.recent_known.tolist() == [-1] * 7 + [9]
    counts = stream.state.known_counts
    assert counts.tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]  # of the labelled samples, those of classes 0, 7 and 11
    stream.add_classes(-TEXT[:1], ["another"])
    assert stream.state.known_counts.tolist() == [*counts, 0]
    assert not stream.state.known_sums[-1].any()
    answers = stream.push(FEATURES[18:24])  # with the two: -1, as 5 is gone, and 2
    assert answers.labels[1] == 2
    assert answers.probs[1].max() == 1
    assert answers.probs[0].max() < 1


def test_what_waits_is_saved_with_its_labels(tmp_path: Path) -> None:
    stream = Stream(TIDE(memory=8), TEXT, batch_size=8)
    stream.push(FEATURES[:4])
    stream.push(FEATURES[4:6], np.asarray([2, -1]))
    stream.save(tmp_path / "a.safetensors")
    again = Stream.load(tmp_path / "a.safetensors")
    assert again.waiting == 6
    for s in (stream, again):
        answers = s.push(FEATURES[6:8])
        assert answers.labels[4] == 2
        assert answers.probs[4].max() == 1
    np.testing.assert_array_equal(again.push(FEATURES[8:16]).probs, stream.push(FEATURES[8:16]).probs)


def test_a_class_that_is_added_gets_the_average_share() -> None:
    shares = np.asarray([4, *[1] * 11]) / 15
    stream = Stream("tide", TEXT, class_prior=shares)
    extra = np.random.default_rng(0).normal(size=(2, 48))
    stream.add_classes(extra)
    np.testing.assert_allclose(stream.state.class_prior, [*shares, NONE, NONE])
    found = stream.push(FEATURES[:40])
    whole = np.concatenate([shares * 12 / 14, [1 / 14, 1 / 14]])
    wanted = TIDE().fit_predict(FEATURES[:40], np.concatenate([TEXT, extra]), class_prior=whole)
    np.testing.assert_allclose(found.probs, wanted.probs, atol=1e-9)
    stream.remove_classes([0])
    assert stream.push(FEATURES[40:50]).probs.shape == (10, 13)


def test_negatives_stay_with_the_stream(tmp_path: Path) -> None:
    negatives = np.random.default_rng(0).normal(size=(3, 48))
    stream = Stream("tide", TEXT, negatives=negatives)
    stream.remove_classes([11])
    wanted = TIDE().fit_predict(FEATURES[:30], TEXT[:11], negatives=negatives).unknown
    np.testing.assert_allclose(stream.push(FEATURES[:30]).unknown, wanted, atol=1e-9)
    stream.save(tmp_path / "a")
    again = Stream.load(tmp_path / "a")
    np.testing.assert_array_equal(again.push(FEATURES[30:]).unknown, stream.push(FEATURES[30:]).unknown)


def test_the_state_does_not_grow_with_known_labels() -> None:
    method, sizes = TIDE(memory=16), []
    state = method.start(TASK)
    for start in [*range(0, 80, 10)] * 3:
        state, _ = method.step(state, FEATURES[start : start + 10], LABELS[start : start + 10])
        sizes.append(sum(np.asarray(value).nbytes for value in vars(state).values()))
    assert len(set(sizes)) == 1
    assert state.known_counts.sum() + (state.recent_known >= 0).sum() == 240


def test_a_step_leaves_what_it_was_given() -> None:
    method, x, known = moontide.method("tide", memory=16), FEATURES[:5].copy(), LABELS[:5].copy()
    state, _ = stepped(method, [0, 20, 30], np.where(np.arange(90) % 2, -1, LABELS))
    before = {name: np.array(value) for name, value in vars(state).items()}
    method.step(state, x, known)
    method.correct(state, x, known)
    for name, value in before.items():
        np.testing.assert_array_equal(getattr(state, name), value, err_msg=name)
    np.testing.assert_array_equal(x, FEATURES[:5])
    np.testing.assert_array_equal(known, LABELS[:5])
