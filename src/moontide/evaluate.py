"""Run methods on tasks and compare their answers with labels. Only this module and `metrics.py` see labels."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.answers import Answers
from moontide.core.arrays import is_torch_array, to_numpy
from moontide.errors import ImplausibleWarning, InputError, MissingInputError, MoontideError, OptionError
from moontide.memory import require_memory
from moontide.metrics import IntArray, accuracy
from moontide.plausible import doubt_labels
from moontide.protocols import Method
from moontide.registry import check_name
from moontide.registry import method as make_method
from moontide.store.files import read_task
from moontide.types import Result, Task

Progress = Callable[..., None]  # (done, of how many), and the group that was done where there are groups

log = logging.getLogger(__name__)

WARM_UP = 8  # samples of an unmeasured first run, which loads what a method imports when it is used


def run_batches(
    method: Method,
    task: Task,
    batch_size: int | None = None,
    *,
    shuffle_seed: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Label a task at once, or in independent batches: in file order, or drawn at random with `shuffle_seed`.

    The rows of the result are in file order either way.

    >>> task = Task(np.eye(3), np.eye(3))
    >>> run_batches(make_method("moon"), task, 2, shuffle_seed=0).labels
    array([0, 1, 2])
    """
    return run_groups(method, task, None, batch_size, shuffle_seed=shuffle_seed, progress=progress)


