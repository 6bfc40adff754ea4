"""A worker: it has some of the shards, calls their methods, adds up their sums, and saves each after every step.

A call has a number, and a shard keeps that of its last change with the sums it returned: called again with it, it only
returns them. So a call may be repeated after any failure, by a new worker too, which finds the shards on disk as they
were. Where the shards of a worker do not fit into its memory, it holds one at a time and takes the others from disk.

    folder/shard-00003.safetensors   state of a shard after its last step, and the sums it returned
    folder/graph-00003.safetensors   its neighbours
    folder/rows-00003.safetensors    its usable rows, where they are read more than once
    folder/piece-00003.safetensors   `--graph global`: the rows of a source, by the group that they went to
    folder/result-00003.safetensors  `--graph global`: predictions of a group, by the source that its rows are from
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import to_numpy
from moontide.core.devices import to_device
from moontide.core.graph import Graph, nearest_cosines, nearest_lists
from moontide.core.rows import BLOCK_ENTRIES, Rows
from moontide.core.sums import TOGETHER, Counted, Doubles, Sums, unpack
from moontide.errors import MoontideError
from moontide.protocols import Method
from moontide.store.disk import exists
from moontide.store.predictions import write_shard
from moontide.store.shards import Source, check_kept, read_ids, read_rows
from moontide.store.tensors import read_tensors, write_tensors
from moontide.types import Task

OWN = ("check", "sample", "nearest", "scatter", "write", "gather")  # a worker answers these, its shards the others
Tick = Callable[[int], None]  # called with how many shards have answered a call
PROCESS = 2**27  # bytes of an interpreter with numpy, scipy and pyarrow


@dataclass(frozen=True)
class Job:
    """Everything about a run that a worker must know."""

    method: Method
    rows_type: type[Rows]  # what holds the samples of the method
    classes: Task  # what is given for the classes: text (K, d), logit scale, names
    sources: tuple[Source, ...]
    outputs: tuple[str, ...]  # one per source
    folder: str  # of the checkpoints
    skip_bad_rows: bool = False
    groups: tuple[int, ...] = ()  # that the rows of all sources went to; none: each source is a shard
    half: bool = False  # assignments in 16 bits
    device: str = "cpu"

    def needed_bytes(self, sizes: Sequence[int], shares: Sequence[range]) -> tuple[int, int]:
        """Estimate the memory of a worker with one shard at a time, and with all of its share, of `sizes` rows each."""
        k, d, n, graph = self.classes.k, self.classes.d, max(sizes), 40 * getattr(self.method, "neighbours", 0)
        row = 4 * d + 2 * k * (2 if self.half else 4) + graph + 64  # features, old and new assignments, graph
        scores = 4 * n * k * self.rows_type.SCORES
        passing = max(8 * n * d, scores) + 8 * 4 * BLOCK_ENTRIES + 40 * k * d + PROCESS  # of reading, a step or saving
        together = max(sum(sizes[i] for i in share) for share in shares)
        return 2 * row * n + passing, row * together + passing  # the one before is still being saved


@dataclass
class Checked(Sums):
    """How many rows of all shards can be used, and what is wrong with shards that cannot."""

    rows: int  # usable
    skipped: int
    text: NDArray[np.uint8] = field(metadata=TOGETHER)  # one line per shard that cannot be used

    @property
    def problems(self) -> list[str]:
        """One line for each shard that cannot be used."""
        return self.text.tobytes().decode().splitlines()


@dataclass
class Written(Sums):
    """Counts of the predicted labels, or of the rows that went to each group."""

    changed: int  # labels that differ from zero-shot
    counts: Doubles  # (K,) labels of each class, or (G,) rows of each group


@dataclass
class Sample(Sums):
    """Some rows of all shards, in any order."""

    key: NDArray[np.int64] = field(metadata=TOGETHER)  # (s, 2) shard, row
    rows: NDArray[np.float32] = field(metadata=TOGETHER)  # (s, d)
    weights: Doubles = field(metadata=TOGETHER)  # (s, m) of their neighbours in the graph


@dataclass
class Nearest(Sums):
    """The m largest cosines of some rows to all others, largest first."""

    cosines: Doubles = field(metadata={"join": lambda a, b: -np.sort(-np.c_[a, b])[:, : a.shape[1]]})  # (s, m)


class Worker:
    """Some of the shards of a job; with all of them, the engine of one process. `tick` is called as they answer."""

    replaced = 0  # workers that died

    def __init__(self, job: Job, mine: Sequence[int], resident: bool, tick: Tick = lambda shards: None) -> None:
        self.job, self.mine, self.resident, self.tick = job, mine, resident, tick
        self.rows: dict[int, tuple[NDArray[np.float32], NDArray[np.int64]]] = {}
        self.shards: dict[int, tuple[Rows, int, Any]] = {}  # with the number of its last change and the sums of it
        self.done = -1, 0
        self.saver, self.saving = ThreadPoolExecutor(1, "save"), Future[None]()
        self.saving.set_result(None)

    def close(self) -> None:
        """End the thread that saves."""
        self.saver.shutdown()

    def progress(self) -> tuple[int, int]:
        """Return the number of the last call and how many shards have answered it."""
        return self.done

    def run(self, number: int, name: str, given: tuple[Any, ...]) -> Any:
        """Call a method of every shard, or of this worker for each, and add up; `number` identifies the call."""
        total, self.done = None, (number, 0)
        for count, i in enumerate(self.mine, start=1):
            part = getattr(self, name)(i, *given) if name in OWN else self._ask(i, number, name, given)
            total = part if total is None else total + part
            self.done = number, count
            self.tick(count)
        self.saving.result()  # the shards of this call are on disk
        return total

    def check(self, i: int) -> Checked:
        """Read a source and report what is wrong with it."""
        source = self.job.sources[i]
        try:
            kept = self._read(i)[1]
            check_kept(source, kept, self.job.skip_bad_rows)
        except MoontideError as error:
            line = " ".join(str(error).split())
            return Checked(0, 0, np.frombuffer(f"{line}\n".encode(), np.uint8))
        return Checked(len(kept), source.rows - len(kept), np.empty(0, np.uint8))

    def sample(self, i: int, share: float, m: int) -> Sample:
        """Draw a share of the rows of a shard, at least one, with the weights of their m neighbours (none: -inf)."""
        features, rng = self._read(i)[0], np.random.default_rng([0, i])
        n = len(features)
        at = np.sort(rng.choice(n, max(1, min(n, round(share * n))), replace=False))  # (s,)
        weights = np.full((len(at), m), -np.inf)
        if m:
            graph = self._shard(i)[0].graph
            weights[:, : graph.m] = to_numpy(graph.weights[at])
        return Sample(np.stack([np.full_like(at, i), at], axis=1), features[at], weights)

    def nearest(self, i: int, rows: NDArray[np.float32], count: int) -> Nearest:
        """Return the `count` largest cosines of given rows to those of a shard."""
        return Nearest(nearest_cosines(rows, self._shard(i)[0].f, count).astype(np.float64))

    def scatter(self, i: int, centres: NDArray[np.float32], group: NDArray[np.int64]) -> Written:
        """Put the rows of a source into groups by their nearest centre."""
        (features, kept), groups = self._read(i), int(group.max()) + 1
        own = group[nearest_lists(features, centres, 1)[:, 0]]  # (n,)
        pieces = {f"features-{g}": features[own == g] for g in range(groups)}
        pieces |= {f"rows-{g}": kept[own == g] for g in range(groups)}
        write_tensors(self._path("piece", i), pieces)
        return Written(0, np.bincount(own, minlength=groups).astype(np.float64))

    def write(self, i: int) -> Written:
        """Write the predictions of a shard."""
        columns = {"rows": self._read(i)[1], **self._shard(i)[0].predictions()}
        labels, before = columns["label"], columns["before"]
        if self.job.groups:
            cuts = np.cumsum([len(piece) for piece in self._pieces(i, "rows")])[:-1]
            cut = {name: np.split(x, cuts) for name, x in columns.items()}
            write_tensors(self._path("result", i), {f"{name}-{s}": x for name in cut for s, x in enumerate(cut[name])})
        else:
            self._output(i, columns)
        counts = np.bincount(labels, minlength=self.job.classes.k).astype(np.float64)
        return Written(int((labels != before).sum()), counts)

    def gather(self, i: int, groups: int) -> Counted:
        """Write the predictions of a source, whose rows are in many groups."""
        names = {f"{name}-{i}": name for name in ("rows", *self.job.rows_type.COLUMNS)}
        parts = [read_tensors(self._path("result", shard), *names) for shard in range(groups)]
        columns = {name: np.concatenate([part[key] for part in parts]) for key, name in names.items()}
        order = np.argsort(columns["rows"])
        self._output(i, {name: x[order] for name, x in columns.items()})
        return Counted(len(order))

    def _ask(self, i: int, number: int, name: str, given: tuple[Any, ...]) -> Any:
        """Call a method of a shard; one that changes it is saved, and done once."""
        shard, last, sums = self._shard(i)
        if name not in shard.CHANGES:
            return getattr(shard, name)(*given)
        if last != number:
            sums = getattr(shard, name)(*given)
            tensors = {**shard.state(), "number": np.asarray(number), **sums.pack()}
            self.saving.result()  # one file is written at a time, while the next shard is computed
            self.saving = self.saver.submit(write_tensors, self._path("shard", i), tensors)
            if self.resident:
                self.shards[i] = shard, number, sums
        return sums

    def _shard(self, i: int) -> tuple[Rows, int, Any]:
        """Return a shard as it was after its last change."""
        if i in self.shards:
            return self.shards[i]
        job, path, graph, last, sums = self.job, self._path("graph", i), None, -1, None
        features = to_device(self._read(i)[0], None, job.device)
        if exists(path):
            graph = Graph(**{name: to_device(x, None, job.device) for name, x in read_tensors(path).items()})
        given = features, job.classes.text, job.classes.logit_scale, graph
        shard = job.rows_type(job.method, *given, half=job.half, keep=False)
        if graph is None:
            write_tensors(path, {name: to_numpy(getattr(shard.graph, name)) for name in ("neighbours", "weights")})
        if exists(self._path("shard", i)):
            state = read_tensors(self._path("shard", i))
            shard.restore(state)
            last, sums = int(state["number"]), unpack(state)
        if self.resident:
            self.shards[i] = shard, last, sums
        return shard, last, sums

    def _read(self, i: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the usable rows of a shard, of unit length, and their numbers in the source."""
        if i in self.rows:
            return self.rows[i]
        path = self._path("rows", i)
        if self.job.groups:
            found = np.concatenate(self._pieces(i, "features")), np.concatenate(self._pieces(i, "rows"))
        elif exists(path):
            rows = read_tensors(path)
            found = rows["features"], rows["kept"]
        else:
            found = read_rows(self.job.sources[i].path, self.job.classes.d)
            if not self.resident:  # it will be read again, and is not slow to read then
                write_tensors(path, {"features": found[0], "kept": found[1]})
        if self.resident:
            self.rows[i] = found
        return found

    def _pieces(self, i: int, name: str) -> list[NDArray[Any]]:
        """Return what each source put into the group of a shard."""
        key = f"{name}-{self.job.groups[i]}"
        return [read_tensors(self._path("piece", s), key)[key] for s in range(len(self.job.sources))]

    def _path(self, kind: str, i: int) -> str:
        return f"{self.job.folder}/{kind}-{i:05d}.safetensors"

    def _output(self, i: int, columns: Mapping[str, NDArray[Any]]) -> None:
        ids, names = read_ids(self.job.sources[i].path), self.job.classes.class_names
        write_shard(self.job.outputs[i], columns["rows"], columns, ids, names)
