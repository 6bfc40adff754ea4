"""The two kinds of store: a folder with an SQLite database, and PostgreSQL.

`fsync` sets when a transaction is on disk: "always" before it is answered, "interval" within about a second, "never"
when the system decides. A killed process loses nothing under any of them; a power cut may lose the last pushes
under the other two.

In a folder, pushes go to the file `pushes.log` first (see `push_log`), and into the tables with the next transaction
that needs those of their stream, such as a checkpoint. This log and SQLite's own end at the first entry that does not
match its checksum; a damaged one would lose what was answered after it, and nobody would know. So transactions and
pushes are counted, in the database and in `pushes.log`, and the file `mark` beside them has the last count; data that
are behind their mark are not served.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from moontide.errors import FileError, OptionError, missing_extra
from moontide.serve.push_log import WRAP, Entry, Found, PushLog, entries
from moontide.serve.stream_store import (
    CHECKPOINT,
    EVERY,
    HELP,
    NO_TOKEN,
    SCHEMA,
    Answered,
    DamagedError,
    Drop,
    Record,
    StoreError,
    StreamStore,
    insert,
    one_line,
    seal,
)

LOCK_WAIT = 10.0  # seconds to wait for a server that is just going down to let go of the data
PG_LOCK = 0x6D6F6F6E  # the advisory lock that the one server of a database holds
PAGE_BYTES, WAL_BYTES = 2**10, 2**24  # of SQLite; its own log is folded into its file at the second size
LOG_BYTES = 2**28  # of the log, after which the pushes of all streams go into the tables
ROSTERS = ("streams", "states", "tokens")  # tables in which a row may be missing that no other row tells of
LATER = ("pieces",)  # tables that data of an earlier version do not have, and get
COUNTS = ("user_version", "application_id")  # of SQLite's header: transactions, and pushes before those of the log
FILE, LOG = "moontide.sqlite3", "pushes.log"


class Marked(NamedTuple):
    """The contents of a mark."""

    last: int  # transactions and pushes so far
    synced: int  # those that are on the disk for sure
    boot: bytes  # when the machine was started, for after a power cut only the second number counts


class Mark:
    """A small file with the number of transactions and pushes, written in place, in two slots by turns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mark = Mark(Path(folder, "mark"))
    ...     before = mark.read()
    ...     mark.write(7, 6)
    ...     after = mark.read()
    ...     mark.close()
    >>> before, after.last, after.synced
    (None, 7, 6)
    """

    form, slot = struct.Struct("<qqq16s"), 64

    def __init__(self, path: Path) -> None:
        """Open or make the file."""
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        self.turn = 0
        self.boot = boot_id()

    def read(self) -> Marked | None:
        """Return its contents, or None if they cannot be read."""
        found = []
        for offset in (0, self.slot):
            data = os.pread(self.file, self.form.size + 4, offset)
            if len(data) > 4 and zlib.crc32(data[:-4]).to_bytes(4, "little") == data[-4:]:
                found.append(self.form.unpack(data[:-4]))
        if not found:
            return None
        self.turn, *last = max(found)
        return Marked(*last)

    def write(self, count: int, synced: int) -> None:
        """Set the numbers; a torn write leaves the other slot intact."""
        self.turn += 1
        data = self.form.pack(self.turn, count, synced, self.boot)
        os.pwrite(self.file, data + zlib.crc32(data).to_bytes(4, "little"), self.slot * (self.turn % 2))

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)


def boot_id() -> bytes:
    """Return 16 bytes that change when the machine is started; where that cannot be told, others every time.

    >>> len(boot_id())
    16
    """
    with suppress(OSError, ValueError):
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return os.urandom(16)


class SQLite(StreamStore):
    """A folder with one database, which only this process writes."""

    failures = (sqlite3.Error, OSError, UnicodeDecodeError)  # the last of a message that repeats what is damaged
    sound = True  # whether the server may rely on the tables
    rows = "WITHOUT ROWID"  # the key and the row are one tree, so that a push changes fewer pages
    _held: sqlite3.Connection | None = None
    _mark: Mark | None = None
    _log: PushLog | None = None  # of the one process that serves the folder

    def _connect(self) -> None:
        folder = Path(self.data)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.lock:  # a lock that ends with the process, however it ends
            self._held = sqlite3.connect(folder / "lock", LOCK_WAIT, isolation_level=None, check_same_thread=False)
            try:
                self._held.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:
                raise FileError(f"The data in {folder} are in use by another server; stop it first.") from None
        self.path = folder / FILE
        log, spare = (folder / f"{FILE}{end}" for end in ("-wal", "-wal.unread"))
        if self.lock and log.exists() and log.stat().st_size and not spare.exists():
            shutil.copyfile(log, spare)  # what SQLite cannot read of it, it drops when it is closed
        self._connection = sqlite3.connect(self.path, timeout=LOCK_WAIT, isolation_level=None, check_same_thread=False)
        self._connection.text_factory = lambda text: text.decode(errors="replace")
        os.chmod(self.path, 0o600)
        self._run(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
        level = "OFF" if self.fsync == "never" else "FULL"  # what is in the tables is no longer in the log of pushes
        fold = f"wal_autocheckpoint = {WAL_BYTES // PAGE_BYTES}"
        keep = (
            "secure_delete = FAST",
            f"journal_size_limit = {WAL_BYTES}",
        )  # zeros over what is dropped cost as much again
        for pragma in ("journal_mode = WAL", f"synchronous = {level}", fold, *keep):
            self._run(f"PRAGMA {pragma}").fetchall()
        self._check()
        super()._connect()
        spare.unlink(missing_ok=True)
        found = [self.path, log, folder / "mark"]
        if self.lock:
            self._log = PushLog(folder / LOG)
            found += [self._log.path, folder / "lock"]
        self._files = {path: _file(path) for path in found}
        if self._log is not None and self._pending:
            self._log.size = self._pending[-1].stop
            self._pushed = self._pending[-1].entry.number
            for start, _, entry in new_to(self._run, self._pending):
                self._wait(start, entry.stream, entry.record, entry.answered)
            self.fold()

    def _check(self) -> None:
        """Refuse another layout, and a database that lacks rows, or transactions which were committed."""
        tables = columns_of(self._connection)
        if "keys" in tables:
            raise FileError(
                f"The data in {self.data} are from an earlier version of Moontide; "
                "download the states with that version, and start with a new folder."
            )
        if self.lock and self.sound and tables and (found := self.damage(*ROSTERS)):
            raise DamagedError(f"The data in {self.data} are damaged: {found[0]}; restore a backup, {HELP}.")
        self._mark = Mark(Path(self.data, "mark"))
        marked = self._mark.read()
        self._count, self._pushed = (self._run(f"PRAGMA {name}").fetchone()[0] for name in COUNTS)
        self._pending: list[Found] = []  # pushes of an earlier process in the log
        # of each stream, the pushes that are not in the tables: where each begins in the log, its record without the
        # embeddings, and its answers
        self._waiting: dict[str, list[tuple[int, Record, Sequence[Answered]]]] = {}
        self._folding: list[str] = []  # streams whose pushes this transaction moves into the tables
        self._emptied = False  # whether none is left in the log then
        self._synced = 0 if marked is None else marked.synced
        if not self.lock and marked is not None:  # a server may be at work
            return
        self._pending = list(entries(Path(self.data, LOG), self._pushed))
        if marked is None:
            if tables:
                raise DamagedError(f"The data in {self.data} lack their mark; restore a backup, {HELP}.")
            return self._mark.write(self._count, self._count)
        wanted = marked.last if marked.boot == self._mark.boot else marked.synced
        missing = (wanted - self._count - self._pushed - len(self._pending)) % WRAP
        if 0 < missing < WRAP // 2:
            raise DamagedError(
                f"The data in {self.data} lack the last {missing} transactions, which were answered: "
                f"the log of the database is damaged; restore a backup, {HELP}."
            )

    def _require_files(self) -> None:
        for path, known in self._files.items():
            if _file(path) != known:
                raise StoreError(
                    f"The data in {self.data} were deleted, moved or replaced under the server; "
                    f"put them back, or stop it and restore a backup, {HELP}."
                )
        if self._log is not None and os.fstat(self._log.file).st_size < self._log.size:
            raise StoreError(
                f"The log {self._log.path} was cut off under the server, and lacks pushes that were answered; "
                f"stop the server and restore a backup, {HELP}."
            )

    def append(self, stream: str, record: Record, answered: Sequence[Answered]) -> None:
        """Add a micro-batch to the log of pushes; a correction, which changes answers, goes into the tables."""
        if self._log is None or not record.size:
            return super().append(stream, record, answered)
        with self._mutex, self._failing():
            self._require_files()
            number = (self._pushed + 1) % WRAP
            start = self._log.append(Entry(number, stream, record, answered), sync=self.fsync == "always")
            self._pushed = number
            self._wait(start, stream, record, answered)
            self._note(synced=self.fsync == "always")
        if self._log.size > LOG_BYTES:
            self.fold()

    def fold(self) -> None:
        """Move all pushes into the tables."""
        with self._transaction(pushes=EVERY):
            pass

    def _wait(self, start: int, stream: str, record: Record, answered: Sequence[Answered]) -> None:
        """Note a push that is in the log and not yet in the tables."""
        self._waiting.setdefault(stream, []).append((start, record._replace(data=b""), answered))

    def _answers(self, stream: str, first: int, stop: int) -> list[Answered]:
        waiting = [] if stream in self._folding else self._waiting.get(stream, [])
        mine = [row for _, _, rows in waiting for row in rows if row.first < stop and row.first + row.size > first]
        return super()._answers(stream, first, stop) + mine

    def _begin(self, write: bool, pushes: str | None, drop: Drop | None) -> bool:
        self._require_files()
        self._folding = [stream for stream in self._waiting if pushes in (stream, EVERY)]
        logged = pushes is not None and self._log is not None and self._log.size > 0
        self._emptied = logged and len(self._folding) == len(self._waiting)
        write = write or self._emptied or bool(self._folding)
        self._run("BEGIN IMMEDIATE" if write else "BEGIN")
        if write:
            self._begun = (self._run("PRAGMA user_version").fetchone()[0] + 1) % WRAP
            self._run(f"PRAGMA user_version = {self._begun}")
        if self._log is not None:
            for stream in self._folding:
                for start, record, answered in self._waiting[stream]:
                    if drop is not None and drop.has(stream, record):
                        insert(self._run, stream, record, answered, keep=False)
                    else:
                        insert(self._run, stream, self._log.read(start).record, answered)
        if self._emptied:
            self._run(f"PRAGMA application_id = {self._pushed}")
        return write

    def _committed(self) -> None:
        self._count = self._begun
        if self._log is not None:
            for stream in self._folding:
                del self._waiting[stream]
            if self._emptied:
                self._log.reset()
                self._pending = []
            self._note(synced=self.fsync == "always" or (self._emptied and self.fsync == "interval"))
            self._folding, self._emptied = [], False

    def _note(self, synced: bool) -> None:
        """Write the count to the mark, and whether all of it is on disk."""
        count = (self._count + self._pushed) % WRAP
        if synced:
            self._synced = count
        if self._mark is not None:
            self._mark.write(count, self._synced)

    def sync(self) -> None:
        """Sync the log of pushes; transactions are on the disk already."""
        with self._mutex, self._failing():
            if self.fsync != "interval" or self._log is None:
                return
            if self._log.unsynced:
                self._log.sync()
                self._note(synced=True)

    def copy_to(self, path: Path, salvage: bool = False) -> int:
        """Write a consistent copy of the data, also while a server is at work on them; return its count.

        Pushes are read before the tables are copied, into which they may go at any time, and none is then missing.
        With `salvage`, tables that are damaged are copied row by row, as far as they can be read.
        """
        with self._mutex, self._failing(), closing(sqlite3.connect(path, isolation_level=None)) as copy:
            waiting = list(entries(Path(self.data, LOG)))
            if salvage and self.damage():
                self._salvage(copy)
            else:
                self._connection.backup(copy)
            count, folded = (copy.execute(f"PRAGMA {name}").fetchone()[0] for name in COUNTS)
            copy.execute("BEGIN")
            pushed = insert_all(copy.execute, waiting, folded)
            copy.execute("COMMIT")
            return int((count + pushed) % WRAP)

    def _salvage(self, copy: sqlite3.Connection) -> None:
        """Copy the rows that can be read, from either end of a table; a lost token leaves one that opens nothing."""
        for statement in SCHEMA.format(rows=self.rows).split(";"):
            copy.execute(statement)
        copy.execute("BEGIN")
        for table, columns in columns_of(copy).items():
            key = ", ".join(f"{name} DESC" for name, *_, place in columns if place)
            put = f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(columns))})"
            for rows in (f"{table} NOT INDEXED", f"{table} ORDER BY {key}"):
                with suppress(*self.failures):
                    for row in self._run(f"SELECT {', '.join(name for name, *_ in columns)} FROM {rows}"):
                        copy.execute(put, row)
        if self.damage("tokens"):
            copy.execute("INSERT OR IGNORE INTO tokens VALUES (?, ?)", ("damaged", seal(NO_TOKEN, "damaged", "token")))
        copy.execute("COMMIT")
        for name in COUNTS:
            copy.execute(f"PRAGMA {name} = {self._run(f'PRAGMA {name}').fetchone()[0]}")

    def _is_damage(self, error: Exception) -> bool:
        """Tell a malformed file from one that is locked, full or gone, which are subclasses."""
        return type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeDecodeError)

    def damage(self, *tables: str) -> list[str]:
        """Return what SQLite's own integrity check finds in some tables, or in all, and columns that are not there."""
        with self._mutex, self._failing(), closing(sqlite3.connect(":memory:")) as new:
            for statement in SCHEMA.format(rows=self.rows).split(";"):
                new.execute(statement)
            expected, found = columns_of(new), columns_of(self._connection)
            for name in expected:
                if found.get(name) != expected[name] and (name in found or name not in LATER):
                    return [f"the table {name} has other columns"]
            checks = [f"integrity_check({table})" for table in tables] or ["integrity_check"]
            rows = [row for check in checks for row in self._run(f"PRAGMA {check}").fetchall()]
            return [one_line(ValueError(str(row[0]))) for row in rows if row[0] != "ok"]

    def close(self) -> None:
        """Move pushes into the tables, close the database, and release the lock."""
        if self._connection is not None and self._log is not None:
            with suppress(StoreError):
                self.fold()
        super().close()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._mark is not None:
            self._mark.close()
            self._mark = None
        if self._held is not None:
            self._held.close()
            self._held = None


