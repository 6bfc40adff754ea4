"""The server without HTTP: the streams of a store, each with its queue, and the operations that requests need."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from moontide.core.devices import to_device
from moontide.encoders import Encoder
from moontide.encoders.prompts import embed_classes
from moontide.errors import InputError, MoontideError, OptionError, ResourceError, unknown_name
from moontide.protocols import as_online
from moontide.registry import method, method_names, method_type
from moontide.serve import batching
from moontide.serve.auth import Gate, Token
from moontide.serve.batching import BusyError, PushQueue, threads
from moontide.serve.blas import products_stay_here
from moontide.serve.images import TooLargeError, embed
from moontide.serve.metrics import Metrics
from moontide.serve.models import DEFAULT_METHOD, MAX_PUSH
from moontide.serve.parsing import MAX_CLASSES, check_rows
from moontide.serve.records import Answer, Config, Corrected, Correction, Floats, Item, Labels, digest_of
from moontide.serve.state import GoneError, Moment, ServedStream, TakenError, try_out
from moontide.serve.steppers import Steppers
from moontide.serve.stream_store import KEEP, DamagedError, Snapshot, StoreError, StreamStore
from moontide.simulate import Simulated, simulate
from moontide.store.classes import ClassList
from moontide.types import Task

TICK = 1.0  # seconds between two syncs of the policy "interval", and two looks for changed tokens
MAX_MAKING = 4  # streams that are being made at a time
EMBED_SECONDS = 30.0  # for embedding the classes of a new stream
EMBEDDED = 32  # classes that are embedded at a time
CLOSE_SECONDS = 10.0  # for the queues to finish when the server is stopped

T = TypeVar("T")
log = logging.getLogger("moontide.serve")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of the server."""

    max_streams: int = 64
    max_waiting: int = 16384  # samples that wait for a stream
    max_snapshots: int = 16  # of a stream
    keep: int = KEEP  # samples of a stream whose answers and idempotency keys are kept


class StreamClasses(NamedTuple):
    """The classes of a stream."""

    text: Floats  # (K, d)
    names: tuple[str, ...]
    logit_scale: float
    source: str


@cache
def sample_set() -> Simulated:
    """Draw the simulated sample set: 480 samples of 8 among 100 classes, some of them rare."""
    return simulate(480, 100, effective_classes=8, imbalance=4, seed=1)


def usable_methods() -> list[str]:
    """List the methods that need only embeddings.

    >>> "moon" in usable_methods(), "mta" in usable_methods()
    (True, False)
    """
    return [name for name in method_names() if not method_type(name).needs]


def warm_up(device: str) -> None:
    """Take steps of the default method, which loads it, and compiles it the first time on a machine."""
    online, text = as_online(method(DEFAULT_METHOD)), to_device(np.eye(2), "float32", device)
    try_out(online, online.start(Task(text[:1, :], text)))


