"""Options that several commands have: where images come from, what encodes them, and how class names become prompts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from moontide.cli.common import CLASS_FILES
from moontide.encoders.base import DEFAULT
from moontide.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moontide.encoders.base import Encoder
    from moontide.encoders.prompts import EmbeddedClasses
    from moontide.encoders.sources import Listing
    from moontide.store.classes import ClassList
    from moontide.store.features import Origin

ENCODER, PROMPTS = Group("Encoder"), Group("Prompts")

IMAGES = (
    "Images: folders, patterns such as 'photos/**/*.jpg', files, lists of paths (.txt, or the column 'path' of a .csv "
    "or .parquet), .tar archives, .parquet and .arrow files or datasets with a column of images, videos"
)
Images = Annotated[tuple[str, ...], Parameter(negative="", help=f"{IMAGES}.")]
ClassNames = Annotated[
    str | None,
    Parameter(help=f"Class names: {CLASS_FILES}. Without this option a store's own names are used.", group=PROMPTS),
]
Strict = Annotated[
    bool, Parameter(negative="", show_default=False, help="Exit with status 1 if any image was skipped.")
]


@Parameter(name="*", group=ENCODER)
@dataclass(frozen=True)
class EncoderChoice:
    """Options for the encoder."""

    encoder: Annotated[
        str,
        Parameter(
            help="A hub id or folder of a CLIP, SigLIP or SigLIP2 model, openclip:ARCH/TAG, openclip:ARCH/CHECKPOINT, "
            "onnx:FOLDER, or tiny (to try things out offline: it is not CLIP but an ImageNet classifier with a name "
            "matcher)."
        ),
    ] = DEFAULT
    device: Annotated[str, Parameter(help="Device of the encoder: cpu, cuda, cuda:1 or mps.")] = "cpu"
    precision: Annotated[
        str,
        Parameter(
            help="Precision for images: auto, float32, float16 or bfloat16. Auto is half precision on a GPU and "
            "bfloat16 on a CPU that supports it if vectors stay the same (cosine 0.9999), otherwise float32."
        ),
    ] = "auto"
    runtime: Annotated[
        str,
        Parameter(
            help="Runtime for images on a CPU: auto, torch, channels-last (torch, for convolutional towers) or "
            "onnxruntime. Auto is the fastest, measured once per model if the images take 5 minutes or "
            "more, or with --benchmark; until then it is torch."
        ),
    ] = "auto"
    fast: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Decode JPEG files on the GPU, with slightly different vectors (cosine 0.998); stores record it.",
        ),
    ] = False
    encode_batch: Annotated[
        int | None, Parameter(help="Images per batch of the encoder (default: what suits the device).")
    ] = None
    workers: Annotated[
        int | None,
        Parameter(help="Processes that decode images (default: one per core with a GPU, half of that without)."),
    ] = None

    def make(self) -> Encoder:
        """Load the encoder."""
        from moontide.encoders import encoder

        for name, value in (("--encode-batch", self.encode_batch), ("--workers", self.workers)):
            if value is not None and value < 1:
                raise OptionError(f"'{name}' must be at least 1. Got {value} instead.")
        if self.fast and self.device == "cpu":
            raise OptionError("'--fast' needs a GPU; add '--device cuda', or leave '--fast' out.")
        return encoder(self.encoder, self.device, self.precision, self.runtime)

    def of_store(self, origin: Origin) -> EncoderChoice:
        """Return the choice for a store: its encoder and settings, unless the user names others."""
        named = self.encoder != NO_ENCODER_CHOICE.encoder
        precision = origin.precision if self.precision == "auto" else self.precision
        kind = (self.encoder if named else origin.reloads).partition(":")[0]
        same = not named or self.encoder in (origin.typed, origin.spec, origin.encoder)
        keeps = same and origin.runtime and (self.runtime, self.device) == ("auto", "cpu")
        return replace(
            self,
            encoder=self.encoder if named else origin.reloads,
            precision="auto" if kind == "onnx" else precision,
            runtime=origin.runtime if keeps else self.runtime,
            fast=self.fast or (origin.decoding == "fast" and self.device != "cpu"),
        )


@Parameter(name="*", group=PROMPTS)
@dataclass(frozen=True)
class PromptChoice:
    """Options that turn class names into prompts."""

    template: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="A prompt with {} for the class name, a dataset of the paper for its prompt, or 'ensemble'; repeated, "
            "the vectors are averaged (default: the encoder's prompt).",
        ),
    ] = ()
    descriptions: Annotated[
        Path | None, Parameter(help='Descriptions of each class: a JSON file, {"name": ["sentence", ...], ...}.')
    ] = None

    def embed(
        self, encoder: Encoder, names: Sequence[str] | ClassList, templates: Sequence[str] = ()
    ) -> EmbeddedClasses:
        """Embed class names and warn about doubtful ones; `templates` are used if the user sets none."""
        from moontide.encoders.prompts import embed_classes, find_templates, read_descriptions

        sentences = None if self.descriptions is None else read_descriptions(self.descriptions)
        classes = embed_classes(encoder, names, find_templates(self.template) or templates, sentences)
        for report in classes.reports:
            warnings.warn(report, UserWarning, stacklevel=2)
        return classes


@Parameter(name="*")
@dataclass(frozen=True)
class SourceChoice:
    """Options for the source of the images."""

    root: Annotated[
        Path | None,
        Parameter(
            help="The folder that paths in lists are relative to and must stay inside (default: that of the list)."
        ),
    ] = None
    allow_urls: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Download images that lists give as http or https addresses."),
    ] = False
    frame_step: Annotated[float, Parameter(help="Seconds between the frames taken from a video.")] = 1.0

    def find(self, paths: Sequence[str]) -> Listing:
        """List the images of paths."""
        from moontide.encoders.sources import list_images

        return list_images(paths, root=self.root, allow_urls=self.allow_urls, frame_step=self.frame_step)


NO_ENCODER_CHOICE, NO_PROMPT_CHOICE, NO_SOURCE_CHOICE = EncoderChoice(), PromptChoice(), SourceChoice()
