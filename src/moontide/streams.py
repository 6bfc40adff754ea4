"""Streams of samples that come one by one or in small batches, labelled by any method as they come.

Answers come in the order of the samples. A stream holds the state of the method, whose size does not depend on the
length of the stream, and the samples that wait for their batch to fill. `run_stream` labels the samples of a task in
their order; `save_state` and `load_state` of `store.states` write and read its state.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moontide.core.arrays import Array, device, like, namespace
from moontide.errors import FileError, InputError, MissingInputError, OptionError, unknown_name
from moontide.protocols import Method, State, as_online, change_classes, copy_array, renumber, samples
from moontide.registry import DEFAULT
from moontide.registry import method as make_method
from moontide.store import states
from moontide.store.disk import replacing
from moontide.store.states import load_state, save_state, saved_batch_size
from moontide.types import Result, Task, check_class_names

__all__ = ["Stream", "load_state", "run_stream", "save_state", "saved_batch_size"]

WAITING, WAITING_KNOWN = "stream.waiting", "stream.waiting_known"


class Stream:
    """Feeds samples to a method as they come; not to be shared between threads.

    batch_size: samples of a micro-batch; None: every push is one.
    max_wait: seconds after which samples that wait are labelled in a smaller batch, looked at by `push` and `poll`.

    >>> import numpy as np
    >>> stream = Stream("tda", np.eye(3), class_names=["ant", "bee", "cat"], batch_size=2)
    >>> stream.push([[1, 0, 0.5]]).labels, stream.waiting
    (array([], dtype=int64), 1)
    >>> stream.push([[0, 1, 0.5]]).labels, stream.waiting
    (array([0, 1]), 0)
    >>> stream.remove_classes(["ant"])
    >>> stream.push([[1, 0, 0.5], [1, 0.5, 0]]).labels, stream.class_names
    (array([1, 0]), ('bee', 'cat'))
    """

    def __init__(
        self,
        method: Method | str = DEFAULT,
        text: Array | None = None,
        *,
        class_names: Sequence[str] | None = None,
        logit_scale: float = 100.0,
        batch_size: int | None = None,
        max_wait: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        class_prior: Array | None = None,
        negatives: Array | None = None,
        **extras: Any,
    ) -> None:
        """Begin a stream over the classes of `text` (K, d); `extras` is what a method needs once, such as `encoder`.

        `Stream(text=anchors)` runs the default method, `Stream("tda", anchors)` another one. `class_prior` (K,) and
        `negatives` (M, d) are as in `fit_predict`.
        """
        if text is None:
            how = "Stream(text=anchors) or, with another method, Stream('tda', anchors)"
            raise InputError(f"'text' is missing: pass the embeddings of the class names, as in {how}.")
        chosen = make_method(method) if isinstance(method, str) else method
        missing = sorted(chosen.needs - {"views", "images"} - extras.keys())
        if missing:
            raise MissingInputError(f"The method {chosen.name} needs {' and '.join(missing)}: pass {missing[0]}=...")
        inputs = {"class_names": class_names, "class_prior": class_prior, "negatives": negatives}
        task = Task.of_classes(text, logit_scale, extras=extras, **inputs)
        for name in ("class_prior", "negatives"):
            if getattr(task, name) is not None:
                chosen.require_accepted(name)
        if batch_size is not None and not (isinstance(batch_size, int) and batch_size >= 1):
            raise OptionError(f"'batch_size' must be an integer of at least 1, or None. Got {batch_size!r} instead.")
        if max_wait is not None and batch_size is None:
            raise OptionError("'max_wait' has no effect without 'batch_size': nothing waits. Leave it out.")
        if max_wait is not None and not max_wait >= 0:
            raise OptionError(f"'max_wait' must be a number of seconds of at least 0, or None. Got {max_wait!r}.")
        self.method, self.class_names = as_online(chosen), task.class_names
        self.state = self.method.start(task)
        self.batch_size, self.max_wait, self._clock, self._since = batch_size, max_wait, clock, clock()
        self._rows: Any = None  # samples that wait
        self._known: Any = None  # their known labels

    @property
    def waiting(self) -> int:
        """How many samples wait for their batch to fill."""
        return 0 if self._rows is None else len(self._rows)

    @property
    def seen(self) -> int:
        """How many samples were labelled."""
        return self.state.seen

    def push(self, x: Any, known: Array | None = None) -> Result:
        """Take samples (n, d), or views or images, and return the answers that are ready, oldest first.

        `known` (n,) has the class numbers of samples whose label is known, -1 for the others. Where it raises an error,
        the stream is as it was before.
        """
        x = self.method.check(self.state, x)
        if known is not None:
            known = self.method.check_known(self.state, x, known)
        if known is not None or self._known is not None:
            xp, where = namespace(self.state.text), device(self.state.text)
            both = (self._known, self.waiting), (known, len(x))
            known = xp.concat([xp.full((n,), -1, dtype=xp.int64, device=where) if k is None else k for k, n in both])
        if self._rows is not None:  # features or views, else a list of images
            x = namespace(x).concat([self._rows, x]) if hasattr(self._rows, "dtype") else [*self._rows, *x]
        return self._advance(x, known, whole=not self._late())

    def correct(self, x: Any, known: Array, before: Array | None = None) -> None:
        """Give the method the labels (n,) of samples (n, d) that were answered before, for the next answers to use.

        `before` are the labels that they had so far, -1 where none, which no longer count. Samples that still wait are
        not answered yet: they are not looked for, and count as others would.
        """
        self.state = self.method.correct(self.state, x, known, before)

    def poll(self) -> Result:
        """Return answers to the samples that wait if the oldest has waited `max_wait` seconds."""
        return self.flush() if self._late() else self._nothing()

    def flush(self) -> Result:
        """Return answers to all samples that wait."""
        return self._advance(self._rows, self._known, whole=False)

    def _late(self) -> bool:
        return self.waiting > 0 and self.max_wait is not None and self._clock() - self._since >= self.max_wait

    def _advance(self, rows: Any, known: Array | None, whole: bool) -> Result:
        """Label `rows` in micro-batches, only in `whole` ones or all of them, and keep the others waiting."""
        n = 0 if rows is None else len(rows)
        size = self.batch_size or max(n, 1)
        done = n - n % size if whole else n
        state, results = self.state, []
        for at in (slice(start, start + size) for start in range(0, done, size)):
            state, result = self.method.advance(state, rows[at], None if known is None else known[at])
            results.append(result)
        if done or not self.waiting:
            self._since = self._clock()
        self.state, self._rows = state, None if done == n else copy_array(rows[done:])
        self._known = None if done == n or known is None else copy_array(known[done:])
        answers = Result.concatenate(results) if results else self._nothing()
        return dataclasses.replace(answers, class_names=self.class_names)

    def _nothing(self) -> Result:
        none = self.state.text[:0, :] @ self.state.text.T  # (0, K)
        return Result(none, none)

    def add_classes(self, text: Array, class_names: Sequence[str] | None = None) -> None:
        """Add the classes of `text` (A, d) after those there are; samples that wait are labelled with them too."""
        if (class_names is None) != (self.class_names is None):
            rule = "needs 'class_names', as the stream has them" if class_names is None else "takes no 'class_names'"
            raise InputError(f"'add_classes' {rule}.")
        k = self.state.text.shape[0]
        state = change_classes(self.method, self.state, range(k), text)
        names = () if class_names is None else check_class_names(class_names, state.text.shape[0] - k)
        self.state, self.class_names = state, self.class_names and (*self.class_names, *names)

    def remove_classes(self, classes: Sequence[int | str]) -> None:
        """Forget classes, by number or name; the numbers of those behind them move up."""
        k, names = self.state.text.shape[0], self.class_names or ()
        for which in classes:
            if isinstance(which, str) and which not in names:
                raise unknown_name("class", which, names)
            if not isinstance(which, str) and not 0 <= which < k:
                raise InputError(f"'classes' must be numbers from 0 to {k - 1}, or names. Got {which} instead.")
        gone = {names.index(which) if isinstance(which, str) else which for which in classes}
        keep = [i for i in range(k) if i not in gone]
        if not keep:
            raise InputError(f"A stream needs at least one class. Got all {k} to remove; add others first.")
        self.state = change_classes(self.method, self.state, keep)
        if self._known is not None:
            self._known = renumber(self._known, keep, k)
        self.class_names = self.class_names and tuple(self.class_names[i] for i in keep)

    def save(self, path: str | Path) -> None:
        """Write the stream, with what waits, to a state file, whose state `load_state` reads too."""
        if self.waiting and "images" in self.method.needs:
            raise InputError(f"{self.waiting} images wait, which a state file cannot hold; call flush() first.")
        settings = {"class_names": self.class_names, "batch_size": self.batch_size, "max_wait": self.max_wait}
        waiting = {WAITING: self._rows, WAITING_KNOWN: self._known}
        arrays = {name: x for name, x in waiting.items() if x is not None}
        with replacing(path) as handle:
            handle.write(states.state_bytes(self.method, self.state, {"stream": json.dumps(settings)}, arrays))

    @classmethod
    def load(
        cls, path: str | Path, ref: Array | None = None, clock: Callable[[], float] = time.monotonic, **live: Any
    ) -> Stream:
        """Read a stream that `save` wrote; what waits begins to wait again. `ref` and `live` are as in `load_state`."""
        metadata, arrays = states.unpack_state(states.read_file(path), str(path))
        if "stream" not in metadata:
            raise FileError(f"{path} is a state without a stream; load it by moontide.streams.load_state.")
        method, state = states.read_state(metadata, arrays, str(path), ref, **live)
        settings = json.loads(metadata["stream"])
        stream = cls(method, state.text, logit_scale=state.logit_scale, clock=clock, **settings, **live)
        rows, known = (states.restore(arrays[x], ref) if x in arrays else None for x in (WAITING, WAITING_KNOWN))
        stream.state, stream._rows, stream._known = state, rows, known
        return stream


def run_stream(
    method: Method, task: Task, batch_size: int, *, state: State | None = None, drop_last: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[State, Result]:  # fmt: skip
    """Feed the samples of a task to a method in their order, `batch_size` at a time, and join the answers.

    A batch method labels every batch on its own. `state` is where to go on from, `drop_last` leaves out samples at the
    end that do not fill a batch, and `progress` is called with the number of samples done and of all.

    >>> import moontide, numpy as np
    >>> rng = np.random.default_rng(0)
    >>> state, result = run_stream(moontide.method("tda"), Task(rng.normal(size=(10, 8)), np.eye(8)), 4)
    >>> state.seen, result.probs.shape
    (10, (10, 8))
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise OptionError(f"'batch_size' must be an integer of at least 1. Got {batch_size!r} instead.")
    n = task.n - task.n % batch_size if drop_last else task.n
    if n == 0:
        how = f"of {task.n} samples in batches of {batch_size}; use smaller batches"
        raise InputError(f"'drop_last' leaves nothing {how}.")
    online = as_online(method)
    online.require(task.rows(0, min(batch_size, n)))
    if state is None:
        state = online.start(task)
    else:
        states.check_state(online, state)
        states.check_same_classes(state, task)
    x, step = samples(online, task), online.step
    if x is task.features:  # checked with the task
        x, step = like(x, state.text), online.advance
    results = []
    for at in (slice(start, min(start + batch_size, n)) for start in range(0, n, batch_size)):
        state, result = step(state, x[at], None if task.known is None else task.known[at])
        results.append(result)
        if progress is not None:
            progress(at.stop, n)
    return state, Result.concatenate(results)
