"""Processes that decode images for an encoder, in their order, through one piece of shared memory.

The memory is a ring with one slot per image. As many images are in progress as there are slots; the consumer frees them
with `release`. A process that dies, or takes longer than `PATIENCE` on one image, is replaced, and only that image is
lost. No process outlives this one: they end when their input does.
"""

from __future__ import annotations

import json
import mmap
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moontide.encoders.decoder import Terms
from moontide.encoders.places import ImageFile
from moontide.encoders.steps import Steps
from moontide.errors import ResourceError

PATIENCE = 60.0  # seconds that one image may take
DEPTH = 3  # images that wait in the pipe of a process, so that it never waits itself
SLOT = 640 * 480 * 3  # bytes of a slot where images are resized elsewhere; larger ones are resized by the decoders
ATTEMPTS = 3  # starts of a process that ends before it is ready
PACKAGES = (("moontide", str(Path(__file__).parents[1])), ("moontide.encoders", str(Path(__file__).parent)))
START = f"""
import sys, types
for name, folder in {PACKAGES!r}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from moontide.encoders.decoder import main
main()
"""  # of a process: the modules that decode, without all else that their packages import, which takes half a second


class Found(NamedTuple):
    """The outcome of decoding an image."""

    image: ImageFile
    kind: str  # pixels, image, jpeg or skip
    data: npt.NDArray[np.uint8] | str  # in the shared memory, until it is released; the reason of a skip
    seconds: tuple[float, ...] = (0.0, 0.0, 0.0)  # that reading, decoding and resizing took


class _Process:
    """A decoding process and its pending images."""

    def __init__(self, terms: Terms) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self.process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            pass_fds=() if isinstance(terms.memory, str) else (terms.memory,),
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                 "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.waiting: deque[tuple[int, dict[str, Any]]] = deque()
        self.ready, self.since, self.partial = False, time.monotonic(), b""
        self.write(terms.write())

    def write(self, line: str) -> None:
        with suppress(OSError):  # it has died, as its output shows
            self.stdin.write((line + "\n").encode())
            self.stdin.flush()

    def lines(self) -> list[list[Any]] | None:
        """Return the lines that the process has answered, or None when it has ended."""
        data = os.read(self.stdout.fileno(), 2**16)
        if not data:
            return None
        *whole, self.partial = (self.partial + data).split(b"\n")
        return [json.loads(line) for line in whole]

    def why(self) -> str:
        """Return the last line it printed."""
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"status {self.process.returncode}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for handle in (self.stdin, self.stdout, self.errors):
            with suppress(OSError):  # a line that it did not take
                handle.close()


