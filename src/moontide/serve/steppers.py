"""Processes that take steps for streams, so that several steps are taken at the same time, each on a core of its own.

Threads of one process wait for each other wherever Python is at work: two steps of 64 samples in two threads take as
long as one after the other. A process is sent the state of a stream once, and from then on the arrays that changed.
It computes what the server itself would, to the last bit, and keeps nothing that is not in the server as well: where
one ends, fails or does not answer in time, the server takes the step. Messages are arrays behind a JSON header, over a
pair of sockets:

    {"stream", "method"?, "options"?, "numbers", "fields", "known", "arrays"}   arrays of the state, x and known labels
    {"failed", "beta"?, "arrays"}                                               answers, and beta where there is one
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import to_numpy
from moontide.core.threads import blocks_stay_here
from moontide.errors import MoontideError
from moontide.protocols import Method, OnlineMethod, State, as_online
from moontide.registry import method
from moontide.serve.blas import products_stay_here
from moontide.serve.records import ANSWER, Answers, Floats, Labels, answers_of

MOST = 4  # processes
WAIT_SECONDS, LONG_SECONDS = 0.25, 1.0  # for a process that is at work, unless its step takes as long as this
STEP_SECONDS, TRIAL_SECONDS = 5.0, 120.0  # for an answer; a trial also waits for the start, modules and the compiler
RETRY_SECONDS = 30.0  # after one ended that should not have, until another is started
KNOWN, KNOWN_BYTES = 16, 2**27  # streams that a process knows, and bytes of their states
MAX_SENT = 2**26  # bytes of a state that a process is sent
BUFFER = 2**20  # bytes of a socket
LENGTH = struct.Struct("<I")  # of a header
PR_SET_PDEATHSIG = 1  # of prctl(2)

AnyArray = npt.NDArray[Any]
log = logging.getLogger("moontide.serve")


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Job(NamedTuple):
    """A step to take."""

    stream: int  # a number of the stream, unlike any other
    method: Method
    state: State
    x: Floats  # (n, d)
    known: Labels | None  # (n,)


class Stepper:
    """A process, used by one thread at a time."""

    def __init__(self) -> None:
        """Start the process."""
        self.sent: OrderedDict[int, dict[str, Any]] = OrderedDict()  # the state that it has of each stream
        self.since = 0.0  # when its last step began, 0 for one that is a trial
        self.socket, theirs = socket.socketpair()
        for each in (self.socket, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        with theirs:
            command = [sys.executable, "-c", "from moontide.serve.steppers import main; main()"]
            self.process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL)

    def step(self, job: Job, seconds: float) -> tuple[Answers, AnyArray | None] | None:
        """Have a step taken; None where it fails. After an OSError or ValueError the process is of no more use.

        One that neither reads nor answers for some seconds, as it is stopped or hangs, is a TimeoutError.
        """
        self.socket.settimeout(seconds)
        head, arrays = self._message(job)
        send(self.socket, head, arrays)
        reply, found = receive(self.socket)
        if reply["failed"]:
            return None
        rows = found[0].view(ANSWER)
        return rows, found[1] if reply["beta"] else None

    def _message(self, job: Job) -> tuple[dict[str, Any], list[AnyArray]]:
        before = self.sent.pop(job.stream, {})
        now = {field.name: getattr(job.state, field.name) for field in dataclasses.fields(job.state)}
        arrays = {k: v for k, v in now.items() if isinstance(v, np.ndarray) and v is not before.get(k)}
        head: dict[str, Any] = {"stream": job.stream, "known": job.known is not None, "forget": []}
        if not before:
            head |= {"method": job.method.name, "options": options_of(job.method)}
        while self.sent and (len(self.sent) >= KNOWN or sum(map(size_of, self.sent.values())) > KNOWN_BYTES):
            head["forget"].append(self.sent.popitem(last=False)[0])
        self.sent[job.stream] = now
        head |= {"numbers": {k: v for k, v in now.items() if not isinstance(v, np.ndarray)}, "fields": list(arrays)}
        return head, [*arrays.values(), job.x, *([] if job.known is None else [job.known])]

    def close(self) -> None:
        """End the process, whatever it does: it has nothing to lose."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # for a thread that waits for the answer
        self.socket.close()


