"""Predictions to .npz, .csv, .jsonl and .parquet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moontide.answers import Answers, answer, leading, top_classes
from moontide.core.arrays import to_numpy
from moontide.store.disk import replacing, writing
from moontide.store.files import check_output
from moontide.store.tables import write_table
from moontide.types import Result, Task

TOP = 5


def write_predictions(
    path: str | Path,
    result: Result,
    ids: Sequence[Any] | None = None,
    class_names: Sequence[str] | None = None,
    more: Mapping[str, Sequence[Any]] | None = None,
    answers: Answers | None = None,
) -> None:
    """Write a result in the format of the extension: arrays to .npz, or a table with one row per sample.

    A method that scores the unknown adds an array, or a column, `unknown`; `more` has further ones by name. Where
    `answers` has more than the classes, a label is -1 where the answer is no class, and its name is in `class_name`.

    >>> import tempfile
    >>> result = Result(probs=np.asarray([[0.25, 0.75]]), zero_shot=np.asarray([[0.6, 0.4]]))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_predictions(Path(folder) / "p.csv", result, ["a"], ["cat", "dog"])
    ...     print((Path(folder) / "p.csv").read_text())
    id,label,class_name,confidence,top5,zero_shot_label,zero_shot_class_name
    a,1,dog,0.75,"[{""label"": ""dog"", ""confidence"": 0.75}, {""label"": ""cat"", ""confidence"": 0.25}]",0,cat
    <BLANKLINE>
    """
    path = Path(path)
    check_output(path)
    names = ("probs", "scores", "labels", "zero_shot_labels", "confidence", "unknown")
    values = {name: getattr(result, name) for name in names}
    arrays: dict[str, Any] = {name: to_numpy(x) for name, x in values.items() if x is not None}
    k = arrays["probs"].shape[1]
    given = answers or answer(result, class_names or [""] * k)
    arrays |= {"labels": given.numbers(k), "confidence": given.confidence.astype(arrays["confidence"].dtype)}
    with replacing(path) as handle:
        if path.suffix == ".npz":
            top = leading(arrays["probs"], TOP)
            arrays |= {"top5_labels": top, "top5_confidence": np.take_along_axis(arrays["probs"], top, axis=1)}
            if answers is not None:
                arrays["answers"] = np.asarray(given.texts)
            arrays |= {name: _array(values) for name, values in (more or {}).items()}
            np.savez(handle, **arrays)
            return
        named: Sequence[Any] = [None] * k if class_names is None else class_names
        before = arrays["zero_shot_labels"].tolist()
        columns = {
            "id": range(len(before)) if ids is None else ids,
            "label": arrays["labels"].tolist(),
            "class_name": [None] * len(before) if class_names is None and answers is None else given.texts,
            "confidence": rounded(arrays["confidence"]).tolist(),
            "top5": top_classes(arrays["probs"], range(k) if class_names is None else class_names),
            "zero_shot_label": before,
            "zero_shot_class_name": [named[i] for i in before],
        }
        if "unknown" in arrays:
            columns["unknown"] = rounded(arrays["unknown"]).tolist()
        write_table(handle, columns | dict(more or {}), path.suffix)


def write_shard(
    path: str,
    rows: np.ndarray[Any, Any],
    columns: Mapping[str, np.ndarray[Any, Any]],
    ids: Sequence[Any] | None,
    class_names: Sequence[str] | None,
) -> None:
    """Write what a run over shards predicts for some rows of one of them, as .parquet.

    columns: label, confidence, before (the zero-shot label) and perhaps unknown. ids: of all rows of the shard.
    """

    def named(labels: list[int]) -> list[str | None]:
        return [None if class_names is None else class_names[k] for k in labels]

    labels, before = columns["label"].tolist(), columns["before"].tolist()
    table = {
        "id": rows if ids is None else [ids[row] for row in rows],
        "label": labels,
        "class_name": named(labels),
        "confidence": rounded(columns["confidence"]),
        "zero_shot_label": before,
        "zero_shot_class_name": named(before),
    }
    if "unknown" in columns:
        table["unknown"] = rounded(columns["unknown"])
    with writing(path) as handle:
        write_table(handle, table, ".parquet")


def _array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return a column as an array, lists as JSON."""
    nested = any(isinstance(value, list | dict) for value in values)
    return np.asarray([json.dumps(value) for value in values] if nested else values)


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
