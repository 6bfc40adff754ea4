"""Accuracy on streams: MOON per batch against methods that remember, in batches of 1, 16 and 128.

    scripts/bench streams
    scripts/bench streams --packs ../shared/features/imagenet1k_vitb32.npz --odd

Every pack is streamed by the published online protocol: classes spread by Dirichlet draws of 0.1, 0.01 and 0.001, and
one class after the other ("separate"). Every run of a scenario is another stream, the same for all methods, cut after
`--samples`. The last columns are the mean over the scenarios, how much that is above MOON per batch with a bootstrap
interval over the runs, and milliseconds a batch. `--odd` keeps the classes of odd number only, another task on the same
features.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import moontide
from moontide import Stream
from moontide.metrics import bootstrap_interval
from moontide.samplers import StreamSampler, rng_for
from moontide.store.files import read_task

FOLDER = Path("../shared/features")
PACKS = ["imagenet1k_vitb32", "pets24_vitb32", "cifar10_vitb32", "clothing_tiny"]
SCENARIOS = {
    "0.1": ("dirichlet", 0.1),
    "0.01": ("dirichlet", 0.01),
    "0.001": ("dirichlet", 0.001),
    "separate": ("separate", None),
}
METHODS = ["moon", "zero_shot", "moon_samplewise"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=Path, nargs="+", default=[FOLDER / f"{name}.npz" for name in PACKS])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--methods", nargs="+", default=METHODS[1:], help="besides moon")
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--odd", action="store_true", help="only classes of odd number")
    args = parser.parse_args()
    names = ["moon", *(name for name in args.methods if name != "moon")]
    print(f"| pack | batch | method | {' | '.join(SCENARIOS)} | mean | above moon | ms |")
    print("|---" * (len(SCENARIOS) + 6) + "|")
    for pack in args.packs:
        if not pack.exists():
            raise SystemExit(f"There is no feature pack at {pack}; name some with --packs.")
        task, labels, _ = read_task(pack)
        features, text, labels = task.features, task.text, np.asarray(labels)
        if args.odd:
            kept = labels % 2 == 1
            features, text, labels = features[kept], text[1::2], labels[kept] // 2
        for size in args.batch_sizes:
            accuracy = np.zeros((len(names), len(SCENARIOS), args.runs))
            seconds = np.zeros_like(accuracy)
            for s, (scenario, (kind, xi)) in enumerate(SCENARIOS.items()):
                for run in range(args.runs):
                    rng = rng_for("streams", pack.stem, f"{scenario}-{size}", run)
                    order = StreamSampler(kind, size, xi).draw(labels, rng)[: args.samples]
                    for i, name in enumerate(names):
                        stream = Stream(moontide.method(name), text, logit_scale=task.logit_scale)
                        batches = [order[j : j + size] for j in range(0, len(order), size)]
                        start = time.perf_counter()
                        found = np.concatenate([stream.push(features[batch]).labels for batch in batches])
                        seconds[i, s, run] = (time.perf_counter() - start) / len(batches)
                        accuracy[i, s, run] = 100 * (found == labels[order]).mean()
            for i, name in enumerate(names):
                gain = (accuracy[i] - accuracy[0]).mean(axis=0)  # (runs,) mean over the scenarios
                low, high = bootstrap_interval(gain)
                above = "" if i == 0 else f"{gain.mean():+.1f} ({low:+.1f} to {high:+.1f})"
                cells = [f"{x:.1f}" for x in (*accuracy[i].mean(axis=1), accuracy[i].mean())]
                spent = f"{1000 * np.median(seconds[i]):.1f}"
                print(
                    "| " + " | ".join([pack.stem.split("_")[0], str(size), name, *cells, above, spent]) + " |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
