"""Sort images into folders by their labels, as links or copies, or rename them; everything can be undone.

The moves are recorded in `UNDO` in the folder before they are made, so `undo` can reverse them even if the process was
killed. A copy has a hidden name until it is complete. Renaming has two stages, since a new name may be an old one of
another image: all images get hidden names, and then their new ones. The record tells which stage has begun. No file is
ever replaced, and nothing outside the folder is made, moved or removed.
"""

from __future__ import annotations

import errno
import filecmp
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from moontide.errors import FileError, MoontideError, OptionError, first_line, shorten
from moontide.store.disk import read_json, reading, replacing

UNDO = "moontide-undo.json"
FIELDS = ("{label}", "{name}", "{number}", "{confidence}")
UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|]+')
RESERVED = re.compile(rf"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?|{re.escape(UNDO)}", re.IGNORECASE)
LONGEST, MOST_BYTES = 100, 200  # characters and bytes of the name of a folder
HIDDEN = re.compile(r"\.moontide-[0-9a-f]+-")


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
    counts: dict[str, int] = {}  # the next number of a name that several images have
    for i, (path, label, sure) in enumerate(zip(images, labels, confidence, strict=True), 1):
        values = (safe(label), path.stem, f"{i:0{digits}d}", f"{sure:.2f}")
        name = path.stem if pattern is None else pattern
        for field, value in zip(FIELDS, values, strict=True):
            name = name.replace(field, value)
        base = path.parent if folder is None else folder / safe(label)
        target = base / (safe(name) + path.suffix)
        first = str(target).casefold()
        count = counts.get(first, 2)
        while str(target).casefold() in taken:
            target = base / f"{safe(name)} ({count}){path.suffix}"
            count += 1
        counts[first] = count
        taken.add(str(target).casefold())
        moves.append(Move(path, target, "rename" if folder is None else "copy" if copy else "link"))
    return moves


def safe(name: str) -> str:
    """Return a name that a file or folder can have on every system.

    >>> safe("../dog: a/b"), safe(".."), safe("Aux.x")
    ('_dog_ a_b', '_', '_Aux.x')
    """
    name = UNSAFE.sub("_", name).strip(" .") or "_"
    name = f"_{name}" if RESERVED.fullmatch(name) else name
    length = LONGEST
    while len(shorten(name, length).encode(errors="replace")) > MOST_BYTES:
        length -= 1
    return shorten(name, length)


