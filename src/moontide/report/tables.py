"""Tables in the paper's shape, as plain data; `render.py` writes them as Markdown, LaTeX, CSV and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from moontide.metrics import tail_accuracy
from moontide.report.grids import (
    SETTINGS,
    Grid,
    Line,
    Number,
    experiment,
    grouped,
    of_backbone,
    scenario_title,
    table_name,
)
from moontide.report.paper import paper
from moontide.report.results import Cell, Row, Table, column_title
from moontide.report.stats import half_width, sign_flip_p


def accuracy_grids(tables: Iterable[Table]) -> list[Grid]:
    """Return accuracy by method and dataset, one block per scenario, one grid per batch size of a suite.

    >>> from moontide.report.results import example
    >>> (grid,) = accuracy_grids(example())
    >>> for line in grid.blocks[0][1]:
    ...     print(line.title, round(line.numbers[0].value, 1))
    zero-shot 50.0
    the paper, and ours minus it 66.6
    MOON 75.0
    the paper, and ours minus it 82.8
    p, best against second 0.1
    """
    grids = []
    for group in grouped([t for t in tables if not t.timing], ("setting", "batch_size")):
        lines = [(scenario_title(table), lines) for table in group if (lines := _accuracy_lines(table))]
        if not lines:
            continue
        first = group[0]
        headings = [*map(column_title, first.columns), *first.averages]
        counts = [len(cell.records) for table in group for cell in table.cells.values()]
        runs = f"{min(counts)} to " * (min(counts) < max(counts)) + f"{max(counts)}"
        caption = (
            f"Top-1 accuracy in % (mean over {runs} runs, ± half the 95 % bootstrap interval, and the gain over "
            f"zero-shot on the same samples), {experiment(first)}."
        )
        grids.append(Grid(table_name(first, "accuracy"), caption, headings, lines))
    return grids


def _accuracy_lines(table: Table) -> list[Line]:
    rows = [row for row in table.rows if row.vary is None]
    if not rows or [row.method for row in rows] == ["zero_shot"]:
        return []
    shown = [*([column] for column in table.columns), *table.averages.values()]
    parts: list[dict[Row, list[Cell]]] = [
        {row: cells for row in rows if (cells := table.mean_cells(row, names))} for names in shown
    ]
    columns = [_rank({row: _number(cells) for row, cells in part.items()}) for part in parts]
    lines = []
    for row in rows:
        numbers = [column.get(row) for column in columns]
        lines += _with_paper(row, numbers, *table.paper_values(row, shown))
    tests = [_test(part) for part in parts]
    if any(p is not None for p in tests):
        printed = [None if p is None else Number(p, digits=4) for p in tests]
        lines.append(Line("p, best against second", printed, "test"))
    return lines


def _with_paper(row: Row, numbers: Sequence[Number | None], whose: str, printed: Sequence[float | None]) -> list[Line]:
    """Return the line of a method and, if the paper has numbers for it, a line with those."""
    lines = [Line(row.title, numbers, "ours" if row.ours else "method")]
    if any(value is not None for value in printed):
        pairs = zip(printed, numbers, strict=True)
        compared = [None if p is None else Number(p, gain=n.value - p if n else None) for p, n in pairs]
        lines.append(Line(f"{whose}, and ours minus it", compared, "paper"))
    return lines


def _number(cells: Sequence[Cell]) -> Number:
    value = float(np.mean([cell.accuracy.mean() for cell in cells]))
    gain = float(np.mean([cell.gain.mean() for cell in cells]))
    is_zero_shot = cells[0].records[0]["method"] == "zero_shot"
    return Number(value, half_width(*(cell.accuracy for cell in cells)), None if is_zero_shot else gain)


def _rank(column: dict[Row, Number]) -> dict[Row, Number]:
    """Mark the best and the second of a column; equal printed numbers share their rank."""
    values = sorted({round(number.value, 1) for number in column.values()}, reverse=True)[:2] if len(column) > 1 else []
    rank = {value: number for number, value in enumerate(values, 1)}
    return {row: number._replace(rank=rank.get(round(number.value, 1), 0)) for row, number in column.items()}


def _test(part: dict[Row, list[Cell]]) -> float | None:
    """Test the best against the second of a column on the runs that both have."""
    order = sorted(part.values(), key=lambda cells: -float(np.mean([cell.accuracy.mean() for cell in cells])))
    if len(order) < 2:
        return None
    differences = [a.paired(b) for a, b in zip(order[0], order[1], strict=True)]
    return None if any(d.size == 0 for d in differences) else sign_flip_p(*differences)


def summary_grids(tables: Iterable[Table]) -> list[Grid]:
    """Return the mean over datasets and scenarios by method and batch size, as in the paper's ablations.

    The paper's numbers are shown only if they are means over the same scenarios and the same datasets.

    >>> from moontide.report.results import example
    >>> summary_grids(example())  # it has one batch size only
    []
    """
    grids = []
    for suite in grouped([t for t in tables if not t.timing], ()):
        groups = [group for group in grouped(suite, ("setting", "batch_size")) if len(group) > 1]
        rows = list(dict.fromkeys(row for group in groups for table in group for row in table.rows if row.vary is None))
        if len(groups) < 2 or len(rows) < 2:
            continue
        first = suite[0]
        parts = {**({"ImageNet": ["imagenet"]} if "imagenet" in first.columns else {}), **first.averages}
        shown = [(group, names) for group in groups for names in parts.values() or [first.columns]]
        columns = [_rank(_over_scenarios(group, rows, names)) for group, names in shown]
        lines = []
        for row in rows:
            printed = [paper().summary([table.about(row) for table in group], names) for group, names in shown]
            numbers = [column.get(row) for column in columns]
            lines += _with_paper(row, numbers, "the paper", printed)
        sizes = [f"{SETTINGS[g[0].scenario['setting']]} of {g[0].scenario.get('batch_size', 'all')}" for g in groups]
        headings = [f"{size}, {title}" for size in sizes for title in parts] or sizes
        caption = f"Top-1 accuracy in %, mean over scenarios, {first.suite}{of_backbone(first)}."
        grids.append(Grid(table_name(first, "summary", sizes=False), caption, headings, [("", lines)]))
    return grids


def _over_scenarios(group: Sequence[Table], rows: Iterable[Row], names: Sequence[str]) -> dict[Row, Number]:
    """Return the mean over the scenarios of a group and some datasets, for the rows that have all of them."""
    found = {}
    for row in rows:
        cells = [table.mean_cells(row, names) for table in group]
        if all(cells):
            found[row] = _number([cell for part in cells for cell in part or ()])
    return found


MEASURES: tuple[tuple[str, Callable[[Cell], float], int], ...] = (
    ("mean", lambda cell: float(cell.accuracy.mean()), 1),
    ("pooled", lambda cell: cell.pooled, 1),
    ("top 5, pooled", lambda cell: cell.top5, 1),
    ("worst 10 %", lambda cell: tail_accuracy(cell.accuracy), 1),
    ("calibration error, pooled", lambda cell: cell.calibration_error, 1),
    ("ms a run", lambda cell: 1000 * cell.seconds, 1),
)


def measure_grids(tables: Iterable[Table]) -> list[Grid]:
    """Return further measures by method, as means over datasets: pooled and tail accuracy, calibration, time.

    >>> from moontide.report.results import example
    >>> [grid.headings for grid in measure_grids(example())]
    [['mean', 'pooled', 'top 5, pooled', 'worst 10 %', 'calibration error, pooled', 'ms a run']]
    """
    grids = []
    for group in grouped([t for t in tables if not t.timing], ("setting", "batch_size")):
        blocks = []
        for table in group:
            rows = [row for row in table.rows if row.vary is None]
            lines = []
            for row in rows if len(rows) > 1 else []:
                cells = table.mean_cells(row)
                if cells:
                    means = [(float(np.mean([f(c) for c in cells])), digits) for _, f, digits in MEASURES]
                    numbers = [None if math.isnan(value) else Number(value, digits=d) for value, d in means]
                    lines.append(Line(row.title, numbers, "ours" if row.ours else "method"))
            if lines:
                blocks.append((scenario_title(table), lines))
        if blocks:
            caption = (
                "Accuracy in % as the mean over runs, pooled over all samples, the same with any of the five most "
                "probable classes counted, and in the worst 10 % of runs; expected calibration error of all samples "
                f"together, in points; median milliseconds of a run. Means over datasets, {experiment(group[0])}."
            )
            grids.append(Grid(table_name(group[0], "measures"), caption, [name for name, _, _ in MEASURES], blocks))
    return grids


def sweep_grids(tables: Iterable[Table]) -> list[Grid]:
    """Return accuracy by the value of an option, as means over datasets, one grid per option.

    >>> from moontide.report.results import example
    >>> sweep_grids(example())  # it has none
    []
    """
    grids = []
    for group in grouped(list(tables), ()):
        options = dict.fromkeys(row.vary for table in group for row in table.rows if row.vary)
        for option in options:
            values = sorted({row.value for table in group for row in table.rows if row.vary == option})
            blocks = []
            for table in group:
                methods: dict[str, dict[float, Row]] = {}
                for row in table.rows:
                    if row.vary == option:
                        methods.setdefault(row.title, {})[row.value] = row
                lines = []
                for title, found in methods.items():
                    cells = [table.mean_cells(found[v]) if v in found else None for v in values]
                    lines.append(Line(title, [None if c is None else _number(c) for c in cells]))
                blocks.append((scenario_title(table), lines))
            caption = f"Top-1 accuracy in % by {option}, mean over datasets, {group[0].suite}{of_backbone(group[0])}."
            name = table_name(group[0], option, sizes=False)
            grids.append(Grid(name, caption, [f"{value:g}" for value in values], blocks))
    return grids


def _milliseconds(seconds: float | None) -> Number | None:
    return None if seconds is None else Number(1000 * seconds)


def runtime_grids(tables: Iterable[Table]) -> list[Grid]:
    """Return median milliseconds of a run by batch size and method, with the paper's from another machine.

    >>> from moontide.report.results import example
    >>> runtime_grids(example())  # it is no suite that measures time
    []
    """
    grids = []
    for group in grouped([t for t in tables if t.timing], ()):
        for column in dict.fromkeys(column for table in group for column in table.columns):
            rows = list(dict.fromkeys(row for table in group for row in table.rows))
            lines = []
            for table in group:
                cells = [table.cells.get((row, column)) for row in rows]
                first = next((cell for cell in cells if cell), None)
                if first is None:
                    continue
                times = [first.forward, *(None if cell is None else cell.seconds for cell in cells)]
                where = f", {table.scenario['device']}" if "device" in table.scenario else ""
                lines.append(Line(f"{first.records[0]['n']} samples{where}", list(map(_milliseconds, times))))
                size, methods = table.scenario.get("batch_size", 0), ["clip_forward", *(row.method for row in rows)]
                theirs = [paper().seconds.get((size, name)) if column == "imagenet" else None for name in methods]
                if any(theirs):
                    shown = list(map(_milliseconds, theirs))
                    lines.append(Line(f"the paper at {size}, NVIDIA RTX 4090", shown, "paper"))
            caption = (
                f"Median milliseconds of a run on {column_title(column)}{of_backbone(group[0])}, graph included; the "
                "encoder for the images of the batch and all class texts, where it was given."
            )
            name = table_name(group[0], "median", column, sizes=False)
            grids.append(Grid(name, caption, ["encoder", *(row.title for row in rows)], [("", lines)]))
    return grids
