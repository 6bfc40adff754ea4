"""The records of a results folder, sorted into the cells of tables: the only input of reports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moontide.bench.records import Record, key, read_records
from moontide.errors import FileError
from moontide.report.paper import DATASETS, About, paper
from moontide.report.stats import Floats
from moontide.store.datasets import dataset

TITLES = {
    "zero_shot": "zero-shot", "mta": "MTA", "tent": "TENT", "tda": "TDA", "dmn": "DMN", "oga": "OGA",
    "em_dirichlet": "EM-Dirichlet", "zlap": "ZLaP", "gda_clip": "GDA-CLIP", "transclip": "TransCLIP", "adapt": "ADAPT",
    "sinkhorn": "Sinkhorn", "inmap": "InMaP", "frolic": "Frolic", "otter": "OTTER", "onzeta": "OnZeta", "bca": "BCA",
    "dota": "DOTA", "dpe": "DPE", "ecalp": "ECALP", "stata": "StatA", "stata_vmf": "StatA-vMF",
    "moon_gaussian": "MOON-Gaussian", "moon_samplewise": "MOON sample-wise", "moon": "MOON", "tide": "TIDE",
}  # fmt: skip
_ORDER = list(TITLES)
AVERAGE, MAIN = "Avg.", "clip_vit_b16"


class Row(NamedTuple):
    """A method with its options, as a row of a table.

    >>> Row("moon", '{"iterations": 3}', None, "iterations").value
    3
    """

    method: str
    options: str  # JSON
    label: str | None
    vary: str | None  # the option that a sweep runs through

    @property
    def title(self) -> str:
        """The name in reports.

        >>> Row("moon", '{"alpha": 1.0}', "without alpha", None).title, Row("moon", '{"alpha": 1.0}', None, None).title
        ('without alpha', 'MOON, alpha = 1.0')
        """
        options = {name: value for name, value in json.loads(self.options).items() if name != self.vary}
        parts = [TITLES.get(self.method, self.method), *(f"{name} = {value}" for name, value in options.items())]
        return self.label or ", ".join(parts)

    @property
    def ours(self) -> bool:
        """Whether this is MOON as published, the method that the paper is about."""
        return (self.method, self.options) == ("moon", "{}")

    @property
    def value(self) -> Any:
        """The value of the option that varies."""
        found = json.loads(self.options).get(self.vary)
        return float(found) if found == "inf" else found


@dataclass(frozen=True)
class Cell:
    """The runs of one method on one dataset in one scenario, in the order of the runs.

    >>> Cell(({"accuracy": 0.75, "zero_shot": 0.5}, {"accuracy": 0.5, "zero_shot": 0.5})).gain
    array([25.,  0.])
    """

    records: tuple[Record, ...]

    def _column(self, name: str) -> Floats:
        return np.asarray([record[name] for record in self.records], dtype=np.float64)

    @cached_property
    def accuracy(self) -> Floats:
        """Accuracy of each run in percent: the mean over its batches."""
        return 100 * self._column("accuracy")

    @cached_property
    def gain(self) -> Floats:
        """What each run gained over zero-shot on the same samples, in points."""
        return self.accuracy - 100 * self._column("zero_shot")

    @property
    def pooled(self) -> float:
        """Accuracy over all samples of all runs, in percent."""
        return float(100 * self._column("correct").sum() / self._column("n").sum())

    @property
    def top5(self) -> float:
        """Share of all samples with the label among the five most probable, in percent; NaN for records without it."""
        found = [record["top5"] for record in self.records if "top5" in record]
        return float(100 * sum(found) / self._column("n").sum()) if len(found) == len(self.records) else float("nan")

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of the samples of all runs together, in points; NaN for records without it.

        >>> runs = ({"n": 1, "gaps": [0.0, 0.4]}, {"n": 1, "gaps": [0.0, -0.2]})
        >>> round(Cell(runs).calibration_error, 9)
        10.0
        """
        gaps = [record["gaps"] for record in self.records if "gaps" in record]
        if len(gaps) < len(self.records):
            return float("nan")
        return float(100 * np.abs(np.sum(gaps, axis=0)).sum() / self._column("n").sum())

    @property
    def seconds(self) -> float:
        """Median seconds of a run."""
        return float(np.median(self._column("seconds")))

    @property
    def forward(self) -> float | None:
        """Median seconds of the encoder for the images of a run and the class texts; None where it was not measured."""
        found = [record["forward"] for record in self.records if "forward" in record]
        return float(np.median(found)) if found else None

    def paired(self, other: Cell) -> Floats:
        """Return the differences of accuracy on the runs that both have."""
        theirs = {record["run"]: a for record, a in zip(other.records, other.accuracy, strict=True)}
        pairs = [(a, theirs.get(r["run"])) for r, a in zip(self.records, self.accuracy, strict=True)]
        return np.asarray([a - b for a, b in pairs if b is not None], dtype=np.float64)


