"""Parquet with vectors, for LanceDB, Embedding Atlas and other tools that search or draw embeddings."""

from __future__ import annotations

from pathlib import Path

from moontide.errors import InputError
from moontide.integrations.labels import Labels
from moontide.store.disk import replacing
from moontide.store.files import parquet_module


def write_vectors(labels: Labels, path: str | Path) -> None:
    """Write the columns id, path, label, confidence, unknown and vector, float32 lists of one length.

    >>> write_vectors(Labels(["a.jpg"], ["dog"], [0.75], [[("dog", 0.75)]], ["dog"]), "a.parquet")
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: A table of vectors needs embeddings; pass them, or a store with '--features'.
    """
    if labels.vectors is None:
        raise InputError("A table of vectors needs embeddings; pass them, or a store with '--features'.")
    columns = {
        "id": list(labels.ids), "path": list(labels.files), "label": list(labels.labels),
        "confidence": list(labels.confidence),
    }  # fmt: skip
    if labels.unknown is not None:
        columns["unknown"] = list(labels.unknown)
    with replacing(path) as handle:
        parquet_module("Writing").write_columns(handle, columns, vector=labels.vectors)
