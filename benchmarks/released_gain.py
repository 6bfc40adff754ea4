"""Gain of the released preset of MOON over zero-shot on a feature pack, in batches with few classes present.

    scripts/bench released_gain --pack ../shared/features/imagenet1k_vitb32.npz

prints the mean accuracy over sampled batches of zero-shot and of MOON, and the gain with its bootstrap interval.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from moontide import MOON
from moontide.metrics import bootstrap_interval
from moontide.samplers import BatchSampler, rng_for
from moontide.store.files import read_task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pack", type=Path, default=Path("../shared/features/imagenet1k_vitb32.npz"))
    parser.add_argument("--runs", type=int, default=300)
    args = parser.parse_args()
    if not args.pack.exists():
        raise SystemExit(f"There is no feature pack at {args.pack}; name one with --pack.")
    data = read_task(args.pack)
    if data.labels is None:
        raise SystemExit(f"{args.pack} has no labels, without which nothing can be measured.")
    task, labels, method = data.task, data.labels, MOON.from_preset("released")
    for low, high in ((1, 4), (2, 10), (5, 25)):
        sampler = BatchSampler(batch_size=64, effective_classes=(low, high))
        accuracy = np.zeros((args.runs, 2))
        for run in range(args.runs):
            rows = sampler.draw(labels, rng_for("released-gain", args.pack.stem, f"{low}-{high}", run))
            result = method.fit_predict(task.features[rows], task.text, logit_scale=task.logit_scale)
            accuracy[run] = (
                100 * (result.zero_shot_labels == labels[rows]).mean(),
                100 * (result.labels == labels[rows]).mean(),
            )
        gain = accuracy[:, 1] - accuracy[:, 0]
        interval = bootstrap_interval(gain)
        print(
            f"B=64, K_eff {low}-{high}, {args.runs} batches: zero-shot {accuracy[:, 0].mean():.1f} %, "
            f"MOON {accuracy[:, 1].mean():.1f} %, gain {gain.mean():.1f} points "
            f"(95 % {interval[0]:.1f} to {interval[1]:.1f})"
        )


if __name__ == "__main__":
    main()