class Decoders:
    """A pool of decoding processes.

    workers: how many. batch: how many images are taken out of the ring together; it has four times as many slots.
    resize: whether the processes resize and crop by `steps`, too, which else the encoder does on its device.
    jpeg: which share of plain JPEG files is handed on as it is.

    >>> with Decoders(None, workers=1, batch=1) as pool:
    ...     [(found.kind, found.data) for found in pool.decode([ImageFile("no.jpg", Path("no.jpg"))])]
    [('skip', 'it cannot be read (No such file or directory)')]
    """

    def __init__(
        self, steps: Steps | None, *, workers: int, batch: int, resize: bool = True, jpeg: float = 0.0, nice: int = 0
    ) -> None:
        self.workers = workers
        least = 0 if steps is None else steps.crop[0] * steps.crop[1] * 3
        slot = max(least, 4096) if resize and steps is not None else max(least, SLOT)
        self.spill = Path(tempfile.mkdtemp(prefix="moontide-"))
        slots = 4 * batch + workers * DEPTH
        size = slots * slot
        shared: int | str
        if hasattr(os, "memfd_create"):
            self._file = shared = os.memfd_create("moontide")
            os.ftruncate(shared, size)
        else:
            shared = str(self.spill / "memory")
            self._file = os.open(shared, os.O_RDWR | os.O_CREAT)
            os.truncate(shared, size)
        self.memory = mmap.mmap(self._file, size)
        if os.name == "posix" and isinstance(shared, str):
            os.unlink(shared)
            shared = self._file
        held = None if steps is None else asdict(steps)
        self.terms = Terms(shared, slot, slots, str(self.spill), held, resize, jpeg, nice)
        self._pixels = np.frombuffer(self.memory, np.uint8)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The shared memory, which may be pinned."""
        return self._pixels

    def __enter__(self) -> Decoders:
        """Return the pool."""
        return self

    def __exit__(self, *error: object) -> None:
        """Free the shared memory."""
        self.close()

    def close(self) -> None:
        """Free the shared memory."""
        os.close(self._file)
        shutil.rmtree(self.spill, ignore_errors=True)

    def decode(self, images: Iterable[ImageFile]) -> Generator[Found, None, None]:
        """Yield the outcomes for images, in order."""
        with self.decoding(images) as found:
            yield from found

    @contextmanager
    def decoding(self, images: Iterable[ImageFile]) -> Iterator[Iterator[Found]]:
        """Start decoding images, and yield the outcomes in order; at the end all processes stop."""
        run = _Run(self, iter(images))
        self._current = run
        thread = threading.Thread(target=run.feed, name="decode", daemon=True)
        thread.start()
        try:
            yield run.results()
        finally:
            run.stop()
            thread.join()
            run.close()

    def release(self, count: int) -> None:
        """Free the slots of the next `count` images that were taken out."""
        self._current.release(count)


class _Run:
    """One list of images that passes through a pool; `feed` runs in its own thread."""

    def __init__(self, pool: Decoders, images: Iterator[ImageFile]) -> None:
        self.pool, self.images = pool, images
        self.change = threading.Condition()
        self.found: dict[int, Found] = {}
        self.names: dict[int, ImageFile] = {}
        self.issued = self.released = 0
        self.exhausted = self.stopped = self.closed = False
        self.error: BaseException | None = None
        self.processes: list[_Process] = []
        self.failures = 0
        self.wake_in, self.wake_out = os.pipe()
        os.set_blocking(self.wake_out, False)

    def results(self) -> Iterator[Found]:
        number = 0
        while True:
            with self.change:
                while number not in self.found and self.error is None:
                    if self.exhausted and number == self.issued:
                        return
                    self.change.wait()
                if self.error is not None:
                    raise self.error
                found = self.found.pop(number)
            number += 1
            yield found

    def release(self, count: int) -> None:
        with self.change:
            self.released += count
            self._wake()

    def stop(self) -> None:
        with self.change:
            self.stopped = True
            self._wake()

    def close(self) -> None:
        """Close the pipe that wakes the thread, which has ended."""
        with self.change:
            self.closed = True
            os.close(self.wake_in)
            os.close(self.wake_out)

    def _wake(self) -> None:
        """Wake the thread; with the lock held, as the number of a closed pipe may be that of another's file by now."""
        if not self.closed:
            with suppress(BlockingIOError):  # it is full, so the thread wakes anyway
                os.write(self.wake_out, b"x")

    def feed(self) -> None:
        """Send images and receive answers until everything is done."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.wake_in, selectors.EVENT_READ)
            try:
                while not self.stopped and not self._done():
                    self._hand_out(selector)
                    for key, _ in selector.select(1.0):
                        if key.data is None:
                            os.read(self.wake_in, 2**16)
                        else:
                            self._take_in(key.data, selector)
                    for process in list(self.processes):
                        if process.waiting and time.monotonic() - process.since > PATIENCE:
                            self._replace(process, selector, f"decoding it took more than {PATIENCE:.0f} s")
            except BaseException as error:  # it goes to whoever waits for images
                with self.change:
                    self.error = error
                    self.change.notify_all()
            finally:
                for process in self.processes:
                    process.end()

    def _done(self) -> bool:
        return self.exhausted and not any(process.waiting for process in self.processes)

    def _hand_out(self, selector: selectors.BaseSelector) -> None:
        terms = self.pool.terms
        while not self.exhausted and self.issued < self.released + terms.slots:
            free = [process for process in self.processes if len(process.waiting) < DEPTH]
            idle = any(not process.waiting for process in free)
            if not idle and len(self.processes) < self.pool.workers:
                free.append(self._start(selector))
            if not free:
                return
            try:
                image = next(self.images)
            except StopIteration:
                with self.change:
                    self.exhausted = True
                    self.change.notify_all()
                return
            number, self.issued = self.issued, self.issued + 1
            self.names[number] = image
            try:
                request = self._inline(number % terms.slots, image)
            except Exception as error:
                self._settle(number, Found(image, "skip", str(error) or type(error).__name__))
                continue
            self._send(min(free, key=lambda process: len(process.waiting)), number, request)

    def _inline(self, slot: int, image: ImageFile) -> dict[str, Any]:
        """Describe an image; data that only this process has goes into the slot."""
        request = image.describe()
        data = image.inline()
        if data is None:
            return request
        if len(data) > self.pool.terms.slot_bytes:
            (self.pool.spill / f"{slot}.in").write_bytes(data)
        else:
            start = slot * self.pool.terms.slot_bytes
            self.pool.memory[start : start + len(data)] = data
        return {**request, "inline": len(data)}

    def _send(self, process: _Process, number: int, request: dict[str, Any]) -> None:
        if not process.waiting:
            process.since = time.monotonic()
        process.waiting.append((number, request))
        process.write(json.dumps([number, number % self.pool.terms.slots, request]))

    def _start(self, selector: selectors.BaseSelector) -> _Process:
        process = _Process(self.pool.terms)
        self.processes.append(process)
        selector.register(process.stdout, selectors.EVENT_READ, process)
        return process

    def _take_in(self, process: _Process, selector: selectors.BaseSelector) -> None:
        lines = process.lines()
        if lines is None:
            status = process.process.wait()
            how = f"signal {-status}" if status < 0 else f"status {status}"
            self._replace(process, selector, f"the decoder crashed on it ({how})")
            return
        for line in lines:
            if not process.ready:
                process.ready = True
                process.since = time.monotonic()
                continue
            number, kind, data, *seconds = line
            process.waiting.popleft()
            process.since = time.monotonic()
            image = self.names[number]
            if kind == "skip":
                self._settle(number, Found(image, "skip", data))
            else:
                self._settle(number, Found(image, *self._array(number, kind, data), tuple(seconds[0])))

    def _array(self, number: int, kind: str, shape: list[int]) -> tuple[str, npt.NDArray[np.uint8]]:
        slot, size = number % self.pool.terms.slots, int(np.prod(shape))
        if kind.endswith(" file"):
            path = self.pool.spill / f"{slot}.out"
            array = np.fromfile(path, np.uint8)
            path.unlink()
            return kind.removesuffix(" file"), array.reshape(shape)
        start = slot * self.pool.terms.slot_bytes
        return kind, self.pool.array[start : start + size].reshape(shape)

    def _settle(self, number: int, found: Found) -> None:
        with self.change:
            self.found[number] = found
            self.names.pop(number)
            self.change.notify_all()

    def _replace(self, process: _Process, selector: selectors.BaseSelector, why: str) -> None:
        """End a process, skip the image it was working on, and give the others to a new process."""
        selector.unregister(process.stdout)
        self.processes.remove(process)
        process.process.kill()
        process.process.wait()
        waiting, printed = list(process.waiting), process.why()
        process.end()
        if process.ready and waiting:
            number, _ = waiting.pop(0)
            self._settle(number, Found(self.names[number], "skip", why))
        elif not process.ready:
            self.failures += 1
            if self.failures >= ATTEMPTS:
                raise ResourceError(f"The processes that decode images cannot start: {printed[:200]}.")
        if waiting:
            new = self._start(selector)
            for number, request in waiting:
                self._send(new, number, request)
