"""The figures of a report, with matplotlib (the extra `plot`): gains, curves along an option, accuracy against time."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moontide.errors import FileError, missing_extra
from moontide.registry import method_type
from moontide.report.grids import grouped, of_backbone, scenario_title, table_name
from moontide.report.results import Cell, Row, Table, column_title
from moontide.report.stats import half_width

STYLE = {
    "font.size": 9, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9, "axes.grid": True, "grid.color": "#e4e4e4", "grid.linewidth": 0.6, "axes.axisbelow": True,
    "legend.frameon": False, "svg.hashsalt": "moontide", "figure.constrained_layout.use": True,
}  # fmt: skip
# Okabe and Ito's colours, told apart by colour-blind readers too; markers tell them apart in print.
OURS = "#0072B2"
COLOURS = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8c6d31", "#5254a3", "#637939", "#7f7f7f")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">", "*")
WIDTH, HEIGHT, ACROSS = 2.6, 2.3, 4  # of a panel in inches, and panels in a row


@dataclass(frozen=True)
class Figure:
    """A drawn figure: its name, what it shows, and its bytes."""

    name: str
    caption: str
    svg: bytes
    pdf: bytes


class Curve(NamedTuple):
    """A curve from elsewhere, such as one read off a figure of the paper; empty fields match everything."""

    option: str
    title: str
    dataset: str
    scenario: str
    points: list[tuple[float, float]]  # value of the option, accuracy in %


def read_curves(path: Path) -> list[Curve]:
    """Read curves from a CSV file with the columns option, title, dataset, scenario, value and accuracy.

    >>> read_curves(Path("no-such-file.csv"))
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no-such-file.csv with the curves.
    """
    found: dict[tuple[str, str, str, str], list[tuple[float, float]]] = {}
    try:
        with open(path, encoding="utf-8", newline="") as handle:
            for row in csv.DictReader(handle):
                words = (row["option"], row["title"], row["dataset"] or "", row["scenario"] or "")
                found.setdefault(words, []).append((float(row["value"]), float(row["accuracy"])))
    except FileNotFoundError:
        raise FileError(f"There is no file {path} with the curves.") from None
    except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
        raise FileError(
            f"{path} must have the columns option, title, dataset, scenario, value and accuracy, with numbers in the "
            f"last two ({error})."
        ) from None
    return [Curve(*words, sorted(points)) for words, points in found.items()]


def figures(tables: Sequence[Table], curves: Sequence[Curve] = ()) -> list[Figure]:
    """Draw every figure for which the results have data; curves along an option show the paper's numbers too.

    >>> from moontide.report.results import example
    >>> [figure.name for figure in figures(example())]
    ['batch-64-clip_vit_b16-gain', 'batch-64-clip_vit_b16-batch-time']
    """
    try:
        import matplotlib
    except ImportError:
        raise missing_extra("matplotlib", "plot", "Drawing the figures of a report") from None
    matplotlib.use("Agg")
    with matplotlib.rc_context(STYLE):
        return [*_gains(tables), *_sweeps(tables, curves), *_scatters(tables)]


def _panels(count: int, height: float = HEIGHT) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    across = min(count, ACROSS)
    down = -(-count // across)
    figure, axes = plt.subplots(down, across, figsize=(WIDTH * across + 1.2, height * down + 0.4), squeeze=False)
    flat = list(axes.ravel())
    for spare in flat[count:]:
        spare.set_visible(False)
    return figure, flat[:count]


def _save(figure: Any, name: str, caption: str) -> Figure:
    import matplotlib.pyplot as plt

    made = {}
    for kind in ("svg", "pdf"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata={"Date" if kind == "svg" else "CreationDate": None})
        made[kind] = buffer.getvalue()
    plt.close(figure)
    return Figure(name, caption, **made)


def _style(titles: Iterable[str]) -> dict[str, dict[str, str]]:
    """Choose a colour and a marker per title; those of MOON and zero-shot are always the same."""
    styles = {"MOON": {"color": OURS, "marker": "o"}, "zero-shot": {"color": "#555555", "marker": "x"}}
    others = [title for title in dict.fromkeys(titles) if title not in styles]
    for number, title in enumerate(others):
        styles[title] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    return styles


def _mean(cells: Sequence[Cell], of: Callable[[Cell], Any]) -> tuple[float, float]:
    parts = [of(cell) for cell in cells]
    return float(np.mean([part.mean() for part in parts])), half_width(*parts) or 0.0


def _gains(tables: Sequence[Table]) -> Iterable[Figure]:
    """Gain over zero-shot by method, one panel per scenario."""
    for group in grouped([t for t in tables if not t.timing], ("setting", "batch_size")):
        rows = [row for row in group[0].rows if row.vary is None and row.method != "zero_shot"]
        if not rows:
            continue
        figure, axes = _panels(len(group), 0.9 + 0.28 * len(rows))
        for axis, table in zip(axes, group, strict=True):
            for height, row in enumerate(reversed(rows)):
                cells = table.mean_cells(row)
                if cells:
                    gain, half = _mean(cells, lambda cell: cell.gain)
                    colour = OURS if row.ours else "#7f7f7f"
                    axis.errorbar(gain, height, xerr=half, fmt="o", color=colour, capsize=2.5, markersize=5)
                    axis.annotate(
                        f"{gain:+.1f}", (gain, height), (0, 5), textcoords="offset points", ha="center", fontsize=7
                    )
            axis.axvline(0, color="#333333", linewidth=0.8)
            axis.set_yticks(range(len(rows)), [row.title for row in reversed(rows)])
            axis.set_ylim(-0.6, len(rows) - 0.3)
            axis.margins(x=0.15)
            axis.set_title(scenario_title(table))
            axis.set_xlabel("points over zero-shot")
            if axis is not axes[0] and axes.index(axis) % ACROSS:
                axis.tick_params(labelleft=False)
        caption = "Gain over zero-shot on the same samples, mean over datasets with its 95 % bootstrap interval"
        yield _save(figure, table_name(group[0], "gain"), f"{caption}, {group[0].suite}{of_backbone(group[0])}.")


def _sweeps(tables: Sequence[Table], others: Sequence[Curve]) -> Iterable[Figure]:
    """Accuracy against the value of an option, one panel per scenario and dataset."""
    for group in grouped(list(tables), ()):
        for option in dict.fromkeys(row.vary for table in group for row in table.rows if row.vary):
            panels = [(table, column) for table in group for column in table.columns]
            figure, axes = _panels(len(panels))
            styles = _style(row.title for table in group for row in table.rows if row.vary == option)
            for axis, (table, column) in zip(axes, panels, strict=True):
                _curves(axis, table, column, option, styles)
                _beside(axis, table, column, option, styles, others)
            handles = {label: h for axis in axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
            figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
            caption = f"Accuracy by {option} with 95 % bootstrap bands, {group[0].suite}{of_backbone(group[0])}."
            yield _save(figure, table_name(group[0], f"{option}-curve", sizes=False), caption)


def _curves(axis: Any, table: Table, column: str, option: str, styles: dict[str, dict[str, str]]) -> None:
    curves: dict[str, list[tuple[float, Row]]] = {}
    for row in table.rows:
        if row.vary == option and (row, column) in table.cells:
            curves.setdefault(row.title, []).append((row.value, row))
        if row.method == "zero_shot" and (row, column) in table.cells:
            level = table.cells[row, column].accuracy.mean()
            axis.axhline(level, color="#555555", linestyle="--", linewidth=1, label="zero-shot")
    for title, points in curves.items():
        points = sorted(point for point in points if math.isfinite(point[0]))
        x = [value for value, _ in points]
        y, half = zip(*(_mean([table.cells[row, column]], lambda c: c.accuracy) for _, row in points), strict=True)
        axis.plot(x, y, label=title, markersize=4, linewidth=1.4, **styles[title])
        low, high = np.subtract(y, half), np.add(y, half)
        axis.fill_between(x, low, high, color=styles[title]["color"], alpha=0.15, linewidth=0)
        if max(x) / min(x) > 50:
            _log_scale(axis)
        else:
            axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title(f"{column_title(column)}, {scenario_title(table)}")
    axis.set_xlabel(option)
    axis.set_ylabel("accuracy (%)")


def _beside(
    axis: Any, table: Table, column: str, option: str, styles: dict[str, dict[str, str]], others: Sequence[Curve]
) -> None:
    """Draw the paper's number, if there is one, at the default of the option, and the curves that were given."""
    for row in dict.fromkeys(row._replace(options="{}", vary=None) for row in table.rows if row.vary == option):
        printed = table.paper_values(row, [[column]])[1][0]
        if printed is not None and row.title in styles:
            default = method_type(row.method).specs()[option].default
            axis.plot([default], [printed], "*", markersize=9, color=styles[row.title]["color"], label="the paper")
    for curve in others:
        fits = curve.dataset in ("", column) and curve.scenario in ("", table.scenario["id"])
        if curve.option == option and fits:
            axis.plot(
                *zip(*curve.points, strict=True), linestyle=":", linewidth=1.4, color="#000000", label=curve.title
            )


