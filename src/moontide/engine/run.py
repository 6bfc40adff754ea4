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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import as_real, to_numpy, unit_rows
from moontide.core.driver import solve
from moontide.core.memory import available_bytes, human
from moontide.core.rows import LARGE
from moontide.core.sums import unpack
from moontide.engine.local import Engine, Local
from moontide.engine.partition import quantiser, recall
from moontide.engine.worker import Job
from moontide.errors import FileError, MoontideError, OptionError, ResourceError, listed, without_credentials
from moontide.protocols import Method, Plan
from moontide.registry import method_names, method_type
from moontide.store.disk import exists, opened, remove, writing
from moontide.store.remote import check_remote
from moontide.store.shards import Source, expand, look, relative_names
from moontide.store.tensors import read_tensors, write_tensors
from moontide.types import check_class_names, check_class_prior, check_negatives

SHARE = 0.7  # of the available memory that workers may take
SHOWN = 80  # characters of the names of bad shards in an error
CHECKPOINT = "checkpoint"
AROUND = 4  # calls besides those of the method: check, sample, nearest, write


@dataclass(frozen=True)
class Outcome:
    """What a run over shards did; the predictions are in its files."""

    n: int
    skipped: int  # rows that could not be used
    changed: int  # labels that differ from zero-shot
    counts: NDArray[np.float64]  # (K,) labels of each class
    recall: float | None  # share of the true neighbours in the graph
    converged: bool
    replaced: int  # workers that died
    files: tuple[str, ...]


class Journal:
    """The calls of a run, each answered once: by the engine, or from disk where it was answered before."""

    def __init__(self, job: Job, report: Callable[[str], None], progress: Callable[[int, int], None]) -> None:
        self.folder, self.report, self.progress = job.folder, report, progress
        self.parts = len(job.sources)
        self.number = self.steps = self.replaced = 0
        self.ticks = 0  # shards that have answered, in all calls
        self.seconds: list[float] = []  # of the steps made
        self.engine: Engine | None = None
        self.calls = self.expected_steps = 1

    def tick(self, shards: int) -> None:
        """Note that some shards have answered."""
        self.ticks += shards
        self.progress(min(self.ticks, self.calls * self.parts), self.calls * self.parts)

    def use(self, engine: Engine | None) -> None:
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
            said = unpack(read_tensors(path))
        else:
            said = self.engine.run(self.number, verb, *given)  # type: ignore[union-attr]
            write_tensors(path, said.pack())
        self.ticks = self.number * self.parts
        if verb == "step":
            self._report_step(said.changed, None if known else time.perf_counter() - start)
        return said

    def _report_step(self, changed: int, seconds: float | None) -> None:
        self.steps += 1
        line = f"iteration {self.steps} of {self.expected_steps}: {changed} labels changed"
        if seconds is None:
            self.report(f"{line} (from the checkpoint)")
            return
        self.seconds.append(seconds)
        left = (self.expected_steps - self.steps) * float(np.mean(self.seconds))
        self.report(f"{line}, {seconds:.1f} s, about {left:.0f} s left")


