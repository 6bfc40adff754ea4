"""Which images there are: folders, patterns, single files, lists of paths (.txt, .csv, .parquet) and .tar archives.

    folder          all images in it and below, sorted. Hidden files and folders, and files that are not named like an
                    image, are left out. A link to a file is followed if it stays in the folder, one to a folder never
    pattern         "photos/**/*.jpg": every match, a folder as above
    .txt            one path a line; empty lines and lines that start with # are left out
    .csv, .parquet  the column `path`
    .tar            (webdataset) its members that are named like an image, read where they lie, never unpacked;
                    links are not followed

Paths in a list are relative to the folder of the list, or to `root`, and must stay in it; so must the members of an
archive. What is an image by its name and cannot be used is named as skipped, with the reason. An image is known by its
path, that of the folder as it was given with the rest after it; one that is named twice is taken once.
"""

from __future__ import annotations

import csv
import glob
import io
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from moontide.encoders.images import MAX_BYTES, decode
from moontide.errors import FileError, ImageError
from moontide.store.files import read_parquet_column, reading

if TYPE_CHECKING:
    from PIL.Image import Image

READABLE = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm",
    ".pbm", ".jp2", ".avif",
)  # fmt: skip
NAMED_LIKE_IMAGES = (*READABLE, ".heic", ".heif", ".jxl", ".psd", ".svg", ".eps")  # the others are tried, and skipped


class Skip(NamedTuple):
    """An image that was left out, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class ImageFile:
    """Where an image lies: a file, or some bytes of an archive.

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
        try:
            status = os.stat(self.path)
            if not stat.S_ISREG(status.st_mode):
                raise ImageError("it is no regular file")
            size = status.st_size if self.offset is None else self.size
            if size > MAX_BYTES:
                raise ImageError(f"it has {size / 2**20:.0f} MiB, more than the {MAX_BYTES // 2**20} that are allowed")
            with open(self.path, "rb") as handle:
                if self.offset is None:
                    return decode(handle)
                handle.seek(self.offset)
                return decode(io.BytesIO(handle.read(size)))
        except ImageError:
            raise
        except OSError as error:
            raise ImageError(f"it cannot be read ({error.strerror})") from error


class Listing(NamedTuple):
    """The images that were found, and what is known to be no use before it is decoded."""

    images: list[ImageFile]
    skipped: list[Skip]


def list_images(paths: Iterable[str | Path], root: str | Path | None = None) -> Listing:
    """Find all images that the user's paths name; `root` is the folder that paths in lists start from and stay in.

    >>> list_images(["no-such-folder"])
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file or folder no-such-folder.
    """
    images: dict[str, ImageFile] = {}
    skipped: dict[str, Skip] = {}
    for given in paths:
        for found in _found(str(given), root):
            if isinstance(found, Skip):
                skipped.setdefault(found.id, found)
            else:
                images.setdefault(found.id, found)
    if not images and not skipped:
        raise FileError(f"There are no images in {', '.join(map(str, paths))}: no file is named like one.")
    return Listing(list(images.values()), list(skipped.values()))


def _found(given: str, root: str | Path | None) -> Iterator[ImageFile | Skip]:
    path = Path(given)
    kind = path.suffix.lower()
    if not path.exists() and glob.has_magic(given):
        matches = sorted(glob.glob(given, recursive=True))
        if not matches:
            raise FileError(f"Nothing matches {given}.")
        named = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))  # the folder before the first *
        for match in map(Path, matches):
            if match.is_dir():
                yield from _folder(match)
            elif match.suffix.lower() in NAMED_LIKE_IMAGES:
                yield _file(match, named)
    elif path.is_dir():
        yield from _folder(path)
    elif not path.exists():
        raise FileError(f"There is no file or folder {given}.")
    elif kind in _LISTS:
        yield from _listed(path, [row[0] for row in _LISTS[kind](path, ("path",))], Path(root or path.parent))
    elif kind == ".tar":
        yield from _archive(path)
    elif path.name.lower().endswith((".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")):
        raise FileError(f"{given} is a compressed archive; unpack it, or repack it as a plain .tar.")
    else:
        yield ImageFile(path_id(path), path)


def _folder(folder: Path) -> Iterator[ImageFile | Skip]:
    unreadable: list[OSError] = []
    for parent, folders, files in os.walk(folder, onerror=unreadable.append):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(parent) / name for name in folders):
            if path.is_symlink():
                yield Skip(path_id(path), "it is a link to a folder, which is not followed")
        for path in (Path(parent) / name for name in sorted(files)):
            if not path.name.startswith(".") and path.suffix.lower() in NAMED_LIKE_IMAGES:
                yield _file(path, folder)
    for error in unreadable:
        yield Skip(path_id(Path(error.filename)), f"it cannot be listed ({error.strerror})")


