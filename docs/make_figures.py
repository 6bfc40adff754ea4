"""Draw docs/images/classes_present.png from real runs on simulated features: python docs/make_figures.py."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from moontide import MOON, TIDE, Result, method
from moontide.simulate import Simulated, simulate

OUT = Path(__file__).parent / "images" / "classes_present.png"
CANDIDATES, BATCH, RUNS = 1000, 64, 40
PRESENT = (1, 2, 4, 8, 16, 32, 64)
SHOWN = 4  # classes of the batch in the right panel
LOOKS = {
    "zero-shot": ("#777777", "s"),
    "StatA": ("#c77700", "^"),
    "MOON": ("#7aa6de", "D"),
    "TIDE": ("#1f4e9c", "o"),
}


def accuracies() -> dict[str, np.ndarray]:
    """Return the accuracy in % of each method, (len(PRESENT), RUNS)."""
    found = {name: np.zeros((len(PRESENT), RUNS)) for name in LOOKS}
    methods = method("stata"), MOON(), TIDE()
    for i, present in enumerate(PRESENT):
        for run in range(RUNS):
            data = simulate(BATCH, CANDIDATES, effective_classes=present, seed=run)
            results = [m.fit_predict(data.features, data.text, logit_scale=data.logit_scale) for m in methods]
            labels = [results[0].zero_shot_labels, *(result.labels for result in results)]
            for name, predicted in zip(LOOKS, labels, strict=True):
                found[name][i, run] = 100 * (predicted == data.labels).mean()
    return found


def draw_accuracies(axes: plt.Axes) -> None:
    """Draw the mean accuracy against the number of classes present, with the standard error of the mean."""
    for name, values in accuracies().items():
        colour, marker = LOOKS[name]
        error = values.std(axis=1, ddof=1) / np.sqrt(RUNS)
        axes.errorbar(PRESENT, values.mean(axis=1), error, color=colour, marker=marker, capsize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(PRESENT, [str(p) for p in PRESENT])
    axes.set_xlabel(f"classes present in the batch, of {CANDIDATES} candidates")
    axes.set_ylabel("accuracy in %")
    axes.set_title(f"Batches of {BATCH}, mean and standard error of {RUNS}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()


def label_counts(data: Simulated, result: Result) -> dict[str, list[int]]:
    """Count the images given to each class that is present, and to all others together."""
    present = np.unique(data.labels)
    counts = {}
    for name, labels in (
        ("truth", data.labels), ("zero-shot", result.zero_shot_labels), ("TIDE", result.labels),
    ):  # fmt: skip
        own = [int((labels == k).sum()) for k in present]
        counts[name] = [*own, BATCH - sum(own)]
    return counts


def draw_labels(axes: plt.Axes) -> None:
    """Draw how many images of one batch get each label, before and after."""
    data = simulate(BATCH, CANDIDATES, effective_classes=SHOWN, seed=0)
    result = TIDE().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    groups = [f"class {chr(ord('A') + i)}" for i in range(SHOWN)] + [f"the {CANDIDATES - SHOWN}\nabsent ones"]
    x = np.arange(len(groups))
    looks = {"truth": ("white", ""), "zero-shot": (LOOKS["zero-shot"][0], "//"), "TIDE": (LOOKS["TIDE"][0], "")}
    for i, (name, counts) in enumerate(label_counts(data, result).items()):
        colour, hatch = looks[name]
        bars = axes.bar(x + 0.27 * (i - 1), counts, 0.27, label=name, color=colour, hatch=hatch, edgecolor="black")
        axes.bar_label(bars, fontsize=7)
    axes.set_xticks(x, groups)
    axes.set_ylabel("images given this label")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_title(f"One batch with {SHOWN} classes present", fontsize=10)
    axes.margins(y=0.2)  # room for the legend
    axes.legend(loc="upper left", ncols=3)


def main() -> None:
    """Draw the figure."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.9), layout="constrained")
    figure.suptitle("Simulated CLIP-like features (moontide.simulate), not images", fontsize=11)
    draw_accuracies(left)
    draw_labels(right)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=120)


if __name__ == "__main__":
    main()
