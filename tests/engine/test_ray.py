"""The same on a real Ray with two workers: the labels of one process, also after a worker or the driver is killed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moontide import method
from moontide.cluster import joined
from moontide.engine.run import ShardTask, Workers, adapt_shards
from moontide.errors import FileError
from moontide.simulate import simulate

ray = pytest.importorskip("ray")
from moontide.engine import ray as engine  # noqa: E402

MOON = method("moon", neighbours=1)  # the search for neighbours is most of the time here
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]  # Ray's own warnings


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with joined(None, 2):
        yield


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, cut: Any, answers: Any) -> Any:
    """40 000 rows and 100 classes in 8 shards, and what one process says of them."""
    folder = tmp_path_factory.mktemp("large")
    data = simulate(40_000, 100, dim=32, effective_classes=60, seed=3)
    pattern = cut(folder / "in", data.features.astype(np.float16), 8)
    adapt_shards(ShardTask(pattern, data.text), MOON, str(folder / "out"))
    return pattern, data.text, answers(folder / "out")


def same(got: Any, expected: Any) -> None:
    for column in ("id", "label", "zero_shot_label"):
        np.testing.assert_array_equal(got[column], expected[column])
    for column in expected.keys() & {"confidence", "unknown"}:
        np.testing.assert_allclose(got[column], expected[column], atol=1e-4)


def test_two_workers_give_the_labels_of_one_process(
    large: Any, tmp_path: Path, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, text, expected = large
    monkeypatch.setattr(engine, "PATIENCE", 0.002)
    shown: list[tuple[int, int]] = []
    found = adapt_shards(
        ShardTask(pattern, text),
        MOON,
        str(tmp_path),
        workers=Workers(engine="ray", count=2),
        progress=lambda *given: shown.append(given),
    )
    assert (found.n, found.replaced) == (40_000, 0)
    assert shown[-1] == (17 * 8, 17 * 8)  # calls x shards
    assert {done % 4 for done, _ in shown} == {
        0,
        1,
        2,
        3,
    }  # reported by shard, not when a worker has done its four
    same(answers(tmp_path), expected)


def test_a_worker_killed_in_iteration_3_is_replaced(
    large: Any, tmp_path: Path, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, text, expected = large
    steps = []
    run = engine.Ray.run

    def kill_one(self: Any, number: int, name: str, *given: Any) -> Any:
        steps.extend([number] * (name == "step"))
        if name == "step" and len(steps) == 3:
            threading.Timer(0.02, ray.kill, [self.workers[1]]).start()  # while it computes
        return run(self, number, name, *given)

    monkeypatch.setattr(engine.Ray, "run", kill_one)
    found = adapt_shards(ShardTask(pattern, text), MOON, str(tmp_path), workers=Workers(engine="ray", count=2))
    assert found.replaced == 1
    assert len(steps) == 11
    same(answers(tmp_path), expected)


def test_a_worker_that_could_not_start_is_replaced(
    tmp_path: Path, cut: Any, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = simulate(600, 20, dim=32, effective_classes=6, seed=1)
    pattern = cut(tmp_path / "in", data.features, 2)
    start, broken = engine.Ray._start, [{"nsight": {"no-such-option": "1"}}]  # of a profiler

    def start_one(self: Any, share: tuple[int, ...]) -> Any:
        if not broken:
            return start(self, share)
        return self._actor.options(runtime_env=broken.pop()).remote(self._job, share, self._resident)

    monkeypatch.setattr(engine.Ray, "_start", start_one)
    found = adapt_shards(
        ShardTask(pattern, data.text),
        method("zero_shot"),
        str(tmp_path / "ray"),
        workers=Workers(engine="ray", count=2),
    )
    assert found.replaced == 1
    adapt_shards(ShardTask(pattern, data.text), method("zero_shot"), str(tmp_path / "local"))
    same(answers(tmp_path / "ray"), answers(tmp_path / "local"))


def test_a_killed_driver_goes_on_where_it_was(tmp_path: Path, cut: Any, answers: Any) -> None:
    data = simulate(600, 20, dim=32, effective_classes=6, seed=1)
    pattern = cut(tmp_path / "in", data.features, 4)
    np.save(tmp_path / "text.npy", data.text)
    given = [pattern, str(tmp_path / "text.npy"), str(tmp_path / "out"), ray.get_runtime_context().gcs_address]
    process = subprocess.Popen([sys.executable, "-c", DRIVER, *given], stderr=subprocess.DEVNULL)
    calls = tmp_path / "out" / "checkpoint"
    while not (calls / "call-0008.safetensors").exists():  # check, sample, nearest, first pass and four iterations
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    lines: list[str] = []
    for folder in ("out", "straight"):
        adapt_shards(
            ShardTask(pattern, data.text),
            MOON,
            str(tmp_path / folder),
            workers=Workers(engine="ray", count=2),
            report=lines.append,
        )
    assert lines[0] == f"going on from {calls}"
    assert sum("(from the checkpoint)" in line for line in lines) >= 4
    again, straight = answers(tmp_path / "out"), answers(tmp_path / "straight")
    for column in straight:
        np.testing.assert_array_equal(again[column], straight[column])


DRIVER = """
import sys, time, numpy as np
from moontide import method
from moontide.engine import ray
from moontide.engine.run import ShardTask, Workers, adapt_shards
run = ray.Ray.run
ray.Ray.run = lambda *given: (run(*given), time.sleep(0.1))[0]
pattern, text, out, address = sys.argv[1:]
moon = method("moon", neighbours=1)
adapt_shards(ShardTask(pattern, np.load(text)), moon, out, workers=Workers("ray", address, 2))
"""


@pytest.mark.parametrize(("name", "graph"), [("stata", "global"), ("tide", "global"), ("zero_shot", "local")])
def test_the_other_methods_and_the_global_graph(name: str, graph: str, tmp_path: Path, cut: Any, answers: Any) -> None:
    data = simulate(600, 20, dim=32, effective_classes=6, seed=1)
    pattern = cut(tmp_path / "in", data.features, 5)
    for kind, workers in (("local", None), ("ray", 2)):
        adapt_shards(
            ShardTask(pattern, data.text),
            method(name),
            str(tmp_path / kind),
            workers=Workers(engine=kind, count=workers),
            graph=graph,
        )
    same(answers(tmp_path / "ray"), answers(tmp_path / "local"))


def test_an_error_of_a_worker_is_a_sentence_here(tmp_path: Path, cut: Any) -> None:
    data = simulate(60, 5, dim=16, seed=1)
    pattern = cut(tmp_path / "in", data.features, 2)
    rows = np.load(tmp_path / "in" / "001.npy")
    rows[[2, 5]] = np.nan
    np.save(tmp_path / "in" / "001.npy", rows)
    with pytest.raises(FileError, match=r"1 of 2 shards cannot be used: .*001.npy has NaN.* rows 2, 5"):
        adapt_shards(
            ShardTask(pattern, data.text), method("moon"), str(tmp_path / "out"), workers=Workers(engine="ray", count=2)
        )
