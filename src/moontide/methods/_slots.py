"""Per-class memories of a few confident samples: the rule by which samples enter, shared by TDA, DMN and OGA.

A memory is `keys` (K, C, d), C slots of each class, and `entropy` (K, C), infinite where a slot is empty. Who enters
depends on zero-shot predictions alone, never on what is read, so the slots of a whole batch are decided on the host
before the memory is touched: no traffic with the device sample by sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import Array, device, namespace, to_numpy

HostArray = npt.NDArray[Any]
NONE = -1  # the slot of a sample that does not enter


def choose_slots(entropy: Array, labels: HostArray, h: HostArray, admitted: HostArray | None = None) -> HostArray:
    """Give the samples, in order, their slots in the class of their label, (n,); NONE to those that do not enter.

    A sample takes an empty slot, or the one of the highest entropy if its own is lower. Samples outside of the
    mask `admitted` (n,) take none.

    >>> choose_slots(np.asarray([[0.5, np.inf]]), np.asarray([0, 0, 0]), np.asarray([0.9, 0.7, 0.8]))
    array([ 1,  1, -1])
    """
    stored = np.array(to_numpy(entropy))  # (K, C)
    slots = np.full(len(labels), NONE)  # (n,)
    for i in range(len(labels)) if admitted is None else np.flatnonzero(admitted):
        row = stored[labels[i]]  # (C,)
        slot = row.argmax()
        if h[i] < row[slot]:
            row[slot], slots[i] = h[i], slot
    return slots


def write(memory: Array, values: Array, labels: HostArray, slots: HostArray) -> None:
    """Store the values of a batch in their slots, in place: memory[label, slot] = value, of two in one slot the later.

    >>> memory = np.zeros((2, 2))
    >>> write(memory, np.asarray([3.0, 4.0, 5.0]), np.asarray([0, 1, 0]), np.asarray([1, -1, 1]))
    >>> memory
    array([[0., 5.],
           [0., 0.]])
    """
    entered = np.flatnonzero(slots != NONE)[::-1]  # the last first
    if entered.size == 0:
        return
    _, first = np.unique(labels[entered] * memory.shape[1] + slots[entered], return_index=True)
    kept = entered[first]
    xp = namespace(memory)
    rows, columns, kept = (xp.asarray(i, device=device(memory)) for i in (labels[kept], slots[kept], kept))
    memory[rows, columns] = xp.astype(values[kept], memory.dtype)
