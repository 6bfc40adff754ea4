"""`Stream` over every method: micro-batches by count and time, classes that come and go, files, bounded memory."""

from __future__ import annotations

import gc
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moontide
from moontide import Stream, Task
from moontide.checks.encoder import rows_as_images
from moontide.checks.tasks import Tasks
from moontide.core.arrays import to_numpy
from moontide.errors import FileError, InputError, MissingInputError, OptionError
from moontide.protocols import OnlineMethod, as_online, carry, change_classes, samples
from moontide.simulate import simulate
from moontide.streams import load_state, run_stream, save_state
from moontide.types import Result

PLAIN = [name for name in moontide.method_names() if not moontide.method(name).needs]
BALANCING = {"frolic", "inmap", "onzeta", "otter", "sinkhorn"}  # give each class a share, so two texts may go elsewhere
ONLINE = [name for name in PLAIN if isinstance(moontide.method(name), OnlineMethod)]


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def data() -> Task:
    drawn = simulate(60, 9, dim=32, effective_classes=3, seed=2)
    return Task(drawn.features, drawn.text, drawn.logit_scale, drawn.class_names)


def rows(results: list[Result]) -> Any:
    return np.concatenate([to_numpy(result.scores) for result in results])


@pytest.mark.parametrize("name", PLAIN)
def test_pushes_of_any_size_give_the_answers_of_whole_batches(name: str, data: Task) -> None:
    stream, cuts = Stream(name, data.text, batch_size=8), [0, 1, 2, 9, 30, 31, 60]
    results = [stream.push(data.features[a:b]) for a, b in pairwise(cuts)]
    assert [len(r.labels) for r in results] == [0, 0, 8, 16, 0, 32]
    results.append(stream.flush())
    state, whole = run_stream(moontide.method(name), Task(data.features, data.text), 8)
    assert np.array_equal(rows(results), whole.scores)
    assert (stream.seen, stream.waiting, state.seen) == (60, 0, 60)


def test_without_a_batch_size_every_push_is_a_batch(data: Task) -> None:
    stream = Stream("moon", data.text)
    for n in (1, 7, 20):
        wanted = moontide.method("moon").fit_predict(data.rows(0, n))
        assert np.allclose(stream.push(data.features[:n]).probs, wanted.probs, atol=1e-5)
    assert stream.seen == 28


def test_samples_wait_for_their_batch_or_for_some_time(data: Task) -> None:
    clock = Clock()
    stream = Stream("zero_shot", data.text, batch_size=4, max_wait=2.0, clock=clock)
    assert len(stream.push(data.features[:1]).labels) == 0
    clock.now = 1.9
    assert len(stream.poll().labels) == 0
    assert len(stream.push(data.features[1:2]).labels) == 0
    clock.now = 2.0  # the first has waited long enough, and takes the others along
    assert len(stream.poll().labels) == 2
    assert len(stream.push(data.features[2:7]).labels) == 4
    clock.now = 3.9
    assert (len(stream.poll().labels), stream.waiting) == (0, 1)  # that came with the push at 2.0
    clock.now = 4.0
    assert len(stream.push(data.features[7:13]).labels) == 7
    assert (len(stream.poll().labels), len(stream.flush().labels), stream.waiting) == (0, 0, 0)


@given(cuts=st.lists(st.integers(1, 9), min_size=1, max_size=12), size=st.integers(1, 7))
@settings(max_examples=30, deadline=None)
def test_every_sample_is_answered_once_and_in_order(cuts: list[int], size: int) -> None:
    text = np.eye(5)
    labels = np.random.default_rng(0).integers(0, 5, sum(cuts))
    stream, answers, start = Stream("zero_shot", text, batch_size=size), [], 0
    for n in cuts:
        answers += stream.push(text[labels[start : start + n]]).labels.tolist()
        start += n
        assert len(answers) + stream.waiting == start
        assert stream.waiting < size
    assert answers + stream.flush().labels.tolist() == labels.tolist()


