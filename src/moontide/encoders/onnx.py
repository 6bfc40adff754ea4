"""A pair of towers as ONNX files, which run without torch: `moontide export` writes the folder, `onnx:FOLDER` reads it.

    moontide.json   id, dimension, logit scale and bias, the preprocessing as steps, the precision and the smallest
                    cosine to the model on photographs, the other files with their SHA-256
    image.onnx      pixel_values (n, 3, height, width) -> (n, d)
    text.onnx       input_ids (n, length), and attention_mask where the model has one -> (n, d)
    tokenizer.json  of the tokenizers library

An export is checked before it gets its final name: preprocessing, tokens and vectors must match the original model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moontide.encoders.base import Encoder, Prepared, TwoTowers
from moontide.encoders.loading import onnx_runtime, saying
from moontide.encoders.steps import TOLERANCE, Steps, photographs, probes
from moontide.errors import FileError, InputError, OptionError, ResourceError, missing_extra
from moontide.store.disk import read_json

FORMAT = 1
MANIFEST, IMAGE, TEXT, TOKENIZER = "moontide.json", "image.onnx", "text.onnx", "tokenizer.json"
PROBES = ("a photo of a cat.", "two dogs, 1930's style & more", "Übergröße", "a very " * 50 + "long name", "")


class ONNX(Encoder):
    """The towers of a folder that `export` wrote.

    >>> ONNX("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: no-such-folder is not the folder of an export: moontide.json is missing.
    """

    steps: Steps
    runtime = "onnxruntime"

    def __init__(self, model: str = "", device: str = "cpu", precision: str = "auto") -> None:
        folder = Path(model).expanduser()
        if precision not in ("auto", "float32"):
            raise OptionError(
                f"'precision' of the encoder onnx is that of its export. Got {precision!r}; leave it out."
            )
        if not os.path.isfile(folder / MANIFEST):
            raise FileError(f"{model} is not the folder of an export: {MANIFEST} is missing.")
        with saying(f"{model} is not the folder of an export: {MANIFEST} is damaged"):
            held = read_json(folder / MANIFEST)
            if held["format"] != FORMAT:
                raise FileError(f"{folder} has the format {held['format']}, but this Moontide reads {FORMAT}.")
            self.id, self.dim, self.preprocessing = str(held["id"]), int(held["dim"]), str(held["preprocessing"])
            self.logit_scale, self.logit_bias = float(held["logit_scale"]), float(held["logit_bias"])
            self.steps = Steps.parse(held["steps"])
            self.precision = str(held.get("precision", "float32"))
            files = {Path(name).name: digest for name, digest in held["files"].items()}
        try:
            import PIL  # noqa: F401
            from tokenizers import Tokenizer

            onnxruntime = onnx_runtime()
        except ImportError as error:
            raise missing_extra(str(error.name), "onnx", f"The encoder onnx:{model}") from None
        provider = "CPUExecutionProvider" if device == "cpu" else "CUDAExecutionProvider"
        if device == "mps":
            raise ResourceError("onnxruntime does not run on mps; use the device 'cpu'.")
        if provider not in onnxruntime.get_available_providers():
            raise ResourceError("onnxruntime finds no CUDA device here; use the device 'cpu', or onnxruntime-gpu.")
        where = {"device_id": device.partition(":")[2] or "0"} if device != "cpu" else {}
        for name, known in files.items():
            if not (folder / name).is_file() or digest(folder / name) != known:
                raise FileError(f"{folder / name} is missing or has changed since the export; export again.")
        with saying(f"The towers or the tokenizer of {model} cannot be loaded; export again"):
            options = onnxruntime.SessionOptions()
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # leave the cores to the decoders
            self.image, self.text = (
                onnxruntime.InferenceSession(folder / n, options, providers=[(provider, where)]) for n in (IMAGE, TEXT)
            )
            self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
            wanted = tuple(self.image.get_inputs()[0].shape[2:])
        if wanted != self.steps.crop:
            raise FileError(
                f"The preprocessing of {model} makes images of {self.steps.crop}, but its tower takes {wanted}."
            )

    def _images(self, batch: Sequence[Prepared]) -> npt.NDArray[Any]:
        mean, std = (np.asarray(values, dtype=np.float32) for values in (self.steps.mean, self.steps.std))
        pixels: npt.NDArray[Any] = (
            np.stack([one["pixels"] for one in batch]).astype(np.float32) / np.float32(255) - mean
        ) / std
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))  # (n, 3, height, width)
        features: npt.NDArray[Any] = self.image.run(None, {"pixel_values": pixels})[0]
        return features

    def _text(self, prompts: Sequence[str]) -> npt.NDArray[Any]:
        found = self.tokenizer.encode_batch(list(prompts))
        tokens = {"input_ids": [one.ids for one in found], "attention_mask": [one.attention_mask for one in found]}
        wanted = [one.name for one in self.text.get_inputs()]
        features: npt.NDArray[Any] = self.text.run(None, {name: np.asarray(tokens[name]) for name in wanted})[0]
        return features


class Exported(NamedTuple):
    """An export, and measurements on photographs on this machine."""

    encoder: ONNX
    cosine: float  # the smallest one of its vectors to those of the model in float32
    images_per_second: float
    torch_images_per_second: float  # of the model that was exported

    def __str__(self) -> str:
        """Describe the export in a sentence."""
        speed, other = self.images_per_second, self.torch_images_per_second
        faster = "onnxruntime" if speed >= other else "torch"
        return (
            f"{self.encoder.id}, {self.encoder.dim} dimensions; cosine {self.cosine:.5f} or more to the model; "
            f"{speed:.1f} images/s, and {other:.1f} in torch, so {faster} is faster here"
        )


def export(encoder: Encoder, folder: str | Path, int8: bool = False) -> Exported:
    """Write the towers of an hf or openclip encoder to a new folder, and return the exported encoder.

    int8: multiply in 8 bits in the image tower; the loss is part of what is returned, and of `moontide.json`.
    """
    folder = Path(folder)
    if not isinstance(encoder, TwoTowers) or encoder.device != "cpu":
        raise InputError(f"Only hf and openclip encoders on the CPU can be exported. Got {encoder.id}.")
    if folder.exists():
        raise FileError(f"{folder} exists already; choose a new folder for the export.")
    steps, tokenizer = _steps(encoder), _tokenizer(encoder)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        images = encoder.tensors([encoder.prepare(image) for image in probes()])
        export_tower(encoder.model, encoder.image_features, images, temporary / IMAGE)
        if int8:
            _quantise(temporary)
        export_tower(encoder.model, encoder.text_features, encoder.tokens(PROBES), temporary / TEXT)
        tokenizer.save(str(temporary / TOKENIZER))
        held = {
            "format": FORMAT, "id": f"{encoder.id} (onnx{' int8' if int8 else ''})", "dim": encoder.dim,
            "logit_scale": encoder.logit_scale, "logit_bias": encoder.logit_bias,
            "preprocessing": encoder.preprocessing, "steps": asdict(steps),
            "precision": "int8" if int8 else "float32",
            "files": {path.name: digest(path) for path in sorted(temporary.iterdir())},
        }  # fmt: skip
        (temporary / MANIFEST).write_text(json.dumps(held, indent=1), encoding="utf-8")
        made = ONNX(str(temporary))
        _compare(made.encode_text(PROBES), encoder.encode_text(PROBES), "text vectors")
        found = _measured(made, encoder)
        if not int8:
            batch = [encoder.prepare(image) for image in probes()]
            _compare(made.encode_prepared(batch), _unit(encoder, batch), "image vectors")
        (temporary / MANIFEST).write_text(json.dumps({**held, "cosine": found.cosine}, indent=1), encoding="utf-8")
        os.rename(temporary, folder)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{folder} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return found


def _unit(encoder: TwoTowers, batch: Sequence[Prepared]) -> npt.NDArray[Any]:
    return encoder._unit([encoder._embedded(batch, "float32")], "images")


def _measured(made: ONNX, encoder: TwoTowers) -> Exported:
    """Compare an export with its model on photographs, and time both."""
    batch = [encoder.prepare(image) for image in photographs()]
    cosine = float((made.encode_prepared(batch) * _unit(encoder, batch)).sum(axis=1).min())
    encoder.encode_prepared(batch)
    speeds = []
    for one in (made, encoder):
        start = time.perf_counter()
        one.encode_prepared(batch)
        speeds.append(len(batch) / (time.perf_counter() - start))
    return Exported(made, cosine, *speeds)


def _quantise(folder: Path) -> None:
    """Write the weights of the image tower in 8 bits; activations are brought to 8 bits as they come."""
    try:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError as error:
        raise missing_extra(str(error.name), "onnx", "moontide export --int8") from None
    model = onnx.load(folder / IMAGE)
    del model.graph.value_info[:]  # the exporter's shapes do not survive onnxruntime's own inference of them
    for path in folder.iterdir():
        path.unlink()
    with tempfile.TemporaryDirectory() as temporary:
        onnx.save(model, f"{temporary}/image.onnx", save_as_external_data=model.ByteSize() > 2**30)
        logging.disable(logging.WARNING)  # of steps that do not help here
        try:
            quantize_dynamic(
                f"{temporary}/image.onnx", folder / IMAGE, weight_type=QuantType.QInt8,
                op_types_to_quantize=["MatMul", "Gemm"], extra_options={"MatMulConstBOnly": True},
            )  # fmt: skip
        finally:
            logging.disable(logging.NOTSET)


def export_tower(model: Any, function: Any, inputs: Mapping[str, Any], path: Path) -> None:
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
    if encoder.steps is None:
        raise InputError(f"The preprocessing of {encoder.id} is more than resize, crop and scale: not exportable.")
    return encoder.steps


def _tokenizer(encoder: TwoTowers) -> Any:
    tokenizer = encoder.fast_tokenizer()
    if tokenizer is None:
        raise InputError(f"The tokenizer of {encoder.id} does not work without its library; it cannot be exported.")
    _compare([one.ids for one in tokenizer.encode_batch(list(PROBES))], encoder.tokens(PROBES)["input_ids"], "tokens")
    return tokenizer


def _compare(made: npt.ArrayLike, source: npt.ArrayLike, what: str) -> None:
    worst = float(np.abs(np.asarray(made, dtype=np.float64) - np.asarray(source)).max())
    if worst > TOLERANCE:
        raise InputError(f"The {what} of the export differ from the model's by up to {worst:.2g}; it is not written.")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    >>> len(digest(Path(__file__)))
    64
    """
    return hashlib.sha256(np.memmap(path, mode="r").data).hexdigest()
