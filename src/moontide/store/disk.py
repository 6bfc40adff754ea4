"""Local and remote files: read with errors of one sentence, written under a temporary name and renamed when complete.

A path with :// goes through fsspec (`store.remote`); in object stores a file appears under its name when complete.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from moontide.errors import FileError, MoontideError, ResourceError, first_line
from moontide.memory import available_bytes, human
from moontide.store.remote import filesystem, on_its_way, open_file, protocols, retried, unreachable

TEXT_TIMES = 20  # how much larger than a text the rows and numbers may be that are made of it
PIECE = 2**20  # bytes that are read at once
LINE = 2**24  # characters of a line of a table
SMALL, MOST_TIMES = 2**28, 1000  # bytes that a file may always unpack to, and how often its own size


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Turn any failure to read a file inside into an error of one sentence.

    >>> with reading("no.csv"):
    ...     pass
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no.csv.
    """
    if not protocols(str(path)):
        _check_file(path)
    try:
        yield
    except MoontideError:
        raise
    except MemoryError:
        raise ResourceError(f"{path} does not fit into memory; split it.") from None
    except Exception as error:  # the parsers raise whatever they stumble over in a broken file
        if on_its_way(str(path), error):
            raise unreachable(str(path), error.__cause__ or error) from error
        if isinstance(error, FileNotFoundError):
            raise FileError(f"There is no file {path}.") from None
        why = first_line(error) or type(error).__name__
        raise FileError(f"{path} cannot be read; it is damaged, truncated or of another type ({why}).") from error


def _check_file(path: str | Path) -> None:
    try:
        kind = os.stat(path).st_mode
    except OSError as error:
        missing = f"There is no file {path}."
        reason = f"{path} cannot be read: {error.strerror}."
        raise FileError(missing if isinstance(error, FileNotFoundError) else reason) from None
    if stat.S_ISDIR(kind):
        raise FileError(f"{path} is a folder; pass a file.")
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):  # a device may never end
        raise FileError(f"{path} is a device or a socket; pass a file.")


@contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """Open a file for reading, and turn any failure into an error of one sentence.

    >>> with writing("memory://opened/a.txt") as handle:
    ...     _ = handle.write(b"text")
    >>> with opened("memory://opened/a.txt") as handle:
    ...     handle.read()
    b'text'
    """
    with reading(path), open_file(str(path)) as handle:
        yield handle


def check_unpacked(what: str, need: int, size: int) -> None:
    """Refuse contents that take far more memory than the file has bytes, or than there is.

    >>> check_unpacked("The column 'id' of a.parquet", 10**12, 1000)
    Traceback (most recent call last):
        ...
    moontide.errors.ResourceError: The column 'id' of a.parquet would take 931.3 GiB from a file of 1000.0 B; it is \
not read. Split the file, or write it again from data that you trust.
    """
    have = available_bytes()
    much = need > max(SMALL, MOST_TIMES * size)
    if much or (have is not None and need > have):
        memory = "" if much or have is None else f", and {human(have)} of memory is available"
        raise ResourceError(
            f"{what} would take {human(need)} from a file of {human(size)}{memory}; it is not read. "
            "Split the file, or write it again from data that you trust."
        )


def text_of(path: str | Path) -> str:
    """Return a text file as it is, line ends too, if what is made of it fits into memory as well.

    >>> text_of("no.txt")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no.txt.
    """
    data, have = bytearray(), available_bytes()
    with reading(path), open(path, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size  # 0 for a pipe
        while True:
            _check_text(path, max(size, len(data)), have)
            if not (piece := handle.read(PIECE)):
                return data.decode("utf-8-sig")
            data += piece


def lines_of(path: str | Path) -> Iterator[str]:
    """Yield the lines of a text file as they are, line ends too; one that is no row of any table is an error.

    >>> next(lines_of("no.csv"))
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no.csv.
    """
    read, have = 0, available_bytes()
    with reading(path), open(path, encoding="utf-8-sig", newline="") as handle:
        _check_text(path, os.fstat(handle.fileno()).st_size, have)  # 0 for a pipe
        while line := handle.readline(LINE + 1):
            if len(line) > LINE:
                raise FileError(
                    f"{path} must be a table with one line per row. It has a line of more than {LINE >> 20} million "
                    "characters; split it, or store numbers as .npy."
                )
            read += len(line)
            _check_text(path, read, have)
            yield line


def _check_text(path: str | Path, size: int, have: int | None) -> None:
    if have is not None and TEXT_TIMES * size > have:
        raise ResourceError(
            f"{path} would take up to {human(TEXT_TIMES * size)} of memory as text, and {human(have)} is available; "
            "split it, or store numbers as .npy."
        )


def read_json(path: str | Path, **options: Any) -> Any:
    """Return what a JSON file holds; `options` are those of `json.loads`.

    >>> read_json("no.json")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no.json.
    """
    return parse_json(path, text_of(path), **options)


def parse_json(path: str | Path, text: str, **options: Any) -> Any:
    """Return what JSON in a file stands for.

    >>> parse_json("a.jsonl", "{}")
    {}
    """
    try:
        return json.loads(text, **options)
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:
        why = first_line(error)
    raise FileError(f"{path} cannot be read: it must be JSON, and is damaged or of another type ({why}).")


def temporary_name(path: Path) -> str:
    """Return the name that a file has while it is written.

    >>> temporary_name(Path("a.txt")).startswith(".a.txt.")
    True
    """
    return f".{path.name}.{os.getpid()}.tmp"


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path` that replaces it when complete, and is removed if anything fails.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "a.txt") as handle:
    ...         _ = handle.write(b"whole")
    ...     [p.name for p in Path(folder).iterdir()]
    ['a.txt']
    """
    path = Path(path)
    temporary = path.with_name(temporary_name(path))
    try:
        with open(temporary, "wb") as handle:
            yield handle
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        with suppress(OSError):  # it is gone where all went well
            temporary.unlink()


@contextmanager
def writing(path: str) -> Iterator[Any]:
    """Open a file for writing that is whole before it has its name, and make its folder."""
    if protocols(path):
        with open_file(path, "wb") as handle:
            yield handle
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as handle:
        yield handle


@retried
def exists(path: str) -> bool:
    """Return whether there is such a file.

    >>> exists("memory://nothing")
    False
    """
    fs, inner = filesystem(path)
    return bool(fs.exists(inner))


@retried
def remove(folder: str) -> None:
    """Remove a folder and all that is in it.

    >>> remove("memory://nothing")
    """
    fs, inner = filesystem(folder)
    if fs.exists(inner):
        fs.rm(inner, recursive=True)
