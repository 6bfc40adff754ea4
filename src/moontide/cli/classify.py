"""`moontide classify`: label images with class names."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from moontide.cli.answers import NO_ANSWER_CHOICE, NO_SORT_CHOICE, AnswerChoice, SortChoice
from moontide.cli.common import (
    NO_CHOICE,
    BatchSize,
    Choice,
    check_not_input,
    note,
    print_answers,
    print_groups,
    print_summary,
    progress_bar,
)
from moontide.cli.encoder import (
    IMAGES,
    NO_ENCODER_CHOICE,
    NO_PROMPT_CHOICE,
    NO_SOURCE_CHOICE,
    ClassNames,
    EncoderChoice,
    PromptChoice,
    SourceChoice,
    Strict,
)
from moontide.cli.given import NO_NAMES_GIVEN, Given, GivenNames, GroupBy
from moontide.cli.output import counted, emit, output, say
from moontide.errors import OptionError, without_credentials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moontide.classify import Classified
    from moontide.encoders.base import Encoder
    from moontide.encoders.places import ImageFile
    from moontide.encoders.sources import Listing
    from moontide.store.classes import ClassList
    from moontide.store.features import FeatureStore


ImagesOrStore = Annotated[
    tuple[str, ...], Parameter(negative="", help=f"{IMAGES}; or one store that 'moontide encode' made.")
]


def classify(
    paths: ImagesOrStore,
    /,
    *,
    classes: ClassNames = None,
    prompts: PromptChoice = NO_PROMPT_CHOICE,
    encoder: EncoderChoice = NO_ENCODER_CHOICE,
    choice: Choice = NO_CHOICE,
    batch_size: BatchSize = None,
    group_by: GroupBy = None,
    answers: AnswerChoice = NO_ANSWER_CHOICE,
    given: GivenNames = NO_NAMES_GIVEN,
    sources: SourceChoice = NO_SOURCE_CHOICE,
    out: Annotated[
        Path | None,
        Parameter(
            help="Output file for the labels: a .csv, .jsonl, .json, .xlsx or .parquet (default: print them as CSV)."
        ),
    ] = None,
    report: Annotated[
        Path | None, Parameter(help="Output file for a page that shows the images, what changed and why: an .html.")
    ] = None,
    sort: SortChoice = NO_SORT_CHOICE,
    strict: Strict = False,
) -> int:
    """Label images with the class names that fit best. All images are labelled together, unless you set --batch-size.

    Images that cannot be decoded are reported and skipped. If every folder is named after a class, the folder names
    are taken as the true labels, and used only for scoring. For example:

        moontide classify photos/ --classes "tabby cat, golden retriever, espresso" --report report.html
        moontide classify photos/ --classes names.txt --known corrections.csv --report report.html
        moontide classify photos/ --classes names.txt --group-by folder --out labels.csv
        moontide classify 'photos/**/*.jpg' --classes names.txt --template "a sketch of a {}" --out labels.csv
        moontide classify photos/ --classes names.txt --unknown 0.1 --sort-into sorted/
        moontide classify store/ --method stata --out labels.parquet
    """
    from moontide.store.classes import read_classes

    _check(choice, given, answers, sort, batch_size, (out, report))
    names = None if classes is None else read_classes(classes)
    if names is not None:
        sort.check_names(names)
    run = {"method": choice.make(), "batch_size": batch_size, "device": encoder.device}
    found = _label(paths, names, prompts, encoder, group_by, given, sources, run)
    answered, more = answers.make(found.task, found.result, names, _none(given, found, paths, sources.root))
    found = replace(found, answers=answered, more=more)
    _show(found, out, report)
    _sort(found, sort)
    return 1 if strict and found.skipped else 0


def _check(
    choice: Choice,
    given: GivenNames,
    answers: AnswerChoice,
    sort: SortChoice,
    batch_size: int | None,
    outputs: tuple[Path | None, Path | None],
) -> None:
    """Refuse invalid combinations before anything is read."""
    from moontide.store.files import TABLES, check_output

    given.require(choice.make())
    answers.check()
    sort.check()
    if batch_size is not None and batch_size < 1:
        raise OptionError(f"'--batch-size' must be at least 1. Got {batch_size} instead.")
    for path, kinds in zip(outputs, (TABLES, (".html",)), strict=True):
        if path is not None:
            check_output(path, kinds)
            check_not_input(path, given.known, given.class_prior)


def _label(
    paths: Sequence[str],
    names: ClassList | None,
    prompts: PromptChoice,
    encoder: EncoderChoice,
    group_by: str | None,
    given: GivenNames,
    sources: SourceChoice,
    run: dict[str, Any],
) -> Classified:
    """Label the images of paths, or those of a store."""
    from moontide.store.features import MANIFEST, FeatureStore

    if any((Path(path) / MANIFEST).is_file() for path in paths):
        if len(paths) > 1 or sources.root is not None:
            raise OptionError("A store must be the only path, without '--root'; classify stores and images one by one.")
        return _from_store(FeatureStore.open(paths[0]), names, given, group_by, prompts, encoder, run)
    if names is None:
        raise OptionError("'--classes' must list the class names: a comma-separated list, or a file.")
    listing = sources.find(paths)
    run |= _inputs(given, group_by, listing.images, names.names, paths, sources.root)
    return _from_images(listing, names, given.names(names.names), prompts, encoder, run)


def _none(given: Given, found: Classified, paths: Sequence[str], root: Path | None) -> list[bool] | None:
    """Return which images are marked as none of the classes in a file of known labels."""
    from moontide.encoders.sources import other_names
    from moontide.store.inputs import read_none

    if given.known is None:
        return None
    return read_none(given.known, [image.id for image in found.images], other_names(found.images, paths, root))


def _sort(found: Classified, sort: SortChoice) -> None:
    """Put the images into folders, or rename them."""
    import os

    from moontide.encoders.places import ImageFile
    from moontide.sorting import apply, plan

    if sort.sort_into is None and sort.rename is None:
        return
    if any(type(image) is not ImageFile or image.offset is not None for image in found.images):
        raise OptionError("'--sort-into' and '--rename' need image files; unpack archives first.")
    columns, files = found.columns(), [image.path for image in found.images]
    moves = plan(files, columns["label"], columns["confidence"], sort.sort_into, copy=sort.copy, pattern=sort.rename)
    folder = sort.sort_into or Path(os.path.commonpath([os.path.realpath(path.parent) for path in files]))
    apply(moves, folder)
    emit(sorted_into=folder)
    done = "renamed {} in" if sort.sort_into is None else "sorted {} into"
    note(f"{done.format(counted(len(moves), 'image'))} {folder}; to reverse it: moontide undo {folder}")


def _inputs(
    given: Given,
    group_by: str | None,
    images: Sequence[ImageFile],
    names: Sequence[str],
    paths: Sequence[str] = (),
    root: Path | None = None,
) -> dict[str, Any]:
    """Return known labels, class balance and groups in the library's form, before any image is encoded."""
    from moontide.encoders.sources import column_of, other_names
    from moontide.store.inputs import FOLDER, folders, read_class_prior, read_known

    ids: list[str] = [image.id for image in images]
    found: dict[str, Any] = {}
    if given.known is not None:
        known = read_known(given.known, ids, names, len(names), other_names(images, paths, root))
        found["known"] = {one: int(k) for one, k in zip(ids, known, strict=True) if k >= 0}
    if given.class_prior is not None:
        found["class_prior"] = read_class_prior(given.class_prior, names, len(names))
    if group_by == FOLDER:
        found["groups"] = dict(zip(ids, folders(ids), strict=True))
    elif group_by is not None and not paths:
        raise OptionError(f"A store has folders but no columns: use '--group-by folder'. Got {group_by!r}.")
    elif group_by is not None:
        found["groups"] = column_of(paths, group_by, root)
    return found


