"""Decode image files to upright RGB, whatever kind of image they hold.

    turned by EXIF       turned upright
    alpha, transparency  put on white
    animated             the first frame
    CMYK, palette, grey  converted
    16 bits and more     scaled to 8: by 65535 for 16-bit files, by the range that holds the values (1, 255, 65535 or
                         their maximum) for 32-bit ones

Only the decoders in `FORMATS` are tried, never those that run other programs. Anything that cannot be decoded is an
`ImageError` that says why: no image, damaged, cut short, too large, too elongated.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moontide.errors import ImageError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_PIXELS = 89_478_485  # Pillow's own limit: 256 MiB of RGB
MAX_RATIO = 100  # of the sides: resizing a line to a square crop would make a giant of it
MAX_BYTES = 2**29  # of a file


def decode(file: BinaryIO | Path) -> Image:
    """Decode an image to upright RGB.

    >>> import io
    >>> decode(io.BytesIO(b"not an image"))
    Traceback (most recent call last):
        ...
    moontide.errors.ImageError: it is no image of a known kind
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise missing_extra("pillow", "hf", "Reading images") from None
    try:
        with Image.open(file, formats=_formats()) as image:
            _check_size(*image.size)
            image.load()
            return _rgb(_upright(image))
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError("it is no image of a known kind") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"it has more than the {MAX_PIXELS / 1e6:.0f} million pixels that are allowed") from None
    except MemoryError:
        raise ImageError("it does not fit into memory") from None
    except Exception as error:  # the decoders raise whatever they stumble over in a broken file
        why = re.sub(r"\s*<[^>]* at 0x[^>]*>", "", str(error)).strip().partition("\n")[0].rstrip(".")
        why = why or type(error).__name__
        raise ImageError(f"it is damaged or cut short ({why})") from error


@cache
def _formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"it is {width} x {height} pixels, more than the {MAX_PIXELS / 1e6:.0f} million that are allowed"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(f"it is {width} x {height} pixels, more than {MAX_RATIO} times as long as wide")


def _upright(image: Image) -> Image:
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF data say nothing about the picture, which is whole
        return image


def _rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode[0] in "IF":
        image = Image.fromarray(_eight_bits(np.asarray(image), image.mode))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _eight_bits(values: npt.NDArray[Any], mode: str) -> npt.NDArray[np.uint8]:
    """Scale grey values of more than 8 bits to 0 ... 255."""
    values = np.nan_to_num(values.astype(np.float64))
    top = 65535.0
    if ";16" not in mode:
        largest = float(values.max())
        ranges = (1.0, 255.0, 65535.0) if mode == "F" else (255.0, 65535.0)
        top = next((top for top in ranges if largest <= top), largest)
    return np.clip(np.rint(255 * values / top), 0, 255).astype(np.uint8)
