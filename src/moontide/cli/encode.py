"""`moontide encode`: images to a store of embeddings that every other command reads."""

from __future__ import annotations

import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    from moontide.encoders.prompts import Classes
    from moontide.encoders.sources import ImageFile
    from moontide.store.classes import ClassList

ENCODER, PROMPTS = Group("Encoder"), Group("Prompts")

Images = Annotated[
    tuple[str, ...],
    Parameter(
        negative="",
        help="Images: folders, patterns such as 'photos/**/*.jpg', files, lists of paths (.txt, or the column 'path' "
        "of a .csv or .parquet), .tar archives.",
    ),
]
Root = Annotated[
    Path | None,
    Parameter(help="The folder that paths in lists start from and must stay in (else that of the list)."),
]
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
    autocast: Annotated[bool, Parameter(negative="", show_default=False, help="Run the encoder in half precision.")] = (
        False
    )
    encode_batch: Annotated[int, Parameter(help="Images that go through the encoder together.")] = 64
    workers: Annotated[int | None, Parameter(help="Threads that decode images (else one a core).")] = None

    def make(self) -> Encoder:
        """Load the encoder."""
        from moontide.encoders import encoder

        for name, value in (("--encode-batch", self.encode_batch), ("--workers", self.workers)):
            if value is not None and value < 1:
                raise OptionError(f"'{name}' must be at least 1. Got {value} instead.")
        return encoder(self.encoder, self.device, self.autocast)


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


def encode(
    paths: Images,
    /,
    *,
    out: Annotated[Path, Parameter(help="The folder of the store: a new one, or one to go on with.")],
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
            "'folders' of any folder that has one sub-folder a class."
        ),
    ] = None,
    root: Root = None,
    shard_size: Annotated[int, Parameter(help="Images in a file of the store.")] = 1024,
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
        moontide encode data/ --dataset oxford_pets --out pets/ --encoder openclip:ViT-B-16/laion2b_s34b_b88k
        moontide encode 'shards/*.tar' --out store/ --engine ray --address auto --device cuda
    """
    from moontide.encoders.pipeline import encode_to_store
    from moontide.encoders.sources import ImageFile, list_images, path_id
    from moontide.store.classes import read_classes
    from moontide.store.datasets import read_dataset, read_folders
    from moontide.store.features import MANIFEST, FeatureStore

    if classes is None and dataset is None and prompts != NO_PROMPT_CHOICE:
        raise OptionError("'--template' and '--descriptions' have no effect without '--classes'; add them.")
    if dataset is not None and (classes is not None or root is not None or len(paths) != 1):
        raise OptionError("'--dataset' takes one folder, and neither '--classes' nor '--root'; leave the others out.")
    if shard_size < 1:
        raise OptionError(f"'--shard-size' must be at least 1. Got {shard_size} instead.")
    if engine == "local" and address is not None:
        raise OptionError("'--address' has no effect without '--engine ray'.")
    labels: dict[str, int] | None = None
    names: Sequence[str] | ClassList = () if classes is None else read_classes(classes)
    templates: Sequence[str] = ()
    if dataset is None:
        images, skipped = list_images(paths, root)
    else:
        found = read_folders(paths[0]) if dataset == "folders" else read_dataset(dataset, paths[0])
        images, skipped = [ImageFile(path_id(path), path) for path in found.paths], []
        labels = {image.id: int(label) for image, label in zip(images, found.labels, strict=True)}
        names, templates = found.class_names, () if dataset == "folders" else (found.template,)
    encoder = choice.make()
    before = FeatureStore.open(out).n if (out / MANIFEST).exists() else 0
    text = prompts.embed(encoder, names, templates) if classes is not None or labels is not None else None
    start = time.perf_counter()
    with _pass(engine, address, choice, encoder.dim) as through, progress_bar("encoding", "images") as progress:
        store, undecoded = encode_to_store(
            out, encoder, images, text, batch_size=choice.encode_batch, workers=choice.workers, shard_size=shard_size,
            labels=labels, dataset=None if dataset == "folders" else dataset, progress=progress, through=through,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    skipped = [*skipped, *undecoded]
    for one in skipped:
        note(f"skipped {one.id}: {one.reason}")
    if not store.n:
        raise InputError(f"None of the {len(skipped)} images can be used; see the reasons above.")
    new = store.n - before
    speed = f"{new / seconds:.1f} images/s"
    emit(
        store=out, images=store.n, new=new, encoder=encoder.id, skipped=[list(one) for one in skipped], seconds=seconds
    )
    say(f"{out} holds {store.n} images ({new} new) by {encoder.id}; {len(skipped)} skipped; {seconds:.1f} s, {speed}")
    return 1 if strict and skipped else 0


@contextmanager
def _pass(
    engine: str, address: str | None, choice: EncoderChoice, dim: int
) -> Iterator[Callable[[Sequence[ImageFile]], Iterable[Encoded]] | None]:
    """Yield what images are encoded by on Ray, or None where that is this process."""
    if engine == "local":
        yield None
        return
    from moontide.engine.ray import connect, disconnect

    started = connect(address, choice.workers)
    try:
        from moontide.engine.images import encode_on_ray

        yield lambda images: encode_on_ray(
            images, dim, choice.encoder, choice.device, choice.autocast, batch_size=choice.encode_batch,
            workers=choice.workers,
        )  # fmt: skip
    finally:
        if started:
            disconnect()
