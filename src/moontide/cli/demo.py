"""`moontide demo`: what the package does, on photographs and on simulated features, without any model hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moontide.cli.common import note, percent, progress_bar, table_console
from moontide.errors import FileError, MissingExtraError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moontide.demo import Batch


def demo(
    *,
    images: Annotated[
        Path, Parameter(help="A folder with one sub-folder of photographs a class, called as the class.")
    ] = Path("examples/clothing"),
    out: Annotated[Path, Parameter(help="The folder for the report and the figure; made if it is not there.")] = Path(
        "out"
    ),
    batches: Annotated[int, Parameter(help="Batches of each part.")] = 12,
) -> None:
    """Label batches that hold few of the candidate classes, zero-shot and with MOON, and show both.

    First on photographs, then on simulated features. For example:

        moontide demo --out out
    """
    from moontide.demo import BATCH, CANDIDATES, PRESENT, draw, simulated_batches
    from moontide.encoders.loading import TINY
    from moontide.methods.moon import MOON

    if batches < 1:
        raise OptionError(f"'--batches' must be at least 1. Got {batches} instead.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"The folder {out} cannot be made: {error.strerror}.") from error
    report, figure, written = out / "report.html", out / "accuracy.png", []
    low, high = PRESENT
    print(f"{batches} batches a table, of up to {BATCH} samples that belong to {low} to {high} of the classes.")
    parts: dict[str, Sequence[Batch]] = {}
    try:
        classes, drawn = _photographs(images, report, batches)
        written.append(report)
        parts[f"Photographs, {classes} classes, encoder tiny (not CLIP)"] = drawn
        print(f"The photographs are encoded by tiny: {TINY}, and much weaker than CLIP.")
    except (MissingExtraError, FileError) as error:
        note(f"{error} The demo goes on without photographs.")
    parts[f"Simulated features like CLIP's (no photographs), {CANDIDATES:,} classes"] = simulated_batches(
        MOON(), batches
    )
    for title, drawn in parts.items():
        _print(title, drawn)
    try:
        draw(figure, parts, "MOON")
        written.append(figure)
    except MissingExtraError as error:
        note(str(error))
    for path in written:
        print(f"wrote {path}")


def _photographs(folder: Path, report: Path, runs: int) -> tuple[int, Sequence[Batch]]:
    """Count the classes, label skewed batches of the photographs, and write the page of all of them."""
    from moontide.classify import classify
    from moontide.demo import drawn_batches
    from moontide.encoders import encoder
    from moontide.encoders.prompts import embed_classes
    from moontide.encoders.sources import list_images
    from moontide.methods.moon import MOON

    listing = list_images([folder])
    names = sorted({image.path.parent.name.replace("_", " ") for image in listing.images})
    tiny = encoder("tiny")
    with progress_bar("encoding", "images") as progress:
        found = classify(listing, embed_classes(tiny, names), tiny, method=MOON(), progress=progress)
    if found.truth is None:
        raise FileError(f"{folder} must have one sub-folder of photographs a class.")
    found.report(report)
    return len(names), drawn_batches(MOON(), found.task, found.truth, folder.name, runs)


def _print(title: str, batches: Sequence[Batch]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("batch", "samples", "classes in it", "zero-shot", "MOON", "gain"):
        table.add_column(column, justify="right")
    for number, batch in enumerate(batches, 1):
        scores = percent(batch.zero_shot), percent(batch.adapted), f"{100 * batch.gain:+.2f}"
        table.add_row(str(number), str(batch.samples), str(batch.classes), *scores)
    before, now = (
        sum(share) / len(batches) for share in zip(*((b.zero_shot, b.adapted) for b in batches), strict=True)
    )
    table.add_section()
    table.add_row("mean", "", "", percent(before), percent(now), f"{100 * (now - before):+.2f}")
    table_console().print(table)
