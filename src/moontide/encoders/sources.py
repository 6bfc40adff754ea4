"""Sources of images: folders, patterns, files, lists, archives, tables, videos, and images in memory.

    folder          all images in it and in its sub-folders, sorted. Hidden files and folders, and files without the
                    extension of an image, are left out. Links to files are followed if they stay in the folder, links
                    to folders never
    pattern         "photos/**/*.jpg": every match, a folder as above
    .txt            one path per line; empty lines and lines that start with # are left out
    .csv, .parquet  the column `path`
    .parquet, .arrow  with a column of images (`moontide.encoders.tables`), and folders that `datasets` saved
    .mp4, .mov, ...  frames, `frame_step` seconds apart
    .tar            (webdataset) its members that are named like an image, read where they lie, never unpacked;
                    links are not followed

A line of a list may be an http or https address if `allow_urls` is set. Paths in a list are relative to the folder of
the list, or to `root`, and must stay in it; so must the members of an archive. Files that have the extension of an
image but cannot be used are listed as skipped, with the reason. The id of an image is its path, beginning with the
folder as given. An image that is named twice is used once.
"""

from __future__ import annotations

import csv
import glob
import math
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from moontide.encoders import tables, video, web
from moontide.encoders.images import decode
from moontide.encoders.places import HeldImage, ImageFile, Skip, UrlImage, path_id
from moontide.errors import FileError, InputError, OptionError
from moontide.store.disk import lines_of, text_of
from moontide.store.files import read_parquet_column

READABLE = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".pgm",
    ".pbm", ".jp2", ".avif",
)  # fmt: skip
NAMED_LIKE_IMAGES = (*READABLE, ".heic", ".heif", ".jxl", ".psd", ".svg", ".eps")  # the others are tried, and skipped


class Listing(NamedTuple):
    """The images that were found, and files that are unusable for sure."""

    images: list[ImageFile]
    skipped: list[Skip]


def list_images(
    paths: Iterable[str | Path],
    root: str | Path | None = None,
    *,
    allow_urls: bool = False,
    frame_step: float = 1.0,
) -> Listing:
    """Find all images named by the user's paths; `root` is the folder that paths in lists start from and stay in.

    allow_urls: whether addresses in lists are downloaded. frame_step: seconds between the frames of a video.

    >>> list_images(["no-such-folder"])
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file or folder no-such-folder.
    """
    if not (math.isfinite(frame_step) and frame_step > 0):
        raise OptionError(f"'--frame-step' must be more than 0 seconds. Got {frame_step} instead.")
    images: dict[str, ImageFile] = {}
    skipped: dict[str, Skip] = {}
    for given in paths:
        for found in _found(str(given), root, allow_urls, frame_step):
            if isinstance(found, Skip):
                skipped.setdefault(found.id, found)
            else:
                images.setdefault(found.id, found)
    if not images and not skipped:
        raise FileError(f"There are no images in {', '.join(map(str, paths))}: no file is named like one.")
    return Listing(list(images.values()), list(skipped.values()))


def as_listing(images: Iterable[Any]) -> Listing:
    """Return Pillow images, arrays of 8 bits (H, W, 3) or (H, W), and paths as a listing; ids are numbers.

    >>> import numpy as np
    >>> [image.id for image in as_listing([np.zeros((4, 5, 3), dtype=np.uint8)]).images]
    ['0']
    """
    from PIL import Image

    found: list[ImageFile] = []
    for number, given in enumerate(images):
        one = given["image"] if isinstance(given, dict) and "image" in given else given  # a row of a dataset
        if isinstance(one, ImageFile):
            found.append(one)
        elif isinstance(one, str | Path):
            found.append(ImageFile(path_id(Path(one)), Path(one)))
        elif isinstance(one, Image.Image):
            found.append(HeldImage(str(number), Path(str(number)), image=one))
        elif isinstance(one, dict) and isinstance(one.get("bytes"), bytes):  # an undecoded row of `datasets`
            found.append(HeldImage(str(number), Path(str(number)), image=decode(one["bytes"])))
        else:
            found.append(HeldImage(str(number), Path(str(number)), image=_from_array(one, number)))
    if not found:
        raise InputError("'images' must have at least one image. Got none.")
    return Listing(found, [])


def _from_array(one: Any, number: int) -> Any:
    from PIL import Image

    array = np.asarray(one)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        raise InputError(
            f"Image {number} must be a Pillow image, a path, or an array of uint8 of the shape (H, W), (H, W, 3) or "
            f"(H, W, 4). Got {type(one).__name__} of {array.dtype} and shape {array.shape} instead."
        )
    return Image.fromarray(array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _found(given: str, root: str | Path | None, urls: bool, step: float) -> Iterator[ImageFile | Skip]:
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
            elif match.suffix.lower() in (*_LISTS, ".tar", *tables.KINDS, *video.KINDS):
                yield from _found(str(match), root, urls, step)
    elif path.is_dir():
        yield from tables.saved_dataset(path) if tables.is_dataset(path) else _folder(path)
    elif not path.exists():
        raise FileError(f"There is no file or folder {given}.")
    elif kind in tables.KINDS and (rows := tables.rows_of(path)) is not None:
        yield from rows
    elif kind in _LISTS:
        yield from _listed(path, [row[0] for row in _LISTS[kind](path, ("path",))], Path(root or path.parent), urls)
    elif kind in video.KINDS:
        yield from video.frames_of(path, step)
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


def _listed(file: Path, lines: Iterable[str], root: Path, urls: bool) -> Iterator[ImageFile | Skip]:
    for line in lines:
        path = root / line
        if web.is_url(line):
            yield UrlImage(line, Path()) if urls else Skip(line, "it is an address; add --allow-urls to download it")
        elif "\0" in line:
            yield Skip(repr(line), f"it is not a path (in {file})")
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
                    yield Skip(where, "it is not a regular file of the archive")
                else:
                    yield ImageFile(where, file, member.offset_data, member.size)
    except (tarfile.TarError, OSError, ValueError) as error:
        raise FileError(f"{file} cannot be read; it is damaged, truncated or not a plain .tar ({error}).") from error


def column_of(paths: Iterable[str | Path], column: str, root: str | Path | None = None) -> dict[str, str]:
    """Return the values of a column of the user's lists (.csv, .parquet), by image id.

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
    lines = [line.strip() for line in text_of(file).splitlines()]
    return [(line,) for line in lines if line and not line.startswith("#")]


def _csv_rows(file: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    try:
        rows = csv.DictReader(lines_of(file), strict=True)
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


def _no_column(file: Path, column: str, names: Sequence[str]) -> FileError:
    has = ", ".join(map(repr, names)) or "none"
    return FileError(f"{file} must have a column {column!r}. It has {has}; rename one.")
