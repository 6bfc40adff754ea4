"""The checks of online methods, one function each: the state is complete and stays small."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moontide.checks.tasks import Tasks, expect, expect_same
from moontide.core.arrays import to_numpy
from moontide.core.simplex import zero_shot
from moontide.protocols import OnlineMethod, State, change_classes, samples
from moontide.streams import load_state, save_state
from moontide.types import Result, Task


def _batches(m: OnlineMethod, task: Task, size: int = 10) -> Iterator[Any]:
    x = samples(m, task)
    return (x[start : start + size] for start in range(0, task.n, size))


def _run(m: OnlineMethod, state: State, batches: Iterator[Any]) -> tuple[State, Result]:
    results = []
    for x in batches:
        state, result = m.step(state, x)
        results.append(result)
    return state, Result.concatenate(results)


def _warm(m: OnlineMethod, tasks: Tasks) -> State:
    """Return a state after some samples."""
    task = tasks(seed=1)
    return _run(m, m.start(task), _batches(m, task))[0]


def _fields(state: State) -> dict[str, Any]:
    """Return the fields that are arrays or numbers."""
    return {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if not f.metadata.get("live")}


def check_cold_start(m: OnlineMethod, tasks: Tasks) -> None:
    """The first sample gets its zero-shot label: there is nothing yet to adapt to.

    >>> from moontide import method, protocols
    >>> check_cold_start(protocols.as_online(method("zero_shot")), Tasks())
    """
    task = tasks()
    wanted = zero_shot(task.features, task.text, task.logit_scale).argmax(axis=1)
    found = [int(m.step(m.start(task), x)[1].labels[0]) for x in _batches(m, task, size=1)]
    wrong = np.flatnonzero(np.asarray(found) != wanted)
    expect(wrong.size == 0, f"samples {wrong.tolist()}, each the first of a stream, do not get their zero-shot label")


def check_seen_is_counted(m: OnlineMethod, tasks: Tasks) -> None:
    """`seen` is the number of samples so far.

    >>> from moontide import method, protocols
    >>> check_seen_is_counted(protocols.as_online(method("zero_shot")), Tasks())
    """
    task = tasks(n=25)
    state, _ = _run(m, m.start(task), _batches(m, task))
    expect(state.seen == 25, f"after 25 samples 'seen' is {state.seen}")


def check_step_leaves_the_state(m: OnlineMethod, tasks: Tasks) -> None:
    """A step does not write to the state that it was given.

    >>> from moontide import method, protocols
    >>> check_step_leaves_the_state(protocols.as_online(method("zero_shot")), Tasks())
    """
    task = tasks()
    for state in (m.start(task), _warm(m, tasks)):
        before = _fields(state.fork())
        _run(m, state, _batches(m, task))
        for name, value in _fields(state).items():
            expect(np.array_equal(value, before[name]), f"step wrote to '{name}' of the state it was given")


def check_fork_is_independent(m: OnlineMethod, tasks: Tasks) -> None:
    """A fork shares no memory with its origin and goes on in the same way.

    >>> from moontide import method, protocols
    >>> check_fork_is_independent(protocols.as_online(method("zero_shot")), Tasks())
    """
    state = _warm(m, tasks)
    fork = state.fork()
    for name, value in _fields(state).items():
        shared = isinstance(value, np.ndarray) and np.shares_memory(value, getattr(fork, name))
        expect(not shared, f"the fork shares '{name}' with its origin")
    x = samples(m, tasks())
    expect_same(m.step(fork, x)[1], m.step(state, x)[1], 0.0, "a fork")


def check_state_is_all(m: OnlineMethod, tasks: Tasks) -> None:
    """A stream cut in two and continued by another object of the method is the same as one that was not cut.

    >>> from moontide import method, protocols
    >>> check_state_is_all(protocols.as_online(method("zero_shot")), Tasks())
    """
    task = tasks()
    _, whole = _run(m, m.start(task), _batches(m, task))
    first, second = list(_batches(m, task))[:2], list(_batches(m, task))[2:]
    state, before = _run(m, m.start(task), iter(first))
    _warm(m, tasks)  # another stream in between
    _, after = _run(copy.deepcopy(m), state, iter(second))
    expect_same(Result.concatenate([before, after]), whole, 0.0, "a stream cut in two")


def check_state_round_trips(m: OnlineMethod, tasks: Tasks) -> None:
    """A state written to a file and read again, with its method, goes on in the same way.

    >>> from moontide import method, protocols
    >>> check_state_round_trips(protocols.as_online(method("zero_shot")), Tasks())
    """
    state = _warm(m, tasks)
    live = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.metadata.get("live")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.safetensors"
        save_state(path, m, state)
        loaded_method, loaded = load_state(path, **live)
    expect(loaded_method == m, f"the file gives back the method {loaded_method}, not {m}")
    for name, value in _fields(state).items():
        found = getattr(loaded, name)
        same = np.array_equal(value, found) and np.asarray(value).dtype == np.asarray(found).dtype
        expect(same, f"'{name}' of the state is not the same after writing and reading it")
    x = samples(m, tasks())
    expect_same(loaded_method.step(loaded, x)[1], m.step(state, x)[1], 0.0, "a loaded state")


def check_the_state_that_follows(m: OnlineMethod, tasks: Tasks) -> None:
    """Where a method says what state follows without predicting, it is the one that a step returns, bit for bit.

    >>> from moontide import method, protocols
    >>> check_the_state_that_follows(protocols.as_online(method("zero_shot")), Tasks())
    """
    task = tasks()
    state, x = _warm(m, tasks), samples(m, task)
    labels = np.where(np.arange(task.n) % 3 == 0, np.arange(task.n) % task.k, -1)
    for known in (None, labels) if "known" in m.accepts else (None,):
        for n in (1, task.n):
            part = None if known is None else known[:n]
            found, (after, _) = m.follow(state, x[:n], part), m.step(state, x[:n], part)
            for name, value in {} if found is None else _fields(after).items():
                same = np.array_equal(to_numpy(value), to_numpy(getattr(found, name)))
                expect(same, f"'{name}' of the state that follows is not the one of the state after a step")


def check_memory_is_bounded(m: OnlineMethod, tasks: Tasks) -> None:
    """After a warm-up of 400 samples in two classes, 400 more do not make the state larger.

    >>> from moontide import method, protocols
    >>> check_memory_is_bounded(protocols.as_online(method("zero_shot")), Tasks())
    """
    task = tasks(n=800, k=2, d=8)
    state, sizes = m.start(task), []
    for x in _batches(m, task, size=40):
        state, _ = m.step(state, x)
        sizes.append(sum(np.asarray(value).nbytes for value in _fields(state).values()))
    half = len(sizes) // 2
    expect(max(sizes[half:]) <= max(sizes[:half]), f"the state grows: bytes after each 40 samples are {sizes}")


def check_classes_come_and_go(m: OnlineMethod, tasks: Tasks) -> None:
    """Classes can be added to a warm state and removed again, which leaves it as it was, and the stream goes on.

    >>> from moontide import method, protocols
    >>> check_classes_come_and_go(protocols.as_online(method("zero_shot")), Tasks())
    """
    task = tasks()
    x, k = samples(m, task), task.k
    state = _warm(m, tasks)
    more = change_classes(m, state, range(k), -task.text[:2, :])
    fewer = change_classes(m, state, range(1, k))
    for name, value in _fields(change_classes(m, more, range(k))).items():
        expect(np.allclose(value, getattr(state, name)), f"'{name}' is not the same after a class came and went")
    for changed, kind in ((more, "added"), (fewer, "removed")):
        start = m.start(dataclasses.replace(task, text=changed.text, class_names=None))
        for name, value in _fields(start).items():
            found, wanted = np.shape(getattr(changed, name)), np.shape(value)
            expect(found == wanted, f"'{name}' is {found} and not {wanted} after classes were {kind}; is it per_class?")
        after, result = m.step(m.step(changed, x)[0], x)
        expect(
            result.probs.shape == (task.n, len(changed.text)), f"probs are {result.probs.shape} after {kind} classes"
        )
        expect(bool(np.isfinite(to_numpy(result.probs)).all()), f"probs are not finite after classes were {kind}")
        expect(after.seen == state.seen + 2 * task.n, f"'seen' is {after.seen} after classes were {kind}")
