"""Many images through an encoder: decoded in worker threads, encoded in batches, kept in a store that can go on.

A store is written shard by shard; whoever runs the same command again goes on after the last whole shard.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moontide.encoders.base import BATCH, Encoder, FloatArray, Prepared
from moontide.encoders.prompts import Classes
from moontide.encoders.sources import ImageFile, Skip
from moontide.errors import ImageError
from moontide.store.features import FeatureStore, Origin

SHARD = 1024  # images in a file of a store: what is encoded again after a stop, at most
AHEAD = 2  # batches that are decoded while one is encoded


class Encoded(NamedTuple):
    """Some images with their vectors, and those among them that could not be decoded."""

    images: list[ImageFile]
    features: FloatArray  # (n, d) unit rows, one for each of `images`
    skipped: list[Skip]


def encode_files(
    encoder: Encoder, images: Iterable[ImageFile], *, batch_size: int = BATCH, workers: int | None = None
) -> Iterator[Encoded]:
    """Encode images batch by batch, in their order; `workers` threads decode them (None: one a core).

    >>> from moontide.encoders.base import Encoder
    >>> class Size(Encoder):
    ...     id, dim, logit_scale, preprocessing = "size", 2, 10.0, ""
    ...     def prepare(self, image): return {"size": np.asarray(image.size)}
    ...     def _images(self, batch): return np.stack([one["size"] for one in batch])
    ...     def _text(self, prompts): ...
    >>> list(encode_files(Size(), [ImageFile("no.jpg", Path("no.jpg"))]))[0].skipped
    [Skip(id='no.jpg', reason='it cannot be read (No such file or directory)')]
    """

    def prepare(image: ImageFile) -> Prepared | Skip:
        try:
            return encoder.prepare(image.read())
        except ImageError as error:
            return Skip(image.id, str(error))

    rest = iter(images)
    pending: deque[list[tuple[ImageFile, Future[Prepared | Skip]]]] = deque()
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, "decode")
    try:
        while True:
            while len(pending) < AHEAD and (batch := list(islice(rest, batch_size))):
                pending.append([(image, pool.submit(prepare, image)) for image in batch])
            if not pending:
                return
            done = [(image, future.result()) for image, future in pending.popleft()]
            good = [(image, found) for image, found in done if not isinstance(found, Skip)]
            bad = [found for _, found in done if isinstance(found, Skip)]
            yield Encoded([image for image, _ in good], encoder.encode_prepared([found for _, found in good]), bad)
    finally:
        pool.shutdown(cancel_futures=True)


def encode_to_store(
    folder: str | Path,
    encoder: Encoder,
    images: Sequence[ImageFile],
    classes: Classes | None = None,
    *,
    batch_size: int = BATCH,
    workers: int | None = None,
    shard_size: int = SHARD,
    labels: Mapping[str, int] | None = None,
    dataset: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    through: Callable[[Sequence[ImageFile]], Iterable[Encoded]] | None = None,
) -> tuple[FeatureStore, list[Skip]]:
    """Encode the images that a store does not hold yet; return the store and the images that could not be decoded.

    The folder must be new, or a store that the same encoder, preprocessing, templates and classes made. `labels` are
    the class numbers of the images by id, and `dataset` its name, both only for scoring. `through` encodes images
    elsewhere, in their order, else they go through `encoder` here.
    """
    names, text, templates = ((), None, ()) if classes is None else (classes.names, classes.text, classes.templates)
    origin = Origin(encoder.id, encoder.preprocessing, templates, encoder.logit_scale, dataset)
    store = FeatureStore.create(folder, origin, names, text)
    held = set(store.ids)
    rest = [image for image in images if image.id not in held]
    skipped: list[Skip] = []
    waiting: list[Encoded] = []
    done = len(images) - len(rest)
    progress(done, len(images))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # of odd metadata; here, since filters are not thread-safe
        here = partial(encode_files, encoder, batch_size=batch_size, workers=workers)
        for encoded in (through or here)(rest):
            skipped += encoded.skipped
            waiting.append(encoded)
            done += len(encoded.images) + len(encoded.skipped)
            if sum(len(one.images) for one in waiting) >= shard_size:
                store, waiting = _flush(store, waiting, labels), []
            progress(done, len(images))
        store = _flush(store, waiting, labels)
    return store, skipped


def _flush(store: FeatureStore, waiting: Sequence[Encoded], labels: Mapping[str, int] | None) -> FeatureStore:
    ids = [image.id for one in waiting for image in one.images]
    if not ids:
        return store
    features = np.concatenate([one.features for one in waiting])
    return store.append(ids, features, None if labels is None else [labels[i] for i in ids])
