"""The line before a stream: order, micro-batches by count and by time, back-pressure, and ends."""

import asyncio
import dataclasses
import json
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from moontide.errors import ResourceError
from moontide.serve import batching
from moontide.serve.batching import LISTENER_EVENTS, MAX_LISTENERS, BusyError, PushQueue
from moontide.serve.metrics import Metrics
from moontide.serve.records import ANSWER, Answer, Config, Item
from moontide.serve.state import GoneError


class Recorder:
    """What a line needs of a stream; writes down the batches it gets, and waits while it is held."""

    name, moment, due, timing, steppers = "a", None, False, {}, None

    def __init__(self, max_batch=4, max_wait_ms=0.0):
        self.config = Config("moon", {}, ("a",), 1, 1.0, max_batch=max_batch, max_wait_ms=max_wait_ms)
        self.batches, self.error = [], None
        self.free = threading.Event()
        self.free.set()

    def fresh(self, items, others):
        return False

    def process(self, items):
        assert self.free.wait(10)
        if self.error:
            raise self.error
        self.batches.append([int(one.x[0, 0]) for one in items])
        return [Answer(int(one.x[0, 0]), np.zeros(len(one.x), ANSWER)) for one in items]


@asynccontextmanager
async def queue_of(stream, max_waiting=100):
    queue = PushQueue(stream, Metrics(), max_waiting)
    yield queue
    stream.free.set()
    if not queue._task.done():
        await queue.end(lambda: None)


def item(number, n=1):
    return Item(np.full((n, 1), number, np.float32))


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_pushes_that_wait_are_gathered_in_order_and_never_split():
    async def main():
        stream = Recorder(max_batch=1)
        async with queue_of(stream) as queue:
            stream.free.clear()
            sizes = [1, 2, 4, 2, 9, 1]
            done = [queue.push(item(0))]
            await asyncio.sleep(0.05)  # the first is on its way
            done += [queue.push(item(1 + i, n)) for i, n in enumerate(sizes)]
            assert queue.samples == 1 + sum(sizes)
            stream.free.set()
            answers = await asyncio.gather(*done)
            assert [answer.first for answer in answers] == list(range(7))
            assert stream.batches == [[0], [1, 2, 3], [4], [5], [6]]  # GROWTH samples, or one push that is larger
            assert queue.samples == 0

    asyncio.run(main())


def test_a_lone_client_never_waits():
    async def main():
        stream = Recorder(max_batch=64, max_wait_ms=10_000)
        async with queue_of(stream) as queue:
            for i in range(5):
                await asyncio.wait_for(queue.push(item(i)), 5)
            assert stream.batches == [[i] for i in range(5)]

    asyncio.run(main())


def test_after_several_pushes_together_as_many_are_waited_for():
    async def main():
        stream = Recorder(max_batch=64, max_wait_ms=10_000)
        async with queue_of(stream) as queue:
            queue.before = 3
            first = [queue.push(item(0)), queue.push(item(1))]
            await asyncio.sleep(0.05)
            assert stream.batches == []
            await asyncio.gather(*first, queue.push(item(2)))
            assert stream.batches == [[0, 1, 2]]
            stream.config = dataclasses.replace(stream.config, max_wait_ms=30)
            await asyncio.gather(queue.push(item(3)), queue.push(item(4)))  # the third does not come
            assert stream.batches[1:] == [[3, 4]]
            assert queue.before == 2

    asyncio.run(main())


def test_a_call_takes_its_turn_and_hurries_those_before_it():
    async def main():
        stream = Recorder(max_batch=10, max_wait_ms=10_000)
        async with queue_of(stream) as queue:
            queue.before = 9
            pushed = [queue.push(item(0)), queue.push(item(1))]
            called = asyncio.ensure_future(queue.call(lambda: list(stream.batches)))
            await settle()
            pushed.append(queue.push(item(2)))
            assert await called == [[0, 1]]
            pushed.append(queue.push(item(3)))  # as many as before: there is nothing to wait for
            assert (await pushed[2]).first == 2

    asyncio.run(main())


def test_work_that_takes_too_long_makes_the_stream_busy_until_it_is_done(monkeypatch):
    async def main():
        monkeypatch.setattr(batching, "STEP_SECONDS", 0.1)
        stream = Recorder()
        async with queue_of(stream) as queue:
            stream.free.clear()
            first = queue.push(item(0))
            await asyncio.sleep(0.05)
            waits = [queue.push(item(1)), asyncio.ensure_future(queue.call(lambda: None))]
            for each in (first, *waits):
                with pytest.raises(BusyError, match=r"takes longer than 0\.1 s"):
                    await asyncio.wait_for(each, 5)
            assert queue.busy is not None
            with pytest.raises(BusyError):
                queue.push(item(2))
            stream.free.set()
            while queue.busy is not None:
                await asyncio.sleep(0.01)
            assert (await queue.push(item(3))).first == 3
            assert [number for batch in stream.batches for number in batch] == [0, 3]
            assert queue.samples == 0

    asyncio.run(main())