def _from_images(
    listing: Listing,
    names: ClassList,
    words: Sequence[str] | None,
    prompts: PromptChoice,
    choice: EncoderChoice,
    run: dict[str, Any],
) -> Classified:
    from moontide.classify import classify as classify_images
    from moontide.encoders.negatives import embed_negatives

    encoder = choice.make()
    text = prompts.embed(encoder, names)
    if words is not None:
        run["negatives"] = embed_negatives(encoder, words, text.templates)
    with progress_bar("encoding", "images") as progress:
        return classify_images(
            listing,
            text,
            encoder,
            encode_batch=choice.encode_batch,
            workers=choice.workers,
            fast=choice.fast,
            progress=progress,
            **run,
        )


def _from_store(
    store: FeatureStore,
    names: ClassList | None,
    given: GivenNames,
    group_by: str | None,
    prompts: PromptChoice,
    choice: EncoderChoice,
    run: dict[str, Any],
) -> Classified:
    from moontide.classify import check_maker, classify_store, located
    from moontide.core.devices import check_device
    from moontide.encoders.negatives import stored_negatives

    check_device(choice.device)
    if names is None and (prompts != NO_PROMPT_CHOICE or (given.negatives is None and not _is_default(choice))):
        raise OptionError("Prompt and encoder options have no effect on a store without '--classes'; add it.")
    own = store.class_names if names is None else names.names
    words = given.names(own)
    run |= _inputs(given, group_by, located(store.ids, store.origin.folder), own)

    @cache
    def encoder() -> Encoder:
        made = choice.of_store(store.origin).make()
        check_maker(store, made)
        return made

    classes = None if names is None else prompts.embed(encoder(), names)
    if words is not None:
        templates = store.origin.prompts if classes is None else classes.templates
        run["negatives"] = stored_negatives(store, encoder, words, templates)
    return classify_store(store, classes, **run)


def _is_default(choice: EncoderChoice) -> bool:
    return replace(choice, device="cpu") == NO_ENCODER_CHOICE


def _show(found: Classified, out: Path | None, report: Path | None) -> None:
    """Write the requested files and print the summary, on stderr if the table goes to standard output."""
    for one in found.skipped:
        note(f"skipped {one.id}: {one.reason}")
    if out is None and output().as_json:
        columns = found.columns()
        emit(labels=[dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    elif out is None:
        found.write_table(sys.stdout.buffer, ".csv")
    else:
        found.save(out)
        emit(out=out)
        note(f"wrote {out}")
    if report is not None:
        found.report(report)
        emit(report=report)
        note(f"wrote {report}")
    with redirect_stdout(sys.stderr if out is None and not output().as_json else sys.stdout):
        emit(images=len(found.images), skipped=[[without_credentials(one.id), one.reason] for one in found.skipped])
        say(f"images     {len(found.images)} labelled, {len(found.skipped)} skipped")
        if found.groups is not None:
            print_groups(found.group_comparisons)
        if found.answers is not None:
            print_answers(found.answers)
        print_summary(found.comparison, found.result, found.task, found.answers)