def columns_of(connection: sqlite3.Connection) -> dict[str, list[tuple[Any, ...]]]:
    """Return the columns of every table: name, type, whether it must have a value, and its place in the key.

    >>> with closing(sqlite3.connect(":memory:")) as connection:
    ...     _ = connection.execute("CREATE TABLE tokens (name TEXT PRIMARY KEY)")
    ...     columns_of(connection)
    {'tokens': [('name', 'TEXT', 0, 1)]}
    """
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    sql = 'SELECT name, type, "notnull", pk FROM pragma_table_info(?)'
    return {name: connection.execute(sql, (name,)).fetchall() for (name,) in tables}


def new_to(run: Callable[..., Any], found: Iterable[Found]) -> list[Found]:
    """Return the entries of a log whose records are not in the tables, and have not been."""
    last: dict[str, int] = {}
    new = []
    for each in found:
        stream = each.entry.stream
        if stream not in last:
            seqs = "SELECT seq FROM journal WHERE stream = ? UNION ALL SELECT seq FROM states WHERE stream = ?"
            number = run(f"SELECT max(seq) FROM ({seqs} AND number = {CHECKPOINT})", (stream, stream)).fetchone()[0]
            last[stream] = -1 if number is None else number
        if each.entry.record.seq > last[stream]:
            new.append(each)
    return new


