"""A log in front of the SQLite database: each micro-batch is appended with one write and one sync.

SQLite writes every page that a row touches (several for a push of one sample), and writes it twice: into its own log
and then into its file. So pushes go to this file first, and into the tables with the next transaction, except for
embeddings that this transaction would drop. Entries are numbered without a gap; the database has the number of the last
one that is in its tables, so entries up to that number are old, and what follows is to be read:

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

from moontide.serve.stream_store import Answered, Record

FORM = struct.Struct("<qIII")  # the number, bytes of the JSON and of what follows it, and the checksum
WRAP = 2**31  # entries are numbered modulo this
flush = getattr(os, "fdatasync", os.fsync)


class Entry(NamedTuple):
    """A micro-batch of a stream."""

    number: int
    stream: str
    record: Record
    answered: Sequence[Answered]


class PushLog:
    """The log file, opened by the one process that writes it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = PushLog(Path(folder, "log"))
    ...     log.append(Entry(8, "a", Record(1, 0, 2, b"samples"), [Answered(0, 2, b"answers")]), sync=True)
    ...     log.close()
    ...     found = [list(entries(Path(folder, "log"), after)) for after in (7, 8)]
    >>> found[0][0].record.data, found[1]
    (b'samples', [])
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

    def append(self, entry: Entry, sync: bool) -> None:
        """Add an entry; if this fails, the next entry overwrites it."""
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
        self.size += FORM.size + sum(lengths)

    def sync(self) -> None:
        """Bring all entries to the disk."""
        if self.unsynced:
            flush(self.file)
            self.unsynced = False

    def reset(self) -> None:
        """Start from the beginning: the entries are in the tables."""
        self.size = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self.file)


def entries(path: Path, after: int | None = None, stop: int | None = None) -> Iterator[Entry]:
    """Read the entries after a number (or all) up to an offset; a server may be writing to the file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        stop = os.fstat(file.fileno()).st_size if stop is None else stop
        while file.tell() < stop and len(head := file.read(FORM.size)) == FORM.size:
            number, *lengths, checksum = FORM.unpack(head)
            after = number if after is None else (after + 1) % WRAP
            if number != after or file.tell() + sum(lengths) > stop:
                return
            data = [file.read(size) for size in lengths]
            if _checksum(number, (lengths[0], lengths[1]), data) != checksum:
                return
            yield _read(number, *data)


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
