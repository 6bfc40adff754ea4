"""Shards and checkpoints on disk or in object storage: everything goes through fsspec, so s3://... works like a path.

`store.remote` says which protocols may be used, and tries again what fails on its way.

A shard is a .parquet, .npy or .safetensors file as `store.files` describes them. Checkpoints are .safetensors files,
written and read here tensor by tensor, so that no second copy of an array is ever in memory. A local file is whole
before it has its name; object stores promise the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.errors import FileError, InputError, MoontideError, missing_extra
from moontide.store.files import replacing
from moontide.store.remote import filesystem, on_its_way, open_file, retried, unreachable

try:
    import fsspec

    from moontide.store import parquet
except ImportError:  # the extra is named when something is read
    fsspec = None

KINDS = (".parquet", ".npy", ".safetensors")
NO_SHARDS = ("text.safetensors", "negatives.safetensors")  # of a store: embeddings of names
DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U16": "<u2", "U8": "|u1"}

MOST_HEADER = 100_000_000  # bytes, as the library of the format allows

AnyArray = NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A shard file and what its header says."""

    path: str
    rows: int
    d: int
    size: int  # bytes of the file


def require_fsspec() -> None:
    """Refuse to go on where fsspec or pyarrow is missing.

    >>> require_fsspec()
    """
    if fsspec is None:
        raise missing_extra("fsspec' and 'pyarrow", "shards", "Working on shards")


@retried
def expand(pattern: str) -> list[str]:
    """Return the shards that a glob, a folder, a file or a URL of these names, sorted.

    >>> expand("memory://nothing/*.npy")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: memory://nothing/*.npy names no .parquet, .npy, .safetensors file.
    """
    require_fsspec()
    fs, path = filesystem(pattern)
    path = path.rstrip("/")
    found = fs.glob(f"{path}/*" if fs.isdir(path) else path)
    found = [p for p in found if suffix(p) in KINDS and PurePosixPath(p).name not in NO_SHARDS]
    shards = sorted(fs.unstrip_protocol(p) if "://" in pattern else p for p in found)
    if not shards:
        raise FileError(f"{pattern} names no {', '.join(KINDS)} file.")
    return shards


def suffix(path: str) -> str:
    """Return the extension of a path or URL.

    >>> suffix("s3://bucket/a.npy")
    '.npy'
    """
    return PurePosixPath(path).suffix


def relative_names(paths: Sequence[str]) -> list[str]:
    """Return names for the outputs of shards: their paths from the folder they share, without the extension.

    >>> relative_names(["x/a/0.npy", "x/b/0.npy"])
    ['a/0', 'b/0']
    """
    parts = [PurePosixPath(path).with_suffix("").parts for path in paths]
    shared = 0
    while len({p[: shared + 1] for p in parts}) == 1 and all(len(p) > shared + 1 for p in parts):
        shared += 1
    names = ["/".join(p[shared:]) for p in parts]
    if len(set(names)) < len(names):
        [(double, _)] = Counter(names).most_common(1)
        raise FileError(f"Two shards are called {double} but for their extension; rename one.")
    return names


@contextmanager
def reading(path: str) -> Iterator[Any]:
    """Open a file, and say in a sentence what is wrong with it where reading fails."""
    try:
        with open_file(path) as handle:
            yield handle
    except MoontideError:
        raise
    except Exception as error:  # the parsers raise whatever they stumble over in a broken file
        if on_its_way(path, error):
            raise unreachable(path, error.__cause__ or error) from error
        if isinstance(error, FileNotFoundError):
            raise FileError(f"There is no file {path}.") from None
        why = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise FileError(f"{path} cannot be read; it is damaged, cut short or of another kind ({why}).") from error


@retried
def look(path: str) -> Source:
    """Read the header of a shard.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.ones((3, 2), np.float16))
    ...     source = look(f"{folder}/a.npy")
    >>> source.rows, source.d
    (3, 2)
    """
    with reading(path) as handle:
        size = handle.seek(0, 2)
        handle.seek(0)
        if suffix(path) == ".parquet":
            shape: tuple[int, ...] = parquet.shape(path, handle)
        elif suffix(path) == ".npy":
            version = np.lib.format.read_magic(handle)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(handle)
            _check_length(path, handle.tell() + int(np.prod(shape)) * dtype.itemsize, size)
        else:
            header, start = _header(handle)
            shape = tuple(header[_only(path, header)]["shape"])
            _check_length(path, start + max(entry["data_offsets"][1] for entry in header.values()), size)
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{path} must hold a non-empty matrix, one row a sample. Got shape {shape} instead.")
    return Source(path, *shape, size)


