"""How fast MOON is: against its equations written out densely, and against the products that no version can avoid.

    scripts/bench speed                     # this machine's CPU
    scripts/bench speed --device cuda       # a GPU, all three precisions

One run compares everything: the reference, MOON and the floor are timed in turn, interleaved, and the median is taken.
The floor is the zero-shot product (N x d x K), the similarity product (N x N x d, half of it on the CPU, where it is
symmetric) and, for each of the ten iterations, the two products of the classes that have samples. --markdown prints
the table as it stands in docs/performance.md; --json writes the rows for its plot.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from reference import reference

from moontide import MOON
from moontide.core.graph import nearest_neighbours
from moontide.simulate import simulate

DENSE = 20_000  # rows up to which the N x N reference is run


def machine(device: str) -> str:
    """Name the machine that the figures belong to."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def timed(work: list[Callable[[], Any]], device: str, repeat: int) -> list[float]:
    """Time several functions in turn, `repeat` times, and return each one's median seconds."""
    seconds = np.zeros((repeat, len(work)))
    for round_ in range(-2, repeat):  # two rounds to warm up
        for i, function in enumerate(work):
            start = time.perf_counter()
            function()
            if device == "cuda":
                import torch

                torch.cuda.synchronize()
            if round_ >= 0:
                seconds[round_, i] = time.perf_counter() - start
    return [float(s) for s in np.median(seconds, axis=0)]


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Return the memory that a run holds at most beyond its inputs."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return int(torch.cuda.max_memory_allocated() - before)
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def floor(f: Any, t: Any, live: int, device: str) -> Callable[[], Any]:
    """Return the products that any exact version makes."""
    n, active = f.shape[0], t[:live]

    def work() -> None:
        z = f @ t.T
        step = min(n, 1000 if device == "cpu" else 8192)
        for i in range(0, n, step):
            for j in range(i if device == "cpu" else 0, n, step):
                f[i : i + step] @ f[j : j + step].T
        z = z[:, :live] if device == "cpu" else z
        for _ in range(10):
            f @ active.T
            z.T @ f

    return work


@cache
def float64_labels(n: int, k: int, effective: int | None) -> Any:
    """Return the labels in double precision on the CPU."""
    data = simulate(n, k, effective_classes=effective, seed=0)
    return MOON().fit_predict(data.features.astype(np.float64), data.text.astype(np.float64)).labels


def measure(
    n: int, k: int, effective: int | None, device: str, precision: str, repeat: int, check: int
) -> dict[str, Any]:
    """Time one size."""
    data = simulate(n, k, effective_classes=effective, seed=0)
    f, t = data.features, data.text
    if device == "cuda":
        import torch

        f, t = torch.from_numpy(f).cuda(), torch.from_numpy(t).cuda()
        torch.backends.cuda.matmul.allow_tf32 = precision != "full"  # the same for reference and floor
    method = MOON(precision=precision) if device == "cuda" else MOON()
    result = method.fit_predict(f, t)
    live = int((result.beta > 0).sum())
    exact = float64_labels(n, k, effective) if n <= check else None
    work: list[Callable[[], Any]] = [lambda: method.fit_predict(f, t), floor(f, t, live, device)]
    if n <= DENSE:
        work.append(lambda: reference(f, t))
    repeat = repeat if n <= 10_000 else min(repeat, 3)
    seconds = timed(work, device, repeat)
    flops = 2 * n * k * 512 + (1 if device == "cpu" else 2) * n * n * 512 + 10 * 4 * n * live * 512
    labels = np.asarray(result.labels.cpu() if device == "cuda" else result.labels)
    return {
        "machine": machine(device), "precision": precision, "N": n, "K": k, "live": live, "seconds": seconds[0],
        "floor": seconds[1], "reference": seconds[2] if len(seconds) > 2 else None, "gflops": flops / seconds[0] / 1e9,
        "peak": peak_bytes(work[0], device), "graph": timed([lambda: nearest_neighbours(f, 3)], device, 1)[0],
        "agreement": None if exact is None else float((labels == exact).mean()),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Write the rows as a Markdown table, with the growth exponent from the size before."""
    head = ["precision", "N", "K", "classes with samples", "ms", "reference ms", "times faster", "share of the floor"]
    head += ["GFLOP/s", "peak MB", "growth exponent", "labels as float64"]
    lines = [head, ["---"] * len(head)]
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        before, slow, seconds = last.get((row["precision"], row["K"])), row["reference"], row["seconds"]
        last[row["precision"], row["K"]] = row
        lines.append([
            row["precision"], f"{row['N']:,}", f"{row['K']:,}", f"{row['live']:,}", f"{1e3 * seconds:.2f}",
            f"{1e3 * slow:.1f}" if slow else "", f"{slow / seconds:.1f}" if slow else "",
            f"{100 * row['floor'] / seconds:.0f} %", f"{row['gflops']:.0f}", f"{row['peak'] / 2**20:.0f}",
            f"{math.log(seconds / before['seconds']) / math.log(row['N'] / before['N']):.2f}" if before else "",
            "" if row["agreement"] is None else f"{100 * row['agreement']:.2f} %",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 1000, 10_000])
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--effective", type=int, default=25, help="classes present; 0: all")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--check", type=int, default=10_000, help="largest N whose labels are compared with float64")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    args = parser.parse_args()
    rows = []
    for precision in ("full", "tf32", "half") if args.device == "cuda" else ("full",):
        for k in args.classes:
            for n in args.sizes:
                rows.append(measure(n, k, args.effective or None, args.device, precision, args.repeat, args.check))
                print(f"{precision} N={n:,} K={k:,}: {1e3 * rows[-1]['seconds']:.2f} ms", flush=True)
    print(f"\n{rows[0]['machine']}\n\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