@dataclass(frozen=True)
class Table:
    """One scenario of a suite under one backbone: methods x datasets.

    >>> [row.title for row in example()[0].rows]
    ['zero-shot', 'MOON']
    """

    suite: str
    version: int
    timing: bool
    backbone: str | None
    scenario: dict[str, Any]
    columns: list[str]  # the datasets of the suite, the paper's first and in its order
    cells: dict[tuple[Row, str], Cell]

    @cached_property
    def rows(self) -> list[Row]:
        """The methods in the order of the paper's tables, entries of one method as they were first run."""
        found = list(dict.fromkeys(row for row, _ in self.cells))
        return sorted(found, key=lambda r: _ORDER.index(r.method) if r.method in _ORDER else -1)

    @property
    def averages(self) -> dict[str, list[str]]:
        """What is averaged over: all datasets, and those of the paper where there are others, each by its heading."""
        known = [column for column in self.columns if column in DATASETS]
        found = {AVERAGE: self.columns, f"{AVERAGE} of the paper's": known if known != self.columns else []}
        return {title: columns for title, columns in found.items() if len(columns) > 1}

    def mean_cells(self, row: Row, columns: Sequence[str] | None = None) -> list[Cell] | None:
        """Return the cells of a row for some datasets (None: all), or None if one is missing."""
        wanted = self.columns if columns is None else columns
        cells = [self.cells[row, column] for column in wanted if (row, column) in self.cells]
        return cells if len(cells) == len(wanted) else None

    def about(self, row: Row) -> About:
        """Return what the paper's numbers for a row would be about."""
        facts = {"backbone": self.backbone, **self.scenario, "scenario": self.scenario["name"]}
        return About.make(facts, row.method, json.loads(row.options))

    def paper_values(self, row: Row, parts: Sequence[Sequence[str]]) -> tuple[str, list[float | None]]:
        """Return whose numbers the paper has for a row, and its averages over each of some lists of datasets.

        Where it has none for a backbone of CLIP they are those of its main backbone, and the sentence names it.
        """
        about = self.about(row)
        values = [paper().average(about, part) for part in parts]
        if any(value is not None for value in values) or not (self.backbone or "").startswith("clip_"):
            return "the paper", values
        return "the paper, ViT-B/16", [paper().average(about._replace(backbone=MAIN), part) for part in parts]


@dataclass(frozen=True)
class Results:
    """Everything in a results folder that a report shows, and the notes that go with it."""

    tables: list[Table]
    environments: Counter[str]  # records by what made them
    notes: list[str]


def column_title(name: str) -> str:
    """Return the paper's name of a dataset, or the name as it is.

    >>> column_title("oxford_pets"), column_title("cifar10")
    ('Pets', 'cifar10')
    """
    return dataset(name).title if name in DATASETS else name


def collect(folder: str | Path) -> Results:
    """Read a results folder.

    >>> collect("no-such-folder")
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There are no results in no-such-folder; create some with 'moontide bench run'.
    """
    found = {key(record): record for record in read_records(folder)}.values()
    records = sorted(found, key=lambda r: (r["scenario"].get("order", 0), r.get("order", 0)))  # as in the suites
    if not records:
        raise FileError(f"There are no results in {folder}; create some with 'moontide bench run'.")
    newest = {r["suite"]: r["version"] for r in sorted(records, key=lambda r: r["version"])}  # the last one stays
    shown = [record for record in records if record["version"] == newest[record["suite"]]]
    notes = []
    if len(shown) < len(records):
        notes.append(f"{len(records) - len(shown)} records of older versions of their suites are left out.")
    tables = _tables(shown)
    made = Counter(_maker(record) for record in shown)
    if len(made) > 1:
        notes.append("The records come from several versions or machines, listed at the end.")
    return Results(tables, made, [*notes, *_size_notes(shown), *_run_notes(tables)])


