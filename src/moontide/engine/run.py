"""One task in many shards: `adapt_shards` checks them, runs a method over them on an engine, and writes the answers.

Every call to the engine is numbered and its sum is kept on disk. A run that is started again after whatever stopped it
goes through the same calls: those that are on disk answer from there, and the first that is not is made, on shards that
are on disk as they were after their last step. Disk: one set of assignments, N x K of 2 or 4 bytes, and the sums.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import as_real, to_numpy, unit_rows
from moontide.core.driver import solve
from moontide.core.rows import LARGE
from moontide.core.sums import unpack
from moontide.engine.partition import quantiser, recall
from moontide.engine.worker import Job, Worker
from moontide.errors import FileError, OptionError, ResourceError, without_credentials
from moontide.memory import available_bytes, human
from moontide.protocols import Method
from moontide.registry import method_names, method_type
from moontide.store.disk import exists, opened, remove, writing
from moontide.store.remote import check_remote
from moontide.store.shards import bad_shards, expand, look_at, relative_names
from moontide.store.tensors import read_tensors, write_tensors
from moontide.types import check_class_names, check_class_prior, check_negatives

SHARE = 0.7  # of the available memory that workers may take
CHECKPOINT = "checkpoint"
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
    """Who works on shards: this process, or `count` actors of a Ray cluster at `address`, else started here.

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

    def __init__(self, job: Job, report: Callable[[str], None], progress: Callable[[int, int], None]) -> None:
        self.folder, self.report, self.progress = job.folder, report, progress
        self.parts = len(job.sources)
        self.number = self.steps = self.replaced = 0
        self.ticks = 0  # shards that have answered, in all calls
        self.seconds: list[float] = []  # of the steps made
        self.engine: Any = None  # a `Worker`, or a `Ray`
        self.calls = self.expected_steps = 1

    def tick(self, shards: int) -> None:
        """Note that some shards have answered."""
        self.ticks += shards
        self.progress(min(self.ticks, self.calls * self.parts), self.calls * self.parts)

    def use(self, engine: Any) -> None:
        """Send the next calls to another engine, and let go of the one before."""
        if self.engine is not None:
            self.replaced += self.engine.replaced
            self.engine.close()
        self.engine = engine

    def __call__(self, verb: str, *given: Any) -> Any:
        """Call a method of all shards and add up."""
        self.number += 1
        path = f"{self.folder}/call-{self.number:04d}.safetensors"
        start = time.perf_counter()
        known = exists(path)
        if known:
            total = unpack(read_tensors(path))
        else:
            total = self.engine.run(self.number, verb, given)
            write_tensors(path, total.pack())
        self.ticks = self.number * self.parts
        if verb == "step":
            self._report_step(total.changed, None if known else time.perf_counter() - start)
        return total

    def _report_step(self, changed: int, seconds: float | None) -> None:
        self.steps += 1
        how = " (from the checkpoint)"
        if seconds is not None:
            self.seconds.append(seconds)
            left = (self.expected_steps - self.steps) * float(np.mean(self.seconds))
            how = f", {seconds:.1f} s, about {left:.0f} s left"
        self.report(f"iteration {self.steps} of {self.expected_steps}: {changed} labels changed{how}")


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

    With `graph` "global" neighbours are found across shards, else within each.
    """
    if method.rows_type is None:
        names = [name for name in method_names() if method_type(name).rows_type]
        raise OptionError(f"Only {', '.join(names[:-1])} and {names[-1]} run on shards. Got {method.name!r}.")
    plan = method.plan()
    job, given = _job(task, method, out.rstrip("/"), workers.device)
    _check_checkpoint(job, graph, given, report)
    journal = Journal(job, report, progress)
    journal.calls = plan.calls + AROUND + 3 * (graph == "global")  # and sample, scatter, gather
    journal.expected_steps = plan.steps
    with _engines(workers, journal) as use:
        use(job, [source.rows for source in job.sources])
        checked = journal("check")
        if checked.problems:
            remove(job.folder)
            raise bad_shards(checked.problems, len(job.sources))
        if checked.skipped:
            report(f"{checked.skipped} rows cannot be used and are skipped")
        groups: tuple[int, ...] = ()
        if graph == "global":
            sizes = journal("scatter", *quantiser(journal, checked.rows, len(job.sources))).counts.astype(int)
            groups = tuple(np.flatnonzero(sizes).tolist())
            use(replace(job, groups=groups), sizes[sizes > 0].tolist())
        neighbours = getattr(method, "neighbours", 0) if getattr(method, "laplacian_weight", 1.0) else 0
        found = recall(journal, checked.rows, neighbours)
        if found is not None:
            report(f"graph: {graph}, {100 * found:.1f} % of the true nearest neighbours among all rows (on a sample)")
        converged = bool(solve(method.mixture(job.text, job.logit_scale, **given), journal).converged)
        journal.calls = journal.number + 1 + bool(groups)  # it may have taken fewer than planned
        written = journal("write")
        if groups:
            use(job, [source.rows for source in job.sources])
            journal("gather", groups)
    remove(job.folder)
    counts, died = written.counts, journal.replaced
    return Labelled(written.n, checked.skipped, written.changed, counts, found, converged, died, job.outputs)


def _job(task: ShardTask, method: Method, out: str, device: str) -> tuple[Job, dict[str, NDArray[np.float32]]]:
    """Check a task; return what the workers must know, and what the method is given besides the rows."""
    for path in (out, *([task.pattern] if isinstance(task.pattern, str) else task.pattern)):
        check_remote(path, task.allow_remote)
    paths = expand(task.pattern) if isinstance(task.pattern, str) else list(task.pattern)
    outputs = tuple(f"{out}/{name}.parquet" for name in relative_names(paths))
    if set(outputs) & set(paths):
        raise FileError(f"The folder {out} would receive files with the names of the shards; give another one.")
    text = unit_rows(to_numpy(as_real(task.text, "text_features")).astype(np.float32), "text_features")
    sources = look_at(paths, text.shape[1])
    names = None if task.class_names is None else check_class_names(task.class_names, len(text))
    given = {}
    if task.class_prior is not None:
        given["class_prior"] = check_class_prior(task.class_prior, len(text), text)
    if task.negatives is not None:
        given["negatives"] = check_negatives(task.negatives, text)
    for name in given:
        method.require_accepted(name)
    half, folder = sum(source.rows for source in sources) * len(text) > LARGE, f"{out}/{CHECKPOINT}"
    job = Job(method, text, task.logit_scale, sources, outputs, folder, names, task.skip_bad_rows, (), half, device)
    return job, given


def _check_checkpoint(job: Job, graph: str, given: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Write down what the run is, or refuse a checkpoint that is of another one."""
    own = {
        "sources": [[without_credentials(source.path), source.rows, source.size] for source in job.sources],
        "method": {job.method.name: asdict(job.method)},  # type: ignore[call-overload]
        "text": hashlib.sha256(job.text.tobytes()).hexdigest(),
        "given": {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in given.items()},
        "logit_scale": job.logit_scale,
        "graph": graph,
        "skip_bad_rows": job.skip_bad_rows,
        "device": job.device,
    }
    path = f"{job.folder}/run.json"
    if exists(path):
        with opened(path) as handle:
            held = json.load(handle)
        if held != json.loads(json.dumps(own)):
            other = "of a run with other shards, text or options; remove it, or give another output folder."
            raise FileError(f"{job.folder} is the checkpoint {other}")
        report(f"going on from {job.folder}")
        return
    with writing(path) as handle:
        handle.write(json.dumps(own).encode())


