"""The votes of neighbours that MOON, StatA, TransCLIP and their variants smooth assignments with, made for a task."""

from __future__ import annotations

from moontide.core.arrays import Array, is_torch_array
from moontide.core.graph import Affinity, Graph, nearest_neighbours
from moontide.core.ple import neighbour_votes
from moontide.errors import OptionError
from moontide.types import Task

NEIGHBOURS = 3  # m of the published programs


def check_graph(task: Task, method: str, neighbours: int) -> None:
    """Refuse a number of neighbours where the task brings its own graph.

    >>> import numpy as np
    >>> check_graph(Task(np.eye(2), np.eye(2)), "moon", 5)
    """
    if task.graph is not None and neighbours != NEIGHBOURS:
        raise OptionError(
            f"The 'neighbours' option of {method} has no effect on a task that brings its own graph; leave it out."
        )


def products_of_samples(task: Task) -> Array | None:
    """Return all f_i . f_j, (N, N), in numpy where they are less work than class means are: for N <= d; else None.

    >>> import numpy as np
    >>> products_of_samples(Task(np.eye(2), np.eye(2)))
    array([[1., 0.],
           [0., 1.]])
    """
    few = task.n <= task.d and task.graph is None and not is_torch_array(task.features)
    return task.features @ task.features.T if few else None


def smoother(
    task: Task,
    method: str,
    neighbours: int,
    weight: float,
    symmetric: bool = True,
    mean: bool = True,
    precision: str = "full",
    gram: Array | None = None,
) -> tuple[Graph, Affinity]:
    """Return the graph, the task's or a new one, and the map z -> weight (W z + W' z) / 2m, the neighbours' votes.

    `gram`: all cosines of the samples, where they are at hand.

    >>> import numpy as np
    >>> smoother(Task(np.eye(2), np.eye(2)), "stata", 1, 0.0)[1](np.ones((2, 1)))
    array([[0.],
           [0.]])
    """
    check_graph(task, method, neighbours)
    graph = task.graph or nearest_neighbours(task.features, neighbours if weight else 0, precision, gram)
    return graph, neighbour_votes(graph, symmetric, mean, weight)
