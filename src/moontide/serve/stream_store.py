"""Persistent data (streams, journal, states, answers and tokens), independent of the database.

    streams   name and configuration
    journal   one record per micro-batch or correction, numbered without gaps: the input of one `step` or `correct`
    states    the checkpoint to go on from (number -1), the start (0), and the snapshots that a user took (1, 2, ...)
    pieces    the bytes of large states
    answers   what was answered for the samples of a record, with the idempotency keys of its pushes; kept longer
    tokens    names, SHA-256 digests, and what each may do

A record and its answers are one transaction, so a crash leaves both or none: what the database drops as torn was never
answered. A large state is written in pieces, each in a transaction of its own so that other streams do not wait, before
the transaction that has its row. Every row ends in a CRC-32 of all that it holds and of its place, checked when it is
read; records, answers and counts must follow each other without a gap. `databases` has the two kinds of store.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from moontide.errors import FileError, MoontideError

SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (stream TEXT PRIMARY KEY, config BYTEA NOT NULL) {rows};
CREATE TABLE IF NOT EXISTS journal (stream TEXT, seq BIGINT, first BIGINT NOT NULL, size BIGINT NOT NULL,
    data BYTEA NOT NULL, PRIMARY KEY (stream, seq)) {rows};
CREATE TABLE IF NOT EXISTS states (stream TEXT, number BIGINT, seq BIGINT NOT NULL, total BIGINT NOT NULL,
    seen BIGINT NOT NULL, kept BIGINT NOT NULL, created DOUBLE PRECISION NOT NULL, state BYTEA NOT NULL,
    tally BYTEA NOT NULL, PRIMARY KEY (stream, number));
CREATE TABLE IF NOT EXISTS pieces (stream TEXT, created DOUBLE PRECISION, part BIGINT, data BYTEA NOT NULL,
    PRIMARY KEY (stream, created, part)) {rows};
CREATE TABLE IF NOT EXISTS answers (stream TEXT, first BIGINT, size BIGINT NOT NULL, data BYTEA NOT NULL,
    PRIMARY KEY (stream, first)) {rows};
CREATE TABLE IF NOT EXISTS tokens (name TEXT PRIMARY KEY, token BYTEA NOT NULL)
"""
PIECE_BYTES = 2**22  # a state that is larger is in pieces, and its row has only the checksum
TASTE_BYTES = 2**14  # of a piece, which tell whether it is compressed
CHECKPOINT = -1  # the number of the state to go on from
EVERY = ""  # in place of the name of a stream: all of them
KEEP = 100_000  # samples of a stream whose answers are kept; with a higher number older data would seem to lack some
NO_TOKEN = b'{"digest": ""}'  # what is kept of a damaged one
FULL = re.compile("disk is full|no space left|quota exceeded", re.IGNORECASE)
HELP = "see 'Backups and damage' in docs/serve.md"


class StoreError(MoontideError):
    """The store failed."""


class DamagedError(StoreError):
    """The store holds something that does not match its checksum, or lacks a record."""


class Record(NamedTuple):
    """One entry of the journal."""

    seq: int
    first: int  # number of its first sample
    size: int  # samples; 0: a correction of earlier ones
    data: bytes


class Answered(NamedTuple):
    """The answers of one record."""

    first: int
    size: int
    data: bytes


class Saved(NamedTuple):
    """A state with what belongs to it."""

    seq: int  # the last record in it
    total: int  # samples of the stream so far
    seen: int  # samples in the state, fewer after a reset
    kept: int  # samples of the journal that its window reaches
    state: bytes
    tally: bytes


class Snapshot(NamedTuple):
    """What is listed of a state."""

    number: int
    seen: int
    created: float


class Drop(NamedTuple):
    """Records of a stream whose samples all come before a number."""

    stream: str
    before: int

    def has(self, stream: str, record: Record) -> bool:
        """Tell whether a record of a stream is included."""
        return stream == self.stream and record.first + record.size <= self.before


