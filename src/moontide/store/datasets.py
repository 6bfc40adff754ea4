"""Image datasets on disk: the paper's eleven in the layout of CoOp, and any folder with one sub-folder per class.

What is known of each of the eleven is data, `bench/datasets/*.toml`: prompt template, number of classes and samples,
folder, images and the files that name the test images. `layout` names how these are read:

    split     a JSON of CoOp, "test": [[path, label, class name], ...], paths from the folder `images`
    imagenet  classnames.txt, lines "n01440764 tench", and one folder per class under `images`
    aircraft  variants.txt, one class per line, and images_variant_test.txt, lines "1514522 707-320"

In class names "_" becomes a space.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moontide.errors import FileError, unknown_name
from moontide.metrics import IntArray
from moontide.store.disk import read_json, text_of
from moontide.store.toml import read_toml, toml_files

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
TEMPLATE = "a photo of a {}."


@dataclass(frozen=True)
class Dataset:
    """What is known of a dataset of the paper.

    >>> dataset("oxford_pets").template
    'a photo of a {}, a type of pet.'
    """

    name: str
    title: str  # the paper's name
    aliases: tuple[str, ...]  # other names that files have
    classes: int
    samples: int
    template: str  # of the published program; {} is the class name
    folder: str
    layout: str
    images: str  # where the images are, in the folder
    files: tuple[str, ...]  # what names classes and test images


@dataclass(frozen=True)
class ImageSet:
    """Images with their classes: what an encoder turns into features."""

    paths: list[Path]
    labels: IntArray  # (N,)
    class_names: tuple[str, ...]
    template: str


def dataset_names() -> tuple[str, ...]:
    """List the datasets of the paper.

    >>> len(dataset_names())
    11
    """
    return tuple(toml_files("datasets"))


def dataset(name: str) -> Dataset:
    """Find a dataset of the paper by its name or by one of its aliases, in any case.

    >>> dataset("Pets").name, dataset("imagenet1k").samples
    ('oxford_pets', 50000)
    """
    for stem, path in toml_files("datasets").items():
        table = read_toml(path)
        if name.lower() in (stem, *table["aliases"]):
            return Dataset(stem, **{**table, "aliases": tuple(table["aliases"]), "files": tuple(table["files"])})
    raise unknown_name("dataset", name, dataset_names())


def read_dataset(name: str, root: str | Path) -> ImageSet:
    """Read the test split of a dataset of the paper; `root` is its folder, or the folder that holds all of them.

    >>> read_dataset("dtd", "data")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: data/dtd/split_zhou_DescribableTextures.json is missing. DTD is expected as \
dtd/images (the images) and dtd/split_zhou_DescribableTextures.json, the layout of CoOp.
    """
    known = dataset(name)
    root = Path(root)
    folder = root if all((root / file).exists() for file in known.files) else root / known.folder
    for part in (*known.files, known.images):
        if not (folder / part).exists():
            raise _missing(known, folder / part)
    readers = {"split": _read_split, "imagenet": _read_imagenet, "aircraft": _read_aircraft}
    try:
        found = readers[known.layout](known, folder)
    except (ValueError, KeyError, TypeError, OSError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{folder / known.files[-1]} is damaged or of another type ({error}).") from error
    absent = [path for path in found.paths if not path.exists()]
    if absent:
        others = f" and {len(absent) - 1} more of {len(found.paths)} images"
        raise _missing(known, absent[0], others if len(absent) > 1 else "")
    size = (len(found.class_names), len(found.paths))
    if size != (known.classes, known.samples):
        warnings.warn(
            f"{folder} has {size[0]} classes and {size[1]} test images; {known.title} of the paper has "
            f"{known.classes} and {known.samples}",
            UserWarning,
            stacklevel=2,
        )
    return found


def read_folders(root: str | Path, template: str = TEMPLATE) -> ImageSet:
    """Read a folder that has one sub-folder of images per class; hidden files and other files are left out.

    >>> read_folders("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no folder no-such-folder.
    """
    root = Path(root)
    if not root.is_dir():
        raise FileError(f"There is no folder {root}.")
    classes = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    found = [(path, label) for label, folder in enumerate(classes) for path in _images(folder)]
    empty = [folder.name for label, folder in enumerate(classes) if label not in {y for _, y in found}]
    if empty or not found:
        raise FileError(
            f"{root} must have one folder of images for each class (of the kinds {', '.join(IMAGES)}). "
            + (f"There are none in {empty[0]!r}." if empty else "It has no folders.")
        )
    return _image_set(found, [folder.name for folder in classes], template)


def _missing(known: Dataset, path: Path, more: str = "") -> FileError:
    layout = [f"{known.folder}/{known.images} (the images)"] if known.images != "." else []
    layout += [f"{known.folder}/{file}" for file in known.files]
    return FileError(
        f"{path}{more} {'are' if more else 'is'} missing. {known.title} is expected as "
        f"{', '.join(layout[:-1])}{' and ' if layout[:-1] else ''}{layout[-1]}, the layout of CoOp."
    )


def _image_set(found: Iterable[tuple[Path, int]], names: Iterable[str], template: str) -> ImageSet:
    paths, labels = zip(*found, strict=True)
    clean = tuple(name.replace("_", " ") for name in names)
    return ImageSet(list(paths), np.asarray(labels, dtype=np.int64), clean, template)


def _images(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix.lower() in IMAGES and not p.name.startswith("."))


def _read_split(known: Dataset, folder: Path) -> ImageSet:
    rows: list[list[Any]] = read_json(folder / known.files[0])["test"]
    names = {int(label): str(name) for _, label, name in rows}
    if sorted(names) != list(range(len(names))):
        raise ValueError("its test labels are not the numbers from 0 on")
    found = [(folder / known.images / str(path), int(label)) for path, label, _ in rows]
    return _image_set(found, [names[label] for label in sorted(names)], known.template)


def _read_imagenet(known: Dataset, folder: Path) -> ImageSet:
    classes = [line.split(" ", 1) for line in _lines(folder / known.files[0])]
    found = []
    for label, (code, _) in enumerate(classes):
        inside = folder / known.images / code
        if not inside.is_dir():
            raise _missing(known, inside)
        found += [(path, label) for path in _images(inside)]
    return _image_set(found, [name for _, name in classes], known.template)


def _read_aircraft(known: Dataset, folder: Path) -> ImageSet:
    names, lines = (_lines(folder / file) for file in known.files)
    number = {name: label for label, name in enumerate(names)}
    pairs = (line.split(" ", 1) for line in lines)
    found = [(folder / known.images / f"{image}.jpg", number[name]) for image, name in pairs]
    return _image_set(found, names, known.template)


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in text_of(path).splitlines() if line.strip()]
