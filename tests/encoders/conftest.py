"""Small random models of every kind that is loaded from files, and images to put through them."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

try:
    if torch.__version__.endswith("+cpu") and not version("torchvision").endswith("+cpu"):
        # The torchvision of the package index is built for CUDA; beside a CPU build of torch it only lacks these two.
        OPERATORS = torch.library.Library("torchvision", "DEF")
        OPERATORS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        OPERATORS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
except PackageNotFoundError:
    pass

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 16}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}


def picture(seed: int = 0, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Return an image that has something to see: smooth noise."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def tokenizer() -> Any:
    """Return a byte-pair tokenizer that knows a few words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["a photo of a cat, a dog and a bird"] * 3, trainer)
    made.post_processor = processors.TemplateProcessing("<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 3)])
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=16, **names)


def save(folder: Path, model: Any, processor: Any, words: Any) -> Path:
    for part in (model, processor, words):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(0)
    words = tokenizer()
    text = {**TEXT, "vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**VISION, "image_size": 32}, projection_dim=16))
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return save(tmp_path_factory.mktemp("models") / "mini-clip", model, processor, words)


@pytest.fixture(scope="session")
def siglip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import SiglipConfig, SiglipModel
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    torch.manual_seed(0)
    words = tokenizer()
    text = {**TEXT, "vocab_size": len(words)}
    model = SiglipModel(SiglipConfig(text_config=text, vision_config={**VISION, "image_size": 32}))
    with torch.no_grad():
        model.logit_scale.fill_(4.7)
        model.logit_bias.fill_(-12.0)
    processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    return save(tmp_path_factory.mktemp("models") / "mini-siglip", model, processor, words)


@pytest.fixture(scope="session")
def siglip2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SigLIP2 of the kind that keeps the shape of an image and takes as many patches as it has."""
    from transformers import Siglip2Config, Siglip2Model
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    torch.manual_seed(0)
    words = tokenizer()
    text = {**TEXT, "vocab_size": len(words)}
    model = Siglip2Model(Siglip2Config(text_config=text, vision_config={**VISION, "num_patches": 16}))
    processor = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    return save(tmp_path_factory.mktemp("models") / "mini-siglip2", model, processor, words)


@pytest.fixture(scope="session")
def openclip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import open_clip
    from safetensors.torch import save_file

    vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 16}
    text = {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2}
    config = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    folder = tmp_path_factory.mktemp("models") / "mini-openclip"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": {}}))
    torch.manual_seed(0)
    save_file(open_clip.CLIP(**config).state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture(scope="session")
def onnx_folder(clip_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from moontide.encoders import encoder
    from moontide.encoders.onnx import export

    folder = tmp_path_factory.mktemp("models") / "mini-onnx"
    export(encoder(str(clip_folder)), folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; returns the status, standard output and standard error."""
    from moontide.cli import main

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
