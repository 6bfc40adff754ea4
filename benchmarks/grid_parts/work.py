"""Jobs in processes, with one line per finished result, so that nothing is done twice."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from grid_parts.measures import MEASURES, Numbers
from grid_parts.packs import Pack, read_pack
from grid_parts.variants import fingerprint
from moontide.bench.processes import in_processes

Record = dict[str, Any]
SLOW = {"frolic": 1000, "inmap": 500, "dota": 100, "dpe": 20, "ecalp": 20, "em_dirichlet": 20}  # times the others


class Job(NamedTuple):
    """Some methods on one draw of a cell."""

    measure: str
    cell: Any
    run: int
    titles: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """The packs, and how jobs are done on them; every process has one."""

    paths: tuple[Path, ...]

    @property
    def packs(self) -> dict[str, Pack]:
        return {pack.name: pack for pack in map(read_pack, self.paths)}

    def __call__(self, job: Job) -> tuple[Job, list[tuple[str, Numbers]]]:
        """Do a job."""
        return job, list(MEASURES[job.measure](self.packs, job.cell, job.run, job.titles))

    def key(self, job: Job, title: str) -> tuple[str, str, int, str, str]:
        """Return the key of a result: what was measured, and a hash of code, options and data."""
        others = sorted(pack.digest for pack in self.packs.values()) if title == "TIDE with negatives" else []
        words = [fingerprint(title), self.packs[job.cell.pack].digest, *others]
        return job.measure, str(job.cell), job.run, title, hashlib.sha256("".join(words).encode()).hexdigest()[:16]

    def weight(self, job: Job) -> float:
        """Return about how long a job takes, in no unit: to do the longest first and to tell the time left."""
        calls = job.cell.samples / job.cell.size if job.measure == "stream" else 1
        times = sum(SLOW.get(title, 1) for title in job.titles)
        return float(times * (job.cell.samples * len(self.packs[job.cell.pack].text) + 30_000 * calls))


def merged(jobs: Iterable[Job]) -> list[Job]:
    """Join jobs on the same draw."""
    titles: dict[Job, dict[str, None]] = defaultdict(dict)
    for job in jobs:
        titles[job._replace(titles=())].update(dict.fromkeys(job.titles))
    return [job._replace(titles=tuple(found)) for job, found in titles.items()]


def read_log(path: Path) -> dict[tuple[Any, ...], Record]:
    """Read the results of a log by key; a line that was cut short is left out, and so done again."""
    found = {}
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            record = json.loads(line)
            found[tuple(record[name] for name in ("measure", "cell", "run", "method", "hash"))] = record
        except (ValueError, KeyError, TypeError):
            continue
    return found


class Results:
    """The results by measure, cell and title, in the order of the runs."""

    def __init__(self, bench: Bench, jobs: Iterable[Job], log: dict[tuple[Any, ...], Record]) -> None:
        self.packs = bench.packs
        self._found: dict[tuple[str, Any, str], list[Record]] = defaultdict(list)
        for job in sorted(jobs, key=lambda job: job.run):
            for title in job.titles:
                if (key := bench.key(job, title)) in log:  # else the time was over before
                    self._found[job.measure, job.cell, title].append(log[key])

    def cells(self, measure: str) -> list[Any]:
        """Return the cells, those of one pack together."""
        cells = dict.fromkeys(cell for kind, cell, _ in self._found if kind == measure)
        return sorted(cells, key=lambda cell: list(self.packs).index(cell.pack))

    def titles(self, measure: str) -> list[str]:
        return list(dict.fromkeys(title for kind, _, title in self._found if kind == measure))

    def runs(self, measure: str, cell: Any, title: str, name: str = "accuracy") -> list[Any]:
        """Return one number of every run."""
        return [record[name] for record in self._found[measure, cell, title]]


def measure(bench: Bench, jobs: list[Job], path: Path, processes: int, minutes: float | None = None) -> Results:
    """Do what of the jobs is not in the log yet, write a line for each result, and return all results.

    With `minutes`, what is not finished by then is left out, and jobs go in an order in which a method that takes t has
    done as many runs of a cell as c / sqrt(t) at any time, which makes the most of the time.
    """
    log, until = read_log(path), None if minutes is None else time.monotonic() + 60 * minutes
    apart = [job._replace(titles=(title,)) for job in jobs for title in job.titles]  # one slow method holds up no other
    missing = (job for job in apart if bench.key(job, job.titles[0]) not in log)
    left = sorted(
        missing, key=lambda job: ((until is not None) * job.run * bench.weight(job) ** 0.5, -bench.weight(job))
    )
    if left and minutes != 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        answered: Any = in_processes(bench, left, min(processes, len(left)))
        with open(path, "ab") as handle, closing(answered):
            handle.write(b"\n" * torn)  # ends a line that was cut short
            for job, answers in shown(answered, left, bench):
                for title, numbers in answers:
                    key = bench.key(job, title)
                    log[key] = dict(zip(("measure", "cell", "run", "method", "hash"), key, strict=True)) | numbers
                    handle.write(json.dumps(log[key], allow_nan=False).encode() + b"\n")
                handle.flush()
                if until is not None and time.monotonic() > until:
                    break
    found = sum(bench.key(job, job.titles[0]) in log for job in left)
    print(f"{len(left)} results were missing; {found} of them are now in {path}.", file=sys.stderr)
    return Results(bench, jobs, log)


def shown(answers: Iterator[Any], jobs: list[Job], bench: Bench) -> Iterator[Any]:
    """Yield the answers, and show how many there are and about how long the others take."""
    total, done, terminal = sum(map(bench.weight, jobs)), 0.0, sys.stderr.isatty()
    start = last = time.monotonic()
    for number, (job, answer) in enumerate(answers, 1):
        yield job, answer
        done += bench.weight(job)
        now = time.monotonic()
        if number == len(jobs) or now - last > (0.2 if terminal else 10):
            minutes, seconds = divmod(round((now - start) * (total - done) / done), 60)
            line = f"{number:,} of {len(jobs):,} results, about {minutes} min {seconds:02d} s left"
            end = "\n" if number == len(jobs) or not terminal else ""
            print(f"\r{line:<60}" if terminal else line, end=end, file=sys.stderr, flush=True)
            last = now
