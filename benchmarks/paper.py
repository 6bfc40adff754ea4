"""The paper's experiments on all available feature packs and all cores, and the tables of docs/paper.md.

    scripts/bench paper                              # every suite with the paper's number of runs, overnight
    scripts/bench paper --seconds 5                  # at most 5 seconds of computing for each method on each scenario
    scripts/bench paper --minutes 60                 # as many runs as an hour allows
    scripts/bench paper --estimate                   # the first run of everything, and how long the others would take
    scripts/bench paper --suites batch-64 ablation   # some of the suites
    scripts/bench paper --write docs/paper.md        # the tables into the marked parts of the page, too
    scripts/bench paper --read results/paper/details.csv --write docs/paper.md   # nothing is run

The first run of every method is done first, to estimate the time of the others. After an interruption, the same command
continues. Records are in `--out`, one line per run, and `details.csv` there summarises them.

With `--minutes`, a method whose run takes t seconds does c / sqrt(t) runs, with the c that uses the time: this
minimises the sum of squared standard errors if all methods have the same variance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))  # where `python -m benchmarks.paper` does not look

from grid_parts.tables import check_page, write_page
from paper_parts.pages import pages, read_details, read_forward

from moontide.bench.data import Pack, find_data
from moontide.bench.processes import in_processes
from moontide.bench.records import Key, Record, environment, key, read_records
from moontide.bench.runner import Job, Limit, RunCounts, Source, Worker, plan, run_suite
from moontide.bench.suites import Entry, Scenario, Suite, load_suite
from moontide.errors import MoontideError
from moontide.options import json_safe
from moontide.report.bench import details
from moontide.report.results import Table, collect
from moontide.store.disk import replacing

FOLDER = Path("../shared/features")
# All but `backbones`, whose scenarios are those of the main suites, and `runtime`, beside which nothing may run.
SUITES = (
    "batch-64", "batch-1000", "online-128", "text-versus-released", "variants", "ablation", "alpha-design",
    "lambda-design", "beta", "batch-sizes", "all-classes", "random-classes", "sample-wise", "sensitivity",
    "convergence",
)  # fmt: skip
LEAST = 3  # runs of a method that takes too long
ALONE = 0.2  # seconds from which a method is a task by itself, so that all cores end together
USED = 0.9  # share of the cores' time that computing is expected to get


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=FOLDER, help=f"packs with labels; default: {FOLDER}")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), help="default: all but backbones and runtime")
    parser.add_argument("--methods", help="names separated by commas; default: those of the suites")
    parser.add_argument("--runs", type=int, help="the most runs of a scenario; default: the paper's")
    parser.add_argument("--seconds", type=float, help="of computing for each method on each scenario and pack")
    parser.add_argument("--minutes", type=float, help="as many runs as fit into so many minutes; then it stops")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes of one thread each")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where methods run; cuda: one job")
    parser.add_argument("--out", type=Path, default=Path("results/paper"), help="records, read and continued")
    parser.add_argument("--estimate", action="store_true", help="stop after the first run of everything")
    parser.add_argument(
        "--read", type=Path, nargs="+", help="files details.csv to make the tables from; nothing is run"
    )
    parser.add_argument("--forward", type=Path, help="times of the encoder, which `clip_forward --out` wrote")
    parser.add_argument("--write", type=Path, help="a page whose marked parts are replaced")
    return parser.parse_args(argv)


class Cell(NamedTuple):
    """A method on the batches of a scenario and some features; its runs are the same in every suite that has it."""

    features: str
    suite: str  # that declares the scenario
    scenario: str
    method: str
    options: str

    @staticmethod
    def of(record: Record) -> Cell:
        options = json.dumps(json_safe(record["options"]), sort_keys=True)
        return Cell(record["features"], record["seed"][0], record["seed"][2], record["method"], options)


@dataclass
class Known:
    """The runs that have been done: their keys by suite, the time of one, and the number per cell."""

    done: dict[str, set[Key]]
    times: dict[Cell, float]
    counts: Counter[Cell]


def read_known(suites: Sequence[Suite], out: Path) -> Known:
    """Read the records of some suites."""
    known, seconds = Known({suite.name: set() for suite in suites}, {}, Counter()), defaultdict(list)
    for suite in suites:
        seen: Counter[Cell] = Counter()
        for record in read_records(folder_of(out, suite)):
            known.done[suite.name].add(key(record))
            cell = Cell.of(record)
            seen[cell] += 1
            seconds[cell].append(record["seconds"])
        known.counts |= seen  # the most of any suite
    known.times = {cell: sorted(found)[len(found) // 2] for cell, found in seconds.items()}
    return known


def folder_of(out: Path, suite: Suite) -> Path:
    """Return the folder of the records of a suite, a separate one because all records of a folder are read at once."""
    return out / suite.name


def cells_of(suite: Suite, features: str, scenario: Scenario, method: str | None = None) -> list[Cell]:
    """Return the cells of a suite, of one method or of all."""
    entries = [entry for entry in suite.entries if method in (None, entry.name)]
    return [Cell(features, scenario.suite, scenario.id, *entry.key) for entry in entries]


class Effort(NamedTuple):
    """A method whose run takes t seconds does amount / t^power of them."""

    amount: float
    power: float


def limit_by(times: Mapping[Cell, float], suite: Suite, effort: Effort | None) -> Limit:
    """Return how many runs a method does, from its time and an effort; None means all of them.

    All entries of one method do as many runs as the slowest, so that they are compared on the same batches.
    """

    def limit(pack: Pack, scenario: Scenario, entry: Entry) -> int:
        found = [times[cell] for cell in cells_of(suite, pack.hash, scenario, entry.name) if cell in times]
        return most_runs(scenario.runs, found, effort)

    return limit


def most_runs(runs: int, found: Sequence[float], effort: Effort | None) -> int:
    """Return how many runs an effort allows, rounded to one of few values (10, 13, 16, 20, ...)."""
    if effort is None or not found:
        return runs
    fit = max(LEAST, int(effort.amount / max(*found, 1e-6) ** effort.power))
    return min(runs, fit if fit < 10 else round(10 ** (math.floor(10 * math.log10(fit) + 1e-9) / 10)))


def left(suites: Sequence[Suite], known: Known, effort: Effort | None) -> dict[Cell, float]:
    """Estimate the seconds for the remaining runs of each cell from the times of the runs that have been done."""
    wanted: Counter[Cell] = Counter()
    for suite in suites:
        for features in {cell.features for cell in known.times}:
            for scenario in suite.scenarios:
                for method in {entry.name for entry in suite.entries}:
                    cells = [cell for cell in cells_of(suite, features, scenario, method) if cell in known.times]
                    most = most_runs(scenario.runs, [known.times[cell] for cell in cells], effort)
                    wanted |= Counter(dict.fromkeys(cells, most))
    return {cell: max(0, most - known.counts[cell]) * known.times[cell] for cell, most in wanted.items()}


def effort_for(suites: Sequence[Suite], known: Known, total: float) -> Effort:
    """Return the greatest effort with which the remaining runs take no longer than `total` seconds."""
    low, high = 0.0, 1e5
    for _ in range(30):
        middle = (low + high) / 2
        fits = sum(left(suites, known, Effort(middle, 0.5)).values()) <= total
        low, high = (middle, high) if fits else (low, middle)
    return Effort(low, 0.5)


def estimate(suites: Sequence[Suite], known: Known, effort: Effort | None, jobs: int) -> str:
    """Estimate the time of the remaining runs, by method and in total."""
    by_method: Counter[str] = Counter()
    for cell, time_of in left(suites, known, effort).items():
        by_method[cell.method] += time_of
    lines = [f"{method}: {time_of / 60:.1f} core-minutes left" for method, time_of in by_method.most_common()]
    total = sum(by_method.values()) / 60
    lines.append(f"together {total:.0f} core-minutes, about {total / jobs:.1f} minutes on {jobs} cores")
    if effort is not None:
        lines.append(f"at most {effort.amount:.3g} / t^{effort.power:g} runs of what takes t seconds, at least {LEAST}")
    return "\n".join(lines)


def progress(name: str) -> Any:
    last = [time.monotonic()]

    def show(done: int, of: int) -> None:
        if done == of or time.monotonic() - last[0] > 20:
            last[0] = time.monotonic()
            print(f"{name}: {done:,} of {of:,} runs", file=sys.stderr, flush=True)

    return show


Task = tuple[tuple[str, Job], ...]  # jobs of some suites on one draw


class Pool:
    """The workers of all suites, for processes that take tasks of any suite; shared runs are done once."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self.workers = workers

    def __call__(self, task: Task) -> list[str]:
        known: dict[tuple[str, str], Record] = {}
        return [f"{name}: {reason}" for name, job in task for reason in self.workers[name](job, known)[1]]


