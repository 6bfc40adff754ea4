"""A store is an input like any other: every command takes it, from any folder, with no option repeated."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from moontide.classify import located
from moontide.encoders import encoder
from moontide.encoders.hf import HF
from moontide.store.features import FeatureStore
from moontide.store.files import read_task

from .conftest import picture

Run = Callable[..., tuple[int, str, str]]
CLASSES = "cat, dog, bird"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    for i in range(12):
        (folder / ["cat", "dog", "bird"][i % 3]).mkdir(parents=True, exist_ok=True)
        picture(i, (50 + i, 40)).save(folder / ["cat", "dog", "bird"][i % 3] / f"{i:02d}.png")
    return folder


@pytest.fixture
def store(photos: Path, siglip_folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store by a model with a logit scale of its own, which was named by a path relative to another folder."""
    monkeypatch.chdir(siglip_folder.parent)
    status, _, err = run(
        "encode", photos, "--out", tmp_path / "store", "--encoder", f"./{siglip_folder.name}", "--classes", CLASSES
    )
    assert status == 0, err
    monkeypatch.chdir(tmp_path)
    return tmp_path / "store"


def labels_of(text: str) -> list[str]:
    return [row["label"] for row in csv.DictReader(io.StringIO(text))]


def test_it_says_what_made_it_and_what_makes_it_again(store: Path, siglip_folder: Path) -> None:
    held = json.loads((store / "manifest.json").read_text())["origin"]
    assert held["typed"] == f"./{siglip_folder.name}"
    assert held["spec"] == f"hf:{siglip_folder}"
    assert held["precision"] == encoder(str(siglip_folder)).precision
    assert held["decoding"] == "exact"
    assert held["prompts"] == ["a photo of a {}."]
    assert held["logit_scale"] == pytest.approx(np.exp(4.7), rel=1e-5)
    assert encoder(held["spec"]).preprocessing == held["preprocessing"]


def test_every_command_takes_it_from_any_folder(store: Path, run: Run) -> None:
    status, out, _ = run("classify", store)
    assert status == 0
    labels = labels_of(out)
    assert len(labels) == 12
    status, out, err = run("adapt", store, "--out", "adapted.csv")
    assert status == 0, err
    with open("adapted.csv") as handle:
        rows = list(csv.DictReader(handle))
    assert [row["class_name"] for row in rows] == labels
    assert [row["id"] for row in rows] == FeatureStore.open(store).ids
    status, out, err = run("stream", store, "--batch-size", "4")
    assert (status, "changed" in out) == (0, True), err
    status, out, err = run("compare", store, "--methods", "zero_shot,tide", "--json")
    assert status == 0, err
    assert {one["status"] for one in json.loads(out)} == {"ran"}


