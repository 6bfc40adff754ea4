"""The fastest runtime and precision for images on this CPU, measured once per model.

    torch          the model as it is
    channels-last  by torch, the channels of a pixel side by side in memory: for towers of convolutions
    onnxruntime    an export of the image tower

Each is timed on photographs, in float32 and, by torch, in bfloat16 where the CPU multiplies in it. Those whose vectors
have a smaller cosine than `CLOSE` to float32 in torch are rejected. The result is kept in the user's cache folder, with
the export if that is the fastest, under a name that depends on the weights, the machine and the library versions.

    ~/.cache/moontide/runtimes/NAME/measured-auto.json  every way with its images/s and cosine, the fastest first; the
                                                        same for users who ask for float32 or another precision
    ~/.cache/moontide/runtimes/NAME/image.onnx          the tower, whose weights may lie beside it
    ~/.cache/moontide/runtimes/NAME/files.json          the files of the tower with their SHA-256
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np

from moontide.encoders.base import CLOSE, PRECISIONS, Encoder, TorchEncoder, cores
from moontide.encoders.loading import cache_folder, onnx_runtime, saying
from moontide.encoders.onnx import IMAGE, digest, export_tower
from moontide.errors import InputError, MoontideError, missing_extra
from moontide.store.disk import replacing

log = logging.getLogger(__name__)

LONG = 300.0  # seconds of encoding from which on it pays to measure first, which takes half a minute or so
ROUNDS = 3  # through all ways; the best time of each counts, since other programs only ever take time away
GAIN = 1.05  # how much faster another way than torch in the same precision must be
FILES = "files.json"
_FOLDERS: WeakKeyDictionary[TorchEncoder, Path] = WeakKeyDictionary()  # hashing weights takes a second


@dataclass(frozen=True)
class Way:
    """A runtime and precision, with their measurements."""

    runtime: str
    precision: str
    images_per_second: float
    cosine: float  # the smallest one to float32 in torch, over some photographs

    def __str__(self) -> str:
        """Name the runtime and precision, with the speed."""
        return f"{self.runtime} in {self.precision} {self.images_per_second:.1f} images/s"


def settle(encoder: Encoder, images: int | None = None) -> str:
    """Choose the fastest runtime for an encoder, unless the user chose one; return the measurements as a sentence.

    images: how many are to be embedded. Few are not worth measuring, and go the way that was measured before, or by
    torch; None measures in any case.

    >>> settle(Encoder.__new__(type("Other", (Encoder,), {"_images": None, "_text": None})))
    ''
    """
    if not _open(encoder):
        return ""
    known = (cache_folder() / "runtimes").exists()  # else weights need not be hashed
    ways = before = _held(_folder(encoder), encoder.asked) if known else []
    if not before:
        if _not_worth_measuring(encoder, images):
            return ""
        ways = measure(encoder)
    best = ways[0]
    try:
        if best.runtime == "onnxruntime":
            encoder.session  # noqa: B018
        encoder.use(best.runtime)
    except MoontideError as error:  # the export is gone, and cannot be made again
        log.info("%s", error)
        return ""
    encoder.precision = best.precision
    others = f" ({', '.join(map(str, ways[1:]))})" if ways[1:] else ""
    sentence = f"images are embedded with {best}, the fastest for {encoder.id} here{others}"
    log.info("%s", sentence)
    return "" if before and images is not None else sentence


def follow(encoder: Encoder, runtime: str, precision: str) -> None:
    """Use the runtime and precision that a store was begun with, unless the user chose others."""
    if _open(encoder) and runtime:
        encoder.use(runtime)
        if encoder.asked == "auto":
            encoder.precision = precision


def _open(encoder: Encoder) -> TypeGuard[TorchEncoder]:
    """Return whether an encoder has several runtimes and none is chosen yet."""
    return isinstance(encoder, TorchEncoder) and encoder.device == "cpu" and not encoder.settled


def _not_worth_measuring(encoder: TorchEncoder, images: int | None) -> bool:
    """Return whether measuring takes longer than it saves; torch is timed, but for so few that no model takes long."""
    if images is None or images < LONG / 10:
        return images is not None
    start = time.perf_counter()
    encoder._embedded(encoder._photographs, "float32")
    return images * (time.perf_counter() - start) / len(encoder._photographs) < LONG


def measure(encoder: TorchEncoder) -> list[Way]:
    """Time every way to embed images that there is here; return those that are close to float32, the fastest first."""
    ways = _ways(encoder)
    seconds: dict[tuple[str, str], float] = dict.fromkeys(ways, np.inf)
    batch = encoder._photographs
    for _ in range(ROUNDS):
        for runtime, precision in ways:
            encoder._lay_out(runtime)
            start = time.perf_counter()
            encoder._embedded(batch, precision, runtime)
            seconds[runtime, precision] = min(seconds[runtime, precision], time.perf_counter() - start)
    encoder._lay_out(encoder.runtime)
    found = [Way(*way, len(batch) / taken, ways[way]) for way, taken in seconds.items()]
    found.sort(key=lambda way: -way.images_per_second / (GAIN if way.runtime != encoder.runtime else 1.0))
    _keep(_folder(encoder), encoder.asked, found)
    return found


def _ways(encoder: TorchEncoder) -> dict[tuple[str, str], float]:
    """Return the runtimes and precisions that this model and machine have, with their closeness to float32."""
    precisions = ["float32", *encoder.halves()] if encoder.asked == "auto" else [encoder.asked]
    runtimes = ["torch"]
    if sum(weights.ndim == 4 for weights in encoder.visual.parameters()) > 1:  # one only cuts the image into patches
        runtimes.append("channels-last")
    ways = [(runtime, precision) for precision in precisions for runtime in runtimes]
    if "float32" in precisions:
        try:
            encoder.session  # noqa: B018  (cannot be had for every model)
            ways.append(("onnxruntime", "float32"))
        except MoontideError as error:  # torch does it, then
            log.info("%s", error)
    close = {(runtime, precision): encoder.closeness(precision, runtime) for runtime, precision in ways}
    return {way: cosine for way, cosine in close.items() if cosine >= CLOSE or way[1] == encoder.asked}


def tower(encoder: TorchEncoder) -> Any:
    """Return the session of onnxruntime that runs the image tower of an encoder, which is exported if need be."""
    try:
        onnxruntime = onnx_runtime()
    except ImportError as error:
        raise missing_extra(str(error.name), "onnx", "The runtime onnxruntime") from None
    if encoder.steps is None:
        raise InputError(f"The preprocessing of {encoder.id} is more than resize, crop and scale; torch embeds it.")
    folder = _folder(encoder)
    if not _whole(folder):
        _export(encoder, folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # each thread runs it on images of its own
    options.log_severity_level = 3
    with saying(f"The export in {folder} cannot be loaded; remove it"):
        return onnxruntime.InferenceSession(folder / IMAGE, options, providers=["CPUExecutionProvider"])


def _export(encoder: TorchEncoder, folder: Path) -> None:
    """Write the image tower of an encoder to the cache folder."""
    images = encoder.tensors(encoder._photographs[:3])
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        with saying(f"The image tower of {encoder.id} cannot be exported to onnxruntime; torch embeds it"):
            export_tower(encoder.model, encoder.image_features, images, temporary / IMAGE)
        files = {path.name: digest(path) for path in sorted(temporary.iterdir())}
        (temporary / FILES).write_text(json.dumps(files), encoding="utf-8")
        folder.mkdir(exist_ok=True)
        for path in sorted(temporary.iterdir(), key=lambda path: path.name == FILES):  # last: then all are there
            os.replace(path, folder / path.name)
    except OSError as error:
        if isinstance(error, MoontideError):
            raise
        raise InputError(f"The folder {folder} cannot be written ({error.strerror}); torch embeds images.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _whole(folder: Path) -> bool:
    """Return whether an export lies in a folder as it was written."""
    try:
        files = json.loads((folder / FILES).read_text(encoding="utf-8"))
        return IMAGE in files and all(digest(folder / Path(name).name) == known for name, known in files.items())
    except (OSError, ValueError, AttributeError):
        return False


def _folder(encoder: TorchEncoder) -> Path:
    """Return the folder of what was measured of an encoder: another one for other weights, libraries or machines."""
    import torch

    if encoder in _FOLDERS:
        return _FOLDERS[encoder]
    try:
        runtime = onnx_runtime().__version__
    except ImportError:
        runtime = "none"
    machine = [_processor(), cores(), torch.get_num_threads(), torch.__version__, runtime]
    digest = hashlib.sha256(json.dumps([1, *machine, encoder.id, str(encoder.visual)]).encode())
    for name, weights in encoder.model.state_dict().items():
        digest.update(name.encode())
        digest.update(weights.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    _FOLDERS[encoder] = cache_folder() / "runtimes" / digest.hexdigest()[:24]
    return _FOLDERS[encoder]


def _processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _held(folder: Path, precision: str) -> list[Way]:
    """Return earlier measurements for this precision, or None."""
    try:
        return [Way(**one) for one in json.loads((folder / _name(precision)).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):  # not there, or damaged
        return []


def _keep(folder: Path, precision: str, ways: list[Way]) -> None:
    """Save the measurements; an export that was never fastest is removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / _name(precision)) as handle:
            handle.write(json.dumps([asdict(way) for way in ways], indent=1).encode())
    except OSError:  # a home that cannot be written: it is measured again next time
        return
    if not any(_held(folder, name)[:1] and _held(folder, name)[0].runtime == "onnxruntime" for name in PRECISIONS):
        for path in (folder / FILES, *folder.glob(f"{IMAGE}*")):
            path.unlink(missing_ok=True)


def _name(precision: str) -> str:
    return f"measured-{precision}.json"
