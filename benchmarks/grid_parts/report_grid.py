"""Reports of the grid: the summary, the whole grid, biased texts, photographs, trust and the ablation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from grid_parts.ablations import ABLATIONS
from grid_parts.cells import Cell
from grid_parts.packs import PHOTOGRAPHS
from grid_parts.tables import gain, mean, table
from grid_parts.variants import name_of
from grid_parts.work import Results

MARGIN = 0.5  # points below which a loss counts as none
RIVALS = ("moon", "stata")
TRUSTED = ("zero_shot", "moon", "tide")
SCORES = {
    "zero_shot": "1 - max softmax",
    "MCM": "MCM",
    "moon": "MOON",
    "tide": "TIDE",
    "TIDE with negatives": "TIDE with negatives",
}


def _cells(results: Results, kind: Callable[[Cell], bool]) -> list[Cell]:
    return [cell for cell in results.cells("accuracy") if cell.pack != PHOTOGRAPHS and kind(cell)]


def clean(cell: Cell) -> bool:
    return not cell.noise


def biased(cell: Cell) -> bool:
    return bool(cell.noise)


def average(results: Results, cell: Cell, title: str) -> float:
    """Return the mean accuracy of a cell."""
    return float(np.mean(results.runs("accuracy", cell, title)))


def below(results: Results, cell: Cell, title: str = "tide") -> tuple[float, float]:
    """Return the difference of a method to zero-shot, and to the better of MOON and StatA, in a cell."""
    own = average(results, cell, title)
    rivals = max(average(results, cell, rival) for rival in RIVALS)
    return own - average(results, cell, "zero_shot"), own - rivals


def report_summary(results: Results, titles: Sequence[str]) -> str:
    cells = _cells(results, clean)
    groups = {
        "few classes there": [cell for cell in cells if cell.few],
        "most or all there": [cell for cell in cells if not cell.few],
        "all cells": cells,
    }
    rows = [
        [f"{name} ({len(group)} cells)", *(mean(average(results, cell, t) for cell in group) for t in titles)]
        for name, group in groups.items()
    ]
    parts = [table(["mean accuracy", *map(name_of, titles)], rows)]
    losses = [below(results, cell) for cell in cells]
    for words, index in (("zero-shot", 0), ("the better of MOON and StatA", 1)):
        count = sum(loss[index] < -MARGIN for loss in losses)
        share = 100 * count / len(cells)
        parts.append(f"- TIDE is more than {MARGIN} below {words} in {count} of {len(cells)} cells ({share:.1f} %).")
    for rival in ("zero_shot", *reversed(RIVALS)):
        gap = {cell: average(results, cell, "tide") - average(results, cell, rival) for cell in cells}
        worst = min(cells, key=lambda cell: gap[cell])
        parts.append(f"- Worst cell against {name_of(rival)}: {gap[worst]:+.1f} ({', '.join(worst.words)}).")
    return f"{parts[0]}\n\n" + "\n".join(parts[1:]) + f"\n\n{_by_pack(results, cells, titles)}"


def _by_pack(results: Results, cells: list[Cell], titles: Sequence[str]) -> str:
    rows = []
    for pack in dict.fromkeys(cell.pack for cell in cells):
        for words, few in (("few", True), ("most or all", False)):
            group = [cell for cell in cells if cell.pack == pack and cell.few == few]
            if group:
                numbers = [mean(average(results, cell, title) for cell in group) for title in titles]
                losses = [below(results, cell) for cell in group]
                counts = [sum(loss[index] < -MARGIN for loss in losses) for index in (0, 1)]
                rows.append([pack, words, len(group), *numbers, *counts])
    header = ["pack", "classes there", "cells", *map(name_of, titles), "cells below zero-shot", "below MOON or StatA"]
    return table(header, rows)


def report_cells(results: Results, titles: Sequence[str], kind: Callable[[Cell], bool]) -> str:
    """Return one row per cell: the accuracies, and TIDE less zero-shot with its interval and its worst run."""
    rows = []
    for cell in _cells(results, kind):
        tide, plain = (results.runs("accuracy", cell, title) for title in ("tide", "zero_shot"))
        to_plain, to_rivals = below(results, cell)
        marks = ("†" if to_plain < -MARGIN else "") + ("‡" if to_rivals < -MARGIN else "")
        numbers = [average(results, cell, title) for title in titles]
        classes = "few" if cell.few else "most or all"
        worst = f"{min(np.subtract(tide, plain)):+.1f}"
        rows.append([*cell.words, classes, len(tide), *numbers, gain([tide], [plain]), worst, marks])
    names = ["pack", "N", "classes", "balance", "there", "batches", *map(name_of, titles)]
    header = [*names, "TIDE above zero-shot (95 %)", "worst batch", ""]
    return (
        f"{table(header, rows)}\n\n† more than {MARGIN} below zero-shot. "
        f"‡ more than {MARGIN} below the better of MOON and StatA."
    )


def report_biased(results: Results, titles: Sequence[str]) -> str:
    cells = _cells(results, biased)
    groups = {"few": [c for c in cells if c.few], "most or all": [c for c in cells if not c.few]}
    rows = [
        [f"{name} ({len(group)} cells)", *(mean(average(results, cell, t) for cell in group) for t in titles)]
        for name, group in groups.items()
    ]
    means = table(["mean accuracy, classes there", *map(name_of, titles)], rows)
    return f"{means}\n\n{report_cells(results, titles, biased)}"


def report_photographs(results: Results, titles: Sequence[str]) -> str:
    cells = [cell for cell in results.cells("accuracy") if cell.pack == PHOTOGRAPHS]
    if not cells:
        return "Not measured: the encoder `tiny` is not installed."
    pack = results.packs[PHOTOGRAPHS]
    rows = [[len(pack.labels), len(pack.text), *(average(results, cells[0], title) for title in titles)]]
    return table(["photographs", "classes", *map(name_of, titles)], rows)


def pooled_error(results: Results, cell: Cell, title: str) -> float:
    """Return the calibration error of all samples of all batches of a cell, in percent."""
    gaps = np.sum(results.runs("accuracy", cell, title, "gaps"), axis=0)
    return float(100 * np.abs(gaps).sum() / sum(results.runs("accuracy", cell, title, "n")))


def report_trust(results: Results) -> str:
    cells = _cells(results, clean)
    errors = {(cell, title): pooled_error(results, cell, title) for cell in cells for title in TRUSTED}
    areas = {(cell, title): mean(results.runs("unknown", cell, title, "auroc")) for cell in cells for title in SCORES}
    rows = [
        [*cell.words, *(errors[cell, title] for title in TRUSTED), *(areas[cell, title] for title in SCORES)]
        for cell in cells
    ]
    clip = [cell for cell in cells if results.packs[cell.pack].model != "tiny"]
    # A score that some cells lack has no mean over them that could stand beside the others'.
    lacking = {t: [c for c in cells if np.isnan(areas[c, t]) and not np.isnan(areas[c, "tide"])] for t in SCORES}
    means = [
        [words, len(group), *(mean(errors[c, t] for c in group) for t in TRUSTED),
         *(None if set(lacking[t]) & set(group) else mean(areas[c, t] for c in group) for t in SCORES)]
        for words, group in (("all packs", cells), ("CLIP packs", clip))
    ]  # fmt: skip
    better = sum(errors[cell, "tide"] < errors[cell, "zero_shot"] for cell in cells)
    columns = [*(f"ECE {name_of(title)}" for title in TRUSTED), *(f"AUROC {words}" for words in SCORES.values())]
    return "\n\n".join(
        [
            table(["mean over cells", "cells", *columns], means),
            f"TIDE's calibration error is below zero-shot's in {better} of {len(cells)} cells "
            f"({100 * better / len(cells):.1f} %).",
            table(["pack", "N", "classes", "balance", *columns], rows),
        ]
    )


def report_ablation(results: Results) -> str:
    """Return the means over cells of TIDE and of TIDE without each part, and how far that is from the whole."""
    groups = {
        "few": [cell for cell in _cells(results, clean) if cell.few],
        "most or all": [cell for cell in _cells(results, clean) if not cell.few],
        "biased texts": _cells(results, biased),
    }
    everything = [cell for group in groups.values() for cell in group]
    rows = []
    for title in ("tide", *ABLATIONS):
        row: list[object] = [name_of(title)]
        for group in groups.values():
            row += [f"{mean(average(results, cell, title) for cell in group):.2f}"]
        change = {cell: average(results, cell, title) - average(results, cell, "tide") for cell in everything}
        plain = {cell: average(results, cell, title) - average(results, cell, "zero_shot") for cell in everything}
        worst = min(everything, key=lambda cell: change[cell])
        lost = sum(loss < -MARGIN for loss in plain.values())
        first, second = ([results.runs("accuracy", cell, t) for cell in everything] for t in (title, "tide"))
        ends = ["", ""] if title == "tide" else [gain(first, second), f"{change[worst]:+.1f} ({worst})"]
        rows.append([*row, *ends, lost])
    header = ["", *(f"{name} ({len(group)} cells)" for name, group in groups.items())]
    return table([*header, "change over all (95 %)", "worst cell", f"cells {MARGIN} below zero-shot"], rows)