def test_a_push_that_fails_leaves_the_stream_as_it_was(data: Task) -> None:
    stream, twin = (Stream("tda", data.text, batch_size=4) for _ in range(2))
    for s in (stream, twin):
        s.push(data.features[:6])
    for bad in (np.zeros((1, 32)), np.full((2, 32), np.nan), np.ones((1, 31)), np.ones(32), [["a"]]):
        with pytest.raises(InputError):
            stream.push(bad)
    assert stream.waiting == 2
    assert np.array_equal(stream.push(data.features[6:20]).probs, twin.push(data.features[6:20]).probs)


def test_what_waits_is_not_the_callers_memory(data: Task) -> None:
    x = np.array(data.features[:3])
    stream = Stream("zero_shot", data.text, batch_size=4)
    stream.push(x)
    x[:] = -x
    assert np.array_equal(stream.flush().labels, moontide.method("zero_shot").fit_predict(data.rows(0, 3)).labels)


@pytest.mark.parametrize("name", PLAIN)
def test_classes_come_and_go(name: str, data: Task) -> None:
    names = data.class_names
    assert names is not None
    stream = Stream(name, data.text[:7], class_names=names[:7])
    stream.push(data.features[:20])
    stream.add_classes(data.text[7:], names[7:])
    assert stream.class_names == names
    found = stream.push(data.text[7:]).labels.tolist()
    assert found == [7, 8] or name in BALANCING  # the new ones are found at once
    stream.remove_classes([names[0], 3])
    kept = tuple(n for i, n in enumerate(names) if i not in (0, 3))
    assert stream.class_names == kept
    result = stream.push(data.features[20:40])
    assert result.probs.shape == (20, 7)
    assert np.allclose(result.probs.sum(axis=1), 1, atol=1e-5)
    found = stream.push(data.text[[1, 2, 8]]).labels.tolist()
    assert found == [0, 1, 6] or name in BALANCING
    assert stream.seen == 45


def test_a_class_balance_goes_with_every_batch_of_a_stream(data: Task, tmp_path: Path) -> None:
    otter, prior, x = moontide.method("otter"), np.arange(9.0), data.features[:30]
    stream = Stream(otter, data.text, class_prior=prior)
    for _ in range(2):
        assert np.array_equal(stream.push(x).labels, otter.fit_predict(x, data.text, class_prior=prior).labels)
        stream.save(tmp_path / "otter")
        stream = Stream.load(tmp_path / "otter")
    task = Task(x, data.text, class_prior=prior)
    wanted = [otter.fit_predict(batch).labels for batch in task.batches(10)]
    assert np.array_equal(run_stream(otter, task, 10)[1].labels, np.concatenate(wanted))
    stream.remove_classes([8])
    wanted = otter.fit_predict(x, data.text[:8], class_prior=prior[:8])
    assert np.array_equal(stream.push(x).labels, wanted.labels)
    stream.add_classes(data.text[8:])  # of which nobody knows the share: the average of the others
    wanted = otter.fit_predict(x, data.text, class_prior=[*prior[:8], prior[:8].mean()])
    assert np.array_equal(stream.push(x).labels, wanted.labels)
    stream.remove_classes(range(1, 8))  # the classes that had a share
    assert np.array_equal(stream.push(x).labels, otter.fit_predict(x, data.text[[0, 8]]).labels)


def test_what_is_given_is_kept_by_methods_that_use_it_and_in_no_other_file(data: Task) -> None:
    used = {
        name: set(vars(Stream(name, data.text).state)) - {"text", "logit_scale", "seen"} for name in ("moon", "otter")
    }
    assert used == {"moon": set(), "otter": {"class_prior", "negatives"}}


