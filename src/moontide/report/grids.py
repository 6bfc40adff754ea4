"""The parts of a printed table, and the names of tables, files and scenarios in a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moontide.report.results import AVERAGE as AVERAGE
from moontide.report.results import Table

SETTINGS = {"batch": "batches", "online": "streams in batches"}


class Number(NamedTuple):
    """A number in a table: its value, half its 95 % interval, the gain over zero-shot, its rank in the column.

    >>> Number(81.2, half=0.4, gain=15.0, rank=1).digits
    1
    """

    value: float
    half: float | None = None
    gain: float | None = None
    rank: int = 0  # 1 best, 2 second, 0 any other
    digits: int = 1


@dataclass(frozen=True)
class Line:
    """A line of a table: a method, the paper's numbers for it, or the test between the two best."""

    title: str
    numbers: Sequence[Number | None]
    kind: str = "method"  # "method", "ours" (the paper's own method), "paper" or "test"


@dataclass(frozen=True)
class Grid:
    """A table as it is printed: a caption, the headings, and named blocks of lines."""

    name: str  # of files
    caption: str
    headings: Sequence[str]
    blocks: Sequence[tuple[str, Sequence[Line]]]


def grouped(tables: Iterable[Table], by: Sequence[str]) -> list[list[Table]]:
    """Group tables by suite, backbone and given facts of their scenarios.

    >>> from moontide.report.results import example
    >>> [len(group) for group in grouped(example(), ())], [len(group) for group in grouped(example(), ("name",))]
    ([2], [1, 1])
    """
    groups: dict[tuple[object, ...], list[Table]] = {}
    for table in tables:
        key = (table.suite, table.backbone, *(table.scenario.get(name) for name in by))
        groups.setdefault(key, []).append(table)
    return list(groups.values())


def scenario_title(table: Table) -> str:
    """Return the name of a scenario in a report.

    >>> from moontide.report.results import example
    >>> scenario_title(example()[0])
    'very low (1–4 classes)'
    """
    facts = table.scenario
    word = str(facts["name"]).replace("_", " ")
    match facts.get("effective_classes"), facts.get("xi"):
        case [low, high], _:
            return f"{word} ({low}–{high} classes)"
        case int(number), _:
            return f"{word} ({number} classes)"
        case _, float(xi):
            return f"{word} (ξ = {xi:g})"
        case _:
            return word


def experiment(table: Table) -> str:
    """Return the end of a caption, which names the experiment.

    >>> from moontide.report.results import example
    >>> experiment(example()[0])
    'batch-64, batches of 64, clip_vit_b16'
    """
    size = table.scenario.get("batch_size")
    return f"{table.suite}, {SETTINGS[table.scenario['setting']]} of {size or 'all samples'}{of_backbone(table)}"


def of_backbone(table: Table) -> str:
    """Name the backbone at the end of a caption.

    >>> from moontide.report.results import example
    >>> of_backbone(example()[0])
    ', clip_vit_b16'
    """
    return f", {table.backbone or 'an unknown backbone'}"


def table_name(table: Table, *what: str, sizes: bool = True) -> str:
    """Name a file: suite, backbone, with `sizes` setting and batch size, and what it shows.

    >>> from moontide.report.results import example
    >>> table_name(example()[0], "accuracy")
    'batch-64-clip_vit_b16-accuracy'
    """
    size = f"{table.scenario['setting']}-{table.scenario.get('batch_size', 'all')}"
    words = [table.suite, table.backbone, size if sizes and size != table.suite else None, *what]
    return "-".join(re.sub(r"[^\w.-]+", "_", word) for word in words if word)
