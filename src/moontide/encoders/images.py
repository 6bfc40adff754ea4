"""Decode image files to upright RGB, whatever kind of image they hold.

    turned by EXIF       turned upright
    alpha, transparency  put on white
    animated             the first frame
    CMYK, palette, grey  converted
    16 bits and more     scaled to 8: by 65535 for 16-bit files, by the range that holds the values (1, 255, 65535 or
                         their maximum) for 32-bit ones

A JPEG that is much larger than what a model wants of it is decoded at a half, a quarter or an eighth of its size.

Only the decoders in `FORMATS` are tried, never those that run other programs. Anything that cannot be decoded raises
an `ImageError` with the reason: not an image, damaged, truncated, too large, too elongated.
"""

from __future__ import annotations

import io
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moontide.errors import ImageError, missing_extra

if TYPE_CHECKING:
    from PIL.Image import Image

    from moontide.encoders.steps import Steps

FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
MAX_PIXELS = 89_478_485  # Pillow's own limit: 256 MiB of RGB
MAX_RATIO = 100  # of the sides: resizing a line to a square crop would make a giant of it
MAX_BYTES = 2**29  # of a file
ORIENTATION = 0x0112  # the EXIF tag


def decode(file: BinaryIO | Path | bytes, steps: Steps | None = None) -> Image:
    """Decode an image to upright RGB; where `steps` follow, a large JPEG comes out smaller.

    >>> decode(io.BytesIO(b"not an image"))
    Traceback (most recent call last):
        ...
    moontide.errors.ImageError: it is not an image of a known format
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise missing_extra("pillow", "hf", "Reading images") from None
    try:
        with Image.open(io.BytesIO(file) if isinstance(file, bytes) else file, formats=_formats()) as image:
            _check_size(*image.size)
            if steps is not None and image.format == "JPEG" and (halved := steps.least(*image.size)):
                image.draft(None, (image.width >> halved, image.height >> halved))
            image.load()
            return _rgb(_upright(image))
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError("it is not an image of a known format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"it has more than the {MAX_PIXELS / 1e6:.0f} million pixels that are allowed") from None
    except MemoryError:
        raise ImageError("it does not fit into memory") from None
    except Exception as error:  # the decoders raise whatever they stumble over in a broken file
        why = re.sub(r"\s*<[^>]* at 0x[^>]*>", "", str(error)).strip().partition("\n")[0].rstrip(".")
        why = why or type(error).__name__
        raise ImageError(f"it is damaged or truncated ({why})") from error


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
    except Exception:  # the EXIF data are damaged, the picture is whole
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


def upright_rgb(image: Image) -> Image:
    """Turn an image that is decoded already upright, and to RGB.

    >>> from PIL import Image
    >>> upright_rgb(Image.new("L", (3, 2))).mode
    'RGB'
    """
    _check_size(*image.size)
    return _rgb(_upright(image))


def is_plain_jpeg(data: bytes) -> bool:
    """Return whether a file is a whole JPEG in colour or grey that needs no turning, which a GPU can decode.

    >>> is_plain_jpeg(b"GIF89a")
    False
    """
    from PIL import Image

    if not data.startswith(b"\xff\xd8\xff") or b"\xff\xd9" not in data[-16:]:
        return False
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
            _check_size(*image.size)
            plain = image.mode in ("RGB", "L") and not image.info.get("progressive")
            return plain and image.getexif().get(ORIENTATION, 1) == 1
    except Exception:  # the full decoder reports what is wrong with it
        return False
