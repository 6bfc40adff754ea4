"""What shards send back: numbers and arrays that add up, in float64, so that neither order nor grouping matters."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
S = TypeVar("S", bound="Sums")


# How a field of `Sums` is joined where it is not added: dataclasses.field(metadata=...)
LARGER = {"join": np.maximum}  # the larger value is kept
TOGETHER = {"join": lambda a, b: np.concatenate([a, b])}  # rows are put one below the other


@dataclass
class Sums:
    """Base of what a map over shards returns; `+` joins the fields of two, each as it is declared.

    >>> Number(1.5) + Number(2.0)
    Number(value=3.5)
    """

    def __add__(self: S, other: S) -> S:
        """Join two parts."""
        join = {f.name: f.metadata.get("join", operator.add) for f in fields(self)}
        return type(self)(**{name: how(getattr(self, name), getattr(other, name)) for name, how in join.items()})

    def pack(self) -> dict[str, NDArray[Any]]:
        """Return the fields as arrays, named so that `unpack` knows what they are of.

        >>> Number(1.5).pack()
        {'Number.value': array(1.5)}
        """
        return {f"{type(self).__name__}.{f.name}": np.asarray(getattr(self, f.name)) for f in fields(self)}


def unpack(arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Make the object again from its arrays, among which others may be.

    >>> unpack({"z": np.zeros(2), **Number(1.5).pack()})
    Number(value=1.5)
    """
    mine = {name.partition("."): x for name, x in arrays.items() if "." in name}
    kind = next(iter(mine))[0]
    values = {field: x.item() if x.ndim == 0 else x for (_, _, field), x in mine.items()}
    return next(cls for cls in Sums.__subclasses__() if cls.__name__ == kind)(**values)


@dataclass
class Number(Sums):
    """One number.

    >>> Number(2.0).value
    2.0
    """

    value: float
