"""The only reader of .safetensors: 8 bytes of length, a JSON header, the data. It runs no code and checks every header.

Feature stores map their arrays, states and checkpoints are read array by array, so that no second copy is in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.store.disk import opened, writing
from moontide.store.remote import retried

DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
          "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1"}  # fmt: skip
MOST_HEADER = 100_000_000  # bytes, as the library of the format allows

AnyArray = NDArray[Any]


class Tensors(Mapping[str, AnyArray]):
    """The arrays of an open file by name, each read when it is asked for; ValueError where the header is wrong.

    >>> import io
    >>> from safetensors.numpy import save
    >>> held = Tensors(io.BytesIO(save({"x": np.arange(3)}, {"by": "me"})))
    >>> held["x"], held.metadata, held.shape("x")
    (array([0, 1, 2]), {'by': 'me'}, (3,))
    """

    def __init__(self, handle: Any) -> None:
        self._handle, self.size = handle, handle.seek(0, 2)
        handle.seek(0)
        length = int.from_bytes(handle.read(8), "little")
        if length > min(MOST_HEADER, self.size):
            raise ValueError("its header would be longer than the file, or than 100 MB")
        header = json.loads(handle.read(length))
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        if not all(isinstance(text, str) for text in self.metadata.values()):
            raise ValueError("its metadata are no texts")
        self._entries = {name: _checked(entry, 8 + length) for name, entry in header.items()}
        if sum(stop - start for *_, start, stop in self._entries.values()) > self.size:
            raise ValueError("its arrays overlap, or are cut off")
        self.end = max((stop for *_, stop in self._entries.values()), default=8 + length)  # of the data

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Count the arrays."""
        return len(self._entries)

    def __getitem__(self, name: str) -> AnyArray:
        """Read an array."""
        dtype, shape, start, stop = self._entries[name]
        if stop > self.size:
            raise ValueError("it ends too early")
        x = np.empty(shape, dtype)
        self._handle.seek(start)
        if x.size and self._handle.readinto(x.reshape(-1).view(np.uint8).data) != x.nbytes:
            raise ValueError("it ends too early")
        return x

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of an array that is not read."""
        return self._entries[name][1]

    def mapped(self, path: Path) -> dict[str, AnyArray]:
        """Return all arrays as maps of the file, which lies at `path`."""
        found = self._entries.items()
        return {name: np.memmap(path, dtype, "r", start, shape) for name, (dtype, shape, start, _) in found}


def _checked(entry: Any, data: int) -> tuple[np.dtype[Any], tuple[int, ...], int, int]:
    """Return dtype, shape, start and stop of an entry of a header whose data begin at `data`."""
    name, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if name not in DTYPES:
        raise ValueError(f"dtype {name}")
    dtype = np.dtype(DTYPES[name])
    if not all(type(x) is int and x >= 0 for x in (*shape, start, stop)):
        raise ValueError("its header has invalid sizes")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("its header has an array of another size than its shape")
    return dtype, shape, data + start, data + stop


@retried
def read_tensors(path: str, *names: str) -> dict[str, AnyArray]:
    """Read a .safetensors file, or only some arrays of it; those it does not have are left out."""
    with opened(path) as handle:
        held = Tensors(handle)
        return {name: held[name] for name in names or held if name in held}


@retried
def write_tensors(path: str, tensors: Mapping[str, AnyArray]) -> None:
    """Write arrays as a .safetensors file, one after the other.

    >>> write_tensors("memory://doctest/a.safetensors", {"x": np.arange(3)})
    >>> read_tensors("memory://doctest/a.safetensors")
    {'x': array([0, 1, 2])}
    """
    with writing(path) as handle:
        for part in pieces(tensors):
            handle.write(part)


def pieces(tensors: Mapping[str, AnyArray], metadata: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yield the contents of a .safetensors file piece by piece; the same arrays and words give the same bytes.

    >>> import io
    >>> held = Tensors(io.BytesIO(b"".join(pieces({"x": np.arange(3)}, {"by": "me"}))))
    >>> held["x"], held.metadata
    (array([0, 1, 2]), {'by': 'me'})
    """
    arrays = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    kinds = {np.dtype(code): kind for kind, code in DTYPES.items()}
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, x in arrays.items():
        header[name] = {"dtype": kinds[x.dtype], "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for x in arrays.values():
        yield x.reshape(-1).view(np.uint8).data
