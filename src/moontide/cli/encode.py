"""`moontide encode`: images to a store of embeddings that every other command reads."""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Group, Parameter

from moontide.cli.common import CLASS_FILES, note, progress_bar
from moontide.cli.output import emit, say
from moontide.cli.shards import Address
from moontide.encoders.base import DEFAULT
from moontide.errors import InputError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from moontide.encoders.base import Encoder
    from moontide.encoders.pipeline import Encoded
    from moontide.encoders.places import ImageFile, Skip
    from moontide.encoders.prompts import Classes
    from moontide.store.classes import ClassList
    from moontide.store.features import FeatureStore, Origin

ENCODER, PROMPTS = Group("Encoder"), Group("Prompts")

Images = Annotated[
    tuple[str, ...],
    Parameter(
        negative="",
        help="Images: folders, patterns such as 'photos/**/*.jpg', files, lists of paths (.txt, or the column 'path' "
        "of a .csv or .parquet), .tar archives, .parquet and .arrow files or datasets with a column of images, videos.",
    ),
]
Root = Annotated[
    Path | None,
    Parameter(help="The folder that paths in lists start from and must stay in (else that of the list)."),
]
AllowUrls = Annotated[
    bool,
    Parameter(negative="", show_default=False, help="Download the images of lists that are http or https addresses."),
]
FrameStep = Annotated[float, Parameter(help="Seconds between the frames that are taken of a video.")]
Strict = Annotated[
    bool, Parameter(negative="", show_default=False, help="Exit with status 1 if any image was skipped.")
]


@Parameter(name="*", group=ENCODER)
@dataclass(frozen=True)
class EncoderChoice:
    """The options that say which encoder runs, and how.

    >>> EncoderChoice(encoder="tiny").device
    'cpu'
    """

    encoder: Annotated[
        str,
        Parameter(
            help="A hub id or folder of a CLIP, SigLIP or SigLIP2 model, openclip:ARCH/TAG, openclip:ARCH/CHECKPOINT, "
            "onnx:FOLDER, or tiny (for a try-out without a hub: it is not CLIP but an ImageNet classifier with a name "
            "matcher)."
        ),
    ] = DEFAULT
    device: Annotated[str, Parameter(help="Where the encoder runs: cpu, cuda, cuda:1 or mps.")] = "cpu"
    precision: Annotated[
        str,
        Parameter(
            help="What images are embedded in: auto, float32, float16 or bfloat16. Auto is half precision on a GPU and "
            "bfloat16 on a CPU that multiplies in it, where vectors stay the same (cosine 0.9999), else float32."
        ),
    ] = "auto"
    fast: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Decode JPEG files on the GPU, which gives slightly other vectors (cosine 0.998); a store remembers.",
        ),
    ] = False
    encode_batch: Annotated[
        int | None, Parameter(help="Images that go through the encoder together (else what suits the device).")
    ] = None
    workers: Annotated[
        int | None,
        Parameter(help="Processes that decode images (else one a core beside a GPU, half of that beside a CPU)."),
    ] = None

    def make(self) -> Encoder:
        """Load the encoder."""
        from moontide.encoders import encoder

        for name, value in (("--encode-batch", self.encode_batch), ("--workers", self.workers)):
            if value is not None and value < 1:
                raise OptionError(f"'{name}' must be at least 1. Got {value} instead.")
        if self.fast and self.device == "cpu":
            raise OptionError("'--fast' decodes images on a GPU; add '--device cuda', or leave it out.")
        return encoder(self.encoder, self.device, self.precision)

    def of_store(self, origin: Origin) -> EncoderChoice:
        """Return the choice for a store: its own encoder, precision and decoding, where the user names no other."""
        named = self.encoder != NO_ENCODER_CHOICE.encoder
        precision = origin.precision if self.precision == "auto" else self.precision
        kind = (self.encoder if named else origin.reloads).partition(":")[0]
        return replace(
            self,
            encoder=self.encoder if named else origin.reloads,
            precision="auto" if kind == "onnx" else precision,
            fast=self.fast or (origin.decoding == "fast" and self.device != "cpu"),
        )


