"""The votes of neighbours that StatA, TransCLIP and their variants smooth assignments with, made for a task."""

from __future__ import annotations

from moontide.core.graph import Affinity, Graph, nearest_neighbours, neighbour_votes
from moontide.core.rows import check_graph
from moontide.types import Task


def smoother(task: Task, method: str, neighbours: int, weight: float) -> tuple[Graph, Affinity]:
    """Return the graph, the task's or a new one, and the map z -> weight (W z + W' z) / 2m, the neighbours' votes.

    >>> import numpy as np
    >>> smoother(Task(np.eye(2), np.eye(2)), "stata", 1, 0.0)[1](np.ones((2, 1)))
    array([[0.],
           [0.]])
    """
    check_graph(task.graph, method, neighbours)
    graph = task.graph or nearest_neighbours(task.features, neighbours if weight else 0)
    return graph, neighbour_votes(graph, True, True, weight)
