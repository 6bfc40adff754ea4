"""The image pass on a real Ray with two workers: the store that one process makes, also after a stop and a death."""

from __future__ import annotations

import os
import shutil
import signal
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moontide.store.features import FeatureStore

from .conftest import picture

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")
from moontide.cluster import joined, worker_count  # noqa: E402
from moontide.errors import ResourceError  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.xdist_group("ray")]  # Ray's own warnings

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with joined(None, 2):
        yield


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Forty images in a folder, two files that are none, and an archive with three more."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(40):
        picture(i).save(folder / f"{i:03d}.png")
    for name in ("007x.jpg", "039x.jpg"):
        (folder / name).write_bytes(b"broken")
    with tarfile.open(tmp_path / "more.tar", "w") as archive:
        for i in range(3):
            archive.add(folder / f"{i:03d}.png", f"in/{i}.png")
    return folder


def rows(store: FeatureStore) -> list[int]:
    return [len(arrays["image_features"]) for arrays, _ in store._maps]


def test_the_store_is_that_of_one_process(photos: Path, onnx_folder: Path, tmp_path: Path, run: Run) -> None:
    skipped: dict[str, Any] = {}
    for kind in ("local", "ray"):
        more = ["--engine", "ray", "--workers", "2"] if kind == "ray" else ["--workers", "2"]
        status, out, err = run(
            "encode", photos, tmp_path / "more.tar", "--out", tmp_path / kind, "--encoder", f"onnx:{onnx_folder}",
            "--classes", "cat, dog", "--encode-batch", "4", "--shard-size", "10", "--strict", *more,
        )  # fmt: skip
        assert status == 1  # two were skipped
        skipped[kind] = [line for line in err.splitlines() if line.startswith("skipped")]
        assert "holds 43 images (43 new)" in out
    assert skipped["ray"] == skipped["local"]
    assert [line.split("/")[-1] for line in skipped["ray"]] == [
        "007x.jpg: it is not an image of a known format", "039x.jpg: it is not an image of a known format",
    ]  # fmt: skip
    one, many = (FeatureStore.open(tmp_path / kind) for kind in ("local", "ray"))
    many.verify()
    assert (many.ids, many.origin, many.class_names) == (one.ids, one.origin, one.class_names)
    assert rows(many) == rows(one)
    np.testing.assert_allclose(many.take(range(43)), one.take(range(43)), atol=1e-6)


def test_it_goes_on_with_a_store_of_either(photos: Path, onnx_folder: Path, tmp_path: Path, run: Run) -> None:
    command = ["--out", tmp_path / "store", "--encoder", f"onnx:{onnx_folder}", "--encode-batch", "4"]
    run("encode", *sorted(photos.glob("00*.png")), *command)
    status, out, _ = run("encode", photos, *command, "--engine", "ray")
    assert (status, "holds 40 images (30 new)" in out) == (0, True)
    assert "holds 40 images (0 new)" in run("encode", photos, *command, "--engine", "ray")[1]  # nothing to do
    store = FeatureStore.open(tmp_path / "store")
    assert sorted(store.ids) == [f"{photos}/{i:03d}.png" for i in range(40)]


def below(pid: int) -> list[int]:
    """Return the processes that a process started, and those that they did."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return children + [p for child in children for p in below(child)]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="workers are looked up in /proc")
def test_a_worker_that_dies_is_replaced(
    photos: Path, onnx_folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, killed = FeatureStore.append, []

    def kill_one(self: FeatureStore, *given: Any) -> FeatureStore:
        if not killed:
            encoders = [p for p in below(os.getpid()) if b"Map" in Path(f"/proc/{p}/cmdline").read_bytes()]
            assert len(encoders) == 2
            os.kill(encoders[0], signal.SIGKILL)
            killed.append(encoders[0])
        return append(self, *given)

    monkeypatch.setattr(FeatureStore, "append", kill_one)
    run(
        "encode", photos, "--out", tmp_path / "store", "--encoder", f"onnx:{onnx_folder}", "--encode-batch", "1",
        "--shard-size", "4", "--engine", "ray", "--workers", "2",
    )  # fmt: skip
    assert killed
    assert FeatureStore.open(tmp_path / "store").ids == [f"{photos}/{i:03d}.png" for i in range(40)]


def test_what_ray_cannot_do_is_refused(photos: Path, onnx_folder: Path, tmp_path: Path, run: Run) -> None:
    command = ["encode", photos, "--out", tmp_path / "store", "--encoder", f"onnx:{onnx_folder}"]
    assert "'--address' has no effect without '--engine ray'" in run(*command, "--address", "auto")[2]
    assert "has 2 CPUs, and each of 9 workers" in run(*command, "--engine", "ray", "--workers", "9")[2]
    with pytest.raises(ResourceError, match="has 0 GPUs"):
        worker_count(None, "cuda")
    shutil.rmtree(tmp_path / "store")
