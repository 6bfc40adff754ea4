"""Images through an encoder into a store: in order, with skips named, and going on after any stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from moontide.encoders import encoder
from moontide.encoders.base import Encoder
from moontide.encoders.pipeline import Encoded, encode_files, encode_to_store
from moontide.encoders.places import ImageFile
from moontide.encoders.prompts import embed_classes
from moontide.encoders.sources import list_images
from moontide.errors import FileError
from moontide.store.features import FeatureStore


class MeanColour(Encoder):
    """The mean colour of an image; remembers what it saw."""

    id, dim, logit_scale, preprocessing = "mean-colour", 3, 10.0, "mean"

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.batches: list[int] = []

    def prepare(self, image: Image.Image) -> dict[str, np.ndarray]:
        self.threads.add(threading.current_thread().name)
        return {"mean": np.asarray(image, dtype=np.float32).mean(axis=(0, 1))}

    def _images(self, batch: Sequence[Any]) -> np.ndarray:
        self.batches.append(len(batch))
        return np.stack([one["mean"] for one in batch])

    def _text(self, prompts: Sequence[str]) -> np.ndarray:
        return np.asarray([[1.0 + len(p), ord(p[0]), ord(p[-1])] for p in prompts])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(30):
        Image.new("RGB", (6, 6), (i * 8, 255 - i * 8, 40)).save(folder / f"{i:03d}.png")
    for i in (4, 17):
        (folder / f"{i:03d}x.png").write_bytes(b"broken")
    return folder


def expected(ids: Sequence[str]) -> np.ndarray:
    numbers = np.asarray([int(Path(i).stem) for i in ids])
    rows = np.stack([numbers * 8, 255 - numbers * 8, np.full(len(ids), 40)], axis=1).astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (7, 3), (64, 2)])
def test_order_is_kept_and_bad_files_are_named(photos: Path, batch_size: int, workers: int) -> None:
    model = MeanColour()
    found = list(encode_files(model, list_images([photos]).images, batch_size=batch_size, workers=workers))
    ids = [image.id for one in found for image in one.images]
    assert ids == sorted(ids)
    assert len(ids) == 30
    np.testing.assert_allclose(np.concatenate([one.features for one in found]), expected(ids), atol=1e-6)
    skipped = [skip for one in found for skip in one.skipped]
    assert [(Path(skip.id).name, skip.reason) for skip in skipped] == [
        ("004x.png", "it is not an image of a known format"),
        ("017x.png", "it is not an image of a known format"),
    ]
    assert threading.current_thread().name not in model.threads  # decoding is not done here
    assert max(model.batches) <= batch_size


@pytest.mark.parametrize("good", [0, 1, 5])
def test_hundreds_of_bad_files_in_a_row_hold_nothing_up(photos: Path, good: int) -> None:
    bad = [ImageFile(f"{i}.jpg", photos / f"{i}.jpg") for i in range(150)]
    some = list_images([photos / f"{i:03d}.png" for i in range(good)]).images if good else []
    found = list[Encoded]()
    files = encode_files(MeanColour(), [*some, *bad, *some], batch_size=2, workers=2)
    thread = threading.Thread(target=lambda: found.extend(files), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert sum(len(one.skipped) for one in found) == 150
    assert sum(len(one.features) for one in found) == 2 * good


def test_leaving_early_ends_the_threads(photos: Path) -> None:
    running = encode_files(MeanColour(), list_images([photos]).images, batch_size=2, workers=2)
    next(running)
    running.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decode")]


def test_a_store_goes_on_and_encodes_nothing_twice(photos: Path, tmp_path: Path) -> None:
    images = list_images([photos]).images
    model = MeanColour()
    first, _ = encode_to_store(tmp_path / "store", model, images[:13], batch_size=4, shard_size=5)
    assert first.n == 12
    assert [len(arrays["image_features"]) for arrays, _ in first._maps] == [8, 4]  # whole batches
    seen = sum(model.batches)
    progress: list[tuple[int, int]] = []
    second, skipped = encode_to_store(
        tmp_path / "store", model, images, batch_size=4, shard_size=5, progress=lambda *a: progress.append(a)
    )
    assert sum(model.batches) - seen == 30 - 12
    assert second.ids == [image.id for image in images if not image.id.endswith("x.png")]
    assert [Path(skip.id).name for skip in skipped] == ["004x.png", "017x.png"]
    assert progress[0] == (12, 32)
    assert progress[-1] == (32, 32)
    np.testing.assert_allclose(second.take(range(30)), expected(second.ids), atol=1e-6)
    third, _ = encode_to_store(tmp_path / "store", model, images)
    assert third.hash == second.hash
    third.verify()


def test_what_does_not_fit_a_store_is_refused(photos: Path, tmp_path: Path) -> None:
    images, model = list_images([photos]).images, MeanColour()
    classes = embed_classes(model, ["red", "green"], ["{}"])
    encode_to_store(tmp_path / "store", model, images[:5], classes)
    again, _ = encode_to_store(tmp_path / "store", model, images[:9], embed_classes(model, ["red", "green"], ["{}"]))
    assert again.class_names == ("red", "green")
    other = MeanColour()
    other.preprocessing = "mean of the middle"
    for changed, text, why in (
        (other, classes, "with another preprocessing"),
        (model, embed_classes(model, ["red", "blue"], ["{}"]), "another prompt, dataset or class list"),
        (model, embed_classes(model, ["red", "green"], ["a {}"]), "another prompt, dataset or class list"),
        (model, None, "another prompt, dataset or class list"),
    ):
        with pytest.raises(FileError, match=why):
            encode_to_store(tmp_path / "store", changed, images, text)


def test_a_store_without_classes_says_so(photos: Path, tmp_path: Path) -> None:
    store, _ = encode_to_store(tmp_path / "store", MeanColour(), list_images([photos]).images)
    assert FeatureStore.open(tmp_path / "store").n == store.n == 30
    with pytest.raises(FileError, match="has no classes, only images"):
        _ = store.text


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is of POSIX systems")
def test_after_kill_9_the_same_command_goes_on(onnx_folder: Path, tmp_path: Path) -> None:
    photos, store = tmp_path / "photos", tmp_path / "store"
    photos.mkdir()
    rng = np.random.default_rng(0)
    large = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).resize((1500, 1200))
    large.save(tmp_path / "large.jpg")
    for i in range(80):
        os.link(tmp_path / "large.jpg", photos / f"{i:03d}.jpg")  # slow to decode, quick to make
    moontide = [sys.executable, "-c", "import sys; from moontide.cli import main; sys.exit(main())"]
    command = [*moontide, "encode", str(photos), "--out", str(store), "--encoder", f"onnx:{onnx_folder}",
               "--encode-batch", "2", "--shard-size", "4"]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while running.poll() is None and not (store / "00002.safetensors").exists():
            time.sleep(0.005)
        os.kill(running.pid, signal.SIGKILL)
    finally:
        output, _ = running.communicate()
    assert running.returncode == -signal.SIGKILL, output
    stopped = FeatureStore.open(store)
    stopped.verify()
    assert 8 <= stopped.n < 80
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    whole = FeatureStore.open(store)
    whole.verify()
    assert whole.ids == [f"{photos}/{i:03d}.jpg" for i in range(80)]
    assert list(whole.files.items())[: len(stopped.files)] == list(stopped.files.items())  # what was there stayed
    assert f"holds 80 images ({80 - stopped.n} new)" in again.stdout
    one = encoder(f"onnx:{onnx_folder}").encode_images([large])
    np.testing.assert_allclose(whole.take(range(80)), np.repeat(one, 80, axis=0), atol=0.01)  # JPEG is not exact
