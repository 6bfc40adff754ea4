"""What survives the process: streams, their journal, states, answers and keys, in SQLite or in PostgreSQL.

    streams   name and configuration
    journal   one record a micro-batch, numbered without gaps: the embeddings that one `step` was given
    states    the checkpoint to go on from (number -1), the start (0), and the snapshots that a user took (1, 2, ...)
    answers   what was answered for the samples of a record, kept longer than their embeddings
    keys      idempotency keys of pushes, kept as long as the answers
    tokens    names and SHA-256 digests

A record, its answers and its keys are one transaction, so a crash leaves all of them or none: what the database drops
as torn was never answered. Every binary value ends in a CRC-32 of itself and of its place, checked when it is read.
`fsync` says when a transaction is on the disk: "always" before it is answered, "interval" within a second or so,
"never" when the system likes. A killed process loses nothing under any of them; a power cut may lose the last pushes
under the other two.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from moontide.errors import FileError, MoontideError, missing_extra

SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (stream TEXT PRIMARY KEY, config TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS journal (stream TEXT, seq BIGINT, first BIGINT NOT NULL, size BIGINT NOT NULL,
    x BYTEA NOT NULL, PRIMARY KEY (stream, seq));
CREATE TABLE IF NOT EXISTS states (stream TEXT, number BIGINT, seq BIGINT NOT NULL, total BIGINT NOT NULL,
    seen BIGINT NOT NULL, created DOUBLE PRECISION NOT NULL, state BYTEA NOT NULL, tally BYTEA NOT NULL,
    PRIMARY KEY (stream, number));
CREATE TABLE IF NOT EXISTS answers (stream TEXT, first BIGINT, size BIGINT NOT NULL, answer BYTEA NOT NULL,
    PRIMARY KEY (stream, first));
CREATE TABLE IF NOT EXISTS keys (stream TEXT, key TEXT, first BIGINT NOT NULL, size BIGINT NOT NULL,
    crc BIGINT NOT NULL, PRIMARY KEY (stream, key));
CREATE INDEX IF NOT EXISTS keys_by_sample ON keys (stream, first);
CREATE TABLE IF NOT EXISTS tokens (name TEXT PRIMARY KEY, digest TEXT NOT NULL, created DOUBLE PRECISION NOT NULL)
"""
CHECKPOINT = -1  # the number of the state to go on from
LOCK_WAIT = 10.0  # seconds to wait for a server that is just going down to let go of the data
PG_LOCK = 0x6D6F6F6E  # the advisory lock that the one server of a database holds
PAGE_BYTES, WAL_BYTES = 2**14, 2**24  # of SQLite; its own log is folded into its file at the second size


class StoreError(MoontideError):
    """The store could not do what it was asked to."""


class DamagedError(StoreError):
    """The store holds something that does not match its checksum, or lacks a record."""


class Push(NamedTuple):
    """Where the samples of a push with an idempotency key are, and a checksum of what was pushed."""

    first: int
    size: int
    crc: int


class Record(NamedTuple):
    """One micro-batch of the journal."""

    seq: int
    first: int  # number of its first sample
    size: int
    x: bytes  # (size, d) float32


class Saved(NamedTuple):
    """A state with what belongs to it."""

    seq: int  # the last record in it
    total: int  # samples of the stream so far
    seen: int  # samples in the state, fewer after a reset
    state: bytes
    tally: bytes


class Snapshot(NamedTuple):
    """What is listed of a state."""

    number: int
    seen: int
    created: float


def seal(value: bytes, *place: object) -> bytes:
    """Append the checksum of a value and of the place it is for.

    >>> unseal(seal(b"abc", "record", 1), "record", 1)
    b'abc'
    >>> unseal(seal(b"abc", "record", 1), "record", 2)
    Traceback (most recent call last):
        ...
    moontide.serve.journal.DamagedError: The stored record 2 does not match its checksum; restore a backup.
    """
    return value + zlib.crc32(value, zlib.crc32(repr(place).encode())).to_bytes(4, "little")


