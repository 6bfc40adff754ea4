"""Class names to class vectors: templates, ensembles, descriptions, and warnings about doubtful names.

A class vector is the mean of the unit vectors of its prompts, scaled to length 1 again. The prompts are the class name
in each template, or the sentences that a file gives for the class, or both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moontide.core.arrays import unit_rows
from moontide.encoders.base import Encoder, FloatArray
from moontide.errors import FileError, InputError, OptionError, unknown_name
from moontide.store.classes import ClassList, as_text
from moontide.store.disk import read_json

ENSEMBLE = (
    "itap of a {}.",
    "a bad photo of the {}.",
    "a origami {}.",
    "a photo of the large {}.",
    "a {} in a video game.",
    "art of the {}.",
    "a photo of the small {}.",
)  # the seven prompts that Radford et al. (ICML 2021) chose of their eighty for ImageNet
ALIKE = 0.98  # cosine above which two class names are reported
SHOWN = 5  # names or pairs of names in a report
BLOCK_ROWS = 1024
SKETCH = 48  # coordinates by which pairs of names are ruled out
SLACK = 1e-4  # for rounding


class EmbeddedClasses(NamedTuple):
    """Class names with their vectors, the templates that made them, and sentences on what is doubtful about them."""

    names: tuple[str, ...]
    text: FloatArray  # (K, d) unit rows
    templates: tuple[str, ...]
    reports: list[str]


def embed_classes(
    encoder: Encoder,
    names: Sequence[str] | ClassList,
    templates: Sequence[str] = (),
    descriptions: Mapping[str, Sequence[str]] | None = None,
) -> EmbeddedClasses:
    """Embed class names; without templates or descriptions, with the encoder's templates.

    Synonyms and descriptions that a list of classes has are prompts besides the name.

    >>> from moontide.encoders.base import Encoder
    >>> class Letters(Encoder):
    ...     id, dim, logit_scale, preprocessing = "letters", 26, 10.0, ""
    ...     def prepare(self, image): ...
    ...     def _images(self, batch): ...
    ...     def _text(self, prompts):
    ...         return np.asarray([[p.count(chr(97 + i)) for i in range(26)] for p in prompts])
    >>> classes = embed_classes(Letters(), ["acorn", "big_ben", "ben_big"], ["{}", "a photo of a {}"])
    >>> classes.text.shape
    (3, 26)
    >>> for report in classes.reports:
    ...     print(report)
    class names have underscores, which the encoder does not read as spaces: big_ben, ben_big; write spaces
    class names are almost the same to the encoder (cosine above 0.98): big_ben and ben_big; keep one, or say more
    """
    classes = names if isinstance(names, ClassList) else ClassList(tuple(names))
    names = classes.names
    if not names:
        raise InputError("'classes' must have at least one name.")
    templates = tuple(templates) or (() if descriptions else encoder.templates)
    bare = [template for template in templates if "{}" not in template]
    if bare:
        raise OptionError(f"A template must contain {{}} in place of the class name. Got {bare[0]!r} instead.")
    sentences = {} if descriptions is None else descriptions
    absent = [name for name in names if descriptions is not None and not sentences.get(name)]
    if absent:
        raise InputError(f"The descriptions have no sentence for the class {absent[0]!r}; add one, or leave it out.")
    prompts = [
        [t.replace("{}", phrase) for phrase in classes.phrases(name) for t in templates]
        + [*sentences.get(name, ()), *classes.descriptions.get(name, ())]
        for name in names
    ]
    rows = encoder.encode_text([prompt for one in prompts for prompt in one])  # (sum of prompts, d)
    own = np.split(rows, np.cumsum([len(one) for one in prompts])[:-1])
    text: FloatArray = unit_rows(np.stack([one.mean(axis=0) for one in own]), "classes")
    phrases = [classes.phrases(name)[0] for name in names]
    return EmbeddedClasses(names, text, templates, [*_doubts(names, text), *classes.doubts(), *encoder.doubts(phrases)])


def find_templates(given: Sequence[str]) -> tuple[str, ...]:
    """Read templates in the form of the command line: with {} for the name, a dataset of the paper, or "ensemble".

    >>> find_templates(["a sketch of a {}", "pets"])
    ('a sketch of a {}', 'a photo of a {}, a type of pet.')
    """
    from moontide.store.datasets import dataset, dataset_names

    found: list[str] = []
    for template in map(as_text, given):
        if "{}" in template:
            found.append(template)
        elif template == "ensemble":
            found.extend(ENSEMBLE)
        elif " " in template:
            raise OptionError(f"'--template' must contain {{}} in place of the class name. Got {template!r} instead.")
        else:
            try:
                found.append(dataset(template).template)
            except OptionError:
                raise unknown_name("template", template, ["ensemble", *dataset_names()]) from None
    return tuple(found)


def read_descriptions(path: str | Path) -> dict[str, list[str]]:
    """Read a JSON file of sentences for each class: {"espresso": ["a small cup of black coffee", ...], ...}.

    >>> read_descriptions("no.json")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no.json.
    """
    held = read_json(path)
    if not isinstance(held, dict):
        raise FileError(f"{path} must be a JSON object of class names. Got a {type(held).__name__} instead.")
    for name, sentences in held.items():
        if not isinstance(sentences, list) or not all(isinstance(one, str) and one.strip() for one in sentences):
            raise FileError(f"{path} must have a list of sentences for each class; {name!r} has none.")
    return held


def _doubts(names: Sequence[str], text: FloatArray) -> list[str]:
    """Report underscores, duplicates, and names with almost the same vector; change nothing."""
    underscored = [name for name in names if "_" in name]
    double = sorted(name for name, count in Counter(names).items() if count > 1)
    first = {name: k for k, name in reversed(list(enumerate(names)))}
    rows = sorted(first.values())  # the first class of each name
    pairs = _alike(text if len(rows) == len(names) else text[rows])
    alike = [f"{names[rows[i]]} and {names[rows[j]]}" for i, j in islice(pairs, SHOWN)]
    if next(pairs, None) is not None:  # to count them all may take minutes
        alike[-1] += " and others"
    reports = {
        "class names have underscores, which the encoder does not read as spaces": (underscored, "write spaces"),
        "class names appear more than once": (double, "keep one of each: equal classes share their images"),
        f"class names are almost the same to the encoder (cosine above {ALIKE})": (alike, "keep one, or say more"),
    }
    return [f"{what}: {first_of(found)}; {remedy}" for what, (found, remedy) in reports.items() if found]


def _alike(text: FloatArray) -> Iterator[tuple[int, int]]:
    """Yield the pairs of unit rows whose cosine is above ALIKE.

    A cosine is at most the product of two sketches: the coordinates along the `SKETCH` leading directions, and the
    length of what remains (Cauchy-Schwarz). Rows and columns of a block are multiplied in full if their sketches pass.
    """
    sketch = _sketch(text)
    for start in range(0, len(text), BLOCK_ROWS):
        near = sketch[start : start + BLOCK_ROWS] @ sketch[start:].T > ALIKE - SLACK
        np.fill_diagonal(near, False)
        if near.any():
            rows, columns = (start + np.flatnonzero(near.any(axis=axis)) for axis in (1, 0))
            close = (text[rows] @ text[columns].T > ALIKE) & (rows[:, None] < columns)
            for i, row in zip(rows.tolist(), close, strict=True):
                for j in columns[row].tolist():
                    yield i, j


def _sketch(text: FloatArray) -> FloatArray:
    """Return the leading coordinates of unit rows and the length of what remains, (K, SKETCH + 1)."""
    if text.shape[1] <= SKETCH or len(text) <= BLOCK_ROWS:
        return text
    directions = np.linalg.eigh(text.T @ text)[1][:, -SKETCH:]  # (d, SKETCH)
    leading = text @ directions
    remainder = np.sqrt(np.maximum(1 - (leading**2).sum(axis=1, keepdims=True), 0))
    return np.concatenate([leading, remainder], axis=1)


def first_of(found: Sequence[str]) -> str:
    """Join the first names with commas, and count the others.

    >>> first_of(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d, e and 1 more'
    """
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(found[:SHOWN]) + more
