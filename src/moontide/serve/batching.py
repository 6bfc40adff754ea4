"""The line of pushes in front of a stream: in order, gathered into micro-batches, and never longer than allowed.

A push waits until `max_batch` samples are there or it has waited `max_wait_ms`, whichever comes first. A push is never
split: a batch is as many whole pushes as fit, or one push that is larger. What else must happen in order, such as a
snapshot or a reset, waits in the same line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moontide.errors import MoontideError
from moontide.serve.metrics import Metrics
from moontide.serve.state import Answer, GoneError, Item, Moment, Stream

MAX_LISTENERS, LISTENER_EVENTS = 64, 256  # of a stream, and how far one may fall behind before it is cut off

T = TypeVar("T")
log = logging.getLogger("moontide.serve")


class BusyError(MoontideError):
    """There is too much to do already; `retry_after` is when to come again, in seconds."""

    def __init__(self, sentence: str, retry_after: int = 1) -> None:
        """Keep the time to wait beside the sentence."""
        super().__init__(sentence)
        self.retry_after = retry_after


class Event(NamedTuple):
    """What is told of a micro-batch: its predictions, and the moment after it."""

    answer: Answer
    moment: Moment


class _Waiting(NamedTuple):
    work: Item | Callable[[], Any]  # a push, or a call that takes its turn
    done: asyncio.Future[Any]
    since: float
    last: bool  # whether the line ends with it

    def answer(self, value: Any) -> None:
        if self.done.done():  # the client has left
            return
        if isinstance(value, Exception):
            self.done.set_exception(value)
        else:
            self.done.set_result(value)


class Line:
    """Takes pushes and calls for a stream, and runs them one after the other on the threads of `pool`."""

    def __init__(self, stream: Stream, pool: Executor, metrics: Metrics, max_waiting: int) -> None:
        """Start to work; `max_waiting`: samples that may wait."""
        self.stream, self.pool, self.metrics, self.max_waiting = stream, pool, metrics, max_waiting
        self.waiting: deque[_Waiting] = deque()
        self.samples = 0  # that wait
        self.rate = 1000.0  # samples a second, as measured
        self.listeners: set[asyncio.Queue[Event | None]] = set()
        self._arrived = asyncio.Event()
        self._ending = False
        self._task = asyncio.create_task(self._work())

    def push(self, item: Item) -> asyncio.Future[Answer]:
        """Put a push in line."""
        if self.samples and self.samples + len(item.x) > self.max_waiting:
            raise BusyError(
                f"{self.samples} samples wait for the stream already, of {self.max_waiting} that may; come again.",
                min(60, max(1, math.ceil(self.samples / self.rate))),
            )
        return self._enqueue(item)

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function when all that came before is done, and before all that comes after."""
        result: T = await self._enqueue(function)
        return result

    async def end(self, function: Callable[[], None], *, now: bool = False) -> None:
        """Call a function as the last thing, after all that waits, or `now`, and what waits is told that it is gone."""
        await self._enqueue(function, last=True, now=now)
        await self._task

    async def moment(self) -> Moment:
        """Return where the stream is, once it is read from the store."""
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
        self._arrived.set()
        return waiting.done

    def _gone(self) -> GoneError:
        return GoneError(f"There is no stream {self.stream.name!r} any more.")

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)

    async def _work(self) -> None:
        while True:
            batch = await self._next()
            try:
                if isinstance(batch[0].work, Item):
                    await self._process(batch)
                else:
                    batch[0].answer(await self._run(batch[0].work))
                if batch[0].last:
                    break
            except Exception as error:
                if not isinstance(error, MoontideError):
                    log.exception("stream %s", self.stream.name)
                for waiting in batch:
                    waiting.answer(error)
                self._ending = self._ending and not batch[0].last
        for waiting in self.waiting:
            waiting.answer(self._gone())
        self.tell(None)

    async def _next(self) -> list[_Waiting]:
        """Wait for the next call, or for pushes that make a micro-batch."""
        while not self.waiting:
            await self._more(None)
        first = self.waiting[0]
        if not isinstance(first.work, Item):
            return [self.waiting.popleft()]
        config, loop = self.stream.config, asyncio.get_running_loop()
        deadline = first.since + config.max_wait_ms / 1000
        while self.samples < config.max_batch and (left := deadline - loop.time()) > 0:
            if self.waiting[0] is not first or not isinstance(self.waiting[-1].work, Item):
                break  # a call waits
            await self._more(left)
        batch: list[_Waiting] = []
        size = 0
        while self.waiting and isinstance(item := self.waiting[0].work, Item):
            size += len(item.x)
            if batch and size > config.max_batch:
                break
            batch.append(self.waiting.popleft())
        return batch or [self.waiting.popleft()]  # a call that came in `now`

    async def _more(self, seconds: float | None) -> None:
        self._arrived.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)

    async def _process(self, batch: list[_Waiting]) -> None:
        items = [waiting.work for waiting in batch if isinstance(waiting.work, Item)]
        size = sum(len(item.x) for item in items)
        start = time.perf_counter()
        try:
            answers = await self._run(lambda: self.stream.process(items))
        finally:
            self.samples -= size
        seconds = time.perf_counter() - start
        self.rate += 0.1 * (size / seconds - self.rate)
        for waiting, answer in zip(batch, answers, strict=True):
            waiting.answer(answer)
        fresh = [answer for answer in answers if isinstance(answer, Answer) and not answer.repeated]
        self.metrics.batch(self.stream.name, len(items), sum(len(answer.rows) for answer in fresh), seconds)
        if self.listeners and fresh and self.stream.moment:
            rows = np.concatenate([answer.rows for answer in fresh])
            self.tell(Event(Answer(fresh[0].first, rows), self.stream.moment))
        if self.stream.due:
            try:
                await self._run(self.stream.checkpoint)
            except MoontideError as error:  # it is tried again after the next batch
                log.error("stream %s: %s", self.stream.name, error)

    def listen(self) -> asyncio.Queue[Event | None]:
        """Return a queue of what happens from now on; None ends it, where all ends or it is not emptied fast enough."""
        if len(self.listeners) >= MAX_LISTENERS:
            raise BusyError(f"{MAX_LISTENERS} listen to the stream already; come again.", 10)
        queue: asyncio.Queue[Event | None] = asyncio.Queue(LISTENER_EVENTS)
        self.listeners.add(queue)
        return queue

    def tell(self, event: Event | None) -> None:
        """Give an event to all who listen."""
        for queue in list(self.listeners):
            if queue.full():
                self.listeners.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)
