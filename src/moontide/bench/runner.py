"""Run or resume a suite: every method on the same batches, one record per run, in one process or several."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from moontide.bench.data import Pack, find_data, read_pack
from moontide.bench.processes import in_processes
from moontide.bench.records import Log, Record, environment, key, key_of_run, read_records
from moontide.bench.suites import Entry, Scenario, Suite
from moontide.core.arrays import to_numpy
from moontide.errors import FileError, MoontideError, OptionError
from moontide.metrics import IntArray, calibration_gaps
from moontide.protocols import Method, as_online, samples
from moontide.registry import method_type

TOP = 5  # a label among so many of the most probable classes counts in `top5`
Progress = Callable[[int, int], None]  # (done, of how many)
Limit = Callable[[Pack, Scenario, Entry], int]  # the most runs of a method in a scenario on some features


@dataclass(frozen=True)
class Job:
    """One draw of a scenario, and the methods that are still to be run on it (by their numbers in the suite)."""

    path: Path
    scenario: Scenario
    run: int
    entries: tuple[int, ...]


@dataclass
class RunCounts:
    """The outcome of `run_suite`: records written and found, and runs that were left out or failed, with reasons."""

    written: int = 0
    found: int = 0
    skipped: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # runs by reason


def run_suite(
    suite: Suite,
    data: str | Path,
    out: str | Path,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
    limit: Limit | None = None,
    device: str = "cpu",
    encoder: str | None = None,
) -> RunCounts:
    """Do the runs that the folder `out` does not have yet; after an interruption the next call continues.

    `limit` returns how many runs of the suite a method does, for methods that take too long; None means all of them.
    `device` is where methods run. `encoder` names the one that made the features of a store, for methods that adapt it.

    >>> import tempfile
    >>> from moontide.bench.suites import load_suite
    >>> suite = load_suite("batch-64").choose(["moon", "zero_shot"]).shorten(2)
    >>> rng = np.random.default_rng(0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "toy.npz"
    ...     np.savez(path, image_features=rng.normal(size=(90, 8)), text_features=rng.normal(size=(3, 8)),
    ...              labels=rng.integers(3, size=90))
    ...     first, again = (run_suite(suite, path, folder) for _ in range(2))
    >>> first.written, again.written, again.found
    (12, 0, 12)
    """
    if jobs < 1:
        raise OptionError(f"'jobs' must be at least 1. Got {jobs} instead.")
    if suite.timing and jobs > 1:
        raise OptionError(f"The suite {suite.name} measures time, so only one process may run: leave 'jobs' at 1.")
    if device != "cpu" and jobs > 1:
        raise OptionError("A GPU serves one process: leave 'jobs' at 1, or 'device' at cpu.")
    for entry in suite.entries:
        entry.build()
    counts, out, source = RunCounts(), Path(out), Source(device, encoder)
    todo = plan(suite, find_data(data), {key(record) for record in read_records(out)}, counts, limit, source)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"The results folder {out} cannot be created: {error.strerror}.") from error
    total = sum(len(job.entries) for job in todo)
    worker = Worker(suite, out, environment(), source)
    for written, failed in map(worker, todo) if jobs == 1 else in_processes(worker, todo, jobs):
        counts.written += written
        counts.failed.update(failed)
        if progress:
            progress(counts.written + counts.failed.total(), total)
    return counts


@dataclass
class Source:
    """Reads packs for a device and with an encoder; every process has its own.

    >>> Source("cpu", None).read("missing.npz")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file missing.npz.
    """

    device: str = "cpu"
    encoder: str | None = None
    _packs: dict[str | Path, Pack] = field(default_factory=dict, init=False, repr=False)

    def read(self, path: str | Path) -> Pack:
        """Read a pack, or return it if it was read before."""
        if path not in self._packs:
            self._packs[path] = read_pack(path, self.made, self.device)
        return self._packs[path]

    @cached_property
    def made(self) -> Any:
        """The encoder."""
        if self.encoder is None:
            return None
        from moontide.encoders import encoder

        return encoder(self.encoder, self.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process without the encoder and the packs, which it reads itself."""
        return Source, (self.device, self.encoder)


def plan(
    suite: Suite,
    paths: Iterable[Path],
    done: set[Any],
    counts: RunCounts,
    limit: Limit | None = None,
    source: Source | None = None,
) -> list[Job]:
    """List the jobs that are left; count in `counts` what is done, and report what cannot be done.

    It is an error if none of the data can be read.

    >>> from moontide.bench.suites import load_suite
    >>> plan(load_suite("batch-64"), [Path("missing.npz")], set(), RunCounts())
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file missing.npz.
    """
    jobs, source = [], source or Source()
    paths, unread = list(paths), 0
    for path in paths:
        try:
            pack = source.read(path)
        except MoontideError as error:
            unread += 1
            if unread == len(paths):
                raise
            counts.skipped.append(str(error))
            continue
        able = []
        for number, entry in enumerate(suite.entries):
            missing = method_type(entry.name).needs - pack.extras.keys()
            if missing:
                counts.skipped.append(f"{entry.name} on {pack.dataset}: it needs {' and '.join(sorted(missing))}.")
            else:
                able.append(number)
        for scenario in suite.scenarios:
            try:
                scenario.batches(pack.dataset, pack.labels, 0)
            except MoontideError as error:
                counts.skipped.append(f"{scenario.id} on {pack.dataset}: {error}")
                continue
            most = {n: limit(pack, scenario, suite.entries[n]) if limit else scenario.runs for n in able}
            keys = {n: key(_facts(suite, pack, scenario, 0, suite.entries[n])) for n in able}
            for run in range(min(scenario.runs, max(most.values(), default=0))):
                wanted = [n for n in able if run < most[n]]
                left = tuple(n for n in wanted if key_of_run(keys[n], run) not in done)
                counts.found += len(wanted) - len(left)
                if left:
                    jobs.append(Job(path, scenario, run, left))
    return jobs


def _facts(suite: Suite, pack: Pack, scenario: Scenario, run: int, entry: Entry) -> Record:
    return {
        "suite": suite.name,
        "version": suite.version,
        "dataset": pack.dataset,
        "backbone": pack.backbone,
        "features": pack.hash,
        "samples": len(pack.labels),
        "classes": int(pack.text.shape[0]),
        "scenario": {**scenario.facts(), "order": suite.scenarios.index(scenario), **_elsewhere(scenario, pack)},
        "run": run,
        "order": suite.entries.index(entry),
        "method": entry.name,
        "options": dict(entry.options),
        "label": entry.label,
        "vary": entry.vary,
        "timing": suite.timing,
    }


def _elsewhere(scenario: Scenario, pack: Pack) -> Record:
    """Return the mark of a run that was not on the CPU, which makes it a separate scenario."""
    return {} if pack.device == "cpu" else {"id": f"{scenario.id}-{pack.device}", "device": pack.device}


class Worker:
    """Does jobs and writes their records to its own file.

    >>> from moontide.bench.suites import load_suite
    >>> Worker(load_suite("batch-64"), Path("results"), environment()).log.suite
    'batch-64'
    """

    def __init__(self, suite: Suite, out: Path, about: Record, source: Source | None = None) -> None:
        self.suite, self.out, self.about, self.source = suite, out, about, source or Source()
        self.log = Log(out, suite.name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process as a new worker."""
        return Worker, (self.suite, self.out, self.about, self.source)

    def __call__(self, job: Job, known: dict[tuple[str, str], Record] | None = None) -> tuple[int, list[str]]:
        """Run every method of a job on the same batches; return how many records were written, and what failed.

        `known` holds the scores of methods that have run on these batches, by name and options; new ones are added.
        """
        known = {} if known is None else known
        pack, scenario = replace(self.source.read(job.path), confident_views=self.suite.confident_views), job.scenario
        batches = scenario.batches(pack.dataset, pack.labels, job.run)
        failed = []
        forward = forward_seconds(pack, batches) if self.suite.timing and "encoder" in pack.extras else {}
        for number in job.entries:
            entry = self.suite.entries[number]
            try:
                if entry.key not in known:
                    known[entry.key] = self._score(entry, pack, scenario, batches)
            except Exception as error:  # a method that fails does not stop the others
                failed.append(f"{entry.name} on {pack.dataset}, {scenario.id}: {error!r}")
                continue
            facts = _facts(self.suite, pack, scenario, job.run, entry)
            seed = list(scenario.seed(pack.dataset, job.run))
            self.log.write({**facts, **known[entry.key], **forward, "seed": seed, "environment": self.about})
        return len(job.entries) - len(failed), failed

    def _score(self, entry: Entry, pack: Pack, scenario: Scenario, batches: Sequence[IntArray]) -> Record:
        """Run a method; the first time it runs twice, so that no measured time includes imports and compilation."""
        method, compiled = entry.build(), find_spec("numba") is not None
        whole = self.suite.timing or pack.device != "cpu"  # a GPU compiles for every shape
        first = (entry.key, pack.hash, scenario.id) if whole or compiled else (entry.name, scenario.setting)
        if first not in _warm:
            some = batches if whole else batches[:1] if compiled else [batches[0][:8]]
            score(method, pack, some, scenario.setting)
            _warm.add(first)
        return score(method, pack, batches, scenario.setting)


_warm: set[tuple[Any, ...]] = set()  # what this process has run before


def forward_seconds(pack: Pack, batches: Sequence[IntArray]) -> Record:
    """Return the seconds of the encoder for the decoded images of a run and for the class texts."""
    encoder, store = pack.extras["encoder"], pack.features
    images = pack.extras["images"][np.concatenate(batches)]
    prompts = [template.format(name) for name in store.class_names for template in store.origin.prompts]
    encoder.encode_images(images[:1])  # loads and compiles
    start = time.perf_counter()
    encoder.encode_images(images)
    encoder.encode_text(prompts)
    return {"forward": round(time.perf_counter() - start, 6)}


def score(method: Method, pack: Pack, batches: Sequence[IntArray], setting: str) -> Record:
    """Run a method on the batches of one run, with a new state at the start of a stream, and score its predictions.

    Accuracy is the mean over batches; `correct` of `n` is the pooled one, `top5` of `n` that of the five most probable
    classes. The calibration error of several runs together can be computed from their `gaps`. Seconds are those of the
    method alone.

    >>> from moontide.registry import method
    >>> pack = Pack("toy", None, "", np.eye(3), np.eye(3), np.asarray([0, 1, 0]), 100.0)
    >>> scores = score(method("zero_shot"), pack, [np.arange(3)], "batch")
    >>> scores["accuracy"], scores["correct"], scores["n"]
    (0.666667, 2, 3)
    """
    online = as_online(method)
    state: Any = None
    seconds, hits, before, confidence, near = 0.0, [], [], [], 0
    for indices in batches:
        task, labels = pack.task(indices, method.needs), pack.labels[indices]
        start = time.perf_counter()
        if setting == "batch":
            result = method.fit_predict(task)
        else:
            if state is None:
                method.require(task)
                state = online.start(task)
            state, result = online.step(state, samples(method, task))
        predicted = to_numpy(result.labels)
        seconds += time.perf_counter() - start
        hits.append(predicted == labels)
        before.append(float(np.mean(to_numpy(result.zero_shot_labels) == labels)))
        confidence.append(to_numpy(result.confidence))
        probs = to_numpy(result.probs)  # (n, K)
        near += int(((probs > probs[np.arange(len(labels)), labels][:, None]).sum(axis=1) < TOP).sum())
    pooled = np.concatenate(hits)
    by_batch = [round(float(np.mean(hit)), 6) for hit in hits]
    scores = {
        "accuracy": round(float(np.mean([np.mean(hit) for hit in hits])), 6),
        "zero_shot": round(float(np.mean(before)), 6),
        "n": int(pooled.size),
        "correct": int(pooled.sum()),
        "top5": near,
        "gaps": calibration_gaps(pooled, np.concatenate(confidence)).round(6).tolist(),
        "seconds": round(seconds, 6),
    }
    return scores if setting == "batch" else {**scores, "batches": by_batch}
