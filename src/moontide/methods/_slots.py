"""Per-class memories of a few confident samples, and which samples enter: shared by ADAPT, DMN, DPE, OGA and TDA.

A memory is `keys` (K, C, d), with C slots per class, and `entropy` (K, C), infinite for an empty slot. Which samples
enter depends only on zero-shot predictions, not on the contents, so the slots of a whole batch are chosen on the host
before anything is written, without a transfer to or from the device per sample.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import Array, device, namespace, to_numpy

HostArray = npt.NDArray[Any]
NONE = -1  # the slot of a sample that does not enter


def choose_slots(entropy: Array, labels: HostArray, h: HostArray, admitted: HostArray | None = None) -> HostArray:
    """Return the slot of each sample, taken in order, within the class of its label, (n,); NONE if it does not enter.

    A sample takes an empty slot, or replaces the sample of the highest entropy if its own is lower. Samples outside
    the mask `admitted` (n,) do not enter.

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
    """Store the values of a batch in place: memory[label, slot] = value; the later one if two share a slot.

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