def seal(value: bytes, *key: object) -> bytes:
    """Append the checksum of a value and of the key it is stored under.

    >>> unseal(seal(b"abc", "record", 1), "record", 1)
    b'abc'
    >>> unseal(seal(b"abc", "record", 1), "record", 2)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    moontide.serve.stream_store.DamagedError: The stored record 2 does not match its checksum; restore a backup, ...
    """
    return value + checksum(value, *key)


def checksum(value: bytes, *key: object) -> bytes:
    """Return the checksum of a value and of the key it is stored under.

    >>> checksum(b"abc", "record", 1) == checksum(b"abc", "record", 2)
    False
    """
    return zlib.crc32(value, zlib.crc32(repr(key).encode())).to_bytes(4, "little")


def unseal(sealed: object, *key: object) -> bytes:
    """Check and remove the checksum.

    >>> unseal(seal(b"abc", 1), 1)
    b'abc'
    """
    sealed = sealed.encode() if isinstance(sealed, str) else sealed  # SQLite keeps whatever it is given
    sealed = sealed if isinstance(sealed, bytes) else b""
    value = sealed[:-4]
    if checksum(value, *key) != sealed[-4:]:
        words = " ".join(map(str, key[:3]))
        raise DamagedError(f"The stored {words} does not match its checksum; restore a backup, {HELP}.")
    return value


def packed(piece: bytes) -> bytes:
    """Compress a piece where that is worth its time: arrays that are hardly filled yet, and not those of embeddings.

    >>> len(packed(bytes(2**20))) < 2**13
    True
    """
    taste = piece[:TASTE_BYTES]
    return zlib.compress(piece, 1) if len(zlib.compress(taste, 1)) < len(taste) // 4 else piece


def unpacked(data: bytes) -> bytes:
    """Return a piece as it was; the checksum of the whole state tells whether it is that.

    >>> unpacked(packed(bytes(99))) == bytes(99), unpacked(b"embeddings")
    (True, b'embeddings')
    """
    try:
        return zlib.decompressobj().decompress(data, PIECE_BYTES)
    except zlib.error:  # it was not compressed
        return data


