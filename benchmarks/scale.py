"""How the time of MOON on shards grows with N, K, d and workers, measured here, and what that predicts elsewhere.

scripts/bench scale                       a few sizes, minutes
scripts/bench scale --size 2000000x1000x512 --engine local --shards 32
scripts/bench scale --fit results.jsonl   the model and its predictions from lines measured before

Each measurement is a process of its own: random float16 rows around class centres are written to Parquet, and
`moontide.engine.run.adapt_shards` labels them. Prints a JSON line each: seconds of reading and graph, seconds of an
iteration (median), peak memory of the process (on Ray: of the driver), the 1-minute load of the machine at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SIZES = [
    (50_000, 100, 64), (100_000, 100, 64), (200_000, 100, 64), (100_000, 400, 64), (100_000, 100, 256),
    (50_000, 1000, 512),
]  # fmt: skip
PREDICT = [(10**8, 1000, 512), (10**9, 1000, 512)]
HARDWARE = [
    ("2 cores as measured", 2, 0),
    ("one server of 64 such cores", 64, 0),
    ("16 servers of 64 such cores", 1024, 16),
]
NETWORK = 10e9 / 8  # bytes a second between servers: 10 Gbit/s


def write_shards(folder: Path, n: int, k: int, d: int, shards: int) -> np.ndarray:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    text = rng.normal(size=(k, d)).astype(np.float32)
    for i, size in enumerate(np.bincount(np.arange(n) % shards, minlength=shards)):
        rows = text[rng.integers(k // 2, size=size)] + rng.normal(size=(size, d), scale=1.5).astype(np.float32)
        values = pa.array(rows.astype(np.float16).ravel())
        pq.write_table(
            pa.table({"embedding": pa.FixedSizeListArray.from_arrays(values, d)}), folder / f"{i:04d}.parquet"
        )
    return text


def measure(n: int, k: int, d: int, engine: str, workers: int, shards: int) -> dict[str, object]:
    from moontide import method
    from moontide.engine.run import adapt_shards

    load = os.getloadavg()[0]
    times: list[float] = []
    steps: list[float] = []
    lines: list[str] = []

    def report(line: str) -> None:
        (steps if line.startswith("iteration") else times).append(time.perf_counter())
        lines.append(line)

    with tempfile.TemporaryDirectory() as folder:
        text = write_shards(Path(folder), n, k, d, shards)
        start = time.perf_counter()
        adapt_shards(
            f"{folder}/*.parquet", text, method("moon"), f"{folder}/out", engine=engine,
            workers=workers if engine == "ray" else None, report=report, logit_scale=20.0,
        )  # fmt: skip
        total = time.perf_counter() - start
    return {
        "n": n, "k": k, "d": d, "engine": engine, "workers": workers, "shards": shards,
        "prepare_s": round(times[-1] - start, 2), "iteration_s": round(float(np.median(np.diff(steps))), 3),
        "total_s": round(total, 1), "peak_GiB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "load": round(load, 1), "plan": lines[0],
    }  # fmt: skip


def fit(found: list[dict[str, object]]) -> None:
    """Fit seconds of an iteration = N (a K d + b K) + c on the local lines, and predict."""
    from scipy.optimize import nnls

    local = [x for x in found if x["engine"] == "local"]
    n, k, d, y = (np.asarray([float(x[name]) for x in local]) for name in ("n", "k", "d", "iteration_s"))  # type: ignore[arg-type]
    terms = np.stack([n * k * d, n * k, np.ones_like(n)], axis=1)
    scale = terms.max(axis=0)
    a, b, c = nnls(terms / scale / y[:, None], np.ones_like(y))[0] / scale  # relative errors
    errors = np.abs(terms @ [a, b, c] / y - 1)
    print(f"seconds of an iteration = N K ({a:.3g} d + {b:.3g}) + {c:.3g}; off by {errors.max():.0%} at most, "
          f"{np.median(errors):.0%} in the median of {len(y)} sizes")  # fmt: skip
    for size in PREDICT:
        for name, cores, servers in HARDWARE:
            rows, classes, dim = size
            seconds = rows * classes * (a * dim + b) * 2 / cores + c
            hops = int(np.ceil(np.log2(servers))) if servers > 1 else 0
            seconds += hops * classes * dim * 8 / NETWORK
            print(f"N = {rows:.0e}, K = {classes}, d = {dim}, {name}: {seconds:.0f} s an iteration, "
                  f"{11 * seconds / 3600:.1f} h for 11")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", help="NxKxd, may be repeated")
    parser.add_argument("--engine", action="append", choices=("local", "ray"))
    parser.add_argument("--workers", type=int, default=2, help="of Ray")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--fit", type=Path, help="only fit the lines of a file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.fit:
        fit([json.loads(line) for line in given.fit.read_text().splitlines() if line.startswith("{")])
        return
    sizes = [tuple(int(x) for x in size.split("x")) for size in given.size or []] or SIZES
    engines = given.engine or ["local"]
    if given.one:
        print(json.dumps(measure(*sizes[0], engines[0], given.workers, given.shards)))
        return
    found = []
    for engine in engines:
        for size in sizes:
            rest = ["--size", "x".join(map(str, size)), "--engine", engine]
            rest += ["--workers", str(given.workers), "--shards", str(given.shards), "--one"]
            done = subprocess.run([sys.executable, __file__, *rest], check=True, capture_output=True, text=True)
            print(done.stdout.strip().splitlines()[-1], flush=True)
            found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    if len({(x["n"], x["k"], x["d"]) for x in found if x["engine"] == "local"}) > 3:
        fit(found)


if __name__ == "__main__":
    main()
