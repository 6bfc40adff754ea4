"""A pair of towers as ONNX files, which run without torch: `moontide export` writes the folder, `onnx:FOLDER` reads it.

    moontide.json   id, dimension, logit scale and bias, the preprocessing as steps, the other files with their SHA-256
    image.onnx      pixel_values (n, 3, height, width) -> (n, d)
    text.onnx       input_ids (n, length), and attention_mask where the model has one -> (n, d)
    tokenizer.json  of the tokenizers library

An export is checked before it gets its name: preprocessing, tokens and vectors must be those of the model it came from.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moontide.encoders.base import Encoder, Prepared, TwoTowers
from moontide.encoders.loading import saying
from moontide.encoders.steps import Steps, probes
from moontide.errors import FileError, InputError, OptionError, ResourceError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

FORMAT = 1
MANIFEST, IMAGE, TEXT, TOKENIZER = "moontide.json", "image.onnx", "text.onnx", "tokenizer.json"
TOLERANCE = 1e-4  # of the vectors of an export, and of its preprocessed pixels
PROBES = ("a photo of a cat.", "two dogs, 1930's style & more", "Übergröße", "a very " * 50 + "long name", "")


class ONNX(Encoder):
    """The towers of a folder that `export` wrote.

    >>> ONNX("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: no-such-folder is not the folder of an export: moontide.json is missing or damaged \
([Errno 2] No such file or directory: 'no-such-folder/moontide.json').
    """

    def __init__(self, model: str = "", device: str = "cpu", autocast: bool = False) -> None:
        folder = Path(model).expanduser()
        if autocast:
            raise OptionError("'autocast' has no effect on the encoder onnx; leave it out.")
        with saying(f"{model} is not the folder of an export: {MANIFEST} is missing or damaged"):
            held = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if held["format"] != FORMAT:
                raise FileError(f"{folder} has the format {held['format']}, and this Moontide reads {FORMAT}.")
            self.id, self.dim, self.preprocessing = str(held["id"]), int(held["dim"]), str(held["preprocessing"])
            self.logit_scale, self.logit_bias = float(held["logit_scale"]), float(held["logit_bias"])
            steps: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in held["steps"].items()}
            self.steps = Steps(**steps)
            files = dict(held["files"])
        try:
            import onnxruntime
            import PIL  # noqa: F401
            from tokenizers import Tokenizer
        except ImportError as error:
            raise missing_extra(str(error.name), "onnx", f"The encoder onnx:{model}") from None
        provider = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
        if device == "mps":
            raise ResourceError("onnxruntime does not run on mps; use the device 'cpu'.")
        if provider not in onnxruntime.get_available_providers():
            raise ResourceError("onnxruntime finds no CUDA device here; use the device 'cpu', or onnxruntime-gpu.")
        options = {"device_id": device.partition(":")[2] or "0"} if device != "cpu" else {}
        for name, digest in files.items():
            if not (folder / name).is_file() or _digest(folder / name) != digest:
                raise FileError(f"{folder / name} is missing or not what was exported (by its SHA-256); export again.")
        with saying(f"The towers or the tokenizer of {model} cannot be loaded; export again"):
            self.image, self.text = (
                onnxruntime.InferenceSession(folder / n, providers=[(provider, options)]) for n in (IMAGE, TEXT)
            )
            self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
            wanted = tuple(self.image.get_inputs()[0].shape[2:])
        if wanted != self.steps.crop:
            raise FileError(
                f"The preprocessing of {model} makes images of {self.steps.crop}, and its tower takes {wanted}."
            )

    def prepare(self, image: Image) -> Prepared:
        """Resize, crop and scale as the exported model did."""
        return {"pixel_values": self.steps(image)}

    def _images(self, batch: Sequence[Prepared]) -> npt.NDArray[Any]:
        pixels = np.stack([one["pixel_values"] for one in batch])
        features: npt.NDArray[Any] = self.image.run(None, {"pixel_values": pixels})[0]
        return features

    def _text(self, prompts: Sequence[str]) -> npt.NDArray[Any]:
        found = self.tokenizer.encode_batch(list(prompts))
        tokens = {"input_ids": [one.ids for one in found], "attention_mask": [one.attention_mask for one in found]}
        wanted = [one.name for one in self.text.get_inputs()]
        features: npt.NDArray[Any] = self.text.run(None, {name: np.asarray(tokens[name]) for name in wanted})[0]
        return features


def export(encoder: Encoder, folder: str | Path) -> ONNX:
    """Write the towers of an encoder of the kind hf or openclip to a new folder, and return the encoder made of it."""
    folder = Path(folder)
    if not isinstance(encoder, TwoTowers) or encoder.device != "cpu" or encoder.autocast:
        raise InputError(f"Only hf and openclip encoders on the CPU without autocast are exported. Got {encoder.id}.")
    if folder.exists():
        raise FileError(f"{folder} is there already; give the export a new folder.")
    steps, tokenizer = _steps(encoder), _tokenizer(encoder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        images = encoder.tensors([encoder.prepare(image) for image in probes()])
        _export(encoder.model, encoder.image_features, images, temporary / IMAGE)
        _export(encoder.model, encoder.text_features, encoder.tokens(PROBES), temporary / TEXT)
        tokenizer.save(str(temporary / TOKENIZER))
        held = {
            "format": FORMAT, "id": f"{encoder.id} (onnx)", "dim": encoder.dim, "logit_scale": encoder.logit_scale,
            "logit_bias": encoder.logit_bias, "preprocessing": encoder.preprocessing, "steps": asdict(steps),
            "files": {path.name: _digest(path) for path in sorted(temporary.iterdir())},
        }  # fmt: skip
        (temporary / MANIFEST).write_text(json.dumps(held, indent=1), encoding="utf-8")
        made = ONNX(str(temporary))
        _compare(made.encode_images(probes()), encoder.encode_images(probes()), "image vectors")
        _compare(made.encode_text(PROBES), encoder.encode_text(PROBES), "text vectors")
        os.rename(temporary, folder)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{folder} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return made


def _export(model: Any, function: Any, inputs: dict[str, Any], path: Path) -> None:
    """Trace a function of tensors by name and write it, the number of rows left open."""
    import torch

    class Tower(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return function(dict(zip(inputs, tensors, strict=True)))

    rows = tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs)
    form: dict[str, Any] = {"dynamic_shapes": (rows,), "input_names": list(inputs), "verbose": False}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's, about itself
            torch.onnx.export(Tower().eval(), tuple(inputs.values()), path, **form)
    except ImportError as error:
        raise missing_extra(str(error.name), "onnx", "moontide export") from None


def _steps(encoder: TwoTowers) -> Steps:
    steps = encoder.steps()
    if steps is None:
        raise InputError(f"The preprocessing of {encoder.id} is more than resize, crop and scale; it is not exported.")
    if not steps.equals(lambda image: encoder.prepare(image)["pixel_values"], TOLERANCE):
        raise InputError(f"The preprocessing of {encoder.id} is not what its configuration says; it is not exported.")
    return steps


def _tokenizer(encoder: TwoTowers) -> Any:
    tokenizer = encoder.fast_tokenizer()
    if tokenizer is None:
        raise InputError(
            f"The tokenizer of {encoder.id} has no form that works without its library; it is not exported."
        )
    _compare([one.ids for one in tokenizer.encode_batch(list(PROBES))], encoder.tokens(PROBES)["input_ids"], "tokens")
    return tokenizer


def _compare(made: npt.ArrayLike, source: npt.ArrayLike, what: str) -> None:
    worst = float(np.abs(np.asarray(made, dtype=np.float64) - np.asarray(source)).max())
    if worst > TOLERANCE:
        raise InputError(f"The {what} of the export differ from the model's by up to {worst:.2g}; it is not written.")


def _digest(path: Path) -> str:
    return hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()