@pytest.mark.parametrize("name", ONLINE)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_state_with_other_classes_is_one_that_start_could_have_made(name: str, kind: str, data: Task) -> None:
    task = data
    if kind == "torch":
        torch = pytest.importorskip("torch")
        task = Task(torch.asarray(data.features), torch.asarray(data.text))
    method = as_online(moontide.method(name))
    found = change_classes(method, method.start(task), [4, 0], task.text[7:])
    text = np.concatenate([to_numpy(task.text)[[4, 0]], to_numpy(task.text)[7:]])
    wanted = method.start(Task(to_numpy(task.features), text))
    for field, value in vars(wanted).items():
        assert np.allclose(to_numpy(getattr(found, field)) if np.ndim(value) else getattr(found, field), value), field
    assert method.step(found, task.features)[1].probs.shape == (60, 4)


def test_streams_of_images() -> None:
    task = Tasks(rows_as_images)()
    with pytest.raises(MissingInputError, match=r"The method tent needs encoder: pass encoder=\.\.\."):
        Stream("tent", task.text)
    stream = Stream("tent", task.text, batch_size=4, encoder=task.extras["encoder"])
    images = samples(stream.method, task)
    assert len(stream.push(images[:6]).labels) == 4
    with pytest.raises(InputError, match=r"2 images wait, which a state file cannot hold; call flush\(\) first"):
        stream.save("never.safetensors")
    stream.remove_classes([0])
    assert stream.push(images[6:8]).probs.shape == (4, task.k - 1)


def test_streams_of_views(data: Task) -> None:
    stream = Stream("mta", data.text, batch_size=2)
    assert stream.push(np.stack([data.features[:3]] * 6, axis=1)).probs.shape == (2, 9)


@pytest.mark.parametrize("name", PLAIN)
def test_a_stream_goes_on_from_its_file_to_the_last_bit(name: str, data: Task, tmp_path: Path) -> None:
    path = tmp_path / "stream.safetensors"
    stream = Stream(name, data.text[:8], class_names=data.class_names[:8], batch_size=8, max_wait=1.0, clock=Clock())
    stream.push(data.features[:20])
    stream.remove_classes([2])
    stream.save(path)
    again = Stream.load(path, clock=Clock())
    assert [p.name for p in tmp_path.iterdir()] == ["stream.safetensors"]
    assert (again.waiting, again.seen, again.batch_size, again.max_wait) == (4, 16, 8, 1.0)
    assert again.class_names == stream.class_names
    for s in (stream, again):
        s.add_classes(data.text[8:], data.class_names[8:])
    assert np.array_equal(again.push(data.features[20:]).scores, stream.push(data.features[20:]).scores)
    assert np.array_equal(again.flush().scores, stream.flush().scores)
    assert load_state(path)[1].seen == 16  # the state of it is what run_stream resumes from


