"""Models of the open_clip library (OpenCLIP, EVA-CLIP, SigLIP, ...): ARCH/TAG, ARCH/CHECKPOINT, a folder, or hf-hub:ID.

    openclip:ViT-B-16/laion2b_s34b_b88k         a pretrained tag, from the hub or its cache
    openclip:ViT-B-16/weights/model.safetensors  an architecture with a local checkpoint
    openclip:models/mine                        a folder with open_clip_config.json and weights

Checkpoints are .safetensors, or .pt files read with weights_only, so that none can run code.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moontide.core.arrays import to_numpy
from moontide.core.devices import check_device
from moontide.encoders.base import FloatArray, Prepared, TwoTowers, check_precision
from moontide.encoders.loading import ask_hub, saying
from moontide.encoders.steps import TOLERANCE, Steps
from moontide.errors import FileError, MissingExtraError, OptionError, missing_extra

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class OpenCLIP(TwoTowers):
    """A model of open_clip.

    >>> OpenCLIP("")
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: The encoder openclip must be ARCH/TAG, ARCH/CHECKPOINT or a folder. Got '' instead.
    """

    def __init__(self, model: str = "", device: str = "cpu", precision: str = "auto") -> None:
        check_device(device)
        if not model:
            raise OptionError(
                f"The encoder openclip must be ARCH/TAG, ARCH/CHECKPOINT or a folder. Got {model!r} instead."
            )
        open_clip = _import()
        name, weights, self.id = _find(open_clip, model)
        quick = bool(open_clip.get_pretrained_cfg(name, weights or "").get("quick_gelu"))  # how a tag was trained
        with saying(f"The weights of openclip:{model} are missing, damaged or of another architecture"):
            self.model = open_clip.create_model(
                name, weights, device=device, force_quick_gelu=quick, require_pretrained=True, weights_only=True
            )
        with saying(f"The tokenizer of openclip:{model} is missing or damaged; put its files beside the weights"):
            self.tokenizer = open_clip.get_tokenizer(name)
        self.device, self.asked = device, check_precision(precision)
        self.model.eval().requires_grad_(False)
        self.visual = self.model.visual
        self.logit_scale = float(self.model.logit_scale.detach().exp())
        if getattr(self.model, "logit_bias", None) is not None:
            self.logit_bias = float(self.model.logit_bias.detach())
        self.config = self.visual.preprocess_cfg
        self.preprocessing = json.dumps(self.config)
        given = {key: value for key, value in self.config.items() if key not in ("size", "mode")}
        self.transform = open_clip.image_transform(self.config["size"], is_train=False, **given)
        plain = self._steps()
        if plain is not None and plain.equals(self._library, TOLERANCE):
            self.steps = plain
        with saying(f"The tokenizer of openclip:{model} does not match its model"):
            self.dim = int(self._text(["a"]).shape[1])

    def prepare(self, image: Image) -> Prepared:
        """Resize, crop and scale as in the model's configuration."""
        return {"pixel_values": self._library(image)} if self.steps is None else super().prepare(image)

    def _library(self, image: Image) -> FloatArray:
        pixels: FloatArray = to_numpy(self.transform(image))
        return pixels

    def tokens(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Cut prompts into the model's tokens."""
        return {"input_ids": self.tokenizer(list(prompts)).to(self.device)}

    def embed_images(self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the image tower."""
        features: torch.Tensor = model.encode_image(inputs["pixel_values"])
        return features

    def text_features(self, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the text tower."""
        features: torch.Tensor = self.model.encode_text(tokens["input_ids"])
        return features

    def _steps(self) -> Steps | None:
        """Return the preprocessing of its configuration as steps, or None if it is more than that."""
        from PIL.Image import Resampling

        size = self.config["size"]
        size = (size, size) if isinstance(size, int) else tuple(size)
        how = {"squash": size, "shortest": size[0] if size[0] == size[1] else None}.get(self.config["resize_mode"])
        resample = {"bicubic": Resampling.BICUBIC, "bilinear": Resampling.BILINEAR}.get(self.config["interpolation"])
        if how is None or resample is None:
            return None
        return Steps(how, size, int(resample), tuple(self.config["mean"]), tuple(self.config["std"]), round_even=True)

    def fast_tokenizer(self) -> Any:
        """Return the tokenizer as a tokenizers-library object, or None."""
        from tokenizers import Tokenizer

        length = self.tokenizer.context_length
        if hasattr(self.tokenizer, "bpe_ranks"):
            return _fast_bpe(self.tokenizer, length)
        inner: Any = getattr(self.tokenizer, "tokenizer", None)
        if not getattr(inner, "is_fast", False):
            return None
        self.tokens(["a"])  # sets length and padding
        return Tokenizer.from_str(inner.backend_tokenizer.to_str())


def _import() -> Any:
    try:
        import open_clip
    except ImportError as error:
        if error.name in ("open_clip", "torch", "torchvision", "PIL"):
            raise missing_extra(error.name, "openclip", "The encoder openclip") from None
        raise
    except RuntimeError as error:
        raise MissingExtraError(
            f"The package 'open_clip' is installed but cannot be imported ({error}); if that names torchvision, "
            "it does not match the installed torch: install the one that does."
        ) from error
    return open_clip


def _find(open_clip: Any, model: str) -> tuple[str, str | None, str]:
    """Return the model as open_clip calls it, the tag or checkpoint of an architecture, and a short name."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return f"local-dir:{folder}", None, folder.resolve().name
    if model.startswith("hf-hub:"):
        _find_hub(model.removeprefix("hf-hub:"))
        return model, None, model
    name, _, weights = model.partition("/")
    if name not in open_clip.list_models():
        near = difflib.get_close_matches(name, open_clip.list_models(), n=3, cutoff=0.4)
        hint = f"Did you mean {' or '.join(near)}?" if near else "open_clip.list_models() lists them."
        raise OptionError(f"There is no folder and no architecture of open_clip called {model!r}. {hint}")
    checkpoint = Path(weights).expanduser()
    if weights and checkpoint.is_file():
        return name, str(checkpoint), f"{name}/{checkpoint.name}"
    tags = open_clip.list_pretrained_tags_by_model(name)
    if weights not in tags:
        known = ", ".join(tags) or "none"
        raise FileError(f"{weights!r} is neither a checkpoint on this machine nor a tag of {name}. Tags: {known}.")
    if hub := open_clip.get_pretrained_cfg(name, weights).get("hf_hub"):
        _find_hub(hub.rstrip("/"))
    return name, weights, model


def _find_hub(hub: str) -> None:
    """Refuse a model of the hub that is neither cached nor available."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        snapshot_download(hub, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        ask_hub(hub)


def _fast_bpe(simple: Any, length: int) -> Any:
    """Build CLIP's byte-pair tokenizer from the tables of open_clip's."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    start, end = ("<start_of_text>", simple.sot_token_id), ("<end_of_text>", simple.eot_token_id)
    fast = Tokenizer(models.BPE(simple.encoder, list(simple.bpe_ranks), end_of_word_suffix="</w>"))
    fast.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    words = Regex(r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+")
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "removed", invert=True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    fast.post_processor = processors.TemplateProcessing(f"{start[0]} $A {end[0]}", special_tokens=[start, end])
    fast.enable_truncation(length)
    fast.enable_padding(length=length, pad_id=0, pad_token="!")
    return fast
