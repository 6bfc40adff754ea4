"""Every kind of image comes out upright and in the right colours, or says why it does not."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from moontide.encoders.images import MAX_PIXELS, decode
from moontide.errors import ImageError


def stored(image: Image.Image, kind: str, **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    buffer.seek(0)
    return buffer


def colours(image: Image.Image) -> list[list[int]]:
    """Return the colours of the four quarters."""
    pixels = np.asarray(image).astype(int)
    h, w = pixels.shape[0] // 4, pixels.shape[1] // 4
    return [pixels[y, x].tolist() for y in (h, 3 * h) for x in (w, 3 * w)]


def quarters() -> Image.Image:
    """Red and green above, blue and white below."""
    small = np.asarray([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], dtype=np.uint8)
    return Image.fromarray(small).resize((64, 48), Image.Resampling.NEAREST)


QUARTERS = [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF", "WEBP"])
def test_plain_kinds(kind: str) -> None:
    image = decode(stored(quarters(), kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert image.mode == "RGB"
    assert image.size == (64, 48)
    assert colours(image) == QUARTERS


def test_jpeg_is_close() -> None:
    image = decode(stored(quarters(), "JPEG", quality=95, subsampling=0))
    assert np.abs(np.asarray(colours(image)) - QUARTERS).max() < 6


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (6, Image.Transpose.ROTATE_90),
        (8, Image.Transpose.ROTATE_270),
    ],
)
def test_exif_rotation_is_undone(orientation: int, turned: Image.Transpose) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = decode(stored(quarters().transpose(turned), "PNG", exif=exif))
    assert image.size == (64, 48)
    assert colours(image) == QUARTERS


def test_damaged_exif_leaves_the_picture() -> None:
    assert decode(stored(quarters(), "WEBP", lossless=True, exif=b"Exif\0\0broken")).size == (64, 48)


def test_cmyk() -> None:
    image = decode(stored(quarters().convert("CMYK"), "JPEG", quality=95))
    assert np.abs(np.asarray(colours(image)) - QUARTERS).max() < 12


def test_palette_and_its_transparency() -> None:
    palette = quarters().quantize(8)
    assert colours(decode(stored(palette, "PNG"))) == QUARTERS
    red = palette.getpixel((5, 5))
    seen = decode(stored(palette, "PNG", transparency=red))
    assert colours(seen) == [[255, 255, 255], *QUARTERS[1:]]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_put_on_white(mode: str) -> None:
    image = Image.new(mode, (8, 8), (0,) * len(mode))
    image.putpixel((0, 0), (0,) * (len(mode) - 1) + (255,))
    image.putpixel((1, 0), (0,) * (len(mode) - 1) + (128,))
    seen = np.asarray(decode(stored(image, "PNG")))
    assert seen[4, 4].tolist() == [255] * 3
    assert seen[0, 0].tolist() == [0] * 3
    assert abs(int(seen[0, 1, 0]) - 127) <= 1


def test_grey_with_a_transparent_value() -> None:
    image = Image.new("L", (8, 8), 10)
    image.putpixel((0, 0), 200)
    seen = np.asarray(decode(stored(image, "PNG", transparency=10)))
    assert seen[4, 4].tolist() == [255] * 3
    assert seen[0, 0].tolist() == [200] * 3


def test_sixteen_bits_are_scaled_and_not_cut() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        seen = np.asarray(decode(stored(Image.fromarray(np.tile(ramp, (4, 1))), kind)))
        assert np.abs(seen[0, :, 0].astype(int) - np.arange(256)).max() <= 1


@pytest.mark.parametrize(("top", "dtype"), [(1, np.float32), (255, np.float32), (65535, np.int32), (10**6, np.int32)])
def test_thirty_two_bits_are_scaled_by_their_range(top: int, dtype: type) -> None:
    ramp = np.linspace(0, top, 256).astype(dtype)
    seen = np.asarray(decode(stored(Image.fromarray(np.tile(ramp, (4, 1))), "TIFF")))
    assert np.abs(seen[0, :, 0].astype(int) - np.arange(256)).max() <= 1


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animated_gives_the_first_frame(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    lossless = {"lossless": True} if kind == "WEBP" else {}
    seen = decode(stored(frames[0], kind, save_all=True, append_images=frames[1:], **lossless))
    assert seen.getpixel((4, 4)) == (255, 0, 0)


def png_header(width: int, height: int) -> bytes:
    """Return a valid PNG of any size on paper, with next to nothing in it."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (png_header(60_000, 60_000), "pixels"),
        (png_header(9_500, 9_500), "pixels"),
        (png_header(1, 5_000), "1 x 5000 pixels, more than 100 times"),
        (png_header(40, 40), "damaged or truncated"),
        (stored(quarters(), "PNG").getvalue()[:80], "damaged or truncated"),
        (stored(quarters(), "JPEG").getvalue()[:400], "damaged or truncated"),
        (stored(quarters(), "GIF").getvalue()[:60], "damaged or truncated"),
        (stored(quarters(), "WEBP").getvalue()[:60], "damaged or truncated|not an image"),
        (stored(quarters(), "TIFF").getvalue()[:900], "damaged or truncated|not an image"),
        (stored(quarters(), "BMP").getvalue()[:200], "damaged or truncated"),
        (stored(quarters(), "PNG").getvalue().replace(b"IDAT", b"IDAX"), "damaged or truncated|not an image"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_what_cannot_be_decoded_says_why(data: bytes, why: str) -> None:
    with pytest.raises(ImageError, match=why):
        decode(io.BytesIO(data))


def test_the_limit_is_not_below_an_ordinary_camera() -> None:
    assert MAX_PIXELS > 8000 * 6000


def message_of(data: bytes) -> str:
    try:
        decode(io.BytesIO(data))
    except ImageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
def test_no_error_of_a_cut_picture_names_an_object_in_memory(kind: str) -> None:
    data = stored(quarters(), kind).getvalue()
    messages = {message_of(data[:end]) for end in range(0, len(data), max(1, len(data) // 40))}
    assert messages - {""}
    assert not [sentence for sentence in messages if "BytesIO" in sentence or " at 0x" in sentence]
