"""The EM loop of every mixture: over samples in memory, in blocks, in many files, here or on a cluster.

`Rows` (core/rows.py) hold what there is per sample, N x something. `Sums` (core/sums.py) are what the classes need of
the samples, K x something; they add up. A mixture (MOON's is in methods/moon.py) makes classes of sums, K x something,
and knows nothing of devices, blocks, workers or files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from moontide.progress import track

C = TypeVar("C")
R = TypeVar("R", covariant=True)
Run = Callable[..., Any]  # run(verb, *given) calls a verb of all rows, by name, and adds up what they return


class Mixture(Protocol[C, R]):
    """What a method supplies; here with a fixed number of iterations and without an objective."""

    m_steps: int  # an E-step is before each and after the last; -1: there is none at all

    def begin(self, run: Run) -> C:
        """Return the classes before the first E-step, from zero-shot predictions."""

    def broadcast(self, classes: C) -> tuple[Any, ...]:
        """Return what an E-step needs of the classes: all of them."""
        return (classes,)

    def converged(self, step: Any) -> bool:
        """Tell whether another iteration would repeat this one; the published programs do not ask."""
        return False

    def update(self, step: Any) -> C:
        """M-step: return the classes that follow from the sums of an E-step."""

    def terms(self, classes: C, step: Any) -> Any:
        """Return what is kept of an E-step: its part in the objective."""
        return None

    def finish(self, run: Run, classes: C, step: Any, trace: list[Any]) -> R:
        """Return the solution, from the last classes, the E-step with them, and what was kept of all E-steps."""


def solve(mixture: Mixture[C, R], run: Run) -> R:
    """Alternate E-steps of the samples, which `run` reaches, and M-steps of the classes."""
    classes: Any = mixture.begin(run)
    trace: list[Any] = []
    step: Any = None
    for it in track(range(mixture.m_steps + 1), "iterations"):
        step = run("step", *mixture.broadcast(classes))
        trace.append(mixture.terms(classes, step))
        if it == mixture.m_steps or mixture.converged(step):
            break
        classes = None  # and their memory is free for the next ones
        classes, step = mixture.update(step), None
    return mixture.finish(run, classes, step, trace)
