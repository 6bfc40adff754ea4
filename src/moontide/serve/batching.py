"""The queue of pushes of a stream: ordered, gathered into micro-batches, and limited in length.

A push that finds the queue empty goes at once. Pushes that come while a micro-batch is under way make the next one: as
many whole pushes as fit into `GROWTH` times `max_batch` samples, or one push that is larger. While a micro-batch is
written to the journal, and its pushes answered, the next one takes its step. Where nothing is under way after a
micro-batch of several pushes, the next waits for as many, at most `max_wait_ms`. What else must happen in order, such
as a correction, a snapshot or a reset, waits in the same queue. Work that takes longer than `STEP_SECONDS` makes the
stream busy: waiting and new requests are refused until it is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moontide.errors import InputError, MoontideError, ResourceError
from moontide.protocols import State
from moontide.serve.encoding import encode_in_pieces
from moontide.serve.metrics import Metrics
from moontide.serve.records import Answer, Corrected, Correction, Item, columns, numbers
from moontide.serve.state import GoneError, Moment, ServedStream, Taken
from moontide.serve.steppers import MOST
from moontide.serve.stream_store import DamagedError, StoreError

MAX_LISTENERS = 64  # of a stream
LISTENER_EVENTS, LISTENER_BYTES = 256, 2**20  # how far one may fall behind before it is cut off
GROWTH, MAX_BATCH = 8, 4096  # several pushes make a micro-batch of at most so many times `max_batch`, and so many
STEP_SECONDS = 5.0
COMPILE_SECONDS = 60.0  # that loading and compiling a method may take besides

T = TypeVar("T")
log = logging.getLogger("moontide.serve")


class BusyError(MoontideError):
    """The stream or server is too busy; `retry_after` is the time to wait, in seconds."""

    def __init__(self, sentence: str, retry_after: int = 1) -> None:
        """Store the time to wait with the message."""
        super().__init__(sentence)
        self.retry_after = retry_after


class Listener(asyncio.Queue[bytes | None]):
    """Events that a listener has not received yet; None marks the end."""

    behind = 0  # bytes

    async def next(self) -> bytes | None:
        """Return the next event."""
        event = await self.get()
        self.behind -= len(event or b"")
        return event


class _Waiting(NamedTuple):
    work: Item | Callable[[], Any]  # a push, or a call that takes its turn
    done: asyncio.Future[Any]
    since: float
    last: bool  # whether the queue ends with it

    def answer(self, value: Any) -> None:
        if self.done.done():  # the client has left
            return
        if isinstance(value, Exception):
            self.done.set_exception(value)
        else:
            self.done.set_result(value)


class _UnderWay:
    """A micro-batch from the start of its step until its pushes are answered."""

    task: asyncio.Task[None]  # ends when they are answered, or refused
    after: Moment | None = None  # where the stream is when this step is written; None: it is not, or another one was

    def __init__(
        self,
        batch: list[_Waiting],
        before: Moment | _UnderWay,
        follow: Callable[[], State | None],
        step: asyncio.Future[Taken | None],
    ) -> None:
        """Set up; `follow` returns the state after the step without waiting for it, or None if it is not known."""
        self.batch, self.items, self.follow, self.step = batch, pushes_of(batch), follow, step
        self.before: Moment | _UnderWay | None = before  # the moment or micro-batch that it goes on from
        self.since = asyncio.get_running_loop().time()

    def state(self) -> State | None:
        """Return the state after the step, also before it is done; None where it fails."""
        if self.step.done():
            failed = self.step.cancelled() or self.step.exception() is not None
            taken = None if failed else self.step.result()
            return None if taken is None else taken.state
        return self.follow()


class PushQueue:
    """Takes pushes and calls for a stream, and runs them in order on threads of its own."""

    def __init__(
        self,
        stream: ServedStream,
        metrics: Metrics,
        max_waiting: int,
        thread: ThreadPoolExecutor | None = None,
        failed: Callable[[StoreError], None] | None = None,
    ) -> None:
        """Start the queue. `max_waiting`: the most waiting samples; `failed` is called with store failures."""
        self.stream, self.metrics, self.max_waiting, self.failed = stream, metrics, max_waiting, failed
        self.thread = thread or threads(stream.name)
        self.waiting: deque[_Waiting] = deque()
        self.samples = 0  # that wait or are under way
        self.rate = 1000.0  # samples a second, as measured
        self.before = 1  # pushes in the micro-batch before
        self.late: list[float] = []  # since when work takes too long
        self.listeners: set[Listener] = set()
        self.queued, self.calls = 0, 0  # samples and calls that wait
        self._under_way: list[_UnderWay] = []  # in order
        self._held: list[_Waiting] = []  # a micro-batch that waits for those under way
        self._changed = asyncio.Event()  # something came, or a step is done
        self._ending = False
        self._task = asyncio.create_task(self._work())

    @property
    def steps(self) -> int:
        """How many steps of this stream may be under way at the same time: its share of the cores."""
        steppers = self.stream.steppers
        return steppers.share if steppers is not None and self.stream.independent else 1

    @property
    def busy(self) -> float | None:
        """Since when work takes too long; None: it does not."""
        return min(self.late, default=None)

    def push(self, item: Item) -> asyncio.Future[Answer]:
        """Put a push in the queue."""
        self.admit(len(item.x))
        return self._enqueue(item)

    def admit(self, samples: int) -> None:
        """Refuse a push of this many samples if the queue is full or the stream is busy."""
        if self.busy is not None:
            raise self._busy()
        if self.samples and self.samples + samples > self.max_waiting:
            raise BusyError(
                f"{self.samples} samples are waiting for the stream already, of at most {self.max_waiting}; try again.",
                min(60, max(1, math.ceil(self.samples / self.rate))),
            )

    async def correct(self, correction: Correction) -> Corrected:
        """Put a correction in the queue, and notify the listeners."""
        done = await self.call(lambda: self.stream.correct(correction))
        if not done.repeated:
            await self.tell("known", {"samples": done.samples.tolist(), "known": known_of(done.labels)})
        return done

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function after everything that came before it, and before everything after it."""
        if self.busy is not None:
            raise self._busy()
        result: T = await self._enqueue(function)
        return result

    async def end(self, function: Callable[[], None], *, now: bool = False) -> None:
        """Call a function as the last step: after everything that waits, or `now`, refusing what waits."""
        if self.busy is not None:
            raise self._busy()
        await self._enqueue(function, last=True, now=now)
        await self._task
        self.thread.shutdown(wait=False)

    async def moment(self) -> Moment:
        """Return the current moment of the stream, once it is loaded from the store."""
        return await self.call(self.stream.load) if self.stream.moment is None else self.stream.moment

    def _enqueue(self, work: Item | Callable[[], Any], last: bool = False, now: bool = False) -> asyncio.Future[Any]:
        if self._ending:
            raise self._gone()
        self._ending = last
        loop = asyncio.get_running_loop()
        waiting = _Waiting(work, loop.create_future(), loop.time(), last)
        if now:
            self.waiting.appendleft(waiting)
        else:
            self.waiting.append(waiting)
        if isinstance(work, Item):
            self.samples += len(work.x)
            self.queued += len(work.x)
        else:
            self.calls += 1
        self._changed.set()
        return waiting.done

    def _first(self) -> _Waiting:
        """Take the first out of the queue."""
        waiting = self.waiting.popleft()
        if isinstance(waiting.work, Item):
            self.queued -= len(waiting.work.x)
        else:
            self.calls -= 1
        return waiting

    def _gone(self) -> GoneError:
        return GoneError(f"The stream {self.stream.name!r} no longer exists.")

    def _busy(self) -> BusyError:
        return BusyError(
            f"The stream {self.stream.name!r} is busy with work that takes longer than {STEP_SECONDS:g} s; "
            "try again with the same Idempotency-Key.",
            10,
        )

    async def _run(self, function: Callable[[], T], batch: list[_Waiting]) -> T:
        return await self._in_time(self._start(function), batch)

    def _start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self.thread, within_memory, function)

    async def _in_time(self, work: asyncio.Future[T], batch: list[_Waiting]) -> T:
        """Wait for work; where it takes too long, the stream is busy until it is done."""
        if not await in_time(work):
            since = time.monotonic()
            self._too_long(batch)
            self.late.append(since)
            try:
                return await work
            finally:
                self.late.remove(since)
        return work.result()

    def _too_long(self, batch: list[_Waiting]) -> None:
        """Refuse waiting requests: the stream is busy, but the server is not."""
        log.warning("stream %s: work takes longer than %g s", self.stream.name, STEP_SECONDS)
        under_way = [waiting for each in self._under_way for waiting in each.batch]
        last = [waiting for waiting in self.waiting if waiting.last]
        gone = [*self._held, *(waiting for waiting in self.waiting if not waiting.last)]
        for waiting in [*batch, *under_way, *gone]:
            if not waiting.last:
                waiting.answer(self._busy())
        self.samples -= samples_of(pushes_of(gone))
        self.waiting, self._held, self.queued, self.calls = deque(last), [], 0, len(last)

    async def _work(self) -> None:
        while True:
            batch = await self._next()
            try:
                if isinstance(batch[0].work, Item):
                    await self._process(batch)
                else:
                    batch[0].answer(await self._run(batch[0].work, batch))
                if batch[0].last:
                    break
            except Exception as error:
                self._fail(batch, error)
                self._ending = self._ending and not batch[0].last
        for waiting in self.waiting:
            waiting.answer(self._gone())
        self.tell_end()

    def _fail(self, batch: list[_Waiting], error: Exception) -> None:
        if isinstance(error, StoreError) and not isinstance(error, DamagedError) and self.failed is not None:
            self.failed(error)
        elif not isinstance(error, MoontideError):
            log.error("stream %s", self.stream.name, exc_info=error)
        self.samples -= samples_of(pushes_of(batch))
        for waiting in batch:
            waiting.answer(error)

    async def _next(self) -> list[_Waiting]:
        """Wait for the next call, or for the pushes of a micro-batch and a thread to take its step."""
        while True:
            if self.waiting and not isinstance(self.waiting[0].work, Item):
                if not self._under_way:
                    return [self._first()]
                left = None
            else:
                left = self._wait()
            if left == 0:
                return self._gather()
            await self._more(left)

    def _wait(self) -> float | None:
        """Return for how long to wait for more pushes, in seconds; None: until something changes."""
        config, pushes = self.stream.config, len(self.waiting) - self.calls
        enough, steps = self.queued >= config.max_batch, self.steps
        if not pushes or len(self._under_way) >= max(2, steps):
            return None
        beside = steps > 1 and enough and pushes >= self._share()  # smaller ones would cost more than they gain
        if not beside and not all(each.step.done() for each in self._under_way):
            return None
        if enough or self._under_way or self.calls or pushes >= self.before:
            return 0
        return max(0, self.waiting[0].since + config.max_wait_ms / 1000 - asyncio.get_running_loop().time())

    def _share(self) -> int:
        """Return how many pushes each step gets of those that wait or are under way."""
        pushes = len(self.waiting) - self.calls + sum(len(each.items) for each in self._under_way)
        return math.ceil(pushes / self.steps)

    def _gather(self) -> list[_Waiting]:
        """Take the pushes of a micro-batch out of the queue."""
        config, batch, size = self.stream.config, list[_Waiting](), 0
        most, share = min(MAX_BATCH, GROWTH * config.max_batch), self._share()
        while self.waiting and isinstance(item := self.waiting[0].work, Item):
            size += len(item.x)
            if batch and (size > most or (size > config.max_batch and len(batch) >= share)):
                break
            batch.append(self._first())
        self.before = len(batch)
        return batch

    async def _more(self, seconds: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def _process(self, batch: list[_Waiting]) -> None:
        """Begin with the step of a micro-batch, to be written after those before it; or wait for these, and do both."""
        items = pushes_of(batch)
        before: Any = self._under_way[-1] if self._under_way else self.stream.moment
        state: Callable[[], State | None] | None = None
        if before is not None and self.stream.fresh(items, [item for each in self._under_way for item in each.items]):
            state = before.state if isinstance(before, _UnderWay) else lambda: before.state
        if state is None:
            self._held = batch
            if self._under_way:
                await asyncio.wait((self._under_way[-1].task,))
            if self._held:  # and not refused
                self._held, now = [], asyncio.get_running_loop().time()
                await self._finish(batch, await self._run(partial(self.stream.process, items), batch), now)
            return
        alone, follow = not self._under_way and len(items) == 1, once(partial(followed, self.stream, items, state))
        step = self._start(partial(advanced, self.stream, items, state, follow, alone))
        each = _UnderWay(batch, before, follow, step)
        each.step.add_done_callback(lambda _: self._changed.set())
        if not self._under_way and self.stream.steppers is not None:
            self.stream.steppers.streams += 1
        self._under_way.append(each)
        each.task = asyncio.create_task(self._complete(each))

    async def _complete(self, each: _UnderWay) -> None:
        """Write down a step, once it is made and those before it are written, and answer its pushes."""
        items, taken, before = each.items, None, each.before
        try:
            with contextlib.suppress(InputError, ResourceError):  # of one push or more: `process` finds out
                taken = await self._in_time(each.step, each.batch)
            if isinstance(before, _UnderWay):
                await asyncio.wait((before.task,))
                before = before.after
            if taken is not None and before is not None and before is self.stream.moment:
                answers: Any = await self._run(partial(self.stream.write, taken), each.batch)
                each.after = self.stream.moment
            else:  # or what came before could not be written
                answers = await self._run(partial(self.stream.process, items), each.batch)
            await self._finish(each.batch, answers, each.since)
        except Exception as error:
            self._fail(each.batch, error)
        finally:
            each.before = None
            self._under_way.remove(each)
            if not self._under_way and self.stream.steppers is not None:
                self.stream.steppers.streams -= 1
            self._changed.set()

    async def _finish(self, batch: list[_Waiting], answers: Sequence[Answer | Exception], since: float) -> None:
        """Answer pushes, count them, tell listeners, and make a checkpoint when it is due."""
        size = samples_of(pushes_of(batch))
        self.samples -= size
        for waiting, answer in zip(batch, answers, strict=True):
            waiting.answer(answer)
        fresh = [answer for answer in answers if isinstance(answer, Answer) and not answer.repeated]
        seconds = sum(self.stream.timing.values())
        if fresh and seconds:
            self.rate += 0.1 * (size / seconds - self.rate)
        self.metrics.batch(self.stream.name, len(batch), sum(len(answer.rows) for answer in fresh), seconds)
        for phase, spent in self.stream.timing.items():
            self.metrics.phase(self.stream.name, phase, spent)
        for waiting in batch:
            self.metrics.phase(self.stream.name, "queue", since - waiting.since)
        moment = self.stream.moment
        if self.listeners and fresh and moment is not None:
            rows = np.concatenate([answer.rows for answer in fresh])
            event = columns(fresh[0].first, rows, self.stream.config.class_names)
            event |= {"seen": moment.state.seen, "total": moment.total, "beta": numbers(moment.tally.beta)}
            await self.tell("batch", event, moment.total)
        if self.stream.due:
            try:
                await self._run(self.stream.checkpoint, [])
            except MoontideError as error:  # it is tried again after the next batch
                log.error("stream %s: %s", self.stream.name, error)

    def listen(self) -> Listener:
        """Return a queue of events from now on; None marks its end, at shutdown or if the listener is too slow."""
        if len(self.listeners) >= MAX_LISTENERS:
            raise BusyError(f"The stream already has {MAX_LISTENERS} listeners; try again.", 10)
        listener = Listener()
        self.listeners.add(listener)
        return listener

    async def tell(self, kind: str, data: dict[str, Any], number: int | None = None) -> None:
        """Send an event to all listeners, the same bytes to each."""
        if not self.listeners:
            return
        name = b"" if number is None else b"id: %d\n" % number
        event = b"%sevent: %s\ndata: %s\n\n" % (name, kind.encode(), await encode_in_pieces(data))
        for listener in list(self.listeners):
            listener.behind += len(event)
            if listener.qsize() >= LISTENER_EVENTS or listener.behind > max(LISTENER_BYTES, len(event)):
                self.listeners.discard(listener)
                listener.put_nowait(None)
            else:
                listener.put_nowait(event)

    def tell_end(self) -> None:
        """End all event streams."""
        for listener in self.listeners:
            listener.put_nowait(None)
        self.listeners.clear()


def once(function: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls another until it has a result, and then forgets it; for several threads.

    >>> numbers = iter(range(9))
    >>> first = once(lambda: next(numbers))
    >>> first(), first()
    (0, 0)
    """
    lock, left, found = threading.Lock(), [function], list[T]()

    def call() -> T:
        with lock:
            if left:
                found.append(left[0]())
                left.clear()
            return found[0]

    return call


def followed(stream: ServedStream, items: Sequence[Item], state: Callable[[], State | None]) -> State | None:
    """Return the state after a step over pushes, from what `state` returns; None where it is not known."""
    before = state()
    return None if before is None else stream.follow(items, before)


def advanced(
    stream: ServedStream,
    items: Sequence[Item],
    state: Callable[[], State | None],
    follow: Callable[[], State | None],
    alone: bool,
) -> Taken | None:
    """Take a step over pushes, from what `state` returns; None where it is not known."""
    before = state()
    return None if before is None else stream.advance(items, before, follow, alone)


def threads(name: str) -> ThreadPoolExecutor:
    """Return the threads of a stream: for its steps, and for the journal."""
    return ThreadPoolExecutor(MOST + 1, f"stream {name}")


def pushes_of(waiting: Iterable[_Waiting]) -> list[Item]:
    """Return the pushes among those who wait."""
    return [each.work for each in waiting if isinstance(each.work, Item)]


def samples_of(items: Iterable[Item]) -> int:
    """Return the number of samples of pushes."""
    return sum(len(item.x) for item in items)


def within_memory(function: Callable[[], T]) -> T:
    """Call a function; where memory runs out, that is a sentence.

    >>> within_memory(lambda: 1)
    1
    """
    try:
        return function()
    except ResourceError:  # which is a MemoryError, and says more
        raise
    except MemoryError as error:
        raise ResourceError("This needs more memory than is available; try again with less at once.") from error


async def in_time(work: asyncio.Future[Any], seconds: float | None = None) -> bool:
    """Wait for work on a thread for some seconds, by default those of a step; loading and compiling has its own."""
    left, extra = STEP_SECONDS if seconds is None else seconds, COMPILE_SECONDS
    while left > 0:
        piece = min(0.5, left)
        if (await asyncio.wait((work,), timeout=piece))[0]:
            return True
        if extra > 0 and compiling():
            extra -= piece
        else:
            left -= piece
    return work.done()


def compiling() -> bool:
    """Tell whether some thread imports modules or is in Numba's compiler, which has its work once on a machine.

    >>> compiling()
    False
    """
    for frame in sys._current_frames().values():
        inner: FrameType | None = frame
        while inner is not None:
            if str(inner.f_globals.get("__name__")).startswith(("numba.core.", "importlib._bootstrap")):
                return True
            inner = inner.f_back
    return False


def known_of(labels: Any) -> list[int | None]:
    """Return known labels, with None for unknown ones.

    >>> known_of(np.asarray([2, -1]))
    [2, None]
    """
    return [None if label < 0 else label for label in labels.tolist()]