@contextmanager
def _engines(workers: Workers, journal: Journal) -> Iterator[Callable[[Job, Sequence[int]], None]]:
    """Yield the function that sets the journal's engine for a job and the numbers of rows of its shards."""
    started, have, count = False, available_bytes(), 1
    if workers.engine == "ray":
        from moontide.engine import ray

        started = ray.connect(workers.address, workers.count)
        count = ray.worker_count(workers.count, workers.device)
        have = have if started else int(ray.resources()["memory"])  # of all machines

    def use(job: Job, sizes: Sequence[int]) -> None:
        used = min(count, len(sizes))
        budget = workers.memory if workers.memory is not None or have is None else int(SHARE * have) // used
        resident = _fits(job, sizes, used, budget, journal.report)
        journal.use(None)
        more = resident, journal.tick
        journal.use(ray.Ray(job, used, *more) if workers.engine == "ray" else Worker(job, job.shards, *more))

    try:
        yield use
    finally:
        journal.use(None)
        if started:
            ray.disconnect()


def _fits(job: Job, sizes: Sequence[int], used: int, budget: int | None, report: Callable[[str], None]) -> bool:
    """Tell whether workers can hold all of their shards in the memory that each may take, or refuse too large ones."""
    each, passing = [job.kept_bytes(n) for n in sizes], job.passing_bytes(max(sizes))
    one = 2 * max(each) + passing  # the one before is still being saved
    all_of_them = max(sum(each[w::used]) for w in range(used)) + passing
    resident = budget is None or all_of_them <= budget
    if budget is not None and not resident and one > budget:
        needs = f"A worker needs about {human(one)} for the largest shard, of {max(sizes)} rows"
        raise ResourceError(f"{needs}, and may take {human(budget)}. Split that shard, or use fewer workers.")
    how = "all of its shards in memory" if resident else "one shard at a time, the others on disk"
    each_with = f"workers: {used}, each with up to {human(all_of_them if resident else one)} of memory ({how})"
    report(f"{len(sizes)} shards, {sum(sizes)} rows; {each_with}")
    return resident