class StreamStore:
    """The tables, independent of the database. Calls may come from any thread; they are serialised."""

    failures: tuple[type[Exception], ...] = (Exception,)  # what the driver or the system raises
    rows = ""  # how a table keeps its rows

    def __init__(self, data: str, fsync: str, lock: bool) -> None:
        """Connect, make the tables where there are none, and with `lock` see that no other server uses them."""
        self.data, self.fsync, self.lock = data, fsync, lock
        self._mutex = threading.RLock()
        self._connection: Any = None
        try:
            self._connect()
        except MoontideError:
            self.close()
            raise
        except self.failures as error:
            self.close()
            raise self._problem(error, "opened", FileError) from error
        if lock:
            with suppress(StoreError):  # they only take room
                self._sweep()

    @property
    def location(self) -> str:
        """The location of the data, without a password."""
        return self.data

    def _connect(self) -> None:
        self._run("BEGIN")
        try:
            for statement in SCHEMA.format(rows=self.rows).split(";"):
                self._run(statement)
            self._run("COMMIT")
        except BaseException:
            with suppress(*self.failures):
                self._run("ROLLBACK")
            raise

    def _run(self, sql: str, values: Sequence[Any] = ()) -> Any:
        return self._connection.execute(sql, values)

    def _begin(self, write: bool, pushes: str | None, drop: Drop | None) -> bool:
        """Begin a transaction; returns whether it writes."""
        self._run("BEGIN")
        return write

    def _committed(self) -> None:
        """Note that a writing transaction is committed."""

    def _forget_if_lost(self) -> None:
        """Drop a connection that cannot be used any more, so that the next transaction makes a new one."""

    def try_write(self) -> None:
        """Write what waits to be written, if anything, to see whether pushes could be."""
        with self._transaction(pushes=EVERY):
            pass

    def sync(self) -> None:
        """Sync committed data to disk, if the policy uses a timer."""

    def close(self) -> None:
        """Close the connection and release the data."""
        with self._mutex:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _transaction(self, write: bool = True, pushes: str | None = None, drop: Drop | None = None) -> Iterator[None]:
        """Run a block as one transaction.

        `pushes`: the stream whose pushes it needs in the tables, or `EVERY`, except for those that it will drop.
        """
        with self._mutex, self._failing():
            if self._connection is None:
                self._connect()
            try:
                write = self._begin(write, pushes, drop)
                yield
                self._run("COMMIT")
            except BaseException:
                with suppress(*self.failures):
                    self._run("ROLLBACK")
                raise
            if write:
                self._committed()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Convert exceptions of the driver to a sentence."""
        try:
            yield
        except self.failures as error:
            self._forget_if_lost()
            raise self._problem(error, "used", StoreError) from error

    def _problem(self, error: Exception, verb: str, kind: type[MoontideError]) -> MoontideError:
        """Describe an exception of the driver in a sentence, as damage or as a temporary failure."""
        sentence = f"The data in {self.location} cannot be {verb}: {one_line(error)}"
        if self._is_damage(error):
            return DamagedError(f"{sentence}; restore a backup, {HELP}.")
        remedy = "; make room there, and the server goes on by itself" if FULL.search(sentence) else ""
        return kind(f"{sentence}{remedy}.")

    def _is_damage(self, error: Exception) -> bool:
        """Tell whether an exception of the driver means that the data are damaged."""
        return False

    def _select(self, sql: str, *values: Any) -> list[Any]:
        with self._transaction(write=False):
            return list(self._run(sql, values).fetchall())

    # Streams

    def create(self, stream: str, config: str, state: bytes, tally: bytes) -> None:
        """Add a stream with its state before the first sample."""
        with self._pieces_of(stream, state) as created, self._transaction():
            self._run("INSERT INTO streams VALUES (?, ?)", (stream, seal(config.encode(), stream, "configuration")))
            for number in (0, CHECKPOINT):
                self._put_state(stream, number, Saved(0, 0, 0, 0, state, tally), created)

    def streams(self) -> dict[str, str | DamagedError]:
        """Return the configuration of every stream by name, or what is wrong with it."""
        found: dict[str, str | DamagedError] = {}
        names = "(SELECT stream FROM streams UNION SELECT stream FROM states) AS names"
        sql = f"SELECT names.stream, config FROM {names} LEFT JOIN streams ON streams.stream = names.stream ORDER BY 1"
        for stream, config in self._select(sql):
            try:
                found[str(stream)] = unseal(config, stream, "configuration").decode()
            except DamagedError as error:
                found[str(stream)] = error
        return found

    def delete(self, stream: str) -> None:
        """Delete a stream and its data."""
        with self._transaction(pushes=EVERY):  # nothing of it stays in a log, where a new stream has the same name
            for table in ("streams", "journal", "states", "answers"):
                self._run(f"DELETE FROM {table} WHERE stream = ?", (stream,))
        self._sweep(stream)

    # The journal

    def append(self, stream: str, record: Record, answered: Sequence[Answered]) -> None:
        """Add a record with its answers, or with those that it changes. When this returns, they are there for good."""
        with self._transaction(pushes=stream):
            insert(self._run, stream, record, answered)

    def checkpoint(self, stream: str, saved: Saved, *, x_from: int, answers_from: int) -> None:
        """Make a state the current checkpoint; drop records and answers whose samples all come before a number."""
        with (
            self._pieces_of(stream, saved.state) as created,
            self._transaction(pushes=stream, drop=Drop(stream, x_from)),
        ):
            self._put_state(stream, CHECKPOINT, saved, created)
            self._run("DELETE FROM journal WHERE stream = ? AND first + size <= ?", (stream, x_from))
            old = "DELETE FROM answers WHERE stream = ? AND first < ? AND first + size <= ?"
            self._run(old, (stream, answers_from, answers_from))

    def load(self, stream: str, keep: int = KEEP) -> tuple[Saved, list[Record], list[Record], list[Answered]]:
        """Return the checkpoint of a stream, the records in it that are still there, those after it, and the answers.

        What is missing between two of them, or at the end, is an error; so is an answer that is missing among those of
        the last `keep` samples before the checkpoint.
        """
        with self._transaction(write=False, pushes=stream):
            saved = self._state(stream, CHECKPOINT)
            rows = self._run(
                "SELECT seq, first, size, data FROM journal WHERE stream = ? ORDER BY seq", (stream,)
            ).fetchall()
            answered = self._answers(stream, 0, 2**62)
        if saved is None:
            raise DamagedError(f"The stream {stream} has no checkpoint; restore a backup, {HELP}.")
        records = [
            Record(seq, first, size, unseal(data, stream, "record", seq, first, size))
            for seq, first, size, data in rows
        ]
        inside = [record for record in records if record.seq <= saved.seq]
        after = records[len(inside) :]
        numbers = [record.seq for record in records]
        start = saved.seq + 1 - len(inside)
        ends = [saved.total, *(record.first + record.size for record in after)]
        whole = (
            numbers == list(range(start, start + len(records)))
            and sum(record.size for record in inside) == saved.kept
            and [record.first for record in after] == ends[:-1]
        )
        if not whole:
            raise DamagedError(f"The journal of {stream} lacks a record; restore a backup, {HELP}.")
        require_no_gap(stream, answered, (max(0, saved.total - keep), ends[-1]))
        return saved, inside, after, answered

    def answers(self, stream: str, first: int, stop: int) -> list[Answered]:
        """Return the answers of the records that hold samples from `first` to before `stop`, in order and gapless."""
        with self._transaction(write=False):
            answered = self._answers(stream, first, stop)
        require_no_gap(stream, answered)
        return answered

    def _answers(self, stream: str, first: int, stop: int) -> list[Answered]:
        sql = "SELECT first, size, data FROM answers WHERE stream = ? AND first < ? AND first + size > ? ORDER BY first"
        rows = self._run(sql, (stream, stop, first)).fetchall()
        return [Answered(at, size, unseal(data, stream, "answer", at, size)) for at, size, data in rows]

    # States

    @contextmanager
    def _pieces_of(self, stream: str, state: bytes) -> Iterator[float]:
        """Write a large state in pieces, for rows with the time that this yields; then drop pieces without a row."""
        created = time.time()
        try:
            for part, start in enumerate(range(0, len(state), PIECE_BYTES) if len(state) > PIECE_BYTES else ()):
                with self._transaction():
                    row = (stream, created, part, packed(state[start : start + PIECE_BYTES]))
                    self._run("INSERT INTO pieces VALUES (?, ?, ?, ?)", row)
            yield created
        finally:
            with suppress(StoreError):  # they only take room, until the next time
                self._sweep(stream)

    def _sweep(self, stream: str | None = None) -> None:
        """Drop the pieces of states that are no longer there, of one stream or, while nothing is written, of all."""
        there = "SELECT 1 FROM states WHERE states.stream = pieces.stream AND states.created = pieces.created"
        sql = f"SELECT stream, created, part FROM pieces WHERE NOT EXISTS ({there})"
        for key in self._select(sql) if stream is None else self._select(f"{sql} AND stream = ?", stream):
            with self._transaction():
                self._run("DELETE FROM pieces WHERE stream = ? AND created = ? AND part = ?", key)

    def _put_state(self, stream: str, number: int, saved: Saved, created: float) -> None:
        self._run("DELETE FROM states WHERE stream = ? AND number = ?", (stream, number))
        row = (number, *saved[:4], created)
        inline = b"" if len(saved.state) > PIECE_BYTES else saved.state
        sealed = inline + checksum(saved.state, stream, "state", *row), seal(saved.tally, stream, "tally", *row)
        self._run("INSERT INTO states VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (stream, *row, *sealed))

    def put_state(self, stream: str, number: int, saved: Saved) -> None:
        """Keep a state under a number."""
        with self._pieces_of(stream, saved.state) as created, self._transaction():
            self._put_state(stream, number, saved, created)

    def state(self, stream: str, number: int) -> Saved | None:
        """Return a state, or None where there is none of that number."""
        with self._transaction(write=False):
            return self._state(stream, number)

    def _state(self, stream: str, number: int) -> Saved | None:
        sql = "SELECT number, seq, total, seen, kept, created, state, tally FROM states WHERE stream = ? AND number = ?"
        for *row, state, tally in self._run(sql, (stream, number)).fetchall():
            if isinstance(state, bytes) and len(state) == len(checksum(b"")):
                parts = "SELECT data FROM pieces WHERE stream = ? AND created = ? ORDER BY part"
                pieces = [data for (data,) in self._run(parts, (stream, row[-1])).fetchall()]
                state = b"".join([*(unpacked(data) for data in pieces if isinstance(data, bytes)), state])
            values = unseal(state, stream, "state", *row), unseal(tally, stream, "tally", *row)
            seq, total, seen, kept = row[1:5]
            return Saved(seq, total, seen, kept, *values)
        return None

    def snapshots(self, stream: str) -> list[Snapshot]:
        """List the states of a stream but for the checkpoint."""
        sql = "SELECT number, seq, total, seen, kept, created, tally FROM states WHERE stream = ? AND number >= 0"
        found = []
        for *row, tally in self._select(f"{sql} ORDER BY number", stream):
            unseal(tally, stream, "tally", *row)
            number, _, _, seen, _, created = row
            found.append(Snapshot(number, seen, created))
        return found

    def delete_state(self, stream: str, number: int) -> None:
        """Drop a state."""
        with self._transaction():
            self._run("DELETE FROM states WHERE stream = ? AND number = ?", (stream, number))
        self._sweep(stream)

    # Tokens

    def tokens(self) -> dict[str, bytes]:
        """Return the stored form of all tokens by name; a damaged token opens nothing but still counts."""
        found = {}
        for name, token in self._select("SELECT name, token FROM tokens ORDER BY name"):
            try:
                found[name] = unseal(token, name, "token")
            except DamagedError:
                found[name] = NO_TOKEN
        return found

    def put_token(self, name: str, token: bytes | None) -> None:
        """Set what is kept of a token, or drop it (None)."""
        with self._transaction():
            self._run("DELETE FROM tokens WHERE name = ?", (name,))
            if token is not None:
                self._run("INSERT INTO tokens VALUES (?, ?)", (name, seal(token, name, "token")))


def require_no_gap(stream: str, answered: Sequence[Answered], ends: tuple[int, int] | None = None) -> None:
    """Refuse answers that do not follow each other, or not from the first of `ends` or before up to the second.

    >>> require_no_gap("a", [Answered(0, 2, b""), Answered(2, 1, b"")], (1, 3))
    """
    stops = [row.first + row.size for row in answered]
    whole = [row.first for row in answered[1:]] == stops[:-1]
    if ends is not None:
        whole = whole and (stops[-1] if stops else 0) == ends[1] and (not answered or answered[0].first <= ends[0])
    if not whole:
        raise DamagedError(f"The answers of {stream} lack a part; restore a backup, {HELP}.")


def insert(
    run: Callable[..., Any], stream: str, record: Record, answered: Sequence[Answered], keep: bool = True
) -> None:
    """Put a record with its answers into the tables, or without `keep` the answers alone."""
    seq, first, size, data = record
    if keep:
        sealed = seal(data, stream, "record", seq, first, size)
        run("INSERT INTO journal VALUES (?, ?, ?, ?, ?)", (stream, seq, first, size, sealed))
    for row in answered:
        if not size:
            run("DELETE FROM answers WHERE stream = ? AND first = ?", (stream, row.first))
        sealed = seal(row.data, stream, "answer", row.first, row.size)
        run("INSERT INTO answers VALUES (?, ?, ?, ?)", (stream, row.first, row.size, sealed))


def one_line(error: Exception) -> str:
    """Return the message of a driver in one line, without a full stop.

    >>> one_line(ValueError("no\\n  way."))
    'no way'
    """
    words = getattr(error, "strerror", None) or str(error)  # an OSError's text repeats the path
    return " ".join(words.split()).rstrip(".") or type(error).__name__
