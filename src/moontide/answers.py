"""From probabilities to answers: a class, a level of a class tree, or none of the classes.

A method gives probabilities of the classes. The answer for a sample follows from them and from two choices:

    unknown   which samples are of none of the classes: those with the highest `Result.unknown`, a share of all samples
              (0.2), or all above a score (">0.9")
    roll up   how sure an answer has to be: if no class has that probability, the answer is the deepest level of the
              tree whose classes have it together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import to_numpy
from moontide.errors import InputError, OptionError
from moontide.metrics import IntArray
from moontide.types import Result

NONE_OF_THESE = "none of these"
SEPARATOR = "/"  # between the levels of a class name in a tree
UNSURE = "unsure"  # where not even the highest level of a tree is sure enough
ROUNDING = 1e-6  # of sums of probabilities
TOP = 5  # classes that are named with their probabilities

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Answers:
    """The answers for N samples: all possible names, and the name that each sample gets.

    names: the K classes, then NONE_OF_THESE where that is asked for, then levels of the tree. choices: how many of the
    names a person can choose as a label. labels: (N,) numbers of names. confidence: (N,) of the answers. classes: (N,)
    the most likely class, whatever the answer.
    """

    names: tuple[str, ...]
    choices: int
    labels: IntArray
    confidence: FloatArray
    classes: IntArray

    @property
    def none(self) -> BoolArray:
        """Which samples are of none of the classes, (N,)."""
        found: BoolArray = np.asarray(self.names)[self.labels] == NONE_OF_THESE
        return found if NONE_OF_THESE in self.names[: self.choices] else np.zeros_like(found)

    @property
    def texts(self) -> list[str]:
        """The answers by name, one per sample."""
        return [self.names[k] for k in self.labels]

    def numbers(self, k: int) -> IntArray:
        """The answers as class numbers, -1 if an answer is not a class, (N,)."""
        return np.where(self.labels < k, self.labels, -1)


def answer(
    result: Result,
    names: Sequence[str],
    *,
    unknown: str | float | None = None,
    roll_up: float | None = None,
    paths: Sequence[Sequence[str]] | None = None,
    known: npt.ArrayLike | None = None,
    is_none: npt.ArrayLike | None = None,
) -> Answers:
    """Return the answers for the samples of a result.

    unknown, roll_up: see the docstring of this module; None leaves it out. paths: positions of the classes in the tree.
    known: (N,) class numbers, -1 where not known; these samples keep their label. is_none: (N,) which samples are known
    to be of none of the classes.

    >>> probs = np.asarray([[0.9, 0.1, 0.0], [0.5, 0.4, 0.1], [0.4, 0.2, 0.4]])
    >>> tree = [("animal", "cat"), ("animal", "dog"), ("car",)]
    >>> answer(Result(probs, probs), ["cat", "dog", "car"], roll_up=0.8, paths=tree).texts
    ['cat', 'animal', 'unsure']
    >>> answer(Result(probs, probs, unknown=np.asarray([0.1, 0.2, 0.7])), ["cat", "dog", "car"], unknown=0.3).texts
    ['cat', 'cat', 'none of these']
    """
    probs, classes = np.asarray(to_numpy(result.probs), dtype=np.float64), to_numpy(result.labels).astype(np.int64)
    labels, all_names = classes.copy(), [str(name) for name in names]
    confidence: FloatArray = np.asarray(to_numpy(result.confidence), dtype=np.float64)
    fixed: BoolArray = np.zeros(len(labels), dtype=bool) if known is None else to_numpy(known) >= 0
    marked: BoolArray = np.zeros(len(labels), dtype=bool) if is_none is None else np.asarray(is_none, dtype=bool)
    asked = unknown is not None or bool(marked.any())
    all_names += [NONE_OF_THESE] * asked
    choices = len(all_names)
    if roll_up is not None:
        levels, rolled, sure = rolled_up(probs, paths, roll_up)
        labels = np.where(fixed, labels, np.where(rolled < len(names), rolled, rolled + choices - len(names)))
        confidence = np.where(fixed, confidence, sure)
        all_names += levels
    if unknown is not None:
        marked = marked | (unknown_rows(result, unknown) & ~fixed)
    labels = np.where(marked, choices - 1, labels)
    return Answers(tuple(all_names), choices, labels, confidence, classes)


def unknown_rows(result: Result, rule: str | float) -> BoolArray:
    """Return which samples are of none of the classes, (N,): a share of them, or all above a score.

    >>> result = Result(np.ones((3, 1)), np.ones((3, 1)), unknown=np.asarray([0.1, 0.9, 0.5]))
    >>> unknown_rows(result, 0.4), unknown_rows(result, ">0.3")
    (array([False,  True, False]), array([False,  True,  True]))
    """
    if result.unknown is None:
        raise InputError("'unknown' needs a method that computes it: use tide, or leave it out.")
    scores, text = np.asarray(to_numpy(result.unknown), dtype=np.float64), str(rule).strip()
    above, share = check_unknown(text)
    if above is not None:
        return np.asarray(scores > above)
    count = round(share * len(scores))
    found: BoolArray = np.zeros(len(scores), dtype=bool)
    found[np.argsort(-scores, kind="stable")[:count]] = True
    return found


def check_unknown(rule: str | float) -> tuple[float | None, float]:
    """Parse a rule into a score and a share, one of which is None.

    >>> check_unknown("0.2"), check_unknown(">0.9")
    ((None, 0.2), (0.9, 0.0))
    """
    text = str(rule).strip()
    try:
        value = float(text.removeprefix(">"))
    except ValueError:
        value = float("nan")
    if text.startswith(">") and np.isfinite(value):
        return value, 0.0
    if not 0 <= value < 1:
        raise OptionError(
            "'unknown' must be a share of the samples from 0 to 1, such as 0.2, or a score with >, such as '>0.9'. "
            f"Got {text[:40]!r} instead."
        )
    return None, value


def rolled_up(
    probs: FloatArray, paths: Sequence[Sequence[str]] | None, sure: float
) -> tuple[list[str], IntArray, FloatArray]:
    """Return the levels of a class tree, the answers (a class, or K + a level), and their probabilities.

    >>> rolled_up(np.asarray([[0.6, 0.4]]), [("pet", "cat"), ("pet", "dog")], 0.9)
    (['pet', 'unsure'], array([2]), array([1.]))
    """
    check_roll_up(sure)
    if paths is None:
        raise InputError(
            "'roll_up' needs classes in a tree: names such as animal/dog/beagle, or a column 'parent' in the file of "
            "'--classes'."
        )
    own = {tuple(path): k for k, path in enumerate(paths)}
    nodes = list(dict.fromkeys(tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)))
    nodes.sort(key=len, reverse=True)  # deepest first; above one half, one node of a depth is sure enough at most
    inside = np.asarray([[tuple(path[: len(node)]) == node for node in nodes] for path in paths], dtype=np.float64)
    upper = [node for node in nodes if node not in own]
    number = own | {node: len(paths) + i for i, node in enumerate(upper)}
    mass = probs @ inside  # (N, nodes)
    enough = mass >= sure - ROUNDING
    best = enough.argmax(1)
    labels = np.asarray([number[node] for node in nodes], dtype=np.int64)[best]
    confidence = np.minimum(mass[np.arange(len(mass)), best], 1.0)
    found = enough.any(1)
    labels, confidence = np.where(found, labels, len(number)), np.where(found, confidence, probs.max(1))
    return [*(SEPARATOR.join(node) for node in upper), UNSURE], labels, confidence


def check_roll_up(sure: float) -> None:
    """Refuse a probability that two answers could reach.

    >>> check_roll_up(0.8)
    """
    if not 0.5 < sure <= 1:
        raise OptionError(f"'roll_up' must be a probability above 0.5 and of at most 1. Got {sure} instead.")


def top_classes(probs: npt.NDArray[Any], names: Sequence[Any], count: int = TOP) -> list[list[dict[str, Any]]]:
    """Return the most likely classes of each sample with their probabilities, the largest first.

    >>> top_classes(np.asarray([[0.25, 0.75]]), ["cat", "dog"])
    [[{'label': 'dog', 'confidence': 0.75}, {'label': 'cat', 'confidence': 0.25}]]
    """
    found = leading(probs, count)
    shares = np.take_along_axis(probs, found, axis=1).astype(np.float64).round(6).tolist()
    return [
        [{"label": names[k], "confidence": p} for k, p in zip(classes, parts, strict=True)]
        for classes, parts in zip(found.tolist(), shares, strict=True)
    ]


def leading(scores: npt.NDArray[Any], m: int) -> IntArray:
    """Return the classes of the m largest scores of each row, the largest first, (N, m).

    >>> leading(np.asarray([[0.1, 0.7, 0.2]]), 2)
    array([[1, 2]])
    """
    m = min(m, scores.shape[1])
    found: IntArray = np.empty((len(scores), m), dtype=np.int64)
    for start in range(0, len(scores), 4096):  # a copy of some rows at a time
        rows = scores[start : start + 4096]
        some = np.sort(np.argpartition(-rows, m - 1, axis=1)[:, :m], axis=1)  # of equals the lower class is first
        order = np.argsort(-np.take_along_axis(rows, some, axis=1), axis=1, kind="stable")
        found[start : start + 4096] = np.take_along_axis(some, order, axis=1)
    return found