def insert_all(run: Callable[..., Any], found: Iterable[Found], before: int) -> int:
    """Put the entries of a log after a number into the tables; returns the number of the last one."""
    later = []
    for each in found:
        if each.entry.number == (before + 1) % WRAP:
            later.append(each)
            before = each.entry.number
    for each in new_to(run, later):
        insert(run, each.entry.stream, each.entry.record, each.entry.answered)
    run(f"PRAGMA application_id = {before}")
    return before


def _file(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


class Postgres(StreamStore):
    """A PostgreSQL database, which one server uses at a time; whether it syncs at all is its administrator's choice."""

    def __init__(self, data: str, fsync: str, lock: bool) -> None:
        """Connect with psycopg."""
        try:
            import psycopg
        except ImportError:
            raise missing_extra("psycopg", "postgres", "Keeping data in PostgreSQL") from None
        self.psycopg = psycopg
        self.failures = (psycopg.Error, OSError)
        try:
            found = psycopg.conninfo.conninfo_to_dict(data)
        except psycopg.Error:
            found = None
        if found is None or "@" in str(found.get("dbname")) or not re.fullmatch(r"[\d,]*", str(found.get("port", ""))):
            raise _not_a_place()  # the driver would quote parts of it
        super().__init__(data, fsync, lock)

    @property
    def location(self) -> str:
        """The database and its host."""
        with suppress(self.psycopg.Error):
            found = self.psycopg.conninfo.conninfo_to_dict(self.data)
            return f"PostgreSQL database {found.get('dbname', '')} on {found.get('host', 'this machine')}"
        return "PostgreSQL"

    def _connect(self) -> None:
        self._connection = self.psycopg.connect(self.data, autocommit=True, connect_timeout=int(LOCK_WAIT))
        self._run(f"SET synchronous_commit TO {'on' if self.fsync == 'always' else 'off'}")
        deadline = time.monotonic() + LOCK_WAIT
        while self.lock and not self._run(f"SELECT pg_try_advisory_lock({PG_LOCK})").fetchone()[0]:
            if time.monotonic() > deadline:
                self.close()
                raise FileError(f"The data in {self.location} are in use by another server; stop it first.")
            time.sleep(0.1)
        super()._connect()

    def _run(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self._connection.execute(sql.replace("?", "%s"), values)

    def _forget_if_lost(self) -> None:
        if self._connection is not None and self._connection.closed:
            self._connection = None


def open_store(data: str, fsync: str = "always", lock: bool = True) -> StreamStore:
    """Open the SQLite store in a folder, or a PostgreSQL database by URL; `lock`: as its only server.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = open_store(folder)
    ...     store.create("a", "{}", b"state", b"tally")
    ...     names = list(store.streams())
    ...     store.close()
    >>> names
    ['a']
    """
    return (Postgres if is_postgres(data) else SQLite)(data, fsync, lock)


def _not_a_place() -> OptionError:
    """Say what the place of the data must be; without what it is, which may have a password in it."""
    return OptionError(
        "'--data' must be a folder, or a URL such as postgresql://host/database, with the user in PGUSER and the "
        "password in PGPASSWORD or ~/.pgpass."
    )


def is_postgres(data: str) -> bool:
    """Tell a URL from a folder; what looks like neither is refused.

    >>> is_postgres("postgresql://db/streams"), is_postgres("moontide-data")
    (True, False)
    """
    if re.match(r"postgres(ql)?://", data):
        return True
    if re.match(r"[a-z]\w+:(//|.*@)", data, re.IGNORECASE):
        raise _not_a_place()
    return False
