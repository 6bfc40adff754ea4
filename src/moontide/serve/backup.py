"""Backup, restore and verification of a data folder. For PostgreSQL use its own tools for backups."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from moontide.errors import FileError, MoontideError, OptionError
from moontide.serve.databases import COUNTS, FILE, LOG, Mark, SQLite, is_postgres, open_store
from moontide.serve.push_log import WRAP
from moontide.serve.stream_store import NO_TOKEN, DamagedError, StoreError, StreamStore

FILES = (FILE, f"{FILE}-wal", LOG, "mark")


def backup(data: str, destination: Path) -> None:
    """Write a consistent copy of a data folder into a new folder, even while a server is running."""
    _need_folder(data, "--backup")
    with closing(SQLite(data, "always", lock=False)) as store, _new_folder(destination, "--backup") as made:
        _write_mark(made, store.copy_to(made / FILE))


def restore(source: Path, data: str) -> None:
    """Create a data folder from a backup, or from the readable part of a damaged folder."""
    if is_postgres(data):
        raise OptionError("'--restore' is for folders; restore a PostgreSQL database with its own tools.")
    _need_folder(str(source), "--restore")
    with _aside(source) as copied, _new_folder(Path(data), "--data") as made:
        _want_what_is_there(copied)
        with closing(_AsTheyAre(str(copied), "never", lock=False)) as store:
            _write_mark(made, store.copy_to(made / FILE, salvage=True))


def verify(data: str) -> tuple[list[str], int]:
    """Check all stored data; return descriptions of the damage and the number of streams."""
    if is_postgres(data):
        with closing(open_store(data)) as store:
            return _damage(store)
    if not any(Path(data, name).is_file() for name in FILES):
        _need_folder(data, "--verify")
    with closing(_Held(data)), _aside(Path(data)) as copied:
        found, streams = _damage_in(copied)
        return [sentence.replace(str(copied), data) for sentence in found], streams


def _damage_in(folder: Path) -> tuple[list[str], int]:
    """Look at a copy; where it would not be served, also at what `restore` would take of it."""
    found: list[str] = []
    for _ in range(2):
        try:
            with closing(_AsTheyAre(str(folder), "never", lock=True)) as store:
                more, streams = _damage(store)
            return [*found, *more], streams
        except DamagedError as error:
            found = found or [str(error)]
            _want_what_is_there(folder)
    return found, 0


class _Held(SQLite):
    """The lock of a folder, and nothing else of it."""

    def __init__(self, data: str) -> None:
        self.data, self._connection = data, None
        self._mutex = threading.RLock()
        self._held = sqlite3.connect(Path(data) / "lock", 0.1, isolation_level=None)
        try:
            self._held.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            self.close()
            raise FileError(
                f"The data in {data} are in use by a server; stop it, or verify a backup of them."
            ) from None


class _AsTheyAre(SQLite):
    """The data of a folder, whatever is wrong with their tables."""

    sound = False


def _damage(store: StreamStore) -> tuple[list[str], int]:
    found = []
    try:
        damaged = [name for name, token in store.tokens().items() if token == NO_TOKEN]
        found += [f"The token {name!r} does not match its checksum; revoke it, and create another." for name in damaged]
        if isinstance(store, SQLite):
            found += [f"SQLite finds: {sentence}." for sentence in store.damage()]
        streams = store.streams()
    except StoreError as error:
        return [*found, str(error)], 0
    for name, config in streams.items():
        try:
            if isinstance(config, DamagedError):
                raise config
            store.load(name)
            for snapshot in store.snapshots(name):
                store.state(name, snapshot.number)
        except MoontideError as error:
            found.append(f"The stream {name!r}: {error}")
    return found, len(streams)


def _need_folder(data: str, option: str) -> None:
    if is_postgres(data):
        raise OptionError(f"'{option}' is for folders; use the tools of PostgreSQL, such as pg_dump.")
    if not Path(data, FILE).is_file():
        raise FileError(f"There is no data in {data!r}: the file {FILE} is missing.")


def _want_what_is_there(folder: Path) -> None:
    """Replace the mark of a folder by one that asks for no more transactions than its tables have."""
    count = 0
    with suppress(sqlite3.Error), closing(sqlite3.connect(folder / FILE)) as connection:  # it is refused later
        count = sum(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in COUNTS) % WRAP
    (folder / "mark").unlink(missing_ok=True)
    _write_mark(folder, count)


def _write_mark(folder: Path, count: int) -> None:
    mark = Mark(folder / "mark")
    mark.write(count, count)
    mark.close()


@contextmanager
def _new_folder(path: Path, option: str) -> Iterator[Path]:
    """Yield a folder that gets its final name when it is complete."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"'{option}' must be a new or empty folder. Got {str(path)!r}.")
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    try:
        yield made
        if path.exists():
            path.rmdir()
        made.rename(path)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """Yield a copy of a folder, because SQLite modifies the files it opens; errors name the folder itself."""
    with tempfile.TemporaryDirectory(prefix="moontide") as made:
        for name in FILES:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(made, name))
        unread = folder / f"{FILE}-wal.unread"
        if unread.is_file():
            shutil.copyfile(unread, Path(made, f"{FILE}-wal"))
        try:
            yield Path(made)
        except MoontideError as error:
            raise type(error)(str(error).replace(made, str(folder))) from error
