"""Which runtime embeds images on a CPU: measured once, kept, reported, and overruled by the user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moontide.encoders import encoder, runtimes
from moontide.encoders.base import CLOSE, PER_THREAD, TorchEncoder
from moontide.encoders.pipeline import encode_files, encode_to_store
from moontide.encoders.places import ImageFile
from moontide.encoders.steps import photographs
from moontide.errors import OptionError
from moontide.store.features import FeatureStore

from .conftest import picture

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A cache folder of these tests, which share the export in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


def made(folder: Path, precision: str = "auto", runtime: str = "auto") -> TorchEncoder:
    found = encoder(str(folder), "cpu", precision, runtime)
    assert isinstance(found, TorchEncoder)
    return found


def test_onnxruntime_gives_the_vectors_of_torch_and_exports_once(
    clip_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = made(clip_folder, "float32", "torch").encode_images(photographs())
    other = made(clip_folder, runtime="onnxruntime")
    assert (other.runtime, other.precision) == ("onnxruntime", "float32")
    np.testing.assert_allclose(other.encode_images(photographs()), exact, atol=1e-5)

    exports = []
    whole = runtimes.export_tower
    monkeypatch.setattr(runtimes, "export_tower", lambda *given: (exports.append(given), whole(*given)))
    made(clip_folder, runtime="onnxruntime").encode_images(photographs())
    assert not exports
    (tower,) = cache.glob("moontide/runtimes/*/image.onnx")
    tower.write_bytes(tower.read_bytes()[:-1])  # damaged
    again = made(clip_folder, runtime="onnxruntime")
    again.encode_text(["a cat"])
    assert not exports  # which are for images
    np.testing.assert_allclose(again.encode_images(photographs()), exact, atol=1e-5)
    assert len(exports) == 1


def test_the_fastest_that_is_close_is_taken_and_remembered(
    clip_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = made(clip_folder)
    assert "the fastest" in runtimes.settle(first)
    (file,) = cache.glob("moontide/runtimes/*/measured-auto.json")
    ways = json.loads(file.read_text())
    assert (first.runtime, first.precision) == (ways[0]["runtime"], ways[0]["precision"])
    assert {("torch", "float32"), ("onnxruntime", "float32")} <= {(way["runtime"], way["precision"]) for way in ways}
    assert "channels-last" not in {way["runtime"] for way in ways}  # one filter, which cuts an image into patches
    assert all(way["cosine"] >= CLOSE and way["images_per_second"] > 0 for way in ways)
    exact = made(clip_folder, "float32", "torch").encode_images(photographs())
    assert (first.encode_images(photographs()) * exact).sum(axis=1).min() >= 0.9999

    monkeypatch.setattr(runtimes, "measure", lambda encoder: pytest.fail("it was measured before"))
    ways[0], ways[-1] = ways[-1], ways[0]
    file.write_text(json.dumps(ways))
    second = made(clip_folder)
    assert runtimes.settle(second, 3) == ""  # it was reported when it was measured
    assert (second.runtime, second.precision) == (ways[0]["runtime"], ways[0]["precision"])
    assert runtimes.settle(made(clip_folder, runtime="torch")) == ""  # the user has settled it
    file.unlink()


def test_it_is_measured_only_where_that_pays(siglip_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    way = runtimes.Way("torch", "float32", 1.0, 1.0)
    monkeypatch.setattr(runtimes, "measure", lambda encoder: (measured.append(encoder), [way])[1])
    for images in (3, 200):
        runtimes.settle(made(siglip_folder), images)
    assert not measured
    runtimes.settle(made(siglip_folder), 10**9)
    assert len(measured) == 1


def test_a_way_that_is_not_close_is_out(clip_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(clip_folder)
    monkeypatch.setattr(type(model), "halves", lambda self: ("bfloat16",))
    model.session = None
    monkeypatch.setattr(
        type(model), "closeness", lambda self, precision, runtime: 0.99 if precision == "bfloat16" else 1.0
    )
    assert set(runtimes._ways(model)) == {("torch", "float32"), ("onnxruntime", "float32")}


def test_convolutions_may_have_their_channels_last(clip_folder: Path) -> None:
    model = made(clip_folder, "float32")
    model.visual.extra = torch.nn.Conv2d(3, 3, 3)
    assert ("channels-last", "float32") in runtimes._ways(model)
    exact = model.encode_images(photographs())
    model.use("channels-last")
    assert model.visual.extra.weight.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(model.encode_images(photographs()), exact, atol=1e-5)


def test_what_is_no_choice_is_refused(clip_folder: Path, onnx_folder: Path) -> None:
    with pytest.raises(OptionError, match=r"'runtime' must be one of auto, torch, .* Got 'tensorrt'"):
        made(clip_folder, runtime="tensorrt")
    with pytest.raises(OptionError, match="'runtime' cannot be chosen for the encoder mini-clip"):
        encoder(f"onnx:{onnx_folder}", "cpu", "auto", "torch")
    with pytest.raises(OptionError, match="'precision' must be float32 with the runtime onnxruntime"):
        made(clip_folder, "bfloat16", "onnxruntime")


def test_a_store_goes_on_by_the_runtime_it_was_begun_with(clip_folder: Path, tmp_path: Path, run: Run) -> None:
    for i in range(6):
        (tmp_path / f"photos{i // 3}").mkdir(exist_ok=True)
        picture(i).save(tmp_path / f"photos{i // 3}" / f"{i}.png")
    store = tmp_path / "store"
    given = ("--encoder", clip_folder)
    status, out, err = run("encode", tmp_path / "photos0", "--out", store, *given, "--runtime", "onnxruntime")
    assert status == 0, err
    assert "float32 by onnxruntime" in out
    assert FeatureStore.open(store).origin.runtime == "onnxruntime"
    status, out, err = run("encode", "--into", store, tmp_path / "photos1")
    assert (status, "3 new" in out, "by onnxruntime" in out) == (0, True, True), err
    status, out, err = run("encode", tmp_path / "photos0", "--out", store, *given)
    assert (status, "0 new" in out, "by onnxruntime" in out) == (0, True, True), err


def test_a_store_made_in_python_keeps_its_runtime(
    clip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(4):
        picture(i).save(tmp_path / f"{i}.png")
    images = [ImageFile(path.name, path) for path in sorted(tmp_path.glob("*.png"))]
    begun, _ = encode_to_store(tmp_path / "store", made(clip_folder, "bfloat16", "torch"), images[:2])
    monkeypatch.setattr(runtimes, "LONG", 0.0)
    monkeypatch.setattr(runtimes, "measure", lambda encoder: pytest.fail("the store has settled it"))
    store, _ = encode_to_store(tmp_path / "store", made(clip_folder), images)
    assert (store.n, store.origin) == (4, begun.origin)


@pytest.mark.parametrize("folder", ["clip_folder", "onnx_folder"])
def test_progress_is_by_image(folder: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    found = request.getfixturevalue(folder)
    for i in range(40):
        picture(i).save(tmp_path / f"{i:02d}.png")
    (tmp_path / "07.png").write_bytes(b"broken")
    images = [ImageFile(path.name, path) for path in sorted(tmp_path.glob("*.png"))]
    steps: list[int] = []
    model = encoder(f"onnx:{found}" if folder == "onnx_folder" else str(found))
    rows = list(encode_files(model, images, batch_size=32, done=steps.append))
    assert sum(steps) == 40
    assert sum(len(part.images) for part in rows) == 39
    assert max(steps) <= (16 if folder == "onnx_folder" else PER_THREAD)
