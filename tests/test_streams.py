"""Streams: cut and resumed to the last bit, states in files, and the refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import moontide
from moontide.checks import Tasks
from moontide.checks.tasks import mapped, single
from moontide.core.arrays import is_torch_array
from moontide.errors import FileError, InputError, MissingInputError, OptionError
from moontide.protocols import Method, OnlineMethod, PerBatch, State, as_online
from moontide.registry import method_type
from moontide.streams import load_state, run_stream, save_state
from moontide.types import Result, Task

SIZE = 8
ONLINE = [name for name in moontide.method_names() if issubclass(method_type(name), OnlineMethod)]
CASES = [moontide.method(name) for name in [*ONLINE, "moon", "mta"] if method_type(name).needs <= {"views"}]
CASES += [moontide.method(name, access="sample") for name in ("tda", "dmn", "oga")]
CLOTHING = Path(__file__).parents[2] / "shared" / "features" / "clothing_tiny.npz"
KINDS = {"numpy": np.asarray, "torch": torch.asarray}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("method", CASES, ids=lambda m: f"{m.name}-{getattr(m, 'access', '')}")
def test_a_stream_cut_anywhere_goes_on_as_if_it_was_not(method: Method, dtype: str, kind: str, tmp_path: Path) -> None:
    made = Tasks()(n=44)
    features, text, views = (KINDS[kind](x.astype(dtype)) for x in (made.features, made.text, made.extras["views"]))

    def part(start: int, stop: int) -> Task:
        return Task(features[start:stop], text, extras={"views": views[start:stop]})

    end, whole = run_stream(method, part(0, 44), SIZE)
    for cut in range(SIZE, 44, SIZE):
        state, before = run_stream(method, part(0, cut), SIZE)
        save_state(tmp_path / "state", method, state)
        again, state = load_state(tmp_path / "state", ref=text)
        final, after = run_stream(again, part(cut, 44), SIZE, state=state)
        both = Result.concatenate([before, after])
        assert is_torch_array(both.probs) == (kind == "torch")
        assert_equal(both.scores, whole.scores)
        assert_equal(both.probs, whole.probs)
        for field in dataclasses.fields(end):
            assert_equal(getattr(final, field.name), getattr(end, field.name))


def assert_equal(found: Any, wanted: Any) -> None:
    """To the last bit, and of one type."""
    assert type(found) is type(wanted)
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.skipif(not CLOTHING.exists(), reason="needs ../shared/features/clothing_tiny.npz")
@pytest.mark.parametrize("name", ["tda", "dmn", "oga", "moon_samplewise"])
def test_float32_is_near_float64_in_another_embedding_space(name: str) -> None:
    data = np.load(CLOTHING, allow_pickle=False)
    features, text, scale = data["image_features"], data["text_features"], 1 / float(data["temperature"])
    low, full = (
        run_stream(moontide.method(name), Task(features.astype(dtype), text.astype(dtype), scale), 64)[1]
        for dtype in (np.float32, np.float64)
    )
    np.testing.assert_allclose(low.probs, full.probs, atol=1e-3)


def test_a_stream_is_its_steps() -> None:
    task, method, calls = single(Tasks()(n=20)), moontide.method("tda"), []
    assert isinstance(method, OnlineMethod)
    state, result = run_stream(method, task, 8, progress=lambda *done: calls.append(done))
    by_hand, results = method.start(task), []
    for start in (0, 8, 16):
        by_hand, part = method.advance(by_hand, task.features[start : start + 8])
        results.append(part)
    np.testing.assert_array_equal(result.probs, Result.concatenate(results).probs)
    assert state.seen == 20
    assert calls == [(8, 20), (16, 20), (20, 20)]


def test_a_batch_method_labels_every_batch_on_its_own() -> None:
    task, moon = Tasks()(n=20), moontide.method("moon")
    wanted = Result.concatenate([moon.fit_predict(batch) for batch in task.batches(8)])
    np.testing.assert_allclose(run_stream(moon, task, 8)[1].probs, wanted.probs, rtol=1e-9)


def test_views_are_streamed_with_their_images() -> None:
    task, mta = Tasks()(n=10), moontide.method("mta")
    np.testing.assert_allclose(run_stream(mta, task, 4)[1].scores, mta.fit_predict(task).scores, rtol=1e-9)


def test_drop_last() -> None:
    task, method = Tasks()(n=20), moontide.method("tda")
    state, result = run_stream(method, task, 8, drop_last=True)
    assert (state.seen, result.probs.shape[0]) == (16, 16)
    with pytest.raises(InputError, match="'drop_last' leaves nothing of 20 samples in batches of 64"):
        run_stream(method, task, 64, drop_last=True)


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_size_that_is_none(size: Any) -> None:
    with pytest.raises(OptionError, match="'batch_size' must be an integer of at least 1"):
        run_stream(moontide.method("tda"), Tasks()(), size)


def test_what_the_method_needs_is_asked_for_before_the_stream() -> None:
    with pytest.raises(MissingInputError, match="mta needs augmented views"):
        run_stream(moontide.method("mta"), Task(np.eye(2), np.eye(2)), 1)


def test_a_state_of_other_classes_is_refused() -> None:
    task, method = Tasks()(), moontide.method("tda")
    state, _ = run_stream(method, task, SIZE)
    with pytest.raises(InputError, match=r"'text_features' must be those .* Got shape \(3, 32\) instead of \(7, 32\)"):
        run_stream(method, Tasks()(k=3), SIZE, state=state)
    with pytest.raises(InputError, match=r"'text_features' must be those .* differ in values"):
        run_stream(method, dataclasses.replace(task, text=task.text[::-1]), SIZE, state=state)
    with pytest.raises(InputError, match=r"'logit_scale' must be the one of the state, 100\. Got 50 instead"):
        run_stream(method, dataclasses.replace(task, logit_scale=50.0), SIZE, state=state)
    run_stream(method, single(task), SIZE, state=state)  # the same classes in another precision


def test_a_state_of_another_method_is_refused(tmp_path: Path) -> None:
    state, _ = run_stream(moontide.method("dmn"), Tasks()(), SIZE)
    for refused in (
        lambda: run_stream(moontide.method("tda"), Tasks()(), SIZE, state=state),
        lambda: save_state(tmp_path / "a", moontide.method("tda"), state),
    ):
        with pytest.raises(InputError, match=r"'state' must come from tda, as a TDAState\. Got a DMNState instead"):
            refused()
    assert not list(tmp_path.iterdir())


def test_options_come_back(tmp_path: Path) -> None:
    method = moontide.method("moon", kappa_cap=float("inf"), beta="soft", neighbours=5, temper=0.1 + 0.2)
    state, _ = run_stream(method, Tasks()(), SIZE)
    save_state(tmp_path / "a", method, state)
    assert load_state(tmp_path / "a")[0] == PerBatch(method)


def test_a_state_goes_from_torch_to_numpy(tmp_path: Path) -> None:
    task, method = single(Tasks()()), moontide.method("oga")
    state, _ = run_stream(method, mapped(task, torch.asarray), SIZE)
    save_state(tmp_path / "a", method, state)
    loaded = load_state(tmp_path / "a")[1]
    for field in dataclasses.fields(loaded):
        value = getattr(loaded, field.name)
        assert isinstance(value, np.ndarray | float | int)
        np.testing.assert_array_equal(value, np.asarray(getattr(state, field.name)))


def test_a_loaded_state_is_not_bound_to_its_file(tmp_path: Path) -> None:
    save_state(tmp_path / "a", tda := moontide.method("tda"), as_online(tda).start(Tasks()()))
    _, state = load_state(tmp_path / "a")
    (tmp_path / "a").unlink()
    assert state.text.flags.writeable
    assert state.text.flags.owndata


def test_live_fields_are_handed_in_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True)
    class WithEncoder(State):
        encoder: Callable[[Any], Any] = dataclasses.field(metadata={"live": True})

    tda = moontide.method("tda")
    monkeypatch.setattr(type(tda), "state_type", WithEncoder)
    save_state(tmp_path / "a", tda, WithEncoder(np.eye(2), 100.0, 3, encoder=len))
    _, state = load_state(tmp_path / "a", encoder=abs)
    assert (state.encoder, state.seen) == (abs, 3)
    with pytest.raises(InputError, match=r"A state of tda needs besides its file: encoder=\.\.\.\. Got \[\] instead"):
        load_state(tmp_path / "a")


def saved(path: Path, **changes: Any) -> Path:
    """Write a state of TDA whose metadata and arrays are changed; None leaves one out."""
    arrays = {"text": np.eye(2), "logit_scale": np.asarray(100.0), "seen": np.asarray(0)}
    start = moontide.method("tda").start(Task(np.eye(2), np.eye(2)))
    arrays = {f.name: np.asarray(getattr(start, f.name)) for f in dataclasses.fields(start)}
    metadata = {"moontide": "9.9.9", "method": "tda", "options": "{}"}
    for name, value in changes.items():
        (metadata if name in metadata else arrays)[name] = value
    kept = [{name: value for name, value in part.items() if value is not None} for part in (arrays, metadata)]
    save_file(kept[0], path, kept[1])
    return path


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": None}, "is not a state written by moontide"),
        ({"seen": None}, r"a state of tda by moontide 9.9.9, lacks \['seen'\]; this is moontide"),
        ({"age": np.zeros(1)}, r"has the unknown \['age'\].* Start the stream again, or use that version"),
        ({"method": "tdda"}, "which cannot be used here: There is no method 'tdda'. Did you mean 'tda'"),
        (
            {"method": "moon_stream"},
            "which cannot be used here: There is no method 'moon_stream' any more; use 'tide', which replaces it",
        ),
        ({"options": json.dumps({"mood": 3})}, "There is no option of tda 'mood'"),
        ({"options": json.dumps({"access": "none"})}, "The 'access' option of tda must be"),
        ({"options": "{"}, "which cannot be used here"),
        ({"options": "[1]"}, "which cannot be used here"),
    ],
)
def test_files_of_other_versions_and_programs(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    load_state(saved(tmp_path / "good"))
    with pytest.raises(FileError, match=sentence):
        load_state(saved(tmp_path / "bad", **changes))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole").read_bytes()
    for name, content in {
        "empty": b"",
        "cut": whole[:-8],
        "text": b"no state at all, only words",
        "head": whole[:40],
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=f"{name} cannot be read; it is damaged, truncated or not a state file"):
            load_state(tmp_path / name)
    with pytest.raises(FileError, match=r"There is no file .*none"):
        load_state(tmp_path / "none")
    with pytest.raises(FileError, match="is a folder; pass a file"):
        load_state(tmp_path)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    tda = moontide.method("tda")
    state = as_online(tda).start(Tasks()())
    with pytest.raises(FileError, match="cannot be written"):
        save_state(tmp_path / "no folder" / "a", tda, state)
    (tmp_path / "a").mkdir()
    with pytest.raises(FileError, match="cannot be written"):
        save_state(tmp_path / "a", tda, state)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
