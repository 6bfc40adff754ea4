"""Many shards in one process: the answer of the method on all rows, and of a run that was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from moontide import method
from moontide.core.graph import Graph, nearest_neighbours
from moontide.core.rows import Rows
from moontide.engine import run
from moontide.engine.partition import balanced_groups
from moontide.engine.run import ShardTask, Workers, adapt_shards
from moontide.errors import FileError, InputError, OptionError, ResourceError
from moontide.methods.zero_shot import ZeroShot
from moontide.simulate import simulate
from moontide.store.disk import writing
from moontide.store.shards import expand, look, relative_names
from moontide.store.tensors import read_tensors, write_tensors

N, K = 1200, 30
DATA = simulate(N, K, dim=32, effective_classes=8, seed=3)


def joined_graph(shards: int) -> Graph:
    """Return the graph of all rows with neighbours inside the shards only."""
    parts = np.array_split(DATA.features, shards)
    starts = np.cumsum([0, *map(len, parts)])
    found = [nearest_neighbours(part, 3) for part in parts]
    neighbours = [graph.neighbours + start for graph, start in zip(found, starts, strict=False)]
    return Graph(np.concatenate(neighbours), np.concatenate([graph.weights for graph in found]))


@pytest.mark.parametrize("name", ["moon", "stata", "tide", "zero_shot"])
@pytest.mark.parametrize("resident", [True, False])
def test_shards_give_what_all_rows_give(
    name: str, resident: bool, tmp_path: Path, cut: Any, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moontide.engine.worker.BLOCK_ENTRIES", 2**10)
    monkeypatch.setattr("moontide.engine.worker.PROCESS", 0)
    lines: list[str] = []
    budget = None if resident else 450_000
    pattern = cut(tmp_path / "in", DATA.features, 5)
    found = adapt_shards(
        ShardTask(pattern, DATA.text),
        method(name),
        str(tmp_path / "out"),
        workers=Workers(memory=budget),
        report=lines.append,
    )
    assert ("all of its shards in memory" if resident else "one shard at a time") in lines[0]
    whole = method(name).fit_predict(DATA.features, DATA.text, graph=joined_graph(5))
    got = answers(tmp_path / "out")
    np.testing.assert_array_equal(got["label"], whole.labels)
    np.testing.assert_array_equal(got["zero_shot_label"], whole.zero_shot_labels)
    np.testing.assert_allclose(got["confidence"], whole.confidence, atol=1e-4)
    assert ("unknown" in got) == (whole.unknown is not None)
    if whole.unknown is not None:
        np.testing.assert_allclose(got["unknown"], whole.unknown, atol=1e-4)
    assert (found.n, found.changed) == (N, int(whole.changed.sum()))
    np.testing.assert_array_equal(found.counts, np.bincount(whole.labels, minlength=K))
    assert found.converged == whole.converged
    assert not (tmp_path / "out" / "checkpoint").exists()


@pytest.mark.parametrize("known", [("class_prior",), ("negatives",), ("class_prior", "negatives")])
def test_class_balance_and_negative_names_are_used_on_shards(
    known: tuple[str, ...], tmp_path: Path, cut: Any, answers: Any
) -> None:
    rng = np.random.default_rng(0)
    every = {"class_prior": rng.uniform(1, 3, K), "negatives": DATA.text[:3] + rng.normal(size=(3, 32)) / 16}
    given = {name: every[name] for name in known}
    adapt_shards(
        ShardTask(cut(tmp_path / "in", DATA.features, 4), DATA.text, **given), method("tide"), str(tmp_path / "out")
    )
    whole = method("tide").fit_predict(DATA.features, DATA.text, graph=joined_graph(4), **given)
    got = answers(tmp_path / "out")
    np.testing.assert_array_equal(got["label"], whole.labels)
    np.testing.assert_allclose(got["confidence"], whole.confidence, atol=1e-4)
    np.testing.assert_allclose(got["unknown"], whole.unknown, atol=1e-4)
    with pytest.raises(InputError, match="moon cannot use"):
        adapt_shards(ShardTask(str(tmp_path / "in"), DATA.text, **given), method("moon"), str(tmp_path / "no"))


def test_negative_names_of_another_run_are_not_those_of_a_checkpoint(
    tmp_path: Path, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = cut(tmp_path / "in", DATA.features, 2)
    with monkeypatch.context() as patch:
        patch.setattr(run, "remove", lambda folder: None)  # as a run leaves it that is stopped at the end
        adapt_shards(ShardTask(pattern, DATA.text, negatives=DATA.text[:2]), method("tide"), str(tmp_path / "out"))
    with pytest.raises(FileError, match="with other shards, text, options or version"):
        adapt_shards(ShardTask(pattern, DATA.text, negatives=DATA.text[:3]), method("tide"), str(tmp_path / "out"))


class Scored(Rows):
    """Zero-shot on shards with a score for samples of none of the classes."""

    COLUMNS = (*Rows.COLUMNS, "unknown")

    @property
    def unknown(self) -> Any:
        return -(self.f @ self.text.T).max(axis=1)


@pytest.mark.parametrize("graph", ["local", "global"])
def test_a_score_for_the_unknown_comes_with_its_row(
    graph: str, tmp_path: Path, cut: Any, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ZeroShot, "rows_type", Scored)
    pattern = cut(tmp_path / "in", DATA.features, 4)
    adapt_shards(ShardTask(pattern, DATA.text), method("zero_shot"), str(tmp_path / "out"), graph=graph)
    found = answers(tmp_path / "out")["unknown"]
    np.testing.assert_allclose(found, -(DATA.features @ DATA.text.T).max(axis=1), atol=1e-5)


@pytest.mark.parametrize("name", ["moon", "stata"])
def test_the_number_of_shards_does_not_matter_without_a_graph(
    name: str, tmp_path: Path, cut: Any, answers: Any
) -> None:
    chosen = method(name, laplacian_weight=0.0)
    got = []
    for shards in (1, 3, 8):
        task = ShardTask(cut(tmp_path / f"in{shards}", DATA.features, shards), DATA.text)
        assert adapt_shards(task, chosen, str(tmp_path / f"out{shards}")).recall is None
        got.append(answers(tmp_path / f"out{shards}"))
    for other in got[1:]:
        np.testing.assert_array_equal(other["label"], got[0]["label"])
        np.testing.assert_allclose(other["confidence"], got[0]["confidence"], atol=1e-4)


@pytest.mark.parametrize("name", ["moon", "tide"])
def test_a_global_graph_finds_neighbours_across_shards(name: str, tmp_path: Path, cut: Any, answers: Any) -> None:
    shuffled = np.random.default_rng(0).permutation(N)
    pattern = cut(tmp_path / "in", DATA.features[shuffled], 6)
    inside = adapt_shards(ShardTask(pattern, DATA.text), method(name), str(tmp_path / "a"))
    across = adapt_shards(ShardTask(pattern, DATA.text), method(name), str(tmp_path / "b"), graph="global")
    assert inside.recall is not None
    assert across.recall is not None
    assert inside.recall < 0.35  # a neighbour is in the same shard once in six
    assert across.recall > inside.recall + 0.3
    whole = method(name).fit_predict(DATA.features[shuffled], DATA.text)
    got = answers(tmp_path / "b")
    assert (got["label"] == whole.labels).mean() > 0.98
    np.testing.assert_array_equal(got["zero_shot_label"], whole.zero_shot_labels)  # rows are back in their order
    np.testing.assert_array_equal(got["id"], np.concatenate([np.arange(200)] * 6))


def test_recall_is_what_counting_gives(tmp_path: Path, cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.engine.partition.SAMPLE", N)  # all rows
    found = adapt_shards(
        ShardTask(cut(tmp_path / "in", DATA.features, 4), DATA.text), method("moon"), str(tmp_path / "out")
    )
    exact, inside = nearest_neighbours(DATA.features, 3).neighbours, joined_graph(4).neighbours
    counted = (inside[:, :, None] == exact[:, None, :]).any(axis=2).mean()
    assert found.recall == pytest.approx(counted, abs=1e-3)


@pytest.mark.parametrize(("name", "atol"), [("moon", 5e-5), ("tide", 1e-4)])
def test_assignments_in_16_bits_change_little(
    name: str, atol: float, tmp_path: Path, cut: Any, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern = cut(tmp_path / "in", DATA.features, 3)
    adapt_shards(ShardTask(pattern, DATA.text), method(name), str(tmp_path / "full"))
    monkeypatch.setattr(run, "LARGE", 0)
    adapt_shards(ShardTask(pattern, DATA.text), method(name), str(tmp_path / "half"))
    full, half = answers(tmp_path / "full"), answers(tmp_path / "half")
    np.testing.assert_array_equal(half["label"], full["label"])
    np.testing.assert_allclose(half["confidence"], full["confidence"], atol=atol)
    assert (half["confidence"] != full["confidence"]).any()
    if name == "tide":  # stored as the fourth root
        return
    steps = half["confidence"] * 65535
    np.testing.assert_allclose(steps, steps.round(), atol=0.01)  # stored as multiples of 1 / 65535


# check, sample, nearest and first pass come before the iterations, and with tide one more; its calibration after
@pytest.mark.parametrize(("name", "before", "last"), [("moon", 4, 8), ("tide", 5, 8), ("tide", 5, 14)])
def test_a_killed_driver_goes_on_where_it_was(
    name: str, before: int, last: int, tmp_path: Path, cut: Any, answers: Any
) -> None:
    pattern = cut(tmp_path / "in", DATA.features, 4)
    np.save(tmp_path / "text.npy", DATA.text)
    command = [sys.executable, "-c", SLOW, pattern, str(tmp_path / "text.npy"), str(tmp_path / "out"), name]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    calls = tmp_path / "out" / "checkpoint"
    while not (calls / f"call-{last:04d}.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = len(list(calls.glob("call-*")))
    numbers = {int(read_tensors(str(path), "number")["number"]) for path in calls.glob("shard-*")}
    steps = min(done - before, method(name).plan().steps)
    assert numbers <= {before + steps, done + 1}  # every shard is after this iteration or the next
    lines: list[str] = []
    adapt_shards(ShardTask(pattern, DATA.text), method(name), str(tmp_path / "out"), report=lines.append)
    assert lines[0] == f"going on from {tmp_path / 'out' / 'checkpoint'}"
    assert sum("(from the checkpoint)" in line for line in lines) == steps
    adapt_shards(ShardTask(pattern, DATA.text), method(name), str(tmp_path / "straight"))
    again, straight = answers(tmp_path / "out"), answers(tmp_path / "straight")
    for column in straight:
        np.testing.assert_array_equal(again[column], straight[column])


SLOW = """
import sys, time, numpy as np
from moontide import method
from moontide.engine.run import ShardTask, Workers, adapt_shards
from moontide.methods.zero_shot import ZeroShot
from moontide.engine.worker import Worker
ask = Worker._ask
Worker._ask = lambda *given: (time.sleep(0.02), ask(*given))[1]
adapt_shards(ShardTask(sys.argv[1], np.load(sys.argv[2])), method(sys.argv[4]), sys.argv[3])
"""


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, cut: Any) -> None:
    pattern = cut(tmp_path / "in", DATA.features, 2)
    folder = tmp_path / "out" / "checkpoint"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"method": "another"}))
    with pytest.raises(FileError, match="with other shards, text, options or version"):
        adapt_shards(ShardTask(pattern, DATA.text), method("moon"), str(tmp_path / "out"))


def test_shards_in_object_storage(answers: Any, tmp_path: Path) -> None:
    for i, rows in enumerate(np.array_split(DATA.features, 3)):
        with fsspec.open(f"memory://engine/in/{i}.npy", "wb") as handle:
            np.save(handle, rows)
    found = adapt_shards(ShardTask("memory://engine/in/*.npy", DATA.text), method("moon"), "memory://engine/out")
    assert found.files == tuple(f"memory://engine/out/{i}.parquet" for i in range(3))
    fsspec.filesystem("memory").get("/engine/out/", str(tmp_path / "copy"), recursive=True)
    whole = method("moon").fit_predict(DATA.features, DATA.text, graph=joined_graph(3))
    np.testing.assert_array_equal(answers(next((tmp_path / "copy").rglob("0.parquet")).parent)["label"], whole.labels)


def test_what_cannot_run_on_shards_is_refused(tmp_path: Path, cut: Any) -> None:
    pattern = cut(tmp_path / "in", DATA.features, 2)
    refused = [method("zlap"), method("stata", faithful=True), method("moon", precision="tf32")]
    for chosen in refused:
        with pytest.raises(OptionError, match="shards"):
            adapt_shards(ShardTask(pattern, DATA.text), chosen, str(tmp_path / "out"))
    with pytest.raises(ResourceError, match="largest shard, of 600 rows"):
        adapt_shards(ShardTask(pattern, DATA.text), method("moon"), str(tmp_path / "out"), workers=Workers(memory=1000))
    with pytest.raises(FileError, match="names of the shards"):
        adapt_shards(ShardTask([str(tmp_path / "out" / "a.parquet")], DATA.text), method("moon"), str(tmp_path / "out"))


def test_tensors_are_what_the_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays = {
        "z": np.arange(6, dtype=np.float16).reshape(2, 3),
        "n": np.asarray(3),
        "none": np.empty((0, 2), np.float32),
    }
    write_tensors(str(tmp_path / "a.safetensors"), arrays)
    for read in (load_file(tmp_path / "a.safetensors"), read_tensors(str(tmp_path / "a.safetensors"))):
        assert {name: (x.dtype, x.shape, x.tolist()) for name, x in read.items()} == {
            name: (x.dtype, x.shape, x.tolist()) for name, x in arrays.items()
        }


def test_names_of_outputs_follow_folders_and_never_clash() -> None:
    assert relative_names(["/x/a.npy"]) == ["a"]
    assert relative_names(["s3://b/p/a/0.npy", "s3://b/p/b/0.npy"]) == ["a/0", "b/0"]
    with pytest.raises(FileError, match="named a, apart from their extension"):
        relative_names(["x/a.npy", "x/a.parquet"])


def test_a_folder_of_a_feature_store_is_its_image_shards() -> None:
    for name in ("text", "00000", "00001"):
        write_tensors(f"memory://store/{name}.safetensors", {"image_features": np.eye(2, dtype=np.float16)})
    with writing("memory://store/manifest.json") as handle:
        handle.write(b"{}")
    assert expand("memory://store") == ["memory:///store/00000.safetensors", "memory:///store/00001.safetensors"]
    assert look("memory://store/00000.safetensors").rows == 2


def test_groups_are_near_and_of_about_equal_size() -> None:
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(200, 8)).astype(np.float32)
    sizes = rng.integers(1, 20, size=200)
    group = balanced_groups(centres, sizes, 7)
    total = np.bincount(group, sizes, minlength=7)
    assert total.min() > 0.7 * total.mean()
    assert total.max() < 1.3 * total.mean()
    spread = sum(((centres[group == g] - centres[group == g].mean(axis=0)) ** 2).sum() for g in range(7))
    assert spread < 0.9 * ((centres - centres.mean(axis=0)) ** 2).sum()
