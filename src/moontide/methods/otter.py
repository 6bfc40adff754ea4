"""OTTER: labels of a batch by optimal transport of the images onto a given class balance.

OTTER, NeurIPS 2024, after what its program (SprocketLab/OTTER) computes.

Symbols:  f_i, t_k -> features, text   C_ik -> cost   b_k -> balance, N b_k -> room   X_ik, times N -> plan

    C = -ln(softmax_k(f_i.t_k) + 1e-9),   min sum_ik C_ik X_ik  over X >= 0 with row sums 1 / N and column sums b_k

The label is argmax_k X_ik, the lower class among equals. The balance is an input (`class_prior`); without it all shares
are equal, and nothing estimates it. If all N b_k are integers, N X has entries 0 and 1 and this is an assignment;
otherwise at most K - 1 images are split. The temperature of the cosines is 1; the logit scale is not used.

The linear programme is solved exactly by shortest augmenting paths: images are added one by one, each with the cheapest
chain of moves of images from class to class that ends in a class with room. Prices of the classes keep the costs of all
moves from being negative, so that Dijkstra's search finds the chain among K classes instead of N + K nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moontide.core.arrays import like, namespace, to_numpy
from moontide.core.simplex import log_softmax, zero_shot
from moontide.methods._slots import NONE, HostArray
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

DUST = 1e-12  # amounts below it are rounding errors
EQUAL = 1e-12  # difference of costs that is a rounding error
DIGITS = 9  # to which shares of an image are rounded, so that equal ones are equal


@dataclass(frozen=True)
class OTTER(Method):
    """The optimal assignment of images to classes with a given class balance.

    >>> import numpy as np
    >>> features = np.asarray([[1.0, 0.1], [0.8, 0.6], [0.75, 0.66], [0.1, 1.0]])
    >>> OTTER().fit_predict(features, np.eye(2)).labels
    array([0, 0, 1, 1])
    >>> OTTER().fit_predict(features, np.eye(2), class_prior=[3, 1]).labels
    array([0, 0, 0, 1])
    """

    citation: ClassVar[str] = "OTTER, NeurIPS 2024"
    accepts: ClassVar[frozenset[str]] = frozenset({"class_prior"})

    floor: float = option(1e-9, "added to probabilities before taking their logarithm as the cost", low=0)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the float64 costs and prices."""
        return super().peak_bytes(n, k, d, itemsize) + 8 * 5 * n * k

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        similarity = to_numpy(task.features @ task.text.T).astype(np.float64)  # (N, K)
        cost = -np.log(np.exp(log_softmax(similarity)) + self.floor)  # (N, K)
        shares = np.ones(task.k) if task.class_prior is None else to_numpy(task.class_prior).astype(np.float64)
        room = whole(task.n * shares / shares.sum(), task.n * float(xp.finfo(task.features.dtype).eps))  # (K,)
        open_ = np.flatnonzero(room > DUST)  # (K',) classes with a share
        plan = np.zeros_like(cost)  # (N, K)
        plan[:, open_] = np.round(transport(cost[:, open_], np.ones(task.n), room[open_]), DIGITS)
        probs = like(plan / plan.sum(axis=1, keepdims=True), task.features)
        return Result(probs, zero_shot(task.features, task.text, task.logit_scale))


def whole(room: HostArray, tolerance: float) -> HostArray:
    """Return the room of the classes, (K,), rounded if all are integers up to rounding errors.

    >>> whole(np.asarray([2.0000001, 0.9999999]), 1e-6), whole(np.asarray([1.5, 1.5]), 1e-6)
    (array([2., 1.]), array([1.5, 1.5]))
    """
    rounded = np.round(room)
    return rounded if np.abs(rounded - room).max() <= tolerance and rounded.sum() == round(room.sum()) else room


def transport(cost: HostArray, supply: HostArray, room: HostArray) -> HostArray:
    """Return the plan X >= 0 with row sums `supply` (N,) and column sums `room` (K,) of least cost sum_ik C_ik X_ik.

    >>> transport(np.asarray([[0.0, 1.0], [0.0, 3.0]]), np.ones(2), np.ones(2))
    array([[0., 1.],
           [1., 0.]])
    """
    n, k = cost.shape
    if n < k:  # the search is among the columns: let them be the fewer
        return transport(np.ascontiguousarray(cost.T), room, supply).T
    plan, left, prices = np.zeros((k, n)), room.copy(), np.zeros(k)
    for i, amount in enumerate(supply):
        while amount > DUST and left.max() > DUST:
            first, moves, end = cheapest_chain(cost, plan, left, prices, i)
            moved = min(amount, left[end], *(plan[source, j] for j, source, _ in moves))
            plan[first, i] += moved
            for j, source, target in moves:
                plan[target, j] += moved
                plan[source, j] = plan[source, j] - moved if plan[source, j] - moved > DUST else 0
            amount, left[end] = amount - moved, left[end] - moved
    return plan.T


def cheapest_chain(
    cost: HostArray, plan: HostArray, left: HostArray, prices: HostArray, i: int
) -> tuple[int, list[tuple[int, int, int]], int]:
    """Find the cheapest way to make room for row i by Dijkstra's search, and update the prices in place.

    `plan` is (K, N) and `left` (K,) the room that is left. Returns the column that row i goes to, the moves (row, from,
    to) that make room in it, and the column with room that they end in. Of chains that cost the same it is one along
    which much can move: small amounts would go round and round.

    >>> cost, plan = np.asarray([[0.0, 1.0], [0.0, 3.0]]), np.asarray([[1.0, 0.0], [0.0, 0.0]])
    >>> cheapest_chain(cost, plan, np.asarray([0.0, 1.0]), np.zeros(2), 1)
    (0, [(0, 0, 1)], 1)
    """
    columns = np.arange(len(left))
    distance = cost[i] - prices  # (K,)
    width = np.full(len(left), np.inf)  # (K,) how much can move along the chain to each column
    source, mover = np.full(len(left), NONE), np.full(len(left), i)  # (K,) the last move on the way to each column
    ahead = distance.copy()  # (K,) infinite once a column is passed through
    while left[end := int(np.where(ahead <= ahead.min() + EQUAL, width, 0).argmax())] <= DUST:
        start, ahead[end] = ahead[end], np.inf
        rows = np.flatnonzero(plan[end])  # (m,)
        change = cost[rows] - cost[rows, end][:, None]  # (m, K)
        share = np.where(change <= change.min(axis=0) + EQUAL, plan[end, rows][:, None], 0)  # (m, K)
        best = share.argmax(axis=0)  # (K,)
        wide = np.minimum(share[best, columns], width[end])  # (K,)
        through = start + prices[end] + change[best, columns] - prices  # (K,)
        gain = np.where(ahead < np.inf, ahead - through, -np.inf)  # (K,)
        better = np.flatnonzero((gain > EQUAL) | ((gain >= -EQUAL) & (wide > width)))
        distance[better] = ahead[better] = np.minimum(through, ahead)[better]
        source[better], mover[better], width[better] = end, rows[best[better]], wide[better]
    prices += np.minimum(distance - distance[end], 0)
    moves, first = [], end
    while source[first] != NONE:
        moves.append((int(mover[first]), int(source[first]), first))
        first = int(source[first])
    return first, moves, end
