"""Images that strangers send: known by their bytes and not by their names, limited before they are decoded."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moontide.errors import FileError, InputError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "WEBP": b"RIFF"}  # and the bytes they start with
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
MAX_BYTES, MAX_PIXELS = 2**24, 50_000_000  # of an image
MAX_IMAGES, MAX_PUSH_PIXELS = 64, 100_000_000  # of a push


class TooLargeError(InputError):
    """More than is taken at once."""


class KindError(InputError):
    """Not an image of a kind that is taken."""


def sniff(data: bytes) -> str | None:
    """Tell the kind of an image from its first bytes, or None.

    >>> sniff(b"\\x89PNG\\r\\n\\x1a\\n..."), sniff(b"<svg>")
    ('PNG', None)
    """
    for kind, start in FORMATS.items():
        if data.startswith(start) and (kind != "WEBP" or data[8:12] == b"WEBP"):
            return kind
    return None


def decode(files: Sequence[bytes]) -> list[Image]:
    """Decode the images of a push, upright and RGB.

    >>> decode([b"GIF89a"])
    Traceback (most recent call last):
        ...
    moontide.serve.images.KindError: Image 0 must be a JPEG, PNG or WebP by its contents.
    """
    from PIL import Image, ImageOps

    if len(files) > MAX_IMAGES:
        raise TooLargeError(f"A push may have {MAX_IMAGES} images. Got {len(files)} instead.")
    images, pixels = [], 0
    for number, data in enumerate(files):
        if len(data) > MAX_BYTES:
            raise TooLargeError(f"Image {number} may have {MAX_BYTES} bytes. Got {len(data)} instead.")
        if (kind := sniff(data)) is None:
            raise KindError(f"Image {number} must be a JPEG, PNG or WebP by its contents.")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of odd metadata
                image = Image.open(io.BytesIO(data), formats=[kind])
                width, height = image.size
                pixels += width * height
                if width * height <= MAX_PIXELS and pixels <= MAX_PUSH_PIXELS:
                    images.append(ImageOps.exif_transpose(image).convert("RGB"))
                    continue
        except Image.DecompressionBombError:
            pass
        except Exception as error:  # a decoder raises whatever it stumbles over in a broken file
            raise InputError(f"Image {number} cannot be decoded; it is damaged or cut short.") from error
        raise TooLargeError(
            f"An image may have {MAX_PIXELS} pixels, and those of a push {MAX_PUSH_PIXELS}. Image {number} has more."
        )
    return images


def list_images(folder: Path) -> list[Path]:
    """List the images of a folder that the operator offers for a try-out."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise FileError(f"The folder {folder} of '--samples' has no {', '.join(SUFFIXES)} images.")
    return paths