def run_groups(
    method: Method,
    task: Task,
    groups: Sequence[str] | None,
    batch_size: int | None = None,
    *,
    shuffle_seed: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Label every group of samples separately, at once or in batches; `groups` (N,) names the group of each sample.

    The rows of the result are in file order. None is one group of all.

    >>> task = Task(np.eye(3), np.eye(3))
    >>> run_groups(make_method("moon"), task, ["a", "b", "a"]).labels
    array([0, 1, 2])
    """
    parts = split_rows(task.n, groups, batch_size, shuffle_seed)
    if len(parts) == 1 and shuffle_seed is None:
        return method.fit_predict(task)
    need = 3 * task.n * task.k * task.features.dtype.itemsize  # probs, zero-shot and native scores of all parts
    require_memory(need, f"The answer of {method.name} on {task.n} x {task.k}", task.features)
    results: list[Result] = []
    done = 0
    for rows in parts:
        first, last = int(rows[0]), int(rows[-1]) + 1
        consecutive = np.array_equal(rows, np.arange(first, last))
        result = method.fit_predict(task.rows(first, last) if consecutive else task.take(rows))
        results.append(replace(result, objective=(), kappa=None, beta=None, details={}))
        done += len(rows)
        if progress:
            progress(done, task.n, *(() if groups is None else (groups[first],)))
    log.info("%s labelled %d samples in %d parts", method.name, task.n, len(parts))
    joined, order = Result.concatenate(results), np.concatenate(parts)
    if np.array_equal(order, np.arange(task.n)):
        return joined
    back = np.argsort(order)
    native, unknown = (None if x is None else x[back] for x in (joined.native_scores, joined.unknown))
    probs, zero_shot = joined.probs[back], joined.zero_shot[back]
    return replace(joined, probs=probs, zero_shot=zero_shot, native_scores=native, unknown=unknown)


def split_rows(
    n: int, groups: Sequence[str] | None = None, batch_size: int | None = None, shuffle_seed: int | None = None
) -> list[IntArray]:
    """Return which of n rows are labelled together: those of a group, in file order or shuffled, cut into batches.

    >>> [part.tolist() for part in split_rows(5, ["b", "a", "b", "b", "a"], 2)]
    [[0, 2], [3], [1, 4]]
    """
    if batch_size is None and shuffle_seed is not None:
        raise OptionError("'shuffle' has no effect without 'batch_size', since each group is one batch.")
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"'batch_size' must be at least 1. Got {batch_size} instead.")
    if shuffle_seed is not None and shuffle_seed < 0:
        raise OptionError(f"'seed' must be at least 0. Got {shuffle_seed} instead.")
    order: IntArray = np.arange(n) if shuffle_seed is None else np.random.default_rng(shuffle_seed).permutation(n)
    members = [order]
    if groups is not None:
        number = {name: i for i, name in enumerate(dict.fromkeys(groups))}  # in the order in which they come
        which = np.asarray([number[name] for name in groups])
        if which.shape != (n,):
            raise InputError(f"'groups' must have one name for each of the {n} samples. Got {which.size} instead.")
        grouped = order[np.argsort(which[order], kind="stable")]
        members = np.split(grouped, np.cumsum(np.bincount(which))[:-1])
    return [rows[i : i + (batch_size or n)] for rows in members for i in range(0, len(rows), batch_size or n)]


@dataclass(frozen=True)
class Comparison:
    """Comparison of a result with zero-shot, and with labels if there are any (otherwise None).

    >>> Comparison(samples=10, changed=4, better=2, worse=1).sideways
    1
    """

    samples: int
    changed: int  # predictions that differ from zero-shot
    zero_shot_accuracy: float | None = None  # from 0 to 1
    accuracy: float | None = None
    better: int | None = None  # wrong before, right now
    worse: int | None = None  # right before, wrong now

    @property
    def sideways(self) -> int | None:
        """Predictions that changed from one wrong class to another."""
        return None if self.better is None or self.worse is None else self.changed - self.better - self.worse


def compare_predictions(labels: IntArray | None, result: Result, rows: npt.ArrayLike | None = None) -> Comparison:
    """Count what adaptation changed, for better and for worse, in all samples or in some rows.

    >>> result = Result(probs=np.asarray([[0.0, 1.0], [0.0, 1.0]]), zero_shot=np.asarray([[1.0, 0.0], [0.0, 1.0]]))
    >>> compare_predictions(np.asarray([1, 1]), result)
    Comparison(samples=2, changed=1, zero_shot_accuracy=0.5, accuracy=1.0, better=1, worse=0)
    >>> compare_predictions(None, result, [1])
    Comparison(samples=1, changed=0, zero_shot_accuracy=None, accuracy=None, better=None, worse=None)
    """
    now, before = to_numpy(result.labels), to_numpy(result.zero_shot_labels)
    if rows is not None:
        some: IntArray = np.asarray(rows, dtype=np.int64)
        now, before, labels = now[some], before[some], None if labels is None else labels[some]
    changed = int(np.sum(now != before))
    if labels is None or not labels.size:
        return Comparison(now.size, changed)
    doubtful = doubt_labels(labels, before, result.probs.shape[1])
    if doubtful is not None:
        warnings.warn(doubtful, ImplausibleWarning, stacklevel=2)
    better, worse = (before != labels) & (now == labels), (before == labels) & (now != labels)
    return Comparison(
        now.size, changed, accuracy(labels, before), accuracy(labels, now), int(better.sum()), int(worse.sum())
    )


def scored_rows(task: Task, n: int | None = None, answers: Answers | None = None) -> IntArray:
    """Return which of the first n samples are scored: no label was given to the method, and the answer is a class.

    >>> scored_rows(Task(np.eye(2), np.eye(2), known=[-1, 1]))
    array([0])
    """
    rows = np.arange(task.n)[:n] if task.known is None else np.flatnonzero(to_numpy(task.known)[:n] < 0)
    return rows if answers is None else rows[(answers.labels == answers.classes)[rows]]


def compare_groups(
    labels: IntArray | None, result: Result, groups: Sequence[str], rows: npt.ArrayLike | None = None
) -> dict[str, Comparison]:
    """Compare every group (or some of its rows) with zero-shot, in the order of first appearance.

    >>> result = Result(probs=np.eye(2), zero_shot=np.eye(2)[::-1])
    >>> {name: found.changed for name, found in compare_groups(None, result, ["b", "a"]).items()}
    {'b': 1, 'a': 1}
    """
    counted = np.ones(len(groups), dtype=bool)
    if rows is not None:
        counted = np.isin(np.arange(len(groups)), rows)
    parts = split_rows(len(groups), groups)
    return {groups[part[0]]: compare_predictions(labels, result, part[counted[part]]) for part in parts}


@dataclass(frozen=True)
class Outcome:
    """The result of `compare_methods` for one method."""

    method: str
    status: str  # ran, skipped (something it needs is not in the file) or failed
    accuracy: float | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    changed: int | None = None
    better: int | None = None
    worse: int | None = None
    reason: str | None = None  # why it did not run


def compare_methods(
    features: str | Path,
    names: Iterable[str],
    *,
    batch_size: int | None = None,
    progress: Progress | None = None,
    **source: Any,
) -> list[Outcome]:
    """Run methods with their defaults on a features file (read with `source`), each in a separate process.

    Seconds are those of one run after an unmeasured one on a few samples. Peak memory is the most that the run added to
    the resident memory of its process (measured on Linux only) or, on cuda, to the memory allocated on the device;
    inputs and libraries are not counted.
    The best accuracy comes first, or without labels the fastest; a method that fails does not stop the others.

    >>> compare_methods("missing.npz", ["moon"])
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file missing.npz.
    """
    names = list(dict.fromkeys(names))
    for name in names:
        check_name(name)
    task = read_task(features, **source, questions=True).task  # refuses a bad file once, here
    split_rows(task.n, None, batch_size)
    outcomes = []
    for done, name in enumerate(names, 1):
        outcomes.append(_run_apart(name, {"features": str(features), "batch_size": batch_size, "source": source}))
        if progress:
            progress(done, len(names))
    return sorted(outcomes, key=lambda o: (o.status != "ran", -(o.accuracy or 0), o.seconds or 0, o.method))


def _run_apart(name: str, request: dict[str, Any]) -> Outcome:
    """Measure one method in a fresh interpreter, which answers with one line of JSON."""
    child = subprocess.run(
        [sys.executable, "-c", "from moontide.evaluate import _answer; _answer()"],
        input=json.dumps({"name": name, **request}, default=str),
        env={**os.environ, "PYTHONSAFEPATH": "1"},  # no modules from the working folder
        capture_output=True,
        text=True,
    )
    if child.returncode == 0:
        return Outcome(name, **json.loads(child.stdout.splitlines()[-1]))
    if child.returncode < 0:
        return Outcome(name, "failed", reason=f"Stopped by signal {-child.returncode}; 9 usually means no memory.")
    return Outcome(name, "failed", reason=(child.stderr.strip().splitlines() or ["It gave no reason."])[-1])


def _answer() -> None:
    request = json.load(sys.stdin)
    try:
        answer = _measure(**request)
    except MissingInputError as error:
        answer = {"status": "skipped", "reason": str(error)}
    except MoontideError as error:
        answer = {"status": "failed", "reason": str(error)}
    print(json.dumps(answer))


def _measure(name: str, features: str, batch_size: int | None, source: dict[str, Any]) -> dict[str, Any]:
    method = make_method(name)
    task, labels, _ = read_task(features, **source)
    method.fit_predict(task.rows(0, min(task.n, WARM_UP)))
    before = _memory(task, reset=True)
    start = time.perf_counter()
    result = run_batches(method, task, batch_size)
    to_numpy(result.labels)  # waits for the device
    seconds = time.perf_counter() - start
    after = _memory(task)
    found = asdict(compare_predictions(labels, result))
    kept = {key: found[key] for key in ("accuracy", "changed", "better", "worse")}
    peak = None if before is None or after is None else max(0, after - before)
    return {"status": "ran", "seconds": seconds, "peak_bytes": peak, **kept}


def _memory(task: Task, reset: bool = False) -> int | None:
    """Return the most bytes that were held since the last `reset`, on the device or in this process (Linux)."""
    if is_torch_array(task.features):
        import torch

        if reset:
            torch.cuda.reset_peak_memory_stats()
        return int(torch.cuda.max_memory_allocated())
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