def unseal(sealed: bytes, *place: object) -> bytes:
    """Check and take off the checksum.

    >>> unseal(seal(b"abc", 1), 1)
    b'abc'
    """
    value = sealed[:-4]
    if seal(value, *place) != sealed:
        raise DamagedError(f"The stored {' '.join(map(str, place))} does not match its checksum; restore a backup.")
    return value


class Store:
    """The tables, whatever the database. Calls may come from any thread; they wait for each other."""

    failures: type[Exception] = Exception  # what the driver raises

    def __init__(self, data: str, fsync: str, lock: bool) -> None:
        """Connect, make the tables where there are none, and with `lock` see that no other server uses them."""
        self.data, self.fsync, self.lock = data, fsync, lock
        self._mutex = threading.RLock()
        self._connection: Any = None
        try:
            self._connect()
        except MoontideError:
            raise
        except (self.failures, OSError) as error:
            raise FileError(f"The data in {self.place} cannot be opened: {_one_line(error)}.") from error

    @property
    def place(self) -> str:
        """Where the data are, in words without a password."""
        return self.data

    def _connect(self) -> None:
        for statement in SCHEMA.split(";"):
            self._run(statement)

    def _run(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self._connection.execute(sql, values)

    def _forget_if_lost(self) -> None:
        """Drop a connection that cannot be used any more, so that the next transaction makes a new one."""

    def sync(self) -> None:
        """Bring to the disk what was committed, where the policy leaves it to a timer."""

    def close(self) -> None:
        """Close the connection and let go of the data."""
        with self._mutex:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._mutex:
            try:
                if self._connection is None:
                    self._connect()
                self._run("BEGIN")
                try:
                    yield
                    self._run("COMMIT")
                except BaseException:
                    with suppress(self.failures):
                        self._run("ROLLBACK")
                    raise
            except self.failures as error:
                self._forget_if_lost()
                raise StoreError(f"The data in {self.place} cannot be used: {_one_line(error)}.") from error

    def _select(self, sql: str, *values: Any) -> list[Any]:
        with self._transaction():
            return list(self._run(sql, values).fetchall())

    # Streams

    def create(self, stream: str, config: str, state: bytes, tally: bytes) -> None:
        """Add a stream with its state before the first sample."""
        with self._transaction():
            self._run("INSERT INTO streams VALUES (?, ?)", (stream, config))
            for number in (0, CHECKPOINT):
                self._put_state(stream, number, Saved(0, 0, 0, state, tally))

    def streams(self) -> dict[str, str]:
        """Return the configuration of every stream by name."""
        return dict(self._select("SELECT stream, config FROM streams ORDER BY stream"))

    def delete(self, stream: str) -> None:
        """Drop a stream and all that belongs to it."""
        with self._transaction():
            for table in ("streams", "journal", "states", "answers", "keys"):
                self._run(f"DELETE FROM {table} WHERE stream = ?", (stream,))

    # The journal

    def append(self, stream: str, record: Record, answer: bytes, keys: Sequence[tuple[str, Push]]) -> None:
        """Add a record with its answers and keys. When this returns, they are there for good."""
        seq, first, size, x = record
        x, answer = seal(x, stream, "record", seq), seal(answer, stream, "answer", first)
        with self._transaction():
            self._run("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", (stream, seq, first, size, x))
            self._run("INSERT INTO answers VALUES (?, ?, ?, ?)", (stream, first, size, answer))
            for key, push in keys:
                self._run("INSERT INTO keys VALUES (?, ?, ?, ?, ?)", (stream, key, *push))

    def checkpoint(self, stream: str, saved: Saved, *, x_from: int, answers_from: int) -> None:
        """Make a state the one to go on from; drop records and answers whose samples all come before a number."""
        with self._transaction():
            self._put_state(stream, CHECKPOINT, saved)
            for table, start in (("journal", x_from), ("answers", answers_from), ("keys", answers_from)):
                self._run(f"DELETE FROM {table} WHERE stream = ? AND first + size <= ?", (stream, start))

    def load(self, stream: str) -> tuple[Saved, list[Record], list[Record]]:
        """Return the checkpoint of a stream, the records in it that are still there, and those after it."""
        with self._transaction():
            saved = self._state(stream, CHECKPOINT)
            rows = self._run(
                "SELECT seq, first, size, x FROM journal WHERE stream = ? ORDER BY seq", (stream,)
            ).fetchall()
        if saved is None:
            raise DamagedError(f"The stream {stream} has no checkpoint; restore a backup.")
        records = [Record(seq, first, size, unseal(x, stream, "record", seq)) for seq, first, size, x in rows]
        inside = [record for record in records if record.seq <= saved.seq]
        after = records[len(inside) :]
        if [record.seq for record in after] != [saved.seq + 1 + i for i in range(len(after))]:
            raise DamagedError(f"The journal of {stream} lacks a record after {saved.seq}; restore a backup.")
        return saved, inside, after

    def answers(self, stream: str, first: int, stop: int) -> list[tuple[int, bytes]]:
        """Return the answers of the records that hold samples from `first` to before `stop`, in order."""
        rows = self._select(
            "SELECT first, answer FROM answers WHERE stream = ? AND first < ? AND first + size > ? ORDER BY first",
            *(stream, stop, first),
        )
        return [(at, unseal(answer, stream, "answer", at)) for at, answer in rows]

    def keyed(self, stream: str, keys: Sequence[str]) -> dict[str, Push]:
        """Return the pushes that came with any of these keys."""
        marks = ", ".join("?" * len(keys))
        sql = f"SELECT key, first, size, crc FROM keys WHERE stream = ? AND key IN ({marks})"
        return {key: Push(*push) for key, *push in self._select(sql, stream, *keys)}

    # States

    def _put_state(self, stream: str, number: int, saved: Saved) -> None:
        seq, total, seen, state, tally = saved
        self._run("DELETE FROM states WHERE stream = ? AND number = ?", (stream, number))
        sealed = seal(state, stream, "state", number), seal(tally, stream, "tally", number)
        row = (stream, number, seq, total, seen, time.time(), *sealed)
        self._run("INSERT INTO states VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def put_state(self, stream: str, number: int, saved: Saved) -> None:
        """Keep a state under a number."""
        with self._transaction():
            self._put_state(stream, number, saved)

    def state(self, stream: str, number: int) -> Saved | None:
        """Return a state, or None where there is none of that number."""
        with self._transaction():
            return self._state(stream, number)

    def _state(self, stream: str, number: int) -> Saved | None:
        sql = "SELECT seq, total, seen, state, tally FROM states WHERE stream = ? AND number = ?"
        for seq, total, seen, state, tally in self._run(sql, (stream, number)).fetchall():
            values = unseal(state, stream, "state", number), unseal(tally, stream, "tally", number)
            return Saved(seq, total, seen, *values)
        return None

    def snapshots(self, stream: str) -> list[Snapshot]:
        """List the states of a stream but for the checkpoint."""
        rows = self._select(
            "SELECT number, seen, created FROM states WHERE stream = ? AND number >= 0 ORDER BY number", stream
        )
        return [Snapshot(*row) for row in rows]

    def delete_state(self, stream: str, number: int) -> None:
        """Drop a state."""
        with self._transaction():
            self._run("DELETE FROM states WHERE stream = ? AND number = ?", (stream, number))

    # Tokens

    def tokens(self) -> dict[str, str]:
        """Return the digests of all tokens by name."""
        return dict(self._select("SELECT name, digest FROM tokens ORDER BY name"))

    def put_token(self, name: str, digest: str | None) -> None:
        """Set the digest of a token, or drop it (None)."""
        with self._transaction():
            self._run("DELETE FROM tokens WHERE name = ?", (name,))
            if digest is not None:
                self._run("INSERT INTO tokens VALUES (?, ?, ?)", (name, digest, time.time()))


class SQLite(Store):
    """A folder with one database in it, which this process alone writes."""

    failures = sqlite3.Error

    def _connect(self) -> None:
        folder = Path(self.data)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.lock:  # a lock that ends with the process, however it ends
            self._held = sqlite3.connect(folder / "lock", LOCK_WAIT, isolation_level=None, check_same_thread=False)
            try:
                self._held.execute("BEGIN EXCLUSIVE")
            except sqlite3.OperationalError:
                self._held.close()
                raise FileError(f"The data in {folder} are in use by another server; stop it first.") from None
        path = folder / "moontide.sqlite3"
        self._connection = sqlite3.connect(path, timeout=LOCK_WAIT, isolation_level=None, check_same_thread=False)
        os.chmod(path, 0o600)
        self._run(f"PRAGMA page_size = {PAGE_BYTES}")  # of a new file
        level = {"always": "FULL", "interval": "NORMAL", "never": "OFF"}[self.fsync]
        fold = f"wal_autocheckpoint = {WAL_BYTES // PAGE_BYTES}"
        for pragma in ("journal_mode = WAL", f"synchronous = {level}", fold, f"journal_size_limit = {WAL_BYTES}"):
            self._run(f"PRAGMA {pragma}").fetchall()
        super()._connect()

    def sync(self) -> None:
        """Sync the write-ahead log and fold it into the database."""
        with self._mutex:
            if self.fsync == "interval" and self._connection is not None:
                self._run("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def close(self) -> None:
        """Close the database, then let go of the lock."""
        super().close()
        if self.lock:
            self._held.close()


class Postgres(Store):
    """A PostgreSQL database, which one server uses at a time; whether it syncs at all is its administrator's choice."""

    def __init__(self, data: str, fsync: str, lock: bool) -> None:
        """Connect with psycopg."""
        try:
            import psycopg
        except ImportError:
            raise missing_extra("psycopg", "postgres", "Keeping data in PostgreSQL") from None
        self.psycopg = psycopg
        self.failures = psycopg.Error
        super().__init__(data, fsync, lock)

    @property
    def place(self) -> str:
        """The database and its host."""
        with suppress(self.psycopg.Error):
            told = self.psycopg.conninfo.conninfo_to_dict(self.data)
            return f"PostgreSQL database {told.get('dbname', '')} on {told.get('host', 'this machine')}"
        return "PostgreSQL"

    def _connect(self) -> None:
        self._connection = self.psycopg.connect(self.data, autocommit=True, connect_timeout=int(LOCK_WAIT))
        self._run(f"SET synchronous_commit TO {'on' if self.fsync == 'always' else 'off'}")
        deadline = time.monotonic() + LOCK_WAIT
        while self.lock and not self._run(f"SELECT pg_try_advisory_lock({PG_LOCK})").fetchone()[0]:
            if time.monotonic() > deadline:
                self.close()
                raise FileError(f"The data in {self.place} are in use by another server; stop it first.")
            time.sleep(0.1)
        super()._connect()

    def _run(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self._connection.execute(sql.replace("?", "%s"), values)

    def _forget_if_lost(self) -> None:
        if self._connection is not None and self._connection.closed:
            self._connection = None


def open_store(data: str, fsync: str = "always", lock: bool = True) -> Store:
    """Open the SQLite store in a folder, or a PostgreSQL database by its URL; `lock`: as its only server.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = open_store(folder)
    ...     store.create("a", "{}", b"state", b"tally")
    ...     names = list(store.streams())
    ...     store.close()
    >>> names
    ['a']
    """
    return (Postgres if re.match(r"postgres(ql)?://", data) else SQLite)(data, fsync, lock)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
