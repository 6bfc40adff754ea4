"""DMN against a literal account of its memory and read-out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.checks.tasks import embeddings
from moontide.methods.dmn import DMN, DMNState, prototype_cosine
from moontide.streams import run_stream
from moontide.types import Task


def softmax(c: np.ndarray) -> np.ndarray:
    p = np.exp(c - c.max())
    return p / p.sum()


class Literal:
    """The memory as its description reads: M slots a class, of which empty ones are zero vectors."""

    def __init__(self, text: np.ndarray, scale: float, slots: int) -> None:
        self.text, self.scale = text, scale
        self.memory = np.zeros((len(text), slots, text.shape[1]))
        self.entropy: list[list[float]] = [[] for _ in text]

    def update(self, f: np.ndarray) -> None:
        p = softmax(self.scale * self.text @ f)
        k, h = int(p.argmax()), float(-(p * np.log(p + 1e-8)).sum())
        held = self.entropy[k]
        if len(held) < self.memory.shape[1]:
            self.memory[k, len(held)] = f
            held.append(h)
        elif h < max(held):
            worst = held.index(max(held))
            self.memory[k, worst], held[worst] = f, h

    def read(self, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        cosine = []
        for slots, t in zip(self.memory, self.text, strict=True):
            entries = np.vstack([slots, t])
            c = np.exp(-5.5 * (1 - entries @ f)) @ entries
            cosine.append(f @ c / np.linalg.norm(c))
        return self.scale * self.text @ f, softmax(self.scale * np.asarray(cosine))


@pytest.mark.parametrize("access", ["batch", "sample"])
def test_equals_the_literal_account(access: str) -> None:
    task = Task(*embeddings(90, 6, 24))
    literal, wanted = Literal(task.text, task.logit_scale, 4), []
    for batch in task.batches(1 if access == "sample" else 30):
        for f in batch.features:
            literal.update(f)
        wanted += [logits + 10 * dynamic for logits, dynamic in map(literal.read, batch.features)]
    assert min(map(len, literal.entropy)) == 4  # every class is full: samples were replaced
    _, result = run_stream(DMN(access=access, capacity=4), task, 30)
    np.testing.assert_allclose(result.scores, wanted, rtol=1e-9)


def test_original_adds_probabilities() -> None:
    task = Task(*embeddings(20, 4, 16))
    literal, wanted = Literal(task.text, task.logit_scale, 50), []
    for f in task.features:
        literal.update(f)
        logits, dynamic = literal.read(f)
        wanted.append(softmax(logits) + dynamic)
    result = DMN.from_preset("original").fit_predict(task)
    np.testing.assert_allclose(result.scores, wanted, rtol=1e-9)
    np.testing.assert_allclose(result.probs, np.asarray(wanted) / 2, rtol=1e-9)


@given(st.integers(0, 2**31), st.integers(0, 3))
def test_the_length_from_products_is_that_of_the_sum(seed: int, empty: int) -> None:
    rng = np.random.default_rng(seed)
    x, text = embeddings(5, 3, 16, seed=int(rng.integers(99)))
    keys = np.abs(rng.normal(size=(3, 4, 16))) + 1
    keys /= np.linalg.norm(keys, axis=2, keepdims=True)
    keys[:, 4 - empty :] = 0
    entries = np.concatenate([keys, text[:, None]], axis=1)  # (3, 5, 16)
    w = np.exp(-5.5 * (1 - np.einsum("nd,kjd->nkj", x, entries)))
    c = np.einsum("nkj,kjd->nkd", w, entries)
    wanted = np.einsum("nd,nkd->nk", x, c) / np.linalg.norm(c, axis=2)
    np.testing.assert_allclose(prototype_cosine(x, keys, text, 5.5), wanted, rtol=1e-10)


def test_entries_that_cancel_give_finite_scores() -> None:
    x = np.eye(4, dtype=np.float32)[:1]
    keys = -np.eye(4, dtype=np.float32)[None, :1]
    assert np.isfinite(prototype_cosine(x, keys, np.eye(4, dtype=np.float32)[1:2], 0.0)).all()
    assert np.isfinite(prototype_cosine(x, keys, x, 0.0)).all()  # the sum is the zero vector


def test_one_at_a_time_does_not_see_batch_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(*embeddings(40, 5, 16))
    _, single = run_stream(DMN(), task, 1)
    for rows in (7, 256):
        monkeypatch.setattr("moontide.methods.dmn.BLOCK_ROWS", rows)
        np.testing.assert_allclose(DMN(access="sample").fit_predict(task).scores, single.scores, rtol=1e-10)


def test_a_class_keeps_its_lowest_entropies() -> None:
    task = Task(*embeddings(200, 3, 16), 30.0)
    state, result = run_stream(DMN(capacity=5), task, 32)
    assert isinstance(state, DMNState)
    p = result.zero_shot
    h, labels = -(p * np.log(p + 1e-8)).sum(axis=1), p.argmax(axis=1)
    for k in range(3):
        np.testing.assert_allclose(np.sort(state.entropy[k]), np.sort(h[labels == k])[:5], rtol=1e-12)
