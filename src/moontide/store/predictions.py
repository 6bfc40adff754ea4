"""Predictions to .npz, .csv, .jsonl and .parquet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moontide.core.arrays import to_numpy
from moontide.store.files import check_output, parquet_module, replacing
from moontide.store.tables import write_table
from moontide.types import Result, Task


def write_predictions(
    path: str | Path,
    result: Result,
    ids: Sequence[Any] | None = None,
    class_names: Sequence[str] | None = None,
    more: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write a result as its extension says: arrays to .npz, or one row a sample to .csv, .jsonl or .parquet.

    A method that scores the unknown adds an array, or a column, `unknown`; `more` has further ones by name.

    >>> import tempfile
    >>> result = Result(probs=np.asarray([[0.25, 0.75]]), zero_shot=np.asarray([[0.6, 0.4]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_predictions(Path(folder) / "p.csv", result, ["a"], ["cat", "dog"])
    ...     print((Path(folder) / "p.csv").read_text())
    id,label,class_name,confidence,zero_shot_label,zero_shot_class_name
    a,1,dog,0.75,0,cat
    <BLANKLINE>
    """
    path = Path(path)
    check_output(path)
    names = ("probs", "scores", "labels", "zero_shot_labels", "confidence", "unknown")
    values = {name: getattr(result, name) for name in names}
    arrays: dict[str, Any] = {name: to_numpy(x) for name, x in values.items() if x is not None}
    with replacing(path) as handle:
        if path.suffix == ".npz":
            arrays |= {name: np.asarray(values) for name, values in (more or {}).items()}
            np.savez(handle, **arrays)
            return
        named = [None] * arrays["probs"].shape[1] if class_names is None else class_names
        labels, before = arrays["labels"].tolist(), arrays["zero_shot_labels"].tolist()
        columns = {
            "id": range(len(labels)) if ids is None else ids,
            "label": labels,
            "class_name": [named[k] for k in labels],
            "confidence": rounded(arrays["confidence"]).tolist(),
            "zero_shot_label": before,
            "zero_shot_class_name": [named[k] for k in before],
        }
        if "unknown" in arrays:
            columns["unknown"] = rounded(arrays["unknown"]).tolist()
        columns |= more or {}
        if path.suffix == ".parquet":
            parquet_module("Writing").write_columns(handle, columns)
        else:
            write_table(handle, columns, path.suffix)


def more_columns(task: Task, groups: Sequence[str] | None = None, n: int | None = None) -> dict[str, list[Any]]:
    """Return the columns that known labels and groups add to a table of the first n samples.

    >>> more_columns(Task(np.eye(2), np.eye(2), known=[-1, 1]), ["a", "b"])
    {'known': [False, True], 'group': ['a', 'b']}
    """
    found: dict[str, list[Any]] = {}
    if task.known is not None:
        found["known"] = (to_numpy(task.known)[:n] >= 0).tolist()
    if groups is not None:
        found["group"] = list(groups[:n])
    return found


def rounded(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return numbers as they are written: without digits that are no part of a float32.

    >>> rounded(np.asarray([0.1], np.float32))
    array([0.1])
    """
    return x.astype(np.float64).round(7)
