"""Encoders map images and class names to vectors of one space. They are found by file name or entry point.

>>> encoder_names()
('hf', 'onnx', 'openclip', 'tiny')
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from moontide.encoders.base import DEFAULT, Encoder
from moontide.errors import unknown_name

__all__ = ["DEFAULT", "Encoder", "encoder", "encoder_names", "encoder_type"]


@cache
def _builtin() -> dict[str, type[Encoder]]:
    """Return the encoders in this folder; their libraries are imported when one is created."""
    found = {}
    for info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, Encoder) and not inspect.isabstract(cls) and cls.__module__ == module.__name__:
                found[info.name] = cls
    return found


def encoder_names() -> tuple[str, ...]:
    """List the kinds of encoders: the files of this folder, and what packages register under `moontide.encoders`."""
    return tuple(sorted({*_builtin(), *(point.name for point in entry_points(group="moontide.encoders"))}))


def encoder_type(name: str) -> type[Encoder]:
    """Find the class of a kind of encoders.

    >>> encoder_type("hf").__name__
    'HF'
    """
    for point in entry_points(group="moontide.encoders", name=name):
        loaded: type[Encoder] = point.load()
        return loaded
    if name not in _builtin():
        raise unknown_name("encoder", name, encoder_names())
    return _builtin()[name]


def encoder(spec: str = DEFAULT, device: str = "cpu", precision: str = "auto", runtime: str = "auto") -> Encoder:
    """Create the encoder named by `spec`: KIND, KIND:MODEL, or a hub id or folder for the kind `hf`.

    precision: that images are embedded in, "auto", "float32", "float16" or "bfloat16". "auto" is half precision on a
    GPU, and bfloat16 on a CPU that multiplies in it, where vectors of photographs have a cosine of 0.9999 or more to
    those of float32; and float32 elsewhere. runtime: that embeds images on a CPU, "torch", "channels-last" (torch) or
    "onnxruntime"; "auto" is torch, unless another is measured to be faster (`moontide.encoders.runtimes.settle`).

    >>> encoder("hff:some/model")
    Traceback (most recent call last):
        ...
    moontide.errors.UnknownNameError: There is no encoder 'hff'. Did you mean 'hf'? Known: hf, onnx, openclip, tiny.
    """
    kind, colon, model = spec.partition(":")
    if not colon and kind not in encoder_names():
        kind, model = "hf", spec
    make: Any = encoder_type(kind)
    made: Encoder = make(model, device, precision)
    made.use(runtime)
    made.spec, made.typed = f"{kind}:{_absolute(model)}" if model else kind, spec
    return made


def _absolute(model: str) -> str:
    """Return a model as it is called from any folder: a path, or the path after ARCH/, in full.

    >>> _absolute("openai/clip-vit-base-patch16")
    'openai/clip-vit-base-patch16'
    """
    architecture, slash, checkpoint = model.partition("/")
    for start, path in (("", model), (architecture + slash, checkpoint)):
        if path and Path(path).expanduser().exists():
            return start + str(Path(path).expanduser().resolve())
    return model
