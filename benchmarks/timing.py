"""Time methods on simulated tasks by the public interface alone, so that any version of the package can be asked.

`scripts/bench speed --against REV` runs it for two versions in turn; by itself it prints a line of JSON: milliseconds
and MB of each task. With --save it writes the labels and confidences of each task as well.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import moontide
from moontide.simulate import simulate

SIZES = {
    "cpu": ((64, 100, 25), (128, 1000, 25), (1000, 100, 25), (1000, 1000, 25), (1000, 1000, None)),
    "cuda": ((128, 1000, 25), (1000, 1000, 25), (1000, 1000, None), (10_000, 1000, 25), (50_000, 1000, 25)),
}  # N, K, classes present (None: all)


def best(function: Callable[[], Any], repeat: int, wait: Callable[[], Any]) -> float:
    """Return the least milliseconds of some calls, after two to warm up."""
    found = []
    for _ in range(repeat + 2):
        start = time.perf_counter()
        function()
        wait()
        found.append(1e3 * (time.perf_counter() - start))
    return min(found[2:])


def peak_mb(function: Callable[[], Any], device: str) -> float:
    """Return the memory that a call holds at most beyond its inputs, in MB."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return float(torch.cuda.max_memory_allocated() - before) / 1e6
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def stream_step(name: str, k: int, repeat: int) -> tuple[float, Any]:
    """Return the least milliseconds of a step of a stream with one sample, and the result of all steps."""
    data = simulate(400, k, effective_classes=25, seed=0)
    stream = moontide.Stream(name, data.text)
    stream.push(data.features[:300])
    found, results = [], []
    for i in range(300, 300 + min(repeat * 5, 100)):
        start = time.perf_counter()
        results.append(stream.push(data.features[i : i + 1]))
        found.append(1e3 * (time.perf_counter() - start))
    return min(found), moontide.Result.concatenate(results)


def host(x: Any) -> Any:
    """Return an array of numpy or torch on the host."""
    return x.cpu().numpy() if hasattr(x, "cpu") else x


def measure(
    methods: list[str], device: str, repeat: int, precisions: list[str], streams: bool, save: Path | None
) -> dict[str, dict[str, float]]:
    """Time all of them."""
    rows: dict[str, dict[str, float]] = {}

    def keep(key: str, result: Any, **figures: float) -> None:
        rows[key] = figures
        if save is not None:
            np.savez(save / key, labels=host(result.labels), confidence=host(result.confidence))

    for n, k, present in SIZES[device]:
        data = simulate(n, k, effective_classes=present, seed=0)
        f, t, wait = data.features, data.text, lambda: None
        if device == "cuda":
            import torch

            f, t, wait = torch.from_numpy(f).cuda(), torch.from_numpy(t).cuda(), torch.cuda.synchronize
        for name in methods:
            for precision in precisions if name == "moon" and device == "cuda" else ["full"]:
                options = {"precision": precision} if name == "moon" else {}
                call = partial(moontide.method(name, **options).fit_predict, f, t)
                key = f"{name} {precision} N={n} K={k} present={present or 'all'}"
                result = call()
                keep(key, result, ms=best(call, repeat, wait), mb=peak_mb(call, device))
    if streams:
        for name in methods:
            for k in (100, 1000):
                ms, result = stream_step(name, k, repeat)
                keep(f"{name} stream step N=1 K={k}", result, ms=ms)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["moon", "stata", "tide"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--precisions", nargs="+", default=["full", "half"], help="of moon, on a GPU")
    parser.add_argument("--streams", action="store_true", help="also one step of a stream")
    parser.add_argument("--save", type=Path, help="a folder for the labels and confidences of each task")
    args = parser.parse_args()
    print(json.dumps(measure(args.methods, args.device, args.repeat, args.precisions, args.streams, args.save)))


if __name__ == "__main__":
    main()
