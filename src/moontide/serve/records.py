"""The data types of streams (configurations, pushes, answers, counts) and how they are stored."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from moontide.core.arrays import Array, to_numpy
from moontide.errors import InputError
from moontide.serve.stream_store import Answered
from moontide.store.tensors import Tensors
from moontide.types import Result

Floats = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Answers = npt.NDArray[np.void]  # (n,) of the first type below
Pushes = npt.NDArray[np.void]  # (m,) of the second

ANSWER = np.dtype([
    ("label", "<i4"), ("confidence", "<f4"), ("zero_shot_label", "<i4"), ("zero_shot_confidence", "<f4"),
    ("known", "<i4"),  # the true class, -1 where it is not known
])  # fmt: skip
PUSH = np.dtype([("key", "V16"), ("first", "<i8"), ("size", "<i4"), ("digest", "V32")])  # size 0: a correction


@dataclasses.dataclass(frozen=True)
class Config:
    """The configuration of a stream.

    >>> Config.read(Config("moon", {}, ("cat", "dog"), 512, 100.0).write()).class_names
    ('cat', 'dog')
    """

    method: str
    options: dict[str, Any]
    class_names: tuple[str, ...]
    dim: int
    logit_scale: float
    source: str = "prototypes"  # or the id of the encoder that embedded the class names, or "simulated"
    max_batch: int = 64
    max_wait_ms: float = 10.0
    window: int = 512
    created: float = 0.0

    def write(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read(cls, text: str) -> Config:
        """Read it from JSON."""
        values = json.loads(text)
        return cls(**{**values, "class_names": tuple(values["class_names"])})


class Item(NamedTuple):
    """A push in progress: validated embeddings, known labels, and the idempotency key with a digest of the contents."""

    x: Floats  # (n, d)
    key: str | None = None
    digest: bytes = b""
    known: Labels | None = None  # (n,), -1 where not known


class Correction(NamedTuple):
    """True labels of samples that were answered before."""

    samples: Labels  # (m,) their numbers
    labels: Labels  # (m,), -1 withdraws a known label
    key: str | None = None
    digest: bytes = b""


class Answer(NamedTuple):
    """The answer to a push: the number of its first sample, and one prediction per sample."""

    first: int
    rows: Answers  # (n,)
    repeated: bool = False  # whether this repeats an earlier answer


class Corrected(NamedTuple):
    """The answer to a correction."""

    samples: Labels
    labels: Labels
    repeated: bool = False


Known: TypeAlias = dict[bytes, tuple[int, int, bytes]]  # by digest of the key: first sample, size, digest of the push


class Tally(NamedTuple):
    """Counts over all samples in a state, and the last beta."""

    counts: npt.NDArray[np.int64]  # (2, K) predictions of each class: adapted, zero-shot
    changed: int  # samples whose prediction differs from zero-shot
    beta: Floats | None  # (K,) of the last micro-batch, for methods that have one

    def add(self, rows: Answers, beta: Array | None) -> Tally:
        """Count the predictions of a micro-batch."""
        k = self.counts.shape[1]
        labels = rows["label"], rows["zero_shot_label"]
        counts = self.counts + np.stack([np.bincount(column, minlength=k) for column in labels])
        changed = self.changed + int(np.count_nonzero(labels[0] != labels[1]))
        return Tally(counts, changed, None if beta is None else to_numpy(beta).astype(np.float32))

    def write(self) -> bytes:
        """Return it as bytes."""
        arrays = {"counts": self.counts, "changed": np.asarray(self.changed)}
        data: bytes = save(arrays if self.beta is None else {**arrays, "beta": self.beta})
        return data

    @classmethod
    def read(cls, data: bytes) -> Tally:
        """Read it from bytes.

        >>> Tally.read(Tally(np.zeros((2, 3), np.int64), 4, None).write()).changed
        4
        """
        arrays = dict(Tensors(io.BytesIO(data)))
        return cls(arrays["counts"], int(arrays["changed"]), arrays.get("beta"))


def answers_of(result: Result, known: Labels | None = None) -> Answers:
    """Return the predictions of a result as one record per sample, with labels that were known before (n,).

    >>> answers_of(Result(probs=np.asarray([[0.25, 0.75]]), zero_shot=np.asarray([[0.5, 0.5]]))).tolist()
    [(1, 0.75, 0, 0.5, -1)]
    >>> answers_of(Result(probs=np.asarray([[0.25, np.nan]]), zero_shot=np.asarray([[0.5, 0.5]])))
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: The method has no finite answer for these samples; create a stream with other options.
    """
    rows = np.empty(len(result.labels), ANSWER)
    before = to_numpy(result.zero_shot)
    rows["label"], rows["confidence"] = to_numpy(result.labels), to_numpy(result.confidence)
    rows["zero_shot_label"], rows["zero_shot_confidence"] = to_numpy(result.zero_shot_labels), before.max(axis=1)
    rows["known"] = -1 if known is None else known
    finite = math.isfinite(float(rows["confidence"].sum()) + float(rows["zero_shot_confidence"].sum()))
    if not finite or not (result.beta is None or np.isfinite(to_numpy(result.beta)).all()):
        raise InputError("The method has no finite answer for these samples; create a stream with other options.")
    return rows


def digest_of(*parts: object) -> bytes:
    """Return a digest of arrays and words, which identifies a repeated push.

    >>> len(digest_of(np.zeros(2), "a", None))
    32
    """
    sha = hashlib.sha256()
    for part in parts:
        data = np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else repr(part).encode()
        sha.update(f"{type(part).__name__} {len(data)} ".encode())
        sha.update(data)
    return sha.digest()


def key_of(key: str) -> bytes:
    """Return the stored form of an idempotency key.

    >>> len(key_of("frame-1"))
    16
    """
    return hashlib.sha256(key.encode()).digest()[:16]


def columns(first: int, rows: Answers, names: Sequence[str]) -> dict[str, Any]:
    """Return predictions as lists with one entry per sample.

    >>> columns(7, np.asarray([(1, 0.75, 0, 0.5, -1)], ANSWER), ("cat", "dog"))["class_names"]
    ['dog']
    """
    fields: dict[str, Any] = {"first": first, "size": len(rows)}
    for prefix in ("", "zero_shot_"):
        labels = rows[f"{prefix}label"].tolist()
        fields[f"{prefix}labels"] = labels
        fields[f"{prefix}class_names"] = [names[label] for label in labels]
        fields[f"{prefix}confidence"] = rows[f"{prefix}confidence"].astype(np.float64).round(6).tolist()
    fields["known"] = [None if label < 0 else label for label in rows["known"].tolist()]
    return fields


def numbers(values: Any) -> list[float] | None:
    """Return an array as a list, or None if there is no array.

    >>> numbers(np.asarray([0.5], np.float32))
    [0.5]
    """
    return None if values is None else np.asarray(values, np.float64).round(6).tolist()


def pushes_in(row: Answered) -> Known:
    """Return the pushes with keys among the answers of a record.

    >>> pushes_in(Answered(0, 1, bytes(ANSWER.itemsize)))
    {}
    """
    pushes = np.frombuffer(row.data, PUSH, offset=row.size * ANSWER.itemsize)
    return {bytes(key): (int(first), int(size), bytes(digest)) for key, first, size, digest in pushes}