@Parameter(name="*", group=PROMPTS)
@dataclass(frozen=True)
class PromptChoice:
    """The options that say how class names become sentences.

    >>> PromptChoice(template=("a drawing of a {}",)).descriptions is None
    True
    """

    template: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="A sentence with {} for the class name, a dataset of the paper for its own, or 'ensemble'; repeated, "
            "the vectors are averaged (else what the encoder likes best).",
        ),
    ] = ()
    descriptions: Annotated[
        Path | None, Parameter(help='Sentences for each class: a JSON file, {"name": ["sentence", ...], ...}.')
    ] = None

    def embed(self, encoder: Encoder, names: Sequence[str] | ClassList, templates: Sequence[str] = ()) -> Classes:
        """Embed class names, and warn about the doubtful ones; `templates` are for the user who gives none."""
        from moontide.encoders.prompts import embed_classes, find_templates, read_descriptions

        sentences = None if self.descriptions is None else read_descriptions(self.descriptions)
        classes = embed_classes(encoder, names, find_templates(self.template) or templates, sentences)
        for report in classes.reports:
            warnings.warn(report, UserWarning, stacklevel=2)
        return classes


NO_ENCODER_CHOICE, NO_PROMPT_CHOICE = EncoderChoice(), PromptChoice()


STORE = Group("An existing store")