class Steppers:
    """The processes of a server, started when steps are first wanted at the same time."""

    def __init__(self) -> None:
        """Set up; with one core there are no processes."""
        self.cores = min(MOST, cores())
        self.count, self.idle, self.all = self.cores if self.cores > 1 else 0, list[Stepper](), list[Stepper]()
        self.streams = 0  # that have pushes under way
        self.under_way = 0  # steps of all streams, also those that the server takes
        self._numbers, self._free = itertools.count(), threading.Condition()
        self._side = ThreadPoolExecutor(1, "steppers")  # starts processes, and tells them of streams
        self._preparing, self._closed, self._not_before = set[int](), False, 0.0  # when a process may be started

    @property
    def share(self) -> int:
        """How many steps a stream may have under way at the same time."""
        return max(1, self.cores // max(1, self.streams))

    def number(self) -> int:
        """Return a number for a stream."""
        return next(self._numbers)

    @contextlib.contextmanager
    def counted(self) -> Iterator[int]:
        """Count a step from its start to its end; yields how many are under way with it."""
        with self._free:
            self.under_way += 1
            now = self.under_way
        try:
            yield now
        finally:
            with self._free:
                self.under_way -= 1

    def step(self, job: Job) -> tuple[Answers, AnyArray | None] | None:
        """Have a step taken by a process; None where none is ready for this stream, or it fails."""
        stepper = self._take(job)
        if stepper is None:
            return None
        try:
            found = stepper.step(job, STEP_SECONDS)
        except (OSError, ValueError) as error:
            self._drop(stepper, error)
            return None
        self._give_back(stepper)
        return found

    def _take(self, job: Job) -> Stepper | None:
        deadline = time.monotonic() + WAIT_SECONDS
        with self._free:
            if not self.count or self._closed or not fit(job.state):
                return None
            while True:
                now = time.monotonic()
                more = len(self.all) < self.count and now >= self._not_before
                if job.stream not in self._preparing and (more or any(job.stream not in x.sent for x in self.idle)):
                    self._preparing.add(job.stream)
                    self._side.submit(self._prepare, job._replace(x=job.state.text[:1], known=None))
                for stepper in self.idle:
                    if job.stream in stepper.sent:
                        self.idle.remove(stepper)
                        stepper.since = now
                        return stepper
                soon = any(job.stream in each.sent and now < each.since + LONG_SECONDS for each in self.all)
                if not soon or not self._free.wait(deadline - now):
                    return None

    def _prepare(self, job: Job) -> None:
        """Tell all processes of a stream, and let them try a step, which loads the method."""
        stepper: Stepper | None = None
        try:
            while (stepper := self._without(job.stream)) is not None:
                for _ in range(2):  # arrays of the second state may be of another layout
                    stepper.step(job, TRIAL_SECONDS)
                self._give_back(stepper)
        except (OSError, ValueError) as error:
            if stepper is not None:
                self._drop(stepper, error)
        finally:
            with self._free:
                self._preparing.discard(job.stream)

    def _without(self, stream: int) -> Stepper | None:
        """Take a process that does not know a stream, a new one where there may be more."""
        with self._free:
            if self._closed:
                return None
            if len(self.all) < self.count and time.monotonic() >= self._not_before:
                stepper = Stepper()
                self.all.append(stepper)
                return stepper
            for stepper in self.idle:
                if stream not in stepper.sent:
                    self.idle.remove(stepper)
                    stepper.since = 0.0
                    return stepper
            return None

    def _give_back(self, stepper: Stepper) -> None:
        with self._free:
            self.idle.append(stepper)
            self._free.notify_all()

    def _drop(self, stepper: Stepper, error: Exception) -> None:
        with self._free:
            if not self._closed:
                hangs = isinstance(error, TimeoutError)
                log.warning("a process that takes steps has ended: %s", "it did not answer" if hangs else error)
            self._not_before = time.monotonic() + RETRY_SECONDS
            if stepper in self.all:
                self.all.remove(stepper)
                stepper.close()
            self._free.notify_all()

    def close(self) -> None:
        """End all processes."""
        with self._free:
            self._closed = True
            while self.all:
                self.all.pop().close()
        self._side.shutdown(wait=False)


def fit(state: State) -> bool:
    """Tell whether a process may have a state: of numbers and numpy arrays, and not too large."""
    values = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    whole = all(isinstance(value, np.ndarray) or type(value) in (int, float) for value in values.values())
    return whole and size_of(values) <= MAX_SENT


def size_of(fields: dict[str, Any]) -> int:
    """Return the bytes of the arrays of a state.

    >>> size_of({"text": np.zeros(3), "seen": 4})
    24
    """
    return sum(getattr(value, "nbytes", 0) for value in fields.values())


def options_of(chosen: Method) -> dict[str, Any]:
    """Return the options of a method, to make it again."""
    return {key: getattr(chosen, key) for key in chosen.specs()}


def send(to: socket.socket, head: dict[str, Any], arrays: Sequence[AnyArray]) -> None:
    """Send arrays behind a header.

    >>> one, other = socket.socketpair()
    >>> with one, other:
    ...     send(one, {"a": 1}, [np.asarray([2.0])])
    ...     head, arrays = receive(other)
    >>> head["a"], arrays
    (1, [array([2.])])
    """
    arrays = [np.ascontiguousarray(array) for array in arrays]
    words = json.dumps(head | {"arrays": [(array.dtype.str, array.shape) for array in arrays]}).encode()
    to.sendall(LENGTH.pack(len(words)) + words)
    for array in arrays:
        if array.size:
            to.sendall(array.reshape(-1).view(np.uint8).data)


def receive(sender: socket.socket) -> tuple[dict[str, Any], list[AnyArray]]:
    """Receive arrays behind a header; an OSError where the other side has gone."""

    def fill(room: AnyArray) -> AnyArray:
        view = memoryview(room.reshape(-1).view(np.uint8).data) if room.size else memoryview(b"")
        while len(view):
            count = sender.recv_into(view)
            if not count:
                raise ConnectionError("the connection is closed")
            view = view[count:]
        return room

    (length,) = LENGTH.unpack(fill(np.empty(LENGTH.size, np.uint8)).tobytes())
    head = json.loads(fill(np.empty(length, np.uint8)).tobytes())
    return head, [fill(np.empty(shape, dtype)) for dtype, shape in head["arrays"]]


class Known(NamedTuple):
    """What a process knows of a stream."""

    method: OnlineMethod
    fields: dict[str, Any]


def main() -> None:
    """Take steps until the server has gone."""
    end_with_the_server()
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal or a system sends to all; the server ends this
        signal.signal(number, signal.SIG_IGN)
    products_stay_here()
    blocks_stay_here()
    streams: dict[int, Known] = {}
    with contextlib.suppress(OSError), socket.socket(fileno=0) as server:
        while True:
            head, arrays = receive(server)
            try:
                reply, found = answer(streams, head, arrays)
            except (MoontideError, MemoryError):  # the server will find the same
                reply, found = {"failed": True}, []
            send(server, reply, found)


def end_with_the_server() -> None:
    """Have Linux end this process where the server has ended, also while it is stopped, or at work on a step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answer(
    streams: dict[int, Known], head: dict[str, Any], arrays: list[AnyArray]
) -> tuple[dict[str, Any], list[AnyArray]]:
    """Take a step; returns the answer to send."""
    for number in head["forget"]:
        del streams[number]
    if "method" in head:
        streams[head["stream"]] = Known(as_online(method(head["method"], **head["options"])), {})
    online, fields = streams[head["stream"]]
    known = arrays.pop() if head["known"] else None
    x = arrays.pop()
    fields |= head["numbers"] | dict(zip(head["fields"], arrays, strict=True))
    _, result = online.step(online.state_type(**fields), x, known)
    rows = answers_of(result, known)
    beta = [] if result.beta is None else [to_numpy(result.beta)]
    return {"failed": False, "beta": len(beta)}, [rows.view(np.uint8), *beta]
