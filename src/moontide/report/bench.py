"""The report of a benchmark, made only from the records in a results folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moontide.errors import FileError, MissingExtraError
from moontide.metrics import tail_accuracy
from moontide.report.grids import Grid
from moontide.report.page import Section, page
from moontide.report.plots import figures, read_curves
from moontide.report.render import PREAMBLE, csv_text, latex, latex_text, markdown
from moontide.report.results import Table, collect
from moontide.report.stats import half_width
from moontide.report.tables import accuracy_grids, measure_grids, runtime_grids, summary_grids, sweep_grids
from moontide.store.disk import replacing
from moontide.store.tables import csv_row
from moontide.store.toml import read_toml, toml_files

DETAILS = (
    "suite", "version", "backbone", "setting", "batch_size", "scenario", "dataset", "method", "options", "label",
    "vary", "runs", "accuracy", "half_interval", "gain", "pooled", "worst_tenth", "calibration_error", "median_seconds",
    "paper", "gain_half_interval", "samples",
)  # fmt: skip


def write_report(results: str | Path, out: str | Path, curves: str | Path | None = None) -> list[Path]:
    """Write report.md, report.tex, report.html, the figures and the tables as CSV; return the paths.

    Without matplotlib the report has a note instead of figures. `curves` is a CSV file of further curves to draw.

    >>> write_report("no-such-folder", "report")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There are no results in no-such-folder; create some with 'moontide bench run'.
    """
    out = Path(out)
    found = collect(results)
    beside = [] if curves is None else read_curves(Path(curves))
    notes, sections = list(found.notes), []
    for suite in dict.fromkeys(table.suite for table in found.tables):
        tables = [table for table in found.tables if table.suite == suite]
        try:
            drawn = figures(tables, beside)
        except MissingExtraError as error:
            drawn, notes = [], [*found.notes, str(error)]
        first = [grid for kind in (accuracy_grids, summary_grids, sweep_grids, runtime_grids) for grid in kind(tables)]
        title = f"{_title(suite)} ({suite}, version {tables[0].version})"
        sections.append(Section(suite, title, [*first, *drawn, *measure_grids(tables)]))
    made = [f"{count} runs: {maker}" for maker, count in found.environments.most_common()]
    files = {
        "report.html": page(sections, notes, made).encode(),
        "report.md": _markdown(sections, notes, made).encode(),
        "report.tex": _latex(sections).encode(),
        "details.csv": details(found.tables).encode(),
    }
    for part in (part for section in sections for part in section.parts):
        if isinstance(part, Grid):
            files[f"tables/{part.name}.csv"] = csv_text(part).encode()
        else:
            files |= {f"figures/{part.name}.svg": part.svg, f"figures/{part.name}.pdf": part.pdf}
    for name, data in files.items():
        try:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(f"The report folder {out} cannot be created: {error.strerror}.") from error
        with replacing(out / name) as handle:
            handle.write(data)
    return [out / name for name in files if "/" not in name]


def _title(suite: str) -> str:
    path = toml_files("suites").get(suite)
    return suite if path is None else str(read_toml(path)["title"])


def _markdown(sections: Iterable[Section], notes: Iterable[str], made: Iterable[str]) -> str:
    parts = ["# Benchmark report", *(f"- {note}" for note in notes)]
    for section in sections:
        parts.append(f"## {section.title}")
        for part in section.parts:
            image = f"![{part.caption}](figures/{part.name}.svg)"
            parts.append(markdown(part) if isinstance(part, Grid) else image)
    return "\n\n".join([*parts, "## Made by", *(f"- {line}" for line in made)]) + "\n"


def _latex(sections: Iterable[Section]) -> str:
    parts = [PREAMBLE]
    for section in sections:
        parts.append(rf"\section*{{{latex_text(section.title)}}}")
        for part in section.parts:
            image = rf"\includegraphics[width=\linewidth]{{figures/{part.name}.pdf}}"
            figure = rf"\begin{{figure}}[htbp]\centering{image}\caption{{{latex_text(part.caption)}}}\end{{figure}}"
            parts.append(latex(part) if isinstance(part, Grid) else figure)
        parts.append(r"\clearpage")
    return "\n".join([*parts, r"\end{document}", ""])


def details(tables: Iterable[Table]) -> str:
    """Return every cell with all its measures as CSV, one line per cell.

    >>> from moontide.report.results import example
    >>> details(example()).splitlines()[2]
    'batch-64,1,clip_vit_b16,batch,64,very_low,imagenet,moon,{},,,4,75.0,0.0,25.0,75.0,75.0,10.0,0.075,82.8,0.0,64.0'
    """
    rows: list[list[Any]] = [list(DETAILS)]
    for table in tables:
        facts = table.scenario
        for (row, column), cell in table.cells.items():
            where = [
                table.suite,
                table.version,
                table.backbone,
                facts["setting"],
                facts.get("batch_size"),
                facts["name"],
            ]
            numbers = [
                cell.accuracy.mean(), half_width(cell.accuracy), cell.gain.mean(), cell.pooled,
                tail_accuracy(cell.accuracy), cell.calibration_error, cell.seconds,
                table.paper_values(row, [[column]])[1][0], half_width(cell.gain), cell.records[0]["n"],
            ]  # fmt: skip
            shown = [None if number is None or number != number else round(float(number), 6) for number in numbers]
            rows.append([*where, column, row.method, row.options, row.label, row.vary, len(cell.records), *shown])
    return "".join(map(csv_row, rows))
