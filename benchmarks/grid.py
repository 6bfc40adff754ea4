"""TIDE and other methods on real feature packs, with few to all classes present, balanced or long-tailed.

    scripts/bench grid                           # the grid, biased texts, the photographs of examples/, trust
    scripts/bench grid --ablation                # TIDE without each of its parts
    scripts/bench grid --streams                 # batches of 1, 16 and 128 in five orders
    scripts/bench grid --known                   # 1 and 4 known labels per class
    scripts/bench grid --all                     # every method there is, with few and with all classes
    scripts/bench grid --cost [--device cuda]    # time against MOON's, on simulated features
    scripts/bench grid --write docs/tide.md      # into the marked parts of the page, too

A cell is a pack, a batch size, a number of classes and a balance; its accuracy is the mean over batches drawn by
`BatchSampler`. A batch is determined by its cell and number, so all methods see the same batches and nothing depends on
`--jobs`. Every result is a line of `--out` with a hash of its code, options and data: the same command continues after
an interruption, and repeats only what has changed since.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # where `python -m benchmarks.grid` does not look

from grid_parts import report_all
from grid_parts import report_grid as grid_reports
from grid_parts import report_more as more_reports
from grid_parts.ablations import ABLATIONS
from grid_parts.cells import (
    LABEL_RUNS,
    ORDERS,
    SHOTS,
    STREAM_BATCHES,
    STREAM_RUNS,
    Cell,
    KnownCell,
    StreamCell,
    biased_cells,
    cells,
    runs_of,
)
from grid_parts.packs import PHOTOGRAPHS, Pack, photographs, read_pack
from grid_parts.tables import check_page, write_page
from grid_parts.work import Bench, Job, Results, measure, merged

from moontide.errors import MoontideError

FOLDER = Path("../shared/features")
METHODS = ("zero_shot", "stata", "moon", "gda_clip", "tide")
ON_PHOTOGRAPHS = ("zero_shot", "stata", "moon", "tide")
ON_STREAMS = ("zero_shot", "moon", "TIDE per batch", "tide")
WITH_LABELS = ("zero_shot", "prototypes", "tide", "TIDE with labels")


class Settings(NamedTuple):
    packs: list[Pack]  # without the photographs
    photographs: Pack | None
    runs: int
    methods: tuple[str, ...]  # further ones


class Part(NamedTuple):
    """What one option measures, and the marked parts of the page that it updates."""

    help: str
    jobs: Callable[[Settings], list[Job]]
    reports: dict[str, Callable[[Results, Settings], str]]


def accuracy_jobs(
    found: list[Cell], most: int, titles: tuple[str, ...], measure: str = "accuracy", runs: int | None = None
) -> list[Job]:
    return [Job(measure, cell, run, titles) for cell in found for run in range(runs or runs_of(cell, most))]


def grid_jobs(s: Settings) -> list[Job]:
    jobs = accuracy_jobs(cells(s.packs), s.runs, METHODS + s.methods)
    if s.photographs:
        whole = Cell(PHOTOGRAPHS, None, None, None, None, False, len(s.photographs.labels))
        jobs.append(Job("accuracy", whole, 0, ON_PHOTOGRAPHS))
    return jobs


def biased_jobs(s: Settings) -> list[Job]:
    return accuracy_jobs(biased_cells(s.packs), s.runs, METHODS + s.methods)


def trust_jobs(s: Settings) -> list[Job]:
    found = cells(s.packs)
    scores = tuple(grid_reports.SCORES)
    return [*accuracy_jobs(found, s.runs, grid_reports.TRUSTED), *accuracy_jobs(found, s.runs, scores, "unknown")]


def ablation_jobs(s: Settings) -> list[Job]:
    return accuracy_jobs([*cells(s.packs), *biased_cells(s.packs)], s.runs, ("zero_shot", "tide", *ABLATIONS))


def stream_jobs(s: Settings) -> list[Job]:
    found = [StreamCell(pack.name, order, size) for pack in s.packs for order in ORDERS for size in STREAM_BATCHES]
    return [Job("stream", cell, run, ON_STREAMS + s.methods) for cell in found for run in range(STREAM_RUNS)]


def known_jobs(s: Settings) -> list[Job]:
    found = [KnownCell(pack.name, shots, len(pack.labels)) for pack in s.packs for shots in SHOTS]
    return [Job("known", cell, run, WITH_LABELS) for cell in found for run in range(LABEL_RUNS)]


def all_jobs(s: Settings) -> list[Job]:
    """Every method that needs only features; online methods also on a stream."""
    batches = [
        job
        for kind in report_all.KINDS
        for cell in report_all.cells_of(s.packs, kind)
        for job in accuracy_jobs([cell], s.runs, report_all.titles(), runs=report_all.runs_of(cell, kind, s.runs))
    ]
    streams = [StreamCell(pack.name, *report_all.STREAM) for pack in s.packs]
    return [*batches, *(Job("stream", cell, 0, report_all.on_streams()) for cell in streams)]


PARTS = {
    "grid": Part(
        "all cells, and the photographs of examples/",
        grid_jobs,
        {
            "summary": lambda r, s: grid_reports.report_summary(r, METHODS + s.methods),
            "grid": lambda r, s: grid_reports.report_cells(r, METHODS + s.methods, grid_reports.clean),
            "photographs": lambda r, s: grid_reports.report_photographs(r, ON_PHOTOGRAPHS),
        },
    ),
    "biased": Part(
        "noise on the class texts",
        biased_jobs,
        {"biased": lambda r, s: grid_reports.report_biased(r, METHODS + s.methods)},
    ),
    "trust": Part(
        "calibration, and scores for samples of classes that are not in the list",
        trust_jobs,
        {"trust": lambda r, s: grid_reports.report_trust(r)},
    ),
    "ablation": Part(
        "TIDE without each of its parts", ablation_jobs, {"ablation": lambda r, s: grid_reports.report_ablation(r)}
    ),
    "streams": Part(
        "streams in five orders, with and without memory",
        stream_jobs,
        {"streams": lambda r, s: more_reports.report_streams(r, ON_STREAMS + s.methods)},
    ),
    "all": Part(
        "every method that features alone are enough for",
        all_jobs,
        {"all": lambda r, s: report_all.report(r, s.packs)},
    ),
    "known": Part(
        "known labels of some samples", known_jobs, {"known": lambda r, s: more_reports.report_known(r, WITH_LABELS)}
    ),
}
DEFAULT = ("grid", "biased", "trust")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, part in PARTS.items():
        parser.add_argument(f"--{name}", action="store_true", help=part.help)
    parser.add_argument("--cost", action="store_true", help="time against MOON's, on simulated features")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for --cost")
    parser.add_argument("--packs", type=Path, nargs="+", help=f"feature packs with labels; default: {FOLDER}/*.npz")
    parser.add_argument("--methods", nargs="+", default=[], help="further methods, in the grid and on streams; or all")
    parser.add_argument("--runs", type=int, default=100, help="batches of 64 in a cell; a fifth of it of larger ones")
    parser.add_argument("--minutes", type=float, help="stop after so many, with what is there; 0: nothing is run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of one thread each")
    parser.add_argument("--out", type=Path, default=Path("results/grid.jsonl"), help="the log, read and continued")
    parser.add_argument("--write", type=Path, help="a page whose marked parts are replaced")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> dict[str, str]:
    """Do the requested measurements, and return the reports by name."""
    chosen = [name for name in PARTS if getattr(args, name)] or ([] if args.cost else list(DEFAULT))
    costs = ["cost", "cost-stream"] if args.device == "cpu" else [f"cost-{args.device}"]
    if args.write:
        check_page(args.write, [*(x for name in chosen for x in PARTS[name].reports), *(costs if args.cost else [])])
    found: dict[str, str] = {}
    if chosen:
        paths = args.packs or sorted(FOLDER.glob("*.npz"))
        if not paths:
            raise SystemExit(f"There are no feature packs in {FOLDER}; name some with --packs.")
        own = photographs(args.out.parent) if "grid" in chosen else None
        wanted = report_all.titles() if args.methods == ["all"] else args.methods
        more = tuple(name for name in wanted if name not in METHODS)
        settings = Settings([read_pack(path) for path in paths], read_pack(own) if own else None, args.runs, more)
        names = [pack.name for pack in settings.packs]
        if len(set(names)) < len(names):
            raise SystemExit(f"--packs must have different names before the first '_'. Got {', '.join(names)}.")
        bench = Bench((*paths, *([own] if own else [])))
        jobs = merged(job for name in chosen for job in PARTS[name].jobs(settings))
        results = measure(bench, jobs, args.out, args.jobs, args.minutes)
        for name in chosen:
            found |= {report: write(results, settings) for report, write in PARTS[name].reports.items()}
    if args.cost:
        found[costs[0]] = more_reports.report_cost(args.device)
        if args.device == "cpu":
            found["cost-stream"] = more_reports.report_stream_cost()
    return found


def main(argv: list[str] | None = None) -> Any:
    args = parse(argv)
    try:
        found = run(args)
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept: the same command goes on from there.", file=sys.stderr)
        return 130
    except MoontideError as error:
        return str(error)
    for name, text in found.items():
        print(f"\n## {name}\n\n{text}")
    if args.write:
        write_page(args.write, found)
    return None


if __name__ == "__main__":
    sys.exit(main())