def tasks_of(jobs: Iterable[tuple[Suite, Job]], times: Mapping[tuple[Any, ...], float]) -> list[Task]:
    """Put the jobs on one draw together, what takes long by itself; low runs first, of these what takes long.

    `times` are by file, suite and id of the scenario, and what an entry is known by. What has none may take long.
    """
    draws: dict[Any, dict[Any, list[tuple[str, Job, int]]]] = defaultdict(lambda: defaultdict(list))
    for suite, job in jobs:
        place = (job.path, job.scenario.suite, job.scenario.id)
        for number in job.entries:
            draws[place, job.run][suite.entries[number].key].append((suite.name, job, number))
    found = []
    for (place, run), entries in draws.items():
        cost = {entry: times.get((*place, *entry), ALONE) for entry in entries}
        alone = [[entry] for entry in entries if cost[entry] >= ALONE]
        together = [entry for entry in entries if cost[entry] < ALONE]
        for part in [*alone, *([together] if together else [])]:
            numbers: dict[str, tuple[Job, list[int]]] = {}
            for name, job, number in (item for entry in part for item in entries[entry]):
                numbers.setdefault(name, (job, []))[1].append(number)
            task = tuple((name, replace(job, entries=tuple(sorted(n)))) for name, (job, n) in numbers.items())
            found.append(((run, -sum(cost[entry] for entry in part), -weight(place, part)), task))
    return [task for _, task in sorted(found, key=lambda pair: pair[0])]


