"""What a benchmark runs on: feature files and feature stores, each one dataset seen by one backbone.

The name of a file says both: "imagenet1k_vitb32.npz" is the dataset "imagenet" (an alias in `datasets/imagenet.toml`)
under the backbone "clip_vit_b32" (`backbones.toml`). It may end in the split, "dtd_vitb32_test.npz", and a number after
the name says how many of its classes there are: "pets24" is of "oxford_pets". A name that no file knows stays as it is:
"cifar10_vitb32" is "cifar10" under "clip_vit_b32". A store says its dataset and its encoder itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moontide.bench.toml import read_toml
from moontide.errors import FileError, UnknownNameError
from moontide.metrics import IntArray
from moontide.store.datasets import IMAGES, dataset
from moontide.store.features import MANIFEST, FeatureStore
from moontide.store.files import read_task
from moontide.types import Task

KINDS = (".npz", ".safetensors")
SPLITS = ("test", "val", "train")  # that the name of a file may end in


@dataclass(frozen=True)
class Pack:
    """Features of one dataset, and the labels, which only samplers and scores see.

    >>> pack = Pack("toy", None, "", np.eye(3), np.eye(3), np.asarray([0, 1, 2]), 100.0)
    >>> pack.task(np.asarray([2, 0])).n
    2
    """

    dataset: str
    backbone: str | None
    hash: str  # SHA-256 of the contents
    features: Any  # (N, d) an array, or a store
    text: Any  # (K, d)
    labels: IntArray  # (N,)
    logit_scale: float
    extras: Mapping[str, Any] = field(default_factory=dict)

    def task(self, indices: IntArray) -> Task:
        """Return the task of some samples."""
        rows = self.features.take(indices) if isinstance(self.features, FeatureStore) else self.features[indices]
        extras = {name: value[indices] for name, value in self.extras.items()}
        return Task(rows, self.text, self.logit_scale, extras=extras)


def find_data(path: str | Path) -> list[Path]:
    """List what there is to run on: a file, a store, or every file and store of a folder.

    >>> find_data("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file or folder no-such-folder to take features from.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(f"There is no file or folder {path} to take features from.")
    if path.is_file() or (path / MANIFEST).exists():
        return [path]
    inside = sorted(path.iterdir())
    found = [p for p in inside if p.suffix in KINDS or (p / MANIFEST).exists()]
    if found:
        return found
    images = any(p.suffix.lower() in IMAGES for p in path.rglob("*"))
    raise FileError(
        f"{path} must hold feature files ({', '.join(KINDS)}) or feature stores (folders with a {MANIFEST}). "
        + ("It holds images: encode them into a store first." if images else "It holds none.")
    )


def identify(stem: str) -> tuple[str, str | None]:
    """Split the name of a feature file into dataset and backbone.

    >>> identify("imagenet1k_vitb32"), identify("cifar10_vitb32"), identify("pets"), identify("clothing_tiny")
    (('imagenet', 'clip_vit_b32'), ('cifar10', 'clip_vit_b32'), ('oxford_pets', None), ('clothing_tiny', None))
    >>> identify("imagenet_openclip_vitb16"), identify("dtd_vitb16_test")
    (('imagenet', 'openclip'), ('dtd', 'clip_vit_b16'))
    """
    for split in SPLITS:
        stem = stem.removesuffix(f"_{split}")
    known = [(alias, name) for name, aliases in _backbones().items() for alias in (name, *aliases)]
    found = [(alias, name) for alias, name in known if stem.lower().endswith(f"_{alias.lower()}")]
    if not found:
        return canonical(stem), None
    alias, name = max(found, key=lambda pair: len(pair[0]))  # "openclip_vitb16" rather than "vitb16"
    return canonical(stem[: -len(alias) - 1]), name


def canonical(name: str) -> str:
    """Return the paper's name of a dataset, or the name as it is.

    >>> canonical("Food-101"), canonical("pets24"), canonical("my-photos")
    ('food101', 'oxford_pets', 'my-photos')
    """
    for known in (name, name.rstrip("0123456789")):
        try:
            return dataset(known).name
        except UnknownNameError:
            continue
    return name


def _backbones() -> dict[str, list[str]]:
    return read_toml(Path(__file__).with_name("backbones.toml"))


def read_pack(path: str | Path) -> Pack:
    """Read a feature file, or open a feature store; either must have labels to score with.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/pets_vitb16.npz", image_features=np.eye(2), text_features=np.eye(2), labels=[0, 1])
    ...     pack = read_pack(f"{folder}/pets_vitb16.npz")
    >>> pack.dataset, pack.backbone, pack.logit_scale
    ('oxford_pets', 'clip_vit_b16', 100.0)
    """
    path = Path(path)
    if path.is_dir():
        store = FeatureStore.open(path)
        encoder = store.origin.encoder
        backbone = next((name for name, aliases in _backbones().items() if encoder in (name, *aliases)), encoder)
        name, labels = canonical(store.origin.dataset or path.name), _labels(store.labels, path)
        return Pack(name, backbone, store.hash, store, store.text, labels, store.origin.logit_scale)
    task, found, _ = read_task(path)
    labels = _labels(found, path)
    name, known = identify(path.stem)
    digest = content_hash([task.features, task.text, np.asarray(task.logit_scale), labels, *task.extras.values()])
    return Pack(name, known, digest, task.features, task.text, labels, task.logit_scale, task.extras)


def _labels(labels: IntArray | None, path: Path) -> IntArray:
    if labels is None:
        raise FileError(f"{path} has no labels to score with.")
    return labels


def content_hash(arrays: list[Any]) -> str:
    """Return the SHA-256 of arrays: of their types, shapes and numbers, not of how a file packs them.

    >>> content_hash([np.zeros(2)]) == content_hash([np.zeros(2)]) != content_hash([np.zeros(3)])
    True
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
