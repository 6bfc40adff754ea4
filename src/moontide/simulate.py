"""Simulated features that behave like those of CLIP, for the offline demo, the tests and the benchmarks.

The geometry, all of it Gaussian before the rows are scaled to unit length:

* Two cones. Every image shares one direction and every prompt another (the modality gap: Liang et al., "Mind the Gap",
  NeurIPS 2022, arXiv:2203.02053).
* Concepts. The encoder knows `CONCEPTS` of them, a few large and many small superclasses; the classes are some of them.
  So confusions are among siblings, and few classes are easier to distinguish than many.
* Class centres. A concept's image centre is an appearance that its superclass shares and that no prompt names, plus a
  meaning, part of it the superclass's and part its own. A prompt is the meaning plus an error of its own.
* Spread. The images of a class lean towards similar concepts, a little all together and mostly each on its own; on top
  comes a noise whose few strong directions all classes share.

The constants were fitted to summary statistics (cosines, spectra, margins) of CLIP ViT-B/32 features of ImageNet-1k at
512 dimensions; `benchmarks/simulator_calibration.py` prints both side by side. No embedding was copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.errors import OptionError
from moontide.samplers.common import long_tailed_counts

Floats = NDArray[np.float32]

CONCEPTS = 1000  # as many as the classes of the features fitted to
SUPERCLASS_SIZE = 10  # concepts of a superclass on average: how the cosine falls from the nearest class to the 20th
BLOCK = 2048  # images drawn at once, which bounds memory

# Shares of the squared length of an image, with the statistics that fix them; they sum to 1.
CONE = 0.495  # norm of the mean image, 0.72
APPEARANCE = 0.12  # effective rank of the class centres, 25
MEANING = 0.1  # cosine of an image with its prompt, 0.30, above that with other prompts, 0.19
CLASS_LEAN = 0.018  # spread of the margin from class to class, 0.022
LEAN = 0.115  # effective rank within one class, 27, against 114 within all
NOISE = 0.152  # cosine of two images of a class, 0.73
# Shares of the squared length of a prompt; they sum to 1.
TEXT_CONE = 0.58  # norm of the mean prompt, 0.78
TEXT_MEANING = 0.145  # mean largest zero-shot probability, 0.59
TEXT_ERROR = 0.275  # zero-shot accuracy, 61 %
CONE_COSINE = 0.33  # of the mean image and the mean prompt

# Shares of a variance that siblings have in common.
SHARED_MEANING = 0.67  # cosine with the best wrong prompt, 0.30
SHARED_TEXT_ERROR = 0.29  # cosine of a prompt and its nearest, 0.83
# What an image leans towards: the own meaning of a similar concept, its appearance, or a third direction.
LEAN_MEANING, LEAN_APPEARANCE = 0.51, 0.225  # spread along the difference of two class centres
SIMILARITY = 3.9  # how steeply leaning falls with the cosine of two centres: nearest image of the same class, 41 %

# How fast the variances of a part fall and along which axes they start, see `_spectrum`.
APPEARANCE_AXES = (1.45, 0)  # effective rank of class centres, 25
MEANING_AXES = (0.5, 1)
LEAN_AXES = (1.0, 2)
NOISE_AXES = (0.6, 3)  # effective rank within classes, 114
TEXT_ERROR_AXES = (0.75, 4)  # effective rank of prompts, 55

# Log-normal scatter of lengths.
TEXT_SCATTER = 0.28  # of a prompt off its cone: spread of the cosine of two prompts, 0.12
CLASS_SCATTER, IMAGE_SCATTER = 0.16, 0.18  # of an image off its centre: spread of the cosine within a class, 0.10


@dataclass(frozen=True)
class Simulated:
    """A simulated data set with labels; pass only `features`, `text` and `logit_scale` to a method.

    >>> data = simulate(6, 3, dim=16, class_names=["cat", "dog", "fox"])
    >>> data.features.shape, data.text.shape, data.class_names[0]
    ((6, 16), (3, 16), 'cat')
    """

    features: Floats  # (N, d) unit rows
    text: Floats  # (K, d) unit rows
    labels: NDArray[np.int64]  # (N,)
    class_names: tuple[str, ...]  # K
    logit_scale: float = 100.0


class _Concepts(NamedTuple):
    """The encoder's M concepts, of which the first are the classes."""

    centres: Floats  # (M, d - 2) of images
    leanings: Floats  # (M, d - 2) where images of similar concepts lean to
    prompts: Floats  # (M, d - 2)


