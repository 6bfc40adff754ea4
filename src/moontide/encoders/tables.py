"""Images in a column of a table: .parquet files, and the .arrow files and folders that Hugging Face `datasets` writes.

The column is `image`, or the only one that holds images: binary values, or structs {bytes, path}, as `datasets` has.
Rows are read in their order, a few at a time, and nothing of a struct but its bytes is ever used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from moontide.encoders.places import ImageFile, RowImage, Skip, check_size, path_id
from moontide.errors import FileError, ImageError, missing_extra
from moontide.memory import human
from moontide.store.disk import MOST_TIMES, check_unpacked

KINDS = (".parquet", ".arrow")
ROWS, BATCH_BYTES = 64, 2**28  # that are read together, at most
ROW_BYTES = 500  # of an image that is listed


def is_dataset(folder: Path) -> bool:
    """Return whether a folder is a dataset saved by `datasets`: .arrow files with a state.json beside them.

    >>> is_dataset(Path("photos"))
    False
    """
    return (folder / "state.json").is_file() and any(folder.glob("*.arrow"))


def rows_of(path: Path, column: str | None = None) -> Iterator[ImageFile | Skip] | None:
    """List the images in a table, or return None if it has no column of images."""
    name = _column(path, column)
    if name is None:
        return None
    check_unpacked(f"The list of images in {path}", ROW_BYTES * _table(path).rows, path.stat().st_size)
    return (RowImage(f"{path_id(path)}/{row}", path, row, column=name) for row in range(_table(path).rows))


def saved_dataset(folder: Path) -> Iterator[ImageFile | Skip]:
    """List the images of a folder that `datasets` saved."""
    for path in sorted(folder.glob("*.arrow")):
        found = rows_of(path)
        if found is None:
            raise FileError(f"{path} has no column of images: binary values, or structs with 'bytes'.")
        yield from found


def read_row(path: Path, column: str, row: int) -> bytes:
    """Return the bytes of the image in a row."""
    value = _table(path).value(column, row)
    data = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(data, bytes):
        raise ImageError("its row contains no image")
    check_size(len(data))
    return data


class _Table:
    """A file of which some rows are in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start, self.column = 0, ""
        self.held: list[Any] = []
        with _arrow_of(path) as arrow:
            if path.suffix.lower() == ".parquet":
                from pyarrow import parquet

                self.file = parquet.ParquetFile(path, memory_map=True)
                self.schema, self.rows = self.file.schema_arrow, self.file.metadata.num_rows
                groups = [self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]
                self.starts = [sum(groups[:i]) for i in range(len(groups))]
            else:
                self.whole = _whole(arrow, path)
                self.schema, self.rows = self.whole.schema, self.whole.num_rows

    def value(self, column: str, row: int) -> Any:
        if self.path.suffix.lower() != ".parquet":
            return self.whole.column(column)[row].as_py()
        inside = self.start <= row < self.start + len(self.held) and column == self.column
        if not inside:
            self._read(column, row)
        return self.held[row - self.start]

    def _read(self, column: str, row: int) -> None:
        """Read on from where the last rows ended, or begin at the group of rows that the row is in."""
        if column != self.column or row != self.start + len(self.held) or not self.held:
            group = max(i for i, start in enumerate(self.starts) if start <= row)
            self.start, self.held, self.column = self.starts[group], [], column
            self.batches = self._batches(column, group)
        while row >= self.start + len(self.held):
            self.start += len(self.held)
            with _arrow_of(self.path):
                self.held = next(self.batches).column(0).to_pylist()

    def _batches(self, column: str, first: int) -> Iterator[Any]:
        """Read group after group; a few bytes of a file can stand for gigabytes, each row for as much as its group."""
        for number in range(first, len(self.starts)):
            group = self.file.metadata.row_group(number)
            leaves = [group.column(i) for i in range(group.num_columns)]
            mine = [leaf for leaf in leaves if leaf.path_in_schema.partition(".")[0] == column]
            packed, size = (
                sum(getattr(leaf, f"total_{kind}_size") for leaf in mine) for kind in ("compressed", "uncompressed")
            )
            if size > max(BATCH_BYTES, MOST_TIMES * packed):
                raise ImageError(f"its group of rows would take {human(size)} from {human(packed)} of the file")
            rows = max(1, min(ROWS, BATCH_BYTES // max(1, size)))
            yield from self.file.iter_batches(rows, row_groups=[number], columns=[column])


def _whole(arrow: Any, path: Path) -> Any:
    """Map a file of the .arrow kind; what is compressed in it is in memory then, as long as it is not too much."""
    source, size, unpacked = arrow.memory_map(str(path)), path.stat().st_size, 0
    try:
        held = arrow.ipc.open_stream(source)
        batches = iter(held)
    except arrow.ArrowInvalid:
        held = arrow.ipc.open_file(source)
        batches = (held.get_batch(i) for i in range(held.num_record_batches))
    kept = []
    for batch in batches:
        unpacked += batch.nbytes
        if unpacked > 2 * size:  # then it is compressed
            check_unpacked(str(path), unpacked, size)
        kept.append(batch)
    return arrow.Table.from_batches(kept, held.schema)


class _arrow_of:
    """Import pyarrow to read a file, and turn its errors into a sentence about the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Any:
        try:
            import pyarrow
            import pyarrow.ipc
        except ImportError:
            raise missing_extra("pyarrow", "parquet", f"Reading {self.path.suffix} files") from None
        self.errors = (pyarrow.ArrowException, OSError)
        return pyarrow

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error, self.errors) and not isinstance(error, FileError):
            why = str(error).partition("\n")[0]
            raise FileError(f"{self.path} cannot be read as {self.path.suffix} ({why.rstrip('.')}).") from error


@lru_cache(maxsize=8)
def _opened(path: Path, changed: int) -> _Table:
    return _Table(path)


def _table(path: Path) -> _Table:
    try:
        return _opened(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise FileError(f"There is no file {path}.") from None


def _column(path: Path, wanted: str | None) -> str | None:
    """Return the column of images: the requested one, `image`, or the only such column."""
    schema = _table(path).schema
    found = [field.name for field in schema if _holds_images(field.type)]
    if wanted is not None:
        return wanted if wanted in found else None
    return "image" if "image" in found else found[0] if len(found) == 1 else None


def _holds_images(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        return "bytes" in names and _binary(kind.field("bytes").type)
    return _binary(kind)


def _binary(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_binary(kind) or types.is_large_binary(kind))
