"""Features that behave like CLIP's, drawn from a seed: for the offline demo, the tests and the benchmarks.

The geometry, all of it Gaussian before the rows are scaled to unit length:

* Two cones. Every image shares one direction and every prompt another (the modality gap: Liang et al., "Mind the Gap",
  NeurIPS 2022, arXiv:2203.02053).
* Concepts. The encoder knows `CONCEPTS` of them, a few large and many small superclasses; the classes are some of them.
  So confusions are among siblings, and few classes are easier to tell apart than many.
* Class centres. A concept's image centre is an appearance that its superclass shares and that no prompt names, plus a
  meaning, part of it the superclass's and part its own. A prompt is the meaning plus an error of its own.
* Spread. An image leans away from its centre towards similar concepts, in directions that differ from superclass to
  superclass, plus a low-rank noise that all images share.

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
SUPERCLASS_SIZE = 9  # concepts of a superclass on average: cosine of a class centre with its 1st to 20th neighbour
BLOCK = 2048  # images drawn at once, which bounds memory

# Shares of the squared length of an image; they sum to 1.
CONE = 0.51  # norm of the mean image, 0.72
APPEARANCE = 0.13  # variance and effective rank of the class centres
MEANING = 0.095  # cosine of an image and its prompt above that with other prompts, 0.12
LEAN = 0.10  # effective rank within one class, 30, against 110 within all
NOISE = 0.165  # cosine within a class, 0.73
# Shares of the squared length of a prompt; they sum to 1.
TEXT_CONE = 0.59  # norm of the mean prompt, 0.78
TEXT_MEANING = 0.15
TEXT_ERROR = 0.26  # zero-shot accuracy, 61 %
CONE_COSINE = 0.33  # of the mean image and the mean prompt

# How much of a part's variance siblings share.
SHARED_MEANING = 0.62  # cosine with the nearest wrong prompt, 0.30
SHARED_TEXT_ERROR = 0.28  # cosine of a prompt and its nearest, 0.83
# What an image leans towards: the own meaning of a similar concept, its appearance, or else a third direction.
LEAN_MEANING, LEAN_APPEARANCE = 0.45, 0.25  # spread along the difference of two class centres
SIMILARITY = 4.0  # how steeply leaning falls with the cosine of two centres: nearest image of the same class, 41 %

# Decay of the variances of a part, see `_spectrum`: effective ranks within classes, of centres and of prompts.
APPEARANCE_DECAY, MEANING_DECAY, LEAN_DECAY, NOISE_DECAY, TEXT_ERROR_DECAY = 1.3, 0.53, 0.98, 0.52, 0.83
# Log-normal scatter of lengths.
TEXT_SCATTER = 0.285  # spread of the cosine of two prompts, 0.12
CLASS_SCATTER, IMAGE_SCATTER = 0.12, 0.20  # spread of the cosine within a class, 0.10


@dataclass(frozen=True)
class Simulated:
    """A data set, so it has labels; hand only `features`, `text` and `logit_scale` to a method.

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
    """What the encoder knows of each of its M concepts, the classes first."""

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
    [9, 37, 18]
    >>> bool(np.allclose(np.linalg.norm(data.features, axis=1), 1))
    True
    """
    for name, value, least in (
        ("n_samples", n_samples, 1),
        ("n_classes", n_classes, 1),
        ("dim", dim, 3),
        ("seed", seed, 0),
    ):
        _check_whole(name, value, least)
    names = _names(class_names, n_classes)
    counts = _counts(n_samples, n_classes, effective_classes, imbalance)  # (K_eff,)

    rng = np.random.default_rng(seed)
    concepts = _draw_concepts(max(n_classes, CONCEPTS), dim - 2, rng)
    rotation = np.linalg.qr(_normal(rng, dim, dim))[0]  # (d, d), so that no axis is special
    text = _draw_text(concepts.prompts[:n_classes], rotation, rng)
    classes = rng.permutation(n_classes)[: len(counts)]  # (K_eff,)
    labels = rng.permutation(np.repeat(classes, counts))  # (N,)
    return Simulated(_draw_images(labels, n_classes, concepts, rotation, rng), text, labels, names)


def _draw_concepts(n: int, dim: int, rng: np.random.Generator) -> _Concepts:
    """Draw centres, leanings and prompts of n concepts: a part of their superclass and a part of their own each."""
    n_super = -(-n // SUPERCLASS_SIZE)
    of = (n_super * rng.random(n) ** 2).astype(np.int64)  # (n,) superclass; the square makes some large, many small
    meaning_axes, error_axes = _spectrum(MEANING_DECAY, dim, rng), _spectrum(TEXT_ERROR_DECAY, dim, rng)

    appearance = (_normal(rng, n_super, dim) * _spectrum(APPEARANCE_DECAY, dim, rng))[of]  # (n, dim)
    direction = (_normal(rng, n_super, dim) * _spectrum(LEAN_DECAY, dim, rng))[of]
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
    """Put the prompts into their cone, at scattered distances from its axis."""
    cone = math.sqrt(TEXT_CONE) * np.array([CONE_COSINE, math.sqrt(1 - CONE_COSINE**2)], np.float32)
    return _on_sphere(cone, _scatter(TEXT_SCATTER, len(prompts), rng) * prompts, rotation)  # (K, d)


def _draw_images(
    labels: NDArray[np.int64], n_classes: int, concepts: _Concepts, rotation: Floats, rng: np.random.Generator
) -> Floats:
    """Draw an image for each label: cone, centre, and a spread made of leaning and noise."""
    dim = concepts.centres.shape[1]
    cone = np.array([math.sqrt(CONE), 0], np.float32)
    axes = math.sqrt(NOISE) * _spectrum(NOISE_DECAY, dim, rng)
    class_scatter = _scatter(CLASS_SCATTER, n_classes, rng)  # (K, 1)
    centres = _unit(concepts.centres)
    weights = np.exp(SIMILARITY * centres[:n_classes] @ centres.T)  # (K, M)
    weights = math.sqrt(LEAN) * _unit(weights)
    features = np.empty((len(labels), dim + 2), np.float32)
    for start in range(0, len(labels), BLOCK):
        y = labels[start : start + BLOCK]  # (n,)
        lean = (_normal(rng, len(y), len(centres)) * weights[y]) @ concepts.leanings  # (n, d - 2)
        spread = class_scatter[y] * _scatter(IMAGE_SCATTER, len(y), rng) * (lean + _normal(rng, len(y), dim) * axes)
        features[start : start + BLOCK] = _on_sphere(cone, concepts.centres[y] + spread, rotation)
    return features


def _on_sphere(cone: Floats, rest: Floats, rotation: Floats) -> Floats:
    """Prepend the two coordinates along the cones, turn, and scale to unit length."""
    return _unit(np.hstack([np.broadcast_to(cone, (len(rest), 2)), rest]) @ rotation)


def _spectrum(decay: float, dim: int, rng: np.random.Generator) -> Floats:
    """Return standard deviations along the axes: variances j^-decay exp(-j / (0.3 dim)), in random order, sum 1.

    The shape is that of the eigenvalues of class centres, prompts and residuals alike: a power law, cut off.
    """
    j = np.arange(1, dim + 1)
    variances = rng.permutation(j**-decay * np.exp(-j / (0.3 * dim)))
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
            f"The 'class_names' parameter of simulate must be {n_classes} strings, one a class, or None. "
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
    if isinstance(factor, bool) or not (isinstance(factor, int | float | np.number) and 1 <= factor < np.inf):
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
