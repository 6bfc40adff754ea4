"""The data of a benchmark: feature files and feature stores, each with one dataset encoded by one backbone.

The name of a file gives both: "imagenet1k_vitb32.npz" is the dataset "imagenet" (an alias in `datasets/imagenet.toml`)
and the backbone "clip_vit_b32" (`backbones.toml`). It may end with the split, as in "dtd_vitb32_test.npz", and a number
after the name is the number of classes: "pets24" belongs to "oxford_pets". Unknown names of datasets are kept:
"cifar10_vitb32" is "cifar10" and "clip_vit_b32". A store records its own dataset and encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moontide.core.simplex import zero_shot
from moontide.errors import FileError, UnknownNameError
from moontide.metrics import IntArray
from moontide.store.datasets import IMAGES, dataset
from moontide.store.features import MANIFEST, FeatureStore
from moontide.store.files import read_task
from moontide.store.toml import read_toml
from moontide.store.views import open_views
from moontide.types import PER_SAMPLE, Task

KINDS = (".npz", ".safetensors")
SPLITS = ("test", "val", "train")  # that the name of a file may end in


@dataclass(frozen=True)
class Pack:
    """Features of one dataset, with labels that only samplers and scores see.

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
    extras: Mapping[str, Any] = field(default_factory=dict)  # views and images, by sample; the encoder
    device: str = "cpu"
    confident_views: float | None = None  # share of the views whose mean is the feature, where there are views

    def task(self, indices: IntArray, needs: Collection[str] = ()) -> Task:
        """Return the task of some samples, with the further inputs that a method needs."""
        rows = self.features.take(indices) if isinstance(self.features, FeatureStore) else self.features[indices]
        if self.confident_views and "views" in self.extras:
            rows = surest(self.extras["views"][indices], np.asarray(self.text), self.logit_scale, self.confident_views)
        extras = {name: value for name, value in self.extras.items() if name in needs}
        extras |= {name: extras[name][indices] for name in PER_SAMPLE if name in extras}
        if self.device == "cpu":
            return Task(rows, self.text, self.logit_scale, extras=extras)
        import torch

        rows, text = (torch.asarray(np.asarray(x, dtype=np.float32), device=self.device) for x in (rows, self.text))
        return Task(rows, text, self.logit_scale, extras=extras)


@dataclass(frozen=True)
class Images:
    """The images of a store, read from the paths recorded when it was made.

    >>> len(Images(["a.jpg", "b.jpg"]))
    2
    """

    paths: Sequence[str]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def __getitem__(self, indices: IntArray) -> list[Any]:
        """Read some images."""
        from moontide.encoders.places import ImageFile

        return [ImageFile(self.paths[i], Path(self.paths[i])).read() for i in indices.tolist()]


def surest(views: Any, text: Any, logit_scale: float, share: float) -> Any:
    """Return the mean of the views of each image whose zero-shot prediction has the lowest entropy, (n, d).

    >>> views = np.asarray([[[1.0, 0.0], [0.7, 0.7]]])
    >>> surest(views, np.eye(2), 10.0, 0.5)
    array([[1., 0.]])
    """
    y = zero_shot(views.reshape(-1, views.shape[2]), text.astype(views.dtype), logit_scale)  # (n V, K)
    entropy = -(y * np.log(y + 1e-12)).sum(axis=1).reshape(views.shape[:2])  # (n, V)
    kept = np.argsort(entropy, axis=1, kind="stable")[:, : max(1, round(share * views.shape[1]))]
    return np.take_along_axis(views, kept[:, :, None], axis=1).mean(axis=1)


def find_data(path: str | Path) -> list[Path]:
    """List the data of a path: a file, a store, or every file and store of a folder.

    >>> find_data("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file or folder no-such-folder with features.
    """
    path = Path(path)
    if not path.exists():
        raise FileError(f"There is no file or folder {path} with features.")
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


def read_pack(path: str | Path, encoder: Any = None, device: str = "cpu") -> Pack:
    """Read a feature file, or open a feature store; either must have labels to score with.

    `encoder` is the one that made a store, for methods that adapt it; they read the images from the recorded paths.

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
        own = store.origin.encoder
        backbone = next((name for name, aliases in _backbones().items() if own in (name, *aliases)), own)
        name, labels = canonical(store.origin.dataset or path.name), _labels(store.labels, path)
        extras = _extras(store, encoder)
        return Pack(name, backbone, store.hash, store, store.text, labels, store.origin.logit_scale, extras, device)
    task, found, _ = read_task(path)
    labels = _labels(found, path)
    name, known = identify(path.stem)
    digest = content_hash([task.features, task.text, np.asarray(task.logit_scale), labels, *task.extras.values()])
    return Pack(name, known, digest, task.features, task.text, labels, task.logit_scale, task.extras, device)


def _extras(store: FeatureStore, encoder: Any) -> dict[str, Any]:
    """Return the further inputs of a store: views if it has them, images and encoder if an encoder is given."""
    views = open_views(store)
    extras = {} if views is None else {"views": views}
    if encoder is None:
        return extras
    if encoder.id != store.origin.encoder:
        raise FileError(
            f"{store.folder} was made by the encoder {store.origin.encoder}, not by {encoder.id}; use "
            "the same, or a new results folder."
        )
    lost = next((one for one in store.ids if not Path(one).is_file()), None)
    if lost is not None:
        raise FileError(f"The image {lost} of {store.folder} no longer exists; put it back, or leave out '--encoder'.")
    return {**extras, "images": Images(store.ids), "encoder": encoder}


def _labels(labels: IntArray | None, path: Path) -> IntArray:
    if labels is None:
        raise FileError(f"{path} has no labels to score with.")
    return labels


def content_hash(arrays: list[Any]) -> str:
    """Return the SHA-256 of arrays: of their types, shapes and numbers, whatever the file format.

    >>> content_hash([np.zeros(2)]) == content_hash([np.zeros(2)]) != content_hash([np.zeros(3)])
    True
    """
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
