"""One stream: its method, its state, its window of recent samples, and how all of it comes back from the store.

A stream is at a `Moment`, which is never changed, only replaced by the next one; so whoever reads it, in any thread,
sees one state with the window and the counts that belong to it. `process` makes the next moment:

    step     state, answers = method.step(state, x)      x: the samples of all pushes of a micro-batch, in order
    append   the journal gets x, the answers get the answers, in one transaction
    replace  the stream is at the new moment, and the pushes are answered

Where the append fails the stream stays where it was and is read from the store again. Loading takes the checkpoint and
steps through the records after it, the same `x` each, so on the same machine every array is the same to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from moontide.core.arrays import Array, to_numpy, unit_rows
from moontide.core.memory import require_memory
from moontide.errors import InputError, MissingInputError, MoontideError
from moontide.protocols import Method, State, as_online
from moontide.serve.journal import Push, Record, Saved, Snapshot, Store, StoreError
from moontide.store.files import place
from moontide.streams import read_state, state_bytes, unpack
from moontide.types import Result, Task

Floats = npt.NDArray[np.float32]
Answers = npt.NDArray[np.void]  # (n,) of the type below

ANSWER = np.dtype(
    [("label", "<i4"), ("confidence", "<f4"), ("zero_shot_label", "<i4"), ("zero_shot_confidence", "<f4")]
)
CHECKPOINT_RECORDS, CHECKPOINT_BYTES = 256, 2**26  # a checkpoint is due after so many records, or bytes of them


class TakenError(MoontideError):
    """A name is taken."""


class GoneError(MoontideError):
    """What is asked for is not there, or no more."""


@dataclasses.dataclass(frozen=True)
class Config:
    """What a stream was made with.

    >>> Config.read(Config("moon", {}, ("cat", "dog"), 512, 100.0).write()).class_names
    ('cat', 'dog')
    """

    method: str
    options: dict[str, Any]
    class_names: tuple[str, ...]
    dim: int
    logit_scale: float
    source: str = "prototypes"  # or the id of the encoder that embedded the class names, or "simulated"
    max_batch: int = 64
    max_wait_ms: float = 10.0
    window: int = 512
    created: float = 0.0

    def write(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Config:
        """Read it from JSON."""
        values = json.loads(text)
        return cls(**{**values, "class_names": tuple(values["class_names"])})


class Item(NamedTuple):
    """A push on its way: checked embeddings, and its idempotency key with a checksum of what was sent."""

    x: Floats  # (n, d)
    key: str | None = None
    crc: int = 0


class Answer(NamedTuple):
    """What a push is answered with: the number of its first sample, and a prediction for each."""

    first: int
    rows: Answers  # (n,)
    repeated: bool = False  # the push was answered before, and this is that answer


class Tally(NamedTuple):
    """Counts over all samples in a state, and the last beta."""

    counts: npt.NDArray[np.int64]  # (2, K) predictions of each class: adapted, zero-shot
    changed: int  # samples whose prediction differs from zero-shot
    beta: Floats | None  # (K,) of the last micro-batch, for methods that have one

    def add(self, rows: Answers, beta: Array | None) -> Tally:
        """Count the predictions of a micro-batch."""
        k = self.counts.shape[1]
        labels = rows["label"], rows["zero_shot_label"]
        counts = self.counts + np.stack([np.bincount(column, minlength=k) for column in labels])
        changed = self.changed + int(np.count_nonzero(labels[0] != labels[1]))
        return Tally(counts, changed, None if beta is None else to_numpy(beta).astype(np.float32))

    def write(self) -> bytes:
        """Return it as bytes."""
        arrays = {"counts": self.counts, "changed": np.asarray(self.changed)}
        data: bytes = save(arrays if self.beta is None else {**arrays, "beta": self.beta})
        return data

    @classmethod
    def read(cls, data: bytes) -> Tally:
        """Read it from bytes.

        >>> Tally.read(Tally(np.zeros((2, 3), np.int64), 4, None).write()).changed
        4
        """
        arrays = load(data)
        return cls(arrays["counts"], int(arrays["changed"]), arrays.get("beta"))


class Moment(NamedTuple):
    """Where a stream is."""

    state: State
    tally: Tally
    seq: int  # records of the journal so far
    total: int  # samples so far, also those before a reset
    window: tuple[Floats, ...]  # the last micro-batches, `Config.window` samples or a few more

    @property
    def kept(self) -> int:
        """The number of samples in the window."""
        return sum(map(len, self.window))


def answers_of(result: Result) -> Answers:
    """Return the predictions of a result as one record a sample.

    >>> answers_of(Result(probs=np.asarray([[0.25, 0.75]]), zero_shot=np.asarray([[0.5, 0.5]]))).tolist()
    [(1, 0.75, 0, 0.5)]
    """
    rows = np.empty(len(result.labels), ANSWER)
    before = to_numpy(result.zero_shot)
    rows["label"], rows["confidence"] = to_numpy(result.labels), to_numpy(result.confidence)
    rows["zero_shot_label"], rows["zero_shot_confidence"] = to_numpy(result.zero_shot_labels), before.max(axis=1)
    return rows


class Stream:
    """A stream and its store. `load`, `process`, `checkpoint` and `restore` are called one after the other."""

    def __init__(self, name: str, config: Config, store: Store, method: Method, device: str, keep: int) -> None:
        """Name what is needed to `load` the stream; `keep`: samples whose answers and keys are kept."""
        self.name, self.config, self.store, self.keep = name, config, store, keep
        self.method, self.online = method, as_online(method)
        self.ref = None if device == "cpu" else place(np.zeros(1, np.float32), None, device)
        self.moment: Moment | None = None  # None: to be read from the store
        self.since = [0, 0]  # records and bytes after the checkpoint

    @classmethod
    def create(
        cls, name: str, config: Config, text: Array, store: Store, method: Method, device: str, keep: int
    ) -> Stream:
        """Make a stream at its start, and add it to the store."""
        if method.needs:
            raise MissingInputError(
                f"The method {method.name} needs {', '.join(sorted(method.needs))} of every sample, "
                "which a stream does not get; choose another method."
            )
        stream = cls(name, config, store, method, device, keep)
        text = place(text, "float32", device)
        most = max(config.max_batch, config.window)
        k, d = text.shape
        require_memory(method.peak_bytes(most, k, d, 4), f"{method.name} on {most} samples and {k} classes", text)
        state = stream.online.start(Task(text[:1, :], text, config.logit_scale))
        stream.online.step(state, text[:1, :])  # what a step refuses is refused now
        tally = Tally(np.zeros((2, k), np.int64), 0, None)
        store.create(name, config.write(), state_bytes(method, state), tally.write())
        stream.moment = Moment(state, tally, 0, 0, ())
        return stream

    def load(self) -> Moment:
        """Return where the stream is, read from the store where that is not known."""
        if self.moment is None:
            saved, inside, after = self.store.load(self.name)
            moment = self.at(saved, tuple(self.embeddings(record) for record in inside))
            for record in after:
                moment, _ = self.step(moment, self.embeddings(record))
            self.moment = moment
            self.since = [len(after), sum(len(record.x) for record in after)]
        return self.moment

    def at(self, saved: Saved, window: tuple[Floats, ...]) -> Moment:
        """Return the moment of a saved state."""
        _, state = read_state(*unpack(saved.state, self.name), self.name, self.ref)
        return Moment(state, Tally.read(saved.tally), saved.seq, saved.total, window)

    def embeddings(self, record: Record) -> Floats:
        """Return the samples of a record, (n, d)."""
        return np.frombuffer(record.x, "<f4").reshape(record.size, self.config.dim).copy()

    def step(self, moment: Moment, x: Floats) -> tuple[Moment, Answers]:
        """Return the moment after the samples x (n, d), and what is predicted for them."""
        state, result = self.online.step(moment.state, x)
        rows = answers_of(result)
        window = (*moment.window, x)
        extra = sum(map(len, window)) - self.config.window
        while extra >= len(window[0]):  # the oldest batch is wholly outside
            extra -= len(window[0])
            window = window[1:]
        tally = moment.tally.add(rows, result.beta)
        return Moment(state, tally, moment.seq + 1, moment.total + len(x), window), rows

    def process(self, items: Sequence[Item]) -> list[Answer | Exception]:
        """Answer pushes by one step over those that were not answered before."""
        moment = self.load()
        keys = [item.key for item in items if item.key is not None]
        known = self.store.keyed(self.name, keys) if keys else {}
        fresh: list[Item] = []
        new: list[tuple[str, Push]] = []
        starts: list[int | None] = []  # the number of the first sample of each push, None where it is a repeat
        total = moment.total
        for item in items:
            starts.append(None if item.key in known else total)
            if starts[-1] is None:
                continue
            fresh.append(item)
            if item.key is not None:
                known[item.key] = Push(total, len(item.x), item.crc)
                new.append((item.key, known[item.key]))
            total += len(item.x)
        rows = self.advance(moment, fresh, new) if fresh else np.empty(0, ANSWER)
        return [
            self.repeat(item, known[str(item.key)])
            if first is None
            else Answer(first, rows[first - moment.total :][: len(item.x)])
            for item, first in zip(items, starts, strict=True)
        ]

    def advance(self, moment: Moment, items: Sequence[Item], keys: Sequence[tuple[str, Push]]) -> Answers:
        """Take one step over the samples of pushes, write it down, and only then be there."""
        x = np.concatenate([item.x for item in items])  # (n, d)
        after, rows = self.step(moment, x)
        record = Record(after.seq, moment.total, len(x), x.tobytes())
        try:
            self.store.append(self.name, record, rows.tobytes(), keys)
        except StoreError:
            self.moment = None
            raise
        self.moment = after
        self.since = [self.since[0] + 1, self.since[1] + x.nbytes]
        return rows

    def repeat(self, item: Item, push: Push) -> Answer | Exception:
        """Return the first answer to a push that came before."""
        if (push.size, push.crc) != (len(item.x), item.crc):
            return InputError(
                f"'Idempotency-Key' {item.key!r} was used before for another push; use a new key for new samples."
            )
        return Answer(push.first, self.predictions(push.first, push.size)[1], repeated=True)

    def predictions(self, first: int, count: int) -> tuple[int, Answers]:
        """Return what was answered for samples by their numbers; the first is the first still kept."""
        parts = self.store.answers(self.name, first, first + count)
        if not parts:
            return first, np.empty(0, ANSWER)
        start = parts[0][0]
        rows = np.concatenate([np.frombuffer(part, ANSWER) for _, part in parts])
        begin = max(first, start)
        return begin, rows[begin - start : first + count - start]

    def revise(self, moment: Moment) -> tuple[int, Answers, Array | None]:
        """Predict the samples of the window again with the state of a moment; returns the first's number, and beta.

        It is one step over the window's samples from that state; the state after the step is thrown away.
        """
        x = self.window_of(moment)
        _, result = self.online.step(moment.state, x)
        return moment.total - len(x), answers_of(result), None if result.beta is None else to_numpy(result.beta)

    def flat_map(self, moment: Moment) -> tuple[int, npt.NDArray[np.float64], Answers]:
        """Return the number of the window's first sample, a place in the plane (n, 2) and the answer for each."""
        flat = flat_map(self.window_of(moment))
        first, rows = self.predictions(moment.total - len(flat), len(flat))
        return first, flat[len(flat) - len(rows) :], rows

    def window_of(self, moment: Moment) -> Floats:
        """Return the last samples of a moment, (n, d)."""
        if not moment.window:
            raise InputError("The window is empty; push samples first.")
        return np.concatenate(moment.window)[-self.config.window :]

    @property
    def due(self) -> bool:
        """Whether a checkpoint should be made, so that the journal stays short."""
        return self.since[0] >= CHECKPOINT_RECORDS or self.since[1] >= CHECKPOINT_BYTES

    def checkpoint(self) -> None:
        """Save the state, and drop records outside the window and answers that are no longer kept."""
        if self.since[0]:
            moment = self.load()
            self.write_checkpoint(moment, moment.total - self.config.window)

    def write_checkpoint(self, moment: Moment, x_from: int) -> None:
        """Make a moment the one to go on from."""
        self.store.checkpoint(self.name, self.saved(moment), x_from=x_from, answers_from=moment.total - self.keep)
        self.since = [0, 0]

    def saved(self, moment: Moment) -> Saved:
        """Return a moment as the store keeps it."""
        state = state_bytes(self.method, moment.state)
        return Saved(moment.seq, moment.total, moment.state.seen, state, moment.tally.write())

    def take_snapshot(self) -> Snapshot:
        """Keep the state as it is now under a new number."""
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


def flat_map(x: Floats) -> npt.NDArray[np.float64]:
    """Project samples (n, d) onto the two directions in which they differ most, (n, 2), the same way every time.

    >>> flat_map(np.asarray([[1, 0], [1, 0], [0.6, 0.8]], np.float32))[:, 0].round(2)
    array([-0.3, -0.3,  0.6])
    """
    x = unit_rows(x).astype(np.float64)
    x = x - x.mean(axis=0)
    _, axes = np.linalg.eigh(x.T @ x)
    axes = np.pad(axes, ((0, 0), (max(0, 2 - x.shape[1]), 0)))[:, :-3:-1]  # (d, 2) largest first; d = 1: one is 0
    largest = np.abs(axes).argmax(axis=0)
    flat: npt.NDArray[np.float64] = x @ (axes * np.where(axes[largest, [0, 1]] < 0, -1, 1))
    return flat