class Service:
    """All streams of a store."""

    def __init__(
        self,
        store: StreamStore,
        *,
        gate: Gate | None = None,
        limits: Limits | None = None,
        encoder: Encoder | None = None,
        classes: Sequence[str] | ClassList = (),
        samples: Sequence[Path] = (),
        device: str = "cpu",
    ) -> None:
        """Set up the service; `open` starts it. `classes`: those of the stream "default", created if missing."""
        self.store, self.encoder, self.samples, self.device = store, encoder, samples, device
        self.classes = check_classes(classes)
        self.gate, self.limits, self.metrics = gate or Gate(), limits or Limits(), Metrics()
        self.queues: dict[str, PushQueue] = {}
        self.failed: dict[str, str] = {}  # streams that cannot be read, and why
        self.trouble: str | None = None  # why the store cannot be written
        self.making: dict[str, bool] = {}  # names of streams that are being made, and whether somebody waits for them
        self.loading, self.closing = 0, False
        self.warming = True  # whether the default method is still being compiled
        self.steppers = Steppers()
        self.side = ThreadPoolExecutor((os.cpu_count() or 1) + 2, "side")  # for what takes no turn
        self.revising: dict[str, asyncio.Future[Any]] = {}  # by stream
        self.revisions = ThreadPoolExecutor(self.limits.max_streams, "revision")

    # Life

    async def open(self) -> None:
        """Start a queue for every stream of the store; they are read in the background."""
        products_stay_here()
        self._encoding, self._mapping, self.parsing = asyncio.Lock(), asyncio.Lock(), asyncio.Semaphore(2)
        self._tasks: set[asyncio.Task[None]] = set()
        known = await self.aside(self.store.streams)
        for name, config in known.items():
            self.loading += 1
            self._start(self._load(name, config))
        if self.classes.names and "default" not in known:
            await self.create(name="default", classes=self.classes, spent=-math.inf)
        self._start(self._warm())
        self._start(self._tick())

    async def _warm(self) -> None:
        """Have the default method compiled, once on a machine, so that no client waits for it."""
        self.loading += 1
        with contextlib.suppress(MoontideError):  # creating a stream with this method reports the error
            await self.aside(lambda: warm_up(self.device))
        self.warming = False
        self.loading -= 1

    async def _load(self, name: str, text: str | DamagedError) -> None:
        try:
            if isinstance(text, DamagedError):
                raise text
            config = Config.read(text)
            chosen = method(config.method, **config.options)
            queue = self._queue(ServedStream(name, config, self.store, chosen, self.device, self.limits.keep))
            self.queues[name] = queue
            while queue.stream.moment is None:
                with contextlib.suppress(BusyError):  # many records take their time
                    await queue.moment()
                await asyncio.sleep(0.1 if queue.busy else 0)
        except Exception as error:
            if isinstance(error, StoreError) and not isinstance(error, DamagedError):
                return  # it is read when the store is back
            self.failed[name] = str(error)
            log.error("stream %s: %s", name, error)
            if name in self.queues:
                await self.queues.pop(name).end(lambda: None, now=True)
        finally:
            self.loading -= 1

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            await self._try("sync", self._sync)
            await self._try("tokens", self._read_tokens)

    async def _try(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Repeat a task forever, whatever fails."""
        try:
            await work()
        except StoreError as error:
            self.note_trouble(error)
        except Exception:
            log.exception("%s", what)

    async def _sync(self) -> None:
        await self.aside(self.store.sync)
        if self.trouble is not None:
            await self.aside(self.store.try_write)
            log.warning("the data in %s can be written again", self.store.location)
            self.trouble = None

    async def _read_tokens(self) -> None:
        kept = await self.aside(self.store.tokens)
        self.gate.set_tokens({name: Token.read(data) for name, data in kept.items()})

    def note_trouble(self, error: StoreError) -> None:
        """Remember why the store cannot be written, until it can, and write it into the log once."""
        if self.trouble is None:
            log.error("%s", error)
        self.trouble = str(error)

    def problems(self) -> dict[str, str]:
        """Describe what is wrong with the server, or with a stream."""
        found = {} if self.trouble is None else {"store": self.trouble}
        if self.warming:
            found["methods"] = f"{DEFAULT_METHOD} is being loaded, and compiled the first time on a machine"
        for name, queue in self.queues.items():
            if queue.busy is not None:
                spent = time.monotonic() - queue.busy + batching.STEP_SECONDS
                found[f"stream {name}"] = f"busy with one step for {spent:.0f} s"
        return found

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def close_events(self) -> None:
        """End event streams and unfinished requests, which would delay the shutdown."""
        self.closing = True
        self.gate.close()
        for queue in self.queues.values():
            queue.tell_end()

    async def close(self) -> None:
        """Finish the steps under way, write checkpoints, and close the store; nobody waits for other pushes."""
        self.close_events()
        for task in self._tasks:
            task.cancel()
        ends = [asyncio.ensure_future(queue.end(queue.stream.checkpoint, now=True)) for queue in self.queues.values()]
        if ends:
            done, late = await asyncio.wait(ends, timeout=CLOSE_SECONDS)
            for end in done:
                if (error := end.exception()) is not None:
                    log.error("%s", error)
            for end in late:
                end.cancel()
        self.steppers.close()
        self.side.shutdown(wait=False)
        self.revisions.shutdown(wait=False)
        self.store.close()

    async def aside(self, function: Callable[[], T]) -> T:
        """Run a function in a thread, independently of the queues."""
        return await asyncio.get_running_loop().run_in_executor(self.side, batching.within_memory, function)

    # Streams

    def queue(self, name: str) -> PushQueue:
        """Return the queue of a stream."""
        if name in self.queues:
            return self.queues[name]
        if name in self.failed:
            raise DamagedError(f"The stream {name!r} cannot be read: {self.failed[name]}")
        raise GoneError(f"There is no stream {name!r}.")

    def _queue(self, stream: ServedStream, thread: ThreadPoolExecutor | None = None) -> PushQueue:
        stream.steppers = self.steppers
        return PushQueue(stream, self.metrics, self.limits.max_waiting, thread, self.note_trouble)

    async def create(
        self,
        *,
        name: str | None = None,
        classes: Sequence[str] | ClassList | None = None,
        synonyms: Mapping[str, Sequence[str]] | None = None,
        prototypes: Any = None,
        sample: str | None = None,
        template: str | None = None,
        method_name: str = DEFAULT_METHOD,
        preset: str | None = None,
        options: Mapping[str, Any] | None = None,
        logit_scale: float | None = None,
        spent: float = 0.0,
        **batching: Any,
    ) -> PushQueue:
        """Create a stream from prototypes, from class names, or from the sample set.

        `spent`: seconds of its time budget that have passed, as for reading the request.
        """
        presets = method_type(method_name).presets
        if preset is not None and preset not in presets:
            raise unknown_name(f"preset of {method_name}", preset, presets)
        given = {key: math.inf if value == "inf" else value for key, value in (options or {}).items()}
        chosen = method(method_name, **{**(presets[preset] if preset else {}), **given})
        values = {key: getattr(chosen, key) for key in chosen.specs()}
        if len(self.queues) + len(self.making) >= self.limits.max_streams:
            raise BusyError(f"There are {len(self.queues)} streams, which is the limit; delete one first.", 60)
        if len(self.making) >= MAX_MAKING:
            raise BusyError(f"{MAX_MAKING} streams are being created already; try again.", 5)
        stream = name or secrets.token_hex(6)
        if stream in self.queues or stream in self.failed or stream in self.making:
            raise TakenError(f"The stream {stream!r} exists already; choose another name, or delete it first.")
        self.making[stream] = True
        try:
            if template is not None and (classes is None or prototypes is not None):
                raise OptionError("'template' needs 'classes' that the encoder embeds, without 'prototypes'.")
            if synonyms is not None and (classes is None or prototypes is not None):
                raise OptionError("'synonyms' need 'classes' that the encoder embeds, without 'prototypes'.")
            asked = None if classes is None else check_classes(classes, synonyms)
            text, names, scale, source = await self._classes(asked, prototypes, sample, template, EMBED_SECONDS - spent)
            scale = scale if logit_scale is None else logit_scale
            config = Config(method_name, values, names, text.shape[1], scale, source, created=time.time(), **batching)
            new = ServedStream(stream, config, self.store, chosen, self.device, self.limits.keep)
        except BaseException:
            del self.making[stream]
            raise
        return await self._in_time(new, self._start(self._make(new, text)), spent)

    async def _in_time(self, new: ServedStream, work: asyncio.Task[None], spent: float) -> PushQueue:
        """Return the queue of a stream that is being made; one that takes too long is given up."""
        if not await batching.in_time(work, batching.STEP_SECONDS - spent):
            self.making[new.name] = False
            work.add_done_callback(partial(_note_late, new.name))
            raise ResourceError(
                f"Making this stream takes longer than {batching.STEP_SECONDS:g} s; use fewer classes or dimensions, "
                "smaller options, or another method."
            )
        work.result()
        return self.queues[new.name]

    async def _make(self, new: ServedStream, text: Floats) -> None:
        """Make a stream and write it down; nothing is left of one that was given up meanwhile.

        Its name is taken until then.
        """
        thread, loop = threads(new.name), asyncio.get_running_loop()

        def work(function: Callable[..., T], *given: Any) -> asyncio.Future[T]:
            return loop.run_in_executor(thread, batching.within_memory, partial(function, *given))

        try:
            moment = await work(new.prepare, text, self.device)
            if self.making[new.name]:
                await work(new.add, moment)
            if self.making[new.name]:
                self.queues[new.name] = self._queue(new, thread)
            else:
                await work(self.store.delete, new.name)
        finally:
            del self.making[new.name]
            if new.name not in self.queues:
                thread.shutdown(wait=False)

    async def _classes(
        self, classes: ClassList | None, prototypes: Any, sample: str | None, template: str | None, seconds: float
    ) -> StreamClasses:
        if sample is not None:
            if classes is not None or prototypes is not None:
                raise OptionError("'sample' has its own classes; leave out 'classes' and 'prototypes'.")
            data = await self.aside(sample_set)
            return StreamClasses(data.text, data.class_names, data.logit_scale, sample)
        if prototypes is not None:
            text = prototypes if isinstance(prototypes, np.ndarray) else check_rows(prototypes, "prototypes")
            if len(text) > MAX_CLASSES:
                raise TooLargeError(f"A stream may have at most {MAX_CLASSES} classes. Got {len(text)} instead.")
            names = tuple(f"class {k}" for k in range(len(text))) if classes is None else classes.names
            if len(names) != len(text):
                raise InputError(f"'classes' must have one name for each of {len(text)} prototypes. Got {len(names)}.")
            return StreamClasses(text, names, 100.0, "prototypes")
        if classes is None:
            raise InputError("A stream needs 'classes' or 'prototypes'; send one of them.")
        encoder, templates = self._encoder(), () if template is None else (template,)
        deadline, text = time.monotonic() + seconds, []
        for start in range(0, len(classes.names), EMBEDDED):
            if time.monotonic() > deadline:
                raise ResourceError(
                    f"Embedding {len(classes.names)} classes takes longer than {EMBED_SECONDS:g} s; send fewer classes "
                    "and synonyms, or 'prototypes', or start the server with '--classes'."
                )
            part = classes.part(start, start + EMBEDDED)
            async with self._encoding:  # images are embedded between the parts
                made = await self.aside(partial(embed_classes, encoder, part, templates))
            text.append(made.text)
        return StreamClasses(np.concatenate(text), classes.names, float(encoder.logit_scale), encoder.id)

    def _encoder(self) -> Encoder:
        if self.encoder is None:
            raise InputError(
                "This server has no encoder, so it accepts no images, and class names only with prototypes; "
                "send embeddings, or start it with '--encoder'."
            )
        return self.encoder

    async def delete(self, name: str) -> None:
        """Delete a stream and its data at once."""
        if name in self.failed and name not in self.queues:
            await self.aside(lambda: self.store.delete(name))
        else:
            await self.queue(name).end(lambda: self.store.delete(name), now=True)
        self.queues.pop(name, None)
        self.failed.pop(name, None)
        self.metrics.forget(name)

    # Samples

    async def push(
        self, queue: PushQueue, x: Floats, key: str | None, known: Labels | None = None, digest: bytes | None = None
    ) -> Answer:
        """Push validated embeddings (n, d) to a stream, and wait for the answer."""
        dim = queue.stream.config.dim
        if x.shape[1] != dim:
            raise InputError(f"Embeddings must have the dimension of the stream, {dim}. Got {x.shape[1]} instead.")
        if len(x) > MAX_PUSH:
            raise TooLargeError(f"A push may have at most {MAX_PUSH} samples. Got {len(x)} instead; send several.")
        if known is not None:
            queue.stream.online.require_accepted("known")
            if len(known) != len(x):
                raise InputError(f"'known' must have one entry for each of {len(x)} samples. Got {len(known)} instead.")
        if digest is None and key is not None:
            digest = digest_of(x, known)
        return await queue.push(Item(x, key, digest or b"", known))

    async def push_images(self, queue: PushQueue, files: Sequence[bytes], key: str | None) -> Answer:
        """Embed images and push them to a stream."""
        encoder = self._encoder()
        if not files:
            raise InputError("A push needs at least one image, as a part 'images' of multipart/form-data.")
        if encoder.dim != queue.stream.config.dim:
            raise InputError(f"The encoder {encoder.id} does not match the dimension of the stream; send embeddings.")
        async with self._encoding:
            x = await self.aside(lambda: embed(files, encoder))
        return await self.push(queue, check_rows(x, "images"), key, digest=digest_of(*files))

    async def correct(
        self, queue: PushQueue, samples: Sequence[int], labels: Sequence[Any], key: str | None
    ) -> Corrected:
        """Set the true labels (numbers or names) of samples that were answered before, given by number."""
        if len(samples) != len(labels):
            raise InputError(f"'labels' must have one entry for each of {len(samples)} samples. Got {len(labels)}.")
        if len(set(samples)) < len(samples):
            raise InputError("'samples' must be distinct numbers. Got one more than once.")
        numbers = np.asarray(samples, np.int64)
        known = class_numbers(labels, queue.stream.config.class_names, "labels")
        return await queue.correct(Correction(numbers, known, key, digest_of(numbers, known)))

    async def revise(self, queue: PushQueue) -> tuple[Moment, tuple[int, Any, Any]]:
        """Label the window of a stream again, one at a time, no longer than a step may take; return also its moment."""
        moment, name = await queue.moment(), queue.stream.name
        if name in self.revising:
            raise BusyError(f"A revision of the stream {name!r} is under way already; try again.", 5)
        loop, function = asyncio.get_running_loop(), partial(queue.stream.revise, moment)
        work = self.revising[name] = loop.run_in_executor(self.revisions, batching.within_memory, function)
        work.add_done_callback(lambda late: (self.revising.pop(name, None), late.cancelled() or late.exception()))
        if not await batching.in_time(work):
            raise BusyError(
                f"Labelling the window of the stream {name!r} takes longer than {batching.STEP_SECONDS:g} s; "
                "create it with a smaller 'window'.",
                60,
            )
        return moment, work.result()

    async def flat_map(self, queue: PushQueue) -> tuple[int, Any, Any]:
        """Return the map of a stream's window; one at a time, since maps are large."""
        moment = await queue.moment()
        async with self._mapping:
            return await self.aside(lambda: queue.stream.flat_map(moment))

    async def snapshot(self, queue: PushQueue) -> Snapshot:
        """Save the current state as a snapshot."""
        if len(await self.aside(lambda: self.store.snapshots(queue.stream.name))) > self.limits.max_snapshots:
            raise BusyError(f"A stream may have at most {self.limits.max_snapshots} snapshots; delete one first.", 60)
        return await queue.call(queue.stream.take_snapshot)


def _note_late(name: str, work: asyncio.Task[None]) -> None:
    """Write into the log why a stream that was given up could not be made, or could not be deleted."""
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("stream %s, which was given up: %s", name, error)


def class_numbers(labels: Sequence[Any], names: Sequence[str], field: str) -> Labels:
    """Return classes given by number or name as numbers, with -1 for None.

    >>> class_numbers(["dog", 0, None], ("cat", "dog"), "labels")
    array([ 1,  0, -1])
    >>> class_numbers(["cow"], ("cat", "dog"), "labels")
    Traceback (most recent call last):
        ...
    moontide.errors.UnknownNameError: There is no class 'cow'. Known: cat, dog.
    """
    found = {name: k for k, name in enumerate(names)} if any(isinstance(label, str) for label in labels) else {}
    numbers = []
    for label in labels:
        if isinstance(label, str):
            if label not in found:
                raise unknown_name("class", label, names[:20])
            label = found[label]
        elif label is None:
            label = -1
        elif not 0 <= label < len(names):
            raise InputError(f"'{field}' must be names of classes, or numbers from 0 to {len(names) - 1}. Got {label}.")
        numbers.append(label)
    return np.asarray(numbers, np.int64)


def check_classes(classes: Sequence[str] | ClassList, synonyms: Mapping[str, Sequence[str]] | None = None) -> ClassList:
    """Refuse class names that are empty or repeated, and synonyms for unknown names.

    >>> check_classes(["cat", "cat"])
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'classes' must be distinct names. Got 'cat' more than once.
    """
    found = classes if isinstance(classes, ClassList) else ClassList(tuple(classes))
    names = found.names
    for name in names:
        if not name.strip() or len(name) > 200 or not name.isprintable():
            raise InputError(f"'classes' must be names of 1 to 200 printable characters. Got {name[:50]!r} instead.")
    (name, times), *_ = Counter(names).most_common(1) or [("", 0)]
    if times > 1:
        raise InputError(f"'classes' must be distinct names. Got {name!r} more than once.")
    return found if synonyms is None else found.with_prompts(synonyms)
