"""A property of every method over tasks drawn at random: sound probabilities, or one sentence, and nothing else.

The draws reach where samples taken by hand do not: 1 to 24 samples, 1 to 12 classes, 1 to 40 dimensions; float16,
float32 and float64, numpy and torch; logit scales from 1e-30 to 1e6 and rows of lengths from 1e-30 to 1e30; cosines
near -1, near 1 and all equal, one-hot rows, rows on one line, rows and classes that are there twice; and shares of the
classes down to 1e-9, for methods that take them.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from moontide.checks.tasks import Tasks, expect, expect_sound, mapped
from moontide.core.arrays import Array, unit_rows
from moontide.errors import MoontideError
from moontide.protocols import Method
from moontide.registry import method  # noqa: F401 (the doctest's)
from moontide.types import Task

DRAWS = 20
LONGEST = 300  # letters of a sentence
KINDS = ("normal", "opposite", "same", "close", "one-hot", "twice", "negative", "line")
DTYPES = ("float16", "float32", "float64")


def draw(tasks: Tasks, seed: int) -> tuple[Task, str]:
    """Draw a task, and return it with a description.

    >>> task, what = draw(Tasks(), 3)
    >>> task.n <= 24, what.startswith("draw 3: ")
    (True, True)
    """
    rng = np.random.default_rng([7, seed])
    n, k, d = (int(rng.integers(1, most, endpoint=True)) for most in (24, 12, 40))
    kind, dtype = str(rng.choice(KINDS)), str(rng.choice(DTYPES))
    scale = float(10.0 ** rng.choice([rng.uniform(-30, 0), rng.uniform(0, 3), rng.uniform(3, 8)]))
    torch = bool(rng.random() < 0.3) and find_spec("torch") is not None
    task = tasks.of(*rows(kind, rng, n, k, d), scale)
    task = mapped(task, lambda x: x.astype(dtype))
    if dtype != "float16":
        length = 10.0 ** rng.uniform(-30, 30)
        task = mapped(task, lambda x: (x * length).astype(dtype))
    if torch:
        task = mapped(task, import_module("torch").asarray)
    what = f"draw {seed}: {kind} {dtype}{' torch' * torch}, N={n}, K={k}, d={d}, logit scale {scale:.3g}"
    return task, what


def rows(kind: str, rng: np.random.Generator, n: int, k: int, d: int) -> tuple[Array, Array]:
    """Draw image and text embeddings, (N, d) and (K, d), of one of the KINDS.

    >>> features, text = rows("opposite", np.random.default_rng(0), 3, 2, 4)
    >>> bool((features @ text.T).min() < -0.99)
    True
    """
    text: Any = unit_rows(rng.normal(size=(k, d)) + 1e-9)
    features: Any = unit_rows(rng.normal(size=(n, d)) + 1e-9)
    nearest = text[rng.integers(k, size=n)]
    if kind == "opposite":
        features = -nearest
    elif kind == "same":
        features, text = np.repeat(features[:1], n, axis=0), np.repeat(text[:1], k, axis=0)
    elif kind == "close":
        features = unit_rows(nearest + 1e-7 * features)
    elif kind == "one-hot":
        features, text = np.eye(d)[rng.integers(d, size=n)], np.eye(d)[rng.integers(d, size=k)]
    elif kind == "twice":
        features, text = features[np.arange(n) // 2], text[np.arange(k) // 2]
    elif kind == "negative":
        features, text = unit_rows(features - 3 * text.mean(axis=0)), unit_rows(text + 3 * text.mean(axis=0) + 1e-9)
    elif kind == "line":
        features, text = (rng.choice([-1.0, 1.0], size=(rows, 1)) * features[:1] for rows in (n, k))
    return features, text


def shares(seed: int, k: int) -> Array:
    """Draw shares of classes, some of them tiny, (K,).

    >>> bool(shares(0, 3).min() > 0)
    True
    """
    rng = np.random.default_rng([8, seed])
    return rng.random(k) * 10.0 ** rng.choice([0, -6, -9], size=k) + 1e-12


def check_random_tasks(m: Method, tasks: Tasks, draws: int = DRAWS, start: int = 0) -> None:
    """Every drawn task gives finite rows that sum to 1, or an error of one sentence.

    >>> check_random_tasks(method("zero_shot"), Tasks())
    """
    for seed in range(start, start + draws):
        try:
            task, what = draw(tasks, seed)
            if seed % 2 and "class_prior" in m.accepts:
                task = replace(task, class_prior=shares(seed, task.k))
            result = m.fit_predict(task)
        except MoontideError as error:
            sentence = str(error)
            expect("\n" not in sentence and 0 < len(sentence) <= LONGEST, f"draw {seed}: the error is {sentence!r}")
            continue
        expect_sound(result, task, what)