def _file(path: Path, folder: Path) -> ImageFile | Skip:
    if path.is_symlink() and not _inside(path, folder):
        return Skip(path_id(path), f"it is a link that leaves {folder}")
    return ImageFile(path_id(path), path)


def _inside(path: Path, folder: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _listed(file: Path, lines: Iterable[str], root: Path) -> Iterator[ImageFile | Skip]:
    for line in lines:
        path = root / line
        if "\0" in line:
            yield Skip(repr(line), f"it is no path (in {file})")
        elif _inside(path, root):
            yield ImageFile(path_id(path), path)
        else:
            yield Skip(path_id(path), f"it leaves the folder {root}; name another with --root")


def _archive(file: Path) -> Iterator[ImageFile | Skip]:
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                name = PurePosixPath(member.name)
                hidden = any(part.startswith(".") and part not in (".", "..") for part in name.parts)
                if hidden or member.isdir() or name.suffix.lower() not in NAMED_LIKE_IMAGES:
                    continue
                where = path_id(file / name)
                if name.is_absolute() or ".." in name.parts:
                    yield Skip(f"{path_id(file)}: {member.name}", "its path leaves the archive")
                elif not member.isreg() or member.issparse():
                    yield Skip(where, "it is no regular file of the archive")
                else:
                    yield ImageFile(where, file, member.offset_data, member.size)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read; it is damaged, cut short or no plain .tar ({error}).") from error


def column_of(paths: Iterable[str | Path], column: str, root: str | Path | None = None) -> dict[str, str]:
    """Return what a column of the user's lists (.csv, .parquet) says of each image, by its id.

    >>> column_of(["photos"], "camera")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: The column 'camera' must be in a list of images, a .csv or .parquet. Got photos instead.
    """
    found: dict[str, str] = {}
    for file in map(Path, paths):
        kind = file.suffix.lower()
        if kind not in (".csv", ".parquet"):
            raise FileError(
                f"The column {column!r} must be in a list of images, a .csv or .parquet. Got {file} instead."
            )
        for path, value in _LISTS[kind](file, ("path", column)):
            found.setdefault(path_id(Path(root or file.parent) / path), value)
    return found


def other_names(images: Sequence[ImageFile], paths: Iterable[str | Path], root: str | Path | None) -> dict[str, int]:
    """Return what images are called besides their ids, and where they are in `images`; -1: several are called so.

    That is the absolute path of a file, and the rest of the id after the folder, archive or pattern that was given.

    >>> other_names([ImageFile("in/a/b.jpg", Path("/in/a/b.jpg"))], ["in"], None)
    {'/in/a/b.jpg': 0, 'a/b.jpg': 0}
    """
    starts = {path_id(base) + "/" for base in (_base(Path(given), root) for given in paths)}
    found: dict[str, int] = {}
    for i, image in enumerate(images):
        names = {image.id[len(start) :] for start in starts if image.id.startswith(start)}
        if image.offset is None:
            names.add(path_id(Path(os.path.abspath(image.path))))
        for name in sorted(names):
            found[name] = i if found.setdefault(name, i) == i else -1
    return found


def _base(given: Path, root: str | Path | None) -> Path:
    """Return what the names of the images of a path start from."""
    if given.suffix.lower() in _LISTS:
        return Path(root or given.parent)
    return Path(*takewhile(lambda part: not glob.has_magic(part), given.parts))


def _text_lines(file: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    lines = [line.strip() for line in _text(file).splitlines()]
    return [(line,) for line in lines if line and not line.startswith("#")]


def _csv_rows(file: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    try:
        rows = csv.DictReader(io.StringIO(_text(file), newline=""), strict=True)
        names = rows.fieldnames or []
        for column in columns:
            if column not in names:
                raise _no_column(file, column, names)
        return [tuple(row[column] or "" for column in columns) for row in rows if row["path"]]
    except csv.Error as error:
        raise FileError(f"{file} cannot be read as .csv ({error}).") from error


def _parquet_rows(file: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    rows = zip(*(read_parquet_column(file, column) for column in columns), strict=True)
    return [tuple("" if value is None else str(value) for value in row) for row in rows if row[0]]


_LISTS = {".txt": _text_lines, ".csv": _csv_rows, ".parquet": _parquet_rows}


def _text(file: Path) -> str:
    with reading(file):
        return file.read_text(encoding="utf-8-sig")


def _no_column(file: Path, column: str, names: Sequence[str]) -> FileError:
    has = ", ".join(map(repr, names)) or "none"
    return FileError(f"{file} must have a column {column!r}. It has {has}; rename one.")


def path_id(path: Path) -> str:
    """Write a path as text that every output can hold: normalised, with slashes, odd bytes as \\xNN.

    >>> path_id(Path("photos/./a.jpg"))
    'photos/a.jpg'
    """
    return os.fsencode(os.path.normpath(path)).decode("utf-8", "backslashreplace").replace(os.sep, "/")
