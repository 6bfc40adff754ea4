"""Real (small, random) CLIP, SigLIP and SigLIP2 models from folders, and folders with something wrong in each part."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from moontide.encoders import encoder
from moontide.encoders.hf import HF
from moontide.errors import FileError, InputError
from moontide.methods.mta import MTA
from moontide.methods.tent import TENT
from moontide.streams import run_stream
from moontide.types import Task

from .conftest import picture

PROMPTS = ["a photo of a cat.", "a dog", "a very " * 30 + "long name"]


def test_clip_gives_what_the_library_gives(clip_folder: Path) -> None:
    from transformers import AutoTokenizer, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    found = encoder(str(clip_folder), precision="float32")
    model = CLIPModel.from_pretrained(clip_folder).eval()
    images = [picture(0), picture(1, (33, 90))]
    pixels = CLIPImageProcessorPil.from_pretrained(clip_folder)(images, return_tensors="pt")
    words = AutoTokenizer.from_pretrained(clip_folder)(
        PROMPTS, padding=True, truncation=True, max_length=16, return_tensors="pt"
    )
    with torch.no_grad():
        out = model(**pixels, input_ids=words["input_ids"], attention_mask=words["attention_mask"])
    np.testing.assert_allclose(found.encode_images(images), out.image_embeds.numpy(), atol=1e-5)
    np.testing.assert_allclose(found.encode_text(PROMPTS), out.text_embeds.numpy(), atol=1e-5)
    logits = found.logit_scale * found.encode_images(images) @ found.encode_text(PROMPTS).T
    np.testing.assert_allclose(logits, out.logits_per_image.numpy(), atol=1e-3)
    assert (found.id, found.dim, found.logit_bias) == ("mini-clip", 16, 0.0)
    assert json.loads(found.preprocessing)["crop_size"] == {"height": 32, "width": 32}


def test_siglip_gives_what_the_library_gives(siglip_folder: Path) -> None:
    from transformers import AutoTokenizer, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    found = encoder(f"hf:{siglip_folder}", precision="float32")
    model = SiglipModel.from_pretrained(siglip_folder).eval()
    images = [picture(0), picture(1, (33, 90))]
    pixels = SiglipImageProcessorPil.from_pretrained(siglip_folder)(images, return_tensors="pt")
    words = AutoTokenizer.from_pretrained(siglip_folder)(
        PROMPTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt"
    )
    with torch.no_grad():
        out = model(**pixels, input_ids=words["input_ids"])
    logits = found.logit_scale * found.encode_images(images) @ found.encode_text(PROMPTS).T + found.logit_bias
    np.testing.assert_allclose(logits, out.logits_per_image.numpy(), atol=1e-3)
    assert found.logit_scale == pytest.approx(np.exp(4.7), rel=1e-6)
    assert found.logit_bias == -12


def test_siglip2_keeps_the_shape_of_an_image(siglip2_folder: Path) -> None:
    found = encoder(str(siglip2_folder))
    wide = found.prepare(picture(0, (80, 20)))
    assert wide["spatial_shapes"].tolist() == [2, 8]
    rows = found.encode_images([picture(0, (80, 20)), picture(0, (20, 80)), picture(0, (80, 20))])
    np.testing.assert_allclose(rows[0], rows[2], atol=1e-6)
    assert np.abs(rows[0] - rows[1]).max() > 1e-3
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)


def test_one_by_one_or_together_any_size(clip_folder: Path) -> None:
    found = encoder(str(clip_folder), precision="float32")
    images = [picture(i, size) for i, size in enumerate([(1, 1), (3, 3), (3, 200), (500, 30), (32, 32)])] * 30
    rows = found.encode_images(images)  # more than one batch
    np.testing.assert_allclose(rows[:5], np.concatenate([found.encode_images([one]) for one in images[:5]]), atol=1e-5)
    np.testing.assert_allclose(rows[:5], rows[-5:], atol=1e-5)
    assert found.encode_images([]).shape == (0, 16)
    half = encoder(str(clip_folder), precision="bfloat16")
    np.testing.assert_allclose(half.encode_images(images[:5]), rows[:5], atol=0.05)


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2000])


def drop_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    held = load_file(folder / "model.safetensors")
    del held["visual_projection.weight"]
    save_file(held, folder / "model.safetensors", {"format": "pt"})


def other_size(folder: Path) -> None:
    config = json.loads((folder / "preprocessor_config.json").read_text())
    config |= {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}}
    (folder / "preprocessor_config.json").write_text(json.dumps(config))


def other_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 200
    (folder / "config.json").write_text(json.dumps(config))


class Harm:
    """What a pickled checkpoint could do."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"logit_scale": Harm()}, protocol=2))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (remove("tokenizer.json", "tokenizer_config.json"), "The tokenizer of .* is missing or damaged"),
        (write("tokenizer.json", b"{}"), "The tokenizer of .* is missing or damaged"),
        (remove("preprocessor_config.json"), "The image preprocessing of .* is missing or damaged"),
        (remove("config.json"), "not the folder of a transformers model"),
        (write("config.json", b"{"), "not the folder of a transformers model"),
        (remove("model.safetensors"), "The weights of .* are missing or damaged"),
        (write("model.safetensors", b"garbage" * 99), "The weights of .* are missing or damaged"),
        (cut_weights, "The weights of .* are missing or damaged"),
        (drop_a_tensor, r"1 tensors are missing or of another shape, such as visual_projection\.weight"),
        (other_size, r"does not match its model.*\(Input image size"),
        (other_vocabulary, "tensors are missing or of another shape, such as text_model"),
        (pickled, "The weights of .* are missing or damaged"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
def test_a_broken_folder_gets_a_sentence(
    clip_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(clip_folder, tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(FileError, match=why) as caught:
        HF("./model")
    assert "\n" not in str(caught.value)
    assert not Path("harm").exists()


def test_a_tokenizer_with_more_words_than_the_model_gets_a_sentence(clip_folder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    shutil.copytree(clip_folder, tmp_path / "model")
    words = Tokenizer.from_file(str(clip_folder / "tokenizer.json"))
    words.add_tokens(["zebra"])
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    found = HF(str(tmp_path / "model"))
    with pytest.raises(FileError, match="The tokenizer of model has tokens that its model does not know"):
        found.encode_text(["a zebra"])


def test_a_text_only_model_gets_a_sentence(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=50, **small)).save_pretrained(tmp_path)
    with pytest.raises(FileError, match=r"is a text-only model \(bert\); an encoder needs both towers"):
        HF(str(tmp_path))


def test_a_hub_that_cannot_be_reached_gets_one_sentence(run: Callable, tmp_path: Path, monkeypatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    picture().save(tmp_path / "a.png")
    status, out, err = run("encode", tmp_path, "--out", tmp_path / "store")
    assert (status, out) == (2, "")
    assert err == (
        "error: The model openai/clip-vit-base-patch16 is not on this machine, and the hub cannot be reached: point "
        "--encoder at a local folder with such a model, or try things out with --encoder tiny, which needs no hub "
        "(it is not CLIP but an ImageNet classifier with a name matcher).\n"
    )
    assert not (tmp_path / "store").exists()


def test_weights_that_are_no_numbers_get_a_sentence(clip_folder: Path) -> None:
    found = encoder(str(clip_folder), precision="float32")
    with torch.no_grad():
        found.visual.post_layernorm.weight.fill_(torch.nan)
    with pytest.raises(InputError, match="gives non-finite numbers for some images"):
        found.encode_images([picture()])


@pytest.mark.parametrize("folder", ["clip_folder", "openclip_folder"])
def test_tent_adapts_the_image_tower_and_gives_it_back(folder: str, request: pytest.FixtureRequest) -> None:
    where = request.getfixturevalue(folder)
    found = encoder(f"openclip:{where}" if folder == "openclip_folder" else str(where))
    before = {name: value.clone() for name, value in found.model.state_dict().items()}
    images = [picture(i) for i in range(12)]
    features, text = found.encode_images(images), found.encode_text(["a cat", "a dog", "a bird"])
    task = Task(features, text, 10.0, extras={"images": images, "encoder": found})
    method = TENT(learning_rate=0.1)
    state, result = run_stream(method, task, 4)
    own = result.zero_shot
    np.testing.assert_allclose(result.probs[:4], own[:4], atol=1e-4)  # predicted before the first update
    assert np.abs(result.probs[4:] - own[4:]).max() > 1e-3
    entropy = -(result.probs * np.log(np.clip(result.probs, 1e-12, 1))).sum(axis=1)
    before_it = -(own * np.log(np.clip(own, 1e-12, 1))).sum(axis=1)
    assert entropy[4:].mean() < before_it[4:].mean()
    assert all(torch.equal(before[name], value) for name, value in found.model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in found.model.parameters())
    norms = [m for m in found.visual.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert len(state.weights) == sum(m.weight.numel() + m.bias.numel() for m in norms)


def test_mta_makes_its_views_with_a_real_encoder(clip_folder: Path) -> None:
    found = encoder(str(clip_folder), precision="float32")
    images = [picture(i, (80, 60)) for i in range(2)]
    features, text = found.encode_images(images), found.encode_text(["a cat", "a dog"])
    result = MTA(views=8).fit_predict(features, text, logit_scale=100.0, images=images, encoder=found)
    assert result.probs.shape == (2, 2)
    assert np.isfinite(result.probs).all()
    assert np.abs(result.details["mode"] - features).max() > 1e-4
