"""Labels of images for other tools, from a run or from its table."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import to_numpy
from moontide.errors import FileError, InputError
from moontide.store.disk import lines_of, parse_json, read_json, reading, replacing, text_of
from moontide.store.files import parquet_module
from moontide.store.predictions import rounded
from moontide.store.tables import from_cell
from moontide.types import Result

if TYPE_CHECKING:
    from moontide.classify import Classified

TOP = 5  # classes that are named with their probabilities
TABLES = (".csv", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Labels:
    """One label per image, and what else a tool can show.

    >>> probs = np.asarray([[0.25, 0.75], [1.0, 0.0]])
    >>> labels = Labels.of_result(Result(probs, probs), ["a.jpg", "b.jpg"], ["cat", "dog"])
    >>> labels.labels, labels.confidence, labels.top[0]
    (['dog', 'cat'], [0.75, 1.0], [('dog', 0.75), ('cat', 0.25)])
    """

    ids: Sequence[str]  # how the images are called: paths as they were given
    labels: Sequence[str]
    confidence: Sequence[float]
    top: Sequence[Sequence[tuple[str, float]]]  # the likeliest classes, the likeliest first
    class_names: Sequence[str]
    paths: Sequence[str] | None = None  # absolute ones, where they are known
    unknown: Sequence[float] | None = None  # the higher, the less likely is any of the classes
    logits: npt.NDArray[Any] | None = None  # (N, K)
    vectors: npt.NDArray[Any] | None = None  # (N, d)

    @property
    def files(self) -> Sequence[str]:
        """The locations of the images: absolute paths if known, otherwise the ids."""
        return self.ids if self.paths is None else self.paths

    @classmethod
    def of_result(
        cls, result: Result, ids: Sequence[str], class_names: Sequence[str], vectors: npt.NDArray[Any] | None = None
    ) -> Labels:
        """Make labels from the result of any method, with the embeddings as `vectors` if the tool should have them."""
        probs = to_numpy(result.probs).astype(np.float64)  # (N, K)
        if len(ids) != len(probs) or len(class_names) != probs.shape[1]:
            raise InputError(
                f"'ids' and 'class_names' must have {probs.shape[0]} and {probs.shape[1]} entries, as many as the "
                f"result has samples and classes. Got {len(ids)} and {len(class_names)}."
            )
        order = np.argsort(-probs, axis=1, kind="stable")[:, :TOP]
        top = [
            [(class_names[k], round(float(row[k]), 6)) for k in first] for row, first in zip(probs, order, strict=True)
        ]
        return cls(
            ids=[str(one) for one in ids],
            labels=[class_names[k] for k in to_numpy(result.labels)],
            confidence=to_numpy(result.confidence).astype(np.float64).round(6).tolist(),
            top=top,
            class_names=list(class_names),
            unknown=None if result.unknown is None else rounded(to_numpy(result.unknown)).tolist(),
            logits=np.log(np.maximum(probs, np.finfo(np.float32).tiny)).astype(np.float32),
            vectors=None if vectors is None else to_numpy(vectors).astype(np.float32),
        )

    @classmethod
    def of(cls, found: Classified) -> Labels:
        """Make labels from the result of `classify`, with the embeddings of the images."""
        columns = found.columns()
        made = cls.of_result(found.result, columns["id"], found.task.class_names or (), to_numpy(found.task.features))
        more = sorted(set(columns["label"]) - set(made.class_names))  # such as that of images of none of the classes
        names = [*made.class_names, *more]
        return replace(made, paths=columns["path"], labels=columns["label"], class_names=names)

    @classmethod
    def read(cls, path: str | Path) -> Labels:
        """Read a table of labels that `moontide classify` or `moontide adapt` wrote: .csv, .jsonl, .json or .parquet.

        A table has no logits and no vectors, and names only the classes that occur in it.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = (Path(folder) / "labels.csv").write_text("id,label,confidence\\na.jpg,cat,0.75\\n")
        ...     Labels.read(Path(folder) / "labels.csv").labels
        ['cat']
        """
        path = Path(path)
        columns = read_table(path)
        named = "class_name" if any(columns.get("class_name", ())) else "label"
        missing = [name for name in ("id", named, "confidence") if name not in columns]
        if missing:
            raise FileError(
                f"{path} must have the columns id, label and confidence, as 'moontide classify --out' writes them. "
                f"It has {', '.join(columns) or 'none'}."
            )
        labels = [str(label) for label in columns[named]]
        try:
            sure = [float(one) for one in columns["confidence"]]
            top = [_top(cell) for cell in columns["top5"]] if "top5" in columns else [[] for _ in labels]
            unknown = [float(one) for one in columns["unknown"]] if "unknown" in columns else None
        except (TypeError, ValueError, KeyError):
            raise FileError(
                f"{path} must have numbers as confidence and unknown, and top5 as Moontide writes it."
            ) from None
        top = [first or [(label, p)] for first, label, p in zip(top, labels, sure, strict=True)]
        names = sorted({*labels, *(name for first in top for name, _ in first)})
        paths = [str(one) for one in columns["path"]] if "path" in columns else None
        return cls([str(one) for one in columns["id"]], labels, sure, top, names, paths, unknown)


def _top(cell: Any) -> list[tuple[str, float]]:
    parts = json.loads(cell) if isinstance(cell, str) else cell
    return [(str(part["label"]), float(part["confidence"])) for part in parts or ()]


def read_table(path: Path) -> Mapping[str, Sequence[Any]]:
    """Read a table by columns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.jsonl").write_text('{"id": 1}\\n{"id": 2}\\n')
    ...     read_table(Path(folder) / "a.jsonl")
    {'id': [1, 2]}
    """
    if path.suffix not in TABLES:
        raise FileError(f"The table of labels {path} must end in {', '.join(TABLES)}. Got '{path.suffix}' instead.")
    if path.suffix == ".parquet":
        with reading(path):
            columns: Mapping[str, Sequence[Any]] = parquet_module("Reading").read_columns(path)
            return columns
    rows = _csv_rows(path) if path.suffix == ".csv" else _json_rows(path)
    names = list(rows[0]) if rows and isinstance(rows[0], dict) else []
    same = all(isinstance(row, dict) and list(row) == names and None not in row.values() for row in rows)
    if not rows or not same or None in names:  # a name for what is more than the header
        raise FileError(f"{path} must have rows with one and the same set of columns. Got {len(rows)} rows.")
    return {name: [row[name] for row in rows] for name in names}


def _csv_rows(path: Path) -> list[Any]:
    with reading(path):
        rows = list(csv.DictReader(lines_of(path)))
    return [{key: from_cell(cell) if isinstance(cell, str) else cell for key, cell in row.items()} for row in rows]


def _json_rows(path: Path) -> list[Any]:
    if path.suffix == ".json":
        found = read_json(path)
        return found if isinstance(found, list) else []
    return [parse_json(path, line) for line in text_of(path).split("\n") if line.strip()]


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as JSON; an error leaves no incomplete file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json(Path(folder) / "a.json", {"images": []})
    ...     (Path(folder) / "a.json").read_text()
    '{"images": []}\\n'
    """
    with replacing(path) as handle:
        handle.write((json.dumps(value, ensure_ascii=False) + "\n").encode())
