"""Timing of encoding, for `moontide encode --benchmark`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moontide.encoders.base import Encoder, Prepared
from moontide.encoders.pipeline import Count, Seconds, default_workers, encode_files
from moontide.encoders.places import ImageFile
from moontide.errors import ImageError, InputError

PROBE_SECONDS = 1.0  # that the model alone is run for, before the pass and once more after it


@dataclass(frozen=True)
class Timing:
    """The speed of a pass over images, and of the model alone."""

    images: int
    skipped: int
    seconds: float  # from the start of the first process to the last vector
    start: float  # seconds of it until the first image was decoded
    model: float  # images per second of the model alone, on images that are prepared already
    parts: Seconds
    workers: int
    batch_size: int
    precision: str
    runtime: str
    device: str

    @property
    def steady(self) -> float:
        """Images per second after the start."""
        return self.images / (self.seconds - self.start)

    @property
    def share(self) -> float:
        """The speed as a share of that of the model alone."""
        return self.steady / self.model

    def table(self) -> str:
        """Return the measurements as lines of text.

        >>> timing = Timing(90, 0, 2.0, 0.5, 80.0, Seconds(decode=1.0), 2, 32, "float32", "torch", "cpu")
        >>> print(timing.table().partition("read")[0])
        images     90 in 2.00 s, 0 skipped, in batches of 32
        start      0.50 s until the first image was decoded
        steady     60.0 images/s after that, 75 % of the 80.0 images/s of the model alone
        <BLANKLINE>
        """
        parts, n = self.parts, max(1, self.images + self.skipped)
        each = {name: 1000 * getattr(parts, name) / n for name in ("read", "decode", "resize", "copy", "model")}
        by = f", by {self.runtime}" if self.runtime else ""
        where = {"copy": "this process", "model": f"this process, {self.device} in {self.precision}{by}"}
        rows = [
            f"{name:<10} {value:.3f} ms per image ({where.get(name, f'{self.workers} decoding processes')})"
            for name, value in each.items()
        ]
        idle = 100 * parts.wait / self.seconds
        return "\n".join(
            [
                f"images     {self.images} in {self.seconds:.2f} s, {self.skipped} skipped, in batches of "
                f"{self.batch_size}",
                f"start      {self.start:.2f} s until the first image was decoded",
                f"steady     {self.steady:.1f} images/s after that, {100 * self.share:.0f} % of the {self.model:.1f} "
                "images/s of the model alone",
                *rows,
                f"waiting    {idle:.0f} % of the time, the model had no images",
            ]
        )


def measure(
    encoder: Encoder,
    images: Sequence[ImageFile],
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    fast: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Timing:
    """Encode images, keep nothing, and measure the pass and the model alone; arguments as those of `encode_files`."""
    batch = batch_size or encoder.batch_size
    parts, done, skipped = Seconds(), 0, 0
    encoder.precision  # noqa: B018  (is settled before the clock starts)
    alone = [model_speed(encoder, images, batch)]
    start = time.perf_counter()
    for found in encode_files(
        encoder, images, batch_size=batch, workers=workers, fast=fast, seconds=parts,
        done=Count(len(images), progress),
    ):  # fmt: skip
        done, skipped = done + len(found.images), skipped + len(found.skipped)
    seconds = time.perf_counter() - start
    alone.append(model_speed(encoder, images, batch))
    workers = workers or default_workers(encoder.device)
    model = 2 / sum(1 / speed for speed in alone)  # other programs may have come or gone
    made_with = (encoder.precision, encoder.runtime, encoder.device)
    return Timing(done, skipped, seconds, parts.begun - start, model, parts, workers, batch, *made_with)


def model_speed(encoder: Encoder, images: Sequence[ImageFile], batch: int) -> float:
    """Return how many prepared images per second the model embeds."""
    whole = prepared(encoder, images, batch)
    encoder.launch(whole)()
    start = time.perf_counter()
    done = run_model(encoder, whole)
    return done / (time.perf_counter() - start)


def run_model(encoder: Encoder, batch: Sequence[Prepared], seconds: float = PROBE_SECONDS) -> int:
    """Run a batch through the model repeatedly for some seconds; return the number of images."""
    done, start = len(batch), time.perf_counter()
    pending = encoder.launch(batch)
    while done == len(batch) or time.perf_counter() - start < seconds:
        following = encoder.launch(batch)
        pending()
        pending, done = following, done + len(batch)
    pending()
    return done


def prepared(encoder: Encoder, images: Sequence[ImageFile], batch: int) -> list[Prepared]:
    """Return a batch of prepared images, some of them more than once."""
    some: list[Prepared] = []
    for image in images:
        if len(some) == min(batch, 16):
            break
        try:
            some.append(encoder.prepare(image.read()))
        except ImageError:
            continue
    if not some:
        raise InputError("None of the first images can be decoded; there is nothing to measure.")
    return [some[i % len(some)] for i in range(batch)]
