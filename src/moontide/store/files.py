"""Features and class embeddings from stores, .npz, .npy, .safetensors, .parquet, .csv and .pt. Nothing is unpickled.

    a store       the folder that `moontide encode` made: features, text, labels, class names, ids and logit scale
    .npz          the arrays named in `ARRAYS`; others are ignored
    .npy          one matrix
    .safetensors  the tensors named in `ARRAYS`, or the only one there is
    .parquet      the column `embedding`, or the only one of its kind: lists of numbers, or binary values of one length
                  (little-endian numbers of the type that the field's metadata gives under `dtype`, else float32);
                  and the column `id`
    .csv, .tsv    a table of numbers, and .pt, .pth torch's tensors: see `store.other`

A store and the .safetensors files in it record how they were made; image and text features of different spaces, logit
scales or precisions are refused.
"""

from __future__ import annotations

import os
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import as_matrix, like
from moontide.core.devices import check_device, to_device
from moontide.errors import FileError, InputError, ResourceError, missing_extra
from moontide.memory import available_bytes, human
from moontide.metrics import IntArray, check_labels
from moontide.plausible import ask
from moontide.store.disk import check_unpacked, reading, temporary_name, text_of
from moontide.store.other import how_to_convert
from moontide.store.tensors import Tensors
from moontide.types import Task, class_numbers_of

if TYPE_CHECKING:
    from moontide.store.features import Origin

ARRAYS = ("image_features", "text_features", "view_features", "labels", "classnames", "logit_scale", "temperature")
FEATURES = (".npz", ".npy", ".safetensors", ".parquet", ".csv", ".tsv", ".pt", ".pth")
TABLES = (".csv", ".jsonl", ".json", ".xlsx", ".parquet")
PREDICTIONS = (".npz", *TABLES)
UNNAMED = ""  # the name of the matrix in a file that holds only one

AnyArray = npt.NDArray[Any]


class FileTask(NamedTuple):
    """What a features file holds: the task, the labels (which no method gets) and the ids of the samples, or None."""

    task: Task
    labels: IntArray | None
    ids: list[Any] | None


def read_task(
    features: str | Path,
    text: str | Path | None = None,
    *,
    classes: str | None = None,
    labels: str | Path | None = None,
    logit_scale: float | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    questions: bool = False,
) -> FileTask:
    """Read a task; arguments override the contents of the files. `questions`: warn about implausible input.

    With `text`, class embeddings and class names come from that file. `classes` is a comma-separated list or a file as
    in `store.classes`; class embeddings may then have one row per prompt instead of one per class. `labels` is a .npy
    or a text file with one number or class name per line. On the device "cpu" the arrays are numpy's, on others
    torch's. The logit scale is 100 where none is given.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "features.npz"
    ...     np.savez(path, image_features=np.eye(3), text_features=np.eye(3)[:2], labels=[0, 1, 1], temperature=0.02)
    ...     task, labels, ids = read_task(path, classes="cat,dog")
    >>> task.n, task.class_names, round(task.logit_scale), labels, ids
    (3, ('cat', 'dog'), 50, array([0, 1, 1]), None)
    """
    from moontide.store.classes import read_classes

    check_device(device)
    images = read_arrays(features)
    anchors = images if text is None else read_text(text)
    check_spaces(images, anchors)
    image = to_device(as_matrix(images.matrix("image_features"), "image_features"), dtype, device)
    views = images.arrays.get("view_features")
    scales = (logit_scale, anchors.logit_scale(), images.logit_scale(), 100.0)
    listed = None if classes is None else read_classes(classes)
    rows = anchors.matrix("text_features", named=text is None)
    task = Task(
        image,
        rows if listed is None else listed.means(rows),
        next(scale for scale in scales if scale is not None),
        anchors.class_names() if listed is None else listed.names,
        extras={} if views is None else {"views": like(as_matrix(views, "view_features", 3), image)},
    )
    if questions:
        ask(task, image)
    found = images.arrays.get("labels") if labels is None else read_labels(labels)
    if labels is None and images.origin is not None and images.class_names() != anchors.class_names():
        found = None  # those of a store are of its own classes
    if found is not None:
        found = check_labels(class_numbers_of(found, task.class_names, "labels"), task.n, task.k)
    return FileTask(task, found, images.ids)