def adapt_shards(
    pattern: str | Sequence[str],
    text: Any,
    method: Method,
    out: str,
    *,
    logit_scale: float = 100.0,
    class_names: Sequence[str] | None = None,
    class_prior: Any = None,
    negatives: Any = None,
    engine: str = "local",
    address: str | None = None,
    workers: int | None = None,
    graph: str = "local",
    skip_bad_rows: bool = False,
    allow_remote: Sequence[str] = (),
    memory: int | None = None,
    device: str = "cpu",
    report: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Label all rows of all shards together, and write one file of predictions a shard into the folder `out`.

    `class_prior` (K,) and `negatives` (G, d) are for the methods that accept them, as in `Method.fit_predict`.
    `engine` is "local" or "ray" (at `address`, else started here, with `workers` actors, else one a CPU). With `graph`
    "global" neighbours are found across shards. Besides s3://, gs:// and az:// only the protocols of `allow_remote`
    are used. `memory` is what one worker may take, in bytes.

    >>> import tempfile
    >>> from moontide import method
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(2):
    ...         np.save(f"{folder}/{i}.npy", np.eye(3))
    ...     adapt_shards(f"{folder}/*.npy", np.eye(3), method("moon"), f"{folder}/out").counts
    array([2., 2., 2.])
    """
    plan = _plan(method)
    for path in (out, *([pattern] if isinstance(pattern, str) else pattern)):
        check_remote(path, allow_remote)
    paths = expand(pattern) if isinstance(pattern, str) else list(pattern)
    out = out.rstrip("/")
    outputs = tuple(f"{out}/{name}.parquet" for name in relative_names(paths))
    if set(outputs) & set(paths):
        raise FileError(f"The folder {out} would receive files with the names of the shards; give another one.")
    anchors = unit_rows(to_numpy(as_real(text, "text_features")).astype(np.float32), "text_features")
    sources = _look_at(paths, anchors.shape[1])
    rows = sum(source.rows for source in sources)
    names = None if class_names is None else check_class_names(class_names, len(anchors))
    given = _check_given(method, anchors, class_prior=class_prior, negatives=negatives)
    half = rows * len(anchors) > LARGE
    job = Job(
        method, anchors, logit_scale, sources, outputs, f"{out}/{CHECKPOINT}", names, skip_bad_rows, half=half,
        device=device,
    )  # fmt: skip
    _check_checkpoint(job, graph, given, report)
    journal = Journal(job, report, progress)
    journal.calls = plan.calls + AROUND + 3 * (graph == "global")  # and sketch, scatter, gather
    journal.expected_steps = plan.steps
    with _engines(engine, address, workers, memory, device, journal) as use:
        use(job, [source.rows for source in sources])
        checked = journal("check")
        if checked.problems:
            remove(job.folder)
            raise _bad_shards(checked.problems, len(sources))
        if checked.skipped:
            report(f"{checked.skipped} rows cannot be used and are skipped")
        groups: tuple[int, ...] = ()
        if graph == "global":
            sizes = journal("scatter", *quantiser(journal, checked.rows, job.parts)).counts.astype(int)
            groups = tuple(np.flatnonzero(sizes).tolist())
            use(replace(job, groups=groups), sizes[sizes > 0].tolist())
        found = recall(journal, checked.rows)
        if found is not None:
            report(f"graph: {graph}, {100 * found:.1f} % of the true nearest neighbours among all rows (on a sample)")
        converged = bool(solve(method.mixture(anchors, logit_scale, **given), journal).converged)
        journal.calls = journal.number + 1 + bool(groups)  # it may have taken fewer than planned
        written = journal("write")
        if groups:
            use(job, [source.rows for source in sources])
            journal("gather", groups)
    remove(job.folder)
    replaced = journal.replaced
    return Outcome(written.n, checked.skipped, written.changed, written.counts, found, converged, replaced, job.outputs)


def _plan(method: Method) -> Plan:
    """Tell how long a run of the method is, or refuse one that does not run on shards."""
    if method.rows_type is None:
        names = [name for name in method_names() if method_type(name).rows_type]
        raise OptionError(f"Only {', '.join(names[:-1])} and {names[-1]} run on shards. Got {method.name!r}.")
    return method.plan()


def _look_at(paths: Sequence[str], d: int) -> tuple[Source, ...]:
    """Read the headers of all shards, and name every one that cannot be used."""

    def one(path: str) -> Source | str:
        try:
            source = look(path)
        except MoontideError as error:
            return " ".join(str(error).split())
        return source if source.d == d else f"{path} has the dimension {source.d}, and the text has {d}."

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(one, paths))
    problems = [x for x in found if isinstance(x, str)]
    if problems:
        raise _bad_shards(problems, len(paths))
    return tuple(x for x in found if isinstance(x, Source))


def _bad_shards(problems: Sequence[str], count: int) -> FileError:
    """Say which shards cannot be used: why the first cannot, and the names of others."""
    names = [problem.split()[0].rpartition("/")[2] for problem in problems[1:]]
    others = f" So are {listed(names, SHOWN)}." if names else ""
    return FileError(f"{len(problems)} of {count} shards cannot be used: {problems[0]}{others}")


def _check_given(method: Method, anchors: NDArray[np.float32], **given: Any) -> dict[str, NDArray[np.float32]]:
    """Return what is known besides the rows, as the drivers take it, where the method can use it."""
    found = {}
    for name, x in given.items():
        if x is not None:
            method.require_accepted(name)
            prior = name == "class_prior"
            found[name] = check_class_prior(x, len(anchors), anchors) if prior else check_negatives(x, anchors)
    return found


def _check_checkpoint(job: Job, graph: str, given: Mapping[str, Any], report: Callable[[str], None]) -> None:
    """Write down what the run is, or refuse a checkpoint that is of another one."""
    own = {
        "sources": [[without_credentials(source.path), source.rows, source.size] for source in job.sources],
        "method": {job.method.name: asdict(job.method)},  # type: ignore[call-overload]
        "text": _digest(job.text),
        "given": {name: _digest(x) for name, x in given.items()},
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
            raise FileError(
                f"{job.folder} is the checkpoint of a run with other shards, text or options; remove it, or give "
                "another output folder."
            )
        report(f"going on from {job.folder}")
        return
    with writing(path) as handle:
        handle.write(json.dumps(own).encode())


def _digest(x: NDArray[np.float32]) -> str:
    return hashlib.sha256(x.tobytes()).hexdigest()


@contextmanager
def _engines(
    kind: str, address: str | None, workers: int | None, memory: int | None, device: str, journal: Journal
) -> Iterator[Callable[[Job, Sequence[int]], None]]:
    """Yield the function that sets the journal's engine for a job and the numbers of rows of its shards."""
    started, have, count = False, available_bytes(), 1
    if kind == "ray":
        from moontide.engine import ray

        started = ray.connect(address, workers)
        count = ray.worker_count(workers, device)
        have = have if started else int(ray.resources()["memory"])  # of all machines

    def use(job: Job, sizes: Sequence[int]) -> None:
        used = min(count, len(sizes))
        each = [job.kept_bytes(n) for n in sizes]
        budget = memory if memory is not None or have is None else int(SHARE * have) // used
        passing = job.passing_bytes(max(sizes))
        one = 2 * max(each) + passing  # the one before is still being saved
        all_of_them = max(sum(each[w::used]) for w in range(used)) + passing
        resident = budget is None or all_of_them <= budget
        if budget is not None and not resident and one > budget:
            raise ResourceError(
                f"A worker needs about {human(one)} for the largest shard, of {max(sizes)} rows, and may take "
                f"{human(budget)}. Split that shard, or use fewer workers."
            )
        how = "all of its shards in memory" if resident else "one shard at a time, the others on disk"
        journal.report(
            f"{len(sizes)} shards, {sum(sizes)} rows; workers: {used}, each with up to "
            f"{human(all_of_them if resident else one)} of memory ({how})"
        )
        journal.use(None)
        if kind == "ray":
            journal.use(ray.Ray(job, resident, journal.tick, workers=used))
        else:
            journal.use(Local(job, resident, journal.tick))

    try:
        yield use
    finally:
        journal.use(None)
        if started:
            ray.disconnect()