def simulate(
    n_samples: int,
    n_classes: int,
    *,
    dim: int = 512,
    effective_classes: int | None = None,
    imbalance: float | None = None,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
) -> Simulated:
    """Draw CLIP-like image features of some classes, and text features of all.

    n_samples, n_classes, dim: N, K and d; the calibration holds at d = 512.
    effective_classes: how many classes have samples; None means all, or N of them where N < K.
    imbalance: how many times more frequent the most frequent of these is than the least, with exponential decay
        between them, as near as whole numbers come; None or 1 is balanced.
    class_names: the K names; None gives "class 0", "class 1", ...

    >>> data = simulate(64, 100, effective_classes=3, imbalance=4, seed=0)
    >>> np.unique(data.labels, return_counts=True)[1].tolist()
    [9, 18, 37]
    >>> bool(np.allclose(np.linalg.norm(data.features, axis=1), 1))
    True
    """
    _check_whole("n_samples", n_samples, 1)
    _check_whole("n_classes", n_classes, 1)
    _check_whole("dim", dim, 3)
    _check_whole("seed", seed, 0)
    names = _names(class_names, n_classes)
    counts = _counts(n_samples, n_classes, effective_classes, imbalance)  # (K_eff,)

    rng = np.random.default_rng(seed)
    concepts = _draw_concepts(max(n_classes, CONCEPTS), dim - 2, rng)
    rotation = np.linalg.qr(_normal(rng, dim, dim))[0]  # (d, d), so that no axis is special
    text = _draw_text(concepts.prompts[:n_classes], rotation, rng)
    classes = rng.permutation(n_classes)[: len(counts)]  # (K_eff,)
    labels = rng.permutation(np.repeat(classes, counts))  # (N,)
    return Simulated(_draw_images(labels, concepts, rotation, rng), text, labels, names)


