"""One task in many shards: `adapt_shards` checks them, runs a method over them on an engine, and writes the answers.

Every call to the engine is numbered and its sum is kept on disk. A run that is started again after whatever stopped it
goes through the same calls: those that are on disk answer from there, and the first that is not is made, on shards that
are on disk as they were after their last step. Disk: one set of assignments, N x K of 2 or 4 bytes, and the sums.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.cluster import joined, resources, worker_count
from moontide.core.arrays import as_real, to_numpy
from moontide.core.driver import solve
from moontide.core.rows import LARGE, Rows
from moontide.core.sums import unpack
from moontide.engine.partition import quantiser, recall
from moontide.engine.worker import Job, Worker
from moontide.errors import FileError, OptionError, ResourceError, without_credentials
from moontide.memory import available_bytes, human
from moontide.protocols import Method, Plan
from moontide.registry import method_names, method_type
from moontide.store.disk import exists, opened, remove, writing
from moontide.store.remote import check_remote
from moontide.store.shards import bad_shards, expand, look_at, relative_names
from moontide.store.tensors import read_tensors, write_tensors
from moontide.types import Task

SHARE = 0.7  # of the available memory that workers may take
FORMAT = 3  # of a checkpoint
AROUND = 4  # calls besides those of the method: check, sample, nearest, write


@dataclass(frozen=True)
class ShardTask:
    """One task in many files, and what is known besides their rows.

    pattern: a glob, a folder, a file or a URL of these, or the paths themselves; besides s3://, gs:// and az:// only
    the protocols of `allow_remote` are used. text: (K, d) class embeddings. class_prior (K,) and negatives (M, d) are
    for the methods that accept them, as in `Method.fit_predict`. skip_bad_rows: leave out rows without a direction.
    """

    pattern: str | Sequence[str]
    text: Any
    logit_scale: float = 100.0
    class_names: Sequence[str] | None = None
    class_prior: Any = None
    negatives: Any = None
    skip_bad_rows: bool = False
    allow_remote: Sequence[str] = ()


@dataclass(frozen=True)
class Workers:
    """Who works on shards: this process, or `count` actors of a Ray cluster, at `address` or started here.

    count: None is one per CPU, or per GPU. memory: what one may take, in bytes. device: where their arrays are.
    """

    engine: str = "local"
    address: str | None = None
    count: int | None = None
    memory: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class Labelled:
    """What a run over shards did; the predictions are in its files."""

    n: int
    skipped: int  # rows that could not be used
    changed: int  # labels that differ from zero-shot
    counts: NDArray[np.float64]  # (K,) labels of each class
    recall: float | None  # share of the true neighbours in the graph
    converged: bool
    replaced: int  # workers that died
    files: tuple[str, ...]


HERE = Workers()


class Journal:
    """The calls of a run, each answered once: by the engine, or from disk where it was answered before."""

    def __init__(self, job: Job, plan: Plan, report: Callable[[str], None], progress: Callable[[int, int], None]):
        self.folder, self.report, self.progress = job.folder, report, progress
        self.calls, self.steps, self.shards = plan.calls, plan.steps, len(job.sources)
        self.number = self.step = self.replaced = 0
        self.seconds: list[float] = []  # of the steps made
        self.converged = True  # whether the last E-step changed no label
        self.engine: Any = None  # a `Worker`, or a `Ray`

    def tick(self, answered: int) -> None:
        """Note how many shards have answered the call."""
        total = self.calls * self.shards
        self.progress(min((self.number - 1) * self.shards + answered, total), total)

    def close(self) -> None:
        """Let go of the engine."""
        if self.engine is not None:
            self.replaced += self.engine.replaced
            self.engine.close()
        self.engine = None

    def __call__(self, verb: str, *given: Any) -> Any:
        """Call a method of all shards and add up."""
        self.number += 1
        self.step += verb == "step"
        path, how = f"{self.folder}/call-{self.number:04d}.safetensors", " (from the checkpoint)"
        if exists(path):
            total = unpack(read_tensors(path))
        else:
            start = time.perf_counter()
            total = self.engine.run(self.number, verb, given)
            write_tensors(path, total.pack())
            if verb == "step":
                self.seconds.append(time.perf_counter() - start)
                left = (self.steps - self.step) * float(np.mean(self.seconds))
                how = f", {self.seconds[-1]:.1f} s, about {left:.0f} s left"
        if verb == "step":
            self.converged = total.changed == 0
            self.report(f"iteration {self.step} of {self.steps}: {total.changed} labels changed{how}")
        return total


def adapt_shards(
    task: ShardTask,
    method: Method,
    out: str,
    *,
    workers: Workers = HERE,
    graph: str = "local",
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Labelled:
    """Label all rows of all shards together, and write one file of predictions per shard into the folder `out`.

    With `graph` "global" neighbours are found across shards, with "local" within each.
    """
    if method.rows_type is None:
        names = [name for name in method_names() if method_type(name).rows_type]
        raise OptionError(f"Only {', '.join(names[:-1])} and {names[-1]} run on shards. Got {method.name!r}.")
    across, plan = graph == "global", method.plan()
    job = _job(task, method, out.rstrip("/"), workers.device)
    _check_checkpoint(job, graph, report)
    plan = plan._replace(calls=plan.calls + AROUND + 3 * across)  # and sample, scatter, gather
    journal, rows = Journal(job, plan, report, progress), [source.rows for source in job.sources]
    with _capacity(workers) as capacity, closing(journal):
        _engine(job, rows, workers, capacity, journal)
        checked = journal("check")
        if checked.problems:
            remove(job.folder)
            raise bad_shards(checked.problems, len(job.sources))
        if checked.skipped:
            report(f"{checked.skipped} rows cannot be used and are skipped")
        if across:
            sizes = journal("scatter", *quantiser(journal, checked.rows, len(rows))).counts.astype(int)
            groups = np.flatnonzero(sizes)
            grouped = replace(job, groups=tuple(groups.tolist()))
            _engine(grouped, sizes[groups].tolist(), workers, capacity, journal)
        neighbours = getattr(method, "neighbours", 0) if getattr(method, "laplacian_weight", 1.0) else 0
        found = recall(journal, checked.rows, neighbours)
        if found is not None:
            report(f"graph: {graph}, {100 * found:.1f} % of the true nearest neighbours among all rows (on a sample)")
        mixture = method.mixture(job.classes.text, job.classes.logit_scale, **_given(job))
        solve(mixture, journal)
        journal.calls = journal.number + 1 + across  # it may have taken fewer than planned
        written = journal("write")
        if across:
            _engine(job, rows, workers, capacity, journal)
            journal("gather", len(groups))
    remove(job.folder)
    done = checked.rows, checked.skipped, written.changed, written.counts
    return Labelled(*done, found, journal.converged, journal.replaced, job.outputs)


def _job(task: ShardTask, method: Method, out: str, device: str) -> Job:
    """Check a task and return what the workers must know of it."""
    for path in (out, *([task.pattern] if isinstance(task.pattern, str) else task.pattern)):
        check_remote(path, task.allow_remote)
    paths = expand(task.pattern) if isinstance(task.pattern, str) else list(task.pattern)
    outputs = tuple(f"{out}/{name}.parquet" for name in relative_names(paths))
    if set(outputs) & set(paths):
        raise FileError(f"The folder {out} would receive files with the names of the shards; give another one.")
    text = to_numpy(as_real(task.text, "text_features")).astype(np.float32)
    inputs = {"class_names": task.class_names, "class_prior": task.class_prior, "negatives": task.negatives}
    classes = Task.of_classes(text, task.logit_scale, **inputs)
    method.require(classes)
    sources, folder = look_at(paths, classes.d), f"{out}/checkpoint"
    half = sum(source.rows for source in sources) * classes.k > LARGE
    given = classes, sources, outputs, folder, task.skip_bad_rows
    return Job(method, method.rows_type or Rows, *given, half=half, device=device)


def _given(job: Job) -> dict[str, NDArray[np.float32]]:
    """Return what is given for the classes besides their text."""
    return {name: x for name in ("class_prior", "negatives") if (x := getattr(job.classes, name)) is not None}


def _check_checkpoint(job: Job, graph: str, report: Callable[[str], None]) -> None:
    """Write down what the run is, or refuse a checkpoint that is of another one."""
    facts = {
        "format": FORMAT,
        "sources": [[without_credentials(source.path), source.rows, source.size] for source in job.sources],
        "method": {job.method.name: asdict(job.method)},  # type: ignore[call-overload]
        "text": hashlib.sha256(job.classes.text.tobytes()).hexdigest(),
        "given": {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in _given(job).items()},
        "logit_scale": job.classes.logit_scale,
        "graph": graph,
        "skip_bad_rows": job.skip_bad_rows,
        "device": job.device,
    }
    path, own = f"{job.folder}/run.json", json.dumps(facts).encode()
    if not exists(path):
        with writing(path) as handle:
            handle.write(own)
        return
    with opened(path) as handle:
        if handle.read() != own:
            other = "of a run with other shards, text, options or version; remove it, or give another output folder."
            raise FileError(f"{job.folder} is the checkpoint {other}")
    report(f"going on from {job.folder}")


@contextmanager
def _capacity(workers: Workers) -> Iterator[tuple[int, float]]:
    """Join the cluster where one is asked for; yield how many workers there can be, and the memory of all in bytes."""
    here = available_bytes() or math.inf
    if workers.engine != "ray":
        yield 1, here
        return
    with joined(workers.address, workers.count) as started:
        yield worker_count(workers.count, workers.device), here if started else resources()["memory"]


def _engine(job: Job, sizes: Sequence[int], workers: Workers, capacity: tuple[int, float], journal: Journal) -> None:
    """Send the next calls to an engine for a job whose shards have `sizes` rows; refuse what exceeds its memory."""
    count = min(capacity[0], len(sizes))
    shares = [range(w, len(sizes), count) for w in range(count)]
    budget = SHARE * capacity[1] / count if workers.memory is None else workers.memory
    one, together = job.needed_bytes(sizes, shares)
    resident = together <= budget
    if min(one, together) > budget:
        needs = f"A worker needs about {human(one)} for the largest shard, of {max(sizes)} rows"
        raise ResourceError(f"{needs}, and may take {human(int(budget))}. Split that shard, or use fewer workers.")
    how = "all of its shards in memory" if resident else "one shard at a time, the others on disk"
    each = f"each with up to {human(together if resident else one)} of memory ({how})"
    journal.report(f"{len(sizes)} shards, {sum(sizes)} rows; workers: {count}, {each}")
    journal.close()
    if workers.engine == "ray":
        from moontide.engine.ray import Ray

        journal.engine = Ray(job, shares, resident, journal.tick)
    else:
        journal.engine = Worker(job, shares[0], resident, journal.tick)
