"""Methods that beat TIDE if all classes are present, combined with TIDE through its own gate: does that help?

    scripts/bench leads                              # all packs but ImageNet's, where a batch takes minutes
    scripts/bench leads --runs 40 --write docs/tide.md

TIDE's density w, estimated from features alone, is near 1 if all classes are present and near 0 if few are. Its
probabilities z are combined with those of another method, p, and the zero-shot ones, y, in two ways: *times*,
z (p / y)^w, and *mean*, (1 - w / 2) z + (w / 2) p. Both equal TIDE if w is 0. Batches are those of
`scripts/bench grid --all`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # where `python -m benchmarks.leads` does not look

from grid_parts import report_all
from grid_parts.cells import Cell, draw
from grid_parts.packs import Pack, read_pack
from grid_parts.tables import check_page, gain, table, write_page

import moontide
from moontide.bench.processes import in_processes
from moontide.core.arrays import to_numpy
from moontide.report.results import TITLES

FOLDER = Path("../shared/features")
RIVALS = ("inmap", "dota", "sinkhorn", "gda_clip", "adapt")
LEAST = 1e-30  # probability below which a logarithm is cut


class Job(NamedTuple):
    kind: str
    cell: Cell
    run: int


@dataclass(frozen=True)
class Trial:
    """Does a job: TIDE, the other methods, and TIDE combined with each of them, on one batch."""

    paths: tuple[Path, ...]

    def __call__(self, job: Job) -> tuple[Job, float, dict[str, float]]:
        """Return the density and the accuracy in percent of every way."""
        pack: Pack = next(p for p in map(read_pack, self.paths) if p.name == job.cell.pack)
        rows = draw(job.cell, pack.labels, job.run)

        def run(name: str) -> Any:
            return moontide.method(name).fit_predict(pack.features[rows], pack.text, logit_scale=pack.logit_scale)

        def right(labels: Any) -> float:
            return 100 * float((to_numpy(labels) == pack.labels[rows]).mean())

        tide = run("tide")
        w = float(tide.details["density"])
        z, y = to_numpy(tide.probs).astype(np.float64), to_numpy(tide.zero_shot).astype(np.float64)
        found = {"tide": right(tide.labels), "zero_shot": right(tide.zero_shot_labels)}
        for name in RIVALS:
            other = run(name)
            p = to_numpy(other.probs).astype(np.float64)
            found[name] = right(other.labels)
            found |= {f"{name} {way}": right(both.argmax(axis=1)) for way, both in joined(z, p, y, w).items()}
        return job, w, found


def joined(z: Any, p: Any, y: Any, w: float) -> dict[str, Any]:
    """Return TIDE's z joined with the p of another method in both ways, (N, K) each: scores whose order counts.

    >>> z, p, y = (np.asarray([x]) for x in ([0.6, 0.4], [0.1, 0.9], [0.5, 0.5]))
    >>> {way: int(both.argmax()) for way, both in joined(z, p, y, 0.0).items()}
    {'times': 0, 'mean': 0}
    >>> {way: int(both.argmax()) for way, both in joined(z, p, y, 1.0).items()}
    {'times': 1, 'mean': 1}
    """
    return {"times": _log(z) + w * (_log(p) - _log(y)), "mean": (1 - w / 2) * z + w / 2 * p}


def _log(p: Any) -> Any:
    return np.log(np.maximum(p, LEAST))


def jobs_of(packs: list[Pack], runs: int) -> list[Job]:
    return [
        Job(kind, cell, run)
        for kind in report_all.KINDS
        for cell in report_all.cells_of(packs, kind)
        for run in range(report_all.runs_of(cell, kind, 4 * runs))
    ]


def report(answers: list[tuple[Job, float, dict[str, float]]]) -> str:
    """Return the density and what every way gains on TIDE, by kind of batch, and for all classes by pack."""
    by_cell: dict[tuple[str, str], list[tuple[float, dict[str, float]]]] = defaultdict(list)
    for job, w, found in sorted(answers, key=lambda answer: answer[0].run):
        by_cell[job.kind, job.cell.pack].append((w, found))
    kinds = [kind for kind in report_all.KINDS if any(key[0] == kind for key in by_cell)]
    packs = list(dict.fromkeys(key[1] for key in by_cell))

    def values(way: str, kind: str, pack: str) -> list[float]:
        return [found[way] for _, found in by_cell[kind, pack]]

    density = [
        float(np.mean([w for key, all_of in by_cell.items() if key[0] == kind for w, _ in all_of])) for kind in kinds
    ]
    lines: list[list[Any]] = [["density w", *(f"{w:.2f}" for w in density)]]
    lines.append(["TIDE, % right", *(float(np.mean([np.mean(values("tide", k, p)) for p in packs])) for k in kinds)])
    for name in RIVALS:
        for way, words in ((name, " alone"), (f"{name} times", ", times"), (f"{name} mean", ", mean")):
            own = [gain([values(way, k, p) for p in packs], [values("tide", k, p) for p in packs]) for k in kinds]
            lines.append([f"{TITLES[name]}{words}", *own])
    parts = [table(["points above TIDE", *kinds], lines)]
    last = kinds[-1]
    rows = [
        [f"{TITLES[way.split()[0]]}{', ' * (' ' in way)}{way.partition(' ')[2]}",
         *(float(np.mean(values(way, last, pack))) for pack in packs)]
        for way in ("zero_shot", "tide", *(f"{name}{more}" for name in RIVALS for more in ("", " times", " mean")))
    ]  # fmt: skip
    parts.append(f"**{last}**\n\n" + table(["method", *packs], rows))
    counts = {kind: {len(all_of) for key, all_of in by_cell.items() if key[0] == kind} for kind in kinds}
    parts.append(
        "Batches in a cell: " + ", ".join(f"{k}: {'-'.join(map(str, sorted(n)))}" for k, n in counts.items()) + "."
    )
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=Path, nargs="+", help=f"default: those of {FOLDER} but ImageNet's")
    parser.add_argument("--runs", type=int, default=20, help="batches of 64 in a cell; a tenth of it of larger ones")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of one thread each")
    parser.add_argument("--write", type=Path, help="a page whose marked part is replaced")
    args = parser.parse_args(argv)
    paths = tuple(args.packs or (path for path in sorted(FOLDER.glob("*.npz")) if "imagenet" not in path.name))
    if not paths:
        raise SystemExit(f"There are no feature packs in {FOLDER}; name some with --packs.")
    if args.write:
        check_page(args.write, ["leads"])
    jobs = sorted(jobs_of([read_pack(path) for path in paths], args.runs), key=lambda job: -job.cell.samples)
    answers = []
    for number, answer in enumerate(in_processes(Trial(paths), jobs, args.jobs), 1):
        answers.append(answer)
        print(f"\r{number} of {len(jobs)} batches", end="", file=sys.stderr, flush=True)
    text = report(answers)
    print(f"\n{text}")
    if args.write:
        write_page(args.write, {"leads": text})


if __name__ == "__main__":
    main()
