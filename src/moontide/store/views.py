"""Augmented views of the images of a feature store, for MTA: one file for each shard, beside it.

    store/
      views/00000.safetensors    view_features (n, V, d) in half precision, for the n images of 00000.safetensors

A file is whole before it has its name, so that whoever stops in the middle goes on with the next shard. The views of an
image depend on its id alone: not on the order, nor on what was encoded before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.errors import FileError, OptionError
from moontide.store.disk import replacing
from moontide.store.features import FeatureStore, _mapped
from moontide.views import make_views

FOLDER = "views"
LEAST = 5  # views of which MTA finds a nearest other one


def add_views(
    store: FeatureStore,
    encoder: Any,
    images: Sequence[Any],
    count: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Encode `count` views of every image of a store, view 0 the image itself, for the shards that have none yet.

    `encoder` has `encode_images`, as in `moontide.encoders`; an image has an `id`, and `read` returns its picture.
    """
    from safetensors.numpy import save

    if count < LEAST:
        raise OptionError(f"'views' must be at least {LEAST}, which MTA needs. Got {count} instead.")
    by_id = {image.id: image for image in images}
    (store.folder / FOLDER).mkdir(exist_ok=True)
    done = 0
    for shard, (_, ids) in zip(store.shards, store._maps, strict=True):
        path = store.folder / FOLDER / shard.name
        if path.exists():
            held = _mapped(path)[0]["view_features"].shape[1]
            if held != count:
                raise FileError(
                    f"{store.folder} holds {held} views of its images; use {held} 'views', or a new folder."
                )
        else:
            made = []
            for number, one in enumerate(ids):
                seed = int.from_bytes(hashlib.sha256(one.encode()).digest()[:8], "big")
                made.append(make_views(encoder, [by_id[one].read()], count, seed)[0].astype(np.float16))
                progress(done + number, store.n)
            with replacing(path) as handle:
                handle.write(save({"view_features": np.stack(made)}))
        done += len(ids)
        progress(done, store.n)


@dataclass(frozen=True)
class Views:
    """The views of a store's images, memory-mapped.

    >>> views = Views([np.zeros((2, 5, 3)), np.ones((1, 5, 3))])
    >>> len(views), views[np.asarray([2, 0])][:, 0, 0].tolist()
    (3, [1.0, 0.0])
    """

    parts: list[npt.NDArray[Any]]  # (n, V, d) of each shard

    def __len__(self) -> int:
        """Return the number of images."""
        return sum(map(len, self.parts))

    def __getitem__(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Read the views of some images, (n, V, d), in single precision."""
        starts = np.cumsum([0, *map(len, self.parts)])
        part = np.searchsorted(starts, indices, side="right") - 1
        return np.stack([self.parts[p][i - starts[p]] for p, i in zip(part, indices, strict=True)]).astype(np.float32)


def open_views(store: FeatureStore) -> Views | None:
    """Map the views of a store; None where it has none, or not of all its shards."""
    paths: list[Path] = [store.folder / FOLDER / shard.name for shard in store.shards]
    if not paths or not all(path.exists() for path in paths):
        return None
    return Views([_mapped(path)[0]["view_features"] for path in paths])
