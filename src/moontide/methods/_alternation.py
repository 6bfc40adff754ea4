"""Shared by the relatives of StatA: the options of a smoothed mixture, and its iterations for tasks in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moontide.core import driver
from moontide.core.arrays import Array, class_counts, namespace
from moontide.core.graph import Affinity, nearest_neighbours, neighbour_votes
from moontide.core.rows import NEIGHBOURS, check_graph
from moontide.core.simplex import log_softmax, softmax, softmax_log_sum
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task


class Components(NamedTuple):
    """The distributions of the classes between two E-steps."""

    mu: Array  # (K, d)
    spread: Array  # (K, d) variances, (1, d) if classes share them, or (K,) vMF concentrations
    beta: Array  # (K,) weight of the batch in each mean
    converged: bool = False  # whether the last E-step changed no label


@dataclass(frozen=True)
class Smoothed(Method):
    """The options of a mixture whose assignments are smoothed over a graph."""

    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    neighbours: int = option(NEIGHBOURS, "m, neighbours of a sample in the graph", low=1)
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    iterations: int = option(10, "T, M-steps; an E-step is before each and after the last", low=1)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the options that have no effect given the others."""
        if self.laplacian_weight == 0:
            names = ("neighbours", "inner_iterations")
            yield tuple(name for name in names if name in self.specs()), "with laplacian_weight=0"

    def _votes_of(self, task: Task) -> Affinity:
        """Return z -> weight (W z + W' z) / 2m, the votes of neighbours in the graph of the task or a new one."""
        check_graph(task.graph, self.name, self.neighbours)
        weight = self.laplacian_weight
        graph = task.graph or nearest_neighbours(task.features, self.neighbours if weight else 0)
        return neighbour_votes(graph, True, True, weight)

    def _alternate(
        self,
        task: Task,
        log_y: Array,
        start: Components,
        log_likelihood: Callable[[Components], Array],
        m_step: Callable[[Array], Components],
        inner_iterations: int = 1,
    ) -> Result:
        """Alternate E-steps and M-steps from the zero-shot log y (N, K) and an initial mixture; the last is an E-step.

        `log_likelihood` returns log p_ik of a mixture, a new array (N, K), which is overwritten; `m_step` takes log z.
        """
        xp, votes_of, log_z = namespace(log_y), self._votes_of(task), log_y

        def e_step(verb: str, classes: Components) -> Array:
            nonlocal log_z
            scores = log_likelihood(classes)  # (N, K)
            scores /= self.temper
            scores += self.text_weight * log_y
            log_z = assignments(scores, votes_of, log_z, inner_iterations)
            return log_z

        found = driver.solve(Alternation(start, m_step, self.iterations), e_step)
        return Result(
            probs=softmax(log_z),
            zero_shot=xp.exp(log_y),
            n_iter=self.iterations,
            converged=found.converged,
            beta=found.beta,
            details={"mu": found.mu, "spread": found.spread},
        )


@dataclass(frozen=True)
class Repeated(Smoothed):
    """The options of a smoothed mixture whose E-step updates the assignments several times with the same likelihood."""

    inner_iterations: int = option(5, "updates of the assignments in an E-step", low=1)


@dataclass(frozen=True)
class Anchored(Repeated):
    """The options of a repeated mixture whose classes are shrunk towards text by one weight alpha for all classes."""

    beta: str = option("hard", "counts in beta_k: argmax labels or soft assignments", choices=("hard", "soft"))
    alpha: float = option(1.0, "anchor weight, the same for all classes", low=0)


@dataclass
class Alternation(driver.Mixture[Components, Components]):
    """A mixture for `driver.solve` whose M-step needs all assignments, log z (N, K), in memory."""

    start: Components
    m_step: Callable[[Array], Components]
    m_steps: int

    def begin(self, run: driver.Run) -> Components:
        """Return the classes before the first E-step."""
        return self.start

    def update(self, step: Array) -> Components:
        """Return the classes that follow from log z."""
        return self.m_step(step)

    def terms(self, classes: Components, step: Array) -> Array:
        """Keep the labels, (N,)."""
        return namespace(step).argmax(step, axis=1)

    def finish(self, run: driver.Run, classes: Components, step: Array, trace: list[Array]) -> Components:
        """Return the classes, and whether the labels of the last two E-steps are the same."""
        before, labels = trace[-2:]
        return classes._replace(converged=bool((before == labels).all()))


def assignments(scores: Array, votes_of: Callable[[Array], Array], log_z: Array, inner_iterations: int) -> Array:
    """Eq. update-z, repeated with the same scores = log prior + log p / temper: log z = scores + votes(z), normalised.

    >>> import numpy as np
    >>> np.exp(assignments(np.log([[0.1, 0.3]]), np.zeros_like, np.zeros((1, 2)), 5)).round(3)
    array([[0.25, 0.75]])
    """
    logits = log_z
    for it in range(inner_iterations):
        z = softmax_log_sum(logits, logits)[0] if it else softmax(logits)  # (N, K)
        logits = votes_of(z)
        logits += scores
    return log_softmax(logits)


def counted(z: Array, gamma: Array, beta: str) -> Array:
    """Return the class counts n_k in beta_k, (K,): sum_i gamma_i z_ik if soft, or unweighted counts of labels if hard.

    >>> import numpy as np
    >>> counted(np.asarray([[0.2, 0.8]]), np.ones(1), "hard")
    array([0., 1.])
    """
    xp = namespace(z)
    if beta == "soft":
        return gamma @ z
    return xp.astype(class_counts(xp.argmax(z, axis=1), z.shape[1]), z.dtype)
