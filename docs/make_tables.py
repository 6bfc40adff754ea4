"""Write the tables in README.md and docs/choose.md between their markers: python docs/make_tables.py [--check].

The table in the README comes from docs/tide.md, which `scripts/bench grid --write docs/tide.md` measures. The table in
docs/choose.md is measured here, on simulated features; --check does not repeat the measurement.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from moontide import Task, method
from moontide.metrics import accuracy
from moontide.simulate import simulate

DOCS = Path(__file__).parent
METHODS = {"zero_shot": "zero-shot", "stata": "StatA", "moon": "MOON", "gda_clip": "GDA-CLIP", "tide": "TIDE"}
KINDS = {"few classes there": "few of the candidate classes", "most or all there": "most or all of them"}
CANDIDATES, RUNS = 200, 20
BATCHES = {  # samples, classes present, imbalance
    ("1", "1"): (1, 1, 1),
    ("64", "3"): (64, 3, 1),
    ("64", "20"): (64, 20, 1),
    ("1000", "all"): (1000, 200, 1),
    ("1000", "all, uneven"): (1000, 200, 10),
}


def headline() -> str:
    """Return the summary rows of docs/tide.md, with the best value of each row in bold."""
    page = (DOCS / "tide.md").read_text(encoding="utf-8")
    (head,) = re.findall(r"^\| mean accuracy \|(.*)\|$", page, re.MULTILINE)
    columns = [name.strip() for name in head.split("|")]
    kept = [i for i, name in enumerate(columns) if name != "GDA-CLIP"]
    rows = [["a batch holds", *(columns[i] for i in kept)], ["---"] + ["---"] * len(kept)]
    for words, shown in KINDS.items():
        (found,) = re.findall(rf"^\| {words}[^|]*\|(.*)\|$", page, re.MULTILINE)
        values = [found.split("|")[i].strip() for i in kept]
        best = max(values, key=float)
        rows.append([shown, *(f"**{value}**" if value == best else value for value in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def measured() -> str:
    """Return the mean accuracy of each method on each kind of batch, and of TIDE with one known label per class."""
    rows = [["images", "classes", *METHODS.values(), "TIDE + labels"], ["---"] * (len(METHODS) + 3)]
    for words, (n, present, imbalance) in BATCHES.items():
        found = np.asarray([scores(n, present, imbalance, seed) for seed in range(RUNS)]).mean(axis=0)
        cells = [f"{100 * value:.1f}" for value in found]
        rows.append([*words, *cells[:-1], cells[-1] if n > 1 else "-"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def scores(n: int, present: int, imbalance: int, seed: int) -> list[float]:
    """Return the accuracy of each method on one batch, and of TIDE with known labels on the remaining samples."""
    data = simulate(n, CANDIDATES, effective_classes=present, imbalance=imbalance, seed=seed)
    task = Task(data.features, data.text, data.logit_scale)
    found = [accuracy(data.labels, method(name).fit_predict(task).labels) for name in METHODS]
    first = np.unique(data.labels, return_index=True)[1]
    known, rest = np.full(n, -1), np.ones(n, dtype=bool)
    known[first], rest[first] = data.labels[first], False
    if not rest.any():
        return [*found, float("nan")]
    labels = method("tide").fit_predict(Task(data.features, data.text, data.logit_scale, known=known)).labels
    return [*found, accuracy(data.labels[rest], labels[rest])]


def put(page: Path, mark: str, text: str) -> str:
    """Return a page with the text between its markers replaced."""
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
    made, count = re.subn(pattern, rf"\1\n{text}\n\n\2", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert count == 1, f"{page} must contain the marker {mark} exactly once"
    return made


def main(arguments: list[str]) -> int:
    """Write the tables, or with --check test whether the table in the README matches docs/tide.md."""
    readme, choose = DOCS.parent / "README.md", DOCS / "choose.md"
    made = put(readme, "headline", headline())
    if "--check" in arguments:
        stale = made != readme.read_text(encoding="utf-8")
        if stale:
            print("README.md is stale: run python docs/make_tables.py", file=sys.stderr)
        return int(stale)
    readme.write_text(made, encoding="utf-8")
    choose.write_text(put(choose, "measured", measured()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
