"""Encode many images: decoded in other processes, encoded in batches, written to a resumable store.

A store is written shard by shard; running the same command again continues after the last complete shard. A shard is a
whole number of batches, and a batch consists of decoded images only, so that the vectors of a store are identical
wherever a run was interrupted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moontide.encoders.base import Done, Encoder, FloatArray, Prepared, cores
from moontide.encoders.places import ImageFile, Skip
from moontide.encoders.pool import Decoders, Found
from moontide.encoders.prompts import EmbeddedClasses
from moontide.encoders.runtimes import follow, settle
from moontide.errors import missing_extra
from moontide.store.features import MANIFEST, FeatureStore, Origin

SHARD = 1024  # images in a file of a store: what is encoded again after a stop, at most
NICE = 5  # how far decoders stand back where the encoder runs on the same cores


class Count:
    """Counts finished images, and reports the count with the total.

    >>> count = Count(3, print)
    >>> count(2)
    2 3
    """

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, count: int) -> None:
        """Add some."""
        self.done += count
        self.progress(self.done, self.total)


class Encoded(NamedTuple):
    """Some images with their vectors, and those before them that could not be decoded."""

    images: list[ImageFile]
    features: FloatArray  # (n, d) unit rows, one for each of `images`
    skipped: list[Skip]


@dataclass
class Seconds:
    """How the time of a pass is spent; reading, decoding and resizing are summed over all decoding processes."""

    read: float = 0.0
    decode: float = 0.0
    resize: float = 0.0
    wait: float = 0.0  # of the encoder for decoders
    copy: float = 0.0  # batches to the device, and their resizing there
    model: float = 0.0
    begun: float = 0.0  # when the first image was decoded, by the clock `time.perf_counter`


def default_workers(device: str) -> int:
    """Return the number of decoding processes: one per core with a GPU, half of that with a model on the CPU.

    >>> default_workers("cpu") >= 1
    True
    """
    return max(1, cores() // 2 if device == "cpu" else cores())


def encode_files(
    encoder: Encoder,
    images: Iterable[ImageFile],
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    fast: bool = False,
    seconds: Seconds | None = None,
    done: Done = lambda count: None,
) -> Iterator[Encoded]:
    """Encode images batch by batch, in order; `workers` processes decode them.

    batch_size, workers: None is what suits the device. fast: let a GPU decode JPEG files, with small differences.
    seconds: collects the time of each part. done: called with the number of images finished since its last call.

    >>> from moontide.encoders.base import Encoder
    >>> class Size(Encoder):
    ...     id, dim, logit_scale, preprocessing = "size", 2, 10.0, ""
    ...     def prepare(self, image): return {"size": np.asarray(image.size)}
    ...     def _images(self, batch): return np.stack([one["size"] for one in batch])
    ...     def _text(self, prompts): ...
    >>> list(encode_files(Size(), [ImageFile("no.jpg", Path("no.jpg"))]))[0].skipped
    [Skip(id='no.jpg', reason='it cannot be read (No such file or directory)')]
    """
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise missing_extra("pillow", "hf", "Reading images") from None
    spent = Seconds() if seconds is None else seconds
    batch, on_cpu = batch_size or encoder.batch_size, encoder.device == "cpu"
    workers = workers or default_workers(encoder.device)
    pool = Decoders(
        encoder.steps, workers=workers, batch=batch, resize=on_cpu or not encoder.resizes,
        jpeg=_gpu_share(workers) if fast and encoder.decodes_jpeg else 0.0, nice=NICE if on_cpu else 0,
    )  # fmt: skip
    with (
        pool, pool.decoding(images) as found,  # processes start while the device gets ready
        _ready(encoder).pinned(pool.array), ThreadPoolExecutor(workers, "prepare") as threads,
    ):  # fmt: skip
        pending: _Batch | None = None
        for part in _batches(found, batch, spent):
            started = _launch(encoder, part, threads, spent, done)
            if pending is not None:
                yield _finish(pending, pool, spent)
            pending = started
        if pending is not None:
            yield _finish(pending, pool, spent)


def _ready(encoder: Encoder) -> Encoder:
    """Settle the precision of an encoder, once, before the first image."""
    encoder.precision  # noqa: B018
    return encoder


def _gpu_share(workers: int) -> float:
    """Return which share of JPEG files a GPU decodes beside `workers` processes.

    It decodes about as fast as 20 cores (an H200), and has the model to run besides.
    """
    return max(0.25, 1 - workers / 20)


class _Batch(NamedTuple):
    taken: int  # out of the ring
    images: list[ImageFile]
    skipped: list[Skip]
    wait: Callable[[], FloatArray]


def _batches(found: Iterator[Found], size: int, spent: Seconds) -> Iterator[list[Found]]:
    """Put `size` decoded images together, with those between them that could not be decoded.

    A part also ends with `size` images that could not be: one part at work and one that is being filled then never
    need more slots than the ring has.
    """
    part: list[Found] = []
    good = 0
    start = time.perf_counter()
    for one in found:
        spent.begun = spent.begun or time.perf_counter()
        part.append(one)
        good += one.kind != "skip"
        spent.read, spent.decode, spent.resize = (
            a + b for a, b in zip((spent.read, spent.decode, spent.resize), one.seconds, strict=True)
        )
        if size in (good, len(part) - good):
            spent.wait += time.perf_counter() - start
            yield part
            part, good, start = [], 0, time.perf_counter()
    if part:
        yield part


def _launch(encoder: Encoder, part: list[Found], threads: ThreadPoolExecutor, spent: Seconds, done: Done) -> _Batch:
    start = time.perf_counter()
    good = [one for one in part if one.kind != "skip"]
    skipped = [Skip(one.image.id, str(one.data)) for one in part if one.kind == "skip"]
    prepared: list[Prepared | str]
    if encoder.steps is None:
        prepared = list(threads.map(partial(_prepare, encoder), good))
    else:
        prepared = encoder.decoded([{one.kind: np.asarray(one.data)} for one in good])
    pairs = list(zip(good, prepared, strict=True))
    skipped += [Skip(one.image.id, found) for one, found in pairs if isinstance(found, str)]
    batch = [found for found in prepared if not isinstance(found, str)]
    spent.copy += time.perf_counter() - start
    start = time.perf_counter()
    done(len(skipped))
    wait = encoder.launch(batch, done) if batch else lambda: np.zeros((0, encoder.dim), dtype=np.float32)
    spent.model += time.perf_counter() - start
    images = [one.image for one, found in pairs if not isinstance(found, str)]
    return _Batch(len(part), images, skipped, wait)


def _prepare(encoder: Encoder, found: Found) -> Prepared:
    from PIL import Image

    return encoder.prepare(Image.fromarray(np.asarray(found.data)))


def _finish(batch: _Batch, pool: Decoders, spent: Seconds) -> Encoded:
    start = time.perf_counter()
    features = batch.wait()
    spent.model += time.perf_counter() - start
    pool.release(batch.taken)
    return Encoded(batch.images, features, batch.skipped)


def encode_to_store(
    folder: str | Path,
    encoder: Encoder,
    images: Sequence[ImageFile],
    classes: EmbeddedClasses | None = None,
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    shard_size: int = SHARD,
    fast: bool = False,
    labels: Mapping[str, int] | None = None,
    dataset: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    through: Callable[[Sequence[ImageFile]], Iterable[Encoded]] | None = None,
) -> tuple[FeatureStore, list[Skip]]:
    """Encode the images that a store does not hold yet; return the store and the images that could not be decoded.

    The folder must be new, or a store that the same encoder, preprocessing, templates and classes made. `labels` are
    the class numbers of the images by id, and `dataset` its name, both only for scoring. A shard has `shard_size`
    images, or as many more as fill its last batch. `through` encodes images elsewhere, in their order, else they go
    through `encoder` here.
    """
    if (Path(folder) / MANIFEST).exists():
        begun = FeatureStore.open(folder).origin
        follow(encoder, begun.runtime, begun.precision)
    settle(encoder, len(images))
    store = FeatureStore.create(folder, origin_of(encoder, classes, dataset, fast), *_text(classes))
    return add_to_store(
        store, encoder, images, batch_size=batch_size, workers=workers, shard_size=shard_size, fast=fast,
        labels=labels, progress=progress, through=through,
    )  # fmt: skip


def origin_of(
    encoder: Encoder, classes: EmbeddedClasses | None = None, dataset: str | None = None, fast: bool = False
) -> Origin:
    """Return the record of an encoder for a store."""
    return Origin(
        encoder.id, encoder.preprocessing, () if classes is None else classes.templates, encoder.logit_scale, dataset,
        spec=encoder.spec, typed=encoder.typed, precision=encoder.precision, decoding="fast" if fast else "exact",
        runtime=encoder.runtime, folder=os.getcwd(),
    )  # fmt: skip


def _text(classes: EmbeddedClasses | None) -> tuple[Any, ...]:
    return () if classes is None else (classes.names, classes.text)


def add_to_store(
    store: FeatureStore,
    encoder: Encoder,
    images: Sequence[ImageFile],
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    shard_size: int = SHARD,
    fast: bool = False,
    labels: Mapping[str, int] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    through: Callable[[Sequence[ImageFile]], Iterable[Encoded]] | None = None,
) -> tuple[FeatureStore, list[Skip]]:
    """Encode the images that a store does not hold yet, with the encoder that made it; as `encode_to_store`."""
    held = set(store.ids)
    missing = [image for image in images if image.id not in held]
    batch = batch_size or encoder.batch_size
    whole = -(-shard_size // batch) * batch  # images of a shard
    skipped: list[Skip] = []
    waiting: list[tuple[str, FloatArray]] = []  # ids and rows
    count = Count(len(images), progress)
    count(len(images) - len(missing))
    here = partial(encode_files, encoder, batch_size=batch_size, workers=workers, fast=fast, done=count)
    for encoded in (through or here)(missing) if missing else ():
        skipped += encoded.skipped
        waiting += zip((image.id for image in encoded.images), encoded.features, strict=True)
        if through is not None:
            count(len(encoded.images) + len(encoded.skipped))
        while len(waiting) >= whole:
            store, waiting = _flush(store, waiting[:whole], labels), waiting[whole:]
    return _flush(store, waiting, labels), skipped


def _flush(
    store: FeatureStore, waiting: Sequence[tuple[str, FloatArray]], labels: Mapping[str, int] | None
) -> FeatureStore:
    if not waiting:
        return store
    ids = [name for name, _ in waiting]
    return store.append(
        ids, np.stack([row for _, row in waiting]), None if labels is None else [labels[i] for i in ids]
    )
