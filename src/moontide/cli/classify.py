"""`moontide classify`: label images with class names."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from moontide.cli.common import NO_CHOICE, BatchSize, Choice, note, print_summary, progress_bar
from moontide.cli.encode import (
    NO_ENCODER_CHOICE,
    NO_PROMPT_CHOICE,
    PROMPTS,
    EncoderChoice,
    PromptChoice,
    Root,
    Strict,
)
from moontide.errors import OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moontide.classify import Classified
    from moontide.encoders.sources import Listing
    from moontide.store.features import FeatureStore


def classify(
    paths: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="Images: folders, patterns such as 'photos/**/*.jpg', files, lists of paths (.txt, or the column "
            "'path' of a .csv or .parquet), .tar archives; or one store that 'moontide encode' made.",
        ),
    ],
    /,
    *,
    classes: Annotated[
        str | None,
        Parameter(
            help="Class names: a comma-separated list, or a text file with one name a line (else the store's).",
            group=PROMPTS,
        ),
    ] = None,
    prompts: PromptChoice = NO_PROMPT_CHOICE,
    encoder: EncoderChoice = NO_ENCODER_CHOICE,
    choice: Choice = NO_CHOICE,
    batch_size: BatchSize = None,
    root: Root = None,
    out: Annotated[
        Path | None,
        Parameter(help="Where to write the labels: a .csv, .jsonl or .parquet (else they are printed as CSV)."),
    ] = None,
    report: Annotated[
        Path | None, Parameter(help="Where to write a page with the pictures, what changed and why: an .html.")
    ] = None,
    strict: Strict = False,
) -> int:
    """Label images with the class names that fit best, all images seen together, or in batches with --batch-size.

    Images that cannot be decoded are named and left out. Where every folder is called as a class, folder names count
    as the truth, to score the labels and for nothing else. For example:

        moontide classify photos/ --classes "tabby cat, golden retriever, espresso" --report report.html
        moontide classify 'photos/**/*.jpg' --classes names.txt --template "a sketch of a {}" --out labels.csv
        moontide classify store/ --method stata --out labels.parquet
    """
    from moontide.classify import TABLES
    from moontide.encoders.sources import list_images
    from moontide.store.features import MANIFEST, FeatureStore
    from moontide.store.files import check_output, read_class_names

    solver = choice.make()
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"'--batch-size' must be at least 1. Got {batch_size} instead.")
    for path, kinds in ((out, TABLES), (report, (".html",))):
        if path is not None:
            check_output(path, kinds)
    names = None if classes is None else read_class_names(classes)
    run = {"method": solver, "batch_size": batch_size, "device": encoder.device}
    if any((Path(path) / MANIFEST).is_file() for path in paths):
        if len(paths) > 1 or root is not None:
            raise OptionError("A store must be the only path, without '--root'; classify stores and images one by one.")
        found = _from_store(FeatureStore.open(paths[0]), names, prompts, encoder, run)
    elif names is None:
        raise OptionError("'--classes' must say which names the images can get: a comma-separated list, or a file.")
    else:
        found = _from_images(list_images(paths, root), names, prompts, encoder, run)
    for one in found.skipped:
        note(f"skipped {one.id}: {one.reason}")
    if out is None:
        found.write_table(sys.stdout.buffer, ".csv")
    else:
        found.save(out)
        note(f"wrote {out}")
    if report is not None:
        found.report(report)
        note(f"wrote {report}")
    with redirect_stdout(sys.stderr if out is None else sys.stdout):
        print(f"images     {len(found.images)} labelled, {len(found.skipped)} skipped")
        print_summary(found.comparison, found.result, found.task)
    return 1 if strict and found.skipped else 0


def _from_images(
    listing: Listing, names: Sequence[str], prompts: PromptChoice, choice: EncoderChoice, run: dict[str, Any]
) -> Classified:
    from moontide.classify import classify as classify_images

    encoder = choice.make()
    text = prompts.embed(encoder, names)
    with progress_bar("encoding", "images") as progress:
        return classify_images(
            listing, text, encoder, encode_batch=choice.encode_batch, workers=choice.workers, progress=progress, **run
        )


def _from_store(
    store: FeatureStore, names: Sequence[str] | None, prompts: PromptChoice, choice: EncoderChoice, run: dict[str, Any]
) -> Classified:
    from moontide.classify import check_maker, classify_store
    from moontide.store.files import check_device

    check_device(choice.device)
    if names is None:
        if (prompts, replace(choice, device="cpu")) != (NO_PROMPT_CHOICE, NO_ENCODER_CHOICE):
            raise OptionError("Options of prompts and encoder have no effect on a store without '--classes'; add it.")
        return classify_store(store, **run)
    if choice.encoder == NO_ENCODER_CHOICE.encoder:
        choice = replace(choice, encoder=store.origin.encoder)
    encoder = choice.make()
    check_maker(store, encoder)
    return classify_store(store, prompts.embed(encoder, names), **run)
