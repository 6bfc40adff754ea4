"""What an encoder is: images and prompts in, unit vectors of one space out, with the logit scale of the model.

An encoder is a subclass of `Encoder` in a file of this folder (its name is the file's), or one that a package registers
under the entry point group `moontide.encoders`; it is made from (model, device, autocast), the model what follows the
colon in KIND:MODEL. `prepare` runs in worker threads, one image at a time, so that no more
full-size images are in memory than there are threads; the other calls come from one thread.

Methods that adapt the image tower (TENT) use a `TorchEncoder`: `prepare` and `tensors` make its input, and
`image_features` runs `visual` on it, differentiably. They must leave the weights of `visual` as they found them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import to_numpy, unit_rows
from moontide.errors import InputError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from moontide.encoders.steps import Steps

FloatArray: TypeAlias = npt.NDArray[np.float32]
Prepared: TypeAlias = Mapping[str, npt.NDArray[Any]]  # what a model reads of one image, by the name of its input

DEFAULT = "openai/clip-vit-base-patch16"
BATCH = 64  # images or prompts that go through a model together


class Encoder(ABC):
    """Images and prompts to unit vectors.

    >>> from PIL import Image
    >>> class Colour(Encoder):
    ...     id, dim, logit_scale, preprocessing = "colour", 3, 10.0, "mean colour"
    ...     def prepare(self, image):
    ...         return {"mean": np.asarray(image.resize((1, 1)), dtype=np.float32).reshape(3)}
    ...     def _images(self, batch):
    ...         return np.stack([one["mean"] for one in batch])
    ...     def _text(self, prompts):
    ...         return np.stack([np.eye(3)["red green blue".split().index(p)] for p in prompts])
    >>> encoder = Colour()
    >>> encoder.encode_images([Image.new("RGB", (8, 8), "red")]) @ encoder.encode_text(["red", "blue"]).T
    array([[1., 0.]], dtype=float32)
    """

    id: str  # of the model, stored with the features
    dim: int
    logit_scale: float
    logit_bias: float = 0.0  # SigLIP's; it is the same for every class, so it cancels in a softmax over classes
    preprocessing: str  # what `prepare` does, in words that change when it does; stored with the features
    templates: ClassVar[tuple[str, ...]] = ("a photo of a {}.",)  # of prompts, where the user gives none

    @abstractmethod
    def prepare(self, image: Image) -> Prepared:
        """Turn an RGB image of any size into the model's input."""

    @abstractmethod
    def _images(self, batch: Sequence[Prepared]) -> npt.NDArray[Any]:
        """Embed prepared images, (n, d), of any length."""

    @abstractmethod
    def _text(self, prompts: Sequence[str]) -> npt.NDArray[Any]:
        """Embed prompts, (n, d), of any length."""

    def encode_prepared(self, batch: Sequence[Prepared]) -> FloatArray:
        """Embed what `prepare` returned of some images, (n, d), unit rows."""
        return self._unit([self._images(part) for part in batches(batch)], "images")

    def encode_images(self, images: Sequence[Image]) -> FloatArray:
        """Embed images, (n, d), unit rows."""
        parts = batches(images)
        return self._unit([self._images([self.prepare(image) for image in part]) for part in parts], "images")

    def encode_text(self, prompts: Sequence[str]) -> FloatArray:
        """Embed prompts, (n, d), unit rows."""
        return self._unit([self._text(part) for part in batches(prompts)], "prompts")

    def doubts(self, names: Sequence[str]) -> list[str]:
        """Say in sentences which class names this encoder is not made for."""
        return []

    def _unit(self, parts: Sequence[npt.NDArray[Any]], what: str) -> FloatArray:
        rows = np.concatenate([np.zeros((0, self.dim), dtype=np.float32), *parts]).astype(np.float32)
        if not np.all(np.isfinite(rows)):
            raise InputError(
                f"The encoder {self.id} gives numbers that are not finite for some {what}; "
                "its weights are damaged, or its precision is too low (leave autocast off)."
            )
        unit: FloatArray = unit_rows(rows, what)
        return unit


class TorchEncoder(Encoder):
    """An encoder whose image tower is a torch module."""

    device: str
    autocast: bool
    visual: torch.nn.Module  # the image tower

    @abstractmethod
    def image_features(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Embed what `tensors` returned, (n, d), of any length, differentiably."""

    def tensors(self, batch: Sequence[Prepared]) -> dict[str, torch.Tensor]:
        """Put prepared images together on the device."""
        import torch

        return {name: torch.from_numpy(np.stack([one[name] for one in batch])).to(self.device) for name in batch[0]}

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context in which the towers run: half precision where autocast is on."""
        import torch

        kind = torch.device(self.device).type
        half: AbstractContextManager[Any] = torch.autocast(
            kind, torch.float16 if kind == "cuda" else torch.bfloat16, enabled=self.autocast
        )
        return half

    def _images(self, batch: Sequence[Prepared]) -> npt.NDArray[Any]:
        import torch

        with torch.inference_mode(), self.precision():
            return to_numpy(self.image_features(self.tensors(batch)).float())


class TwoTowers(TorchEncoder):
    """A torch encoder with a text tower too, as CLIP has; `moontide export` can write it as ONNX."""

    model: torch.nn.Module  # with both towers

    @abstractmethod
    def tokens(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Cut prompts into the tokens of the text tower, on the device."""

    @abstractmethod
    def text_features(self, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Embed what `tokens` returned, (n, d), of any length."""

    @abstractmethod
    def steps(self) -> Steps | None:
        """Return what `prepare` does as plain steps, or None where it is more than that."""

    @abstractmethod
    def fast_tokenizer(self) -> Any:
        """Return the tokenizer as one of the tokenizers library that pads to full length, or None."""

    def _text(self, prompts: Sequence[str]) -> npt.NDArray[Any]:
        import torch

        with torch.inference_mode(), self.precision():
            return to_numpy(self.text_features(self.tokens(prompts)).float())


def batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Cut a sequence into parts that go through a model together.

    >>> [len(part) for part in batches(range(100))]
    [64, 36]
    """
    return (items[start : start + BATCH] for start in range(0, len(items), BATCH))
