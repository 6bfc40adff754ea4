"""Seconds of every method on one batch: N = 1000 samples, K = 100 and 1000 classes, d = 512, on the CPU.

    scripts/bench methods

Each method runs with its defaults on the same simulated features with 25 classes present, MTA on 8 views of them;
online methods take the batch in one step. Methods that need an encoder are left out. The time of MOON is measured with
each method, interleaved in the same run, because machines are noisy: compare the ratios.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import moontide
from moontide import Task
from moontide.core.arrays import unit_rows
from moontide.simulate import simulate


def seconds(method: Any, task: Task) -> float:
    start = time.perf_counter()
    method.fit_predict(task)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--methods", nargs="+", default=list(moontide.method_names()))
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    methods = {name: moontide.method(name) for name in args.methods}
    left_out = sorted(name for name, method in methods.items() if "encoder" in method.needs)
    table: dict[str, list[str]] = {name: [] for name in methods if name not in left_out}
    moon = moontide.method("moon")
    for k in args.classes:
        data = simulate(args.samples, k, effective_classes=min(25, k), seed=0)
        noise = np.random.default_rng(0).normal(size=(args.samples, 8, data.features.shape[1])).astype(np.float32)
        views = unit_rows(data.features[:, None, :] + 0.02 * noise)
        views[:, 0] = data.features
        plain = Task(data.features, data.text, data.logit_scale)
        task = Task(data.features, data.text, data.logit_scale, extras={"views": views})
        seconds(moon, plain)
        for name in table:
            seconds(methods[name], task.rows(0, 8))  # imports and the like
            repeat = args.repeat
            own, control = [], []
            while repeat:
                control.append(seconds(moon, plain))
                own.append(seconds(methods[name], task))
                repeat = 0 if own[-1] > 10 else repeat - 1
            table[name] += [f"{np.median(own):.3f}", f"{np.median(own) / np.median(control):.1f}"]
            print(f"{name} K={k}: {table[name][-2]} s", flush=True)
    head = ["method", *(f"{column}, K = {k}" for k in args.classes for column in ("seconds", "times MOON"))]
    lines = [head, ["---"] * len(head), *([name, *row] for name, row in table.items())]
    print("\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines))
    if left_out:
        print(f"\nLeft out, since they need an encoder: {', '.join(left_out)}.")


if __name__ == "__main__":
    main()