def encode(
    paths: Images = (),
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="The folder of the store: a new one, or one that the same command goes on with.")
    ] = None,
    choice: EncoderChoice = NO_ENCODER_CHOICE,
    classes: Annotated[
        str | None,
        Parameter(help=f"Class names: {CLASS_FILES}.", group=PROMPTS),
    ] = None,
    prompts: PromptChoice = NO_PROMPT_CHOICE,
    dataset: Annotated[
        str | None,
        Parameter(
            help="Take the test images, classes and labels of a dataset of the paper that lies in PATHS, or with "
            "'folders' of any folder that has one sub-folder per class."
        ),
    ] = None,
    into: Annotated[
        Path | None,
        Parameter(help="Add the images to this store, with its own encoder, precision and classes.", group=STORE),
    ] = None,
    remove: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="Take images out of the store of --into: ids, or patterns of ids.",
            group=STORE,
        ),
    ] = (),
    verify: Annotated[
        bool,
        Parameter(
            negative="", show_default=False, help="Check every file of the store of --into by its hash.", group=STORE
        ),
    ] = False,
    benchmark: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Write nothing; print where the time of encoding PATHS goes."),
    ] = False,
    views: Annotated[
        int | None,
        Parameter(help="Encode so many augmented views of each image, too, for the method mta (its authors: 64)."),
    ] = None,
    root: Root = None,
    allow_urls: AllowUrls = False,
    frame_step: FrameStep = 1.0,
    shard_size: Annotated[
        int, Parameter(help="Images in a file of the store, or as many more as fill a batch of the encoder.")
    ] = 1024,
    engine: Annotated[
        Literal["local", "ray"],
        Parameter(help="Encode in this process, or on Ray, where --workers are encoders (else one a CPU, or a GPU)."),
    ] = "local",
    address: Address = None,
    strict: Strict = False,
) -> int:
    """Encode images, and class names if there are any, to a store: a folder of embeddings that can be gone on with.

    After a stop, the same command goes on where it was. Images that cannot be decoded are named and left out. For
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
    from moontide.encoders.sources import list_images

    _check(paths, out, choice, classes, prompts, dataset, into, remove, verify, benchmark, root, shard_size)
    if engine == "local" and address is not None:
        raise OptionError("'--address' has no effect without '--engine ray'.")
    sources: dict[str, Any] = {"root": root, "allow_urls": allow_urls, "frame_step": frame_step}
    if benchmark:
        return _benchmark(list_images(paths, **sources).images, choice)
    way = _Way(choice, engine, address, shard_size, strict, views)
    if into is not None:
        return _existing(into, paths, sources, remove, verify, way)
    assert out is not None
    return _new(out, paths, sources, classes, prompts, dataset, way)


@dataclass(frozen=True)
class _Way:
    """How images are encoded into a store."""

    choice: EncoderChoice
    engine: str
    address: str | None
    shard_size: int
    strict: bool
    views: int | None


def _check(
    paths: Sequence[str],
    out: Path | None,
    choice: EncoderChoice,
    classes: str | None,
    prompts: PromptChoice,
    dataset: str | None,
    into: Path | None,
    remove: Sequence[str],
    verify: bool,
    benchmark: bool,
    root: Path | None,
    shard_size: int,
) -> None:
    """Refuse options that do not go together."""
    if sum((out is not None, into is not None, benchmark)) != 1:
        raise OptionError("One of '--out', '--into' and '--benchmark' must be given: a new store, an old one, or none.")
    if into is None and (remove or verify):
        raise OptionError("'--remove' and '--verify' are for the store that '--into' names; add it.")
    if not paths and not remove and not verify:
        raise OptionError("PATHS must name images: folders, patterns, files, lists or archives. Got none.")
    if into is not None and (classes is not None or dataset is not None or prompts != NO_PROMPT_CHOICE):
        raise OptionError("A store keeps its classes: leave '--classes', '--dataset' and prompts out with '--into'.")
    if classes is None and dataset is None and prompts != NO_PROMPT_CHOICE:
        raise OptionError("'--template' and '--descriptions' have no effect without '--classes'; add them.")
    if dataset is not None and (classes is not None or root is not None or len(paths) != 1):
        raise OptionError("'--dataset' takes one folder, and neither '--classes' nor '--root'; leave the others out.")
    if shard_size < 1:
        raise OptionError(f"'--shard-size' must be at least 1. Got {shard_size} instead.")


def _new(
    out: Path,
    paths: Sequence[str],
    sources: dict[str, Any],
    classes: str | None,
    prompts: PromptChoice,
    dataset: str | None,
    way: _Way,
) -> int:
    """Make a store, or go on with one."""
    from moontide.encoders.pipeline import origin_of
    from moontide.encoders.places import ImageFile, path_id
    from moontide.encoders.sources import list_images
    from moontide.store.classes import read_classes
    from moontide.store.datasets import read_dataset, read_folders
    from moontide.store.features import MANIFEST, FeatureStore

    labels: dict[str, int] | None = None
    names: Sequence[str] | ClassList = () if classes is None else read_classes(classes)
    templates: Sequence[str] = ()
    skipped: Sequence[Skip] = ()
    if dataset is None:
        images, skipped = list_images(paths, **sources)
    else:
        found = read_folders(paths[0]) if dataset == "folders" else read_dataset(dataset, paths[0])
        images = [ImageFile(path_id(path), path) for path in found.paths]
        labels = {image.id: int(label) for image, label in zip(images, found.labels, strict=True)}
        names, templates = found.class_names, () if dataset == "folders" else (found.template,)
    choice = way.choice
    if choice.precision == "auto" and (out / MANIFEST).exists():  # goes on in the precision that it was begun in
        choice = replace(choice, precision=choice.of_store(FeatureStore.open(out).origin).precision)
    encoder = choice.make()
    text = prompts.embed(encoder, names, templates) if classes is not None or labels is not None else None
    origin = origin_of(encoder, text, None if dataset == "folders" else dataset, choice.fast)
    store = FeatureStore.create(out, origin, *(() if text is None else (text.names, text.text)))
    return _fill(store, encoder, images, skipped, labels, replace(way, choice=choice))


def _existing(
    into: Path, paths: Sequence[str], sources: dict[str, Any], remove: Sequence[str], verify: bool, way: _Way
) -> int:
    """Check a store, take images out of it, and add others to it."""
    from moontide.classify import check_maker, folder_labels
    from moontide.encoders.sources import list_images
    from moontide.store.features import FeatureStore

    store = FeatureStore.open(into)
    if verify:
        store.verify()
        say(f"{into} holds {store.n} images in {len(store.shards)} files, all as they were written")
    if remove:
        gone = [one for one in store.ids if any(fnmatchcase(one, pattern) for pattern in remove)]
        if not gone:
            raise InputError(f"'--remove' must name images of the store. Got {', '.join(remove)}, which names none.")
        store = store.remove(gone)
        say(f"{into} holds {store.n} images ({len(gone)} removed)")
    if not paths:
        return 0
    images, skipped = list_images(paths, **sources)
    labels: dict[str, int] | None = None
    if store.labels is not None:
        found = folder_labels([image.id for image in images], store.class_names)
        if found is None:
            raise InputError(f"{into} has labels: images for it must lie in folders that are called as its classes.")
        labels = {image.id: int(label) for image, label in zip(images, found, strict=True)}
    choice = way.choice.of_store(store.origin)
    encoder = choice.make()
    check_maker(store, encoder, choice.fast)
    return _fill(store, encoder, images, skipped, labels, replace(way, choice=choice))


def _fill(
    store: FeatureStore,
    encoder: Encoder,
    images: Sequence[ImageFile],
    skipped: Sequence[Skip],
    labels: dict[str, int] | None,
    way: _Way,
) -> int:
    """Encode the images that a store does not hold, and say how it went."""
    from moontide.encoders.pipeline import add_to_store

    choice, before = way.choice, store.n
    start = time.perf_counter()
    with (
        _pass(way.engine, way.address, choice, encoder) as through,
        progress_bar("encoding", "images") as progress,
    ):
        store, undecoded = add_to_store(
            store, encoder, images, batch_size=choice.encode_batch, workers=choice.workers,
            shard_size=way.shard_size, fast=choice.fast, labels=labels, progress=progress, through=through,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    skipped = [*skipped, *undecoded]
    for one in skipped:
        note(f"skipped {one.id}: {one.reason}")
    if way.views is not None and store.n:
        from moontide.store.views import add_views

        with progress_bar("views", "images") as progress:
            add_views(store, encoder, images, way.views, progress)
    if not store.n:
        raise InputError(f"None of the {len(skipped)} images can be used; see the reasons above.")
    new = store.n - before
    how = f"{seconds:.1f} s, {new / seconds:.1f} images/s, {encoder.precision}"
    emit(store=store.folder, images=store.n, new=new, encoder=encoder.id, skipped=[list(one) for one in skipped])
    say(f"{store.folder} holds {store.n} images ({new} new) by {encoder.id}; {len(skipped)} skipped; {how}")
    return 1 if way.strict and skipped else 0


def _benchmark(images: Sequence[ImageFile], choice: EncoderChoice) -> int:
    """Encode images, keep nothing, and print where the time goes."""
    from moontide.encoders.timing import measure

    with progress_bar("encoding", "images") as progress:
        found = measure(
            choice.make(), images, batch_size=choice.encode_batch, workers=choice.workers, fast=choice.fast,
            progress=progress,
        )  # fmt: skip
    print(found.table())
    return 0


@contextmanager
def _pass(
    engine: str, address: str | None, choice: EncoderChoice, encoder: Encoder
) -> Iterator[Callable[[Sequence[ImageFile]], Iterable[Encoded]] | None]:
    """Yield what images are encoded by on Ray, or None where that is this process."""
    if engine == "local":
        yield None
        return
    from moontide.engine.ray import connect, disconnect

    started = connect(address, choice.workers)
    try:
        from moontide.engine.images import encode_on_ray

        batch = choice.encode_batch or encoder.batch_size
        yield lambda images: encode_on_ray(
            images, encoder.dim, choice.encoder, choice.device, encoder.precision, batch_size=batch,
            workers=choice.workers, fast=choice.fast,
        )  # fmt: skip
    finally:
        if started:
            disconnect()
