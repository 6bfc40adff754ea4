"""The paper's experiments on all feature packs there are, all cores, one command, and the tables of docs/paper.md.

    scripts/bench paper                              # every suite with the paper's number of runs, overnight
    scripts/bench paper --seconds 5                  # at most 5 seconds of computing for each method on each scenario
    scripts/bench paper --estimate                   # the first run of everything, and how long the others would take
    scripts/bench paper --suites batch-64 ablation   # some of the suites
    scripts/bench paper --write docs/paper.md        # the tables into the marked parts of the page, too
    scripts/bench paper --read results/paper/details.csv --write docs/paper.md   # nothing is run

The first run of every method is done first and kept: its time tells how long the rest will take. Stopped at any moment,
the same command goes on from there. Records are in `--out`, one line a run; `details.csv` there sums them up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # where `python -m benchmarks.paper` does not look

from grid_parts.tables import check_page, write_page
from paper_parts.pages import pages, read_details

from moontide.bench.data import Pack, find_data
from moontide.bench.processes import in_processes
from moontide.bench.records import Record, environment, key, read_records
from moontide.bench.runner import Job, Limit, RunCounts, Source, Worker, plan, run_suite
from moontide.bench.suites import Entry, Scenario, Suite, load_suite
from moontide.errors import MoontideError
from moontide.options import json_safe
from moontide.report.bench import details
from moontide.report.results import collect
from moontide.store.disk import replacing

FOLDER = Path("../shared/features")
# All but `backbones`, whose scenarios are those of the main suites, and `runtime`, beside which nothing may run.
SUITES = (
    "batch-64", "batch-1000", "online-128", "text-versus-released", "variants", "ablation", "alpha-design",
    "lambda-design", "beta", "batch-sizes", "all-classes", "random-classes", "sample-wise", "sensitivity",
    "convergence",
)  # fmt: skip
LEAST = 1  # runs of a method that takes too long


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FOLDER, help=f"packs with labels; default: {FOLDER}")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), help="default: all but backbones and runtime")
    parser.add_argument("--methods", help="names separated by commas; default: those of the suites")
    parser.add_argument("--runs", type=int, help="the most runs of a scenario; default: the paper's")
    parser.add_argument("--seconds", type=float, help="of computing for each method on each scenario and pack")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of one thread each")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where methods run; cuda: one job")
    parser.add_argument("--out", type=Path, default=Path("results/paper"), help="records, read and continued")
    parser.add_argument("--estimate", action="store_true", help="stop after the first run of everything")
    parser.add_argument(
        "--read", type=Path, nargs="+", help="files details.csv to make the tables from; nothing is run"
    )
    parser.add_argument("--write", type=Path, help="a page whose marked parts are replaced")
    return parser.parse_args(argv)


def first_times(out: Path) -> dict[tuple[Any, ...], float]:
    """Return the seconds of one run of each method by scenario and features, the median of what is there."""
    found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for record in read_records(out):
        found[_cell(record)].append(record["seconds"])
    return {cell: sorted(times)[len(times) // 2] for cell, times in found.items()}


def _cell(record: Record) -> tuple[Any, ...]:
    words = (record[name] for name in ("suite", "version", "features", "method"))
    return (*words, record["scenario"]["id"], str(json_safe(record["options"])))


def folder_of(out: Path, suite: Suite) -> Path:
    """Return where the records of a suite are: apart, since all of a folder are read before a suite goes on."""
    return out / suite.name


def limit_by(times: dict[tuple[Any, ...], float], suite: Suite, seconds: float | None) -> Limit:
    """Return how many runs a method does so that it computes no longer than `seconds`; None: all of them.

    All entries of one method do as many as the slowest, so that they are compared on the same batches.
    """

    def limit(pack: Pack, scenario: Scenario, entry: Entry) -> int:
        known = (suite.name, suite.version, pack.hash, entry.name, scenario.id)
        found = [time_of for cell, time_of in times.items() if cell[:5] == known]
        if seconds is None or not found:
            return scenario.runs
        return min(scenario.runs, max(LEAST, int(seconds / max(*found, 1e-6))))

    return limit


def estimate(suites: Iterable[Suite], out: Path, seconds: float | None, jobs: int) -> str:
    """Return how long what is left will take, by the times of the runs that are there."""
    lines, total = [], 0.0
    for suite in suites:
        times, done = first_times(folder_of(out, suite)), defaultdict(int)
        for record in read_records(folder_of(out, suite)):
            done[_cell(record)] += 1
        runs = {scenario.id: scenario.runs for scenario in suite.scenarios}
        left = 0.0
        for cell, time_of in times.items():
            if cell[4] in runs:
                slowest = max(x for other, x in times.items() if other[:5] == cell[:5])
                most = runs[cell[4]] if seconds is None else max(LEAST, int(seconds / max(slowest, 1e-6)))
                left += time_of * max(0, min(runs[cell[4]], most) - done[cell])
        lines.append(f"{suite.name}: {left / 60:.1f} core-minutes left")
        total += left
    lines.append(f"together {total / 60:.0f} core-minutes, about {total / 60 / jobs:.0f} minutes on {jobs} cores")
    return "\n".join(lines)


def progress(name: str) -> Any:
    last = [time.monotonic()]

    def show(done: int, of: int) -> None:
        if done == of or time.monotonic() - last[0] > 20:
            last[0] = time.monotonic()
            print(f"{name}: {done:,} of {of:,} runs", file=sys.stderr, flush=True)

    return show


class Pool:
    """The workers of all suites, for processes that take jobs of any of them."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers

    def __call__(self, job: tuple[str, Job]) -> tuple[str, tuple[int, list[str]]]:
        return job[0], self.workers[job[0]](job[1])


