"""Feature packs with labels, NAME_MODEL[_SPLIT].npz, and the photographs of examples/ as one more."""

from __future__ import annotations

import hashlib
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moontide.core.arrays import to_numpy
from moontide.errors import MissingExtraError
from moontide.store.disk import replacing
from moontide.store.files import read_task

EXAMPLES = Path(__file__).parents[2] / "examples"
PHOTOGRAPHS = "photographs"


class Pack(NamedTuple):
    name: str
    model: str  # packs of one model share a space
    features: Any  # (N, d) unit rows
    text: Any  # (K, d) unit rows
    labels: Any  # (N,)
    logit_scale: float
    digest: str  # of all of it


@cache
def read_pack(path: Path) -> Pack:
    if not path.exists():
        raise SystemExit(f"There is no feature pack at {path}; name some with --packs.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # class names that appear twice: the packs are as they are
        task, labels, _ = read_task(path)
    if labels is None:
        raise SystemExit(f"{path} has no labels, without which nothing can be measured; leave it out of --packs.")
    features, text = to_numpy(task.features), to_numpy(task.text)
    digest = hashlib.sha256(repr(task.logit_scale).encode())
    for array in (features, text, labels):
        digest.update(np.ascontiguousarray(array).tobytes())
    name, model = (*path.stem.split("_"), "")[:2]
    return Pack(name, model, features, text, labels, task.logit_scale, digest.hexdigest())


def photographs(folder: Path) -> Path | None:
    """Return the pack of the photographs in examples/, encoded once into `folder`; None where the encoder is missing.

    The encoder is `tiny`, the class names those of examples/clothing.txt, the labels the folders' names.
    """
    path = folder / f"{PHOTOGRAPHS}_tiny.npz"
    if path.exists():
        return path
    try:
        from moontide.classify import classify
        from moontide.encoders import encoder
        from moontide.encoders.prompts import embed_classes
        from moontide.encoders.sources import list_images

        tiny = encoder("tiny")
        names = (EXAMPLES / "clothing.txt").read_text(encoding="utf-8").split("\n")
        classes = embed_classes(tiny, [name for name in names if name])
        found = classify(list_images([EXAMPLES / "clothing"]), classes, tiny)
    except (MissingExtraError, ImportError):
        return None
    arrays = {"image_features": found.task.features, "text_features": found.task.text, "labels": found.truth}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as handle:
        np.savez(handle, logit_scale=found.task.logit_scale, **arrays)
    return path