def test_its_images_are_found_from_any_folder(
    photos: Path, onnx_folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "more.tar", "w") as archive:
        archive.add(photos / "cat" / "00.png", "00.png")
    monkeypatch.chdir(tmp_path)
    given = ("--encoder", f"onnx:{onnx_folder}", "--classes", CLASSES)
    assert run("encode", "photos", "more.tar", "--out", "store", *given)[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    images = located(FeatureStore.open(tmp_path / "store").ids, FeatureStore.open(tmp_path / "store").origin.folder)
    assert {image.path for image in images} == {*photos.glob("*/*.png"), tmp_path / "more.tar"}
    assert all(image.read().size for image in images)
    rows = csv.DictReader(io.StringIO(run("classify", tmp_path / "store")[1]))
    assert {row["id"]: row["path"] for row in rows}["photos/cat/00.png"] == str(photos / "cat" / "00.png")


def test_it_is_benchmarked_where_it_has_labels(photos: Path, onnx_folder: Path, tmp_path: Path, run: Run) -> None:
    made = tmp_path / "pets"
    run("encode", photos, "--dataset", "folders", "--out", made, "--encoder", f"onnx:{onnx_folder}")
    status, _, err = run(
        "bench",
        "run",
        "batch-64",
        "--data",
        made,
        "--methods",
        "zero_shot",
        "--runs",
        "2",
        "--out",
        tmp_path / "results",
    )
    assert status == 0, err


@pytest.mark.parametrize("kind", ["clip_folder", "onnx_folder", "openclip_folder"])
def test_new_names_are_embedded_by_the_encoder_of_the_store(
    kind: str, photos: Path, tmp_path: Path, run: Run, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(kind)
    spec = {"clip_folder": "", "onnx_folder": "onnx:", "openclip_folder": "openclip:"}[kind] + folder.name
    monkeypatch.chdir(folder.parent)
    run("encode", photos, "--out", tmp_path / "store", "--encoder", spec)
    monkeypatch.chdir(tmp_path)
    status, out, err = run("classify", "store", "--classes", CLASSES)
    assert (status, len(labels_of(out))) == (0, 12), err
    whole = run("classify", photos, "--classes", CLASSES, "--encoder", str(folder) if kind == "clip_folder" else
                f"{spec.partition(':')[0]}:{folder}")[1]  # fmt: skip
    assert labels_of(out) == labels_of(whole)


def test_new_names_cost_only_the_text_tower(store: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    embed = HF.embed_images
    monkeypatch.setattr(HF, "embed_images", lambda self, *given: ran.append(1) or embed(self, *given))
    assert run("classify", store, "--classes", "cup, tree")[0] == 0
    assert len(ran) <= 1  # the check of the loader, of one blank image


def test_the_logit_scale_is_that_of_the_store_wherever_its_text_is_read(store: Path, run: Run) -> None:
    scale = pytest.approx(np.exp(4.7), rel=1e-5)
    shard = next(store.glob("0*.safetensors"))
    assert read_task(store).task.logit_scale == scale
    assert read_task(store, store / "text.safetensors").task.logit_scale == scale
    assert read_task(shard, store / "text.safetensors").task.logit_scale == scale
    assert read_task(shard, store).task.class_names == ("cat", "dog", "bird")
    own = run("adapt", store, "--out", "a.npz")
    other = run("adapt", store, "--text", store / "text.safetensors", "--out", "b.npz")
    assert (own[0], other[0]) == (0, 0), other[2]
    with np.load("a.npz") as a, np.load("b.npz") as b:
        np.testing.assert_array_equal(a["probs"], b["probs"])
    status, _, err = run("adapt", store, "--engine", "local", "--out", "shards/")
    assert status == 0, err


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("encoder", "another", "the encoder 'mini-siglip', and these have 'another'"),
        ("logit_scale", 100.0, "the logit scale 109.9"),
        ("precision", "float16", "and these have 'float16'"),
        ("decoding", "fast", "the decoding 'exact', and these have 'fast'"),
    ],
)
def test_text_of_another_space_scale_or_precision_is_refused(
    store: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, key: str, value: Any, words: str
) -> None:
    monkeypatch.chdir(tmp_path)  # long paths are cut out of long sentences
    other = tmp_path / "other"
    shutil.copytree(store, other)
    held = json.loads((other / "manifest.json").read_text())
    held["origin"][key] = value
    (other / "manifest.json").write_text(json.dumps(held))
    status, _, err = run("adapt", store.relative_to(tmp_path), "--text", "other")
    assert status == 2
    assert words in err
    assert len(err) < 500


def test_images_are_added_with_nothing_repeated(store: Path, tmp_path: Path, run: Run) -> None:
    more = tmp_path / "more"
    more.mkdir()
    for i in range(3):
        picture(100 + i).save(more / f"{i}.png")
    before = FeatureStore.open(store)
    status, out, err = run("encode", "--into", store, more)
    assert (status, "holds 15 images (3 new)" in out) == (0, True), err
    after = FeatureStore.open(store)
    assert (after.origin, after.class_names, after.ids[:12]) == (before.origin, before.class_names, before.ids)
    made = encoder(after.origin.spec, precision=after.origin.precision)
    pictures = [Image.open(more / f"{i}.png") for i in range(3)]
    np.testing.assert_allclose(after.take(range(12, 15)), made.encode_images(pictures), atol=2e-3)
    status, _, err = run("encode", "--into", store, more, "--precision", "float16")
    assert (status, "was made with '--precision" in err) == (2, True)
    assert "A store keeps its classes" in run("encode", "--into", store, more, "--classes", "a,b")[2]
    assert "One of '--out' (a new store), '--into'" in run("encode", more)[2]


def test_images_are_removed_and_the_rest_stays(store: Path, run: Run) -> None:
    before = FeatureStore.open(store)
    rows = dict(zip(before.ids, np.asarray(before.take(range(12))), strict=True))
    status, out, err = run("encode", "--into", store, "--remove", "*/dog/*")
    assert (status, "holds 8 images (4 removed)" in out) == (0, True), err
    after = FeatureStore.open(store)
    after.verify()
    assert after.ids == [one for one in before.ids if "/dog/" not in one]
    for one, row in zip(after.ids, after.take(range(8)), strict=True):
        np.testing.assert_array_equal(row, rows[one])
    assert sorted(path.name for path in store.iterdir()) == sorted([*after.files, "manifest.json"])
    status, _, err = run("encode", "--into", store, "--remove", "nothing/*")
    assert (status, "which matches none" in err) == (2, True)
    assert run("encode", "--into", store, "--remove", "*")[0] == 0
    assert FeatureStore.open(store).n == 0


def test_damage_is_found_by_the_hashes(store: Path, run: Run) -> None:
    status, out, _ = run("encode", "--into", store, "--verify")
    assert (status, "12 images in 1 file, all intact" in out) == (0, True)
    path = next(store.glob("0*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    status, _, err = run("encode", "--into", store, "--verify")
    assert (status, "its SHA-256 differs" in err) == (2, True)


def test_a_store_of_the_first_format_is_still_read(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    save_file({"text_features": np.eye(2, dtype=np.float32)}, folder / "text.safetensors")
    save_file({"image_features": np.eye(2, dtype=np.float32)}, folder / "00000.safetensors",
              {"ids": json.dumps(["a.jpg", "b.jpg"])})  # fmt: skip
    origin = {"encoder": "openai/clip-vit-base-patch16", "preprocessing": "", "prompts": ["{}"], "logit_scale": 50.0,
              "dataset": None}  # fmt: skip
    files = dict.fromkeys(("text.safetensors", "00000.safetensors"), "")
    held = {"format": 1, "origin": origin, "class_names": ["cat", "dog"], "files": files}
    (folder / "manifest.json").write_text(json.dumps(held))
    task, _, ids = read_task(folder)
    assert (task.logit_scale, ids, task.class_names) == (50.0, ["a.jpg", "b.jpg"], ("cat", "dog"))
    assert FeatureStore.open(folder).origin.reloads == "openai/clip-vit-base-patch16"


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of POSIX systems")
def test_after_kill_9_the_store_is_bit_for_bit_that_of_an_undisturbed_run(onnx_folder: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(60):
        picture(i, (900, 700)).save(photos / f"{i:03d}.jpg")
        if i % 11 == 3:
            (photos / f"{i:03d}x.jpg").write_bytes(b"broken")
    moontide = [sys.executable, "-c", "import sys; from moontide.cli import main; sys.exit(main())"]

    def command(out: str) -> list[str]:
        return [*moontide, "encode", "photos", "--out", out, "--encoder", f"onnx:{onnx_folder}", "--encode-batch", "3",
                "--shard-size", "8", "--classes", CLASSES]  # fmt: skip

    subprocess.run(command("whole"), cwd=tmp_path, check=True, capture_output=True)
    running = subprocess.Popen(command("stopped"), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while running.poll() is None and not (tmp_path / "stopped" / "00001.safetensors").exists():
            time.sleep(0.002)
    finally:
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
    stopped = FeatureStore.open(tmp_path / "stopped")
    assert 9 <= stopped.n < 60
    lost = 60 - stopped.n
    done = subprocess.run(command("stopped"), cwd=tmp_path, check=True, capture_output=True, text=True)
    assert f"({lost} new)" in done.stdout
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "stopped").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes(), name


def test_the_benchmark_says_where_the_time_goes(photos: Path, onnx_folder: Path, tmp_path: Path, run: Run) -> None:
    status, out, err = run("encode", "--benchmark", photos, "--encoder", f"onnx:{onnx_folder}", "--encode-batch", "4")
    assert status == 0, err
    parts = [line.split()[0] for line in out.splitlines()]
    assert parts == ["images", "start", "steady", "read", "decode", "resize", "copy", "model", "waiting"]
    assert "% of the" in out
    assert not list(tmp_path.glob("*/manifest.json"))
