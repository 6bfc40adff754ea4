"""The default gives the vectors of the model's own library, whatever kind of image it is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from moontide.encoders import encoder
from moontide.encoders.images import decode
from moontide.encoders.pipeline import encode_files
from moontide.encoders.places import ImageFile
from moontide.encoders.sources import list_images
from moontide.encoders.steps import BICUBIC, BILINEAR, Steps, photographs

from .conftest import picture

SHARED = Path(__file__).resolve().parents[3] / "shared" / "images"


def odd(folder: Path) -> Path:
    """Write one image of each odd kind."""
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(0, (500, 300)).save(folder / "rotated.jpg", exif=exif, quality=95)
    picture(1, (400, 300)).convert("CMYK").save(folder / "cmyk.jpg", quality=95)
    grey = np.asarray(picture(2, (90, 60)).convert("L"), dtype=np.uint16) * 257
    Image.fromarray(grey).save(folder / "sixteen.png")
    picture(3, (90, 60)).quantize(32).save(folder / "palette.png")
    frames = [picture(i, (80, 50)) for i in (4, 5)]
    frames[0].save(folder / "animated.gif", save_all=True, append_images=frames[1:])
    picture(6, (6000, 4000)).save(folder / "huge.jpg", quality=90)
    picture(7, (3, 2)).save(folder / "tiny.png")
    picture(8, (80, 50)).convert("LA").save(folder / "alpha.png")
    return folder


def library_vectors(folder: Path, images: list[ImageFile]) -> np.ndarray:
    """Embed images by transformers and nothing else, but for the decoding to RGB."""
    import transformers
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    for image in images:
        pixels = processor(images=[decode(image.path)], return_tensors="pt", input_data_format="channels_last")
        with torch.inference_mode():
            rows.append(model.get_image_features(**pixels).pooler_output[0].numpy())
    found = np.stack(rows)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def vectors(found: Any) -> np.ndarray:
    return np.concatenate([one.features for one in found])


@pytest.mark.parametrize("folder", ["clip_folder", "siglip_folder", "siglip2_folder"])
@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_files_of_every_kind_get_the_vectors_of_the_library(
    folder: str, precision: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(folder)
    images = list_images([odd(tmp_path / "odd")]).images
    if SHARED.exists():
        images += list_images([SHARED]).images[::40]
    found = vectors(encode_files(encoder(str(model), precision=precision), images, batch_size=5))
    cosines = (found * library_vectors(model, images)).sum(axis=1)
    worst = images[int(cosines.argmin())].id
    assert cosines.min() >= 0.9999, worst


def test_an_export_gets_the_same_vectors(clip_folder: Path, onnx_folder: Path, tmp_path: Path) -> None:
    images = list_images([odd(tmp_path / "odd")]).images
    found = vectors(encode_files(encoder(f"onnx:{onnx_folder}"), images))
    assert (found * library_vectors(clip_folder, images)).sum(axis=1).min() >= 0.9999


@pytest.mark.parametrize("resample", [BILINEAR, BICUBIC])
@pytest.mark.parametrize("resize", [32, 40, (32, 32)])
@pytest.mark.parametrize("size", [(500, 375), (375, 500), (33, 32), (7, 9), (32, 32), (1000, 90)])
def test_a_device_resizes_as_pillow_does(size: tuple[int, int], resize: Any, resample: int) -> None:
    steps = Steps(resize, (32, 32), resample, (0.5,) * 3, (0.5,) * 3)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (3, size[1], size[0], 3), dtype=np.uint8)
    there = steps.on_device(torch.from_numpy(pixels)).numpy().astype(int)
    here = np.stack([steps.pixels(Image.fromarray(one)) for one in pixels])
    off = np.abs(there - here)
    assert off.max() <= (1 if resample == BICUBIC else 2)  # where the rounding of a tie goes on to the next filter
    assert off.mean() < (0.001 if resample == BICUBIC else 0.1)


def test_images_of_several_sizes_are_put_together_on_the_device(clip_folder: Path) -> None:
    model = encoder(str(clip_folder), precision="float32")
    images = [picture(i, size) for i, size in enumerate([(60, 40), (33, 90), (60, 40), (50, 50)])]
    raw = model.encode_prepared([{"image": np.array(image)} for image in images])
    np.testing.assert_allclose(raw, model.encode_images(images), atol=1e-3)


def test_half_precision_is_taken_only_where_it_is_close(clip_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moontide.encoders import base

    monkeypatch.setattr(base, "_fast_bfloat16", lambda: True)
    model = encoder(str(clip_folder))
    close = model.closeness("bfloat16")  # type: ignore[attr-defined]
    assert 0.99 < close < 1
    assert model.precision == ("bfloat16" if close >= base.CLOSE else "float32")
    monkeypatch.setattr(base, "CLOSE", 1.0)
    assert encoder(str(clip_folder)).precision == "float32"
    exact, half = encoder(str(clip_folder), precision="float32"), encoder(str(clip_folder), precision="bfloat16")
    rows = [one.encode_images(photographs()) for one in (exact, half)]
    assert not np.array_equal(*rows)
    assert (rows[0] * rows[1]).sum(axis=1).min() == pytest.approx(close, abs=1e-5)


def test_prompts_of_any_length_get_their_own_vectors_whoever_goes_with_them(clip_folder: Path) -> None:
    model = encoder(str(clip_folder))
    prompts = ["a photo of a cat", "a", "a photo of a dog and a bird and a cat, a photo", "", "a bird"]
    together = model.encode_text(prompts)
    np.testing.assert_allclose(together, np.concatenate([model.encode_text([one]) for one in prompts]), atol=1e-5)
    tokens = model.tokens(["a", "a photo"])  # type: ignore[attr-defined]
    assert tokens["input_ids"].shape[1] < 16  # no longer than the longest


def test_pictures_in_memory_need_no_files(clip_folder: Path) -> None:
    from moontide.classify import classify
    from moontide.encoders.prompts import embed_classes
    from moontide.errors import InputError

    model = encoder(str(clip_folder), precision="float32")
    classes = embed_classes(model, ["cat", "dog"])
    pictures = [picture(i, (60, 40)) for i in range(4)]
    buffer = io.BytesIO()
    pictures[3].save(buffer, "PNG")
    given = [pictures[0], np.asarray(pictures[1]), pictures[2], {"bytes": buffer.getvalue()}]
    found = classify(given, classes, model)
    assert found.columns()["id"] == ["0", "1", "2", "3"]
    np.testing.assert_allclose(found.task.features, model.encode_images(pictures), atol=1e-5)
    with pytest.raises(InputError, match=r"Image 1 must be a Pillow image, a path, or an array of uint8"):
        classify([pictures[0], np.zeros((4, 4, 3))], classes, model)
    with pytest.raises(InputError, match="at least one image"):
        classify([], classes, model)
