"""The demonstration: the accuracy of zero-shot, MOON and TIDE, and a bar chart of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moontide.errors import missing_extra
from moontide.methods.moon import MOON
from moontide.methods.tide import TIDE
from moontide.metrics import IntArray, accuracy
from moontide.simulate import simulate
from moontide.store.disk import replacing
from moontide.types import Result, Task

BATCH, PRESENT = 64, (1, 4)  # samples of a simulated batch, and how many classes it holds at least and at most
CANDIDATES = 1000  # classes of the simulated part
LOOKS = {"zero-shot": "#b8bec8", "MOON": "#9cc0ee", "TIDE": "#4a86d8"}  # methods and colours, in the order of Scores


class Scores(NamedTuple):
    """One task, and the accuracy of each method on it.

    >>> Scores(64, 2, 0.5, 0.625, 0.75).accuracies
    (0.5, 0.625, 0.75)
    """

    samples: int
    classes: int  # that are there
    zero_shot: float
    moon: float
    tide: float

    @property
    def accuracies(self) -> tuple[float, float, float]:
        """The accuracies in the order of LOOKS."""
        return self.zero_shot, self.moon, self.tide


def scores(task: Task, labels: IntArray, tide: Result | None = None) -> Scores:
    """Label a task with each method; `tide` is the result of TIDE, if already available.

    >>> task = Task(np.repeat(np.eye(4), 5, axis=0), np.eye(4))
    >>> tuple(scores(task, np.repeat(np.arange(4), 5)))
    (20, 4, 1.0, 1.0, 1.0)
    """
    tide = tide or TIDE().fit_predict(task)
    found = tide.zero_shot_labels, MOON().fit_predict(task).labels, tide.labels
    return Scores(len(labels), len(np.unique(labels)), *(accuracy(labels, predicted) for predicted in found))


def simulated_batches(runs: int) -> list[Scores]:
    """Simulate batches of CLIP-like features: few classes present, `CANDIDATES` to choose from.

    >>> simulated_batches(1)[0].classes
    1
    """
    low, high = PRESENT
    found = []
    for run in range(runs):
        data = simulate(BATCH, CANDIDATES, effective_classes=low + run % (high - low + 1), seed=run)
        found.append(scores(Task(data.features, data.text, data.logit_scale), data.labels))
    return found


def means(tasks: Sequence[Scores]) -> list[float]:
    """Return the mean accuracy of each method over tasks.

    >>> means([Scores(64, 1, 0.5, 0.5, 0.75), Scores(64, 2, 0.25, 0.5, 0.75)])
    [0.375, 0.5, 0.75]
    """
    return [float(share) for share in np.mean([task.accuracies for task in tasks], axis=0)]


def draw(path: str | Path, parts: Mapping[str, Sequence[Scores]]) -> None:
    """Draw bars of the mean accuracy of every method, one group per part with its title, and a dot per task.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw(Path(folder) / "a.png", {"Two tasks": [Scores(64, 2, 0.5, 0.6, 0.75), Scores(64, 1, 0.6, 0.7, 0.8)]})
    ...     (Path(folder) / "a.png").read_bytes()[1:4]
    b'PNG'
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise missing_extra("matplotlib", "plot", "Drawing a figure") from None

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes, where = figure.subplots(), np.arange(len(parts))
    for i, (name, colour) in enumerate(LOOKS.items()):
        x = where + 0.28 * (i - 1)
        heights = [100 * means(tasks)[i] for tasks in parts.values()]
        axes.bar(x, heights, 0.26, color=colour, label=name)
        for at, height, tasks in zip(x, heights, parts.values(), strict=True):
            axes.text(at, 3, f"{height:.1f} %", ha="center", fontsize=9, weight="bold")
            if len(tasks) > 1:
                dots = [100 * task.accuracies[i] for task in tasks]
                axes.plot([at] * len(tasks), dots, "o", color="black", markersize=3, alpha=0.5)
    axes.set_xticks(where, [title.replace(", ", "\n") for title in parts])
    axes.set_xlim(-0.6, len(parts) - 0.4)
    axes.set_ylim(0, 105)
    axes.set_ylabel("accuracy in %; dots are single batches")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=len(LOOKS), loc="lower center", bbox_to_anchor=(0.5, 1))
    with replacing(path) as handle:
        figure.savefig(handle, dpi=150, format="png")
