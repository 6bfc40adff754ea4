"""Where the time of encoding goes: what `moontide encode --benchmark` prints."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moontide.encoders.base import Encoder, Prepared
from moontide.encoders.pipeline import Seconds, default_workers, encode_files
from moontide.encoders.places import ImageFile
from moontide.errors import ImageError, InputError

PROBE_SECONDS = 2.0  # that the model alone is run for


@dataclass(frozen=True)
class Timing:
    """The speed of a pass over images, and of the model alone."""

    images: int
    skipped: int
    seconds: float  # from the start of the first process to the last vector
    steady: float  # images per second after the first tenth
    model: float  # images per second of the model alone, on images that are prepared already
    parts: Seconds
    workers: int
    batch_size: int
    precision: str
    device: str

    @property
    def share(self) -> float:
        """How much of the speed of the model alone is left."""
        return self.steady / self.model

    def table(self) -> str:
        """Write it as lines of text.

        >>> Timing(100, 0, 2.0, 60.0, 80.0, Seconds(decode=1.0), 2, 32, "float32", "cpu").table().splitlines()[1]
        'steady     60.0 images/s, 75 % of the 80.0 images/s of the model alone'
        """
        parts, n = self.parts, max(1, self.images + self.skipped)
        each = {name: 1000 * getattr(parts, name) / n for name in ("read", "decode", "resize", "copy", "model")}
        where = {"copy": "this process", "model": f"this process, {self.device} in {self.precision}"}
        rows = [
            f"{name:<10} {value:.3f} ms an image ({where.get(name, f'{self.workers} decoding processes')})"
            for name, value in each.items()
        ]
        idle = 100 * parts.wait / self.seconds
        return "\n".join(
            [
                f"images     {self.images} in {self.seconds:.2f} s with the start, {self.skipped} skipped, "
                f"in batches of {self.batch_size}",
                f"steady     {self.steady:.1f} images/s, {100 * self.share:.0f} % of the {self.model:.1f} images/s of "
                "the model alone",
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
    alone = model_speed(encoder, images, batch)
    start = time.perf_counter()
    for found in encode_files(encoder, images, batch_size=batch, workers=workers, fast=fast, seconds=parts):
        done, skipped = done + len(found.images), skipped + len(found.skipped)
        progress(done + skipped, len(images))
    seconds = time.perf_counter() - start
    workers = workers or default_workers(encoder.device)
    steady = parts.steady() or done / seconds
    told = (encoder.precision, encoder.device)
    return Timing(done, skipped, seconds, steady, alone, parts, workers, batch, *told)


def model_speed(encoder: Encoder, images: Sequence[ImageFile], batch: int) -> float:
    """Return how many images a second the model embeds when they are prepared already."""
    prepared: list[Prepared] = []
    for image in images:
        if len(prepared) == min(batch, 16):
            break
        try:
            prepared.append(encoder.prepare(image.read()))
        except ImageError:
            continue
    if not prepared:
        raise InputError("None of the first images can be decoded; there is nothing to measure.")
    whole = [prepared[i % len(prepared)] for i in range(batch)]
    encoder.launch(whole)()
    done, start = 0, time.perf_counter()
    pending = encoder.launch(whole)
    while done == 0 or time.perf_counter() - start < PROBE_SECONDS:
        following = encoder.launch(whole)
        pending()
        pending, done = following, done + batch
    pending()
    return (done + batch) / (time.perf_counter() - start)
