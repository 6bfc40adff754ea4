"""Growth of the time of MOON on shards with N, K, d and workers, measured here and predicted for other machines.

scripts/bench scale --out growth.jsonl              several sizes, minutes; a line each
scripts/bench scale --size 2000000x1000x512 --engine local --engine ray --shards 128 --out large.jsonl
scripts/bench scale --size 10000000x100x512 --memory 4 --shards 1000 --out large.jsonl    out of core: 4 GiB a worker
scripts/bench scale --fit growth.jsonl              the model and its predictions from lines measured before

Each measurement runs in a separate process: random float16 rows around the centres of half the classes are written to
Parquet in blocks, one file per shard, and `moontide.engine.run.adapt_shards` labels them. If it is started again with
the same --out, sizes in that file are not measured again, and an interrupted size continues with its data and
checkpoint; its line then says so and is not used in the fit. Data are under --folder during the measurement.

A line has seconds of reading and checking, of graph and recall, of an iteration (median), in all; the peak memory of
all processes together; the load of the machine at the start, which should be near 0.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

SIZES = [  # N, K, d, engine, workers: each alone, from the middle one
    (200_000, 100, 128, "local", 1), (800_000, 100, 128, "local", 1), (200_000, 400, 128, "local", 1),
    (200_000, 100, 512, "local", 1), (100_000, 1000, 512, "local", 1), (200_000, 1000, 512, "local", 1),
    (200_000, 1000, 512, "ray", 1), (200_000, 1000, 512, "ray", 2),
]  # fmt: skip
SHARD = 10_000  # rows, where the number of shards is not given
PREDICT = [(10**8, 1000, 512), (10**9, 1000, 512)]
SERVER, CORES, NETWORK = "r7a.16xlarge", 64, 25e9 / 8  # of AWS: cores (AMD EPYC 9R14, Zen 4), bytes a second
SERVERS = [0, 2, 16]  # 0: the machine measured on
ITERATIONS = 11

Line = dict[str, Any]


def write_shards(folder: Path, n: int, k: int, d: int, shards: int) -> np.ndarray:
    """Write random rows, one shard at a time, unless they exist; return the class embeddings."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = np.random.default_rng(0).normal(size=(k, d)).astype(np.float32)
    for i, size in enumerate(np.bincount(np.arange(n) % shards, minlength=shards)):
        path = folder / f"{i:05d}.parquet"
        if path.exists():
            continue
        rng = np.random.default_rng([0, i])
        rows = rng.standard_normal((size, d), np.float32)  # (n, d)
        rows *= 1.5
        rows += text[rng.integers(max(1, k // 2), size=size)]
        values = pa.FixedSizeListArray.from_arrays(pa.array(rows.astype(np.float16).ravel()), d)
        pq.write_table(pa.table({"embedding": values}), folder / "part", use_dictionary=False, compression="none")
        os.replace(folder / "part", path)
        say(f"data: {i + 1} of {shards} shards", last=i + 1 == shards)
    return text


def say(line: str, last: bool = True) -> None:
    """Show progress on standard error, in place where it is a terminal."""
    if sys.stderr.isatty():
        print(f"\r{line:<100}", end="\n" if last else "", file=sys.stderr, flush=True)
    elif last:
        print(line, file=sys.stderr, flush=True)


class Peak(threading.Thread):
    """Measures every five seconds the memory of this process and its children, with shared pages counted once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0

    def run(self) -> None:
        while True:
            self.bytes = max(self.bytes, sum(map(_memory, [os.getpid(), *_below(os.getpid())])))
            time.sleep(5)


def _below(pid: int) -> list[int]:
    try:
        tasks = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:  # it has ended meanwhile
        return []
    children = [int(child) for task in tasks for child in task.split()]
    return children + [p for child in children for p in _below(child)]


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def measure(n: int, k: int, d: int, engine: str, workers: int, shards: int, memory: float | None, at: Path) -> Line:
    """Make the data and label them; `memory` is what a worker may take, in GiB."""
    from moontide import method
    from moontide.engine.run import ShardTask, Workers, adapt_shards

    load, peak, going_on = os.getloadavg()[0], Peak(), (at / "out").exists()
    times: dict[str, float] = {}
    steps: list[float] = []
    plan: list[str] = []

    def report(line: str) -> None:
        say(line)
        if line.startswith("iteration"):
            steps.append(time.perf_counter())
        elif " shards, " in line:
            plan.append(line)
        elif line.startswith("graph"):
            times["graph"] = time.perf_counter()

    def progress(done: int, total: int) -> None:
        times.setdefault("check", 0.0)
        if done <= shards:
            times["check"] = time.perf_counter()
        say(f"{done} of {total} steps of shards", last=False)

    at.mkdir(parents=True, exist_ok=True)
    text = write_shards(at, n, k, d, shards)
    peak.start()
    start = time.perf_counter()
    crew = Workers(engine, None, workers if engine == "ray" else None, None if memory is None else int(memory * 2**30))
    adapt_shards(
        ShardTask(f"{at}/*.parquet", text, 20.0), method("moon"), f"{at}/out",
        workers=crew, report=report, progress=progress,
    )  # fmt: skip
    total = time.perf_counter() - start
    return {
        "n": n, "k": k, "d": d, "engine": engine, "workers": workers, "shards": shards, "memory": memory,
        "check_s": round(times["check"] - start, 2), "graph_s": round(times["graph"] - times["check"], 2),
        "iteration_s": round(float(np.median(np.diff(steps))), 3), "total_s": round(total, 1),
        "peak_GiB": round(peak.bytes / 2**30, 2), "cores": len(os.sched_getaffinity(0)), "load": round(load, 1),
        "resumed": going_on, "plan": plan[0],
    }  # fmt: skip


def fit(found: list[Line]) -> None:
    """Fit seconds of an iteration = N K (a d + b) + c N d + e on the local lines in memory, and predict.

    Reading costs by numbers, N d; the graph by pairs of rows in a shard, N n d.
    """
    from scipy.optimize import nnls

    lines = [x for x in found if x["engine"] == "local" and not x["resumed"] and "all of its shards" in x["plan"]]
    if len(lines) < 5:
        print(f"{len(lines)} lines of the local engine with all shards in memory are too few to fit")
        return
    names = ("n", "k", "d", "iteration_s", "check_s", "graph_s", "shards")
    n, k, d, y, check, graph, shards = (np.asarray([float(x[name]) for x in lines]) for name in names)
    terms = np.stack([n * k * d, n * k, n * d, np.ones_like(n)], axis=1)
    scale = terms.max(axis=0)
    a, b, c, e = nnls(terms / scale / y[:, None], np.ones_like(y))[0] / scale  # relative errors
    off = np.abs(terms @ [a, b, c, e] / y - 1)
    read, pair = check.sum() / (n * d).sum(), graph.sum() / (n * d * n / shards).sum()
    cores = lines[0]["cores"]
    print(f"on {cores} cores, seconds of an iteration = N K ({a:.3g} d + {b:.3g}) + {c:.3g} N d + {e:.3g}; "
          f"off by {off.max():.0%} at most, {np.median(off):.0%} in the median of {len(y)} sizes")  # fmt: skip
    print(f"reading: {read:.3g} N d; graph of shards of n rows: {pair:.3g} N n d")
    for rows, classes, dim in PREDICT:
        for servers in SERVERS:
            share = 1 / (servers * CORES / cores if servers else 1)
            sums = (CORES + int(np.ceil(np.log2(servers)))) * classes * dim * 8 / NETWORK if servers else 0.0
            step = share * (rows * classes * (a * dim + b) + rows * c * dim) + e + sums
            before = share * rows * dim * (read + pair * SHARD)
            name = f"{servers} x {SERVER}, {CORES} cores each" if servers else f"{cores} cores as measured"
            hours = (before + ITERATIONS * step) / 3600
            print(f"N = {rows:.0e}, K = {classes}, d = {dim}, {name}: "
                  f"{before:.0f} s before, {step:.1f} s an iteration, {hours:.2f} h in all")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help="NxKxd, may be repeated")
    parser.add_argument("--engine", action="append", choices=("local", "ray"))
    parser.add_argument("--workers", type=int, default=2, help="of Ray")
    parser.add_argument("--shards", type=int, help=f"else one for {SHARD} rows")
    parser.add_argument("--memory", type=float, help="GiB that a worker may take (else what is free)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "moontide-scale", help="for data")
    parser.add_argument("--out", type=Path, help="the file that lines are added to, and that is gone on with")
    parser.add_argument("--fit", type=Path, help="only fit the lines of a file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fit:
        fit(read(given.fit))
        return
    sizes = [tuple(map(int, size.split("x"))) for size in given.size or []]
    engines = [(engine, given.workers if engine == "ray" else 1) for engine in given.engine or ["local"]]
    runs = [(*size, *engine) for size in sizes for engine in engines] or SIZES
    found = read(given.out) if given.out and given.out.exists() else []
    for n, k, d, engine, workers in runs:
        shards = given.shards or -(-n // SHARD)
        what = {"n": n, "k": k, "d": d, "engine": engine, "workers": workers, "shards": shards, "memory": given.memory}
        if any(what.items() <= line.items() for line in found):
            continue
        at = given.folder / "-".join(map(str, what.values()))
        if given.one:
            print(json.dumps(measure(n, k, d, engine, workers, shards, given.memory, at)))
            return
        say(f"N = {n}, K = {k}, d = {d}, {engine}, {shards} shards")
        rest = ["--size", f"{n}x{k}x{d}", "--engine", engine, "--workers", str(workers), "--shards", str(shards)]
        rest += [] if given.memory is None else ["--memory", str(given.memory)]
        done = subprocess.run(
            [sys.executable, __file__, *rest, "--folder", str(given.folder), "--one"],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        shutil.rmtree(at)
        line = done.stdout.strip().splitlines()[-1]
        print(line, flush=True)
        if given.out:
            with open(given.out, "a", encoding="utf-8") as handle:
                handle.write(f"{line}\n")
        found.append(json.loads(line))
    if not sizes:
        fit(found)


def read(path: Path) -> list[Line]:
    """Read the lines of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
