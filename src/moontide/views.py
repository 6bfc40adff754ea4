"""Augmented views of images for MTA: view 0 is the image itself, the others are random crops, half of them flipped.

As usual, a crop has 8 to 100 % of the area and an aspect ratio between 3:4 and 4:3. It is stretched to a square before
the encoder's own preprocessing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moontide.progress import track

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 224  # pixels of a stretched crop
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)


def make_views(encoder: Any, images: Sequence[Image], count: int = 64, seed: int = 0) -> np.ndarray[Any, Any]:
    """Embed `count` views of each image, (N, V, d) unit rows; the same seed gives the same crops.

    >>> from PIL import Image
    >>> class Brightness:
    ...     def encode_images(self, images):
    ...         return np.ones((len(images), 2), np.float32)
    >>> make_views(Brightness(), [Image.new("RGB", (9, 7))], count=5).shape
    (1, 5, 2)
    """
    rng = np.random.default_rng(seed)
    views = [
        encoder.encode_images([image, *(random_crop(image, rng) for _ in range(count - 1))])
        for image in track(images, "views")
    ]
    return np.stack(views)


def random_crop(image: Image, rng: np.random.Generator) -> Image:
    """Return a random part of an image as a square, mirrored half of the time.

    >>> from PIL import Image
    >>> random_crop(Image.new("RGB", (90, 70)), np.random.default_rng(0)).size
    (224, 224)
    """
    from PIL import Image as pillow

    width, height = image.size
    area = width * height * rng.uniform(*AREA)
    ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
    w = min(width, max(1, round(math.sqrt(area * ratio))))
    h = min(height, max(1, round(math.sqrt(area / ratio))))
    left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
    crop = image.resize((SIDE, SIDE), pillow.Resampling.BICUBIC, box=(left, top, left + w, top + h))
    return crop.transpose(pillow.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop
