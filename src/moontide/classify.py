"""From images and class names to labels: find, decode, encode and adapt, then write a table or a report."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from moontide.answers import Answers, answer, top_classes
from moontide.core.arrays import Array, to_numpy
from moontide.core.devices import to_device
from moontide.encoders.base import Encoder, FloatArray
from moontide.encoders.loading import TINY
from moontide.encoders.pipeline import Count, encode_files
from moontide.encoders.places import ImageFile, Skip, path_id
from moontide.encoders.prompts import EmbeddedClasses
from moontide.encoders.runtimes import settle
from moontide.encoders.sources import Listing, as_listing, list_images
from moontide.errors import FileError, ImageError, InputError, MoontideError
from moontide.evaluate import (
    Comparison,
    Progress,
    compare_groups,
    compare_predictions,
    run_groups,
    scored_rows,
    split_rows,
)
from moontide.metrics import IntArray
from moontide.protocols import Method
from moontide.registry import DEFAULT
from moontide.registry import method as make_method
from moontide.report.gallery import write_gallery
from moontide.store.disk import replacing
from moontide.store.features import FeatureStore
from moontide.store.files import TABLES, check_output
from moontide.store.predictions import more_columns, rounded
from moontide.store.tables import write_table
from moontide.types import Result, Task

QUALITY = 75  # of the pictures on a page


@dataclass(frozen=True)
class Classified:
    """Images with their labels, and the data for tables and reports.

    >>> task = Task(np.eye(2), np.eye(2), class_names=("cat", "dog"))
    >>> images = [ImageFile("a.jpg", Path("a.jpg")), ImageFile("b.jpg", Path("b.jpg"))]
    >>> found = Classified(images, task, make_method("tide").fit_predict(task), [], None, "a-model", "tide")
    >>> found.columns()["label"], found.comparison.changed
    (['cat', 'dog'], 0)
    """

    images: Sequence[ImageFile]
    task: Task
    result: Result
    skipped: Sequence[Skip]
    truth: IntArray | None  # where all folder names are class names, or a store has labels; no method saw it
    encoder: str  # its id
    method: str
    batch_size: int | None = None
    groups: Sequence[str] | None = None  # of each image, where groups were labelled on their own
    answers: Answers | None = None  # where more is answered than the class
    more: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # further columns of the table

    @property
    def comparison(self) -> Comparison:
        """Comparison with zero-shot and the true labels, for the images that count (`scored_rows`)."""
        return compare_predictions(self.truth, self.result, scored_rows(self.task, answers=self.answers))

    @property
    def group_comparisons(self) -> dict[str, Comparison]:
        """Comparison with zero-shot and the true labels, for each group."""
        return compare_groups(self.truth, self.result, self.groups or (), scored_rows(self.task, answers=self.answers))

    def columns(self) -> dict[str, list[Any]]:
        """Return the table of labels by column."""
        names, probs = self.task.class_names or (), to_numpy(self.result.probs)
        given = self.answers or answer(self.result, names)
        columns = {
            "id": [image.id for image in self.images],
            "path": [path_id(Path(os.path.abspath(image.path))) for image in self.images],
            "label": given.texts,
            "confidence": given.confidence.round(6).tolist(),
            "top5": top_classes(probs, names),
            "zero_shot_label": [names[k] for k in to_numpy(self.result.zero_shot_labels)],
        }
        if self.result.unknown is not None:
            columns["unknown"] = rounded(to_numpy(self.result.unknown)).tolist()
        return columns | more_columns(self.task, self.groups) | dict(self.more)

    def write_table(self, handle: BinaryIO, kind: str) -> None:
        """Write the table of labels in one of the formats `TABLES`, with top5 as JSON where cells are text."""
        write_table(handle, self.columns(), kind)

    def save(self, path: str | Path) -> None:
        """Write the table of labels to a file; its suffix selects the format."""
        check_output(path, TABLES)
        with replacing(path) as handle:
            self.write_table(handle, Path(path).suffix)

    def report(self, path: str | Path) -> None:
        """Write the report, an .html page."""
        encoder = f"tiny ({TINY})" if self.encoder == "tiny" else self.encoder
        about = {"encoder": encoder, "method": self.method}
        if self.batch_size is not None:
            about["in batches of"] = str(self.batch_size)
        if self.groups is not None:
            about["groups"] = str(len(set(self.groups)))
        parts = None
        if self.batch_size is not None or self.groups is not None:
            parts = split_rows(self.task.n, self.groups, self.batch_size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")  # of odd metadata
            write_gallery(
                path, self.task, self.result, [image.id for image in self.images],
                lambda i, side: thumbnail(self.images[i], side),
                truth=self.truth, skipped=self.skipped, parts=parts, about=about, answers=self.answers,
            )  # fmt: skip


def classify(
    listing: Listing | Sequence[Any],
    classes: EmbeddedClasses,
    encoder: Encoder,
    *,
    method: Method | None = None,
    batch_size: int | None = None,
    groups: Mapping[str, str] | None = None,
    known: Mapping[str, int] | None = None,
    class_prior: Array | None = None,
    negatives: Array | None = None,
    encode_batch: int | None = None,
    workers: int | None = None,
    fast: bool = False,
    device: str = "cpu",
    progress: Progress = lambda done, total: None,
) -> Classified:
    """Label images with the class names that fit best, all together or in batches of `batch_size`.

    listing: the result of `list_images`, or a list of Pillow images, arrays and paths. classes: the result of
    `embed_classes` with the same encoder. method: None is the default.
    groups: the group of each image by id; each group is labelled separately. known: the class numbers of images whose
    label is known, by id. class_prior, negatives: as in `fit_predict`. encode_batch, workers, fast: as for
    `encode_files`.
    device: where the method runs.

    >>> import tempfile
    >>> from PIL import Image
    >>> from moontide.encoders.prompts import embed_classes
    >>> class Colour(Encoder):
    ...     id, dim, logit_scale, preprocessing = "colour", 3, 10.0, "mean colour"
    ...     def prepare(self, image): return {"mean": np.asarray(image.resize((1, 1)), dtype=np.float32).reshape(3)}
    ...     def _images(self, batch): return np.stack([one["mean"] for one in batch])
    ...     def _text(self, prompts): return np.eye(3)[["red green blue".split().index(p) for p in prompts]]
    >>> classes = embed_classes(Colour(), ["red", "green", "blue"], ["{}"])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for colour in ("red", "blue"):
    ...         Image.new("RGB", (8, 8), colour).save(Path(folder) / f"{colour}.png")
    ...     classify(list_images([folder]), classes, Colour()).columns()["label"]
    ['blue', 'red']
    """
    listing = listing if isinstance(listing, Listing) else as_listing(listing)
    images: list[ImageFile] = []
    parts: list[FloatArray] = []
    skipped = list(listing.skipped)
    count = Count(len(listing.images), progress)
    settle(encoder, len(listing.images))
    for part in encode_files(encoder, listing.images, batch_size=encode_batch, workers=workers, fast=fast, done=count):
        images += part.images
        parts.append(part.features)
        skipped += part.skipped
    if not images:
        raise FileError(f"None of the {len(skipped)} images can be used; {skipped[0].id}: {skipped[0].reason}.")
    features = to_device(np.concatenate(parts), None, device)
    given = {"known": by_image(known, images, -1), "class_prior": class_prior, "negatives": negatives}
    task = Task(features, classes.text, encoder.logit_scale, classes.names, **given)
    return label_images(images, task, encoder.id, method, batch_size, skipped, groups=by_image(groups, images, ""))


def classify_store(
    store: FeatureStore,
    classes: EmbeddedClasses | None = None,
    *,
    method: Method | None = None,
    batch_size: int | None = None,
    groups: Mapping[str, str] | None = None,
    known: Mapping[str, int] | None = None,
    class_prior: Array | None = None,
    negatives: Array | None = None,
    device: str = "cpu",
) -> Classified:
    """Label the images of a feature store with its classes, or with others that its encoder embedded.

    The other arguments are those of `classify`.

    >>> import tempfile
    >>> from moontide.store.features import Origin
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = FeatureStore.create(folder, Origin("a-model", "none", ("{}",)), ["cat", "dog"], np.eye(2))
    ...     store = store.append(["in/a.jpg", "in/b.jpg"], np.eye(2))
    ...     classify_store(store).columns()["label"]
    ['cat', 'dog']
    """
    if store.n == 0:
        raise InputError(f"The store {store.folder} has no images; encode some first.")
    features = to_device(np.asarray(store.take(np.arange(store.n)), dtype=np.float32), None, device)
    names, text = (store.class_names, store.text) if classes is None else (classes.names, classes.text)
    images = located(store.ids, store.origin.folder)
    given = {"known": by_image(known, images, -1), "class_prior": class_prior, "negatives": negatives}
    task = Task(features, text, store.origin.logit_scale, names, **given)
    truth = store.labels if classes is None else None
    groups_of = by_image(groups, images, "")
    return label_images(images, task, store.origin.encoder, method, batch_size, [], truth, groups_of)


def by_image(values: Mapping[str, Any] | None, images: Sequence[ImageFile], default: Any) -> Any:
    """Return the values of images by their ids as a list in their order, or None where there are no values.

    >>> by_image({"b.jpg": 1}, [ImageFile("a.jpg", Path("a.jpg")), ImageFile("b.jpg", Path("b.jpg"))], -1)
    [-1, 1]
    """
    return None if values is None else [values.get(image.id, default) for image in images]


def check_maker(store: FeatureStore, encoder: Encoder, fast: bool | None = None) -> None:
    """Refuse an encoder other than the one that made a store; `fast` is how it would decode more images, if any.

    >>> from types import SimpleNamespace
    >>> from moontide.store.features import Origin
    >>> store = FeatureStore(Path("store"), Origin("a-model", "resize 224", ("{}",)), ())
    >>> check_maker(store, SimpleNamespace(id="a-model", preprocessing="resize 224"))
    """
    made = store.origin
    if (encoder.id, encoder.preprocessing) != (made.encoder, made.preprocessing):
        raise InputError(
            f"The store {store.folder} was made by the encoder {made.encoder} with its preprocessing, but "
            f"{encoder.id} differs; use the same '--encoder', or encode the images again."
        )
    if fast is not None and (encoder.precision, fast) != (made.precision, made.decoding == "fast"):
        raise InputError(
            f"The store {store.folder} was made with '--precision {made.precision}' and {made.decoding} decoding, but "
            f"this would add {encoder.precision} and {'fast' if fast else 'exact'}; use the same device and options."
        )


def label_images(
    images: Sequence[ImageFile],
    task: Task,
    encoder: str,
    method: Method | None = None,
    batch_size: int | None = None,
    skipped: Sequence[Skip] = (),
    truth: IntArray | None = None,
    groups: Sequence[str] | None = None,
) -> Classified:
    """Run a method on the features of images; folder names serve as true labels if there are no others.

    >>> task = Task(np.eye(2), np.eye(2), class_names=("cat", "dog"))
    >>> images = [ImageFile(name, Path(name)) for name in ("dog/a.jpg", "dog/b.jpg")]
    >>> label_images(images, task, "a-model").comparison.accuracy
    0.5
    """
    method = method or make_method(DEFAULT)
    result = run_groups(method, task, groups, batch_size)
    if truth is None:
        truth = folder_labels([image.id for image in images], task.class_names or ())
    return Classified(images, task, result, skipped, truth, encoder, method.name, batch_size, groups)


def folder_labels(ids: Iterable[str], names: Sequence[str]) -> IntArray | None:
    """Return class numbers from the folders of images, or None unless every folder is named after a class.

    Case is ignored, and spaces, hyphens and underscores are equivalent.

    >>> folder_labels(["in/cat/1.jpg", "in/Polar_bear/2.jpg"], ["polar bear", "cat"])
    array([1, 0])
    >>> folder_labels(["in/cat/1.jpg", "in/3.jpg"], ["polar bear", "cat"]) is None
    True
    """
    number = {_plain(name): k for k, name in reversed(list(enumerate(names)))}  # of equal names the first
    found = [number.get(_plain(PurePosixPath(one).parent.name)) for one in ids]
    return None if None in found else np.asarray(found, dtype=np.int64)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def located(ids: Iterable[str], folder: str = "") -> list[ImageFile]:
    """Return the locations of the images of a store: paths, or positions in archives.

    Relative paths start in the current folder, or, if nothing is there, in the folder in which the store was made.

    >>> located(["photos/a.jpg"])
    [ImageFile(id='photos/a.jpg', path=PosixPath('photos/a.jpg'), offset=None, size=0)]
    """
    archives: dict[Path, dict[str, ImageFile]] = {}
    found = []
    for one in ids:
        path, archive = _located(one, folder)
        if archive is not None and archive not in archives:
            try:
                archives[archive] = {image.id: image for image in list_images([archive]).images}
            except MoontideError:  # it has changed since; its images have labels and no pictures
                archives[archive] = {}
        image = archives[archive].get(path_id(path)) if archive is not None else None
        found.append(ImageFile(one, path) if image is None else replace(image, id=one))
    return found


def _located(name: str, folder: str) -> tuple[Path, Path | None]:
    """Return the path of an image by its id, and its archive, if any."""
    for path in (Path(name), Path(folder) / name):
        archive = next((parent for parent in path.parents if parent.suffix == ".tar" and parent.is_file()), None)
        if archive is not None or path.exists():
            return path, archive
    return Path(name), None


def thumbnail(image: ImageFile, side: int) -> bytes | None:
    """Return a JPEG thumbnail with a longer side of at most `side` pixels, or None if the image cannot be read.

    >>> thumbnail(ImageFile("no.jpg", Path("no.jpg")), 64) is None
    True
    """
    try:
        picture = image.read()
    except ImageError:
        return None
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()