def test_a_full_line_says_when_to_come_again():
    async def main():
        stream = Recorder(max_batch=2)
        async with queue_of(stream, max_waiting=10) as queue:
            stream.free.clear()
            queue.rate = 2.0
            done = [queue.push(item(i, 2)) for i in range(5)]
            with pytest.raises(BusyError, match="10 samples are waiting") as caught:
                queue.push(item(9))
            assert caught.value.retry_after == 5
            stream.free.set()
            await asyncio.gather(*done)
            await queue.push(item(10, 50))  # an empty queue takes a push of any size

    asyncio.run(main())


def test_an_error_goes_to_its_batch_only():
    async def main():
        stream = Recorder(max_batch=2)
        async with queue_of(stream) as queue:
            stream.error = ResourceError("too large")
            failed = await asyncio.gather(queue.push(item(0)), queue.push(item(1)), return_exceptions=True)
            assert all(isinstance(error, ResourceError) for error in failed)
            stream.error = None
            assert (await queue.push(item(2))).first == 2
            assert queue.samples == 0

    asyncio.run(main())


def test_a_client_that_leaves_does_not_stop_the_line():
    async def main():
        stream = Recorder()
        async with queue_of(stream) as queue:
            stream.free.clear()
            left = queue.push(item(0))
            left.cancel()
            stream.free.set()
            assert (await queue.push(item(1))).first == 1
            assert [number for batch in stream.batches for number in batch] == [0, 1]  # it is counted all the same

    asyncio.run(main())


def test_the_end_comes_after_all_or_now():
    async def main():
        stream = Recorder(max_batch=1, max_wait_ms=10_000)
        async with queue_of(stream) as queue:
            done = [queue.push(item(i)) for i in range(5)]
            await queue.end(lambda: stream.batches.append("end"))
            assert all(future.done() for future in done)
            assert stream.batches == [[0, 1, 2, 3, 4], "end"]
            with pytest.raises(GoneError):
                queue.push(item(6))
        stream = Recorder(max_batch=1)
        async with queue_of(stream) as queue:
            stream.free.clear()
            done = [queue.push(item(0))]
            await asyncio.sleep(0.05)
            done += [queue.push(item(1 + i)) for i in range(4)]
            end = asyncio.ensure_future(queue.end(lambda: stream.batches.append("end"), now=True))
            await settle()
            stream.free.set()
            await end
            assert stream.batches == [[0], "end"]
            assert [isinstance(future.exception(), GoneError) for future in done] == [False, True, True, True, True]

    asyncio.run(main())


def test_an_end_that_fails_is_no_end():
    async def main():
        stream = Recorder()

        def fail():
            raise ResourceError("no")

        async with queue_of(stream) as queue:
            with pytest.raises(ResourceError):
                await asyncio.wait_for(queue.end(fail, now=True), 5)
            assert (await queue.push(item(1))).first == 1

    asyncio.run(main())


def test_a_listener_hears_all_or_is_cut_off():
    async def main():
        stream = Recorder(max_batch=1)
        stream.moment = SimpleNamespace(state=SimpleNamespace(seen=0), total=0, tally=SimpleNamespace(beta=None))
        async with queue_of(stream) as queue:
            slow, fast = queue.listen(), queue.listen()
            for i in range(LISTENER_EVENTS + 1):
                await queue.push(item(i))
                assert json.loads((await fast.next()).split(b"data: ")[1])["first"] == i
            assert fast.behind == 0
            assert slow not in queue.listeners
            heard = [slow.get_nowait() for _ in range(slow.qsize())]
            assert heard[-1] is None
            for _ in range(MAX_LISTENERS - 1):
                queue.listen()
            with pytest.raises(BusyError):
                queue.listen()
        assert fast.get_nowait() is None  # the end

    asyncio.run(main())


def test_listeners_share_the_bytes_of_an_event_and_are_cut_off_by_bytes_too(monkeypatch):
    async def main():
        monkeypatch.setattr(batching, "LISTENER_BYTES", 3000)
        async with queue_of(Recorder()) as queue:
            one, two = queue.listen(), queue.listen()
            for _ in range(4):
                await queue.tell("batch", {"labels": "x" * 900})
            heard = [queue.get_nowait() for queue in (one, two)]
            assert heard[0] is heard[1]
            assert not queue.listeners

    asyncio.run(main())
