"""The tables of docs/paper.md, from a details.csv: our numbers, and the paper's over the same data sets."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from grid_parts.tables import table

from moontide.report.paper import DATASETS, About, paper
from moontide.report.results import TITLES, column_title

Row = dict[str, str]
MAIN = "clip_vit_b16"
BY_DATASET = (
    "batch-64", "batch-1000", "online-128", "batch-sizes", "all-classes", "random-classes", "sample-wise",
    "alpha-design", "ttabc",
)  # fmt: skip
BY_SCENARIO = ("text-versus-released", "ablation", "lambda-design", "beta", "variants")
SWEEPS = ("sensitivity", "convergence")
ITEMS = (  # the paper's tables and figures, and the suites that fill them
    ("Fig. 1a; Tab. 1, batches of 64", "batch-64"),
    ("Fig. 1a; Tab. 1, batches of 1000", "batch-1000"),
    ("Fig. 1b; Tab. 2, streams", "online-128"),
    ("Fig. 2a, StatA's alpha; Fig. 4, T and m", "sensitivity"),
    ("Fig. 2b, accuracy and time; Tab. 3, runtime", "runtime"),
    ("Fig. 3, convergence", "convergence"),
    ("Tab. 4 and Fig. 5, ablation", "ablation"),
    ("Tab. 5, alpha_k", "alpha-design"),
    ("Tab. 6, lambda_k", "lambda-design"),
    ("Tab. 7, variants", "variants"),
    ("Tab. 8, sample-wise", "sample-wise"),
    ("Tab. 9 and 13-18, other models", "backbones"),
    ("Tab. 11, batch sizes", "batch-sizes"),
    ("Tab. 19, all classes", "all-classes"),
    ("Tab. 20, random classes", "random-classes"),
    ("Tab. 21, beta_k", "beta"),
    ("not in it: text and program", "text-versus-released"),
    ("not in it: its authors' later protocol", "ttabc"),
    ("not in it: long tails", "long-tailed"),
)
CELL = ("suite", "version", "backbone", "setting", "batch_size", "scenario", "dataset", "method", "options", "vary")
SPACES = ("clip_",)  # backbones whose packs are averaged together


def read_details(paths: Iterable[Path]) -> list[Row]:
    """Read the lines of files details.csv that are of a backbone of CLIP; of the same cell, that with the most runs.

    A slow method meets fewer batches than zero-shot, which may be easier or harder than all, and its gain on the same
    batches is better known than its accuracy: that becomes the accuracy of zero-shot on all batches and the gain.
    """
    found: dict[tuple[str, ...], Row] = {}
    for path in paths:
        with open(path, encoding="utf-8", newline="") as handle:
            for row in csv.DictReader(handle):
                key = tuple(row[name] for name in CELL)
                if row["backbone"].startswith(SPACES) and int(row["runs"]) > int(found.get(key, {"runs": "0"})["runs"]):
                    found[key] = row
    plain = {key_of_draws(row): float(row["accuracy"]) for row in found.values() if row["method"] == "zero_shot"}
    for row in found.values():
        if key_of_draws(row) in plain:
            row["accuracy"] = str(plain[key_of_draws(row)] + float(row["gain"]))
    return list(found.values())


def key_of_draws(row: Row) -> tuple[str, ...]:
    """Return what the batches are known by."""
    return tuple(row[name] for name in ("suite", "version", "backbone", "setting", "batch_size", "scenario", "dataset"))


def pages(rows: Sequence[Row], forward: Mapping[int, float] = MappingProxyType({})) -> dict[str, str]:
    """Return a table for every suite in the rows, by the suite's name; `forward` has the encoder's seconds."""
    found = {}
    for suite in dict.fromkeys(row["suite"] for row in rows):
        own = [row for row in rows if row["suite"] == suite]
        make = by_dataset if suite in BY_DATASET else by_scenario if suite in BY_SCENARIO else by_value
        if suite in (*BY_DATASET, *BY_SCENARIO, *SWEEPS):
            found[suite] = f"{make(own)}\n\n{counts(own)}"
        if suite == "runtime":
            found[suite] = runtime(own, forward)
    return {"checklist": checklist(rows), **found}


def checklist(rows: Sequence[Row]) -> str:
    """Return every table and figure with its command, and MOON's mean over scenarios and data sets."""
    lines = []
    for item, suite in ITEMS:
        own = [r for r in rows if r["suite"] == suite and r["method"] == "moon" and (r["options"] == "{}" or r["vary"])]
        known = [row for row in own if row["dataset"] in DATASETS and row["paper"]]
        numbers: list[float | int | str | None] = [len(known), None, None, None, None]
        if known:
            ours, theirs = (float(np.mean([float(row[name]) for row in known])) for name in ("accuracy", "paper"))
            plain = float(np.mean([float(row["gain"]) for row in known]))
            numbers = [len(known), theirs, ours, f"{ours - theirs:+.1f}", f"{plain:+.1f}"]
        lines.append([item, f"`moontide bench run {suite} --data FEATURES`", *numbers])
    heads = ["in the paper", "command", "cells", "the paper's MOON", "ours", "apart", "ours above zero-shot"]
    return table(heads, lines)


