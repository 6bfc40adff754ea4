"""CLIP, SigLIP and SigLIP2 models of the transformers library, by hub id or from a local folder.

Image sizes, means and the tokenizer come from the model's own files, the logit scale (and SigLIP's bias) from its
weights. Remote code is never run, and a model whose files do not fit together is refused. What is in the hub's local
cache is used without asking the hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moontide.core.devices import check_device
from moontide.encoders.base import DEFAULT, Prepared, TwoTowers, check_precision
from moontide.encoders.loading import ask_hub, saying
from moontide.encoders.steps import FILTERS, TOLERANCE, Steps
from moontide.errors import FileError, MissingExtraError, missing_extra

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

STEPS = (
    "do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor", "do_normalize",
    "image_mean", "image_std", "patch_size", "max_num_patches",
)  # fmt: skip


class HF(TwoTowers):
    """A transformers model with an image tower and a text tower.

    >>> HF("./no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no folder ./no-such-folder, and it is not a valid model id.
    """

    def __init__(self, model: str = "", device: str = "cpu", precision: str = "auto") -> None:
        name = model or DEFAULT
        check_device(device)
        folder = Path(name).expanduser()
        if folder.is_dir():
            name = str(folder)
        elif name.count("/") > 1 or name.startswith((".", "/", "~")):
            raise FileError(f"There is no folder {name}, and it is not a valid model id.")
        transformers = _import(name)
        with _quiet(transformers):
            parts = _load(transformers, name, folder.is_dir())
        self.config, self.processor, self.tokenizer, self.model = parts
        self.id = folder.resolve().name if folder.is_dir() else name
        self.device, self.asked = device, check_precision(precision)
        self.model.eval().requires_grad_(False).to(device)
        self.visual = self.model.vision_model
        self.logit_scale = float(self.model.logit_scale.detach().exp())
        if hasattr(self.model, "logit_bias"):
            self.logit_bias = float(self.model.logit_bias.detach())
        steps = self.processor.to_dict()
        self.preprocessing = json.dumps({key: steps[key] for key in STEPS if steps.get(key) is not None})
        plain = self._steps()
        if plain is not None and plain.equals(lambda image: self._library(image)["pixel_values"], TOLERANCE):
            self.steps = plain
        self.dim = self._check()

    def prepare(self, image: Image) -> Prepared:
        """Resize, crop and scale as in the model's files."""
        return self._library(image) if self.steps is None else super().prepare(image)

    def _library(self, image: Image) -> Prepared:
        inputs = self.processor(images=[image], return_tensors="np", input_data_format="channels_last")
        return {name: array[0] for name, array in inputs.items()}

    def tokens(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Cut prompts into the model's tokens, as many as the longest has where nothing after a token counts (CLIP)."""
        length = self.config.text_config.max_position_embeddings
        padding = "longest" if self.config.model_type == "clip" else "max_length"  # SigLIP is trained with full length
        found = self.tokenizer(list(prompts), padding=padding, truncation=True, max_length=length, return_tensors="pt")
        if int(found["input_ids"].max()) >= self.config.text_config.vocab_size:
            raise FileError(
                f"The tokenizer of {self.id} has tokens that its model does not know; use both from the same model."
            )
        names = ("input_ids",) if self.config.model_type.startswith("siglip") else ("input_ids", "attention_mask")
        return {name: found[name].to(self.device) for name in names}  # SigLIP is trained without the mask

    def embed_images(self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the image tower."""
        return _pooled(model.get_image_features(**inputs))

    def text_features(self, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the text tower."""
        return _pooled(self.model.get_text_features(**tokens))

    def _steps(self) -> Steps | None:
        """Return the preprocessing of its configuration as steps, or None if it is more than that."""
        found = self.processor.to_dict()
        size, crop = found.get("size") or {}, found.get("crop_size") if found.get("do_center_crop") else None
        if found.get("resample") not in FILTERS or not found.get("do_resize"):
            return None
        if "shortest_edge" in size and crop:
            return Steps(size["shortest_edge"], (crop["height"], crop["width"]), *_scaling(found))
        if "height" in size and not crop:
            return Steps((size["height"], size["width"]), (size["height"], size["width"]), *_scaling(found))
        return None

    def fast_tokenizer(self) -> Any:
        """Return the tokenizer as a tokenizers-library object, or None."""
        from tokenizers import Tokenizer

        if not self.tokenizer.is_fast:
            return None
        length = self.config.text_config.max_position_embeddings
        self.tokenizer(["a"], padding="max_length", truncation=True, max_length=length)  # sets length and padding
        return Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())

    def _check(self) -> int:
        """Run one image and one prompt to find mismatched parts and the dimension."""
        from PIL import Image

        with saying(f"The preprocessing or the tokenizer of {self.id} does not match its model; use one model"):
            images = self._images([self.prepare(Image.new("RGB", (64, 48)))])
            text = self._text(["a"])
        if images.shape != text.shape:
            raise FileError(f"The towers of {self.id} give {images.shape[1]} and {text.shape[1]} dimensions.")
        return int(images.shape[1])


def _scaling(found: Mapping[str, Any]) -> tuple[int, tuple[float, float, float], tuple[float, float, float]]:
    return found["resample"], tuple(found["image_mean"]), tuple(found["image_std"])


def _pooled(output: Any) -> torch.Tensor:
    pooled: torch.Tensor = output.pooler_output
    return pooled


def _import(name: str) -> Any:
    """Import transformers with all that is used of it."""
    try:
        import PIL  # noqa: F401
        import torch  # noqa: F401
        import transformers
        from transformers import AutoImageProcessor  # noqa: F401
    except ImportError as error:
        if error.name in ("PIL", "torch", "transformers"):
            raise missing_extra(error.name, "hf", f"The encoder {name}") from None
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        raise MissingExtraError(
            f"The package 'transformers' is installed but cannot be imported ({root}); if that names torchvision, "
            "it does not match the installed torch: remove it, or install the one that does."
        ) from error
    return transformers


def _load(transformers: Any, name: str, local: bool) -> tuple[Any, Any, Any, Any]:
    """Load configuration, image processor, tokenizer and weights from a folder, the hub's cache, or the hub."""
    try:
        return _parts(transformers, name, local=True)
    except FileError as error:
        if local or error.__cause__ is None:  # it is there, and of no use
            raise
    ask_hub(name)
    return _parts(transformers, name, local=False)


def _parts(transformers: Any, name: str, local: bool) -> tuple[Any, Any, Any, Any]:
    options = {"local_files_only": local, "trust_remote_code": False}
    with saying(f"{name} is not the folder of a transformers model: its config.json is missing or damaged"):
        config = transformers.AutoConfig.from_pretrained(name, **options)
    for tower in ("vision", "text"):
        if not hasattr(config, f"{tower}_config"):
            other = "text-only" if tower == "vision" else "image-only"
            raise FileError(
                f"{name} is a {other} model ({config.model_type}); an encoder needs both towers, as CLIP has."
            )
    with saying(f"The image preprocessing of {name} is missing or damaged; copy its preprocessor_config.json there"):
        processor = transformers.AutoImageProcessor.from_pretrained(name, backend="pil", **options)
    with saying(f"The tokenizer of {name} is missing or damaged; copy its tokenizer.json there"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("it has no vocabulary")
    with saying(f"The weights of {name} are missing or damaged; copy or download them again"):
        checked = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, found = transformers.AutoModel.from_pretrained(name, **checked, **options)
        wrong = [*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])]
        if wrong:
            raise ValueError(f"{len(wrong)} tensors are missing or of another shape, such as {sorted(wrong)[0]}")
    if not all(hasattr(model, part) for part in ("vision_model", "get_image_features", "logit_scale")):
        raise FileError(f"{name} is a {config.model_type} model, which does not compare images with text as CLIP does.")
    return config, processor, tokenizer, model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hide the library's messages and progress bars while files are loaded."""
    logs = transformers.utils.logging
    level, bar = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bar:
            logs.enable_progress_bar()
