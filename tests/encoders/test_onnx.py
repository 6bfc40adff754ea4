"""Exports give the vectors of the model they came from, and nothing else passes for one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import moontide
from moontide.encoders import encoder
from moontide.encoders.onnx import ONNX, export
from moontide.errors import FileError, InputError, OptionError

from .conftest import picture

PROMPTS = ["a photo of a cat.", "a dog", "", "Ein großer Hund, 1930's & more", "a very " * 30 + "long name"]
IMAGES = [picture(i, size) for i, size in enumerate([(60, 40), (33, 90), (500, 300), (5, 7)])]


@pytest.mark.parametrize("folder", ["siglip_folder", "openclip_folder"])
def test_an_export_equals_its_source(folder: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    where = request.getfixturevalue(folder)
    source = encoder(f"openclip:{where}" if folder == "openclip_folder" else str(where), precision="float32")
    export(source, tmp_path / "made")
    made = encoder(f"onnx:{tmp_path / 'made'}")
    assert np.abs(made.encode_images(IMAGES) - source.encode_images(IMAGES)).max() < 1e-4
    assert np.abs(made.encode_text(PROMPTS) - source.encode_text(PROMPTS)).max() < 1e-4
    assert (made.dim, made.logit_scale, made.logit_bias) == (source.dim, source.logit_scale, source.logit_bias)
    assert made.preprocessing == source.preprocessing
    assert made.id == f"{source.id} (onnx)"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    with pytest.raises(FileError, match="exists already"):
        export(source, tmp_path / "made")


def test_the_command_exports_clip(clip_folder: Path, onnx_folder: Path, run: Callable, tmp_path: Path) -> None:
    status, _, err = run("export", "--encoder", clip_folder, "--out", onnx_folder)
    assert (status, err) == (2, f"error: {onnx_folder} exists already; choose a new folder for the export.\n")
    source, made = encoder(str(clip_folder), precision="float32"), encoder(f"onnx:{onnx_folder}")
    assert np.abs(made.encode_images(IMAGES) - source.encode_images(IMAGES)).max() < 1e-4
    assert np.abs(made.encode_text(PROMPTS) - source.encode_text(PROMPTS)).max() < 1e-4


def test_it_runs_without_torch_and_transformers(onnx_folder: Path) -> None:
    program = f"""
import sys
from PIL import Image
import moontide
from moontide.encoders import encoder
rows = encoder("onnx:{onnx_folder}").encode_images([Image.new("RGB", (50, 40))])
assert rows.shape == (1, 16)
assert not {{"torch", "transformers", "torchvision"}} & set(sys.modules), "heavy imports"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def damage(folder: Path, name: str, data: bytes | None) -> None:
    (folder / name).unlink()
    if data is not None:
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("moontide.json", None, "is not the folder of an export"),
        ("moontide.json", b"{}", "is not the folder of an export"),
        ("image.onnx", b"garbage", "is missing or has changed since the export"),
        ("text.onnx", None, "is missing or has changed since the export"),
        ("tokenizer.json", b"{}", "is missing or has changed since the export"),
    ],
)
def test_a_damaged_export_gets_a_sentence(
    onnx_folder: Path, tmp_path: Path, name: str, data: bytes | None, why: str
) -> None:
    shutil.copytree(onnx_folder, tmp_path / "made")
    damage(tmp_path / "made", name, data)
    with pytest.raises(FileError, match=why):
        ONNX(str(tmp_path / "made"))


def test_an_export_of_a_later_format_or_other_preprocessing_is_refused(onnx_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(onnx_folder, tmp_path / "made")
    held = json.loads((tmp_path / "made/moontide.json").read_text())
    (tmp_path / "made/moontide.json").write_text(json.dumps({**held, "format": 2}))
    with pytest.raises(FileError, match="has the format 2, but this Moontide reads 1"):
        ONNX(str(tmp_path / "made"))
    held["steps"]["crop"] = [16, 16]
    (tmp_path / "made/moontide.json").write_text(json.dumps(held))
    with pytest.raises(FileError, match=r"makes images of \(16, 16\), but its tower takes \(32, 32\)"):
        ONNX(str(tmp_path / "made"))
    with pytest.raises(OptionError, match="'precision' of the encoder onnx is that of its export"):
        ONNX(str(onnx_folder), precision="float16")


def test_what_cannot_be_exported_gets_a_sentence(siglip2_folder: Path, onnx_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than resize, crop and scale"):
        export(encoder(str(siglip2_folder)), tmp_path / "made")
    with pytest.raises(InputError, match="Only hf and openclip encoders"):
        export(encoder(f"onnx:{onnx_folder}"), tmp_path / "made")
    assert not list(tmp_path.iterdir())


def test_an_export_that_differs_is_not_written(clip_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(clip_folder, tmp_path / "source")
    config = json.loads((tmp_path / "source" / "preprocessor_config.json").read_text())
    config["size"] = {"shortest_edge": 20}  # the library pads to the crop, which plain steps do not
    (tmp_path / "source" / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="more than resize, crop and scale: not exportable"):
        export(encoder(str(tmp_path / "source")), tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_eight_bits_say_what_they_lose(clip_folder: Path, onnx_folder: Path, run: Callable, tmp_path: Path) -> None:
    status, _, err = run("export", "--encoder", clip_folder, "--out", tmp_path / "small", "--int8")
    assert status == 0, err
    held = json.loads((tmp_path / "small" / "moontide.json").read_text())
    assert (held["id"], held["precision"]) == ("mini-clip (onnx int8)", "int8")
    assert 0.9 < held["cosine"] < 1
    assert f"cosine {held['cosine']:.5f} or more to the model" in err
    assert "images/s, and" in err
    small, whole = encoder(f"onnx:{tmp_path / 'small'}"), encoder(f"onnx:{onnx_folder}")
    assert small.precision == "int8"
    rows = [one.encode_images(IMAGES) for one in (small, whole)]
    assert 0.9 < (rows[0] * rows[1]).sum(axis=1).min() < 1
    np.testing.assert_allclose(small.encode_text(["a cat"]), whole.encode_text(["a cat"]), atol=1e-5)


def test_nothing_is_reported_to_the_makers_of_the_runtime(onnx_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("onnxruntime.disable_telemetry_events", lambda: calls.append("off"))
    monkeypatch.setattr("onnxruntime.enable_telemetry_events", lambda: calls.append("on"))
    encoder(f"onnx:{onnx_folder}")
    assert calls == ["off"]
    sources = Path(moontide.__file__).parent.rglob("*.py")
    assert [path.name for path in sources if "import onnxruntime" in path.read_text()] == ["loading.py"]  # nowhere else
