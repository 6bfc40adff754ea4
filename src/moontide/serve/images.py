"""Untrusted images: identified by their contents, not their names, and limited before they are decoded."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from moontide.encoders.base import Encoder, FloatArray, Prepared
from moontide.encoders.images import decode
from moontide.errors import FileError, ImageError, InputError

FORMATS = {"JPEG": b"\xff\xd8\xff", "PNG": b"\x89PNG\r\n\x1a\n", "WEBP": b"RIFF"}  # and the bytes they start with
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
MAX_IMAGES = 64  # of a push
MAX_BYTES, MAX_PIXELS = 2**24, 50_000_000  # of an image


class TooLargeError(InputError):
    """More than the server accepts at once."""


class KindError(InputError):
    """Not of an accepted type."""


def sniff(data: bytes) -> str | None:
    """Return the type of an image from its first bytes, or None.

    >>> sniff(b"\\x89PNG\\r\\n\\x1a\\n..."), sniff(b"<svg>")
    ('PNG', None)
    """
    for kind, start in FORMATS.items():
        if data.startswith(start) and (kind != "WEBP" or data[8:12] == b"WEBP"):
            return kind
    return None


def embed(files: Sequence[bytes], encoder: Encoder) -> FloatArray:
    """Embed images (n, d); no more than one is decoded at a time.

    >>> embed([b"GIF89a"], None)  # any encoder
    Traceback (most recent call last):
        ...
    moontide.serve.images.KindError: Image 0 must be a JPEG, PNG or WebP by its contents.
    """
    if len(files) > MAX_IMAGES:
        raise TooLargeError(f"A push may have at most {MAX_IMAGES} images. Got {len(files)} instead.")
    prepared = [prepare(data, number, encoder) for number, data in enumerate(files)]
    return encoder.encode_prepared(prepared)


def prepare(data: bytes, number: int, encoder: Encoder) -> Prepared:
    """Check and decode image `number` of a push, and return what the encoder reads of it."""
    from PIL import Image, UnidentifiedImageError

    if len(data) > MAX_BYTES:
        raise TooLargeError(f"Image {number} may have at most {MAX_BYTES} bytes. Got {len(data)} instead.")
    if (kind := sniff(data)) is None:
        raise KindError(f"Image {number} must be a JPEG, PNG or WebP by its contents.")
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:  # reads no more than the header
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise Image.DecompressionBombError
        return encoder.prepare(decode(io.BytesIO(data)))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise TooLargeError(f"Image {number} has more than {MAX_PIXELS} pixels, which is the limit.") from None
    except UnidentifiedImageError:
        raise InputError(f"Image {number} cannot be decoded: it is damaged or truncated.") from None
    except (ImageError, OSError, SyntaxError, ValueError) as error:
        raise InputError(f"Image {number} cannot be decoded: {error}.") from error


def list_images(folder: Path) -> list[Path]:
    """List the images of a folder that the operator offers as samples."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise FileError(f"The folder {folder} of '--samples' has no {', '.join(SUFFIXES)} images.")
    return paths