def weight(place: tuple[Path, str, str], part: Sequence[tuple[str, str]]) -> float:
    """Return a rough relative weight for a task of unknown duration."""
    size = {"all": 1e4}.get(place[2].split("-")[1]) or float(place[2].split("-")[1])
    return place[0].stat().st_size * (1e4 if place[2].startswith("online") else size) * (
        20 if part[0][0] == "em_dirichlet" else 1
    )  # fmt: skip


def work(
    args: argparse.Namespace, suites: Sequence[Suite], known: Known, effort: Effort | None, until: float | None = None
) -> None:
    """Do the missing runs in the order of their numbers, so that all suites advance together."""
    source, about, workers = Source(args.device), environment(), {}
    jobs: list[tuple[Suite, Job]] = []
    for suite in suites:
        folder, outcome = folder_of(args.out, suite), RunCounts()
        folder.mkdir(parents=True, exist_ok=True)
        limit = limit_by(known.times, suite, effort)
        todo = plan(suite, find_data(args.data), known.done[suite.name], outcome, limit, source)
        if not suite.timing:
            jobs += [(suite, job) for job in todo]
            workers[suite.name] = Worker(suite, folder, about, source)
        elif todo:  # nothing may run beside it
            run_suite(suite, args.data, folder, device=args.device, progress=progress(suite.name))
        if not known.times:
            print("".join(f"{suite.name}: {line}\n" for line in outcome.skipped), end="", file=sys.stderr)
    paths = {source.read(path).hash: path for path in {job.path for _, job in jobs}}
    tasks = tasks_of(jobs, {(paths.get(c.features), *c[1:]): time_of for c, time_of in known.times.items()})
    processes, pool, shown, failures = (
        1 if args.device != "cpu" else args.jobs,
        Pool(workers),
        progress("all"),
        Counter(),
    )
    answers = (pool(task) for task in tasks) if processes == 1 else in_processes(pool, tasks, processes)
    with closing(answers):
        for number, failed in enumerate(answers, 1):
            failures.update(failed)
            shown(number, len(tasks))
            if until is not None and time.monotonic() > until:
                print("The time is over; what is finished is kept.", file=sys.stderr)
                break
    for reason, count in failures.items():
        print(f"failed {count} times: {reason}", file=sys.stderr)


def tables_of(folder: Path) -> tuple[Path, list[Table]]:
    """Sum up the records of a suite."""
    return folder, collect(folder).tables


def run(args: argparse.Namespace) -> Path:
    """Do the requested runs that are missing, and return the summary file, even after an interrupt."""
    names = None if args.methods is None else args.methods.split(",")
    suites = [load_suite(name).choose(names).shorten(args.runs) for name in args.suites]
    until = None if args.minutes is None else time.monotonic() + 60 * args.minutes
    try:
        work(args, [suite.shorten(1) for suite in suites], read_known(suites, args.out), None, until)
        known, effort = read_known(suites, args.out), None if args.seconds is None else Effort(args.seconds, 1.0)
        if until is not None and effort is None:
            effort = effort_for(suites, known, USED * args.jobs * max(0.0, until - time.monotonic()))
        print(estimate(suites, known, effort, args.jobs), file=sys.stderr, flush=True)
        if not args.estimate:
            work(args, suites, known, effort, until)
    finally:
        path: Path = args.out / "details.csv"
        folders = sorted(folder for folder in args.out.iterdir() if any(folder.glob("*.jsonl")))
        found = dict(in_processes(tables_of, folders, args.jobs) if args.jobs > 1 else map(tables_of, folders))
        with replacing(path) as handle:
            handle.write(details([table for folder in folders for table in found[folder]]).encode())
    return path


def main(argv: list[str] | None = None) -> Any:
    args = parse(argv)
    try:
        found = pages(read_details(args.read or [run(args)]), read_forward(args.forward))
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
