"""Resize, crop and scale an image: the preprocessing of the usual models, as a few numbers that a file can hold.

Resizing and cropping give 8-bit pixels, which is what decoders hand on; scaling to floats is left to the device that
the model runs on. `on_device` resizes there too, by the arithmetic of Pillow: a filter over the columns, rounded to
8 bits, then one over the rows, rounded again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from moontide.encoders.base import FloatArray

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers
FILTERS = {BILINEAR: 1.0, BICUBIC: 2.0}  # that `on_device` knows, with the pixels they reach to either side
TOLERANCE = 1e-4  # of scaled pixels, for two preprocessings to be the same
GAP = 6  # how many times too long the sides are after a JPEG was decoded at a part of its size
ROWS = 2**26  # numbers that are resized together on a device


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
        pixels = self.pixels(image).transpose(2, 0, 1)  # (3, height, width)
        mean, std = (np.asarray(values, dtype=np.float32)[:, None, None] for values in (self.mean, self.std))
        scaled: FloatArray = (pixels.astype(np.float32) / np.float32(255) - mean) / std
        return scaled

    def pixels(self, image: Image) -> npt.NDArray[np.uint8]:
        """Resize and crop, (height, width, 3)."""
        height, width, top, left = self.frame(*image.size)
        if image.size != (width, height):
            image = image.resize((width, height), self.resample)
        return np.array(np.asarray(image)[top : top + self.crop[0], left : left + self.crop[1]])

    def frame(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return to which height and width an image is resized, and where the crop starts: top and left.

        >>> Steps(224, (224, 224), 3, (0.5,) * 3, (0.5,) * 3).frame(500, 375)
        (224, 298, 0, 37)
        """
        high, wide = self._resized(width, height)
        return high, wide, self._start(high, self.crop[0]), self._start(wide, self.crop[1])

    def least(self, width: int, height: int) -> int:
        """Return how often the size of an image can be halved before it is resized, its sides 6 times too long still.

        >>> steps = Steps(224, (224, 224), 3, (0.5,) * 3, (0.5,) * 3)
        >>> steps.least(500, 375), steps.least(4000, 3000)
        (0, 1)
        """
        high, wide = self._resized(width, height)
        ratio = min(width / wide, height / high) / GAP
        return max(0, min(3, int(np.log2(ratio)))) if ratio >= 1 else 0

    def on_device(self, images: torch.Tensor) -> torch.Tensor:
        """Resize and crop images of one size on their device, (n, H, W, 3) -> (n, height, width, 3), all of 8 bits.

        >>> import torch
        >>> from PIL import Image
        >>> steps, noise = Steps(8, (8, 8), 3, (0.5,) * 3, (0.5,) * 3), np.random.default_rng(0)
        >>> pixels = noise.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        >>> there = steps.on_device(torch.from_numpy(pixels)[None])[0].numpy()
        >>> np.abs(there.astype(int) - steps.pixels(Image.fromarray(pixels))).max() <= 1
        np.True_
        """
        import torch

        n, height, width, _ = images.shape
        high, wide, top, left = self.frame(width, height)
        columns = _placed((width, wide, left, self.crop[1]), self.resample, images.device)  # (width, W)
        rows = _placed((height, high, top, self.crop[0]), self.resample, images.device)  # (height, H)
        parts = []
        for some in images.split(max(1, ROWS // (height * width * 3))):
            across = _rounded(torch.einsum("nhwc,ow->nhoc", some.float(), columns))  # (n, H, crop, 3)
            parts.append(_rounded(torch.einsum("nhwc,oh->nowc", across, rows)).to(torch.uint8))
        return torch.cat(parts) if n else images.new_zeros((0, *self.crop, 3))

    def scaled(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale pixels on their device, (n, height, width, 3) of 8 bits -> (n, 3, height, width) of floats."""
        mean, std = (_constants(values, pixels.device) for values in (self.mean, self.std))
        return (pixels.permute(0, 3, 1, 2).float() / 255 - mean) / std

    def equals(self, prepare: Callable[[Image], FloatArray], tolerance: float) -> bool:
        """Return whether another preprocessing does the same, on images of several shapes."""
        pairs = ((self(image), prepare(image)) for image in probes())
        return all(a.shape == b.shape and np.abs(a - b).max() <= tolerance for a, b in pairs)

    def describe(self) -> str:
        """Write the steps as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(held: dict[str, Any]) -> Steps:
        """Make steps of what JSON holds.

        >>> steps = Steps(8, (8, 8), 3, (0.5,) * 3, (0.5,) * 3)
        >>> Steps.parse(json.loads(steps.describe())) == steps
        True
        """
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in held.items()}
        return Steps(**values)

    def _resized(self, width: int, height: int) -> tuple[int, int]:
        if not isinstance(self.resize, int):
            return self.resize
        short, long = min(width, height), max(width, height)
        other = int(self.resize * long / short)
        return (self.resize, other) if height < width else (other, self.resize)

    def _start(self, length: int, crop: int) -> int:
        return round((length - crop) / 2) if self.round_even else (length - crop) // 2


@lru_cache(maxsize=256)
def _placed(sizes: tuple[int, int, int, int], resample: int, device: torch.device) -> torch.Tensor:
    """Return `_weights` on a device; a copy each time would make the CPU wait for the GPU."""
    import torch

    return torch.from_numpy(_weights(*sizes, resample)).to(device)


@lru_cache(maxsize=64)
def _constants(values: tuple[float, float, float], device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor(values, device=device)[:, None, None]


def _weights(length: int, resized: int, start: int, count: int, resample: int) -> FloatArray:
    """Return what each of `length` pixels in a row adds to `count` pixels, from `start`, of the resized row."""
    scale = length / resized
    reach = FILTERS[resample] * max(scale, 1.0)
    centre = (np.arange(start, start + count) + 0.5) * scale  # (count,)
    low = np.maximum(0, (centre - reach + 0.5).astype(np.int64))
    high = np.minimum(length, (centre + reach + 0.5).astype(np.int64))
    at = np.arange(length)
    x = np.abs((at[None, :] - centre[:, None] + 0.5) / max(scale, 1.0))  # (count, length)
    if resample == BILINEAR:
        value = np.maximum(0, 1 - x)
    else:  # Keys' cubic with a = -1/2
        value = np.where(x < 1, (1.5 * x - 2.5) * x * x + 1, np.where(x < 2, ((-0.5 * x + 2.5) * x - 4) * x + 2, 0))
    value = value * ((at >= low[:, None]) & (at < high[:, None]))
    weights: FloatArray = (value / value.sum(axis=1, keepdims=True)).astype(np.float32)
    return weights


def _rounded(values: torch.Tensor) -> torch.Tensor:
    return (values + 0.5).floor().clamp(0, 255)


def probes() -> list[Image]:
    """Return images of noise to compare encoders on.

    >>> len(probes())
    4
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    sizes = ((40, 60), (61, 40), (333, 500), (35, 40))
    return [Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]


def photographs() -> list[Image]:
    """Return eight photographs of clothes (CC0, beside this file) to compare precisions on.

    >>> len(photographs())
    8
    """
    from importlib.resources import files

    from PIL import Image

    found = []
    for path in sorted(files("moontide.encoders").joinpath("photos").iterdir(), key=lambda path: path.name):
        if path.name.endswith(".jpg"):
            with path.open("rb") as handle:
                found.append(Image.open(handle).convert("RGB"))
    return found