@dataclass(frozen=True)
class Arrays:
    """The arrays of a file by name; None stands for an array that exists but is not needed."""

    path: Path
    arrays: Mapping[str, AnyArray | None]
    ids: list[Any] | None = None
    origin: Origin | None = None  # of a store, or of a file from one

    def matrix(self, name: str, named: bool = False) -> AnyArray:
        """Return the array called `name` or, unless it must be `named`, the only one of a file without names."""
        found = self.arrays.get(name, None if named else self.arrays.get(UNNAMED))
        if found is None:
            hint = "; pass the file that has it with --text" if name == "text_features" else ""
            holds = ", ".join(sorted(key or "one matrix" for key in self.arrays)) or "nothing"
            raise FileError(f"{self.path} has no array '{name}': it holds {holds}{hint}.")
        return found

    def logit_scale(self) -> float | None:
        """Return the logit scale, or 1 / temperature, or that of the store it is from, or None."""
        given = {name: self.arrays[name] for name in ("logit_scale", "temperature") if name in self.arrays}
        if len(given) == 2:
            raise FileError(f"{self.path} has both 'logit_scale' and 'temperature' (its inverse); keep one of them.")
        for name, value in given.items():
            if value is None or value.size != 1 or value.dtype.kind not in "fiu" or not 0 < value.item() < np.inf:
                raise InputError(f"'{name}' of {self.path} must be one positive number. Got {value} instead.")
            return float(value.item()) if name == "logit_scale" else 1 / float(value.item())
        return None if self.origin is None else self.origin.logit_scale

    def class_names(self) -> list[str] | None:
        """Return the class names, or None."""
        names = self.arrays.get("classnames")
        if names is None:
            return None
        if names.ndim != 1:
            raise InputError(f"'classnames' of {self.path} must be a 1-D array. Got shape {names.shape} instead.")
        return [n.decode(errors="replace") if isinstance(n, bytes) else str(n) for n in names.tolist()]


def read_arrays(path: str | Path, names: Sequence[str] = ARRAYS) -> Arrays:
    """Read the arrays of a features file or a store, or those of other `names`.

    >>> read_arrays("features.txt")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file features.txt.
    """
    path = Path(path)
    if is_store(path):
        return _read_store(path)
    kinds = (_read_npz, _read_npy, _read_safetensors, _read_parquet, _read_csv, _read_csv, _read_pt, _read_pt)
    readers = dict(zip(FEATURES, kinds, strict=True))
    with reading(path):
        if path.suffix not in readers:
            remedy = how_to_convert(path)
            raise FileError(
                f"{path} must be a file of the kind {', '.join(FEATURES)}. Got '{path.suffix}' instead{remedy}."
            )
        _require_memory(path, path.stat().st_size)
        return readers[path.suffix](path, names)


def is_store(path: str | Path) -> bool:
    """Return whether a path is the folder of a store that `moontide encode` made.

    >>> is_store("features.npz")
    False
    """
    from moontide.store.features import MANIFEST

    return (Path(path) / MANIFEST).is_file()


def check_spaces(images: Arrays, anchors: Arrays) -> None:
    """Refuse text features that were made differently from the image features, if both record how they were made.

    >>> check_spaces(Arrays(Path("a.npy"), {}), Arrays(Path("b.npy"), {}))
    """
    if images.origin is not None and anchors.origin is not None and images is not anchors:
        from moontide.store.features import refuse_other_space

        remedy = f"{anchors.path} does not match them: use the text of the same encoder, or leave '--text' out"
        refuse_other_space(str(images.path), images.origin, anchors.origin, remedy)


def _read_store(path: Path) -> Arrays:
    from moontide.store.features import TEXT, FeatureStore

    store = FeatureStore.open(path)
    _require_memory(path, sum(shard.stat().st_size for shard in store.shards if shard.exists()))
    arrays: dict[str, AnyArray | None] = {"image_features": store.take(np.arange(store.n))}
    if TEXT in store.files:
        arrays |= read_text(path).arrays
    if store.labels is not None:
        arrays["labels"] = store.labels
    return Arrays(path, arrays, list(store.ids), store.origin)


def read_text(path: str | Path) -> Arrays:
    """Read class embeddings from a file, or from a store without its image features.

    >>> read_text("classes.npy")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file classes.npy.
    """
    if not is_store(path):
        return read_arrays(path)
    from moontide.store.features import FeatureStore

    store = FeatureStore.open(path)
    names = np.asarray(store.class_names, dtype=np.str_)
    return Arrays(Path(path), {"text_features": store.text, "classnames": names}, None, store.origin)


def _require_memory(path: Path, size: int) -> None:
    have = available_bytes()
    if have is not None and size > have:
        raise ResourceError(f"{path} needs {human(size)} of memory, but {human(have)} is available; split the file.")


def _read_npz(path: Path, names: Sequence[str]) -> Arrays:
    with zipfile.ZipFile(path) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.removesuffix(".npy") in names]
        check_unpacked(str(path), sum(entry.file_size for entry in entries), path.stat().st_size)
    arrays: dict[str, AnyArray | None] = {}
    with np.load(path, allow_pickle=False) as held:
        for name in held.files:
            try:
                arrays[name] = held[name] if name in names else None
            except ValueError as error:
                raise _no_objects(path, name, error) from None
    return Arrays(path, arrays)


def _read_npy(path: Path, names: Sequence[str]) -> Arrays:
    try:
        held = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise _no_objects(path, path.stem, error) from None
    if not isinstance(held, np.ndarray):
        raise FileError(f"{path} is an .npz archive; rename it.")
    return Arrays(path, {UNNAMED: held})


