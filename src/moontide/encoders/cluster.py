"""`moontide encode` on Ray Data: the batches of a single process, distributed over many encoders, in order.

A row of the dataset is a piece of the list of images, a whole number of batches. Each worker, an actor, is one unit of
an encoder, a GPU where there is one, and its share of the CPUs for the processes that decode images. It puts the
batches of a piece through the encoder as one process would; what comes back, in the order of the images, goes into the
store in this process. So the store is the same, it goes on after a stop in the same way, and no more vectors are in
memory than Ray Data lets wait. A worker that dies is replaced, and its pieces are encoded again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moontide.encoders import encoder
from moontide.encoders.pipeline import Encoded, encode_files
from moontide.encoders.places import ImageFile, Skip, image_from
from moontide.errors import InputError, MoontideError

PIECE = 8  # batches of a piece, at most: decoding one goes on beside encoding another
PIECES = 4  # of a worker, at least, where there are so many batches


@dataclass(frozen=True)
class EncoderSpec:
    """The encoder of a worker and its settings."""

    name: str
    device: str
    precision: str
    runtime: str
    batch_size: int
    decoders: int  # processes that decode images
    fast: bool
    folder: str  # that relative paths of models start from


class Piecewise:
    """An encoder for pieces of a list of images, run by an actor of Ray Data."""

    def __init__(self, spec: EncoderSpec) -> None:
        if os.path.isdir(spec.folder):  # a machine of the cluster may not have it
            os.chdir(spec.folder)
        self.spec, self.encoder = spec, encoder(spec.name, spec.device, spec.precision, spec.runtime)

    def __call__(self, rows: Mapping[str, Sequence[str]]) -> Iterator[dict[str, list[Any]]]:
        """Encode the images of some pieces; each batch is a row: who is in it, who is not and why, and the vectors."""
        images = [image_from(one) for piece in rows["piece"] for one in json.loads(piece)]
        spec = self.spec
        batches = encode_files(self.encoder, images, batch_size=spec.batch_size, workers=spec.decoders, fast=spec.fast)
        try:
            for found in batches:
                who = {"images": [image.id for image in found.images], "skipped": found.skipped}
                yield {"about": [json.dumps(who)], "features": [found.features.tobytes()]}
        except MoontideError as error:  # Ray would wrap it
            yield {"about": [json.dumps({"error": str(error)})], "features": [b""]}


def encode_on_ray(
    images: Sequence[ImageFile],
    dim: int,
    name: str,
    device: str = "cpu",
    precision: str = "auto",
    runtime: str = "auto",
    *,
    batch_size: int,
    workers: int | None = None,
    fast: bool = False,
) -> Iterator[Encoded]:
    """Encode images batch by batch, in their order, on the cluster that was joined."""
    import ray.data

    from moontide.cluster import resources, worker_count

    count = worker_count(workers, device)
    cpus = max(1, int(resources()["CPU"]) // count)
    decoders = cpus if device == "cuda" else max(1, cpus // 2)
    spec = EncoderSpec(name, device, precision, runtime or "auto", batch_size, decoders, fast, os.getcwd())
    by_id = {image.id: image for image in images}
    each = max(1, min(PIECE, len(images) // (PIECES * count * batch_size))) * batch_size
    pieces = [{"piece": _piece(images[i : i + each])} for i in range(0, len(images), each)]
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    encoded = ray.data.from_items(pieces, override_num_blocks=len(pieces)).map_batches(
        Piecewise,
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(count, len(pieces))),
        fn_constructor_args=[spec],
        num_cpus=cpus,
        num_gpus=int(device.startswith("cuda")),
    )
    for row in encoded.iter_rows():
        about = json.loads(row["about"])
        if "error" in about:
            raise InputError(about["error"])
        features = np.frombuffer(row["features"], np.float32).reshape(-1, dim)
        yield Encoded([by_id[i] for i in about["images"]], features, [Skip(*skip) for skip in about["skipped"]])


def _piece(images: Sequence[ImageFile]) -> str:
    return json.dumps([image.describe() for image in images])
