"""Samples with their graph and assignments, worked on in blocks: what the rows of every mixture share.

In memory a task is one block, its assignments in the dtype of its features. In blocks (large tasks, shards) nothing is
of size n x K but the assignments, two of them, in 16 bits for large tasks: in numpy multiples of 1 / 65535, exact to
8e-6 of a probability (its half-precision numbers take several times as long), in torch float16, exact to 5e-4.
Everything is computed in float32 there, and summed over blocks and shards in float64. Memory is O(n (d + m + 2 K)).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import Array, device, is_torch_array, like, namespace, to_numpy
from moontide.core.graph import Affinity, Graph, nearest_neighbours, neighbour_votes
from moontide.core.ple import zero_shot
from moontide.core.sums import Counted, Sums
from moontide.core.threads import in_threads, workers
from moontide.errors import OptionError
from moontide.progress import track

NEIGHBOURS = 3  # m of the published programs
LARGE = 2**27  # N x K above which a CPU works in blocks of rows, with assignments in 16 bits
BLOCK_ENTRIES = 2**22  # n x K entries worked on at once, 16 MB in float32
PART_ENTRIES = 2**17  # those that a thread works on at once: 0.5 MB in float32 stay in a core's cache
ONE = 65535  # a probability of 1 in 16 bits of fixed point


def check_graph(graph: Graph | None, method: str, neighbours: int) -> None:
    """Refuse a number of neighbours where the task brings its own graph."""
    if graph is not None and neighbours != NEIGHBOURS:
        why = "has no effect on a task that brings its own graph; leave it out."
        raise OptionError(f"The 'neighbours' option of {method} {why}")


class Rows:
    """Some samples of a task. This class makes zero-shot predictions; a method adds a `step`.

    in_memory: these are all samples, worked on as one block. half: assignments are stored in 16 bits. keep: the
    zero-shot probabilities y are needed at the end.
    """

    STATE: ClassVar[tuple[str, ...]] = ("z", "labels", "zero_shot_labels")  # what the next step needs, and predictions
    COLUMNS: ClassVar[tuple[str, ...]] = ("label", "confidence", "before")  # of the predictions
    CHANGES: ClassVar[tuple[str, ...]] = ("first", "step")  # the verbs that change it
    SCORES: ClassVar[int] = 0  # n x K arrays of 32 bits that a step makes beside the assignments

    def __init__(
        self, method: Any, features: Array, text: Array, logit_scale: float, graph: Graph | None = None, *,
        half: bool = False, in_memory: bool = False, keep: bool = True,
    ) -> None:  # fmt: skip
        xp = namespace(features)
        self.method, self.f, self.text, self.logit_scale = method, features, like(text, features), logit_scale
        self.in_memory, self.keep = in_memory, keep
        n, k = len(features), len(text)
        self.spare: list[Array] = []
        if in_memory and not is_torch_array(features):  # made at once, since a large allocation comes in large pages
            self.spare = list(np.empty((4, n, k), features.dtype))
        self.graph = graph or self._neighbours()
        self.votes_of = self._votes_of()
        narrow = xp.float16 if is_torch_array(features) else xp.uint16
        self.y = self.z = self._room(narrow if half else features.dtype)  # as `_narrow` makes them
        size = n if in_memory else max(1, BLOCK_ENTRIES // k)
        self.blocks = [slice(i, min(i + size, n)) for i in range(0, n, size)]
        self.labels: Any = None if in_memory else self._empty(n, dtype=xp.int64)  # (n,)
        self.zero_shot_labels = self.labels

    def _neighbours(self) -> Graph:
        m = getattr(self.method, "neighbours", 0) if getattr(self.method, "laplacian_weight", 1.0) else 0
        return nearest_neighbours(self.f, m, getattr(self.method, "precision", "full"))

    def _votes_of(self) -> Affinity:
        symmetric = getattr(self.method, "graph", "symmetric") == "symmetric"
        mean = getattr(self.method, "laplacian", "mean") == "mean"
        return neighbour_votes(self.graph, symmetric, mean, getattr(self.method, "laplacian_weight", 1.0))

    def call(self, verb: str, *given: Any) -> Any:
        """Call a verb for `driver.solve` where all samples are in memory."""
        return getattr(self, verb)(*given)

    def first(self) -> Any:
        """Make the zero-shot predictions."""
        return self._add_up(lambda rows: Counted(len(self._zero_shot(rows)[0])), "zero-shot")

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what `restore` needs to go on from here."""
        return {name: to_numpy(getattr(self, name)) for name in self.STATE}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go back to a saved state."""
        xp = namespace(self.f)
        for name in self.STATE:
            setattr(self, name, xp.asarray(state[name], device=device(self.f)))
        self.y = self.z

    def predictions(self) -> dict[str, NDArray[Any]]:
        """Return the `COLUMNS`, (n,) each: labels, their probabilities, zero-shot labels, and more of a method."""
        top = self._floats(namespace(self.z).take_along_axis(self.z, self.labels[:, None], axis=1))[:, 0]
        found = self.labels, top, self.zero_shot_labels, *(getattr(self, name) for name in self.COLUMNS[3:])
        return dict(zip(self.COLUMNS, map(to_numpy, found), strict=True))

    def unpack(self) -> tuple[Array, Array]:
        """Return z and y as floating-point numbers of the same size. Converts in place, so nothing can follow."""
        if self.z.dtype == np.uint16:
            table = self._floats(np.arange(ONE + 1, dtype=np.uint16)).astype(np.float16)
            for stored in {id(x): x for x in (self.z, self.y)}.values():
                for rows in self.blocks:
                    stored.view(np.float16)[rows] = table[stored[rows]]
            self.z, self.y = self.z.view(np.float16), self.y.view(np.float16)
        return self.z, self.y

    def _zero_shot(self, rows: slice) -> tuple[Array, Array, Array]:
        """Make and keep y of some rows; return it with the cosines and the log of what y was divided by."""
        cosine = self.f[rows] @ self.text.T  # (b, K)
        y, log_sum = zero_shot(cosine, self.logit_scale)  # (b, K), (b,)
        self.z[rows] = self._narrow(y)
        if self.labels is None:
            self.labels = self._empty(len(self.f), dtype=namespace(y).int64)
        self.labels[rows] = namespace(y).argmax(y, axis=1)
        return y, cosine, log_sum

    def _add_up(self, block: Callable[[slice], Sums], what: str) -> Any:
        """Call a function for every block and add up what it returns; in memory there is one block, returned as is."""
        if self.in_memory:
            return block(self.blocks[0])
        return reduce(operator.add, (block(rows).packed() for rows in track(self.blocks, what)))

    def _in_parts(self, block: Callable[[slice], tuple[Any, ...]], rows: slice) -> tuple[Any, ...]:
        """Call a function for parts of a block in threads, and join what it returns of each, entry by entry."""
        return self._joined(in_threads(block, self._cut(rows)))

    def _joined(self, parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        return parts[0] if len(parts) == 1 else tuple(map(namespace(self.f).concat, zip(*parts, strict=True)))

    def _cut(self, rows: slice) -> list[slice]:
        """Cut a block into parts that stay in a core's cache, at least one per thread; a GPU takes it whole."""
        b = rows.stop - rows.start
        size = b if is_torch_array(self.f) else max(1, min(PART_ENTRIES // len(self.text), -(-b // workers())))
        return [slice(i, min(i + size, rows.stop)) for i in range(rows.start, rows.stop, size)]

    def _room(self, dtype: Any = None) -> Array:
        """Return an n x K array for assignments, one that is not in use if there is one."""
        found = self._spare()
        return self._empty(len(self.f), len(self.text), dtype=dtype or self.z.dtype) if found is None else found

    def _replace(self, new: Array) -> None:
        """Make `new` the assignments; in numpy, the room of those before is used again, unless wanted at the end."""
        if not (self.keep and self.z is self.y) and not is_torch_array(new):
            self.spare.append(self.z)
        self.z = new

    def _spare(self) -> Array | None:
        """Take an array that is not in use; None, which makes numpy and torch get a new one, if there is none."""
        return self.spare.pop() if self.spare else None

    def _empty(self, *shape: int, dtype: Any = None) -> Array:
        """Return an uninitialised array beside the features."""
        xp = namespace(self.f)
        return xp.empty(shape, dtype=dtype or self.f.dtype, device=device(self.f))

    def _wide(self, rows: Any) -> Array:
        """Return the assignments of some rows as they are computed with."""
        return self._floats(self.z[rows])

    def _narrow(self, p: Array) -> Array:
        """Return probabilities as they are stored in `z`."""
        return p if self.z.dtype != np.uint16 else p * np.float32(ONE) + np.float32(0.5)  # made whole by cutting off

    def _floats(self, stored: Array) -> Array:
        """Return stored assignments as they are computed with."""
        if stored.dtype == self.f.dtype:
            return stored
        p = namespace(stored).astype(stored, self.f.dtype)
        if stored.dtype == np.uint16:
            p *= np.float32(1 / ONE)
        return p

    def _votes(self, rows: slice, weight: Array | None = None) -> Array:
        """Return the votes for some rows from the assignments of their neighbours, (b, K), counted by `weight` (n,)."""
        if self.graph.m == 0:
            return 0 * self._wide(rows)
        part = self.votes_of.rows(rows).weighted(weight)
        if self.z.dtype == self.f.dtype:
            return part(self.z)
        voters, at = namespace(part.neighbour).unique_inverse(part.neighbour)  # (V,), those whose z are widened
        return Affinity(part.pointer, at, part.weight, len(voters))(self._wide(voters))