def _no_objects(path: Path, name: str, error: ValueError) -> Exception:
    """Explain numpy's refusal to unpickle; leave its other errors as they are."""
    if "Object arrays" not in str(error) and "Python objects" not in str(error):
        return error
    return FileError(
        f"The array '{name}' of {path} holds Python objects, which are never loaded because loading them can run code; "
        "save it as an array of numbers, or of text with dtype=str."
    )


def _read_safetensors(path: Path, names: Sequence[str]) -> Arrays:
    from moontide.store.features import Origin, about

    with open(path, "rb") as handle:
        held = Tensors(handle)
        only = next(iter(held)) if len(held) == 1 else None
        arrays = {name: held[name] if name in names or name == only else None for name in held}
        kept = about(held.metadata)
    if "class_names" in kept:
        arrays["classnames"] = np.asarray(kept["class_names"], dtype=np.str_)
    origin = Origin.parse(kept["origin"]) if "origin" in kept else None
    held_arrays = arrays if only is None or only in names else {UNNAMED: arrays[only]}
    return Arrays(path, held_arrays, kept.get("ids"), origin)


def _read_parquet(path: Path, names: Sequence[str]) -> Arrays:
    matrix, ids = parquet_module("Reading").read_embeddings(path)
    return Arrays(path, {UNNAMED: matrix}, ids)


def _read_csv(path: Path, names: Sequence[str]) -> Arrays:
    from moontide.store.other import read_numbers

    matrix, ids = read_numbers(path)
    return Arrays(path, {UNNAMED: matrix}, ids)


def _read_pt(path: Path, names: Sequence[str]) -> Arrays:
    from moontide.store.other import read_tensors

    return Arrays(path, read_tensors(path, names))


def read_parquet_column(path: str | Path, name: str) -> list[Any]:
    """Read one column of a .parquet file, None where a value is missing.

    >>> read_parquet_column("no.parquet", "camera")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no.parquet.
    """
    path = Path(path)
    with reading(path):
        found: list[Any] = parquet_module("Reading").read_column(path, name)
    return found


def parquet_module(doing: str) -> ModuleType:
    """Return what reads and writes .parquet files; `doing` names in the error what it is needed for."""
    try:
        from moontide.store import parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet", f"{doing} .parquet files") from None
    return parquet


def read_labels(path: str | Path) -> AnyArray:
    """Read class numbers or names from a .npy, or from a text file with one per line.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "labels.txt").write_text("2\\n0\\n")
    ...     read_labels(Path(folder) / "labels.txt")
    array([2, 0])
    """
    path = Path(path)
    if path.suffix == ".npy":
        return read_arrays(path).matrix("labels")
    lines = [line.strip() for line in _read_lines(path)]
    if "" in lines:
        raise FileError(f"{path} must have one class number or name per line. Line {lines.index('') + 1} is empty.")
    return np.asarray([int(x) for x in lines], np.int64) if all(map(is_whole, lines)) else np.asarray(lines)


def is_whole(text: str) -> bool:
    """Return whether a text is a whole number, of at most 18 digits.

    >>> is_whole("-3"), is_whole("cat")
    (True, False)
    """
    return re.fullmatch(r"-?\d{1,18}", text) is not None


def _read_lines(path: Path) -> list[str]:
    return text_of(path).splitlines()


def check_output(path: str | Path, kinds: Sequence[str] = PREDICTIONS) -> None:
    """Refuse an output that could not be written, before anything is computed.

    >>> check_output("predictions.txt")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: The output predictions.txt must end in .npz, .csv, .jsonl, .json, .xlsx, .parquet.
    """
    path = Path(path)
    if path.suffix not in kinds:
        raise FileError(f"The output {path} must end in {', '.join(kinds)}.")
    if path.suffix == ".parquet":
        parquet_module("Writing")
    if path.suffix == ".xlsx":
        from moontide.store.tables import require_xlsx

        require_xlsx()
    if not os.path.isdir(path.parent):
        raise FileError(f"The folder of the output {path} does not exist; create {path.parent} first.")
    if reason := _why_not(path):
        raise FileError(f"The output {path} cannot be written: {reason}.")


def _why_not(path: Path) -> str | None:
    """Return why a file cannot be written, or None if it can."""
    if os.path.realpath(path.parent) == "/dev":
        return "its folder is for devices"
    if os.path.isdir(path):
        return "it is a folder"
    if os.path.exists(path) and not os.path.isfile(path):
        return "it is not a regular file"
    if os.path.exists(path) and not os.access(path, os.W_OK):
        return "it is read-only"
    try:
        os.lstat(path.with_name(temporary_name(path)))
    except FileNotFoundError:
        pass
    except OSError as error:  # the name is too long
        return error.strerror
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return error.strerror
