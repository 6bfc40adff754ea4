"""Comparison of all methods that need only features: few classes, all classes, a stream, and harm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from grid_parts.cells import Cell, cells
from grid_parts.packs import Pack
from grid_parts.tables import table
from grid_parts.work import Results
from moontide.protocols import OnlineMethod
from moontide.registry import method_names, method_type
from moontide.report.results import TITLES

MARGIN = 0.5  # points below zero-shot from where a method does harm
STREAM = ("dirichlet 0.1", 16)  # order and batch size

# What a column is about: the title, and which cells of a pack it takes.
KINDS: dict[str, Callable[[Cell], bool]] = {
    "few of 64": lambda cell: cell.size == 64 and cell.classes is not None and cell.few,
    "all of 64": lambda cell: cell.size == 64 and cell.classes is None,
    "all of 1000": lambda cell: cell.classes is None and cell.size != 64,
}


def titles() -> tuple[str, ...]:
    """Return the methods that need nothing beyond features, zero-shot first and TIDE last."""
    names = [name for name in method_names() if not method_type(name).needs]
    order = list(TITLES)
    return tuple(sorted(names, key=lambda name: order.index(name) if name in order else -1))


def on_streams() -> tuple[str, ...]:
    """Return those that remember, and zero-shot and MOON, to see by how much that helps."""
    return tuple(t for t in titles() if issubclass(method_type(t), OnlineMethod) or t in ("zero_shot", "moon"))


def cells_of(packs: Iterable[Pack], kind: str) -> list[Cell]:
    """Return one cell of a kind for each pack that has any; of few classes 2-10, or 1-4 where these are not few."""
    found: dict[str, Cell] = {}
    for cell in cells(packs):
        if cell.imbalance or not KINDS[kind](cell) or (cell.classes and cell.classes[0] > 2):
            continue
        if cell.classes or cell.pack not in found:  # of several, the last of few classes and the first of all
            found[cell.pack] = cell
    return list(found.values())


def runs_of(cell: Cell, kind: str, runs: int) -> int:
    """Return how many batches are drawn where `runs` of a cell of the grid are."""
    if kind != "all of 1000":
        return max(1, runs // 4)
    return 1 if cell.size is None else max(1, runs // 40)  # of all samples at once there is one batch only


def report(results: Results, packs: Sequence[Pack]) -> str:
    """Return the table of means with harm, and one table per kind with a column for each pack."""
    groups = {kind: [c for c in cells_of(packs, kind) if c in results.cells("accuracy")] for kind in KINDS}
    found = [cell for group in groups.values() for cell in group]
    streams = results.cells("stream")
    rows = []
    for title in titles():
        gaps = {cell: gap for cell in found if not np.isnan(gap := gain(results, cell, title))}
        worst = min(gaps, key=lambda cell: gaps[cell])
        below = sum(gap < -MARGIN for gap in gaps.values())
        on = [results.runs("stream", cell, title) for cell in streams if title in on_streams()]
        streamed = float(np.mean([np.mean(runs) for runs in on])) if on and all(on) else None
        means = [float(np.mean([_average(results, cell, title) for cell in group])) for group in groups.values()]
        where = "–" if title == "zero_shot" else f"{gaps[worst]:+.1f} ({worst.pack}, {_kind(groups, worst)})"
        rows.append([TITLES.get(title, title), *means, streamed, where, f"{below} of {len(gaps)}"])
    heads = ["method", *KINDS, "a stream", "worst cell against zero-shot", "cells with harm"]
    parts = [table(heads, rows)]
    for kind, group in groups.items():
        own = [[TITLES.get(t, t), *(_average(results, cell, t) for cell in group)] for t in titles()]
        parts.append(f"**{kind}**\n\n" + table(["method", *(_head(cell) for cell in group)], own))
    parts.append(f"{counted(results, groups)} –: methods without a memory have no stream of their own.")
    return "\n\n".join(parts)


def gain(results: Results, cell: Cell, title: str) -> float:
    """Return the mean gain on zero-shot over the batches that a method has met, NaN where there are none."""
    plain = dict(zip(*(results.runs("accuracy", cell, "zero_shot", name) for name in ("run", "accuracy")), strict=True))
    own = dict(zip(*(results.runs("accuracy", cell, title, name) for name in ("run", "accuracy")), strict=True))
    both = [own[run] - plain[run] for run in own.keys() & plain.keys()]
    return float(np.mean(both)) if both else float("nan")


def counted(results: Results, groups: dict[str, list[Cell]]) -> str:
    """Describe the number of batches behind the means."""
    words = []
    for kind, group in groups.items():
        runs = [len(results.runs("accuracy", cell, title)) for cell in group for title in titles()]
        least, most = min(runs), max(runs)
        middle = round(float(np.median(runs)))
        words.append(f"{kind}: {least if least == most else f'{least} to {most}, {middle} in the median'}")
    return f"Batches per cell: {'; '.join(words)}; one stream."


def _kind(groups: dict[str, list[Cell]], cell: Cell) -> str:
    return next(kind for kind, group in groups.items() if cell in group)


def _head(cell: Cell) -> str:
    return f"{cell.pack}, {cell.words[2]} classes" if cell.classes else cell.pack


def _average(results: Results, cell: Cell, title: str) -> float:
    """Return the accuracy, NaN where it was not measured: that of zero-shot on all batches, and the gain on those met.

    A slow method meets fewer batches than the others, which may be easier or harder than all: its gain is not.
    """
    plain = results.runs("accuracy", cell, "zero_shot")
    return float(np.mean(plain)) + gain(results, cell, title) if plain else float("nan")
