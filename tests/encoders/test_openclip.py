"""A real (small, random) open_clip model: from a folder, as checkpoint of an architecture, and damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moontide.encoders import encoder
from moontide.encoders.openclip import OpenCLIP
from moontide.errors import FileError, OptionError

from .conftest import picture

PROMPTS = ["a photo of a cat.", "a dog"]


@pytest.fixture
def architecture(openclip_folder: Path, tmp_path: Path) -> Iterator[str]:
    """An architecture that open_clip knows by name, for the test."""
    import open_clip
    from open_clip import factory

    config = json.loads((openclip_folder / "open_clip_config.json").read_text())["model_cfg"]
    (tmp_path / "Mini-8.json").write_text(json.dumps(config))
    open_clip.add_model_config(tmp_path / "Mini-8.json")
    yield "Mini-8"
    factory._MODEL_CONFIG_PATHS.remove(tmp_path / "Mini-8.json")
    factory._rescan_model_configs()
    factory._MODEL_CONFIGS.pop("Mini-8", None)


def test_it_gives_what_the_library_gives(openclip_folder: Path) -> None:
    import open_clip

    found = encoder(f"openclip:{openclip_folder}", precision="float32")
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{openclip_folder}")
    model.eval()
    images = [picture(0), picture(1, (33, 90))]
    with torch.no_grad():
        pictures = model.encode_image(torch.stack([transform(one) for one in images]), normalize=True)
        words = model.encode_text(open_clip.get_tokenizer(f"local-dir:{openclip_folder}")(PROMPTS), normalize=True)
    np.testing.assert_allclose(found.encode_images(images), pictures.numpy(), atol=1e-5)
    np.testing.assert_allclose(found.encode_text(PROMPTS), words.numpy(), atol=1e-5)
    assert (found.id, found.dim) == ("mini-openclip", 16)
    assert found.logit_scale == pytest.approx(1 / 0.07, rel=1e-5)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_checkpoint_of_an_architecture(openclip_folder: Path, tmp_path: Path, architecture: str, kind: str) -> None:
    from safetensors.torch import load_file

    source = openclip_folder / "open_clip_model.safetensors"
    if kind == "pt":
        torch.save({"state_dict": load_file(source)}, tmp_path / "mine.pt")
    else:
        shutil.copy(source, tmp_path / "mine.safetensors")
    found = encoder(f"openclip:{architecture}/{tmp_path / f'mine.{kind}'}")
    assert found.id == f"Mini-8/mine.{kind}"
    whole = encoder(f"openclip:{openclip_folder}")
    np.testing.assert_allclose(found.encode_images([picture()]), whole.encode_images([picture()]), atol=1e-6)


def test_what_is_damaged_or_unknown_gets_a_sentence(openclip_folder: Path, tmp_path: Path, architecture: str) -> None:
    with pytest.raises(OptionError, match=r"no architecture of open_clip called 'Mini-9/openai'. Did you mean Mini-8"):
        OpenCLIP("Mini-9/openai")
    with pytest.raises(FileError, match=r"'nothing.pt' is neither a checkpoint on this machine nor a tag of Mini-8"):
        OpenCLIP(f"{architecture}/nothing.pt")
    (tmp_path / "bad.pt").write_bytes(b"garbage" * 99)
    with pytest.raises(FileError, match=r"weights of openclip:.* are missing, damaged or of another architecture"):
        OpenCLIP(f"{architecture}/{tmp_path / 'bad.pt'}")
    torch.save({"state_dict": {"logit_scale": torch.ones(())}}, tmp_path / "other.pt")
    with pytest.raises(FileError, match=r"weights of openclip:.* are missing, damaged or of another architecture"):
        OpenCLIP(f"{architecture}/{tmp_path / 'other.pt'}")
    shutil.copytree(openclip_folder, tmp_path / "model")
    (tmp_path / "model" / "open_clip_model.safetensors").unlink()
    with pytest.raises(FileError, match=r"weights of openclip:.* are missing"):
        OpenCLIP(str(tmp_path / "model"))


def test_a_tag_that_cannot_be_downloaded_gets_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for model in ("ViT-B-32/laion2b_s34b_b79k", "hf-hub:some/model", "hf-hub:no model"):
        with pytest.raises(FileError, match="is not on this machine, and the hub"):
            OpenCLIP(model)
