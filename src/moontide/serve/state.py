"""One stream: its method, its state, its window of recent samples, and how they are restored from the store.

A stream is at a `Moment`, which is never changed, only replaced by the next one. A reader in any thread therefore sees
a state with its own window and counts. `process` creates the next moment:

    advance  state, answers = method.step(state, x)      x: the samples of all pushes of a micro-batch, in order
    write    the journal gets x, the answers get the answers, in one transaction;
             the stream is at the new moment, and the pushes are answered

While one micro-batch is written, the next may take its step from the state after it. Where that state does not
depend on the answers (`follow`), it may do so while the step before is under way. Steps are written in order, and where
one fails, those after it are forgotten. A correction does the same with `state = method.correct(state, x, labels)`.
Where a step fails or its answers are not finite, and where the write fails, the stream stays where it was. Loading
takes the checkpoint and goes through the records after it, so on the same machine every array is the same to the last
bit.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import numpy as np

from moontide.core.arrays import Array, to_numpy
from moontide.core.devices import to_device
from moontide.errors import InputError, MissingInputError, MoontideError, ResourceError
from moontide.memory import require_memory
from moontide.projection import Map
from moontide.protocols import Method, OnlineMethod, State, as_online
from moontide.serve.models import MAX_PUSH
from moontide.serve.records import (
    ANSWER,
    PUSH,
    Answer,
    Answers,
    Config,
    Corrected,
    Correction,
    Floats,
    Item,
    Known,
    Labels,
    Tally,
    answers_of,
    key_of,
    pushes_in,
)
from moontide.serve.steppers import Job, Steppers
from moontide.serve.stream_store import Answered, Record, Saved, Snapshot, StoreError, StreamStore
from moontide.store.states import read_state, state_bytes, unpack_state
from moontide.types import Task

# a checkpoint is due after so many records, bytes of them, or seconds of steps, which reading them again takes too
LANDMARKS = 192  # samples of a window whose positions on the map are computed; others are placed near them
CHECKPOINT_RECORDS, CHECKPOINT_BYTES, CHECKPOINT_SECONDS = 4096, 2**26, 5.0

MAX_BESIDE = 2**29  # bytes that a step over the largest push may need where others are under way
MAX_STATE = 2**28  # bytes of a state beside the embeddings of its classes


class TakenError(MoontideError):
    """The name is already in use."""


class EmptyError(InputError):
    """A stream has no samples to work on yet."""


class GoneError(MoontideError):
    """The requested object does not exist, or no longer exists."""


class Moment(NamedTuple):
    """The current state of a stream, with its window and counts."""

    state: State
    tally: Tally
    seq: int  # records of the journal so far
    total: int  # samples so far, also those before a reset
    window: tuple[Floats, ...]  # the last micro-batches, `Config.window` samples or a few more

    @property
    def kept(self) -> int:
        """The number of samples in the window."""
        return sum(map(len, self.window))


class Taken(NamedTuple):
    """A step that is not yet written down."""

    items: Sequence[Item]
    x: Floats  # (n, d) the samples of the pushes
    known: Labels | None  # (n,)
    state: State  # after the step
    rows: Answers  # (n,)
    beta: Array | None
    seconds: float


def require_size(state: State, method: str) -> None:
    """Refuse a state that is too large to be written at every checkpoint.

    >>> import moontide
    >>> tda = moontide.method("tda")
    >>> require_size(tda.start(Task(np.eye(3), np.eye(3))), "tda")
    """
    size = sum(getattr(getattr(state, field.name), "nbytes", 0) for field in dataclasses.fields(state))
    if size - state.text.nbytes > MAX_STATE:
        raise ResourceError(
            f"The state of {method} for {state.text.shape[0]} classes of {state.text.shape[1]} dimensions takes "
            f"{size >> 20} MiB, which every checkpoint writes; the limit is {MAX_STATE >> 20} MiB beside the "
            "classes. Use another method or smaller options."
        )


def try_out(online: OnlineMethod, state: State) -> None:
    """Take two steps over one sample and forget them, so that no push waits for a method that is being compiled.

    >>> import moontide
    >>> tda = moontide.method("tda")
    >>> try_out(tda, tda.start(Task(np.eye(2), np.eye(2))))
    """
    for _ in range(2):  # arrays of the second state may be of another layout
        state, result = online.step(state, state.text[:1, :])
        answers_of(result)


class ServedStream:
    """A stream and its store. All that changes it is called one after the other; `advance` changes nothing."""

    def __init__(self, name: str, config: Config, store: StreamStore, method: Method, device: str, keep: int) -> None:
        """Set up the stream for `load`. `keep`: number of samples whose answers and keys are kept."""
        self.name, self.config, self.store, self.keep = name, config, store, keep
        self.method, self.online = method, as_online(method)
        self.ref = None if device == "cpu" else to_device(np.zeros(1, np.float32), None, device)
        self.moment: Moment | None = None  # None: to be read from the store
        self.since = [0, 0]  # records and bytes after the checkpoint
        self.spent = 0.0  # seconds of the steps after it
        self.keys: Known = {}
        self.steppers: Steppers | None = None
        self.map: tuple[int, int, Map] | None = None  # with the number of samples and the size of the window it is of
        self.timing: dict[str, float] = {}  # seconds of the parts of the last micro-batch

    @classmethod
    def create(
        cls, name: str, config: Config, text: Array, store: StreamStore, method: Method, device: str, keep: int
    ) -> ServedStream:
        """Create a stream at its start, and add it to the store."""
        stream = cls(name, config, store, method, device, keep)
        stream.add(stream.prepare(text, device))
        return stream

    def prepare(self, text: Array, device: str) -> Moment:
        """Return the moment before the first sample; what a step refuses is refused now."""
        method, config = self.method, self.config
        if method.needs:
            raise MissingInputError(
                f"The method {method.name} needs {', '.join(sorted(method.needs))} of every sample, "
                "which streams do not provide; choose another method."
            )
        text = to_device(text, "float32", device)
        most = max(config.max_batch, config.window)
        k, d = text.shape
        require_memory(method.peak_bytes(most, k, d, 4), f"{method.name} on {most} samples and {k} classes", text)
        try:
            state = self.online.start(Task(text[:1, :], text, config.logit_scale))
            require_size(state, method.name)
            try_out(self.online, state)
        except ResourceError:
            raise
        except MemoryError as error:
            raise ResourceError(f"{method.name} with these options needs more memory than is available.") from error
        return Moment(state, Tally(np.zeros((2, k), np.int64), 0, None), 0, 0, ())

    def add(self, moment: Moment) -> None:
        """Add the stream to the store, at a moment."""
        self.store.create(self.name, self.config.write(), state_bytes(self.method, moment.state), moment.tally.write())
        self.moment = moment

    def load(self) -> Moment:
        """Return the current moment, loaded from the store if necessary."""
        if self.moment is None:
            saved, inside, after, answered = self.store.load(self.name, self.keep)
            window = tuple(self.samples_of(record)[0] for record in inside if record.size)
            moment = self.at(saved, window)
            for record in after:
                moment = self.replay(moment, record)
            if not after:
                with suppress(MoontideError):  # a push will say it
                    try_out(self.online, moment.state)
            self.keys = {}
            for row in answered:
                self.keys |= pushes_in(row)
            self.moment = moment
            self.since = [len(after), sum(len(record.data) for record in after)]
        return self.moment

    def at(self, saved: Saved, window: tuple[Floats, ...]) -> Moment:
        """Return the moment of a saved state."""
        _, state = read_state(*unpack_state(saved.state, self.name), self.name, self.ref)
        return Moment(state, Tally.read(saved.tally), saved.seq, saved.total, window)

    def replay(self, moment: Moment, record: Record) -> Moment:
        """Return the moment after a record of the journal."""
        if record.size:
            return self.after(moment, self.step(moment.state, (), *self.samples_of(record)))
        m = len(record.data) // (24 + 4 * self.config.dim)
        _, labels, before = np.frombuffer(record.data, "<i8", 3 * m).reshape(3, m)
        x = np.frombuffer(record.data, "<f4", offset=24 * m).reshape(m, self.config.dim).copy()
        return moment._replace(state=self.online.correct(moment.state, x, labels, before), seq=record.seq)

    def samples_of(self, record: Record) -> tuple[Floats, Labels | None]:
        """Return the samples of a record, (n, d), and their known labels where there are some."""
        n, end = record.size, 4 * record.size * self.config.dim
        x = np.frombuffer(record.data, "<f4", n * self.config.dim).reshape(n, self.config.dim).copy()
        return x, np.frombuffer(record.data, "<i8", offset=end).copy() if len(record.data) > end else None

    def step(self, state: State, items: Sequence[Item], x: Floats, known: Labels | None) -> Taken:
        """Take one step over the samples x (n, d) of pushes."""
        start = time.perf_counter()
        after, result = self.online.step(state, x, known)
        rows = answers_of(result, known)
        return Taken(items, x, known, after, rows, result.beta, time.perf_counter() - start)

    def after(self, moment: Moment, taken: Taken) -> Moment:
        """Return the moment after a step."""
        window = (*moment.window, taken.x)
        extra = sum(map(len, window)) - self.config.window
        while extra >= len(window[0]):  # the oldest batch is wholly outside
            extra -= len(window[0])
            window = window[1:]
        tally = moment.tally.add(taken.rows, taken.beta)
        return Moment(taken.state, tally, moment.seq + 1, moment.total + len(taken.x), window)

    def process(self, items: Sequence[Item]) -> list[Answer | Exception]:
        """Answer pushes with one step over those that were not answered before.

        If that step is refused, each push takes a separate step, so that an invalid push fails alone.
        """
        answers: list[Answer | Exception | None] = [self.repeat(item) for item in items]
        fresh = [i for i, answer in enumerate(answers) if answer is None]
        unique: dict[object, int] = {}
        for i in fresh:  # a push may come twice in one batch
            unique.setdefault(items[i].key or i, i)
        groups = [list(unique.values())] if unique else []
        for group in groups:
            try:
                taken = self.advance([items[i] for i in group], self.load().state)
                for i, answer in zip(group, self.write(taken), strict=True):
                    answers[i] = answer
            except (InputError, ResourceError) as error:
                if len(group) == 1:
                    answers[group[0]] = error
                else:
                    groups += [[i] for i in group]
        for i in fresh:
            if answers[i] is None:
                first = answers[unique[items[i].key]]
                answers[i] = first if isinstance(first, Exception) else self.repeat(items[i])
        return [answer for answer in answers if answer is not None]

    def fresh(self, items: Sequence[Item], others: Sequence[Item]) -> bool:
        """Tell whether all pushes are new and different, also from others that are being written."""
        keys = [item.key for item in (*items, *others) if item.key is not None]
        return len(set(keys)) == len(keys) and not any(key_of(key) in self.keys for key in keys)

    @cached_property
    def number(self) -> int:
        """The number of the stream for the processes of the server."""
        return 0 if self.steppers is None else self.steppers.number()

    @cached_property
    def independent(self) -> bool:
        """Whether several steps may be taken at the same time, from states that are known without their answers."""
        need = self.method.peak_bytes(MAX_PUSH, len(self.config.class_names), self.config.dim, 4)
        known = type(self.online)._follow is not OnlineMethod._follow
        return known and self.ref is None and need <= MAX_BESIDE

    def follow(self, items: Sequence[Item], state: State) -> State | None:
        """Return the state after a step over the samples of pushes, without its answers, or None."""
        return self.online.follow(state, *joined(items))

    def advance(
        self, items: Sequence[Item], state: State, follow: Callable[[], State | None] | None = None, alone: bool = True
    ) -> Taken:
        """Take one step over the samples of pushes: here, or, where it is not `alone`, in a process of the server.

        `follow` returns the state after the step, where that does not depend on the answers.
        """
        x, known = joined(items)
        self.require_room(len(x), state)
        try:
            if self.steppers is None or follow is None or not self.independent:
                return self.step(state, items, x, known)
            with self.steppers.counted() as under_way:
                start = time.perf_counter()
                wanted = not alone or under_way > 1
                found = self.steppers.step(Job(self.number, self.method, state, x, known)) if wanted else None
                after = None if found is None else follow()
                if found is None or after is None:
                    return self.step(state, items, x, known)
                return Taken(items, x, known, after, *found, time.perf_counter() - start)
        except MemoryError as error:
            raise ResourceError(f"{len(x)} samples at once need more memory than is available; push fewer.") from error

    def require_room(self, n: int, state: State) -> None:
        """Refuse a step over n samples that does not fit into memory."""
        need = self.method.peak_bytes(n, len(self.config.class_names), self.config.dim, 4)
        require_memory(need, f"{self.method.name} on {n} samples", state.text)

    def write(self, taken: Taken) -> list[Answer]:
        """Write down a step from the current moment, and only then be there."""
        start, moment = time.perf_counter(), self.load()
        after, (items, x, known, _, rows, *_) = self.after(moment, taken), taken
        firsts = moment.total + np.cumsum([0, *(len(item.x) for item in items)])
        placed = list(zip(items, firsts[:-1].tolist(), strict=True))
        pushes = [(key_of(item.key), first, len(item.x), item.digest) for item, first in placed if item.key is not None]
        data = rows.tobytes() + np.array(pushes, PUSH).tobytes()
        journalled = x.tobytes() + (b"" if known is None else known.astype("<i8").tobytes())
        record = Record(after.seq, moment.total, len(x), journalled)
        self.append(after, record, [Answered(moment.total, len(x), data)])
        self.timing = {"step": taken.seconds, "journal": time.perf_counter() - start}
        self.spent += taken.seconds
        return [Answer(first, rows[first - moment.total :][: len(item.x)]) for item, first in placed]

    def append(self, after: Moment, record: Record, answered: Sequence[Answered]) -> None:
        """Write a record to the journal, and move to the moment after it."""
        try:
            self.store.append(self.name, record, answered)
        except StoreError:
            self.moment = None
            raise
        self.moment = after
        self.since = [self.since[0] + 1, self.since[1] + len(record.data)]
        for row in answered:
            self.keys |= pushes_in(row)

    def earlier(self, key: str | None, size: int, digest: bytes) -> int | None:
        """Return the first sample of a push or correction (size 0) that came before under a key, or None."""
        self.load()
        if key is None or (found := self.keys.get(key_of(key))) is None:
            return None
        if found[1:] != (size, digest):
            raise InputError(
                f"'Idempotency-Key' {key!r} was used before for another push; use a new key for new samples."
            )
        return found[0]

    def repeat(self, item: Item) -> Answer | Exception | None:
        """Return the first answer to a repeated push, or None if the push is new."""
        try:
            first = self.earlier(item.key, len(item.x), item.digest)
        except InputError as error:
            return error
        if first is None:
            return None
        start, rows = self.predictions(first, len(item.x))
        return Answer(start, rows, repeated=True)

    def correct(self, correction: Correction) -> Corrected:
        """Set true labels of samples in the window; the next step uses them."""
        samples, labels, key, digest = correction
        if self.earlier(key, 0, digest) is not None:
            return Corrected(samples, labels, repeated=True)
        self.online.require_accepted("known")
        moment = self.load()
        low = moment.total - moment.kept
        for number in samples[(samples < low) | (samples >= moment.total)][:1]:
            rule = f"has samples {low} to {moment.total - 1}" if moment.kept else "is empty"
            raise InputError(
                f"'samples' must be in the window of the stream, which {rule}. Got {number} instead; "
                "create streams with a larger 'window' to correct older ones."
            )
        x = np.concatenate(moment.window)[samples - low]  # (m, d)
        changed, before = [], np.full(len(samples), -1)  # what was known of them so far
        for row in self.store.answers(self.name, int(samples.min()), int(samples.max()) + 1):
            mine = (samples >= row.first) & (samples < row.first + row.size)
            if mine.any():
                rows = np.frombuffer(row.data, ANSWER, row.size).copy()
                before[mine] = rows["known"][samples[mine] - row.first]
                rows["known"][samples[mine] - row.first] = labels[mine]
                changed.append(row._replace(data=rows.tobytes() + row.data[rows.nbytes :]))
        after = moment._replace(state=self.online.correct(moment.state, x, labels, before), seq=moment.seq + 1)
        data = np.stack([samples, labels, before]).astype("<i8").tobytes() + x.tobytes()
        if key is not None:
            push = np.array([(key_of(key), changed[0].first, 0, digest)], PUSH)
            changed[0] = changed[0]._replace(data=changed[0].data + push.tobytes())
        self.append(after, Record(after.seq, moment.total, 0, data), changed)
        return Corrected(samples, labels)

    def predictions(self, first: int, count: int) -> tuple[int, Answers]:
        """Return earlier answers by sample number, from the first that is still kept."""
        parts = self.store.answers(self.name, first, first + count)
        if not parts:
            return first, np.empty(0, ANSWER)
        start = parts[0].first
        rows = np.concatenate([np.frombuffer(part.data, ANSWER, part.size) for part in parts])
        begin = max(first, start)
        return begin, rows[begin - start : first + count - start]

    def revise(self, moment: Moment) -> tuple[int, Answers, Array | None]:
        """Predict the samples of the window again with the state of a moment; return the first number, and beta.

        It is one step over the window's samples from that state; the state after the step is thrown away.
        """
        x = self.window_of(moment)
        self.require_room(len(x), moment.state)
        known = None
        if "known" in self.method.accepts:
            known = self.predictions(moment.total - len(x), len(x))[1]["known"].astype(np.int64)
            known = known if len(known) == len(x) and (known >= 0).any() else None
        _, result = self.online.step(moment.state, x, known)
        return moment.total - len(x), answers_of(result), None if result.beta is None else to_numpy(result.beta)

    def flat_map(self, moment: Moment) -> tuple[int, Floats, Answers]:
        """Return the number of the window's first sample, and a position on the map, (n, 2), and the answer of each."""
        x = self.window_of(moment)
        flat = self._map_at(moment.total, x).positions(x)
        first, rows = self.predictions(moment.total - len(flat), len(flat))
        return first, flat[len(flat) - len(rows) :], rows

    def _map_at(self, total: int, x: Floats) -> Map:
        """Return the map that a window belongs on: new samples are placed on it until half of the window is new."""
        if self.map is not None:
            made, size, found = self.map
            if 0 <= total - made < len(x) / 2 and len(x) < 2 * size:
                return found
        landmarks = np.linspace(0, len(x) - 1, min(len(x), LANDMARKS)).round().astype(np.int64)
        found = Map.of(x[landmarks])
        self.map = total, len(x), found
        return found

    def window_of(self, moment: Moment) -> Floats:
        """Return the samples in the window of a moment, (n, d)."""
        if not moment.window:
            raise EmptyError("The window is empty; push samples first.")
        return np.concatenate(moment.window)[-self.config.window :]

    @property
    def due(self) -> bool:
        """Whether a checkpoint is due, to keep the journal short."""
        records, size = self.since
        return records >= CHECKPOINT_RECORDS or size >= CHECKPOINT_BYTES or self.spent >= CHECKPOINT_SECONDS

    def checkpoint(self) -> None:
        """Save the state, and drop records outside the window and answers that are no longer kept."""
        if self.since[0]:
            moment = self.load()
            self.write_checkpoint(moment, moment.total - self.config.window)

    def write_checkpoint(self, moment: Moment, x_from: int) -> None:
        """Make a moment the current one."""
        oldest = moment.total - self.keep
        self.store.checkpoint(self.name, self.saved(moment), x_from=x_from, answers_from=oldest)
        self.since, self.spent = [0, 0], 0.0
        while self.keys and sum(next(iter(self.keys.values()))[:2]) <= oldest:
            del self.keys[next(iter(self.keys))]

    def saved(self, moment: Moment) -> Saved:
        """Return the stored form of a moment."""
        state = state_bytes(self.method, moment.state)
        return Saved(moment.seq, moment.total, moment.state.seen, moment.kept, state, moment.tally.write())

    def take_snapshot(self) -> Snapshot:
        """Save the current state under a new number."""
        number = self.store.snapshots(self.name)[-1].number + 1
        self.store.put_state(self.name, number, self.saved(self.load()))
        return self.store.snapshots(self.name)[-1]

    def delete_snapshot(self, number: int) -> None:
        """Drop a snapshot."""
        self.snapshot(number)
        self.store.delete_state(self.name, number)

    def restore(self, number: int) -> None:
        """Go back to a snapshot: its state and counts, an empty window; the numbers of samples go on."""
        saved = self.snapshot(number)
        now = self.load()
        moment = self.at(saved._replace(seq=now.seq, total=now.total), ())
        try:
            self.write_checkpoint(moment, now.total)
        except StoreError:
            self.moment = None
            raise
        self.moment = moment

    def snapshot(self, number: int) -> Saved:
        """Return a snapshot."""
        saved = self.store.state(self.name, number) if number >= 0 else None
        if saved is None:
            raise GoneError(f"The stream {self.name!r} has no snapshot {number}.")
        return saved


def joined(items: Sequence[Item]) -> tuple[Floats, Labels | None]:
    """Return the samples of pushes, (n, d), and their known labels (n,), -1 where not known; None: none of them is.

    >>> one, two = Item(np.zeros((1, 2), np.float32)), Item(np.ones((1, 2), np.float32), known=np.asarray([3]))
    >>> joined([one, two])[1], joined([one])[1]
    (array([-1,  3]), None)
    """
    x = np.concatenate([item.x for item in items]) if len(items) > 1 else items[0].x
    if all(item.known is None for item in items):
        return x, None
    none = np.full(len(x), -1)
    return x, np.concatenate([none[: len(item.x)] if item.known is None else item.known for item in items])
