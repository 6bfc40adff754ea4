"""Shards, the parts of a large task: .parquet, .npy or .safetensors files as `store.files` describes them.

They lie on disk or in object storage, see `store.remote`; s3://... works like a path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import unit_rows
from moontide.errors import FileError, InputError, MoontideError, listed, missing_extra
from moontide.store.disk import opened
from moontide.store.features import stored_ids
from moontide.store.remote import filesystem, retried
from moontide.store.tensors import AnyArray, Tensors

try:
    import fsspec

    from moontide.store import parquet
except ImportError:  # the extra is named when something is read
    fsspec = None

KINDS = (".parquet", ".npy", ".safetensors")
SHOWN = 80  # characters of the names of bad shards in an error
SHOWN_ROWS = 40  # and of the numbers of bad rows
NO_SHARDS = ("text.safetensors", "negatives.safetensors")  # of a store: embeddings of names


@dataclass(frozen=True)
class Source:
    """A shard file and what its header holds."""

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
    moontide.errors.FileError: memory://nothing/*.npy matches no .parquet, .npy, .safetensors file.
    """
    require_fsspec()
    fs, path = filesystem(pattern)
    path = path.rstrip("/")
    found = fs.glob(f"{path}/*" if fs.isdir(path) else path)
    found = [p for p in found if suffix(p) in KINDS and PurePosixPath(p).name not in NO_SHARDS]
    shards = sorted(fs.unstrip_protocol(p) if "://" in pattern else p for p in found)
    if not shards:
        raise FileError(f"{pattern} matches no {', '.join(KINDS)} file.")
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
        raise FileError(f"Two shards are named {double}, apart from their extension; rename one.")
    return names


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
    with opened(path) as handle:
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
            held = Tensors(handle)
            shape = held.shape(_only(path, held))
            _check_length(path, held.end, size)
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{path} must hold a non-empty matrix, one row per sample. Got shape {shape} instead.")
    return Source(path, *shape, size)


def look_at(paths: Sequence[str], d: int) -> tuple[Source, ...]:
    """Read the headers of all shards of a task in d dimensions, and name every one that cannot be used."""

    def one(path: str) -> Source | str:
        try:
            source = look(path)
        except MoontideError as error:
            return " ".join(str(error).split())
        return source if source.d == d else f"{path} has the dimension {source.d}, and the text has {d}."

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, paths))
    problems = [x for x in found if isinstance(x, str)]
    if problems:
        raise bad_shards(problems, len(paths))
    return tuple(x for x in found if isinstance(x, Source))


def bad_shards(problems: Sequence[str], count: int) -> FileError:
    """Return an error that names why the first of some shards cannot be used, and names the others.

    >>> bad_shards(["a.npy is truncated.", "The column 'x' of x/b.parquet is missing."], 3).args[0]
    '2 of 3 shards cannot be used: a.npy is truncated. So are b.parquet.'
    """
    words = [problem.split() for problem in problems[1:]]  # some begin with "The column 'embedding' of b.parquet"
    paths = [next((one for one in found if one.endswith(KINDS)), found[0]) for found in words]
    names = [path.rpartition("/")[2] for path in paths]
    others = f" So are {listed(names, SHOWN)}." if names else ""
    return FileError(f"{len(problems)} of {count} shards cannot be used: {problems[0]}{others}")


def _check_length(path: str, expected: int, size: int) -> None:
    if size < expected:
        raise FileError(f"{path} is truncated: it has {size} bytes, but its header says {expected}.")


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
    with opened(path) as handle:
        if suffix(path) == ".parquet":
            return parquet.read_embeddings(path, handle)[0]
        if suffix(path) == ".npy":
            matrix: AnyArray = np.load(handle, allow_pickle=False)
            return matrix
        held = Tensors(handle)
        return held[_only(path, held)]


@retried
def read_ids(path: str) -> list[Any] | None:
    """Read the ids of a shard: a column `id`, or what a feature store keeps in the metadata.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.eye(2))
    ...     read_ids(f"{folder}/a.npy")
    """
    with opened(path) as handle:
        if suffix(path) == ".parquet":
            return parquet.read_ids(handle)
        if suffix(path) == ".safetensors":
            return stored_ids(Tensors(handle).metadata)
    return None


def read_rows(path: str, d: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Read the rows of a shard that have a direction, scaled to unit length, (n, d), and their numbers in it, (n,).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(f"{folder}/a.npy", np.asarray([[0.0, 0.0], [0.0, 2.0]]))
    ...     read_rows(f"{folder}/a.npy", 2)
    (array([[0., 1.]], dtype=float32), array([1]))
    """
    matrix = read_shard(path)
    if matrix.ndim != 2 or matrix.shape[1] != d or matrix.dtype.kind not in "fiu":
        raise InputError(
            f"{path} must hold rows of {d} numbers, as the text. Got shape {matrix.shape} of {matrix.dtype}."
        )
    good = usable_rows(matrix)
    rows = matrix if good.all() else matrix[good]
    return unit_rows(rows.astype(np.float32, copy=False)), np.flatnonzero(good)


def check_kept(source: Source, kept: NDArray[np.int64], skip_bad_rows: bool) -> None:
    """Refuse a shard of which `read_rows` kept no row, or, unless bad rows are to be skipped, not every row.

    >>> check_kept(Source("a.npy", 3, 2, 1), np.asarray([0, 2]), False)
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: a.npy has NaN, infinity or only zeros in the rows 1 (--skip-bad-rows).
    """
    if not len(kept):
        raise FileError(f"{source.path} has no usable row: all are zero, NaN or infinite.")
    bad = np.delete(np.arange(source.rows), kept).tolist()
    if bad and not skip_bad_rows:
        shown = listed(map(str, bad), SHOWN_ROWS)
        raise FileError(f"{source.path} has NaN, infinity or only zeros in the rows {shown} (--skip-bad-rows).")


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
