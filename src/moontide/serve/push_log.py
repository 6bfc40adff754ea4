"""A log in front of the SQLite database: each micro-batch is appended with one write and one sync.

SQLite writes every page that a row touches (several for a push of one sample), and writes it twice: into its own log
and then into its file. So pushes go to this file first, and into the tables with the next transaction, except for
embeddings that this transaction would drop. A transaction moves only the pushes of the stream that it is about; those
of others stay, and the file starts again once all are in the tables. Entries are numbered without a gap; the database
has the number of the last one before the file was started, so entries up to that number are old, and what follows is to
be read, except for records that are in the tables:

    number, lengths, CRC-32 | stream, positions and sizes as JSON | embeddings | answers

An entry that does not match its checksum or its number ends the file. After a crash that is one which was not answered;
where the number of entries says otherwise, the file is damaged.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from moontide.serve.stream_store import HELP, Answered, DamagedError, Record

FORM = struct.Struct("<qIII")  # the number, bytes of the JSON and of what follows it, and the checksum
WRAP = 2**31  # entries are numbered modulo this
flush = getattr(os, "fdatasync", os.fsync)


class Entry(NamedTuple):
    """A micro-batch of a stream."""

    number: int
    stream: str
    record: Record
    answered: Sequence[Answered]


class Found(NamedTuple):
    """An entry in the file, with the offsets where it begins and ends."""

    start: int
    stop: int
    entry: Entry


class PushLog:
    """The log file, opened by the one process that writes it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = PushLog(Path(folder, "log"))
    ...     start = log.append(Entry(8, "a", Record(1, 0, 2, b"samples"), [Answered(0, 2, b"answers")]), sync=True)
    ...     log.close()
    ...     found = [list(entries(Path(folder, "log"), after)) for after in (7, 8)]
    >>> start, found[0][0].entry.record.data, found[1]
    (0, b'samples', [])
    """

    def __init__(self, path: Path) -> None:
        """Open or make the file."""
        self.path, self.size, self.unsynced = path, 0, False
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that a power cut leaves the file there
        finally:
            os.close(folder)

    def append(self, entry: Entry, sync: bool) -> int:
        """Add an entry and return its offset; if this fails, the next entry overwrites it."""
        number, stream, record, answered = entry
        sizes = [(row.first, row.size, len(row.data)) for row in answered]
        head = json.dumps([stream, record.seq, record.first, record.size, len(record.data), sizes]).encode()
        data = [head, record.data, *(row.data for row in answered)]
        lengths = len(head), sum(map(len, data[1:]))
        parts = [FORM.pack(number, *lengths, _checksum(number, lengths, data)), *data]
        try:
            if os.pwritev(self.file, parts, self.size) != FORM.size + sum(lengths):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.unsynced = True
            if sync:
                self.sync()
        except OSError:
            with suppress(OSError):
                os.pwrite(self.file, bytes(FORM.size), self.size)  # it must not be found after a crash
            raise
        start, self.size = self.size, self.size + FORM.size + sum(lengths)
        return start

    def sync(self) -> None:
        """Bring all entries to the disk."""
        if self.unsynced:
            flush(self.file)
            self.unsynced = False

    def read(self, start: int) -> Entry:
        """Return the entry at an offset."""
        number, *lengths, checksum = FORM.unpack(os.pread(self.file, FORM.size, start))
        everything = os.pread(self.file, sum(lengths), start + FORM.size)
        data = [everything[: lengths[0]], everything[lengths[0] :]]
        if len(everything) != sum(lengths) or _checksum(number, (lengths[0], lengths[1]), data) != checksum:
            raise DamagedError(f"The log {self.path} does not match its checksum; restore a backup, {HELP}.")
        return _read(number, *data)

    def reset(self) -> None:
        """Start from the beginning: the entries are in the tables."""
        self.size = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)


def entries(path: Path, after: int | None = None) -> Iterator[Found]:
    """Read the entries after a number, or all; a server may be writing to the file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        stop = os.fstat(file.fileno()).st_size
        while (start := file.tell()) < stop and len(head := file.read(FORM.size)) == FORM.size:
            number, *lengths, checksum = FORM.unpack(head)
            after = number if after is None else (after + 1) % WRAP
            if number != after or file.tell() + sum(lengths) > stop:
                return
            data = [file.read(size) for size in lengths]
            if _checksum(number, (lengths[0], lengths[1]), data) != checksum:
                return
            yield Found(start, file.tell(), _read(number, *data))


def _read(number: int, head: bytes, data: bytes) -> Entry:
    stream, seq, first, size, stop, sizes = json.loads(head)
    record, answered = Record(seq, first, size, data[:stop]), []
    for at, n, length in sizes:
        answered.append(Answered(at, n, data[stop : stop + length]))
        stop += length
    return Entry(number, stream, record, answered)


def _checksum(number: int, lengths: tuple[int, int], data: Sequence[bytes]) -> int:
    value = zlib.crc32(FORM.pack(number, *lengths, 0))
    for part in data:
        value = zlib.crc32(part, value)
    return value
