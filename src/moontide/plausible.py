"""Warnings about input that is valid but probably not what the user meant.

Each is a sentence with the remedy. At most one warning is shown per task, the first that applies. Only some of the rows
are examined. Good data must never cause a warning, so every rule leaves a wide margin:

    swapped        the rows of the text features cluster around those of the image features, not the other way round
    another space  the cosines between images and text are near 0, and no class stands out for any image
    logit scale    below 2, where CLIP has 100: mostly the temperature, or a scale that was left out
    centred        the images have no common direction, although those of every encoder have one
    lengths        the rows differ in length more than embeddings do
    alike          samples that are almost the same, and far more classes than samples
    labels         they count from 1, or agree with zero-shot less often than chance would
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import Array, as_real, device_type, row_norms, to_numpy
from moontide.errors import ImplausibleWarning
from moontide.metrics import IntArray
from moontide.types import Task

FloatArray = npt.NDArray[np.floating[Any]]

IMAGES, CLASSES, SWAPPED_CLASSES = 256, 192, 512  # rows that are looked at; the last if they may be images
LEAST_IMAGES, LEAST_CLASSES = 20, 8  # images and classes from which the space can be judged
NEAR_ZERO = 3.5  # mean of the largest cosines, in units of 1 / sqrt(d), below which they are near zero
SKEW = 0.15  # of the cosines without the effects of image and class; classes of the same space give more
CLUSTERED, NEAREST, TOP = 0.85, 2.1, 2.35  # of text rows that are images; in standard deviations
MORE_CLASSES = 6  # classes for each sample, where images and text are swapped
LOW_SCALE = 2.0
COMMON = 0.1  # length of the mean of unit rows, above which images have a common direction
GAP, NEARBY = 0.03, 0.25  # how much nearer images are to each other than to text, and cosines that no text reaches
LENGTHS = 10.0  # ratio of row lengths, from the 1st to the 99th of a hundred
ALIKE, MANY = 0.95, 20  # mean cosine of samples that look alike, and classes for each of them
CHANCE = 5.0  # hits by chance, from which on fewer are doubtful

ENOUGH = 4  # plausible tasks of one shape in a row, after which no more of that shape are examined

_in_a_row: dict[tuple[str, int, int, int], int] = {}  # how many tasks of a device and a shape were plausible


def ask(task: Task, raw: Any = None) -> None:
    """Warn about the first doubtful property of a task; `raw` are the image features before normalisation.

    For a small batch this takes as long as a third of a fit. So whoever labels batch after batch pays for the first
    few only: after `ENOUGH` plausible tasks of one shape in a row, only the logit scale is still checked.

    >>> ask(Task(np.eye(3), np.eye(3)))
    """
    shape = device_type(task.features), task.n, task.k, task.d
    found = doubtful_scale(task.logit_scale) if _in_a_row.get(shape, 0) >= ENOUGH else doubt(task, raw)
    _in_a_row[shape] = 0 if found else _in_a_row.get(shape, 0) + 1
    if found is not None:
        warnings.warn(found, ImplausibleWarning, stacklevel=3)


def doubtful_scale(scale: float) -> str | None:
    """Return the warning about a logit scale, or None.

    >>> (doubtful_scale(0.01) or "")[:54]
    'The logit scale is 0.01, which makes all classes alike'
    """
    if scale >= LOW_SCALE:
        return None
    return (
        f"The logit scale is {scale:g}, which makes all classes alike; it is 1 / temperature, 100 for CLIP: pass "
        "logit_scale=100 (--logit-scale 100), or the value of your model."
    )


def doubt(task: Task, raw: Any = None) -> str | None:
    """Return the first warning about a task, or None.

    >>> doubt(Task(np.eye(3), np.eye(3), logit_scale=0.01))[:54]
    'The logit scale is 0.01, which makes all classes alike'
    """
    doubtful = doubtful_scale(task.logit_scale)
    if doubtful is not None:
        return doubtful
    classes = SWAPPED_CLASSES if task.k >= MORE_CLASSES * task.n else CLASSES
    x, t = some_rows(task.features, IMAGES), some_rows(task.text, classes)
    if len(x) < 2 or len(t) < 2:
        return None
    cosines = x @ t.T  # (n, k)
    plain = cosines - cosines.mean(1, keepdims=True) - cosines.mean(0) + cosines.mean()
    if _swapped(task, x, t, plain):
        return (
            f"The {task.n} image features look like class names and the {task.k} text features like images; if they "
            "are swapped, pass the image features first and the text features second."
        )
    if len(x) < LEAST_IMAGES:
        return _alike(task, x)
    if float(np.linalg.norm(x.mean(0))) < COMMON < float(np.linalg.norm(t.mean(0))):
        return (
            "The image features have no common direction, as if their mean had been subtracted; pass them as the "
            "encoder gives them, neither centred nor standardised."
        )
    if len(t) >= LEAST_CLASSES and _unrelated(cosines, plain, task.d):
        return (
            "The image features do not match the text features: cosines are near 0, and no class stands out. Make both "
            "with the same model, including its projection."
        )
    if cosines.mean() > max(mean_cosine(x) - GAP, NEARBY):
        return (
            "The image features are nearer to the text features than to each other, as in no model; did you pass the "
            "same file or array for both?"
        )
    return _lengths(raw) or _alike(task, x)


def _swapped(task: Task, x: FloatArray, t: FloatArray, plain: FloatArray) -> bool:
    """Return whether text rows, many for each sample, cluster around the samples as images do around class names."""
    if task.k < MORE_CLASSES * task.n or task.n < LEAST_CLASSES or not plain.std():
        return False
    if task.k < MANY * task.n and mean_cosine(t) > mean_cosine(x):  # class names are more alike
        return False
    owner = plain.argmax(0)  # (k,) the nearest sample of each class
    similar, others = t @ t.T, ~np.eye(len(t), dtype=bool)
    same = (owner[:, None] == owner) & others
    if not same.any() or not (others & ~same).any():
        return False
    spread = similar[others].std() or 1.0
    clustered = (similar[same].mean() - similar[others & ~same].mean()) / spread
    nearest = (np.where(others, similar, -1).max(1).mean() - similar[others].mean()) / spread
    return bool(clustered > CLUSTERED and nearest > NEAREST and (plain.max(0) / plain.std()).mean() > TOP)


def _unrelated(cosines: FloatArray, plain: FloatArray, d: int) -> bool:
    spread = plain.std()
    skew = (plain * plain * plain).mean() / spread**3 if spread else 0.0  # numpy's ** takes ten times as long
    return bool(cosines.max(1).mean() * d**0.5 < NEAR_ZERO and skew < SKEW)


def _lengths(raw: Any) -> str | None:
    if raw is None:
        return None
    norms = row_norms(as_real(raw, "image_features"))
    low, high = np.quantile(np.asarray(to_numpy(norms), dtype=np.float64), [0.01, 0.99])
    if high < LENGTHS * low:
        return None
    return (
        f"The image features have lengths from {low:.3g} to {high:.3g}, unlike embeddings; pass what "
        "the encoder's projection gives, not other columns or layers with it."
    )


def _alike(task: Task, x: FloatArray) -> str | None:
    if task.k < MANY * task.n or task.n < LEAST_CLASSES or mean_cosine(x) < ALIKE:
        return None
    return (
        f"The {task.n} samples are almost the same, and there are {task.k} classes: such a batch says little about "
        "them. Use fewer classes, or more varied samples."
    )


def doubt_labels(labels: IntArray, zero_shot: IntArray, k: int) -> str | None:
    """Return a question about the labels (N,) that predictions among k classes are scored with, or None.

    >>> doubt_labels(np.arange(40) % 4 + 1, np.arange(40) % 4, 5)[:34]
    'The labels seem to count from 1: z'
    """
    hits, shifted = (int((zero_shot == labels - by).sum()) for by in (0, 1))
    if len(labels) and labels.min() >= 1 and shifted > 2 * hits + CHANCE:
        return "The labels seem to count from 1: zero-shot agrees with them when 1 is subtracted. Subtract it."
    if len(labels) / k >= CHANCE and hits < len(labels) / k and len(np.unique(labels)) > 1:
        return (
            f"Zero-shot is right for {hits} of {len(labels)} samples, less than chance; the labels, the class names "
            "or the text features may be in a different order: check that they match."
        )
    return None


def some_rows(x: Array, count: int) -> FloatArray:
    """Return at most `count` rows at equal distances, in numpy and float32.

    >>> some_rows(np.eye(4), 2).argmax(1)
    array([0, 3])
    """
    rows = np.linspace(0, x.shape[0] - 1, min(count, x.shape[0])).round().astype(np.int64)
    found: FloatArray = np.asarray(to_numpy(x[rows]), dtype=np.float32)
    return found


def mean_cosine(x: FloatArray) -> float:
    """Return the mean cosine of two different unit rows.

    >>> round(mean_cosine(np.eye(2) * 0.5 + 0.5), 2)
    1.0
    """
    n, total = len(x), x.sum(0)
    return float((total @ total - (x * x).sum()) / max(1, n * (n - 1)))
