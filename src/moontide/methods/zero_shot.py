"""Zero-shot classification: every image on its own, the class whose text is nearest.

A. Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moontide.core.simplex import softmax
from moontide.protocols import Method
from moontide.types import Result, Task


@dataclass(frozen=True)
class ZeroShot(Method):
    """The prediction that every other method starts from: softmax of logit scale x cosine; scores are the logits.

    >>> import numpy as np
    >>> ZeroShot().fit_predict(np.eye(2), np.eye(2)).labels
    array([0, 1])
    """

    citation: ClassVar[str] = "Radford et al., ICML 2021"

    def _fit(self, task: Task) -> Result:
        logits = task.logit_scale * (task.features @ task.text.T)  # (N, K)
        probs = softmax(logits)
        return Result(probs=probs, zero_shot=probs, native_scores=logits)
