"""Time methods on simulated tasks by the public interface alone, so that any version of the package can be asked.

`scripts/bench speed --against REV` runs it for two versions in turn; by itself it prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

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


def stream_step(name: str, k: int, repeat: int) -> float:
    """Return the least milliseconds of a step of a stream with one sample."""
    data = simulate(400, k, effective_classes=25, seed=0)
    stream = moontide.Stream(name, data.text)
    stream.push(data.features[:300])
    found = []
    for i in range(300, 300 + min(repeat * 5, 100)):
        start = time.perf_counter()
        stream.push(data.features[i : i + 1])
        found.append(1e3 * (time.perf_counter() - start))
    return min(found)


def measure(methods: list[str], device: str, repeat: int, precisions: list[str], streams: bool) -> dict[str, float]:
    """Time all of them."""
    rows: dict[str, float] = {}
    for n, k, present in SIZES[device]:
        data = simulate(n, k, effective_classes=present, seed=0)
        f, t, wait = data.features, data.text, lambda: None
        if device == "cuda":
            import torch

            f, t, wait = torch.from_numpy(f).cuda(), torch.from_numpy(t).cuda(), torch.cuda.synchronize
        for name in methods:
            for precision in precisions if name == "moon" and device == "cuda" else ["full"]:
                options = {"precision": precision} if name == "moon" else {}
                method = moontide.method(name, **options)
                key = f"{name} {precision} N={n} K={k} present={present or 'all'}"
                rows[key] = best(partial(method.fit_predict, f, t), repeat, wait)
    if streams:
        for name in methods:
            for k in (100, 1000):
                rows[f"{name} stream step N=1 K={k}"] = stream_step(name, k, repeat)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["moon", "stata", "tide"])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--precisions", nargs="+", default=["full", "half"], help="of moon, on a GPU")
    parser.add_argument("--streams", action="store_true", help="also one step of a stream")
    args = parser.parse_args()
    print(json.dumps(measure(args.methods, args.device, args.repeat, args.precisions, args.streams)))


if __name__ == "__main__":
    main()