def test_a_stream_of_torch_comes_back_as_torch(data: Task, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    stream = Stream("tda", torch.asarray(data.text), batch_size=8)
    stream.push(torch.asarray(data.features[:20]))
    stream.save(tmp_path / "a")
    again = Stream.load(tmp_path / "a", torch.zeros(1))
    assert torch.equal(again.push(data.features[20:]).probs, stream.push(data.features[20:]).probs)


def test_a_state_without_a_stream_is_not_loaded_as_one(data: Task, tmp_path: Path) -> None:
    method = moontide.method("tda")
    save_state(tmp_path / "a", method, method.start(data))
    with pytest.raises(FileError, match=r"is a state without a stream; load it by moontide\.streams\.load_state"):
        Stream.load(tmp_path / "a")


@pytest.mark.parametrize("name", [*ONLINE, "moon"])
def test_memory_does_not_grow_with_the_stream(name: str) -> None:
    rng = np.random.default_rng(0)
    stream = Stream(name, rng.normal(size=(4, 64)), batch_size=16)

    def held(pushes: int) -> int:
        for _ in range(pushes):
            stream.push(rng.normal(size=(3, 64)))
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held(200)
        before = held(100)
        assert held(300) < before + 100_000  # 900 samples of 512 bytes would be 460,800
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "'batch_size' must be an integer of at least 1, or None. Got 0 instead"),
        ({"max_wait": 1.0}, "'max_wait' has no effect without 'batch_size'"),
        ({"batch_size": 2, "max_wait": -1.0}, "'max_wait' must be a number of seconds of at least 0"),
        ({"class_names": ["a"]}, "'class_names' must have one name for each of the 2 rows"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((OptionError, InputError), match=sentence):
        Stream("zero_shot", np.eye(2), **options)


def test_class_changes_are_checked() -> None:
    stream, named = Stream("tda", np.eye(2)), Stream("tda", np.eye(2), class_names=["ant", "bee"])
    for change, sentence in {
        lambda: stream.remove_classes([0, 1]): "A stream needs at least one class. Got all 2 to remove",
        lambda: stream.remove_classes([2]): "'classes' must be numbers from 0 to 1, or names. Got 2 instead",
        lambda: named.remove_classes(["be"]): "There is no class 'be'. Did you mean 'bee'",
        lambda: named.add_classes(np.eye(2)): "'add_classes' needs 'class_names'",
        lambda: stream.add_classes(np.eye(2), ["cat", "dog"]): "'add_classes' takes no 'class_names'",
        lambda: stream.add_classes(np.eye(3)): "must have the dimension of the stream, 2. Got 3 instead",
    }.items():
        with pytest.raises(moontide.MoontideError, match=sentence):
            change()
    assert (stream.state.text.shape, named.class_names) == ((2, 2), ("ant", "bee"))


def test_numbers_of_classes_follow_them() -> None:
    old = np.asarray([[3, 0, -1], [1, 2, 3], [0, -1, -1], [2, 3, 0]])  # (K, W)
    fewer = carry(old, np.full((3, 2), -1), np.asarray([3, 1]), 4, 0, "numbers")
    assert fewer.tolist() == [[0, -1], [1, 0], [-1, -1]]
    more = carry(old, np.full((5, 4), -1), np.arange(4), 4, 0, "numbers")
    assert more.tolist() == [[3, 0, -1, -1], [1, 2, 3, -1], [0, -1, -1, -1], [2, 3, 0, -1], [-1, -1, -1, -1]]


def test_shares_without_a_class_are_those_of_the_others() -> None:
    old = np.asarray([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])  # the last is an empty slot
    shares = carry(old, np.zeros((3, 2)), np.asarray([1, 2]), 3, 1, "shares")
    assert shares.tolist() == [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]


def test_a_matrix_of_classes_by_classes_changes_along_both() -> None:
    old = np.asarray([[0.8, 0.2, 0.0], [0.1, 0.9, 0.0], [0.0, 0.5, 0.5]])
    changed = carry(
        old, np.eye(3), np.asarray([2, 0]), 3, 0, "classes"
    )  # one goes, the others change places, one comes
    assert changed.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    more = carry(old, np.eye(4), np.arange(3), 3, 0, "classes")
    assert more.tolist() == [[0.8, 0.2, 0.0, 0.0], [0.1, 0.9, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.0, 1.0]]


def test_the_example_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "streams.md").read_text(encoding="utf-8")
    block = page.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(block, "streams.md", "exec"), names)
    assert names["stream"].seen == 200
    assert len(capsys.readouterr().out.splitlines()) == 192  # the last 8 came by flush


def test_the_default_method_is_tide_and_needs_only_the_text(data: Task) -> None:
    stream = Stream(text=data.text)
    assert stream.method.name == "tide"
    assert np.array_equal(stream.push(data.features).probs, Stream("tide", data.text).push(data.features).probs)
    with pytest.raises(InputError, match=r"'text' is missing.*Stream\(text=anchors\)"):
        Stream(data.text)  # type: ignore[arg-type]
