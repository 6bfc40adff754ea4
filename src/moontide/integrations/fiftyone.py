"""A folder that FiftyOne imports, with labels, logits and embeddings; and labels of a folder that it exported.

    samples.json   {"samples": [{"filepath": ..., FIELD: {"_cls": "Classification", "label": ..., "confidence": ...,
                   "logits": array}, "unknown": ..., "embedding": array}]}; arrays are .npy data, zlib, base64

In FiftyOne: fiftyone.Dataset.from_dir(dataset_dir=FOLDER, dataset_type=fiftyone.types.FiftyOneDataset).
"""

from __future__ import annotations

import base64
import io
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.errors import FileError
from moontide.integrations.labels import Labels, write_json
from moontide.store.disk import read_json

FIELD = "moontide"  # of the predictions


def binary(x: npt.NDArray[Any]) -> dict[str, Any]:
    """Return an array as it is written in FiftyOne's JSON.

    >>> made = binary(np.zeros(2, np.float32))["$binary"]["base64"]
    >>> np.load(io.BytesIO(zlib.decompress(base64.b64decode(made))))
    array([0., 0.], dtype=float32)
    """
    buffer = io.BytesIO()
    np.save(buffer, x, allow_pickle=False)
    content = base64.b64encode(zlib.compress(buffer.getvalue())).decode()
    return {"$binary": {"base64": content, "subType": "00"}}


def samples(labels: Labels, field: str = FIELD) -> list[dict[str, Any]]:
    """Return one sample per image, with absolute paths.

    >>> sample = samples(Labels(["a.jpg"], ["dog"], [0.75], [[("dog", 0.75)]], ["dog"], ["/photos/a.jpg"]))[0]
    >>> sample["filepath"], sample["moontide"]
    ('/photos/a.jpg', {'_cls': 'Classification', 'tags': [], 'label': 'dog', 'confidence': 0.75})
    """
    made = []
    for i, (one, label, sure) in enumerate(zip(labels.files, labels.labels, labels.confidence, strict=True)):
        found: dict[str, Any] = {"_cls": "Classification", "tags": [], "label": label, "confidence": sure}
        sample: dict[str, Any] = {"filepath": os.path.abspath(one), "tags": [], field: found}
        if labels.logits is not None:
            found["logits"] = binary(labels.logits[i])
        if labels.unknown is not None:
            sample["unknown"] = labels.unknown[i]
        if labels.vectors is not None:
            sample["embedding"] = binary(labels.vectors[i])
        made.append(sample)
    return made


def write_fiftyone(labels: Labels, folder: str | Path, field: str = FIELD) -> None:
    """Write a folder that FiftyOne imports; the images stay where they are."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"The folder {folder} cannot be created: {error.strerror}.") from error
    info = {"classes": list(labels.class_names)}
    write_json(folder / "metadata.json", {"media_type": "image", "info": info})
    write_json(folder / "samples.json", {"samples": samples(labels, field)})


def read_labels(folder: str | Path, field: str = "ground_truth") -> dict[str, str]:
    """Return the labels in `field` of a folder that FiftyOne exported, by file path, for samples that have one.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_fiftyone(Labels(["a.jpg"], ["dog"], [0.75], [[("dog", 0.75)]], ["dog"], ["/photos/a.jpg"]), folder)
    ...     read_labels(folder, "moontide")
    {'/photos/a.jpg': 'dog'}
    """
    path = Path(folder) / "samples.json"
    try:
        given = [(sample["filepath"], sample.get(field)) for sample in read_json(path)["samples"]]
        found = {str(one): str(label["label"]) for one, label in given if label is not None}
    except (TypeError, AttributeError, KeyError):
        raise FileError(f"{path} must be samples with Classification labels, as FiftyOne exports them.") from None
    if not found:
        raise FileError(f"{path} has no labels in the field {field!r}; name another field.")
    return found
