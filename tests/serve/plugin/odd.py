"""Zero-shot by a method that has a bad day: it does what its option says where a sample points along -e_1."""

import dataclasses
import time
from typing import ClassVar

import numpy as np

from moontide.core.simplex import softmax
from moontide.options import option
from moontide.protocols import OnlineMethod, State
from moontide.types import Result


@dataclasses.dataclass(frozen=True)
class Odd(OnlineMethod):
    state_type: ClassVar[type[State]] = State

    does: str = option("nan", "answers NaN, waits, or keeps the interpreter to itself", choices=("nan", "wait", "work"))
    seconds: float = option(1.0, "that it waits or works", low=0)

    def start(self, task):
        return State(task.text, task.logit_scale, 0)

    def _step(self, state, x):
        probs = softmax(state.logit_scale * x @ state.text.T)
        bad = x[:, 0] < -0.9
        if bad.any() and self.does == "nan":
            probs[bad, 0] = np.nan
        elif bad.any() and self.does == "wait":
            time.sleep(self.seconds)
        elif bad.any():
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:
                sum(range(1000))
        return state, Result(probs, probs)
