"""`moontide encode`: compute embeddings of images and put them into a store."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Group, Parameter

from moontide.cli.common import note, progress_bar
from moontide.cli.encoder import (
    NO_ENCODER_CHOICE,
    NO_PROMPT_CHOICE,
    NO_SOURCE_CHOICE,
    ClassNames,
    EncoderChoice,
    Images,
    PromptChoice,
    SourceChoice,
    Strict,
)
from moontide.cli.output import counted, emit, say
from moontide.cli.shards import Address
from moontide.errors import InputError, OptionError, without_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from moontide.encoders.base import Encoder
    from moontide.encoders.pipeline import Encoded
    from moontide.encoders.places import ImageFile, Skip
    from moontide.store.classes import ClassList
    from moontide.store.features import FeatureStore

STORE = Group("An existing store")


@Parameter(name="*", group=STORE)
@dataclass(frozen=True)
class StoreChoice:
    """Options for an existing store."""

    into: Annotated[
        Path | None, Parameter(help="Add the images to this store, with its encoder, precision and classes.")
    ] = None
    remove: Annotated[
        tuple[str, ...],
        Parameter(
            negative="", show_default=False, help="Remove images from the store of --into: ids, or patterns of ids."
        ),
    ] = ()
    verify: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Check the hash of every file of the store of --into."),
    ] = False


@Parameter(name="*")
@dataclass(frozen=True)
class PassChoice:
    """Options for writing the store."""

    views: Annotated[
        int | None,
        Parameter(help="Also encode this many augmented views of each image, for the method mta (its authors use 64)."),
    ] = None
    shard_size: Annotated[
        int, Parameter(help="Images per file of the store, rounded up to whole batches of the encoder.")
    ] = 1024
    engine: Annotated[
        Literal["local", "ray"],
        Parameter(help="Encode here or on Ray, with --workers encoders (default: one per CPU or GPU)."),
    ] = "local"
    address: Address = None
    strict: Strict = False


NO_STORE_CHOICE, NO_PASS_CHOICE = StoreChoice(), PassChoice()


def encode(
    paths: Images = (),
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="The folder of the store: a new one, or one that the same command began.")
    ] = None,
    choice: EncoderChoice = NO_ENCODER_CHOICE,
    classes: ClassNames = None,
    prompts: PromptChoice = NO_PROMPT_CHOICE,
    dataset: Annotated[
        str | None,
        Parameter(
            help="Use the test images, classes and labels of a dataset of the paper in PATHS, or with "
            "'folders' those of any folder with one sub-folder per class."
        ),
    ] = None,
    existing: StoreChoice = NO_STORE_CHOICE,
    benchmark: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Write nothing; print where the time of encoding goes."),
    ] = False,
    sources: SourceChoice = NO_SOURCE_CHOICE,
    way: PassChoice = NO_PASS_CHOICE,
) -> int:
    """Encode images, and optionally class names, into a store: a folder of embeddings that can be extended later.

    After an interruption, the same command resumes. Images that cannot be decoded are reported and skipped. For
    example:

        moontide encode photos/ --out store/ --classes "tabby cat, golden retriever, espresso"
        moontide encode 'shards/*.tar' --out store/ --encoder google/siglip2-base-patch16-224 --device cuda
        moontide encode data/ --dataset oxford_pets --out pets/ --encoder openclip:ViT-B-16/laion2b_s34b_b88k --views 64
        moontide encode 'shards/*.tar' --out store/ --engine ray --address auto --device cuda
        moontide encode --into store/ more/
        moontide encode --into store/ --remove 'photos/blurred/*'
        moontide encode --into store/ --verify
        moontide encode --benchmark photos/ --device cuda
    """
    task = _Task(choice, sources, way)
    _check_target(paths, out, existing, benchmark)
    _check_classes(paths, classes, prompts, dataset, existing, sources)
    _check_pass(way)
    if benchmark:
        return _benchmark(sources.find(paths).images, choice)
    if existing.into is not None:
        return _existing(existing.into, paths, existing, task)
    assert out is not None
    return _new(out, paths, classes, prompts, dataset, task)


@dataclass(frozen=True)
class _Task:
    """The encoder, the images and the settings for a store."""

    choice: EncoderChoice
    sources: SourceChoice
    way: PassChoice


def _check_target(paths: Sequence[str], out: Path | None, existing: StoreChoice, benchmark: bool) -> None:
    if sum((out is not None, existing.into is not None, benchmark)) != 1:
        raise OptionError("One of '--out' (a new store), '--into' (an existing one) or '--benchmark' is needed.")
    if existing.into is None and (existing.remove or existing.verify):
        raise OptionError("'--remove' and '--verify' need '--into STORE'; add it.")
    if not paths and not existing.remove and not existing.verify:
        raise OptionError("PATHS must name images: folders, patterns, files, lists or archives. Got none.")


def _check_classes(
    paths: Sequence[str],
    classes: str | None,
    prompts: PromptChoice,
    dataset: str | None,
    existing: StoreChoice,
    sources: SourceChoice,
) -> None:
    if existing.into is not None and (classes is not None or dataset is not None or prompts != NO_PROMPT_CHOICE):
        raise OptionError("A store keeps its classes; do not use '--classes', '--dataset' or prompts with '--into'.")
    if classes is None and dataset is None and prompts != NO_PROMPT_CHOICE:
        raise OptionError("'--template' and '--descriptions' have no effect without '--classes'; add them.")
    if dataset is not None and (classes is not None or sources.root is not None or len(paths) != 1):
        raise OptionError("'--dataset' takes one folder, without '--classes' or '--root'; leave them out.")


def _check_pass(way: PassChoice) -> None:
    if way.shard_size < 1:
        raise OptionError(f"'--shard-size' must be at least 1. Got {way.shard_size} instead.")
    if way.engine == "local" and way.address is not None:
        raise OptionError("'--address' has no effect without '--engine ray'.")


def _new(
    out: Path, paths: Sequence[str], classes: str | None, prompts: PromptChoice, dataset: str | None, task: _Task
) -> int:
    """Create a store, or resume one."""
    from moontide.encoders.pipeline import origin_of
    from moontide.store.classes import read_classes
    from moontide.store.features import MANIFEST, FeatureStore

    names: Sequence[str] | ClassList = () if classes is None else read_classes(classes)
    found = _Found(*task.sources.find(paths)) if dataset is None else _labelled(dataset, paths[0])
    if found.names is not None:
        names = found.names
    choice = task.choice
    if (out / MANIFEST).exists():  # resumes with its precision and runtime
        begun = choice.of_store(FeatureStore.open(out).origin)
        choice = replace(choice, precision=begun.precision, runtime=begun.runtime)
    encoder = choice.make()
    with_text = classes is not None or found.labels is not None
    text = prompts.embed(encoder, names, found.templates) if with_text else None
    _settle(encoder, len(found.images))
    origin = origin_of(encoder, text, None if dataset == "folders" else dataset, choice.fast)
    store = FeatureStore.create(out, origin, *(() if text is None else (text.names, text.text)))
    return _fill(store, encoder, found, replace(task, choice=choice))


@dataclass(frozen=True)
class _Found:
    """Images for a store, unusable images, and labels if known."""

    images: Sequence[ImageFile]
    skipped: Sequence[Skip] = ()
    labels: dict[str, int] | None = None  # by id
    names: Sequence[str] | None = None  # of the classes
    templates: Sequence[str] = ()


def _labelled(dataset: str, folder: str) -> _Found:
    """Read a dataset of the paper, or a folder with one sub-folder per class."""
    from moontide.encoders.places import ImageFile, path_id
    from moontide.store.datasets import read_dataset, read_folders

    found = read_folders(folder) if dataset == "folders" else read_dataset(dataset, folder)
    images = [ImageFile(path_id(path), path) for path in found.paths]
    labels = {image.id: int(label) for image, label in zip(images, found.labels, strict=True)}
    return _Found(images, (), labels, found.class_names, () if dataset == "folders" else (found.template,))


def _settle(encoder: Encoder, images: int | None) -> None:
    """Choose the runtime, and print what was measured."""
    from moontide.encoders.runtimes import settle

    if sentence := settle(encoder, images):
        note(sentence)


def _existing(into: Path, paths: Sequence[str], existing: StoreChoice, task: _Task) -> int:
    """Verify a store, remove images from it, and add others."""
    from moontide.classify import check_maker
    from moontide.store.features import FeatureStore

    store = FeatureStore.open(into)
    if existing.verify:
        store.verify()
        emit(store=into, images=store.n, files=len(store.shards))
        held = f"{counted(store.n, 'image')} in {counted(len(store.shards), 'file')}"
        say(f"{into} holds {held}, all intact")
    if existing.remove:
        gone = [one for one in store.ids if any(fnmatchcase(one, pattern) for pattern in existing.remove)]
        if not gone:
            names = ", ".join(existing.remove)
            raise InputError(f"'--remove' must match images of the store. Got {names}, which matches none.")
        store = store.remove(gone)
        emit(store=into, images=store.n, removed=len(gone))
        say(f"{into} holds {counted(store.n, 'image')} ({len(gone)} removed)")
    if not paths:
        return 0
    images, skipped = task.sources.find(paths)
    found = _Found(images, skipped, _labels_for(store, images))
    choice = task.choice.of_store(store.origin)
    encoder = choice.make()
    check_maker(store, encoder, choice.fast)
    return _fill(store, encoder, found, replace(task, choice=choice))


def _labels_for(store: FeatureStore, images: Sequence[ImageFile]) -> dict[str, int] | None:
    """Return labels from the folders of images, or None if the store has no labels."""
    from moontide.classify import folder_labels

    if store.labels is None:
        return None
    found = folder_labels([image.id for image in images], store.class_names)
    if found is None:
        raise InputError(f"{store.folder} has labels: new images must be in folders named after its classes.")
    return {image.id: int(label) for image, label in zip(images, found, strict=True)}


def _fill(store: FeatureStore, encoder: Encoder, found: _Found, task: _Task) -> int:
    """Encode the images that a store does not contain, and print a summary."""
    from moontide.encoders.pipeline import add_to_store

    choice, way, before = task.choice, task.way, store.n
    start = time.perf_counter()
    with (
        _pass(way.engine, way.address, choice, encoder) as through,
        progress_bar("encoding", "images") as progress,
    ):
        store, undecoded = add_to_store(
            store, encoder, found.images, batch_size=choice.encode_batch, workers=choice.workers,
            shard_size=way.shard_size, fast=choice.fast, labels=found.labels, progress=progress, through=through,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    skipped = [*found.skipped, *undecoded]
    for one in skipped:
        note(f"skipped {one.id}: {one.reason}")
    if way.views is not None and store.n:
        from moontide.store.views import add_views

        with progress_bar("views", "images") as progress:
            add_views(store, encoder, found.images, way.views, progress)
    if not store.n:
        raise InputError(f"None of the {len(skipped)} images can be used; see the reasons above.")
    new = store.n - before
    by = f"{encoder.precision} by {encoder.runtime}" if encoder.runtime else encoder.precision
    named = [[without_credentials(one.id), one.reason] for one in skipped]
    emit(store=store.folder, images=store.n, new=new, encoder=encoder.id, skipped=named)
    say(
        f"{store.folder} holds {counted(store.n, 'image')} ({new} new) by {encoder.id}; {len(skipped)} skipped; "
        f"{seconds:.1f} s, {new / seconds:.1f} images/s, {by}"
    )
    return 1 if way.strict and skipped else 0


def _benchmark(images: Sequence[ImageFile], choice: EncoderChoice) -> int:
    """Encode images, discard the result, and print where the time goes."""
    from moontide.encoders.timing import measure

    encoder = choice.make()
    _settle(encoder, None)
    with progress_bar("encoding", "images") as progress:
        found = measure(
            encoder, images, batch_size=choice.encode_batch, workers=choice.workers, fast=choice.fast,
            progress=progress,
        )  # fmt: skip
    emit(**asdict(found), images_per_second=found.steady, model_share=found.share)
    print(found.table())
    return 0


@contextmanager
def _pass(
    engine: str, address: str | None, choice: EncoderChoice, encoder: Encoder
) -> Iterator[Callable[[Sequence[ImageFile]], Iterable[Encoded]] | None]:
    """Yield the Ray encoders, or None to encode in this process."""
    if engine == "local":
        yield None
        return
    from moontide.cluster import joined

    with joined(address, choice.workers):
        from moontide.encoders.cluster import encode_on_ray

        batch = choice.encode_batch or encoder.batch_size
        yield lambda images: encode_on_ray(
            images, encoder.dim, choice.encoder, choice.device, encoder.precision, encoder.runtime,
            batch_size=batch, workers=choice.workers, fast=choice.fast,
        )  # fmt: skip
