"""moon_auto against zero-shot, StatA and the released MOON, from few classes to all, even or long-tailed.

    scripts/bench auto                          # the whole grid, with intervals
    scripts/bench auto --half held-out          # classes and images that were not looked at while it was developed
    scripts/bench auto --ablation               # each part of moon_auto taken away
    scripts/bench auto --trust                  # calibration, and the score for classes that are not in the list
    scripts/bench auto --cost [--device cuda]   # time against MOON's, on simulated features

A cell is the mean accuracy over sampled batches (`BatchSampler`; long-tailed: the most frequent class has 10 times the
samples of the least). The interval is a bootstrap one of moon_auto minus zero-shot. Every batch is known by its cell
and number, so that all methods see the same ones and the results do not depend on `--workers`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import moontide
from moontide.bench.processes import THREADS
from moontide.core.arrays import to_numpy
from moontide.methods import moon_auto
from moontide.metrics import bootstrap_interval, expected_calibration_error
from moontide.samplers import BatchSampler, rng_for
from moontide.simulate import simulate
from moontide.store.files import read_task

FOLDER = Path("../shared/features")
PACKS = ["imagenet1k_vitb32", "pets24_vitb32", "cifar10_vitb32", "clothing_tiny"]
METHODS = ["zero_shot", "stata", "moon", "moon_auto"]
RANGES = {64: [(1, 4), (2, 10), (5, 25), None], 1000: [(5, 25), (25, 50), (50, 100), None], None: [None]}
LONG_TAIL = 10.0
BY_IMAGE = ("cifar10", "clothing")  # packs of so few classes that they are halved by image


class Pack(NamedTuple):
    name: str
    features: Any
    text: Any
    labels: Any
    logit_scale: float


class Cell(NamedTuple):
    pack: str
    batch_size: int | None
    classes: tuple[int, int] | None
    imbalance: float | None

    def __str__(self) -> str:
        classes = "-".join(map(str, self.classes)) if self.classes else "all"
        return f"{self.pack} {self.batch_size or 'all'} {classes} {'long-tailed' if self.imbalance else 'i.i.d.'}"


def read_packs(paths: list[Path], half: str | None) -> dict[str, Pack]:
    packs, rng = {}, np.random.default_rng(12345)
    for path in paths:
        if not path.exists():
            raise SystemExit(f"There is no feature pack at {path}; name some with --packs.")
        task, labels, _ = read_task(path)
        if labels is None:
            raise SystemExit(f"{path} has no labels, without which nothing can be measured.")
        features, text, labels = task.features, task.text, np.asarray(labels)
        if half and path.stem.startswith(BY_IMAGE):
            kept = (rng.random(len(labels)) < 0.5) == (half == "development")
            features, labels = features[kept], labels[kept]
        elif half:
            order = rng.permutation(task.k)
            first = half == "development"
            chosen = np.sort(order[: task.k // 2] if first else order[task.k // 2 :])
            kept = np.isin(labels, chosen)
            features, text, labels = features[kept], text[chosen], np.searchsorted(chosen, labels[kept])
        name = path.stem.split("_")[0]
        packs[name] = Pack(name, features, text, labels, task.logit_scale)
    return packs


def load(paths: list[Path], half: str | None) -> None:
    _packs.update(read_packs(paths, half))


def cells(packs: dict[str, Pack]) -> list[Cell]:
    """All cells whose classes and samples the pack has."""
    found = []
    for pack in packs.values():
        n, k = len(pack.labels), len(pack.text)
        for size, ranges in RANGES.items():
            fits = [r for r in ranges if r is None or r[1] <= 1.1 * k]
            if size is None or n > 1.2 * size:
                found += [Cell(pack.name, size, r, tail) for r in fits for tail in (None, LONG_TAIL)]
    return found


def draw(cell: Cell, run: int) -> Any:
    sampler = BatchSampler(cell.batch_size, cell.classes, cell.imbalance)
    return sampler.draw(_packs[cell.pack].labels, rng_for("auto", cell.pack, str(cell), run))


@contextmanager
def without(part: str) -> Iterator[None]:
    """Take a part of moon_auto away while a fit runs."""
    put = {
        "presence": {"present_share": lambda proof, bounds, n, k: 0 * bounds.low + 1},
        "evidence of unequal shares": {"share_bounds": lambda v: moon_auto.Presence(1 / (1 + v), 1 / (1 + v))},
        "the correction for soft predictions": {"excess": _plain_excess},
        "leaving out": {"cosine_to_others": lambda *x: _parts["cosine_to_others"](*x[:2], 0 * x[2])},
        "agreement": {"agreement": lambda y, votes_of: 0 * y[0, 0] + 1},
        "the integral over the share": {"evidence": _fixed_share},
        "the bound on what unequal shares explain": {"share_bounds": _twice},
        "rest": {"LIVE": -1.0},
        "nothing": {},
    }[part]
    put["loops_for"] = lambda x: None  # the compiled loops have all parts
    for name, function in put.items():
        setattr(moon_auto, name, function)
    try:
        yield
    finally:
        for name in put:
            setattr(moon_auto, name, _parts[name])


PARTS = ("present_share", "share_bounds", "excess", "cosine_to_others", "agreement", "evidence", "LIVE", "loops_for")
_parts: dict[str, Any] = {name: getattr(moon_auto, name) for name in PARTS}
_packs: dict[str, Pack] = {}


def _plain_excess(y: Any) -> Any:
    n, k = y.shape
    total = y.sum(axis=0)
    return np.maximum(k * ((total**2).sum() - (y * y).sum()) / max(n * (n - 1), 1) - 1, 0)


def _fixed_share(z: Any, expected: Any) -> Any:
    e = -np.log1p(-np.minimum(z, moon_auto.SURE)) - z
    return e, e.sum(axis=0)


def _twice(v: Any) -> Any:
    return moon_auto.Presence(1 / (1 + v), np.minimum(1.0, 2 / (1 + v)))


ABLATIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("moon_auto", "nothing", {}),
    ("without presence", "presence", {}),
    ("shares taken as equal", "evidence of unequal shares", {}),
    ("agreement as if predictions were sure", "the correction for soft predictions", {}),
    ("shares of up to twice the lower bound", "the bound on what unequal shares explain", {}),
    ("evidence with a fixed share of each class", "the integral over the share", {}),
    ("no class rests", "rest", {}),
    ("without class means", "nothing", {"sharpness": 0.0}),
    ("samples stay in their own mean", "leaving out", {}),
    ("neighbours count in full", "agreement", {}),
    ("pseudo-count 1", "nothing", {"pseudo_count": 1.0}),
    ("pseudo-count 2", "nothing", {"pseudo_count": 2.0}),
]


def accuracies(job: tuple[Cell, int]) -> list[float]:
    cell, run = job
    rows = draw(cell, run)
    pack = _packs[cell.pack]
    results = [
        moontide.method(name).fit_predict(pack.features[rows], pack.text, logit_scale=pack.logit_scale)
        for name in METHODS
    ]
    return [100 * float((result.labels == pack.labels[rows]).mean()) for result in results]


def ablated(job: tuple[Cell, int]) -> list[float]:
    cell, run = job
    rows, found = draw(cell, run), []
    pack = _packs[cell.pack]
    for _, part, options in ABLATIONS:
        with without(part):
            method = moontide.method("moon_auto", **options)
            result = method.fit_predict(pack.features[rows], pack.text, logit_scale=pack.logit_scale)
        found.append(100 * float((result.labels == pack.labels[rows]).mean()))
    return found


def trusted(job: tuple[Cell, int]) -> tuple[Any, list[float] | None]:
    """Confidences and hits of zero-shot, MOON and moon_auto, and the AUROC of the unknown with classes left out."""
    cell, run = job
    rows, pack = draw(cell, run), _packs[cell.pack]
    names = ("zero_shot", "moon", "moon_auto")
    fits = [moontide.method(m).fit_predict(pack.features[rows], pack.text, logit_scale=pack.logit_scale) for m in names]
    hits = np.stack([np.stack([r.confidence, r.labels == pack.labels[rows]]) for r in fits])  # (3, 2, n)
    present = np.unique(pack.labels[rows])
    if len(present) < 2:
        return hits, None
    rng = rng_for("auto-unknown", cell.pack, str(cell), run)
    out = rng.choice(present, max(1, len(present) // 4), replace=False)
    text, unknown = np.delete(pack.text, out, axis=0), np.isin(pack.labels[rows], out)
    if len(text) < 2 or unknown.all():
        return hits, None
    fits = [moontide.method(m).fit_predict(pack.features[rows], text, logit_scale=pack.logit_scale) for m in names]
    scores = [-fits[0].confidence, -fits[1].confidence, fits[2].unknown]
    return hits, [100 * auroc(score, unknown) for score in scores]


def auroc(score: Any, positive: Any) -> float:
    """The probability that a positive scores higher than a negative."""
    order = np.argsort(np.argsort(score)) + 1
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return float((order[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def report_cost(device: str) -> None:
    print("| N | K | classes there | MOON ms | moon_auto ms | ratio |\n|---|---|---|---|---|---|")
    large = [(10_000, 1000, 1000), (50_000, 1000, 1000)] if device == "cuda" else []
    for n, k, there in [(64, 100, 25), (64, 1000, 25), (1000, 100, 25), (1000, 1000, 25), (1000, 1000, 1000), *large]:
        data = simulate(n, k, effective_classes=there, seed=0)
        f, text = data.features.astype(np.float32), data.text.astype(np.float32)
        if device == "cuda":
            import torch

            f, text = torch.asarray(f, device=device), torch.asarray(text, device=device)
        best = dict.fromkeys(("moon", "moon_auto"), np.inf)
        for repeat in range(20 if n <= 10_000 else 6):
            for name in best:
                start = time.perf_counter()
                labels = moontide.method(name).fit_predict(f, text, logit_scale=data.logit_scale).labels
                to_numpy(labels)  # waits for the GPU
                if repeat > 2:  # the first calls of a shape compile and capture
                    best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
        times = f"{best['moon']:.2f} | {best['moon_auto']:.2f} | {best['moon_auto'] / best['moon']:.2f}"
        print(f"| {n:,} | {k:,} | {'all' if there == k else there} | {times} |", flush=True)


def runs_of(cell: Cell, runs: int) -> int:
    if cell.batch_size is None:
        return max(1, runs // 20) if cell.imbalance else 1
    return runs if cell.batch_size == 64 else max(1, runs // 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=Path, nargs="+", default=[FOLDER / f"{name}.npz" for name in PACKS])
    parser.add_argument("--runs", type=int, default=100, help="of batches of 64; a fifth of it of larger ones")
    parser.add_argument("--half", choices=["development", "held-out"])
    parser.add_argument("--ablation", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for --cost")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="a JSON file for what was measured")
    args = parser.parse_args()
    if args.cost:
        return report_cost(args.device)
    load(args.packs, args.half)
    grid = cells(_packs)
    function = trusted if args.trust else ablated if args.ablation else accuracies
    jobs = [(cell, run) for cell in grid for run in range(runs_of(cell, args.runs))]
    os.environ.update(dict.fromkeys(THREADS, "1"))  # one process a core
    with get_context("spawn").Pool(args.workers, load, (args.packs, args.half)) as pool:
        answers = []
        for answer in pool.imap(function, jobs, chunksize=4):  # type: ignore[arg-type]
            answers.append(answer)
            if len(answers) % 200 == 0:
                print(f"{len(answers)} of {len(jobs)} batches", flush=True, file=sys.stderr)
    by_cell: dict[Cell, list[Any]] = {cell: [] for cell in grid}
    for (cell, _), answer in zip(jobs, answers, strict=True):
        by_cell[cell].append(answer)
    if args.trust:
        report_trust(by_cell)
    elif args.ablation:
        report_ablation(by_cell)
    else:
        report_grid(by_cell)
    if args.out and not args.trust:
        plain = {str(cell): np.asarray(values).round(4).tolist() for cell, values in by_cell.items()}
        args.out.write_text(json.dumps(plain))


def report_grid(by_cell: dict[Cell, list[Any]]) -> None:
    print("| pack | batch | classes | | batches | zero-shot | StatA | MOON | moon_auto | above zero-shot (95 %) |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    means = {}
    for cell, values in by_cell.items():
        table = np.asarray(values)  # (runs, methods)
        means[cell] = mean = table.mean(axis=0)
        gain = table[:, 3] - table[:, 0]
        low, high = bootstrap_interval(gain) if len(gain) > 1 else (np.nan, np.nan)
        interval = f"{gain.mean():+.1f}" + ("" if len(gain) == 1 else f" ({low:+.1f} to {high:+.1f})")
        pack, size, classes, tail = str(cell).split(" ", 3)
        missed = mean[3] < mean[0] - 0.3 or mean[3] < max(mean[1], mean[2]) - 0.5
        best = "".join([f"{mean[3]:.1f}", " †" if missed else ""])
        numbers = " | ".join(f"{x:.1f}" for x in mean[:3])
        print(f"| {pack} | {size} | {classes} | {tail} | {len(gain)} | {numbers} | {best} | {interval} |")
    print("\n† below zero-shot by more than 0.3, or below StatA or MOON by more than 0.5.\n")
    for title, chosen in (
        ("few classes there", [c for c in means if c.classes]),
        ("all classes there", [c for c in means if not c.classes]),
    ):
        average = np.mean([means[c] for c in chosen], axis=0)
        numbers = ", ".join(f"{name} {x:.2f}" for name, x in zip(METHODS, average, strict=True))
        print(f"Mean of the {len(chosen)} cells with {title}: {numbers}")
    for name, index in (("zero-shot", 0), ("StatA", 1), ("MOON", 2)):
        worst = min(means, key=lambda c: means[c][3] - means[c][index])
        print(f"Furthest below {name}: {means[worst][3] - means[worst][index]:+.1f} ({worst})")


def report_ablation(by_cell: dict[Cell, list[Any]]) -> None:
    means = {cell: np.asarray(values).mean(axis=0) for cell, values in by_cell.items()}
    few = np.mean([m for cell, m in means.items() if cell.classes], axis=0)
    every = np.mean([m for cell, m in means.items() if not cell.classes], axis=0)
    print("| | few classes there | all classes there |\n|---|---|---|")
    for (title, _, _), a, b in zip(ABLATIONS, few, every, strict=True):
        print(f"| {title} | {a:.2f} | {b:.2f} |")


def report_trust(by_cell: dict[Cell, list[Any]]) -> None:
    print("| pack | batch | classes | | ECE zero-shot | MOON | moon_auto | AUROC zero-shot | MOON | moon_auto |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    errors, areas = [], []
    for cell, values in by_cell.items():
        hits = np.concatenate([hit for hit, _ in values], axis=2)  # (3, 2, samples)
        error = [100 * expected_calibration_error(right, np.ones_like(right), sure) for sure, right in hits]
        found = [area for _, area in values if area]
        area = np.mean(found, axis=0) if found else np.full(3, np.nan)
        errors.append(error)
        areas.append(area)
        pack, size, classes, tail = str(cell).split(" ", 3)
        numbers = " | ".join(f"{x:.1f}" for x in [*error, *area])
        print(f"| {pack} | {size} | {classes} | {tail} | {numbers} |")
    print("| mean | | | | " + " | ".join(f"{x:.1f}" for x in [*np.mean(errors, 0), *np.nanmean(areas, 0)]) + " |")


if __name__ == "__main__":
    main()
