"""Several classes per image: the probability that each class is present, calibrated on the batch.

The probabilities q_ik of a method sum to 1 over the classes: each image has one class. Here each class is judged
separately. The cosine of image i and class k, minus the mean over the classes of that image, is modelled as

    r_ik ~ N(m_k + delta_k, s^2)  where class k is in image i,   N(m_k, s^2)  where it is not

and class k is in a share pi_k of the images. These are means, shares and variance of the batch, weighted by q_ik;
delta_k is drawn towards the mean of all classes by `PRIOR` images. That gives the log-odds

    o_ik = log(pi_k / (1 - pi_k)) + delta_k (r_ik - m_k - delta_k / 2) / s^2,

which rank the classes of one image well if it has several, but rank the images of one class badly, because they ignore
the other classes of an image. So they are combined with the method's probabilities, flattened because an image with two
classes divides its probability between them:

    u_ik = softmax_k(log(q_ik) / 2 + a o_ik / 4),   p_ik = sigmoid(c logit(u_ik) + b)

where a makes sigmoid(a o + .) agree best with q, c does the same for p, and b gives images `per_image` classes on
average.

Limits: a batch does not reveal how many classes an image has on average, so the user has to say (the default is 1); it
takes a few hundred images to distinguish a present class from an absent one; a class that is in nearly all images looks
like one that is in none; and an encoder of whole images misses small objects. `benchmarks/multi.py` measures this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import to_numpy
from moontide.core.simplex import softmax
from moontide.errors import OptionError
from moontide.types import Result, Task

STEPS = 30
PRIOR = 5.0  # images by which delta_k is drawn towards the mean of all classes, and pi_k towards the method's share
LEAST, TINY = 1e-6, 1e-30
THERE = 0.5  # the probability from which on a class is listed

FloatArray = npt.NDArray[np.float64]


def multi_label(task: Task, result: Result, per_image: float = 1.0) -> FloatArray:
    """Return the probability that each class is in each image, (N, K).

    per_image: how many of the classes an image has on average.

    >>> rng = np.random.default_rng(0)
    >>> text = np.eye(4, 32)
    >>> there = rng.random((200, 4)) < 0.4
    >>> task = Task(there @ text + 0.2 * rng.normal(size=(200, 32)) + 1.0, text)
    >>> import moontide
    >>> found = multi_label(task, moontide.method("zero_shot").fit_predict(task), per_image=1.6)
    >>> bool(((found > 0.5) == there).mean() > 0.85)
    True
    """
    if not 0 < per_image < task.k:
        raise OptionError(
            f"'classes_per_image' must be above 0 and below the number of classes, {task.k}. Got {per_image} instead."
        )
    x, t = (np.asarray(to_numpy(one), dtype=np.float64) for one in (task.features, task.text))
    r: FloatArray = x @ t.T
    r -= r.mean(axis=1, keepdims=True)
    q: FloatArray = np.asarray(to_numpy(result.probs), dtype=np.float64)
    inside = q.sum(axis=0)  # (K,)
    outside = np.maximum(len(q) - inside, LEAST)
    absent = ((1 - q) * r).sum(axis=0) / outside  # m_k
    excess = (q * (r - absent)).sum(axis=0)
    delta = np.maximum((excess + PRIOR * excess.sum() / len(q)) / (inside + PRIOR), LEAST)
    variance = max(float((q * (r - absent - delta) ** 2 + (1 - q) * (r - absent) ** 2).mean()), LEAST)
    share = np.clip((inside + PRIOR / task.k) / (len(q) + PRIOR), LEAST, 1 - LEAST)  # pi_k
    odds = np.log(share / (1 - share)) + delta * (r - absent - delta / 2) / variance
    a, _ = calibrated(odds.ravel(), q.ravel())
    joined = logit(softmax(np.log(np.maximum(q, TINY)) / 2 + a * odds / 4))
    c, _ = calibrated(joined.ravel(), q.ravel())
    return sigmoid(c * joined + shift(c * joined, per_image / task.k))


def calibrated(odds: FloatArray, target: FloatArray) -> tuple[float, float]:
    """Return the a and b for which sigmoid(a odds + b) agrees best with probabilities: Platt's scaling, by Newton.

    >>> odds = np.linspace(-4, 4, 41)
    >>> a, b = calibrated(odds, sigmoid(0.5 * odds + 1))
    >>> round(a, 3), round(b, 3)
    (0.5, 1.0)
    """
    a, b = 1.0, 0.0
    for _ in range(STEPS):
        p = sigmoid(a * odds + b)
        w, error = p * (1 - p), p - target
        g = np.asarray([(error * odds).sum(), error.sum()])
        h = np.asarray([[(w * odds**2).sum(), (w * odds).sum()], [(w * odds).sum(), w.sum()]])
        step = np.linalg.solve(h + LEAST * np.eye(2), g)
        a, b = max(a - float(np.clip(step[0], -0.5, 0.5)), LEAST), b - float(np.clip(step[1], -1, 1))
    return a, b


def shift(odds: FloatArray, share: float) -> float:
    """Return the b for which the mean of sigmoid(odds + b) is a share, by bisection.

    >>> abs(shift(np.zeros(4), 0.5)) < 1e-9
    True
    """
    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(odds + middle).mean() < share else (low, middle)
    return (low + high) / 2


def sigmoid(x: FloatArray) -> FloatArray:
    """Return 1 / (1 + exp(-x)).

    >>> sigmoid(np.zeros(1))
    array([0.5])
    """
    found: FloatArray = 1 / (1 + np.exp(-np.clip(x, -50, 50)))
    return found


def logit(p: FloatArray) -> FloatArray:
    """Return log(p / (1 - p)), kept finite.

    >>> logit(np.asarray([0.5]))
    array([0.])
    """
    inside = np.clip(p, TINY, 1 - LEAST)
    found: FloatArray = np.log(inside) - np.log1p(-inside)
    return found


def listed_classes(probabilities: FloatArray, names: Sequence[str]) -> list[list[dict[str, Any]]]:
    """Return the classes in each image, the most probable first.

    >>> listed_classes(np.asarray([[0.2, 0.7, 0.9]]), ["cat", "dog", "car"])
    [[{'label': 'car', 'probability': 0.9}, {'label': 'dog', 'probability': 0.7}]]
    """
    found = []
    for row in probabilities:
        there = [k for k in np.argsort(-row, kind="stable") if row[k] >= THERE]
        found.append([{"label": names[k], "probability": round(float(row[k]), 6)} for k in there])
    return found
