"""Locations of images: a file, a member of an archive, a row of a table, a frame of a video, a URL, or memory.

An image is described to other processes as a JSON object (`describe`, `image_from`). What they cannot reach, or what is
read best in its order, goes along as bytes (`inline`).
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moontide.encoders.images import MAX_BYTES, decode, upright_rgb
from moontide.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image


class Skip(NamedTuple):
    """A skipped image, with the reason."""

    id: str
    reason: str


@dataclass(frozen=True)
class ImageFile:
    """An image in a file, or in some bytes of an archive; the other places are kinds of this.

    >>> ImageFile("no.jpg", Path("no.jpg")).read()
    Traceback (most recent call last):
        ...
    moontide.errors.ImageError: it cannot be read (No such file or directory)
    """

    id: str  # the name in every output: the path, or archive/member
    path: Path
    offset: int | None = None  # in an archive
    size: int = 0

    def read(self) -> Image:
        """Read and decode it to upright RGB."""
        data = self.data()
        return decode(data) if isinstance(data, bytes) else data

    def data(self) -> bytes | Image:
        """Read the bytes of its file, or the image itself where it comes out decoded."""
        try:
            status = os.stat(self.path)
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("it is not a regular file")
            check_size(status.st_size if self.offset is None else self.size)
            with open(self.path, "rb") as handle:
                if self.offset is None:
                    return handle.read()
                handle.seek(self.offset)
                return handle.read(self.size)
        except ImageError:
            raise
        except OSError as error:
            raise ImageError(f"it cannot be read ({error.strerror})") from error

    def describe(self) -> dict[str, Any]:
        """Return a description by which another process on this machine finds it."""
        where = {} if self.offset is None else {"offset": self.offset, "length": self.size}
        return {"kind": "file", "id": self.id, "path": os.path.abspath(self.path), **where}

    def inline(self) -> bytes | None:
        """Return data that accompanies the description, or None."""
        return None


@dataclass(frozen=True)
class RowImage(ImageFile):
    """An image in a column of a .parquet or .arrow file; `offset` is the number of its row.

    >>> RowImage("a.parquet/3", Path("a.parquet"), 3, column="image").describe()["row"]
    3
    """

    column: str = "image"

    def data(self) -> bytes | Image:
        """Read the row."""
        from moontide.encoders.tables import read_row

        return read_row(self.path, self.column, self.offset or 0)

    def describe(self) -> dict[str, Any]:
        """Return a description by which another process on this machine finds it."""
        where = {"path": os.path.abspath(self.path), "row": self.offset, "column": self.column}
        return {"kind": "row", "id": self.id, **where}

    def inline(self) -> bytes | None:
        """Return the bytes of the image: rows are read fastest one after the other, in one process."""
        data = self.data()
        assert isinstance(data, bytes)
        return data


@dataclass(frozen=True)
class UrlImage(ImageFile):
    """An image at a public http or https address, which is its id."""

    def data(self) -> bytes | Image:
        """Download the image."""
        from moontide.encoders.web import fetch

        return fetch(self.id)

    def describe(self) -> dict[str, Any]:
        """Return the address of the image."""
        return {"kind": "url", "id": self.id}


@dataclass(frozen=True)
class FrameImage(ImageFile):
    """A frame of a video file; `offset` is its number."""

    def data(self) -> bytes | Image:
        """Decode the frame; frames of one file are best asked for in their order."""
        from moontide.encoders.video import read_frame

        return read_frame(self.path, self.offset or 0)

    def describe(self) -> dict[str, Any]:
        """Return a description by which another process on this machine finds it."""
        return {"kind": "frame", "id": self.id, "path": os.path.abspath(self.path), "frame": self.offset}


@dataclass(frozen=True)
class HeldImage(ImageFile):
    """An image that the program has in memory.

    >>> from PIL import Image
    >>> HeldImage("0", Path("0"), image=Image.new("L", (2, 2))).read().mode
    'RGB'
    """

    image: Any = None

    def data(self) -> bytes | Image:
        """Return the image upright and in RGB."""
        return upright_rgb(self.image)

    def describe(self) -> dict[str, Any]:
        """Return the size of the image; `inline` has the pixels."""
        width, height = self.image.size
        return {"kind": "held", "id": self.id, "size": [width, height]}

    def inline(self) -> bytes | None:
        """Return the pixels of the image."""
        rgb: Image = upright_rgb(self.image)
        return rgb.tobytes()


def image_from(described: dict[str, Any]) -> ImageFile:
    """Return the image that a description stands for.

    >>> image_from({"kind": "file", "id": "a.jpg", "path": "/photos/a.jpg"}).path
    PosixPath('/photos/a.jpg')
    """
    kind, name, path = described["kind"], described["id"], Path(described.get("path", ""))
    if kind == "row":
        return RowImage(name, path, described["row"], column=described["column"])
    if kind == "frame":
        return FrameImage(name, path, described["frame"])
    if kind == "url":
        return UrlImage(name, path)
    return ImageFile(name, path, described.get("offset"), described.get("length", 0))


def check_size(size: int) -> None:
    """Refuse a file that is too large to be an image.

    >>> check_size(1000)
    """
    if size > MAX_BYTES:
        raise ImageError(f"it has {size / 2**20:.0f} MiB, more than the {MAX_BYTES // 2**20} that are allowed")


def path_id(path: Path) -> str:
    """Write a path as text that every output can hold: normalised, with slashes, odd bytes as \\xNN.

    >>> path_id(Path("photos/./a.jpg"))
    'photos/a.jpg'
    """
    return os.fsencode(os.path.normpath(path)).decode("utf-8", "backslashreplace").replace(os.sep, "/")
