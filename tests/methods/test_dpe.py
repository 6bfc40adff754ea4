"""DPE: its gradient against numerical differences, and the stream against a literal account."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.methods.dpe import DPE
from moontide.streams import run_stream
from moontide.types import Task


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def entropy(z: np.ndarray) -> float:
    return float(-(np.exp(log_softmax(z)) * log_softmax(z)).sum())


class Literal:
    """The loss as it is described, its gradient by central differences."""

    def __init__(self, task: Task, options: DPE) -> None:
        self.o, self.scale, self.k = options, task.logit_scale, task.k
        self.g, self.m = task.text.copy(), 0
        self.cache: list[list[tuple[float, np.ndarray]]] = [[] for _ in range(task.k)]

    def logits(self, x: np.ndarray, g: np.ndarray, q: np.ndarray, of: list[int]) -> np.ndarray:
        z = self.scale * unit(g) @ x
        z[of] += self.o.cache_weight * np.exp(-self.o.sharpness * (1 - unit(q) @ x))
        return z

    def loss(self, x: np.ndarray, g: np.ndarray, q: np.ndarray, of: list[int]) -> float:
        cosines = unit(q) @ unit(g)[of].T / self.o.alignment_tau
        nce = -np.diagonal(log_softmax(cosines)).mean()
        return entropy(self.logits(x, g, q, of)) + self.o.alignment * float(nce)

    def differences(self, x: np.ndarray, parts: list[np.ndarray], which: int, of: list[int]) -> np.ndarray:
        found = np.zeros_like(parts[which])
        for index in np.ndindex(found.shape):
            ends = []
            for sign in (1, -1):
                moved = [p.copy() for p in parts]
                moved[which][index] += sign * 1e-6
                ends.append(self.loss(x, moved[0], moved[1], of))
            found[index] = (ends[0] - ends[1]) / 2e-6
        return found

    def step(self, x: np.ndarray) -> np.ndarray:
        first = self.scale * unit(self.g) @ x
        h, slots = entropy(first) / math.log2(self.k), self.cache[int(first.argmax())]
        if len(slots) < self.o.capacity:
            slots.append((h, x))
        elif h < slots[-1][0]:
            slots[-1] = (h, x)
        slots.sort(key=lambda slot: slot[0])
        of = [k for k in range(self.k) if self.cache[k]]
        q = np.stack([np.mean([f for _, f in self.cache[k]], axis=0) for k in of])
        by_g, by_q = (self.differences(x, [self.g, q], which, of) for which in (0, 1))
        g = self.g - self.o.text_step * by_g / (np.abs(by_g) + self.o.damping)
        q = q - self.o.image_step * by_q / (np.abs(by_q) + self.o.damping)
        z = self.logits(x, g, q, of)
        if entropy(z) / math.log2(self.k) < self.o.threshold:
            self.m += 1
            self.g = self.g * self.m / (self.m + 1) + unit(g) / (self.m + 1)
        return z


@pytest.mark.parametrize("scale", [20.0, 60.0])
def test_equals_the_literal_account(scale: float) -> None:
    task = Task(*embeddings(25, 4, 8), scale)
    options = DPE(capacity=2, cache_weight=2.0, sharpness=3.0, text_step=5e-3, image_step=2e-3, alignment=0.8,
                  alignment_tau=0.1, damping=0.1, threshold=0.3)  # fmt: skip
    literal = Literal(task, options)
    wanted = [literal.step(x) for x in task.features]
    state, result = run_stream(options, task, 4)
    np.testing.assert_allclose(result.scores, wanted, atol=1e-5)
    np.testing.assert_allclose(state.text_prototypes, literal.g, atol=1e-6)
    assert state.updates == literal.m > 0


def test_without_steps_it_is_a_cache() -> None:
    task = Task(*embeddings(30, 4, 8))
    still = DPE(text_step=0.0, image_step=0.0, threshold=0.0)
    state, result = run_stream(still, task, 30)
    np.testing.assert_allclose(state.text_prototypes, task.text)
    far = replace(still, cache_weight=0.0).fit_predict(task)
    np.testing.assert_allclose(far.probs, far.zero_shot, atol=1e-9)
    assert (result.scores >= far.scores - 1e-9).all()
