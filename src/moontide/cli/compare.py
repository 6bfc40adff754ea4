"""`moontide compare`: compare several methods on one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moontide.cli.common import (
    NO_SOURCE,
    BatchSize,
    Features,
    Source,
    check_not_input,
    note,
    percent,
    progress_bar,
    table_console,
)
from moontide.cli.output import emit_whole

if TYPE_CHECKING:
    from moontide.evaluate import Outcome

UNKNOWN = "-"
NOTE = (
    "Seconds: one run in a separate process, after a warm-up on a few samples. Peak memory: what that run added to "
    "the memory of the process (on cuda, of the device), without inputs and libraries."
)


def compare(
    features: Features,
    /,
    *,
    methods: Annotated[str, Parameter(help="'all', or names separated by commas.")] = "all",
    batch_size: BatchSize = None,
    out: Annotated[Path | None, Parameter(help="Also write the table to this .csv or .jsonl.")] = None,
    source: Source = NO_SOURCE,
) -> int:
    """Run several methods with their default options on one file: accuracy, seconds, peak memory, changed predictions.

    Each method runs in a separate process; one that fails, or needs data that the file does not have, is listed with
    the reason. The exit status is 1 if no method ran. For example:

        moontide compare features.npz --methods moon,stata,transclip
    """
    from moontide.evaluate import Outcome, compare_methods
    from moontide.registry import method_names
    from moontide.store.disk import replacing
    from moontide.store.files import check_output
    from moontide.store.tables import write_table

    if out is not None:
        check_output(out, (".csv", ".jsonl"))
        check_not_input(out, features, source.text, source.labels)
    names = method_names() if methods == "all" else [name.strip() for name in methods.split(",")]
    with progress_bar("comparing") as progress:
        outcomes = compare_methods(features, names, batch_size=batch_size, progress=progress, **asdict(source))
    if out is not None:
        columns = {field.name: [getattr(outcome, field.name) for outcome in outcomes] for field in fields(Outcome)}
        with replacing(out) as handle:
            write_table(handle, columns, out.suffix)
        note(f"wrote {out}")
    emit_whole([asdict(outcome) for outcome in outcomes])
    print_table(outcomes)
    return 0 if any(outcome.status == "ran" for outcome in outcomes) else 1


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print a table of the methods that ran, and why the others did not.

    >>> from moontide.evaluate import Outcome
    >>> print_table([Outcome("tent", "skipped", reason="It needs the encoder.")])
    tent skipped: It needs the encoder.
    """
    from rich import box
    from rich.table import Table

    from moontide.memory import human

    ran = [outcome for outcome in outcomes if outcome.status == "ran"]
    if ran:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("method")
        for heading in ("accuracy", "seconds", "peak memory", "changed", "better", "worse"):
            table.add_column(heading, justify="right")
        for o in ran:
            numbers = [UNKNOWN if count is None else str(count) for count in (o.changed, o.better, o.worse)]
            share = UNKNOWN if o.accuracy is None else percent(o.accuracy)
            memory = UNKNOWN if o.peak_bytes is None else human(o.peak_bytes)
            table.add_row(o.method, share, f"{o.seconds:.3f}", memory, *numbers)
        table_console().print(table)
        print(NOTE)
    for outcome in outcomes[len(ran) :]:
        print(f"{outcome.method} {outcome.status}: {outcome.reason}")