def work(args: argparse.Namespace, suites: Sequence[Suite], limit: Callable[[Suite], Limit] | None = None) -> None:
    """Do the runs that are missing, those with low numbers first: whenever it is stopped, all suites are as far."""
    source, about, jobs, workers = Source(args.device), environment(), [], {}
    for suite in suites:
        folder, outcome = folder_of(args.out, suite), RunCounts()
        folder.mkdir(parents=True, exist_ok=True)
        done = {key(record) for record in read_records(folder)}
        todo = plan(suite, find_data(args.data), done, outcome, limit and limit(suite), source)
        if not suite.timing:
            jobs += [(suite.name, job) for job in todo]
            workers[suite.name] = Worker(suite, folder, about, source)
        elif todo:  # nothing may run beside it
            run_suite(suite, args.data, folder, device=args.device, progress=progress(suite.name))
        if limit is None:
            print("".join(f"{suite.name}: {line}\n" for line in outcome.skipped), end="", file=sys.stderr)
    jobs.sort(key=lambda pair: pair[1].run)
    processes, pool, shown, failures = (
        1 if args.device != "cpu" else args.jobs,
        Pool(workers),
        progress("all"),
        Counter(),
    )
    answers: Any = map(pool, jobs) if processes == 1 else in_processes(pool, jobs, processes)
    for number, (name, (_, failed)) in enumerate(answers, 1):
        failures.update(f"{name}: {reason}" for reason in failed)
        shown(number, len(jobs))
    for reason, count in failures.items():
        print(f"failed {count} times: {reason}", file=sys.stderr)


def run(args: argparse.Namespace) -> Path:
    """Run what is asked for and is not there yet, and return the file that sums it up, also after an interrupt."""
    names = None if args.methods is None else args.methods.split(",")
    suites = [load_suite(name).choose(names).shorten(args.runs) for name in args.suites]
    try:
        work(args, [suite.shorten(1) for suite in suites])
        print(estimate(suites, args.out, args.seconds, args.jobs), file=sys.stderr, flush=True)
        if not args.estimate:
            times = {suite.name: first_times(folder_of(args.out, suite)) for suite in suites}
            work(args, suites, lambda suite: limit_by(times[suite.name], suite, args.seconds))
    finally:
        path: Path = args.out / "details.csv"
        folders = sorted(folder for folder in args.out.iterdir() if any(folder.glob("*.jsonl")))
        tables = [table for folder in folders for table in collect(folder).tables]
        with replacing(path) as handle:
            handle.write(details(tables).encode())
    return path


def main(argv: list[str] | None = None) -> Any:
    args = parse(argv)
    try:
        found = pages(read_details(args.read or [run(args)]))
    except KeyboardInterrupt:
        print("\nStopped. What is finished is kept: the same command goes on from there.", file=sys.stderr)
        return 130
    except MoontideError as error:
        return str(error)
    if args.write:
        check_page(args.write, found)
        write_page(args.write, found)
    for name, text in found.items():
        print(f"\n## {name}\n\n{text}")
    return None


if __name__ == "__main__":
    sys.exit(main())
