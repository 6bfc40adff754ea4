"""Zero-shot classification: each image gets the class whose text is nearest.

A. Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moontide.core.arrays import Array
from moontide.core.driver import Run
from moontide.core.rows import Rows
from moontide.core.simplex import softmax
from moontide.protocols import Method, Plan
from moontide.types import Result, Task


@dataclass(frozen=True)
class ZeroShot(Method):
    """The prediction that all other methods start from: softmax of logit scale x cosine; scores are the logits.

    >>> import numpy as np
    >>> ZeroShot().fit_predict(np.eye(2), np.eye(2)).labels
    array([0, 1])
    """

    citation: ClassVar[str] = "Radford et al., ICML 2021"

    def _fit(self, task: Task) -> Result:
        logits = task.logit_scale * (task.features @ task.text.T)  # (N, K)
        probs = softmax(logits)
        return Result(probs=probs, zero_shot=probs, native_scores=logits)

    rows_type: ClassVar[type[Rows]] = Rows

    def mixture(self, text: Array, logit_scale: float) -> Single:  # type: ignore[override]
        """Return what `driver.solve` needs on shards."""
        return Single()

    def plan(self) -> Plan:
        """One pass.

        >>> ZeroShot().plan()
        Plan(calls=1, steps=0)
        """
        return Plan(1, 0)


class Single:
    """A mixture for `driver.solve` without classes to estimate: one pass over the samples, and no E-step."""

    m_steps = -1

    def begin(self, run: Run) -> None:
        """Make the zero-shot predictions."""
        run("first")

    def finish(self, run: Run, classes: None, step: None, trace: list[None]) -> None:
        """Return nothing: predictions are with the samples."""
