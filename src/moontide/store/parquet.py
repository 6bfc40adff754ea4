"""Embeddings from Parquet and predictions to it; the only module that imports pyarrow (the extra `parquet`).

A few bytes of Parquet can stand for gigabytes, by repeated values or compression. The size of a column is therefore
computed from the row groups, and for text from the dictionary, before it is expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from moontide.errors import FileError, InputError, shorten
from moontide.store.disk import check_unpacked

OBJECT = 64  # bytes of a text or number in a list
ROWS = 1024  # that are read together where each may be large


def read_embeddings(path: str | Path, handle: BinaryIO | None = None) -> tuple[npt.NDArray[Any], list[Any] | None]:
    """Read the column of embeddings as a matrix, and the column `id` where there is one; `handle` is the open file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(pa.table({"id": ["a"], "embedding": [[1.0, 2.0]]}), Path(folder) / "f.parquet")
    ...     read_embeddings(Path(folder) / "f.parquet")
    (array([[1., 2.]]), ['a'])
    """
    schema = pq.ParquetFile(handle or path).schema_arrow
    name = _column(path, schema)
    column = _read(path, schema, name, handle)
    ids = _values(path, schema, "id", handle) if "id" in schema.names else None
    if column.null_count:
        raise InputError(f"The column '{name}' of {path} must not have missing values. Got {column.null_count}.")
    if _is_binary(column.type):
        dtype = _dtype(schema.field(name))
        lengths, values = pc.binary_length(column), np.frombuffer(b"".join(column.to_pylist()), dtype)
    else:
        lengths, values = pc.list_value_length(column), pc.list_flatten(column).to_numpy()
    if len(pc.unique(lengths)) > 1:
        raise InputError(f"The values in the column '{name}' of {path} must all have the same length.")
    matrix = values.reshape(len(column), -1) if len(column) else np.empty((0, 0))
    return matrix, ids


def _check_groups(path: str | Path, file: Any, schema: Any, name: str, least: int = 1) -> int:
    """Refuse a column that is far larger than the file, or than the memory there is; return the bytes of the file.

    least: bytes that a value takes, or more.
    """
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    size = sum(group.column(i).total_compressed_size for group in groups for i in range(group.num_columns))
    leaves = [group.column(i) for group in groups for i in range(group.num_columns)
              if group.column(i).path_in_schema.partition(".")[0] == name]  # fmt: skip
    kind = schema.field(name).type
    leaf = getattr(kind, "value_type", kind)
    width = leaf.bit_width // 8 if pa.types.is_primitive(leaf) or pa.types.is_fixed_size_binary(leaf) else 1
    unpacked = sum(max(leaf.total_uncompressed_size, leaf.num_values * max(width, least)) for leaf in leaves)
    check_unpacked(_named(path, name), unpacked, size)
    return int(size)


def _named(path: str | Path, name: str) -> str:
    return f"The column {shorten(name, 40)!r} of {path}"


def _values(path: str | Path, schema: Any, name: str, handle: BinaryIO | None = None) -> list[Any]:
    """Read a column of texts or numbers as a list."""
    kind = schema.field(name).type
    if pa.types.is_nested(kind):
        raise FileError(f"{_named(path, name)} must have one text or number per row. Got {shorten(str(kind), 60)}.")
    found: list[Any] = _read(path, schema, name, handle, OBJECT).to_pylist()
    return found


def _read(path: str | Path, schema: Any, name: str, handle: BinaryIO | None = None, least: int = 1) -> Any:
    """Read a column, unless it is too large; text is read as a dictionary first, each value once."""
    words = [name] if _is_text(schema.field(name).type) else []
    file = pq.ParquetFile(handle or path, read_dictionary=words)
    size = _check_groups(path, file, schema, name, least)
    column = file.read([name]).column(0)
    if not pa.types.is_dictionary(column.type):
        return column
    parts = [(pc.binary_length(chunk.dictionary), chunk.indices) for chunk in column.chunks]
    need = sum(pc.sum(lengths.take(indices)).as_py() or 0 for lengths, indices in parts)
    check_unpacked(_named(path, name), need, size)
    return column.cast(column.type.value_type)


def shape(path: str | Path, handle: BinaryIO) -> tuple[int, int]:
    """Return the shape of the matrix in an open file, from its footer and first row.

    >>> import io
    >>> pq.write_table(pa.table({"embedding": [[1.0, 2.0]]}), buffer := io.BytesIO())
    >>> shape("f.parquet", buffer)
    (1, 2)
    """
    file = pq.ParquetFile(handle)
    schema = file.schema_arrow
    name, rows = _column(path, schema), file.metadata.num_rows
    _check_groups(path, file, schema, name)
    first = next(file.iter_batches(1, columns=[name])).column(0)[0].as_py() if rows else None
    if first is None:
        raise InputError(f"The column '{name}' of {path} must have rows, and a value in each.")
    field = schema.field(name)
    return rows, len(first) // (_dtype(field).itemsize if _is_binary(field.type) else 1)


def read_ids(handle: BinaryIO) -> list[Any] | None:
    """Read the column `id` of an open file, or None where there is none.

    >>> import io
    >>> pq.write_table(pa.table({"id": ["a"]}), buffer := io.BytesIO())
    >>> read_ids(buffer)
    ['a']
    """
    schema = pq.ParquetFile(handle).schema_arrow
    return _values("the shard", schema, "id", handle) if "id" in schema.names else None


def read_column(path: str | Path, name: str) -> list[Any]:
    """Read one column, None where a value is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(pa.table({"camera": ["a", "b"]}), Path(folder) / "f.parquet")
    ...     read_column(Path(folder) / "f.parquet", "camera")
    ['a', 'b']
    """
    schema = pq.read_schema(path)
    if name not in schema.names:
        raise FileError(f"{path} must have a column '{name}'. It has {', '.join(map(repr, schema.names))}; rename one.")
    return _values(path, schema, name)


def _column(path: str | Path, schema: Any) -> str:
    """Return the name of the column of embeddings."""
    usable: list[str] = [f.name for f in schema if f.name != "id" and (_is_binary(f.type) or _is_numbers(f.type))]
    if "embedding" not in usable and len(usable) != 1:
        raise FileError(
            f"{path} must have a column 'embedding' of number lists or fixed-length binary values, or only one "
            f"such column. It has the columns {', '.join(schema.names)}."
        )
    return "embedding" if "embedding" in usable else usable[0]


def _dtype(field: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype((field.metadata or {}).get(b"dtype", b"float32").decode())
    return dtype.newbyteorder("<")


def _is_binary(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _is_text(kind: Any) -> bool:
    words = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(is_of(kind) for is_of in words)


def _is_numbers(kind: Any) -> bool:
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(listed and (pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)))


def read_columns(path: str | Path) -> dict[str, list[Any]]:
    """Read all columns as lists.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pq.write_table(pa.table({"id": ["a"], "n": [1]}), Path(folder) / "f.parquet")
    ...     read_columns(Path(folder) / "f.parquet")
    {'id': ['a'], 'n': [1]}
    """
    size, need = Path(path).stat().st_size, 0
    with pq.ParquetFile(path) as file:
        found: dict[str, list[Any]] = {name: [] for name in file.schema_arrow.names}
        for name in found:
            _check_groups(path, file, file.schema_arrow, name, OBJECT)
        for batch in file.iter_batches(ROWS):
            need += batch.nbytes + OBJECT * batch.num_rows * batch.num_columns
            check_unpacked(str(path), need, size)
            for name, values in batch.to_pydict().items():
                found[name] += values
    return found


def write_columns(handle: BinaryIO, columns: Mapping[str, Any], vector: npt.NDArray[Any] | None = None) -> None:
    """Write named columns; those called `...class_name` are text, also where all of them are missing.

    vector: (N, d), one more column `vector` of lists of one length.

    >>> import io
    >>> write_columns(buffer := io.BytesIO(), {"label": [0, 1], "class_name": [None, None]}, vector=np.eye(2))
    >>> pq.read_table(buffer).schema.types
    [DataType(int64), DataType(string), FixedSizeListType(fixed_size_list<element: float>[2])]
    """
    arrays = {k: pa.array(v, pa.string()) if k.endswith("class_name") else pa.array(v) for k, v in columns.items()}
    if vector is not None:
        flat = pa.array(np.ascontiguousarray(vector, dtype=np.float32).reshape(-1))
        arrays["vector"] = pa.FixedSizeListArray.from_arrays(flat, vector.shape[1])
    pq.write_table(pa.table(arrays), handle)
