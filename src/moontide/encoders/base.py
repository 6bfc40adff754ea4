"""Base classes of encoders: images and prompts in, unit vectors of one space out, with the logit scale of the model.

An encoder is a subclass of `Encoder` in a file of this folder (its name is the file's), or one that a package registers
under the entry point group `moontide.encoders`; it is made from (model, device, precision), the model what follows the
colon in KIND:MODEL. An encoder whose preprocessing is `steps` gets images that other processes decoded, resized and
cropped, or that they decoded for it to resize on its device. Any other has `prepare`, which runs in threads.

    what `encode_prepared` and `launch` take of each image, by its key:
    pixels   8 bits (height, width, 3), resized and cropped
    image    8 bits (H, W, 3), as decoded
    others   what `prepare` of the encoder returned

Methods that adapt the image tower (TENT) use a `TorchEncoder`: `prepare` and `tensors` create its input, and
`image_features` runs `visual` on it, differentiably. Such methods must restore the weights of `visual`.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import to_numpy, unit_rows
from moontide.encoders import nvjpeg
from moontide.errors import InputError, OptionError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from moontide.encoders.steps import Steps

FloatArray: TypeAlias = npt.NDArray[np.float32]
Prepared: TypeAlias = Mapping[str, npt.NDArray[Any]]  # what a model reads of one image, by the name of its input
Done: TypeAlias = Callable[[int], None]  # called with the number of images embedded since the last call

DEFAULT = "openai/clip-vit-base-patch16"
BATCH = 64  # images or prompts that go through a model together, where the device has no size of its own
PRECISIONS = ("auto", "float32", "float16", "bfloat16")
PER_THREAD = 4  # images that a thread embeds at a time on a CPU: they stay in its cache, and progress is reported often
RUNTIMES = ("auto", "torch", "channels-last", "onnxruntime")
CLOSE = 0.99995  # cosine in half precision to float32, at least, over some photographs: others then stay above 0.9999


def _ignored(count: int) -> None:
    """Report nothing."""


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
    steps: Steps | None = None  # what `prepare` does where it is no more than resize, crop and scale
    device: str = "cpu"
    precision: str = "float32"  # that images are embedded in
    runtime: str = ""  # that embeds images, one of RUNTIMES, where that is a choice
    spec: str = ""  # what `moontide.encoders.encoder` makes it of again, from any folder
    typed: str = ""  # the `spec` that the user wrote
    templates: ClassVar[tuple[str, ...]] = ("a photo of a {}.",)  # of prompts, where the user gives none

    def prepare(self, image: Image) -> Prepared:
        """Turn an RGB image of any size into the model's input."""
        if self.steps is None:
            raise NotImplementedError(f"{type(self).__name__} must have 'steps' or 'prepare'")
        return {"pixels": self.steps.pixels(image)}

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
        """Embed prompts, (n, d), unit rows; those of like length go through the model together."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        rows = self._unit([self._text([prompts[i] for i in part]) for part in batches(order)], "prompts")
        back = np.empty_like(rows)
        back[order] = rows
        return back

    @property
    def batch_size(self) -> int:
        """The default number of images per batch."""
        return BATCH

    @property
    def resizes(self) -> bool:
        """Whether the encoder takes decoded images and resizes them on its device."""
        return False

    @property
    def decodes_jpeg(self) -> bool:
        """Whether the encoder decodes JPEG files on its device."""
        return False

    def decoded(self, batch: Sequence[Prepared]) -> list[Prepared | str]:
        """Decode the JPEG files among prepared images on the device; return the reason for a damaged file."""
        return list(batch)

    def pinned(self, memory: npt.NDArray[np.uint8]) -> AbstractContextManager[Any]:
        """Let the device copy from memory that images lie in, inside this context, without the help of the CPU."""
        return nullcontext()

    def launch(self, batch: Sequence[Prepared], done: Done = _ignored) -> Callable[[], FloatArray]:
        """Start embedding prepared images; the returned function waits for their unit vectors, (n, d).

        `done` is called with the number of newly embedded images.
        """
        parts = []
        for part in batches(batch, BATCH // 4 if self.device == "cpu" else BATCH):
            parts.append(self._images(part))
            done(len(part))
        rows = self._unit(parts, "images")
        return lambda: rows

    def use(self, runtime: str) -> None:
        """Embed images with another runtime."""
        if runtime not in RUNTIMES:
            raise OptionError(f"'runtime' must be one of {', '.join(RUNTIMES)}. Got {runtime!r} instead.")
        if runtime not in ("auto", self.runtime):
            raise OptionError(f"'runtime' cannot be chosen for the encoder {self.id}. Got {runtime!r}; use 'auto'.")

    def doubts(self, names: Sequence[str]) -> list[str]:
        """Return warnings about class names that this encoder is not suited for."""
        return []

    def _unit(self, parts: Sequence[npt.NDArray[Any]], what: str) -> FloatArray:
        rows = np.concatenate([np.zeros((0, self.dim), dtype=np.float32), *parts]).astype(np.float32)
        if not np.all(np.isfinite(rows)):
            raise InputError(
                f"The encoder {self.id} gives non-finite numbers for some {what}; "
                "its weights are damaged, or its precision is too low (use float32)."
            )
        unit: FloatArray = unit_rows(rows, what)
        return unit


class TorchEncoder(Encoder):
    """An encoder whose image tower is a torch module."""

    asked: str  # the precision that the user wants, or "auto"
    visual: torch.nn.Module  # the image tower
    model: torch.nn.Module  # that `visual` is a part of, or the same
    runtime = "torch"
    settled = False  # whether `runtime` is what the user wants, or was measured to be the fastest

    @abstractmethod
    def embed_images(self, model: torch.nn.Module, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run `model`, or a copy of it in another precision, on inputs: (n, d), of any length."""

    def image_features(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Embed what `tensors` returned, (n, d), of any length, differentiably, in float32."""
        return self.embed_images(self.model, inputs)

    def tensors(self, batch: Sequence[Prepared]) -> dict[str, torch.Tensor]:
        """Put prepared images together on the device, as floats."""
        import torch

        if self.steps is None:
            return {name: self._stacked([one[name] for one in batch]) for name in batch[0]}
        groups: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for i, one in enumerate(batch):
            groups.setdefault(next((name, tuple(array.shape)) for name, array in one.items()), []).append(i)
        parts = []
        for (name, _), rows in groups.items():
            some = self._stacked([batch[i][name] for i in rows])
            parts.append(some if name == "pixels" else self.steps.on_device(some))
        pixels = torch.cat(parts)  # (n, height, width, 3), one group after the other
        if len(groups) > 1:
            back = torch.empty(len(batch), dtype=torch.int64, pin_memory=self.device != "cpu")
            back[[i for rows in groups.values() for i in rows]] = torch.arange(len(batch))
            pixels = pixels[back.to(self.device, non_blocking=True)]
        return {"pixel_values": self.steps.scaled(pixels)}

    def _stacked(self, arrays: Sequence[Any]) -> torch.Tensor:
        """Put arrays of one shape together on the device; from memory that is pinned the copies run by themselves."""
        import torch

        parts = [x if isinstance(x, torch.Tensor) else torch.from_numpy(np.asarray(x)) for x in arrays]
        if self.device == "cpu":
            return torch.stack(parts)
        here = torch.cuda.current_stream()
        with torch.cuda.stream(self._copying):  # beside what the GPU computes
            parts = [x.to(self.device, non_blocking=True) for x in parts]
        here.wait_stream(self._copying)
        for part in parts:
            part.record_stream(here)
        return torch.stack(parts)

    @cached_property
    def _copying(self) -> Any:
        import torch

        return torch.cuda.Stream()

    @property
    def resizes(self) -> bool:
        """Whether the encoder takes decoded images and resizes them on its device: on a GPU."""
        from moontide.encoders.steps import FILTERS

        return self.device != "cpu" and self.steps is not None and self.steps.resample in FILTERS

    @cached_property
    def decodes_jpeg(self) -> bool:
        """Whether torchvision can decode JPEG files on this GPU."""
        return self.resizes and nvjpeg.works(self.device)

    def decoded(self, batch: Sequence[Prepared]) -> list[Prepared | str]:
        """Decode the JPEG files among prepared images on the GPU; of one that is damaged, return the reason."""
        done: list[Prepared | str] = list(batch)
        files = [i for i, one in enumerate(batch) if "jpeg" in one]
        for i, found in zip(files, nvjpeg.decode([batch[i]["jpeg"] for i in files], self.device), strict=True):
            done[i] = found if isinstance(found, str) else {"image": found}
        return done

    @contextmanager
    def pinned(self, memory: npt.NDArray[np.uint8]) -> Iterator[None]:
        """Pin memory for copies to the GPU."""
        if self.device == "cpu":
            yield
            return
        import torch

        runtime = torch.cuda.cudart()
        done = int(runtime.cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)) == 0  # else copies take longer
        try:
            yield
        finally:
            if done:
                torch.cuda.synchronize()
                runtime.cudaHostUnregister(memory.ctypes.data)

    @cached_property
    def precision(self) -> str:  # type: ignore[override]
        """The precision for images: the first fast one that is close to float32."""
        if self.asked != "auto":
            return self.asked
        return next((name for name in self.halves() if self.closeness(name) >= CLOSE), "float32")

    def halves(self) -> tuple[str, ...]:
        """Return the half precisions that this device supports, best first."""
        return ("float16", "bfloat16") if self.device != "cpu" else ("bfloat16",) if _fast_bfloat16() else ()

    def closeness(self, precision: str, runtime: str = "torch") -> float:
        """Return the smallest cosine to float32 in torch over some photographs, or 0 if a vector is not finite."""
        rows = self._embedded(self._photographs, precision, runtime)
        cosines = (rows * self._exact).sum(axis=1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(self._exact, axis=1)
        return float(np.nan_to_num(cosines, posinf=0.0).min())

    @cached_property
    def _photographs(self) -> list[Prepared]:
        from moontide.encoders.steps import photographs

        return [self.prepare(image) for image in photographs()]

    @cached_property
    def _exact(self) -> npt.NDArray[Any]:
        return self._embedded(self._photographs, "float32")

    def use(self, runtime: str) -> None:
        """Embed images by torch, by torch with its images and filters channels-last, or by onnxruntime, on a CPU."""
        if runtime not in RUNTIMES or self.device != "cpu":
            super().use(runtime)
        if runtime == "auto":
            return
        if runtime == "onnxruntime":
            if self.asked not in ("auto", "float32"):
                raise OptionError(f"'precision' must be float32 with the runtime onnxruntime. Got {self.asked!r}.")
            self.precision = "float32"
        self.runtime, self.settled = runtime, True
        self._lay_out(runtime)

    def _lay_out(self, runtime: str) -> None:
        """Bring the filters of the image tower into the order that a runtime wants, which changes no value."""
        import torch

        last = runtime == "channels-last"
        self.visual.to(memory_format=torch.channels_last if last else torch.contiguous_format)

    @cached_property
    def session(self) -> Any:
        """The image tower as onnxruntime runs it."""
        from moontide.encoders.runtimes import tower

        return tower(self)

    @cached_property
    def _half(self) -> torch.nn.Module:
        """A copy of the model in float16; `model` itself stays in float32, which is what methods may adapt."""
        return copy.deepcopy(self.model).half()

    def _run(self, batch: Sequence[Prepared], precision: str, runtime: str = "torch") -> torch.Tensor:
        """Begin to embed prepared images in a precision, (n, d) of float32 on the device.

        In bfloat16 only products are rounded so: its few digits are too few for sums over many layers.
        """
        import torch

        inputs = self.tensors(batch)
        if runtime == "onnxruntime":
            return torch.from_numpy(self.session.run(None, {name: x.numpy() for name, x in inputs.items()})[0])
        if runtime == "channels-last":
            inputs = {
                name: x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
                for name, x in inputs.items()
            }
        if precision == "float16":
            inputs = {name: x.half() if x.is_floating_point() else x for name, x in inputs.items()}
            return self.embed_images(self._half, inputs).float()
        kind = torch.device(self.device).type
        with torch.autocast(kind, torch.bfloat16, enabled=precision == "bfloat16"):
            return self.embed_images(self.model, inputs).float()

    def _embedded(
        self, batch: Sequence[Prepared], precision: str, runtime: str = "torch", done: Done = _ignored
    ) -> npt.NDArray[Any]:
        """Embed prepared images in a precision by a runtime, (n, d).

        On a CPU each thread embeds a few images at a time. Threads that share every single operation wait for each
        other at its end, which takes most of the time as soon as another program wants a core.
        """
        import torch

        def run(part: Sequence[Prepared]) -> npt.NDArray[Any]:
            if several:
                torch.set_num_threads(1)
            with torch.inference_mode():
                return to_numpy(self._run(part, precision, runtime))

        if self.device != "cpu":
            several = False
            return run(batch)
        if precision == "float16":
            self._half  # noqa: B018  (is made once, before the threads)
        if runtime == "onnxruntime":
            self.session  # noqa: B018
        threads = torch.get_num_threads()
        several = threads > 1 and len(batch) > 1
        parts, rows = list(batches(batch, max(1, min(PER_THREAD, -(-len(batch) // threads))))), []
        try:
            with ThreadPoolExecutor(threads, "encode") as pool:
                for part, found in zip(parts, (pool.map if several else map)(run, parts), strict=True):
                    rows.append(found)
                    done(len(part))
        finally:
            torch.set_num_threads(threads)
        return np.concatenate(rows)

    def _images(self, batch: Sequence[Prepared]) -> npt.NDArray[Any]:
        return self._embedded(batch, self.precision, self.runtime)

    def launch(self, batch: Sequence[Prepared], done: Done = _ignored) -> Callable[[], FloatArray]:
        """Start embedding prepared images; on a GPU this returns before it is done."""
        import torch

        if self.device == "cpu":
            unit = self._unit([self._embedded(batch, self.precision, self.runtime, done)], "images")
            return lambda: unit
        with torch.inference_mode():
            rows = self._run(batch, self.precision, self.runtime)

        def wait() -> FloatArray:
            unit = self._unit([to_numpy(rows)], "images")
            done(len(batch))
            return unit

        return wait

    @property
    def batch_size(self) -> int:
        """The default number of images per batch, on a GPU according to its memory."""
        import torch

        if self.device == "cpu":
            return 16
        gigabytes = torch.cuda.get_device_properties(self.device).total_memory / 2**30
        return 256 if gigabytes > 30 else 128 if gigabytes > 14 else 64 if gigabytes > 7 else 32


class TwoTowers(TorchEncoder):
    """A torch encoder with a text tower too, as CLIP has; `moontide export` can write it as ONNX."""

    @abstractmethod
    def tokens(self, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
        """Cut prompts into the tokens of the text tower, on the device."""

    @abstractmethod
    def text_features(self, tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Embed what `tokens` returned, (n, d), of any length."""

    @abstractmethod
    def fast_tokenizer(self) -> Any:
        """Return the tokenizer as one of the tokenizers library that pads to full length, or None."""

    def _text(self, prompts: Sequence[str]) -> npt.NDArray[Any]:
        import torch

        with torch.inference_mode():
            return to_numpy(self.text_features(self.tokens(prompts)).float())


def batches(items: Sequence[Any], size: int = BATCH) -> Iterator[Sequence[Any]]:
    """Cut a sequence into parts that go through a model together.

    >>> [len(part) for part in batches(range(100))]
    [64, 36]
    """
    return (items[start : start + size] for start in range(0, len(items), size))


def check_precision(precision: str) -> str:
    """Refuse an unknown precision.

    >>> check_precision("half")
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: 'precision' must be one of auto, float32, float16, bfloat16. Got 'half' instead.
    """
    if precision not in PRECISIONS:
        raise OptionError(f"'precision' must be one of {', '.join(PRECISIONS)}. Got {precision!r} instead.")
    return precision


def _fast_bfloat16() -> bool:
    """Return whether this CPU has hardware support for bfloat16."""
    import torch

    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def cores() -> int:
    """Return how many cores this process may use.

    >>> cores() >= 1
    True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
