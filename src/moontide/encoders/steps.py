"""Resize, crop and scale an image: the preprocessing of the usual models, as a few numbers that a file can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from moontide.encoders.base import FloatArray

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Steps:
    """From an RGB image of any size to an array (3, height, width).

    >>> from PIL import Image
    >>> steps = Steps((4, 4), (4, 4), 3, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    >>> steps(Image.new("RGB", (9, 5), "white")).max()
    np.float32(1.0)
    """

    resize: tuple[int, int] | int  # height and width, or the shorter side
    crop: tuple[int, int]  # height and width at the centre of what was resized
    resample: int  # Pillow's number of the filter, 3 for bicubic
    mean: tuple[float, float, float]  # of red, green and blue, in units of 255
    std: tuple[float, float, float]
    round_even: bool = (
        False  # a crop that is half a pixel off starts at the even pixel (torchvision), else at the first
    )

    def __call__(self, image: Image) -> FloatArray:
        """Apply the steps."""
        height, width = self._resized(*image.size)
        top, left = (self._start(a, b) for a, b in zip((height, width), self.crop, strict=True))
        pixels = np.asarray(image.resize((width, height), self.resample))  # (H, W, 3)
        pixels = np.ascontiguousarray(pixels[top : top + self.crop[0], left : left + self.crop[1]].transpose(2, 0, 1))
        mean, std = (np.asarray(values, dtype=np.float32)[:, None, None] for values in (self.mean, self.std))
        scaled: FloatArray = (pixels.astype(np.float32) / np.float32(255) - mean) / std
        return scaled

    def equals(self, prepare: Callable[[Image], FloatArray], tolerance: float) -> bool:
        """Tell whether another preprocessing does the same, on images of several shapes."""
        pairs = ((self(image), prepare(image)) for image in probes())
        return all(a.shape == b.shape and np.abs(a - b).max() <= tolerance for a, b in pairs)

    def describe(self) -> str:
        """Write the steps as JSON."""
        return json.dumps(asdict(self))

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        if not isinstance(self.resize, int):
            return self.resize
        short, long = min(width, height), max(width, height)
        other = int(self.resize * long / short)
        return (self.resize, other) if height < width else (other, self.resize)

    def _start(self, length: int, crop: int) -> int:
        return round((length - crop) / 2) if self.round_even else (length - crop) // 2


def probes() -> list[Image]:
    """Return images of noise to compare encoders on.

    >>> len(probes())
    4
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    sizes = ((40, 60), (61, 40), (333, 500), (35, 40))
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
