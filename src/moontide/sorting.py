"""Sort images into folders by their labels, as links or copies, or rename them; everything can be undone.

The moves are written to `UNDO` in the folder before they are made, so `undo` can reverse them even if they were
interrupted. No file is ever replaced, and nothing is created outside the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moontide.errors import FileError, OptionError, shorten
from moontide.store.disk import read_json, reading, replacing

UNDO = "moontide-undo.json"
FIELDS = ("{label}", "{name}", "{number}", "{confidence}")
UNSAFE = re.compile(r'[\x00-\x1f/\\:*?"<>|]+')
LONGEST = 100  # characters of the name of a folder


@dataclass(frozen=True)
class Move:
    """One image: where it is, where it goes, and how: "link", "copy" or "rename"."""

    source: Path
    target: Path
    how: str


def plan(
    images: Sequence[Path],
    labels: Sequence[str],
    confidence: Sequence[float],
    folder: Path | None = None,
    *,
    copy: bool = False,
    pattern: str | None = None,
) -> list[Move]:
    """Return the moves that sort images into sub-folders of `folder` by label, or rename them by a pattern in place.

    >>> images = [Path("a.jpg"), Path("b.jpg")]
    >>> moves = plan(images, ["cat", "dog/wolf"], [0.9, 0.8], Path("out"), pattern="{label}-{number}")
    >>> [str(move.target) for move in moves]
    ['out/cat/cat-1.jpg', 'out/dog_wolf/dog_wolf-2.jpg']
    """
    if pattern is not None and not any(field in pattern for field in ("{name}", "{number}")):
        raise OptionError(f"'--rename' must contain {{name}} or {{number}}. Got {pattern!r} instead.")
    if folder is None and pattern is None:
        raise OptionError("Nothing to do: pass a folder to sort into, or a pattern for new names.")
    digits, taken, moves = len(str(len(images))), set[str](), []
    for i, (path, label, sure) in enumerate(zip(images, labels, confidence, strict=True), 1):
        values = (safe(label), path.stem, f"{i:0{digits}d}", f"{sure:.2f}")
        name = path.stem if pattern is None else pattern
        for field, value in zip(FIELDS, values, strict=True):
            name = name.replace(field, value)
        base = path.parent if folder is None else folder / safe(label)
        target = base / (safe(name) + path.suffix)
        count = 2
        while str(target).casefold() in taken:
            target = base / f"{safe(name)} ({count}){path.suffix}"
            count += 1
        taken.add(str(target).casefold())
        moves.append(Move(path, target, "rename" if folder is None else "copy" if copy else "link"))
    return moves


def safe(name: str) -> str:
    """Return a name that a file or folder can have on every system.

    >>> safe("../dog: a/b"), safe("..")
    ('_dog_ a_b', '_')
    """
    return shorten(UNSAFE.sub("_", name).strip(" .") or "_", LONGEST)


def apply(moves: Sequence[Move], folder: Path) -> Path:
    """Make the moves, and return the file that `undo` reads, which is kept in `folder`."""
    record = folder / UNDO
    if record.exists():
        raise FileError(f"{folder} was sorted before; reverse that first: moontide undo {folder}")
    sources = {move.source.absolute() for move in moves if move.how == "rename"}
    for move in moves:
        _check_charset(move.target)
        taken = os.path.lexists(move.target) and move.target.absolute() not in sources
        if taken:
            raise FileError(f"{move.target} exists already and is not overwritten; choose another folder or pattern.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(record) as handle:
            rows = [[str(move.source.absolute()), str(move.target.absolute()), move.how] for move in moves]
            handle.write(json.dumps({"moontide": "undo", "moves": rows}, indent=0).encode())
        waiting: list[tuple[Path, Move]] = []
        for move in moves:
            move.target.parent.mkdir(parents=True, exist_ok=True)
            if move.how == "copy":
                shutil.copy2(move.source, move.target)
            elif move.how == "link":
                move.target.symlink_to(move.source.absolute())
            else:  # in two steps, since a new name may be an old one of another image
                between = move.source.with_name(f".moontide-{len(waiting)}{move.source.suffix}")
                waiting.append((move.source.rename(between), move))
        for between, move in waiting:
            between.rename(move.target)
    except OSError as error:
        undo(folder)
        raise FileError(
            f"{folder} cannot be sorted into: {error.strerror or error}. Everything was reversed; try '--copy'."
        ) from error
    return record


def _check_charset(path: Path) -> None:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise FileError(
            f"{str(path)!a} cannot be named in the character set of this locale; set PYTHONUTF8=1."
        ) from None


def undo(folder: str | Path) -> int:
    """Reverse what `apply` did in a folder, and return the number of images.

    A copy that has been changed since then stays where it is.

    >>> undo("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is nothing to undo in no-such-folder: it has no moontide-undo.json.
    """
    folder = Path(folder)
    record = folder / UNDO
    if not record.is_file():
        raise FileError(f"There is nothing to undo in {folder}: it has no {UNDO}.")
    with reading(record):
        held = read_json(record)
        rows = [(Path(source), Path(target), str(how)) for source, target, how in held["moves"]]
    done = 0
    renamed = [(source, target) for source, target, how in rows if how == "rename"]
    done += _rename_back(renamed)
    for source, target, how in rows:
        link = how == "link" and target.is_symlink() and Path(os.readlink(target)) == source
        copy = how == "copy" and _same(source, target)
        if link or copy:
            target.unlink()
            done += 1
    for parent in sorted({target.parent for _, target, how in rows if how != "rename"}, reverse=True):
        with suppress(OSError):  # it holds something else
            parent.rmdir()
    record.unlink()
    with suppress(OSError):
        folder.rmdir()
    return done


def _rename_back(rows: Sequence[tuple[Path, Path]]) -> int:
    waiting = []
    for i, (source, target) in enumerate(rows):
        between = source.with_name(f".moontide-{i}{source.suffix}")
        if not between.exists() and target.exists():
            target.rename(between)
        if between.exists():
            waiting.append((between, source))
    for between, source in waiting:
        between.rename(source)
    return len(waiting)


def _same(source: Path, target: Path) -> bool:
    """Return whether a file is still the copy that was made of another."""
    if target.is_symlink() or not target.is_file() or not source.is_file():
        return False
    first, second = source.stat(), target.stat()
    return first.st_size == second.st_size and abs(first.st_mtime - second.st_mtime) < 2
