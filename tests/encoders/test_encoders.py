"""Encoders by name, and the command that runs them over a folder with bad files in it."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from moontide import encoders
from moontide.bench.data import read_pack
from moontide.encoders import encoder, encoder_names, encoder_type
from moontide.encoders.base import Encoder
from moontide.errors import UnknownNameError
from moontide.store.features import FeatureStore

from .conftest import picture


def test_names_and_what_they_stand_for(clip_folder: Path, onnx_folder: Path) -> None:
    assert encoder_names() == ("hf", "onnx", "openclip", "tiny")
    assert encoders.DEFAULT == "openai/clip-vit-base-patch16"
    assert encoder(str(clip_folder)).id == encoder(f"hf:{clip_folder}").id == "mini-clip"
    assert encoder(f"onnx:{onnx_folder}").id == "mini-clip (onnx)"
    with pytest.raises(UnknownNameError, match=r"There is no encoder 'onx'. Did you mean 'onnx'"):
        encoder(f"onx:{onnx_folder}")


def test_another_package_registers_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs.py").write_text(
        "from moontide.encoders.base import Encoder\n"
        "class Theirs(Encoder):\n"
        "    dim, logit_scale, preprocessing = 2, 1.0, ''\n"
        "    def __init__(self, model, device, precision): self.id = f'theirs:{model}'\n"
        "    def prepare(self, image): ...\n"
        "    def _images(self, batch): ...\n"
        "    def _text(self, prompts): ...\n"
    )
    (tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text("[moontide.encoders]\ntheirs = theirs:Theirs\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "theirs" in encoder_names()
    assert issubclass(encoder_type("theirs"), Encoder)
    assert encoder("theirs:big").id == "theirs:big"


def bomb(side: int) -> bytes:
    """Return a PNG that claims to be huge."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


@pytest.fixture
def album(tmp_path: Path) -> Path:
    """A folder of 190 images of many kinds and 10 bad files."""
    folder = tmp_path / "album"
    kinds = (".jpg", ".png", ".webp", ".gif", ".bmp", ".tif")
    modes = ("RGB", "L", "RGB", "P", "RGB", "CMYK")
    for i in range(190):
        path = folder / f"part{i % 3}" / f"{i:03d}{kinds[i % 6]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(i, (24 + i % 7, 20)).convert(modes[i % 6]).save(path)
    good = (folder / "part0/000.jpg").read_bytes()
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(good)
    bad = {"empty.jpg": b"", "text.png": b"hello", "cut.jpg": good[:300], "html.gif": b"<html></html>",
           "cut.png": bomb(9), "bomb.png": bomb(50_000), "large.png": bomb(9_500),
           "phone.heic": b"\0\0\0\x18ftypheic"}  # fmt: skip
    for name, data in bad.items():
        (folder / name).write_bytes(data)
    Image.new("RGB", (1, 400)).save(folder / "line.png")
    os.symlink(secret, folder / "leaves.jpg")
    return folder


def test_bad_files_are_named_and_the_rest_is_encoded(album: Path, onnx_folder: Path, run: Callable) -> None:
    store = album.parent / "store"
    command = ("encode", album, "--out", store, "--encoder", f"onnx:{onnx_folder}", "--classes", "cat,dog,hot_dog")
    status, out, err = run(*command)
    assert status == 0, err
    assert "holds 190 images (190 new) by mini-clip (onnx); 10 skipped" in out
    named = [line for line in err.splitlines() if line.startswith(f"skipped {album}/")]
    assert len(named) == 10
    for name in ("empty.jpg: it is not an image", "cut.jpg: it is damaged or truncated", "bomb.png: it has more than",
                 "line.png: it is 1 x 400", "leaves.jpg: it is a link that leaves", "phone.heic: it is not an image",
                 "large.png: it is 9500 x 9500"):  # fmt: skip
        assert any(f"{album}/{name}" in line for line in named), name
    assert "warning: class names have underscores, which the encoder does not read as spaces: hot_dog" in err
    held = FeatureStore.open(store)
    assert held.n == 190
    assert held.class_names == ("cat", "dog", "hot_dog")
    assert np.isfinite(held.take(range(190))).all()
    status, out, err = run(*command, "--strict")
    assert status == 1
    assert "(0 new)" in out
    assert err.count("skipped ") == 10


def test_labels_of_folders_go_into_the_store(album: Path, onnx_folder: Path, run: Callable) -> None:
    for path in album.iterdir():
        if not path.is_dir():
            path.unlink()
    store = album.parent / "labelled"
    status, _, err = run("encode", album, "--out", store, "--dataset", "folders", "--encoder", f"onnx:{onnx_folder}")
    assert status == 0, err
    held = FeatureStore.open(store)
    assert held.class_names == ("part0", "part1", "part2")
    assert held.labels is not None
    assert [Path(i).parent.name for i in held.ids] == [f"part{label}" for label in held.labels]


def test_a_dataset_of_the_paper_can_be_encoded_and_benchmarked(
    onnx_folder: Path, run: Callable, tmp_path: Path
) -> None:
    names = ["banded", "dotted"]
    rows = [[f"{names[i % 2]}/{i}.jpg", i % 2, names[i % 2]] for i in range(6)]
    for i, (path, _, _) in enumerate(rows):
        where = tmp_path / "data/dtd/images" / path
        where.parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(where)
    (tmp_path / "data/dtd/split_zhou_DescribableTextures.json").write_text(json.dumps({"test": rows}))
    store = tmp_path / "store"
    command = ("encode", tmp_path / "data", "--out", store, "--dataset", "dtd", "--encoder", f"onnx:{onnx_folder}")
    status, _, err = run(*command)
    assert status == 0, err
    assert "warning:" in err  # of fewer classes than the dataset has
    pack = read_pack(store)
    assert pack.dataset == "dtd"
    assert pack.labels.tolist() == [0, 1] * 3
    assert FeatureStore.open(store).origin.prompts == ("{} texture",)
    text = encoder(f"onnx:{onnx_folder}").encode_text(["banded texture", "dotted texture"])
    np.testing.assert_allclose(pack.text, text, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere", "--out", "store"], "There is no file or folder nowhere."),
        (["--out", "store", "--dataset", "folders", "a", "b"], "'--dataset' takes one folder"),
        ([".", "--out", "store", "--template", "a {}"], "have no effect without '--classes'"),
        ([".", "--out", "store", "--shard-size", "0"], "'--shard-size' must be at least 1. Got 0 instead."),
        (["a.png", "--out", "store", "--workers", "0"], "'--workers' must be at least 1. Got 0 instead."),
        (["a.png", "--out", "store", "--encoder", "onx:a"], "There is no encoder 'onx'."),
        (["a.png", "--out", "store", "--encoder", "./none"], "There is no folder ./none"),
    ],
)
def test_bad_input_gets_a_sentence(
    arguments: list[str], why: str, run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    picture().save("a.png")
    status, out, err = run("encode", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert why in err
    assert err.count("\n") == 1
    assert not Path("store").exists()


def test_a_folder_of_nothing_but_bad_files_is_an_error(run: Callable, onnx_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no")
    status, _, err = run("encode", tmp_path / "a.png", "--out", tmp_path / "store", "--encoder", f"onnx:{onnx_folder}")
    assert status == 2
    assert "error: None of the 1 images can be used" in err
