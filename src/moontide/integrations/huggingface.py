"""Hugging Face datasets in and out: embeddings of their images, and columns with the labels."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import to_numpy
from moontide.errors import FileError, InputError, missing_extra
from moontide.integrations.labels import Labels
from moontide.store.predictions import rounded
from moontide.types import Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from moontide.encoders.base import Encoder

BATCH = 64  # images in memory at once


def embed_images(dataset: Any, encoder: Encoder, column: str = "image") -> npt.NDArray[np.float32]:
    """Embed the images of a dataset, (N, d), unit rows."""
    _require(dataset, column)
    parts = [np.zeros((0, encoder.dim), np.float32)]
    for start in range(0, len(dataset), BATCH):
        images = dataset[start : start + BATCH][column]
        parts.append(encoder.encode_images([image.convert("RGB") for image in images]))
    return np.concatenate(parts)


def vectors(dataset: Any, column: str = "embedding") -> npt.NDArray[np.float32]:
    """Return a column of embeddings as a matrix, (N, d)."""
    _require(dataset, column)
    try:
        return np.asarray(dataset.with_format("numpy")[:][column], dtype=np.float32).reshape(len(dataset), -1)
    except ValueError:
        raise InputError(f"The column {column!r} must hold lists of numbers, all of one length.") from None


def add_labels(dataset: Any, result: Result, class_names: Sequence[str], prefix: str = "") -> Any:
    """Return the dataset with the columns `label` (a ClassLabel), `confidence` and, if the method scores it, `unknown`.

    prefix: a prefix of the column names, for datasets that have columns of these names.
    """
    features = _datasets().features
    if len(dataset) != result.probs.shape[0]:
        raise InputError(f"The dataset must have {result.probs.shape[0]} rows, like the result. It has {len(dataset)}.")
    made = {"label": to_numpy(result.labels).tolist(), "confidence": rounded(to_numpy(result.confidence)).tolist()}
    if result.unknown is not None:
        made["unknown"] = rounded(to_numpy(result.unknown)).tolist()
    taken = [prefix + name for name in made if prefix + name in dataset.column_names]
    if taken:
        raise InputError(f"The dataset has columns {', '.join(taken)} already; pass a 'prefix', such as 'tide_'.")
    kinds = {"label": features.ClassLabel(names=list(class_names))}
    for name, values in made.items():
        dataset = dataset.add_column(prefix + name, values, feature=kinds.get(name, features.Value("float64")))
    return dataset


def write_dataset(labels: Labels, folder: str | Path) -> None:
    """Write a folder for `datasets.load_from_disk`: the columns id, label, confidence and unknown."""
    datasets = _datasets()
    number = {name: k for k, name in reversed(list(enumerate(labels.class_names)))}
    columns: dict[str, Any] = {
        "id": list(labels.ids),
        "label": [number[label] for label in labels.labels],
        "confidence": list(labels.confidence),
    }
    if labels.unknown is not None:
        columns["unknown"] = list(labels.unknown)
    if labels.vectors is not None:
        columns["embedding"] = labels.vectors.tolist()
    kind = datasets.ClassLabel(names=list(labels.class_names))
    with _no_bars(datasets):
        try:
            datasets.Dataset.from_dict(columns).cast_column("label", kind).save_to_disk(str(folder))
        except OSError as error:
            raise FileError(f"The folder {folder} cannot be written: {error.strerror or error}.") from error


@contextmanager
def _no_bars(datasets: Any) -> Iterator[None]:
    """Switch off the progress bars of the library, which are written even into pipes."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _require(dataset: Any, column: str) -> None:
    if column not in dataset.column_names:
        raise InputError(f"The dataset has no column {column!r}. It has {', '.join(dataset.column_names)}.")


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise missing_extra("datasets", "datasets", "Hugging Face datasets") from None
    return datasets