def title(row: Row) -> str:
    """Return what a row is called."""
    options = {k: v for k, v in json.loads(row["options"]).items() if k != row["vary"]}
    parts = [TITLES.get(row["method"], row["method"]), *(f"{k} = {v}" for k, v in options.items())]
    return row["label"] or ", ".join(parts)


def place(row: Row) -> tuple[str, str, str]:
    return row["setting"], row["batch_size"], row["scenario"]


def words(where: tuple[str, str, str]) -> str:
    setting, size, name = where
    kind = f"{'streams of' if setting == 'online' else 'batches of'} {size}" if size else "the whole set"
    return f"{kind}, {name.replace('_', ' ')}" if name != "all" else kind


def counts(rows: Sequence[Row]) -> str:
    """Say how many runs the numbers of methods other than zero-shot are of, and how well their gains are known."""
    others = [row for row in rows if row["method"] != "zero_shot"] or rows
    runs = [int(row["runs"]) for row in others]
    half = [float(row["gain_half_interval"]) for row in others if row.get("gain_half_interval")]
    least, most = min(runs), max(runs)
    many = f"{least:,} to {most:,} runs" if least < most else f"{least:,} run{'s' * (least > 1)}"
    if not half:
        return f"{many} per cell."
    known = f"{np.median(half):.1f} in the median and at most {max(half):.1f}"
    return f"{many} per cell. Half the 95 % interval of a gain is {known}."


def mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if not found or None in found else float(np.mean(found))  # type: ignore[arg-type]


