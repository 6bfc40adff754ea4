"""`moontide demo`: show what the package does, on photographs and simulated features, without a model hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moontide.cli.common import note, percent, progress_bar, table_console
from moontide.cli.output import emit
from moontide.errors import FileError, MissingExtraError, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moontide.demo import Scores


def demo(
    *,
    images: Annotated[
        Path, Parameter(help="A folder with one sub-folder of photographs per class, named after the class.")
    ] = Path("examples/clothing"),
    out: Annotated[Path, Parameter(help="The folder for the report and the figure; created if needed.")] = Path("out"),
    batches: Annotated[int, Parameter(help="Number of batches of simulated features.")] = 12,
) -> None:
    """Label photographs and simulated features with zero-shot, MOON and TIDE, and show the accuracy of each.

    The photographs are one task in which all classes are present; each simulated batch holds few classes. For example:

        moontide demo --out out
    """
    from moontide.demo import BATCH, CANDIDATES, PRESENT, draw, simulated_batches
    from moontide.encoders.loading import TINY

    if batches < 1:
        raise OptionError(f"'--batches' must be at least 1. Got {batches} instead.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"The folder {out} cannot be created: {error.strerror}.") from error
    report, figure, written = out / "report.html", out / "accuracy.png", {}
    parts: dict[str, Sequence[Scores]] = {}
    try:
        found = _photographs(images, report)
        written[report] = "the photographs with their labels by TIDE: open it in a browser"
        parts[f"Photographs as one task, {found.classes} classes, encoder tiny (not CLIP)"] = [found]
        print(f"The photographs are encoded by tiny: {TINY}, and much weaker than CLIP.")
    except (MissingExtraError, FileError) as error:
        note(f"{error} The demo continues without photographs.")
    present = f"{PRESENT[0]} to {PRESENT[1]} of {CANDIDATES} classes present"
    title = f"Simulated features like CLIP's (no photographs), batches of {BATCH}, {present}"
    parts[title] = simulated_batches(batches)
    for name, tasks in parts.items():
        _print(name, tasks)
    emit(tasks={name: [task._asdict() for task in tasks] for name, tasks in parts.items()})
    try:
        draw(figure, parts)
        written[figure] = "these accuracies as a bar chart"
    except MissingExtraError as error:
        note(str(error))
    emit(written={str(path): what for path, what in written.items()})
    print("\nWhere to look:")
    for path, what in written.items():
        print(f"  {path}: {what}")
    print("What to type next:")
    print('  moontide classify FOLDER --classes "cat, dog, bird" --encoder tiny --report report.html')
    print("  moontide adapt --help      for your own embeddings; README.md has the rest")


def _photographs(folder: Path, report: Path) -> Scores:
    """Label all photographs together, write the report, and return the accuracies."""
    from moontide.classify import classify
    from moontide.demo import scores
    from moontide.encoders import encoder
    from moontide.encoders.prompts import embed_classes
    from moontide.encoders.sources import list_images

    listing = list_images([folder])
    names = sorted({image.path.parent.name.replace("_", " ") for image in listing.images})
    tiny = encoder("tiny")
    with progress_bar("encoding", "images") as progress:
        found = classify(listing, embed_classes(tiny, names), tiny, progress=progress)
    if found.truth is None:
        raise FileError(f"{folder} must have one sub-folder of photographs per class.")
    found.report(report)
    return scores(found.task, found.truth, found.result)


def _print(title: str, tasks: Sequence[Scores]) -> None:
    from rich import box
    from rich.table import Table

    from moontide.demo import LOOKS, means

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("samples", "classes there", *LOOKS):
        table.add_column(column, justify="right")
    for task in tasks:
        table.add_row(str(task.samples), str(task.classes), *map(percent, task.accuracies))
    if len(tasks) > 1:
        table.add_section()
        table.add_row("mean", "", *map(percent, means(tasks)))
    print(f"\n{title}")
    table_console().print(table)
