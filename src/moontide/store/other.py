"""Embeddings in files of other programs: tables of numbers (.csv, .tsv) and torch's .pt, with weights only.

.csv, .tsv  one row per sample, numbers only, with or without a header; a first column of names becomes the ids
.pt, .pth   one tensor, or a dictionary of tensors; anything else, which would have to be unpickled, is refused
"""

from __future__ import annotations

import csv
import math
import zipfile
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.errors import FileError, missing_extra
from moontide.store.disk import check_unpacked, lines_of

INDEX = ("", "id", "path", "row", "index")  # headers of a first column that is no number of the vector
AnyArray = npt.NDArray[Any]
CONVERT = {  # calls that make a .parquet or .npy of a FILE
    (".pkl", ".pickle"): "pandas.read_pickle(FILE).to_parquet('a.parquet'), where you trust it: it runs code",
    (".feather", ".arrow"): "pandas.read_feather(FILE).to_parquet('a.parquet')",
    (".json", ".jsonl", ".ndjson"): "pandas.read_json(FILE, lines=True).to_parquet('a.parquet')",
    (".h5", ".hdf5"): "np.save('a.npy', h5py.File(FILE)[NAME])",
    (".mat",): "np.save('a.npy', scipy.io.loadmat(FILE)[NAME])",
}


def how_to_convert(path: Path) -> str:
    """Return the end of a sentence on how a file of another kind becomes one that is read.

    >>> how_to_convert(Path("a.h5"))
    "; convert it: np.save('a.npy', h5py.File(FILE)[NAME])"
    >>> how_to_convert(Path("a.docx"))
    ''
    """
    return next((f"; convert it: {call}" for kinds, call in CONVERT.items() if path.suffix.lower() in kinds), "")


def read_numbers(path: Path) -> tuple[AnyArray, list[str] | None]:
    """Read a table of numbers as a matrix, and its first column as ids where that holds no numbers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.csv").write_text("id,x0,x1\\na.jpg,1,2\\nb.jpg,3,4\\n")
    ...     read_numbers(Path(folder) / "a.csv")
    (array([[1., 2.],
           [3., 4.]], dtype=float32), ['a.jpg', 'b.jpg'])
    """
    rows = (row for row in csv.reader(lines_of(path), delimiter="\t" if path.suffix == ".tsv" else ",") if row)
    first = next(rows, [])
    counted = {tuple(map(str, range(start, start + len(first) + 1))) for start in (0, 1)}  # what pandas calls columns
    bare = any(tuple(first[skip:]) == one[: len(first) - skip] for skip in (0, 1) for one in counted if len(first) > 2)
    named = bool(first) and (bare or not any(map(_is_number, first[1:] or first)))
    top = next(rows, []) if named else first
    if not top:
        raise FileError(f"{path} must be a table of numbers, one row per sample. It has no rows.")
    called = not _is_number(top[0]) or (named and first[0].strip().lower() in INDEX)
    skip, width = int(called and len(top) > 1), len(top)
    ids, numbers = [], array("f")
    for i, row in enumerate(chain([top], rows), 1):
        if len(row) != width:
            raise FileError(f"{path} must have {width} columns in every row. Row {i} has {len(row)}.")
        ids += row[:skip]
        try:
            numbers.extend(map(float, row[skip:]))
        except ValueError:
            bad = next(value for value in row[skip:] if not _is_number(value))
            raise FileError(
                f"{path} must be a table of numbers, one row per sample. Got {bad[:40]!r} in row {i}; a column of "
                "vectors is read from .parquet: pandas.DataFrame.to_parquet writes it."
            ) from None
    return np.frombuffer(numbers, np.float32).reshape(-1, width - skip), ids if skip else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_tensors(path: Path, names: Sequence[str]) -> dict[str, AnyArray | None]:
    """Read the tensors of a .pt by name, "" for a lone one; those of other `names` are None. Nothing is unpickled.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save(torch.eye(2), Path(folder) / "a.pt")
    ...     read_tensors(Path(folder) / "a.pt", ())[""].shape
    (2, 2)
    """
    try:
        import torch
    except ImportError:
        raise missing_extra("torch", "torch", f"Reading {path.suffix} files") from None
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            check_unpacked(str(path), sum(entry.file_size for entry in archive.infolist()), size)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # of many kinds, with paragraphs of advice to switch the protection off
        held = None
    if isinstance(held, torch.Tensor):
        return {"": _array(held, path)}
    if not isinstance(held, dict) or not any(isinstance(value, torch.Tensor) for value in held.values()):
        raise FileError(
            f"{path} must hold a tensor or a dictionary of tensors; anything else would run code when it is loaded. "
            "If you trust it, convert it: np.save('features.npy', torch.load(FILE, weights_only=False).numpy())."
        )
    tensors = {str(name): value for name, value in held.items() if isinstance(value, torch.Tensor)}
    if len(tensors) == 1 and not set(tensors) & set(names):
        return {"": _array(next(iter(tensors.values())), path)}
    return {name: _array(value, path) if name in names else None for name, value in tensors.items()}


def _array(tensor: Any, path: Path) -> AnyArray:
    tensor = tensor.detach()
    numbers = math.prod(tensor.shape)  # which may all be one and the same in the file
    check_unpacked(str(path), numbers * max(4, tensor.element_size()), path.stat().st_size)
    array: AnyArray = (tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor).numpy()
    return array
