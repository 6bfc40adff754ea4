"""`moontide bench`: run the paper's experiments and report the results."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from moontide.cli.common import note, progress_bar, table_console
from moontide.cli.output import counted, emit, everywhere
from moontide.encoders.base import DEFAULT
from moontide.errors import OptionError, shorten

if TYPE_CHECKING:
    from moontide.bench.runner import RunCounts

RESULTS = Path("results")
VIEWS = 64  # views per image for MTA, as published
UNKNOWN = "-"

bench = App(name="bench", help="Run the paper's experiments (they can be stopped and resumed), and report the results.")


def run(
    suite: Annotated[str, Parameter(help="A suite of 'moontide bench list', or your own .toml file.")],
    /,
    *,
    data: Annotated[
        Path,
        Parameter(
            help="Features with labels: a file, a feature store, or a folder of them; see the docs for names. With "
            "'--dataset', images."
        ),
    ],
    dataset: Annotated[
        str | None,
        Parameter(
            help="The dataset of the paper whose images are in DATA, or 'folders' for one sub-folder per class; images "
            "are encoded first, into a store in the results folder."
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        Parameter(help="The encoder, as for 'moontide encode'; for methods that adapt it, that of the store."),
    ] = None,
    device: Annotated[str, Parameter(help="Device for methods and encoder: cpu, cuda, cuda:1 or mps.")] = "cpu",
    methods: Annotated[
        str | None,
        Parameter(help="Names or labels separated by commas, or 'all' (default: those of the suite)."),
    ] = None,
    runs: Annotated[int | None, Parameter(help="Most runs per scenario (default: the paper's, 1000 or 100).")] = None,
    jobs: Annotated[int, Parameter(help="Number of processes; with more than one, each uses one thread.")] = 1,
    out: Annotated[Path, Parameter(help="The results folder; runs that it contains are not repeated.")] = RESULTS,
) -> int:
    """Run a suite and write one line of JSON per run; after an interruption, the same command resumes it.

    Example:

    moontide bench run batch-64 --data features/ --methods zero_shot,stata,moon --runs 100 --jobs 2
    moontide bench run online-128 --data images/ --dataset oxford_pets --encoder openai/clip-vit-base-patch16
    """
    from moontide.bench.runner import run_suite
    from moontide.bench.suites import load_suite
    from moontide.core.devices import check_device
    from moontide.registry import method_type

    check_device(device)
    names = None if methods is None else [name.strip() for name in methods.split(",")]
    chosen = load_suite(suite).choose(names).shorten(runs)
    needs = {need for entry in chosen.entries for need in method_type(entry.name).needs}
    adapted = chosen.timing or "encoder" in needs  # otherwise it need not be loaded once there are features
    if dataset is None and not adapted:
        _refuse_encoder(encoder)
    if dataset is not None:
        encoder = encoder or DEFAULT
        data = _encoded(data, dataset, encoder, device, out, VIEWS if "views" in needs else None)
    with progress_bar(suite) as progress:
        counts = run_suite(
            chosen, data, out, jobs=jobs, progress=progress, device=device, encoder=encoder if adapted else None
        )
    return _sum_up(counts, out, chosen.name)


def _refuse_encoder(encoder: str | None) -> None:
    """Refuse an encoder that nothing would use."""
    if encoder is not None:
        raise OptionError(
            "'--encoder' has no effect: the features exist, and no method of this run adapts the encoder. "
            f"Got {shorten(encoder, 60)!r}; leave it out, or encode images with '--dataset'."
        )


def _sum_up(counts: RunCounts, out: Path, suite: str) -> int:
    """Print what was run and the table; return the exit status."""
    for reason in counts.skipped:
        note(f"skipped: {reason}")
    for reason, count in counts.failed.items():
        note(f"failed {counted(count, 'time')}: {reason}")
    note(f"{counted(counts.written, 'run')} done and {counts.found} found in {out}")
    emit(written=counts.written, found=counts.found, skipped=counts.skipped, failed=counts.failed, results=out)
    if counts.written + counts.found:
        _print(out, suite)
    return 1 if counts.failed or not counts.written + counts.found else 0


def _encoded(data: Path, dataset: str, encoder: str, device: str, out: Path, views: int | None) -> Path:
    """Encode the images of a dataset into a store in the results folder, or continue that store."""
    from moontide.cli.encode import PassChoice, encode
    from moontide.cli.encoder import EncoderChoice

    store = out / "features" / dataset
    encode((str(data),), out=store, choice=EncoderChoice(encoder, device), dataset=dataset, way=PassChoice(views=views))
    return store


def report(
    results: Annotated[Path, Parameter(help="A results folder of 'moontide bench run'.")] = RESULTS,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="The output folder (default: 'report' in the results folder).")] = None,
    curves: Annotated[
        Path | None,
        Parameter(
            help="Curves to draw for comparison, such as the paper's: a CSV file with the columns option, title, "
            "dataset, scenario, value, accuracy; an empty dataset or scenario fits all."
        ),
    ] = None,
) -> None:
    """Write report.md, report.tex, report.html and CSV files from the results, and from nothing else.

    Example:

    moontide bench report results/
    """
    from moontide.report.bench import write_report

    written = write_report(results, results / "report" if out is None else out, curves)
    for path in written:
        note(f"wrote {path}")
    emit(written=written)
    _print(results)


def _print(results: Path, suite: str | None = None) -> None:
    """Print the accuracies of one suite, or of all, as the report has them."""
    from rich import box
    from rich.table import Table

    from moontide.report.render import extent
    from moontide.report.results import collect
    from moontide.report.tables import accuracy_grids

    console, tables = table_console(), []
    for grid in accuracy_grids([table for table in collect(results).tables if suite in (None, table.suite)]):
        table = Table("scenario", "method", title=grid.caption, title_justify="left", box=box.SIMPLE_HEAD)
        for heading in grid.headings:
            table.add_column(heading, justify="right")
        rows = []
        for name, lines in grid.blocks:
            for i, line in enumerate(lines):
                cells = [UNKNOWN if n is None else f"{n.value:.{n.digits}f}{extent(n)}" for n in line.numbers]
                table.add_row("" if i else name, line.title, *cells)
                rows.append([name, line.title, *(None if n is None else n.value for n in line.numbers)])
            table.add_section()
        console.print(table)
        tables.append({"caption": grid.caption, "headings": grid.headings, "rows": rows})
    emit(tables=tables)


def list_suites() -> None:
    """List the suites: their scenarios, runs and methods."""
    from rich import box
    from rich.table import Table

    from moontide.bench.suites import load_suite, suite_names

    table = Table("suite", "what it is", "scenarios", "runs", "methods", box=box.SIMPLE_HEAD)
    found = []
    for suite in map(load_suite, suite_names()):
        scenarios, entries = suite.scenarios, suite.entries
        runs = sorted({scenario.runs for scenario in scenarios}, reverse=True)
        names = dict.fromkeys(entry.label or entry.name for entry in entries)
        rows = (str(len(scenarios)), ", ".join(map(str, runs)), ", ".join(names))
        table.add_row(f"{suite.name} v{suite.version}", suite.title, *rows)
        facts = {"title": suite.title, "scenarios": len(scenarios), "runs": runs, "methods": list(names)}
        found.append({"suite": suite.name, "version": suite.version, **facts})
    emit(suites=found)
    table_console().print(table)


for command, name in ((run, "run"), (report, "report"), (list_suites, "list")):
    bench.command(everywhere(command), name=name)
