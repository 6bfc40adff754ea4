"""A process that decodes images for another: requests come in as lines of JSON, pixels go out through shared memory.

    in   {"slot_bytes": n, "steps": {...} or null, "resize": false, ...}     the first line, `Terms`
         [number, slot, {"path": ...}]                                       an image, and the slot for its pixels
    out  ["ready"]
         [number, "pixels", [224, 224, 3], [read, decode, resize]]           in the slot, with the seconds it took
         [number, "image", [375, 500, 3], ...]                               the same, not resized
         [number, "jpeg", [69383], ...]                                      the file itself, for a device that decodes
         [number, "skip", "it is not an image of a known format"]

What does not fit into its slot is put into a file of the folder `spill`, and the kind ends in " file". A process that
dies takes nothing with it but the image that it had in hand.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
import warnings
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moontide.encoders.images import decode, is_plain_jpeg
from moontide.encoders.places import image_from
from moontide.encoders.steps import Steps
from moontide.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Terms:
    """Instructions for decoders."""

    memory: int | str  # the file descriptor, or path, of the shared memory
    slot_bytes: int
    slots: int
    spill: str  # a folder
    steps: dict[str, Any] | None  # what the model wants, or None for an image as it is
    resize: bool  # here; else images that fit into a slot are handed on as they were decoded
    jpeg: float = 0.0  # the share of plain JPEG files that is handed on as it is, chosen by their ids
    nice: int = 0

    def write(self) -> str:
        """Write the terms as JSON."""
        return json.dumps(asdict(self))


class Decoder:
    """Handles the requests of a decoding process one after another."""

    def __init__(self, terms: Terms, memory: Any) -> None:
        self.terms, self.memory = terms, memory
        self.steps = None if terms.steps is None else Steps.parse(terms.steps)

    def answer(self, number: int, slot: int, request: dict[str, Any]) -> list[Any]:
        """Decode an image into its slot, and return the line that reports it."""
        try:
            start = time.perf_counter()
            image = image_from(request)
            data = self._inline(slot, request) if "inline" in request else image.data()
            got = time.perf_counter()
            chosen = zlib.crc32(image.id.encode()) < self.terms.jpeg * 2**32  # the same ones in every run
            if chosen and isinstance(data, bytes) and is_plain_jpeg(data):
                return self._put(number, slot, "jpeg", np.frombuffer(data, dtype=np.uint8), [got - start, 0.0, 0.0])
            picture = decode(data, self.steps) if isinstance(data, bytes) else data
            decoded = time.perf_counter()
            kind, pixels = self._prepared(picture)
            return self._put(number, slot, kind, pixels, [got - start, decoded - got, time.perf_counter() - decoded])
        except ImageError as error:
            return [number, "skip", str(error)]

    def _prepared(self, picture: Image) -> tuple[str, npt.NDArray[np.uint8]]:
        fits = picture.width * picture.height * 3 <= self.terms.slot_bytes
        if self.steps is not None and (self.terms.resize or not fits):
            return "pixels", self.steps.pixels(picture)
        return "image", np.asarray(picture)

    def _inline(self, slot: int, request: dict[str, Any]) -> Any:
        """Return what the other process put into the slot, or the spill: a file, or RGB pixels."""
        size = request["inline"]
        if size > self.terms.slot_bytes:
            path = Path(self.terms.spill) / f"{slot}.in"
            data = path.read_bytes()
            path.unlink()
        else:
            start = slot * self.terms.slot_bytes
            data = bytes(self.memory[start : start + size])
        if "size" not in request:
            return data
        from PIL import Image

        return Image.frombuffer("RGB", tuple(request["size"]), data, "raw", "RGB", 0, 1)

    def _put(self, number: int, slot: int, kind: str, array: npt.NDArray[np.uint8], seconds: list[float]) -> list[Any]:
        if array.nbytes > self.terms.slot_bytes:
            kind += " file"
            array.tofile(Path(self.terms.spill) / f"{slot}.out")
        else:
            held = np.frombuffer(self.memory, np.uint8, array.nbytes, slot * self.terms.slot_bytes)
            held.reshape(array.shape)[...] = array
        return [number, kind, array.shape, seconds]


def main() -> None:
    """Answer requests until there are no more."""
    lines = sys.stdin
    terms = Terms(**json.loads(lines.readline()))
    warnings.simplefilter("ignore")  # of odd metadata
    if terms.nice and hasattr(os, "nice"):
        os.nice(terms.nice)
    size = terms.slots * terms.slot_bytes
    if isinstance(terms.memory, str):
        with open(terms.memory, "r+b") as handle:
            memory = mmap.mmap(handle.fileno(), size)
    else:
        memory = mmap.mmap(terms.memory, size)
    decoder = Decoder(terms, memory)
    out = os.dup(1)  # what a library prints goes elsewhere
    os.dup2(2, 1)
    _send(out, ["ready"])
    for line in lines:
        _send(out, decoder.answer(*json.loads(line)))


def _send(out: int, answer: list[Any]) -> None:
    os.write(out, (json.dumps(answer) + "\n").encode())


if __name__ == "__main__":
    main()
