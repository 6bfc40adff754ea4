"""Markdown: tables, numbers with intervals, and pages in which only marked parts are replaced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moontide.store.disk import replacing

DRAWS = 2000  # of the bootstrap


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table; numbers get one decimal, None and NaN a dash."""
    lines = [header, ["---"] * len(header), *([_cell(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(x: Any) -> str:
    if x is None or (isinstance(x, float | np.floating) and np.isnan(x)):
        return "–"
    return f"{x:.1f}" if isinstance(x, float | np.floating) else f"{x:,}" if isinstance(x, int) else str(x)


def mean(values: Iterable[float | None]) -> float:
    """Return the mean of the values that are not missing, NaN if all are."""
    found = [x for x in values if x is not None and not np.isnan(x)]
    return float(np.mean(found)) if found else float("nan")


def interval(groups: Sequence[Sequence[float]], level: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the mean over groups of the mean of a group's values; groups stay as they are.

    >>> interval([[1.0, 3.0], [5.0, 5.0]])
    (3.0, 4.0)
    """
    rng = np.random.default_rng(0)
    total = np.zeros(DRAWS)
    for group in groups:
        values = np.asarray(group, dtype=np.float64)
        total += values[rng.integers(len(values), size=(DRAWS, len(values)))].mean(axis=1)
    low, high = np.quantile(total / len(groups), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def gain(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> str:
    """Return the mean difference of the first to the second, paired by run in each group, with its interval."""
    groups: list[Any] = [np.subtract(a, b) for a, b in zip(first, second, strict=True)]
    average = f"{np.mean([group.mean() for group in groups]):+.1f}"
    if all(len(group) == 1 for group in groups):
        return average
    low, high = interval(groups)
    return f"{average} ({low:+.1f} to {high:+.1f})"


def marked(page: str, name: str) -> re.Match[str] | None:
    """Find a part of a page, between `<!-- grid:NAME -->` and `<!-- /grid:NAME -->`."""
    name = re.escape(name)
    return re.search(rf"(<!-- grid:{name} -->\n)(.*?)(<!-- /grid:{name} -->)", page, re.DOTALL)


def check_page(path: Path, names: Iterable[str]) -> None:
    """Refuse a page that lacks a marked part, before anything is measured for it."""
    if not path.exists():
        raise SystemExit(f"--write needs a page with marked parts, and there is no {path}.")
    page = path.read_text(encoding="utf-8")
    for name in names:
        if not marked(page, name):
            raise SystemExit(
                f"{path} has no part <!-- grid:{name} --> ... <!-- /grid:{name} -->; add it where it goes."
            )


def write_page(path: Path, parts: Mapping[str, str]) -> None:
    """Replace the marked parts of a page."""
    page = path.read_text(encoding="utf-8")
    for name, text in parts.items():
        found = marked(page, name)
        if found is not None:
            page = page[: found.end(1)] + f"\n{text}\n\n" + page[found.start(3) :]
    with replacing(path) as handle:
        handle.write(page.encode())