def _log_scale(axis: Any) -> None:
    from matplotlib.ticker import NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_minor_formatter(NullFormatter())


def _scatters(tables: Sequence[Table]) -> Iterable[Figure]:
    """Accuracy against time, one panel per scenario."""
    for group in grouped(list(tables), ("setting",)):
        rows = [row for row in group[0].rows if row.vary is None]
        if len(rows) < 2:
            continue
        figure, axes = _panels(len(group))
        styles = _style(row.title for row in rows)
        for axis, table in zip(axes, group, strict=True):
            for row in rows:
                cells = table.mean_cells(row)
                if cells:
                    x = 1000 * float(np.mean([cell.seconds for cell in cells]))
                    y, half = _mean(cells, lambda cell: cell.accuracy)
                    axis.errorbar(x, y, yerr=half, linestyle="none", markersize=6, label=row.title, **styles[row.title])
            _log_scale(axis)
            axis.set_title(f"B = {table.scenario.get('batch_size', 'all')}, {scenario_title(table)}")
            axis.set_xlabel("ms a run")
            axis.set_ylabel("accuracy (%)")
        handles = {label: h for axis in axes for h, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
        caption = "Accuracy against median time of a run (a whole stream online), means over datasets"
        setting = group[0].scenario["setting"]
        name = table_name(group[0], setting, "time", sizes=False)
        yield _save(figure, name, f"{caption}, {group[0].suite}{of_backbone(group[0])}.")