def check_folder(folder: Path) -> None:
    """Refuse a folder to sort into that is in use or cannot be made, before anything is computed.

    >>> check_folder(Path("no-such-folder/sorted"))
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        remedy = f"reverse it with 'moontide undo {folder}'" if (folder / UNDO).exists() else "name a new one"
        raise OptionError(f"'--sort-into' must be a new or empty folder, and {folder} is not; {remedy}.")
    parent = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=parent):
            return
    except OSError as error:
        raise FileError(f"{folder} cannot be made: {error.strerror}. Name a folder that can be written.") from None


def check_labels(labels: Iterable[str]) -> None:
    """Refuse labels that no folder or file can have in its name here, before anything is computed.

    >>> check_labels(["cat", "dog/wolf"])
    """
    for label in labels:
        _check_charset(Path(safe(label)))


@dataclass(frozen=True)
class Record:
    """The moves of a folder, as they are kept in its file `UNDO`.

    >>> Record(Path("out"), (), ".moontide-7f-").hidden(2)
    '.moontide-7f-2'
    """

    folder: Path  # without links
    moves: Sequence[Move]
    prefix: str  # of hidden names
    placed: bool = False  # whether the second stage of renaming has begun

    def hidden(self, number: int) -> str:
        """Return the name of an image while it is copied or renamed."""
        return f"{self.prefix}{number}"

    @property
    def renamed(self) -> list[tuple[Path, Path, Path]]:
        """Old, hidden and new paths of the images that are renamed."""
        numbered = enumerate(self.moves)
        return [(m.source, m.target.with_name(self.hidden(i)), m.target) for i, m in numbered if m.how == "rename"]

    def write(self) -> None:
        """Write the record, and wait until it is on the disk."""
        rows = [[self._name(m.source, m.how), self._name(m.target), m.how] for m in self.moves]
        held = {"moontide": "undo", "prefix": self.prefix, "placed": self.placed, "moves": rows}
        with replacing(self.folder / UNDO) as handle:
            handle.write(json.dumps(held, indent=0).encode())
            handle.flush()
            os.fsync(handle.fileno())

    def _name(self, path: Path, how: str = "rename") -> str:
        """Return a path in the folder relative to it, so that the folder can be moved."""
        return str(path.relative_to(self.folder) if how == "rename" else path)


def read_record(folder: Path) -> Record:
    """Read the record of a folder, and refuse one that names paths outside it.

    >>> read_record(Path("no-such-folder"))
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is nothing to undo in no-such-folder: it has no moontide-undo.json.
    """
    path, whole = folder / UNDO, Path(os.path.realpath(folder))
    if not path.is_file():
        raise FileError(f"There is nothing to undo in {folder}: it has no {UNDO}.")
    if path.stat().st_size == 0:  # the process was killed before anything was moved
        return Record(whole, (), ".moontide-0-")
    with reading(path):
        held = read_json(path)
        if held["moontide"] != "undo" or not HIDDEN.fullmatch(held["prefix"]):
            raise ValueError("it is not a record of moved images")
        moves = []
        for source, target, how in held["moves"]:
            if how not in ("link", "copy", "rename") or b"\0" in os.fsencode(source + target):
                raise ValueError("a move is not one of Moontide's")
            moves.append(Move(whole / source, whole / target, how))
        record = Record(whole, moves, held["prefix"], bool(held["placed"]))
        _check_inside(record)
    return record


def _real(path: Path) -> Path:
    """Return an absolute path without links, except for a link that is an image itself.

    >>> _real(Path("/in/../a.jpg"))
    PosixPath('/a.jpg')
    """
    return Path(os.path.realpath(path.parent), path.name)


def _check_inside(record: Record) -> None:
    """Refuse moves from or to a place outside the folder; links and copies may come from anywhere."""
    paths = [m.target for m in record.moves] + [m.source for m in record.moves if m.how == "rename"]
    parents = {path.parent for path in paths}
    inside = {parent for parent in parents if Path(os.path.realpath(parent)).is_relative_to(record.folder)}
    for path in paths:
        if path.name in ("", "..") or path.parent not in inside:
            raise FileError(f"{path} is outside the folder {record.folder}, so nothing was moved; name another folder.")


def apply(moves: Sequence[Move], folder: Path) -> Path:
    """Make the moves, and return the file that `undo` reads, which is kept in `folder`.

    All moves are made, or, after a failure or Ctrl-C, none.
    """
    for move in moves:
        _check_charset(move.target)
    moves = [replace(move, source=_real(move.source), target=_real(move.target)) for move in moves]
    if os.path.lexists(folder / UNDO):
        raise FileError(f"{folder} was sorted before; reverse that first: moontide undo {folder}")
    record = Record(Path(os.path.realpath(folder)), moves, f".moontide-{secrets.token_hex(4)}-")
    _check_inside(record)
    _check_targets(moves)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNDO).open("xb").close()  # of two processes, one has the folder
    except OSError as error:
        raise FileError(
            f"{folder} cannot be sorted into: {error.strerror or error}. Nothing was moved; choose another folder."
        ) from error
    try:
        record.write()
        _make(record)
    except (OSError, KeyboardInterrupt) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        try:
            undo(folder)
        except OSError as failed:
            raise FileError(
                f"{folder} cannot be sorted into: {why}. Not all was reversed; when the cause is gone, run: "
                f"moontide undo {folder}"
            ) from failed
        if isinstance(error, KeyboardInterrupt):
            raise
        hint = "; try '--copy'" if any(move.how == "link" for move in moves) else ""
        raise FileError(f"{folder} cannot be sorted into: {why}. Everything was reversed{hint}.") from error
    return folder / UNDO


def _check_charset(path: Path) -> None:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        raise FileError(
            f"{str(path)!a} cannot be named in the character set of this locale; set PYTHONUTF8=1."
        ) from None


def _check_targets(moves: Sequence[Move]) -> None:
    """Refuse names of other files, and to rename an image twice."""
    renamed = [move.source for move in moves if move.how == "rename"]
    sources = set(renamed)
    if len(sources) < len(renamed):
        raise FileError("An image cannot be renamed twice; list each image once.")
    for move in moves:
        if os.path.lexists(move.target) and move.target not in sources:
            raise FileError(f"{move.target} exists already and is not overwritten; choose another folder or pattern.")


def _make(record: Record) -> None:
    """Make the moves of a record that has been written."""
    for number, move in enumerate(record.moves):
        move.target.parent.mkdir(parents=True, exist_ok=True)
        hidden = move.target.with_name(record.hidden(number))
        if move.how == "link":
            move.target.symlink_to(move.source)
        elif move.how == "copy":
            shutil.copy2(move.source, hidden)
            _rename(hidden, move.target)
        else:
            _rename(move.source, hidden)
    if renamed := record.renamed:
        replace(record, placed=True).write()
        for _, hidden, target in renamed:
            _rename(hidden, target)


def _rename(path: Path, target: Path) -> None:
    """Rename a file, but not onto another."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    path.rename(target)


