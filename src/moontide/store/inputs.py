"""Further inputs of methods, from files: known labels, a class balance, negative names, and groups.

    known labels   .csv with a column `id`, `path` or `row` and a column `label`; .npz with `known` (N,), -1 where the
                   label is not known, or with `ids` and `labels`
    class balance  .csv with the columns `class` and `share`; .json, {"class": share, ...}; .npy, or .npz with
                   `class_prior`, (K,)
    negatives      embeddings, (M, d): .npy, .safetensors, .parquet, or .npz with `negatives`
    groups         the folder of each id, or a column of a .parquet or array of an .npz

A class is called by its name or, where no class has that name, by its number from 0.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from moontide.answers import NONE_OF_THESE
from moontide.errors import FileError, InputError
from moontide.metrics import IntArray
from moontide.store.disk import lines_of, read_json, reading
from moontide.store.files import AnyArray, read_arrays, read_parquet_column
from moontide.store.tables import from_cell

KEYS = ("id", "path", "row")  # how a row of a file of known labels can name its sample
COLUMNS = (*KEYS, "label", "class", "share")  # that are read
FOLDER = "folder"  # groups by the folder of the id
SHOWN, LETTERS = 3, 40  # of the names in an error


def read_known(
    path: str | Path,
    ids: Sequence[Any],
    class_names: Sequence[str] | None,
    k: int,
    others: Mapping[str, int] | None = None,
) -> IntArray:
    """Read known labels as class numbers (N,), -1 where the label is not known.

    ids: how the N samples are called. others: further names of samples, by row.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "known.csv").write_text("id,label\\nb.jpg,dog\\nc.jpg,\\n")
    ...     read_known(Path(folder) / "known.csv", ["a.jpg", "b.jpg", "c.jpg"], ["cat", "dog"], 2)
    array([-1,  1, -1])
    """
    path, n = Path(path), len(ids)
    if path.suffix == ".npz":
        held = read_arrays(path, ("known", "ids", "labels"))
        if "known" in held.arrays:
            return _whole(path, held.matrix("known"), n, k)
        key, samples, labels = "id", held.matrix("ids").tolist(), held.matrix("labels").tolist()
        if len(samples) != len(labels):
            raise FileError(f"{path} must have as many 'labels' as 'ids'. Got {len(labels)} and {len(samples)}.")
    elif path.suffix == ".csv":
        rows = _read_csv(path)
        key = next((name for name in KEYS if name in rows), "")
        if not key or "label" not in rows:
            raise FileError(
                f"{path} must have a column 'label' and one that identifies the sample, {', '.join(map(repr, KEYS))}. "
                f"It has {quoted(rows) or 'none'}."
            )
        samples, labels = rows[key], rows["label"]
    else:
        raise FileError(f"Known labels must be a .csv or an .npz. Got {path} instead.")
    given = [(str(one), str(label)) for one, label in zip(samples, labels, strict=True)]
    some = [(one, label) for one, label in given if label.strip() not in ("", "-1")]
    given = [(one, label) for one, label in some if label.strip() != NONE_OF_THESE]
    if not some:
        raise FileError(f"{path} has only empty labels. Fill some in, or leave the file out.")
    numbers = _numbers(path, [label for _, label in given], class_names, k)
    where = _rows(path, [one for one, _ in given], range(n) if key == "row" else ids, others or {})
    known: IntArray = np.full(n, -1, dtype=np.int64)
    for (one, _), row, number in zip(given, where, numbers, strict=True):
        if known[row] not in (-1, number):
            raise FileError(f"{path} has two labels for {short(one)!r}; keep one.")
        known[row] = number
    return known


def read_none(path: str | Path, ids: Sequence[Any], others: Mapping[str, int] | None = None) -> list[bool]:
    """Return which samples a file of known labels calls "none of these", (N,).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "known.csv").write_text("id,label\\nb.jpg,none of these\\n")
    ...     read_none(Path(folder) / "known.csv", ["a.jpg", "b.jpg"])
    [False, True]
    """
    path, found = Path(path), [False] * len(ids)
    if path.suffix != ".csv":
        return found
    rows = _read_csv(path)
    key = next((name for name in KEYS if name in rows), "")
    named = zip(rows.get(key, []), rows.get("label", []), strict=False)
    samples = [one for one, label in named if label.strip() == NONE_OF_THESE]
    for row in _rows(path, samples, range(len(ids)) if key == "row" else ids, others or {}):
        found[row] = True
    return found


def _whole(path: Path, known: AnyArray, n: int, k: int) -> IntArray:
    if known.shape != (n,) or known.dtype.kind not in "iu" or known.min(initial=0) < -1 or known.max(initial=0) >= k:
        raise FileError(
            f"'known' of {path} must be one class number from 0 to {k - 1} for each of the {n} samples, or -1 if "
            f"the label is unknown. Got shape {known.shape}, dtype {known.dtype}, or other numbers."
        )
    return known.astype(np.int64)


def _numbers(path: Path, labels: Sequence[str], class_names: Sequence[str] | None, k: int) -> list[int]:
    """Return the class numbers of labels; all labels must be classes."""
    number = class_numbers(class_names, k)
    labels = [label if label in number else label.strip() for label in labels]
    bad = [label for label in labels if label not in number]
    if bad:
        names = "class names, or numbers" if class_names else "class numbers"
        raise FileError(f"{path} has labels that are no class: {quoted(bad)}. They must be {names} from 0 to {k - 1}.")
    return [number[label] for label in labels]


def class_numbers(class_names: Sequence[str] | None, k: int) -> dict[str, int]:
    """Return the class that each text stands for: a name (of equal ones the first) or, where none has it, a number.

    >>> class_numbers(["cat", "0"], 2)
    {'0': 1, '1': 1, 'cat': 0}
    """
    names = {str(name): i for i, name in reversed(list(enumerate(class_names or ())))}
    return {str(i): i for i in range(k)} | names


def _rows(path: Path, samples: Sequence[str], ids: Sequence[Any], others: Mapping[str, int]) -> list[int]:
    """Return the row of each sample; every sample must be there, under a name that is its own."""
    row, double = dict(others), set()
    own: dict[str, int] = {}
    for i, one in enumerate(map(str, ids)):
        if own.setdefault(one, i) != i:
            double.add(one)
    row |= own
    missing = [one for one in samples if one not in row]
    if missing:
        raise FileError(
            f"{path} names samples that do not exist: {quoted(missing)}. Use the ids of the table of "
            f"predictions, such as {short(ids[0])!r}; correct the names, or remove these rows."
        )
    double |= {one for one in samples if row[one] < 0}
    unclear = [one for one in samples if one in double]
    if unclear:
        raise FileError(f"{path} has ambiguous sample names: {quoted(unclear)}. Use the column 'row'.")
    return [row[one] for one in samples]


def read_class_prior(path: str | Path, class_names: Sequence[str] | None, k: int) -> AnyArray:
    """Read the share of each class, (K,).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "shares.json").write_text('{"dog": 3, "cat": 1}')
    ...     read_class_prior(Path(folder) / "shares.json", ["cat", "dog"], 2)
    array([1., 3.])
    """
    path = Path(path)
    if path.suffix in (".npy", ".npz"):
        prior = read_arrays(path, ("class_prior",)).matrix("class_prior")
        if prior.shape != (k,):
            raise FileError(f"{path} must have one share for each of the {k} classes. Got shape {prior.shape} instead.")
        return prior
    if path.suffix == ".csv":
        rows = _read_csv(path)
        if not {"class", "share"} <= rows.keys():
            raise FileError(f"{path} must have the columns 'class' and 'share'. It has {quoted(rows) or 'none'}.")
        pairs = list(zip(rows["class"], rows["share"], strict=True))
    elif path.suffix == ".json":
        pairs = _read_json(path)
    else:
        raise FileError(f"A class balance must be a .csv, .json, .npy or .npz. Got {path} instead.")
    numbers = _numbers(path, [name for name, _ in pairs], class_names, k)
    if len(set(numbers)) < len(numbers):
        raise FileError(
            f"{path} has two shares for {quoted(n for n, count in Counter(numbers).items() if count > 1)}; keep one."
        )
    absent = sorted(set(range(k)) - set(numbers))
    if absent:
        names = [class_names[i] if class_names else i for i in absent]
        raise FileError(f"{path} has no share for {quoted(names)}; every class needs one, 0 if it cannot occur.")
    found = np.empty(k)
    for number, (name, share) in zip(numbers, pairs, strict=True):
        found[number] = _share(path, name, share)
    return found


def _share(path: Path, name: str, share: Any) -> float:
    try:
        value = float(share)
    except (TypeError, ValueError):
        value = math.nan
    if not 0 <= value < math.inf:
        raise FileError(f"{path} must have a share of at least 0 for {short(name)!r}. Got {short(share)!r} instead.")
    return value


def read_negatives(path: str | Path) -> AnyArray:
    """Read the embeddings of negative names, (M, d).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(Path(folder) / "n.npy", np.eye(2))
    ...     read_negatives(Path(folder) / "n.npy").shape
    (2, 2)
    """
    return read_arrays(path, ("negatives",)).matrix("negatives")


def read_groups(path: str | Path, group_by: str, ids: Sequence[Any] | None, n: int) -> list[str]:
    """Read the group of each sample of a features file: the folder of its id, or a column or array of the file.

    >>> read_groups("features.parquet", "folder", ["a/1.jpg", "b/2.jpg"], 2)
    ['a', 'b']
    """
    path = Path(path)
    if group_by == FOLDER:
        if ids is None:
            raise FileError(f"{path} has no ids, and therefore no folders; group by one of its arrays, or add ids.")
        return folders(ids)
    if path.suffix == ".parquet":
        values = read_parquet_column(path, group_by)
    elif path.suffix == ".npz":
        values = read_arrays(path, (group_by,)).matrix(group_by).tolist()
    else:
        raise FileError(
            f"Groups by {group_by!r} need a .parquet with that column or an .npz with that array. Got {path}."
        )
    if len(values) != n or any(isinstance(value, list | dict) for value in values):
        raise InputError(f"'{group_by}' of {path} must have one text or number for each of the {n} samples.")
    return ["" if value is None else str(value) for value in values]


def folders(ids: Iterable[Any]) -> list[str]:
    """Return the folder of each id, "." where it has none.

    >>> folders(["shop/1.jpg", "2.jpg"])
    ['shop', '.']
    """
    return [str(PurePosixPath(str(one)).parent) for one in ids]


def _read_csv(path: Path) -> dict[str, list[str]]:
    """Read the `COLUMNS` of a .csv with a header; of others only the names."""
    with reading(path):
        rows = list(csv.reader(lines_of(path), strict=True))
    header, *body = [row for row in rows if row] or [[]]
    if any(len(row) > len(header) for row in body):
        raise FileError(f"{path} has a row with more values than its header; put values with commas into quotes.")
    found: dict[str, list[str]] = {name.strip(): [] for name in header}  # of which there may be millions
    for i, name in enumerate(map(str.strip, header)):
        if name in COLUMNS:
            found[name] = [from_cell(row[i]) if i < len(row) else "" for row in body]
    return found


def _read_json(path: Path) -> list[tuple[str, Any]]:
    """Read a JSON object as pairs, so that a name given twice is seen."""
    pairs = read_json(path, object_pairs_hook=list)
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) for pair in pairs):
        raise FileError(f'{path} must be a JSON object of classes and shares, such as {{"cat": 0.2, "dog": 0.8}}.')
    return pairs


def quoted(names: Iterable[Any]) -> str:
    """Name the first few of some things, in quotes.

    >>> quoted(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 more"
    """
    found = list(dict.fromkeys(short(name) for name in names))
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(map(repr, found[:SHOWN])) + more


def short(name: Any) -> str:
    """Cut a long name in the middle.

    >>> short("a" * 100)
    'aaaaaaaaaaaaaaaaaaa...aaaaaaaaaaaaaaaaaaa'
    """
    text = str(name)
    half = LETTERS // 2 - 1
    return text if len(text) <= LETTERS else f"{text[:half]}...{text[-half:]}"
