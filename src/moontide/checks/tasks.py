"""Small generated tasks for the checks, the changes made to them, and the comparisons of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from moontide.core.arrays import Array, is_torch_array, to_numpy, unit_rows
from moontide.types import PER_SAMPLE, Result, Task

Extras: TypeAlias = Callable[[Task], Mapping[str, Any]]

VIEWS = 8  # augmented views of a sample


def embeddings(n: int, k: int, d: int, seed: int = 0, decades: float = 0.0) -> tuple[Array, Array]:
    """Draw image and text embeddings that lie as CLIP's do: two narrow cones apart, classes inside them.

    Coordinates differ in size by up to `decades` powers of ten.

    >>> features, text = embeddings(4, 2, 32)
    >>> features.shape, text.shape, bool((features @ text.T > 0).all())
    ((4, 32), (2, 32), True)
    """
    rng = np.random.default_rng([seed, n, k, d])
    size = 10.0 ** -rng.uniform(0, decades, d)
    cones = np.linalg.qr(rng.normal(size=(d, 2)))[0].T  # (2, d) orthonormal rows
    classes = rng.normal(size=(k, d))
    classes = unit_rows(classes - classes @ cones.T @ cones)
    noise = unit_rows(rng.normal(size=(n, d)))
    text = (1.2 * cones[0] + 0.5 * classes) * size  # (K, d)
    features = (0.7 * cones[0] + 1.5 * cones[1] + 0.4 * classes[rng.integers(k, size=n)] + 0.8 * noise) * size  # (N, d)
    return unit_rows(features), unit_rows(text)


@dataclass(frozen=True)
class Tasks:
    """Makes the tasks of the checks; `extras(task)` gives what a method needs beyond features and views.

    >>> Tasks()(n=3, k=2).extras["views"].shape
    (3, 8, 32)
    """

    extras: Extras | None = None

    def __call__(self, n: int = 40, k: int = 7, d: int = 32, seed: int = 0) -> Task:
        """Make a task of float64 numpy arrays."""
        return self.of(*embeddings(n, k, d, seed))

    def of(self, features: Array, text: Array, logit_scale: float = 100.0) -> Task:
        """Make a task of given embeddings."""
        task = Task(features, text, logit_scale)
        noise = np.random.default_rng(task.n).normal(size=(task.n, VIEWS, task.d)) / task.d**0.5
        noise[:, 0] = 0  # view 0 is the image itself
        views = unit_rows(task.features[:, None, :] + 0.3 * noise)  # (N, V, d)
        return replace(task, extras={"views": views, **(self.extras(task) if self.extras else {})})


def mapped(task: Task, change: Callable[[Array], Array]) -> Task:
    """Apply `change` to every array of embeddings of a task.

    >>> mapped(Tasks()(), lambda x: x.astype("float32")).features.dtype
    dtype('float32')
    """
    extras = {name: change(value) if name == "views" else value for name, value in task.extras.items()}
    return replace(task, features=change(task.features), text=change(task.text), extras=extras)


def single(task: Task) -> Task:
    """Return the task in float32.

    >>> single(Tasks()()).text.dtype
    dtype('float32')
    """
    return mapped(task, lambda x: x.astype(np.float32))


def reordered(task: Task, rows: Array) -> Task:
    """Return the task with its samples in another order.

    >>> reordered(Tasks()(n=3), np.asarray([2, 0, 1])).n
    3
    """
    extras = {name: value[rows] if name in PER_SAMPLE else value for name, value in task.extras.items()}
    return replace(task, features=task.features[rows], extras=extras)


def expect(holds: bool, message: str) -> None:
    """Raise AssertionError with the message unless `holds` (also under python -O, which drops assert statements).

    >>> expect(False, "two and two make five")
    Traceback (most recent call last):
        ...
    AssertionError: two and two make five
    """
    if not holds:
        raise AssertionError(message)


def expect_same(found: Result, wanted: Result, tolerance: float, what: str, rows: Any = None, cols: Any = None) -> None:
    """Expect equal probabilities and scores, up to a tolerance relative to the largest; `wanted` is reordered first.

    >>> result = Result(np.eye(2), np.eye(2))
    >>> expect_same(result, result, 0.0, "again")
    """
    pairs = {"probs": (found.probs, wanted.probs), "scores": (found.scores, wanted.scores)}
    for name, pair in pairs.items():
        a, b = (to_numpy(x).astype(np.float64) for x in pair)
        b = b if rows is None else b[rows]
        b = b if cols is None else b[:, cols]
        gap, bound = float(np.abs(a - b).max()), tolerance * max(1.0, float(np.abs(b).max()))
        expect(gap <= bound, f"{what}: {name} differ by up to {gap:.2e}; at most {bound:.2e} is allowed")


def expect_sound(result: Result, task: Task, what: str) -> None:
    """Expect (N, K) probabilities of the task's kind of array and dtype: finite, not negative, rows summing to 1.

    >>> expect_sound(Result(np.eye(2), np.eye(2)), Task(np.eye(2), np.eye(2)), "eye")
    """
    single_precision = task.features.dtype.itemsize == 4
    for name in ("probs", "zero_shot"):
        p = getattr(result, name)
        expect(is_torch_array(p) == is_torch_array(task.features), f"{what}: {name} is a {type(p).__name__}")
        expect(p.dtype == task.features.dtype, f"{what}: {name} is {p.dtype} for {task.features.dtype} features")
        p = to_numpy(p).astype(np.float64)
        expect(p.shape == (task.n, task.k), f"{what}: {name} has shape {p.shape}, not ({task.n}, {task.k})")
        expect(bool(np.isfinite(p).all()), f"{what}: {name} holds NaN or infinity")
        expect(bool((p >= 0).all()), f"{what}: {name} holds negative numbers, the smallest {p.min():.2e}")
        gap = float(np.abs(p.sum(axis=1) - 1).max())
        expect(gap <= (1e-5 if single_precision else 1e-9), f"{what}: a row of {name} is off a sum of 1 by {gap:.2e}")
    scores = to_numpy(result.scores)
    expect(bool(np.isfinite(scores).all()), f"{what}: scores hold NaN or infinity")
