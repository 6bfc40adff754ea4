"""What a map over samples returns: numbers and arrays that add up; on shards in float64, so that the order is free."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import to_numpy

Doubles = NDArray[np.float64]
S = TypeVar("S", bound="Sums")

# How a field of `Sums` is joined where it is not added: dataclasses.field(metadata=...)
LARGER = {"join": np.maximum}  # the larger value is kept
SAME = {"join": lambda a, b: a}  # all have the same
ADDED = {"reduce": True}  # one number per sample in memory, their sum elsewhere
TOGETHER = {"join": lambda a, b: np.concatenate([a, b])}  # rows are put one below the other


@dataclass
class Sums:
    """Base of what a map over samples returns; `+` joins the fields of two, each as it is declared."""

    kinds: ClassVar[dict[str, type[Sums]]] = {}  # by name, for `unpack`

    def __init_subclass__(cls) -> None:
        """Note a kind of sums."""
        Sums.kinds[cls.__name__] = cls

    def __add__(self: S, other: S) -> S:
        """Join two parts."""
        join = {f.name: f.metadata.get("join", operator.add) for f in fields(self)}
        return type(self)(**{name: how(getattr(self, name), getattr(other, name)) for name, how in join.items()})

    def packed(self: S) -> S:
        """Return the fields in numpy and float64, fit to travel and to be added up in any order."""
        return type(self)(**{f.name: _double(getattr(self, f.name), f.metadata) for f in fields(self)})

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return the fields as arrays, named so that `unpack` knows what they are of."""
        values = {f"{type(self).__name__}.{f.name}": getattr(self, f.name) for f in fields(self)}
        return {name: np.asarray(x) for name, x in values.items() if not isinstance(x, slice)}


def _double(x: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(x, int | float | slice):
        return x
    x = to_numpy(x)
    x = x.astype(np.float64) if x.dtype.kind == "f" else x
    return float(x.sum()) if metadata.get("reduce") else x.item() if x.ndim == 0 else x


def unpack(arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Make the object again from its arrays, which other arrays may be among."""
    mine = {name.partition("."): x.item() if x.ndim == 0 else x for name, x in arrays.items() if "." in name}
    return Sums.kinds[next(iter(mine))[0]](**{field: x for (_, _, field), x in mine.items()})


@dataclass
class Counted(Sums):
    """A number of samples."""

    n: int