def undo(folder: str | Path) -> int:
    """Reverse what `apply` did in a folder, and return the number of images.

    A copy that has been changed since then stays where it is.

    >>> undo("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is nothing to undo in no-such-folder: it has no moontide-undo.json.
    """
    record = read_record(Path(folder))
    try:
        done = _rename_back(record) + sum(_take_away(record, number) for number in range(len(record.moves)))
        for parent in sorted({move.target.parent for move in record.moves if move.how != "rename"}, reverse=True):
            with suppress(OSError):  # it holds something else
                parent.rmdir()
        for half in record.folder.glob(f".{UNDO}.*.tmp"):
            half.unlink()
        (record.folder / UNDO).unlink()
    except MoontideError:
        raise
    except OSError as error:
        raise FileError(
            f"{folder} cannot be restored: {error.strerror or error}. When the cause is gone, run it again."
        ) from error
    with suppress(OSError):
        record.folder.rmdir()
    return done


def _rename_back(record: Record) -> int:
    """Give the images their old names, and return how many had another one."""
    new = {target for _, hidden, target in record.renamed if record.placed and not os.path.lexists(hidden)}
    moved = [one for one in record.renamed if os.path.lexists(one[1]) or (one[2] in new and os.path.lexists(one[2]))]
    for source, _, _ in moved:
        if os.path.lexists(source) and source not in new:
            raise FileError(f"{source} exists already and is not overwritten; move it away, and undo again.")
    if record.placed:
        for _, hidden, target in moved:
            if target in new:
                _rename(target, hidden)
        replace(record, placed=False).write()
    for source, hidden, _ in moved:
        _rename(hidden, source)
    return len(moved)


def _take_away(record: Record, number: int) -> bool:
    """Remove a link or copy, and return whether it was still what `apply` had made."""
    move = record.moves[number]
    if move.how == "rename":
        return False
    with suppress(FileNotFoundError, NotADirectoryError):  # half a copy
        move.target.with_name(record.hidden(number)).unlink()
    link = move.how == "link" and move.target.is_symlink() and Path(os.readlink(move.target)) == move.source
    if link or (move.how == "copy" and _same(move.source, move.target)):
        move.target.unlink()
        return True
    return False


def _same(source: Path, target: Path) -> bool:
    """Return whether a file is still the copy that was made of another."""
    if target.is_symlink() or not target.is_file() or not source.is_file():
        return False
    return not source.samefile(target) and filecmp.cmp(source, target, shallow=False)