def _draw_concepts(n: int, dim: int, rng: np.random.Generator) -> _Concepts:
    """Draw centres, leanings and prompts of n concepts, each the sum of a part of the superclass and an own part."""
    n_super = -(-n // SUPERCLASS_SIZE)
    of = (n_super * rng.random(n) ** 2).astype(np.int64)  # (n,) superclass; the square makes some large, many small
    meaning_axes, error_axes = _spectrum(MEANING_AXES, dim), _spectrum(TEXT_ERROR_AXES, dim)

    appearance = (_normal(rng, n_super, dim) * _spectrum(APPEARANCE_AXES, dim))[of]  # (n, dim)
    direction = (_normal(rng, n_super, dim) * _spectrum(LEAN_AXES, dim))[of]
    own = _normal(rng, n, dim) * meaning_axes
    meaning = _mix((SHARED_MEANING, (_normal(rng, n_super, dim) * meaning_axes)[of]), (1 - SHARED_MEANING, own))
    error = _mix((SHARED_TEXT_ERROR, _normal(rng, n_super, dim)[of]), (1 - SHARED_TEXT_ERROR, _normal(rng, n, dim)))
    return _Concepts(
        centres=_mix((APPEARANCE, appearance), (MEANING, meaning)),
        leanings=_mix(
            (LEAN_MEANING, own), (LEAN_APPEARANCE, appearance), (1 - LEAN_MEANING - LEAN_APPEARANCE, direction)
        ),
        prompts=_mix((TEXT_MEANING, meaning), (TEXT_ERROR, error * error_axes)),
    )


def _draw_text(prompts: Floats, rotation: Floats, rng: np.random.Generator) -> Floats:
    """Place the prompts in their cone, at varying distances from its axis."""
    cone = math.sqrt(TEXT_CONE) * np.array([CONE_COSINE, math.sqrt(1 - CONE_COSINE**2)], np.float32)
    return _on_sphere(cone, _scatter(TEXT_SCATTER, len(prompts), rng) * prompts, rotation)  # (K, d)


def _draw_images(labels: NDArray[np.int64], concepts: _Concepts, rotation: Floats, rng: np.random.Generator) -> Floats:
    """Draw an image per label: cone, centre, and a spread that consists of leaning and noise."""
    classes, rows = np.unique(labels, return_inverse=True)  # (K_eff,), (N,)
    directions = _unit(concepts.centres)
    weights = _unit(np.exp(SIMILARITY * directions[classes] @ directions.T))  # (K_eff, M)

    def lean(of: NDArray[np.intp]) -> Floats:  # (n,) rows of weights -> (n, d - 2)
        towards: Floats = np.matmul(_normal(rng, len(of), len(directions)) * weights[of], concepts.leanings)
        return towards

    centres = _mix((1, concepts.centres[classes]), (CLASS_LEAN, lean(np.arange(len(classes)))))  # (K_eff, d - 2)
    scatter = _scatter(CLASS_SCATTER, len(classes), rng)  # (K_eff, 1)
    axes = _spectrum(NOISE_AXES, centres.shape[1])
    cone = np.array([math.sqrt(CONE), 0], np.float32)
    features = np.empty((len(labels), len(rotation)), np.float32)
    for start in range(0, len(labels), BLOCK):
        of = rows[start : start + BLOCK]  # (n,)
        spread = _mix((LEAN, lean(of)), (NOISE, _normal(rng, len(of), len(axes)) * axes))  # (n, d - 2)
        spread *= scatter[of] * _scatter(IMAGE_SCATTER, len(of), rng)
        features[start : start + BLOCK] = _on_sphere(cone, centres[of] + spread, rotation)
    return features


def _on_sphere(cone: Floats, others: Floats, rotation: Floats) -> Floats:
    """Prepend the two coordinates along the cones, turn, and scale to unit length."""
    return _unit(np.hstack([np.broadcast_to(cone, (len(others), 2)), others]) @ rotation)


def _spectrum(part: tuple[float, int], dim: int) -> Floats:
    """Return the standard deviations of a part along the axes; their squares sum to 1.

    The variances fall as j^-decay exp(-j / (0.3 dim)), a power law with a cut-off, like the eigenvalues of real
    features. Each part has its largest variances along other axes: part number p starts at p dim / 8.
    """
    decay, number = part
    j = np.arange(1, dim + 1)
    variances = np.roll(j**-decay * np.exp(-j / (0.3 * dim)), number * dim // 8)
    deviations: Floats = np.sqrt(variances / variances.sum()).astype(np.float32)
    return deviations


def _scatter(spread: float, n: int, rng: np.random.Generator) -> Floats:
    """Return (n, 1) log-normal factors with mean square 1."""
    factors: Floats = np.exp(spread * _normal(rng, n, 1) - spread**2)
    return factors


def _mix(*parts: tuple[float, Floats]) -> Floats:
    """Add parts with these variances."""
    total: Floats = np.add.reduce([math.sqrt(variance) * part for variance, part in parts])
    return total


def _normal(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape, dtype=np.float32)


def _unit(rows: Floats) -> Floats:
    scaled: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise OptionError(
            f"The '{name}' parameter of simulate must be a whole number of at least {least}. Got {value!r} instead."
        )


def _names(class_names: Sequence[str] | None, n_classes: int) -> tuple[str, ...]:
    if class_names is None:
        return tuple(f"class {k}" for k in range(n_classes))
    names = tuple(class_names)
    if isinstance(class_names, str) or len(names) != n_classes or not all(isinstance(name, str) for name in names):
        raise OptionError(
            f"The 'class_names' parameter of simulate must be {n_classes} strings, one per class, or None. "
            f"Got {class_names!r} instead."
        )
    return names


def _counts(
    n_samples: int, n_classes: int, effective_classes: int | None, imbalance: float | None
) -> NDArray[np.int64]:
    """Return the number of samples of each class present, most frequent first."""
    most = min(n_samples, n_classes)
    present = most if effective_classes is None else effective_classes
    _check_whole("effective_classes", present, 1)
    if present > most:
        raise OptionError(
            f"The 'effective_classes' parameter of simulate must be at most the number of classes ({n_classes}) and of "
            f"samples ({n_samples}). Got {present} instead."
        )
    factor = 1.0 if imbalance is None else imbalance
    if isinstance(factor, bool) or not (
        isinstance(factor, int | float | np.integer | np.floating) and 1 <= factor < np.inf
    ):
        raise OptionError(
            f"The 'imbalance' parameter of simulate must be a number of at least 1, or None. Got {imbalance!r} instead."
        )
    counts = long_tailed_counts([n_samples] * present, factor, n_samples)
    if counts.min() < 1:
        raise OptionError(
            f"The 'imbalance' parameter of simulate must leave a sample to each of {present} classes. "
            f"Got {imbalance!r} with {n_samples} samples instead; lower it, or raise 'n_samples'."
        )
    return counts