def _check_length(path: str, expected: int, size: int) -> None:
    if size < expected:
        raise FileError(f"{path} is cut short: it has {size} bytes, and its header promises {expected}.")


def _only(path: str, names: Mapping[str, Any]) -> str:
    if "image_features" in names or len(names) == 1:
        return "image_features" if "image_features" in names else next(iter(names))
    raise FileError(f"{path} has no tensor 'image_features': it holds {', '.join(sorted(names)) or 'nothing'}.")


@retried
def read_shard(path: str) -> AnyArray:
    """Read the matrix of a shard.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.eye(2))
    ...     read_shard(f"{folder}/a.npy").shape
    (2, 2)
    """
    with reading(path) as handle:
        if suffix(path) == ".parquet":
            return parquet.read_embeddings(path, handle)[0]
        if suffix(path) == ".npy":
            matrix: AnyArray = np.load(handle, allow_pickle=False)
            return matrix
        header, start = _header(handle)
        return _tensor(handle, header[_only(path, header)], start)


@retried
def read_ids(path: str) -> list[Any] | None:
    """Read the ids of a shard: a column `id`, or what a feature store keeps in the metadata.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.eye(2))
    ...     read_ids(f"{folder}/a.npy")
    """
    with reading(path) as handle:
        if suffix(path) == ".parquet":
            return parquet.read_ids(handle)
        if suffix(path) == ".safetensors":
            text = _metadata(handle).get("ids")
            return None if text is None else list(json.loads(text))
    return None


def usable_rows(matrix: AnyArray) -> NDArray[np.bool_]:
    """Tell which rows have a direction: those that are finite and not all zero, (n,).

    >>> usable_rows(np.asarray([[3.0, 4.0], [np.nan, 0.0], [0.0, 0.0]]))
    array([ True, False, False])
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wide = matrix.astype(np.float32, copy=False)
        squares = np.vecdot(wide, wide)  # (n,)
    good: NDArray[np.bool_] = np.isfinite(squares) & (squares > 0)
    doubtful = np.flatnonzero(~good)  # too large or too small to square, or no use
    rows = wide[doubtful]
    good[doubtful] = np.isfinite(rows).all(axis=1) & (rows != 0).any(axis=1)
    return good


@retried
def write_tensors(path: str, tensors: Mapping[str, AnyArray]) -> None:
    """Write arrays as a .safetensors file.

    >>> write_tensors("memory://doctest/a.safetensors", {"x": np.arange(3)})
    >>> read_tensors("memory://doctest/a.safetensors")
    {'x': array([0, 1, 2])}
    """
    arrays = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    kinds = {np.dtype(code): kind for kind, code in DTYPES.items()}
    header, end = {}, 0
    for name, x in arrays.items():
        header[name] = {"dtype": kinds[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with writing(path) as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        for x in arrays.values():
            handle.write(x.reshape(-1).view(np.uint8).data)


@retried
def read_tensors(path: str, *names: str) -> dict[str, AnyArray]:
    """Read a .safetensors file, or only some tensors of it; those it does not have are left out."""
    with reading(path) as handle:
        header, start = _header(handle)
        return {name: _tensor(handle, header[name], start) for name in names or header if name in header}


def _metadata(handle: Any) -> dict[str, str]:
    found: dict[str, str] = _json(handle)[0].get("__metadata__", {})
    return found


def _header(handle: Any) -> tuple[dict[str, Any], int]:
    header, start = _json(handle)
    header.pop("__metadata__", None)
    return header, start


def _json(handle: Any) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(handle.read(8), "little")
    if size > MOST_HEADER:
        raise ValueError("its header is too long")
    return json.loads(handle.read(size)), 8 + size


def _tensor(handle: Any, entry: Mapping[str, Any], start: int) -> AnyArray:
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"dtype {entry['dtype']}")
    x = np.empty(entry["shape"], DTYPES[entry["dtype"]])
    handle.seek(start + entry["data_offsets"][0])
    if x.size and handle.readinto(x.reshape(-1).view(np.uint8).data) != x.nbytes:
        raise ValueError("it ends too early")
    return x


@contextmanager
def writing(path: str) -> Iterator[Any]:
    """Open a file for writing that is whole before it has its name, and make its folder."""
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as handle:
            yield handle
        return
    with open_file(path, "wb") as handle:
        yield handle


@retried
def exists(path: str) -> bool:
    """Tell whether there is such a file.

    >>> exists("memory://nothing")
    False
    """
    fs, inner = filesystem(path)
    return bool(fs.exists(inner))


@retried
def remove(folder: str) -> None:
    """Remove a folder and all that is in it.

    >>> remove("memory://nothing")
    """
    fs, inner = filesystem(folder)
    if fs.exists(inner):
        fs.rm(inner, recursive=True)
