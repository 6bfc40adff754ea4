"""What a demonstration shows: batches that hold few of the candidate classes, labelled zero-shot and with a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moontide.errors import missing_extra
from moontide.metrics import IntArray, accuracy
from moontide.protocols import Method
from moontide.samplers import BatchSampler, rng_for
from moontide.simulate import simulate
from moontide.store.files import replacing
from moontide.types import Result, Task

BATCH, PRESENT = 64, (1, 4)  # samples of a batch, and how many classes it holds at least and at most
CANDIDATES = 1000  # classes of the simulated part


class Batch(NamedTuple):
    """One batch and the accuracy on it before and after.

    >>> Batch(64, 2, 0.5, 0.75).gain
    0.25
    """

    samples: int
    classes: int  # that are in it
    zero_shot: float
    adapted: float

    @property
    def gain(self) -> float:
        """What the method adds to the accuracy."""
        return self.adapted - self.zero_shot


def drawn_batches(solver: Method, task: Task, labels: IntArray, name: str, runs: int) -> list[Batch]:
    """Draw batches of few classes from a labelled task and label each on its own.

    >>> from moontide import MOON
    >>> task = Task(np.repeat(np.eye(8), 30, axis=0), np.eye(8))
    >>> [tuple(batch) for batch in drawn_batches(MOON(), task, np.repeat(np.arange(8), 30), "eight", runs=2)]
    [(60, 2, 1.0, 1.0), (60, 2, 1.0, 1.0)]
    """
    sampler, found = BatchSampler(BATCH, PRESENT), []
    for run in range(runs):
        rows = sampler.draw(labels, rng_for("demo", name, "few classes", run))
        result = solver.fit_predict(Task(task.features[rows], task.text, task.logit_scale))
        found.append(_scored(result, labels[rows]))
    return found


def simulated_batches(solver: Method, runs: int) -> list[Batch]:
    """Simulate batches of CLIP-like features: few classes present, `CANDIDATES` to choose from.

    >>> from moontide import MOON
    >>> simulated_batches(MOON(), runs=1)[0].classes
    1
    """
    low, high = PRESENT
    found = []
    for run in range(runs):
        data = simulate(BATCH, CANDIDATES, effective_classes=low + run % (high - low + 1), seed=run)
        result = solver.fit_predict(Task(data.features, data.text, data.logit_scale))
        found.append(_scored(result, data.labels))
    return found


def _scored(result: Result, labels: IntArray) -> Batch:
    before, now = accuracy(labels, result.zero_shot_labels), accuracy(labels, result.labels)
    return Batch(len(labels), len(np.unique(labels)), before, now)


def draw(path: str | Path, parts: Mapping[str, Sequence[Batch]], method: str) -> None:
    """Draw bars of the accuracy of every batch before and after, one panel for each part by its title.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw(Path(folder) / "a.png", {"Two batches": [Batch(64, 2, 0.5, 0.75), Batch(64, 1, 0.6, 0.8)]}, "MOON")
    ...     (Path(folder) / "a.png").read_bytes()[1:4]
    b'PNG'
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", "Drawing a figure") from None

    figure = Figure(figsize=(9, 3.1 * len(parts)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, batches) in zip(figure.subplots(len(parts), squeeze=False)[:, 0], parts.items(), strict=True):
        where = np.arange(len(batches))
        before = [100 * batch.zero_shot for batch in batches]
        now = [100 * batch.adapted for batch in batches]
        axes.bar(where - 0.2, before, 0.4, color="#9aa3b2", label=f"zero-shot, mean {np.mean(before):.1f} %")
        axes.bar(where + 0.2, now, 0.4, color="#0b57b0", label=f"{method}, mean {np.mean(now):.1f} %")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xticks(where, [f"{run}\n{b.classes} cl." for run, b in enumerate(batches, 1)], fontsize=8)
        axes.set_ylim(0, 105)
        axes.set_ylabel("accuracy, %")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.18))
    with replacing(path) as handle:
        figure.savefig(handle, dpi=150, format="png")
