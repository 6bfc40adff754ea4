"""The feature store: a folder that an encoder writes shard by shard, and that is memory-mapped when it is read.

    store/
      manifest.json        who made it (encoder, preprocessing, prompts), class names, and every shard with its SHA-256
      text.safetensors     text_features (K, d)
      negatives.safetensors  of the negative names that were embedded last, if any; the manifest does not name it
      00000.safetensors    image_features (n, d), labels (n,) if there are any; the ids in its metadata
      00001.safetensors    ...

A shard is complete before it gets its name, and counts once the manifest names it. The manifest is replaced in one
step, so a run that is stopped, even by kill -9, leaves a valid store without the current shard, and the next run
continues after the stored ids.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import as_matrix
from moontide.errors import FileError, InputError
from moontide.metrics import IntArray, check_labels
from moontide.store.disk import read_json, reading, replacing
from moontide.store.tensors import Tensors
from moontide.types import check_class_names

FORMAT = 2  # 1 had no spec, precision and decoding
MANIFEST, TEXT, NEGATIVES = "manifest.json", "text.safetensors", "negatives.safetensors"
ABOUT = "about"  # the only key of the metadata of a file, since safetensors writes several in any order

NAME = re.compile(r"text\.safetensors|\d{5,}\.safetensors")  # of the files that a manifest names

AnyArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Origin:
    """How the features of a store were made; a store never mixes two origins."""

    encoder: str  # the id of the model
    preprocessing: str  # what was done to an image before it
    prompts: tuple[str, ...]  # templates of the class names, {} the name
    logit_scale: float = 100.0
    dataset: str | None = None
    spec: str = ""  # what the encoder is made of again, from any folder
    typed: str = ""  # the `spec` that the user wrote
    precision: str = "float32"  # of the image tower
    decoding: str = "exact"  # or fast: on a GPU, with small differences
    runtime: str = ""  # of the image tower on a CPU, such as torch; vectors of two differ in their last digits only
    folder: str = ""  # that relative paths of images start from

    @property
    def reloads(self) -> str:
        """What the encoder is made of again."""
        return self.spec or self.encoder

    def space(self) -> dict[str, Any]:
        """Return what must be the same for features to be compared with each other."""
        names = ("encoder", "preprocessing", "logit_scale", "precision", "decoding")
        return {name: getattr(self, name) for name in names}

    def write(self) -> dict[str, Any]:
        """Return the origin as JSON has it."""
        return {**asdict(self), "prompts": list(self.prompts)}

    @staticmethod
    def parse(held: dict[str, Any]) -> Origin:
        """Make an origin of what JSON has.

        >>> origin = Origin("a-model", "none", ("{}",))
        >>> Origin.parse(origin.write()) == origin
        True
        """
        origin = Origin(**{**held, "prompts": tuple(held["prompts"])})
        texts = [getattr(origin, name) for name in held if name not in ("prompts", "logit_scale", "dataset")]
        if not all(isinstance(text, str) for text in (*texts, *origin.prompts, origin.dataset or "")):
            raise ValueError("its origin has other values than texts")
        if not (type(origin.logit_scale) in (int, float) and 0 < origin.logit_scale < math.inf):
            raise ValueError("the logit scale of its origin is not a positive number")
        return origin


@dataclass(frozen=True)
class FeatureStore:
    """A store on disk; `create` makes or continues one, `open` reads one.

    >>> import tempfile
    >>> origin = Origin("a-model", "none", ("{}",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = FeatureStore.create(folder, origin, ["cat", "dog"], np.eye(2, dtype=np.float32))
    ...     store = store.append(["a.jpg", "b.jpg"], np.eye(2, dtype=np.float16), [0, 1])
    ...     same = FeatureStore.open(folder)
    ...     same.n, same.ids, same.take([1]), same.labels
    (2, ['a.jpg', 'b.jpg'], array([[0., 1.]], dtype=float16), array([0, 1]))
    """

    folder: Path
    origin: Origin
    class_names: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)  # every file of the store, with its SHA-256

    @staticmethod
    def create(
        folder: str | Path, origin: Origin, class_names: Sequence[str] = (), text: npt.ArrayLike | None = None
    ) -> FeatureStore:
        """Make an empty store, with or without classes, or continue the one there if its origin and classes are these.

        The same text embedded again may differ in the last bits.
        """
        folder = Path(folder)
        anchors: AnyArray | None = None if text is None else as_matrix(text, "text_features")
        names = check_class_names(class_names, 0 if anchors is None else len(anchors))
        if (folder / MANIFEST).exists():
            found = FeatureStore.open(folder)
            found.check_space(origin)
            same = (found.origin.prompts, found.origin.dataset, found.class_names) == (
                origin.prompts, origin.dataset, names,
            )  # fmt: skip
            if not same or (anchors is not None and not np.allclose(found.text, anchors, atol=1e-4)):
                raise FileError(
                    f"{folder} has features with another prompt, dataset or class list; choose a new folder, or add "
                    "images with '--into', which keeps its settings."
                )
            _sweep(folder)
            return found
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"The folder {folder} cannot be created: {error.strerror}.") from error
        store = FeatureStore(folder, origin, names)
        return store if anchors is None else store._with(TEXT, {"text_features": anchors}, {"class_names": names})

    @staticmethod
    def open(folder: str | Path) -> FeatureStore:
        """Read the manifest of a store."""
        folder = Path(folder)
        path = folder / MANIFEST
        if not os.path.lexists(path):
            raise FileError(f"{folder} is not a feature store: it has no {MANIFEST}.")
        _check_regular(path)
        held = read_json(path)
        try:
            version = held["format"]
            if version not in (1, FORMAT):
                raise FileError(f"{path} has the format {version}, but this Moontide reads {FORMAT}; update Moontide.")
            outside = [name for name in held["files"] if not NAME.fullmatch(name)]
            if outside:
                raise FileError(f"{path} names {outside[0][:80]!r}, which is not a file of the store; ignored.")
            names = tuple(map(str, held["class_names"]))
            return FeatureStore(folder, Origin.parse(held["origin"]), names, dict(held["files"]))
        except (ValueError, KeyError, TypeError) as error:
            raise FileError(f"{path} is damaged ({error}).") from error

    def check_space(self, other: Origin) -> None:
        """Refuse features of another encoder, preprocessing, scale, precision or decoding than those of the store.

        >>> store = FeatureStore(Path("store"), Origin("a-model", "none", ("{}",)), ())
        >>> store.check_space(Origin("a-model", "none", ("{}",), precision="float16"))
        Traceback (most recent call last):
            ...
        moontide.errors.FileError: store holds features with the precision 'float32', and these have 'float16'; \
choose a new folder, or use the same settings.
        """
        refuse_other_space(str(self.folder), self.origin, other, "choose a new folder, or use the same settings")

    def append(self, ids: Sequence[str], features: npt.ArrayLike, labels: npt.ArrayLike | None = None) -> FeatureStore:
        """Add a shard and return the store that has it; the file of this one stays readable."""
        array = np.asarray(features)
        as_matrix(array, "image_features")
        if array.dtype not in (np.float16, np.float32, np.float64):
            array = array.astype(np.float32)
        if array.shape[1] != (self.dim or array.shape[1]) or len(ids) != len(array):
            raise InputError(
                f"'image_features' must have one row for each of the {len(ids)} ids and the dimension of the store, "
                f"{self.dim}. Got shape {array.shape} instead."
            )
        known = Counter([*self.ids, *ids])
        double = [i for i in ids if known[i] > 1]
        if double:
            raise InputError(f"'ids' must be new to the store and distinct. Got {double[0]!r} again.")
        if self.shards and (labels is None) != (self.labels is None):
            raise InputError("'labels' must be given for every shard of a store, or for none.")
        arrays = {"image_features": array}
        if labels is not None:
            arrays["labels"] = check_labels(labels, len(array), len(self.class_names))
        return self._with(f"{self._number():05d}.safetensors", arrays, {"ids": list(ids)})

    def _number(self) -> int:
        """Return the number of the next shard."""
        return max((int(path.stem) for path in self.shards), default=-1) + 1

    def remove(self, ids: Sequence[str]) -> FeatureStore:
        """Return the store without some samples; shards that lose some are written anew, the others stay as they are.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = FeatureStore.create(folder, Origin("a-model", "none", ("{}",)))
        ...     store.append(["a.jpg", "b.jpg"], np.eye(2)).remove(["a.jpg"]).ids
        ['b.jpg']
        """
        gone = set(ids)
        unknown = sorted(gone - set(self.ids))
        if unknown:
            raise InputError(f"'ids' must be in the store. Got {unknown[0]!r}, which is not.")
        number, files, stale = self._number(), {}, []
        maps = dict(zip((path.name for path in self.shards), self._maps, strict=True))
        for name, digest in self.files.items():
            arrays, held = maps.get(name, ({}, []))  # the text has no samples
            kept = [i for i, one in enumerate(held) if one not in gone]
            if len(kept) == len(held):
                files[name] = digest
                continue
            stale.append(name)
            if kept:
                rows = {key: np.asarray(array)[kept] for key, array in arrays.items()}
                record = {"ids": [held[i] for i in kept]}
                files[f"{number:05d}.safetensors"] = self._save(f"{number:05d}.safetensors", rows, record)
                number += 1
        after = replace(self, files=files)
        after._commit()
        for name in stale:  # nothing names them any more, nor the views of their images
            (self.folder / name).unlink(missing_ok=True)
            (self.folder / "views" / name).unlink(missing_ok=True)
        return after

    @property
    def shards(self) -> list[Path]:
        """The shards in order."""
        return [self.folder / name for name in self.files if name != TEXT]

    @cached_property
    def text(self) -> AnyArray:
        """The class embeddings (K, d)."""
        if TEXT not in self.files:
            raise FileError(f"{self.folder} has no classes, only images; encode with classes, or pass the text.")
        path = self.folder / TEXT
        text = _mapped(path)[0].get("text_features")
        if text is None or text.ndim != 2 or text.dtype.kind != "f" or len(text) != len(self.class_names):
            raise FileError(f"{path} is damaged: it has no vector for each class; encode into a new folder.")
        return text

    def negatives(self, key: str) -> AnyArray | None:
        """Return the embeddings of negative names that were kept under `key`, (M, d), or None where there are none."""
        try:
            arrays, metadata = _mapped(self.folder / NEGATIVES)
        except FileError:  # nothing is lost with it: they are embedded again
            return None
        found = arrays.get("negatives")
        same = metadata.get("key") == key and found is not None and found.ndim == 2 and found.shape[1] == self.dim
        return np.array(found) if same else None

    def keep_negatives(self, key: str, negatives: npt.ArrayLike) -> None:
        """Keep embeddings of negative names (M, d), instead of those that were kept before."""
        from safetensors.numpy import save

        array: AnyArray = np.ascontiguousarray(as_matrix(negatives, "negatives"))
        _write(self.folder / NEGATIVES, save({"negatives": array}, {"key": key}))

    @property
    def dim(self) -> int | None:
        """The dimension of the embeddings, or None while there are none."""
        if TEXT in self.files:
            return int(self.text.shape[1])
        return int(self._maps[0][0]["image_features"].shape[1]) if self._maps else None

    @cached_property
    def _maps(self) -> list[tuple[dict[str, AnyArray], list[str]]]:
        """The arrays of each shard, and its ids."""
        return [_shard(path, len(self.class_names)) for path in self.shards]

    @cached_property
    def ids(self) -> list[str]:
        """The ids of the samples, in order."""
        return [i for _, ids in self._maps for i in ids]

    @cached_property
    def labels(self) -> IntArray | None:
        """The class numbers of the samples, or None."""
        parts = [arrays["labels"] for arrays, _ in self._maps if "labels" in arrays]
        return np.concatenate(parts) if parts else None

    @property
    def n(self) -> int:
        """The number of samples."""
        return sum(len(arrays["image_features"]) for arrays, _ in self._maps)

    def take(self, indices: npt.ArrayLike) -> AnyArray:
        """Read the features of some samples, (n, d), and nothing else from disk."""
        parts = [arrays["image_features"] for arrays, _ in self._maps]
        starts = np.cumsum([0, *map(len, parts)])
        wanted = np.asarray(indices, dtype=np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self.n):
            raise InputError(f"'indices' must be sample numbers from 0 to {self.n - 1}.")
        out = np.empty((wanted.size, self.dim or 0), dtype=np.result_type(*parts) if parts else np.float32)
        for part, start, stop in zip(parts, starts[:-1], starts[1:], strict=True):
            here = (wanted >= start) & (wanted < stop)
            out[here] = part[wanted[here] - start]
        return out

    @property
    def hash(self) -> str:
        """SHA-256 over the contents: the same features in the same shards give the same hash, wherever they lie."""
        return hashlib.sha256(json.dumps(self._manifest()).encode()).hexdigest()

    def verify(self) -> None:
        """Read every file again and refuse one whose contents are not those that were written."""
        for name, digest in self.files.items():
            path = self.folder / name
            if not path.exists():
                raise FileError(f"{path} is missing from the store; encode into a new folder.")
            if hashlib.sha256(np.memmap(path, mode="r").data).hexdigest() != digest:
                raise FileError(f"{path} has changed (its SHA-256 differs); encode into a new folder.")

    def _manifest(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "origin": self.origin.write(),
            "class_names": list(self.class_names),
            "files": self.files,
        }

    def _with(self, name: str, arrays: dict[str, AnyArray], about: dict[str, Any]) -> FeatureStore:
        """Return the store with one more file, which its manifest names."""
        after = replace(self, files={**self.files, name: self._save(name, arrays, about)})
        after._commit()
        return after

    def _save(self, name: str, arrays: dict[str, AnyArray], about: dict[str, Any]) -> str:
        """Write a file that the manifest does not name yet, and return its SHA-256; a file records its origin, too."""
        from safetensors.numpy import save

        record = {**about, "origin": self.origin.write()}
        data = save({key: np.ascontiguousarray(value) for key, value in arrays.items()}, {ABOUT: json.dumps(record)})
        _write(self.folder / name, data)
        return hashlib.sha256(data).hexdigest()

    def _commit(self) -> None:
        _write(self.folder / MANIFEST, json.dumps(self._manifest(), indent=1, ensure_ascii=False).encode())


def refuse_other_space(what: str, origin: Origin, other: Origin, remedy: str) -> None:
    """Refuse two origins whose features cannot be compared, and name what differs."""
    for name, value in origin.space().items():
        theirs = other.space()[name]
        same = abs(value - theirs) <= 1e-4 * abs(value) if name == "logit_scale" else value == theirs
        if not same:
            record = "another preprocessing" if name == "preprocessing" else f"the {name.replace('_', ' ')} {value!r}"
            given = "" if name == "preprocessing" else f", and these have {theirs!r}"
            raise FileError(f"{what} holds features with {record}{given}; {remedy}.")


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed had half written."""
    for path in folder.glob(".*.tmp"):
        with suppress(OSError, ValueError):
            if not _alive(int(path.name.split(".")[-2])):
                path.unlink()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def about(metadata: dict[str, str]) -> dict[str, Any]:
    """Return what the metadata of a file of a store hold: its origin, and ids or class names; nothing of other files.

    >>> about({})
    {}
    """
    held = json.loads(metadata.get(ABOUT, "{}"))
    return held if isinstance(held, dict) else {}


def stored_ids(metadata: dict[str, str]) -> list[str] | None:
    """Return the ids that the metadata of a shard hold, or None.

    >>> stored_ids({"about": '{"ids": ["a.jpg"]}'})
    ['a.jpg']
    """
    found = about(metadata).get("ids") or json.loads(metadata.get("ids", "null"))  # as earlier versions wrote them
    return None if found is None else list(found)


def _write(path: Path, data: bytes) -> None:
    """Write a file so that it is on the disk, and whole, before it has its name."""
    with replacing(path) as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())


def _shard(path: Path, k: int) -> tuple[dict[str, AnyArray], list[str]]:
    """Map the arrays of a shard of a store with k classes; return its ids too."""
    arrays, metadata = _mapped(path)
    with reading(path):
        ids = stored_ids(metadata) or []
        x, labels = arrays.get("image_features"), arrays.get("labels")
        if x is None or x.ndim != 2 or x.dtype.kind != "f" or len(ids) != len(x):
            raise ValueError("it has no vector for each id")
        if not all(isinstance(one, str) for one in ids):
            raise ValueError("its ids are no texts")
        if labels is not None:
            check_labels(labels, len(x), k)
    return arrays, ids


def _check_regular(path: Path) -> None:
    """Refuse a pipe or a device among the files of a store, which would be waited for."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileError(f"{path} is not a regular file; remove it, or encode into a new folder.")


def _mapped(path: Path) -> tuple[dict[str, AnyArray], dict[str, str]]:
    """Map the arrays of a file of a store; return its metadata too."""
    _check_regular(path)
    with reading(path), open(path, "rb") as handle:
        held = Tensors(handle)
        return held.mapped(path), held.metadata
