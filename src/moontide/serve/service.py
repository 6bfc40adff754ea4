"""The server without HTTP: the streams of a store, each behind its line, and what requests ask of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moontide.core.arrays import as_real, unit_rows
from moontide.encoders import Encoder
from moontide.encoders.prompts import embed_classes
from moontide.errors import InputError, MoontideError, OptionError, unknown_name
from moontide.registry import method, method_names, method_type
from moontide.serve.auth import Gate
from moontide.serve.batching import BusyError, Line
from moontide.serve.images import TooLargeError, embed
from moontide.serve.journal import DamagedError, Snapshot, Store
from moontide.serve.metrics import Metrics
from moontide.serve.models import MAX_PUSH
from moontide.serve.state import Answer, Config, Floats, GoneError, Item, Stream, TakenError
from moontide.simulate import Simulated, simulate

TICK = 1.0  # seconds between two syncs of the policy "interval", and two looks for changed tokens

T = TypeVar("T")
log = logging.getLogger("moontide.serve")


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much the server holds."""

    max_streams: int = 64
    max_waiting: int = 16384  # samples in line before a stream
    max_snapshots: int = 16  # of a stream
    keep: int = 100_000  # samples of a stream whose answers and idempotency keys are kept


class Classes(NamedTuple):
    """What a stream tells apart."""

    text: Floats  # (K, d)
    names: tuple[str, ...]
    logit_scale: float
    source: str


@cache
def sample_set() -> Simulated:
    """Draw the simulated sample set: 480 samples of 8 among 100 classes, some of them rare."""
    return simulate(480, 100, effective_classes=8, imbalance=4, seed=1)


def usable_methods() -> list[str]:
    """Name the methods that need nothing but embeddings.

    >>> "moon" in usable_methods(), "mta" in usable_methods()
    (True, False)
    """
    return [name for name in method_names() if not method_type(name).needs]


