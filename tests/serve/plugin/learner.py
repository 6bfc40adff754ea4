"""Zero-shot with texts moved to what is known: the least method that makes use of known labels."""

import dataclasses
from typing import ClassVar

import numpy as np

from moontide.core.arrays import Array
from moontide.core.simplex import softmax
from moontide.protocols import OnlineMethod, State, per_class
from moontide.types import Result


@dataclasses.dataclass(frozen=True)
class Sums(State):
    sums: Array = dataclasses.field(metadata=per_class(0))  # (K, d) of the samples that are known to be of a class


@dataclasses.dataclass(frozen=True)
class Learner(OnlineMethod):
    accepts: ClassVar[frozenset[str]] = frozenset({"known"})
    state_type: ClassVar[type[State]] = Sums

    def start(self, task):
        return Sums(task.text, task.logit_scale, 0, np.zeros_like(task.text))

    def _step(self, state, x, known=None):
        moved = dataclasses.replace(state, text=state.text + state.sums)
        result = Result(*(softmax(state.logit_scale * x @ text.T) for text in (moved.text, state.text)))
        return (state if known is None else self._correct(state, x, known, np.full(len(x), -1))), result

    def _correct(self, state, x, known, before):
        sums = state.sums.copy()
        np.subtract.at(sums, before[before >= 0], x[before >= 0])
        np.add.at(sums, known[known >= 0], x[known >= 0])
        return dataclasses.replace(state, sums=sums)
