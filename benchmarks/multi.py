"""Compare `--multi` with the probabilities it is based on, for images with one, two, or one to three classes.

    scripts/bench multi
    scripts/bench multi --write docs/lab/multi.md   # also update the marked part of the page

Images in the feature packs have one class each. An image with several classes is simulated as the mean of the unit
vectors of images of those classes, which is easier than a photograph, where one object is large and another small.
Each draw has 400 images of 15 of a pack's classes. The measures, in percent:

    by class   mean average precision over classes, ranking the images of each class
    by image   mean average precision over images, ranking the classes of each image
    F1         of the listed classes, those with a probability of at least one half
    ECE        expected calibration error of probabilities above 1 %
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent))

from grid_parts.tables import check_page, table, write_page

import moontide
from moontide.multi import THERE, multi_label
from moontide.samplers import rng_for
from moontide.store.files import read_task
from moontide.types import Task

IMAGES, CLASSES, BINS, FROM = 400, 15, 10, 0.01
MIXES = {"one": (1, 1), "two": (2, 2), "one to three": (1, 3)}
MEASURES = ("by class", "by image", "F1", "ECE")

Floats = npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]


def draw(task: Task, labels: npt.NDArray[np.int64], mix: str, rng: np.random.Generator) -> tuple[Floats, Truth]:
    """Put images of one or several classes together; returns their features and which classes are in them."""
    low, high = MIXES[mix]
    there = np.unique(labels)
    classes = rng.choice(there, min(CLASSES, len(there)), replace=False)
    truth: Truth = np.zeros((IMAGES, task.k), dtype=bool)
    features = np.zeros((IMAGES, task.features.shape[1]))
    for i in range(IMAGES):
        truth[i, rng.choice(classes, int(rng.integers(low, high + 1)), replace=False)] = True
        for k in np.flatnonzero(truth[i]):
            features[i] += task.features[rng.choice(np.flatnonzero(labels == k))]
    return features / np.linalg.norm(features, axis=1, keepdims=True), truth


def average_precision(scores: Floats, truth: Truth) -> float:
    hits = truth[np.argsort(-scores, kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean())


def measures(p: Floats, truth: Truth) -> list[float]:
    by_class = [average_precision(p[:, k], truth[:, k]) for k in np.flatnonzero(truth.any(axis=0))]
    by_image = [average_precision(p[i], truth[i]) for i in range(len(p))]
    listed = p >= THERE
    f1 = 2 * (listed & truth).sum() / (listed.sum() + truth.sum())
    likely = p > FROM
    bins = np.minimum((p[likely] * BINS).astype(int), BINS - 1)
    gaps = [(p[likely] - truth[likely])[bins == b] for b in range(BINS)]
    off = sum(abs(gap.sum()) for gap in gaps) / likely.sum()
    return [100 * float(value) for value in (np.mean(by_class), np.mean(by_image), f1, off)]


def measure(path: Path, runs: int) -> dict[str, dict[str, Floats]]:
    """Return the means of the measures by mix and by what gave the probabilities."""
    task, labels, _ = read_task(path)
    if labels is None:
        raise SystemExit(f"{path} has no labels, without which nothing can be measured.")
    found: dict[str, dict[str, Any]] = {}
    for mix in MIXES:
        for run in range(runs):
            x, truth = draw(task, labels, mix, rng_for("multi", path.stem, mix, run))
            mixed = Task(x.astype(np.float32), task.text, task.logit_scale, task.class_names)
            result = moontide.TIDE().fit_predict(mixed)
            scores = {
                "zero-shot": result.zero_shot,
                "TIDE": result.probs,
                "--multi": multi_label(mixed, result, float(truth.sum(axis=1).mean())),
            }
            for name, p in scores.items():
                found.setdefault(mix, {}).setdefault(name, []).append(measures(np.asarray(p, np.float64), truth))
    return {mix: {name: np.mean(rows, axis=0) for name, rows in held.items()} for mix, held in found.items()}


def tables(found: dict[str, dict[str, dict[str, Floats]]], runs: int) -> str:
    """Return the table of means over the packs, and that of the ranking by pack."""
    names = list(next(iter(next(iter(found.values())).values())))
    rows = []
    for mix in MIXES:
        for name in names:
            mean = np.mean([held[mix][name] for held in found.values()], axis=0)
            rows.append([mix, name, *(f"{value:.1f}" for value in mean)])
    first = table(["classes in an image", "probabilities", *MEASURES], rows)
    rows = []
    for pack, held in found.items():
        cells = [" / ".join(f"{held[mix][name][0]:.1f}" for name in ("TIDE", "--multi")) for mix in MIXES]
        rows.append([pack, *cells])
    second = table(["by class, TIDE / --multi", *MIXES], rows)
    return (
        f"Means over {len(found)} feature packs and {runs} draws (`scripts/bench multi --runs {runs}`):\n\n{first}\n\n"
        f"The same by pack:\n\n{second}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=Path, default=Path("../shared/features"), help="a folder of .npz files")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", type=Path, help="a page with a part <!-- grid:multi -->")
    args = parser.parse_args()
    paths = sorted(args.packs.glob("*.npz"))
    if not paths:
        raise SystemExit(f"There are no feature packs in {args.packs}; name a folder with --packs.")
    if args.write is not None:
        check_page(args.write, ["multi"])
    found = {}
    for path in paths:
        found[path.stem] = measure(path, args.runs)
        print(f"{path.stem} done", file=sys.stderr, flush=True)
    text = tables(found, args.runs)
    print(text)
    if args.write is not None:
        write_page(args.write, {"multi": text})


if __name__ == "__main__":
    main()