class Service:
    """All streams of a store."""

    def __init__(
        self,
        store: Store,
        *,
        gate: Gate | None = None,
        limits: Limits | None = None,
        encoder: Encoder | None = None,
        classes: Sequence[str] = (),
        samples: Sequence[Path] = (),
        device: str = "cpu",
    ) -> None:
        """Name the parts; `open` starts them. `classes` are those of the stream "default", made where it is missing."""
        self.store, self.encoder, self.samples, self.device = store, encoder, samples, device
        self.classes = check_names(classes)
        self.gate, self.limits, self.metrics = gate or Gate(), limits or Limits(), Metrics()
        self.lines: dict[str, Line] = {}
        self.failed: dict[str, str] = {}  # streams that cannot be read, and why
        self.loading, self.closing = 0, False
        cores = os.cpu_count() or 1
        self.pool = ThreadPoolExecutor(cores + 2, "line")
        self.side = ThreadPoolExecutor(cores, "side")  # for what takes no turn, so that it never delays a push

    # Life

    async def open(self) -> None:
        """Start a line for every stream of the store; they are read in the background."""
        self._creating, self._encoding = asyncio.Lock(), asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        known = await self.aside(self.store.streams)
        for name, text in known.items():
            self.loading += 1
            self._start(self._load(name, text))
        if self.classes and "default" not in known:
            await self.create(name="default", classes=self.classes)
        self._start(self._tick())

    async def _load(self, name: str, text: str) -> None:
        try:
            config = Config.read(text)
            solver = method(config.method, **config.options)
            self.lines[name] = self._line(Stream(name, config, self.store, solver, self.device, self.limits.keep))
            await self.lines[name].moment()
        except Exception as error:
            self.failed[name] = str(error)
            log.error("stream %s: %s", name, error)
        finally:
            self.loading -= 1

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            with contextlib.suppress(MoontideError):
                await self.aside(self.store.sync)
                # never from some to none, which would open the server
                self.gate.tokens = await self.aside(self.store.tokens) or self.gate.tokens

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def hush(self) -> None:
        """End the event streams, which would hold up the end of the server."""
        self.closing = True
        for line in self.lines.values():
            line.tell(None)

    async def close(self) -> None:
        """Finish what waits in every line, make checkpoints, and close the store."""
        self.hush()
        for task in self._tasks:
            task.cancel()
        ends = [line.end(line.stream.checkpoint) for line in self.lines.values()]
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if error is not None:
                log.error("%s", error)
        self.pool.shutdown()
        self.side.shutdown()
        self.store.close()

    async def aside(self, function: Callable[[], T]) -> T:
        """Run a function on a thread, beside the lines."""
        return await asyncio.get_running_loop().run_in_executor(self.side, function)

    # Streams

    def line(self, name: str) -> Line:
        """Return the line of a stream."""
        if name in self.lines:
            return self.lines[name]
        if name in self.failed:
            raise DamagedError(f"The stream {name!r} cannot be read: {self.failed[name]}")
        raise GoneError(f"There is no stream {name!r}.")

    def _line(self, stream: Stream) -> Line:
        return Line(stream, self.pool, self.metrics, self.limits.max_waiting)

    async def create(
        self,
        *,
        name: str | None = None,
        classes: Sequence[str] | None = None,
        prototypes: Any = None,
        sample: str | None = None,
        template: str | None = None,
        method_name: str = "moon",
        preset: str | None = None,
        options: Mapping[str, Any] | None = None,
        logit_scale: float | None = None,
        **batching: Any,
    ) -> Line:
        """Make a stream from prototypes, from class names, or from the sample set."""
        presets = method_type(method_name).presets
        if preset is not None and preset not in presets:
            raise unknown_name(f"preset of {method_name}", preset, presets)
        solver = method(method_name, **{**(presets[preset] if preset else {}), **(options or {})})
        async with self._creating:
            if len(self.lines) >= self.limits.max_streams:
                raise BusyError(f"There are {len(self.lines)} streams, as many as may be; delete one first.", 60)
            stream = name or secrets.token_hex(6)
            if stream in self.lines or stream in self.failed:
                raise TakenError(f"There is a stream {stream!r} already; choose another name, or delete it first.")
            text, names, scale, source = await self._classes(classes, prototypes, sample, template)
            values = {key: getattr(solver, key) for key in solver.specs()}
            scale = scale if logit_scale is None else logit_scale
            config = Config(method_name, values, names, text.shape[1], scale, source, created=time.time(), **batching)
            made = await self.aside(
                lambda: Stream.create(stream, config, text, self.store, solver, self.device, self.limits.keep)
            )
            self.lines[stream] = self._line(made)
            return self.lines[stream]

    async def _classes(
        self, names: Sequence[str] | None, prototypes: Any, sample: str | None, template: str | None
    ) -> Classes:
        if sample is not None:
            if names is not None or prototypes is not None:
                raise OptionError("'sample' has its own classes; leave out 'classes' and 'prototypes'.")
            data = await self.aside(sample_set)
            return Classes(data.text, data.class_names, data.logit_scale, sample)
        if prototypes is not None:
            text = check_rows(prototypes, "prototypes")
            names = tuple(names or (f"class {k}" for k in range(len(text))))
            if len(names) != len(text):
                raise InputError(f"'classes' must have one name for each of {len(text)} prototypes. Got {len(names)}.")
            return Classes(text, check_names(names), 100.0, "prototypes")
        if names is None:
            raise InputError("A stream needs 'classes' or 'prototypes'; send one of them.")
        encoder, names = self._encoder(), check_names(names)
        async with self._encoding:
            made = await self.aside(lambda: embed_classes(encoder, names, () if template is None else (template,)))
        return Classes(made.text, made.names, float(encoder.logit_scale), encoder.id)

    def _encoder(self) -> Encoder:
        if self.encoder is None:
            raise InputError(
                "This server has no encoder, so it takes no class names without prototypes and no images; "
                "send embeddings, or start it with '--encoder'."
            )
        return self.encoder

    async def delete(self, name: str) -> None:
        """Delete a stream at once, with all that belongs to it."""
        if name in self.failed and name not in self.lines:
            await self.aside(lambda: self.store.delete(name))
        else:
            await self.line(name).end(lambda: self.store.delete(name), now=True)
        self.lines.pop(name, None)
        self.failed.pop(name, None)
        self.metrics.forget(name)

    # Samples

    async def push(self, line: Line, x: Floats, key: str | None, crc: int | None = None) -> Answer:
        """Give checked embeddings (n, d) to a stream, and wait for the answer."""
        dim = line.stream.config.dim
        if x.shape[1] != dim:
            raise InputError(f"Embeddings must have the dimension of the stream, {dim}. Got {x.shape[1]} instead.")
        if len(x) > MAX_PUSH:
            raise TooLargeError(f"A push may have {MAX_PUSH} samples. Got {len(x)} instead; send several.")
        if crc is None and key is not None:
            crc = zlib.crc32(x.data)
        return await line.push(Item(x, key, crc or 0))

    async def push_images(self, line: Line, files: Sequence[bytes], key: str | None) -> Answer:
        """Embed images, and give them to a stream."""
        encoder = self._encoder()
        if not files:
            raise InputError("A push needs at least one image, as a part 'images' of multipart/form-data.")
        if encoder.dim != line.stream.config.dim:
            raise InputError(f"The encoder {encoder.id} has not the dimension of the stream; send embeddings.")
        async with self._encoding:
            x = await self.aside(lambda: embed(files, encoder))
        crc = 0
        for data in files:
            crc = zlib.crc32(data, crc)
        return await self.push(line, check_rows(x, "images"), key, crc)

    async def snapshot(self, line: Line) -> Snapshot:
        """Keep the state as it is now."""
        if len(await self.aside(lambda: self.store.snapshots(line.stream.name))) > self.limits.max_snapshots:
            raise BusyError(f"A stream may have {self.limits.max_snapshots} snapshots; delete one first.", 60)
        return await line.call(line.stream.take_snapshot)


def check_rows(values: Any, name: str) -> Floats:
    """Check embeddings (n, d) and bring them to float32.

    >>> check_rows([[1, 2], [3, float("nan")]], "embeddings")
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'embeddings' must be finite. Got NaN or infinity in row 1; remove or recompute them.
    """
    rows = as_real(values, name)
    with np.errstate(over="ignore"):
        x: Floats = np.ascontiguousarray(rows, dtype=np.float32)
    squares = np.einsum("nd,nd->n", x, x)
    if not 1e-24 < squares.min() <= squares.max() < 1e24:  # or NaN
        unit_rows(x, name)  # says what is not finite, and which rows are zero
    return x


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Refuse class names that are empty or come twice.

    >>> check_names(["cat", "cat"])
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'classes' must be different names. Got 'cat' more than once.
    """
    for name in names:
        if not name.strip() or len(name) > 200 or not name.isprintable():
            raise InputError(f"'classes' must be names of 1 to 200 printable characters. Got {name[:50]!r} instead.")
    (name, times), *_ = Counter(names).most_common(1) or [("", 0)]
    if times > 1:
        raise InputError(f"'classes' must be different names. Got {name!r} more than once.")
    return tuple(names)