def example() -> list[Table]:
    """Return made-up tables for the examples in this package: four runs of two methods in two scenarios.

    >>> [table.scenario["id"] for table in example()]
    ['batch-64-very_low', 'batch-64-low']
    """
    size = {"setting": "batch", "batch_size": 64}
    scenarios = (
        {"id": "batch-64-very_low", "name": "very_low", **size, "effective_classes": [1, 4]},
        {"id": "batch-64-low", "name": "low", **size, "effective_classes": [2, 10]},
    )
    common = {
        "suite": "batch-64", "version": 1, "timing": False, "dataset": "imagenet", "backbone": "clip_vit_b16",
        "features": "", "samples": 50000, "classes": 1000, "options": {}, "label": None, "vary": None, "zero_shot": 0.5,
        "n": 64, "gaps": [6.4],
    }  # fmt: skip
    runs = [
        {**common, "scenario": scenario, "run": run, "method": method, "accuracy": share, "correct": 64 * share,
         "seconds": share / 10}
        for scenario in scenarios for run in range(4) for method, share in (("zero_shot", 0.5), ("moon", 0.75))
    ]  # fmt: skip
    return _tables(runs)


def _tables(records: list[Record]) -> list[Table]:
    hashes: dict[tuple[str, str | None], set[str]] = {}
    for record in records:
        hashes.setdefault((record["dataset"], record["backbone"]), set()).add(record["features"])
    runs: dict[tuple[str, str, str], dict[tuple[Row, str], list[Record]]] = {}
    for record in records:
        row = Row(record["method"], json.dumps(record["options"], sort_keys=True), record["label"], record["vary"])
        several = len(hashes[record["dataset"], record["backbone"]]) > 1  # features were made anew under one name
        column = f"{record['dataset']} {record['features'][:6]}" if several else record["dataset"]
        group = (record["suite"], record["backbone"] or "~", record["scenario"]["id"])
        runs.setdefault(group, {}).setdefault((row, column), []).append(record)
    columns: dict[tuple[str, str], set[str]] = {}
    for (suite, backbone, _), cells in runs.items():
        columns.setdefault((suite, backbone), set()).update(column for _, column in cells)
    tables = []
    for group, cells in runs.items():
        first = next(iter(cells.values()))[0]
        known = sorted(columns[group[:2]], key=lambda c: (DATASETS.index(c) if c in DATASETS else len(DATASETS), c))
        made = {where: Cell(_distinct(found)) for where, found in cells.items()}
        facts = {name: first[name] for name in ("suite", "version", "timing", "backbone", "scenario")}
        tables.append((group[:2], Table(**facts, columns=known, cells=made)))
    return [table for _, table in sorted(tables, key=lambda pair: pair[0])]  # scenarios stay in the order of records


def _distinct(records: list[Record]) -> tuple[Record, ...]:
    """Order the runs; where every batch is the whole dataset they are one run repeated, which counts once."""
    ordered = tuple(sorted(records, key=lambda r: r["run"]))
    return ordered[:1] if all(map(_is_whole, ordered)) else ordered


def _is_whole(record: Record) -> bool:
    return record["scenario"]["setting"] == "batch" and record["n"] == record["samples"] and not record["timing"]


def _maker(record: Record) -> str:
    about = record["environment"]
    commit = f" ({about['commit'][:12]}{'-dirty' * about['commit'].endswith('-dirty')})" if about["commit"] else ""
    torch = f", torch {about['torch']}" if about["torch"] else ""
    versions = f"Moontide {about['moontide']}{commit}, Python {about['python']}, numpy {about['numpy']}{torch}"
    return f"{versions}; {about['machine']}"


def _size_notes(records: Iterable[Record]) -> Iterable[str]:
    """Return a note where features named after a dataset of the paper are not those of its test set."""
    found = sorted({(r["dataset"], r["samples"], r["classes"]) for r in records if r["dataset"] in DATASETS})
    pairs = [(dataset(name), samples, classes) for name, samples, classes in found]
    other = [
        f"{known.title} ({samples} samples of {classes} classes, not {known.samples} of {known.classes})"
        for known, samples, classes in pairs
        if (samples, classes) != (known.samples, known.classes)
    ]
    if other:
        yield f"These are not the paper's test sets, so compare with its numbers only roughly: {', '.join(other)}."


def _run_notes(tables: Iterable[Table]) -> Iterable[str]:
    """Return notes where runs are one run repeated, and where methods do not have the same number of them."""
    for table in tables:
        whole = sorted({column for (_, column), cell in table.cells.items() if _is_whole(cell.records[0])})
        if whole:
            names = ", ".join(whole)
            yield f"{table.suite}, {table.scenario['id']}: every batch is the whole of {names}, so it counts once."
        counts = {len(cell.records) for (_, column), cell in table.cells.items() if column not in whole}
        if len(counts) > 1:
            yield (
                f"{table.suite}, {table.scenario['id']}: cells have {min(counts)} to {max(counts)} runs; "
                "tests between two methods use the runs that both have."
            )