def datasets_of(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(row["dataset"] for row in rows)
    return sorted(names, key=lambda name: (DATASETS.index(name) if name in DATASETS else len(DATASETS), name))


def about(row: Row) -> About:
    size = int(row["batch_size"]) if row["batch_size"] else None
    return About(MAIN, row["setting"], size, row["scenario"], row["method"], row["options"])


def by_dataset(rows: Sequence[Row]) -> str:
    """Return one line per scenario and method, one column per pack."""
    names = datasets_of(rows)
    known = [name for name in names if name in DATASETS]
    lines = []
    for where in dict.fromkeys(map(place, rows)):
        here = [row for row in rows if place(row) == where]
        for method in dict.fromkeys(map(title, here)):
            cells = {row["dataset"]: row for row in here if title(row) == method}
            ours = [float(cells[name]["accuracy"]) if name in cells else None for name in names]
            own = mean(float(cells[name]["accuracy"]) if name in cells else None for name in known)
            first = next(iter(cells.values()))
            theirs = mean(float(cells[n]["paper"]) if n in cells and cells[n]["paper"] else None for n in known)
            same = theirs is not None and paper().average(about(first)._replace(backbone=first["backbone"]), known)
            whose = "" if theirs is None else " (B/32)" if same else " (B/16)"
            shown = None if theirs is None else f"{theirs:.1f}{whose}"
            apart = None if theirs is None or own is None else f"{own - theirs:+.1f}"
            lines.append([words(where), method, *ours, own, shown, apart])
    heads = ["scenario", "method", *map(column_title, names), f"mean of {len(known)}", "the paper, same sets", "apart"]
    return table(heads, lines)


def shared(rows: Sequence[Row]) -> tuple[list[Row], dict[tuple[str, str, str], int]]:
    """Return the rows of the packs that all methods of a scenario have, and how many packs these are."""
    kept, packs = [], {}
    for where in dict.fromkeys(map(place, rows)):
        here = [row for row in rows if place(row) == where]
        methods = {(title(row), row["options"]) for row in here}
        having = {(row["dataset"], title(row), row["options"]) for row in here}
        common = {d for d in datasets_of(here) if all((d, *method) in having for method in methods)}
        kept += [row for row in here if row["dataset"] in common]
        packs[where] = len(common)
    return kept, packs


def by_scenario(rows: Sequence[Row]) -> str:
    """Return one line per method, one column per scenario, each the mean over the packs; the paper's below."""
    rows, packs = shared(rows)
    places = list(packs)
    lines = []
    for method in dict.fromkeys(map(title, rows)):
        own = [row for row in rows if title(row) == method]
        by_place = [[row for row in own if place(row) == where] for where in places]
        lines.append([method, *(mean(float(row["accuracy"]) for row in part) for part in by_place)])
        theirs = [paper().average(about(part[0]), DATASETS) if part else None for part in by_place]
        if any(value is not None for value in theirs):
            lines.append(["– the paper, its eleven sets, B/16", *theirs])
    return table(["method", *(f"{words(where)} ({packs[where]} packs)" for where in places)], lines)


def read_forward(path: Path | None) -> dict[int, float]:
    """Read the seconds that the encoder takes, by the number of images: what `clip_forward --out` writes."""
    if path is None:
        return {}
    with open(path, encoding="utf-8", newline="") as handle:
        return {int(row["images"]): float(row["seconds"]) for row in csv.DictReader(handle)}


def runtime(rows: Sequence[Row], forward: Mapping[int, float] = MappingProxyType({})) -> str:
    """Return one line per batch size, median milliseconds of the encoder and of each method, and the paper's below."""
    own = [row for row in rows if row["dataset"] == "imagenet"] or list(rows)
    methods = list(dict.fromkeys(row["method"] for row in own))
    lines: list[list[float | str | None]] = []
    for size in sorted({int(row["batch_size"]) for row in own}):
        found = {row["method"]: row for row in own if int(row["batch_size"]) == size}
        n = min(size, *(int(float(row["samples"])) for row in found.values()))
        ours = [forward.get(n), *(float(found[m]["median_seconds"]) if m in found else None for m in methods)]
        theirs = [paper().seconds.get((size, m)) for m in ("clip_forward", *methods)]
        lines.append([f"{n:,}, ours", *(None if t is None else 1e3 * t for t in ours)])
        lines.append([f"{size:,}, the paper", *(None if t is None else 1e3 * t for t in theirs)])
    return table(["N, times in ms", "CLIP forward", *(TITLES.get(m, m) for m in methods)], lines)


def by_value(rows: Sequence[Row]) -> str:
    """Return one line per scenario, method and option, one column per value, each the mean over the packs."""
    swept, _ = shared([row for row in rows if row["vary"]])
    values = {row["vary"]: set[float]() for row in swept}
    for row in swept:
        values[row["vary"]].add(float(json.loads(row["options"])[row["vary"]]))
    parts = []
    for option, found in values.items():
        order, lines = sorted(found), []
        for where in dict.fromkeys(map(place, swept)):
            here = [row for row in swept if place(row) == where and row["vary"] == option]
            for method in dict.fromkeys(map(title, here)):
                own = [row for row in here if title(row) == method]
                cells = [[r for r in own if float(json.loads(r["options"])[option]) == value] for value in order]
                lines.append([words(where), method, *(mean(float(row["accuracy"]) for row in part) for part in cells)])
        parts.append(table(["scenario", f"method, by {option}", *(f"{value:g}" for value in order)], lines))
    return "\n\n".join(parts)
