"""ECALP against a literal account with lists and dense matrices, and the bound on what a stream keeps."""

from __future__ import annotations

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.methods.ecalp import ECALP, context
from moontide.streams import run_stream
from moontide.types import Task


class Literal:
    """The graph as it is described: candidate lists with the copy of the newest image in them, dense propagation."""

    def __init__(self, task: Task, o: ECALP) -> None:
        self.o, self.text = o, task.text
        w = task.text.var(axis=0, ddof=1)
        self.w = w / np.linalg.norm(w)
        self.f: list[np.ndarray] = []
        self.lists: list[list[tuple[float, int]]] = []
        self.y0 = np.zeros((0, task.k))

    def similarity(self, older: np.ndarray, newer: np.ndarray) -> float:
        a = self.w * older
        return float(a @ newer / np.linalg.norm(a))

    def ordered(self, entries: list[tuple[float, int]], i: int) -> list[tuple[float, int]]:
        first = i + 1 if self.o.ties == "copy" else i
        return sorted(entries, key=lambda e: (-e[0], e[1] >= i and e[1] != first))

    def step(self, x: np.ndarray) -> np.ndarray:
        i, k_text = len(self.f), min(self.o.text_neighbours, len(self.text))
        self.f.append(x)
        n = i + 2
        k = min(self.o.neighbours, n)
        cap = k + (0 if n - 2 <= k else 1 if n - 2 == k + 1 else 2)
        s = [self.similarity(f, x) for f in self.f]
        for j in range(i):
            kept = [e for e in self.lists[j] if e[1] != i]  # the copy of the image before
            self.lists[j] = self.ordered([*kept, (s[j], i), (s[j], i + 1)], i)[:cap]
        own = self.ordered([*((s[j], j) for j in range(i + 1)), (s[i], i + 1)], i)[:cap]
        self.lists.append(own)
        nodes = [*self.f, x]
        a = np.zeros((n + len(self.text), n + len(self.text)))
        for j, near in enumerate([*self.lists, own]):
            for value, other in near[:k]:
                a[j, other] = abs(value) ** self.o.gamma
            cosine = self.text @ nodes[j]
            for c in np.argsort(-cosine)[:k_text]:
                a[j, n + c] = abs(cosine[c]) ** self.o.gamma
        w = a + a.T
        d = 1 / (np.sqrt(w.sum(axis=1)) + 1e-6)
        w = d[:, None] * w * d
        y0 = np.concatenate([self.y0, np.zeros((2, len(self.text)))])
        y = y0
        for _ in range(self.o.iterations):
            y = self.o.alpha * (w[:n] @ np.concatenate([y, np.eye(len(self.text))])) + (1 - self.o.alpha) * y0
        self.y0 = (
            self.o.carry * y[: i + 1].max(axis=1, keepdims=True) * np.eye(len(self.text))[y[: i + 1].argmax(axis=1)]
        )
        return np.asarray(y[-1])


@pytest.mark.parametrize("ties", ["copy", "list"])
@pytest.mark.parametrize(("k", "neighbours", "alpha"), [(6, 8, 1.0), (2, 3, 0.7)])
def test_equals_the_literal_account(k: int, neighbours: int, alpha: float, ties: str) -> None:
    task = Task(*embeddings(40, k, 16))
    method = ECALP(neighbours=neighbours, gamma=4.0, alpha=alpha, ties=ties, carry=0.5)
    literal = Literal(task, method)
    wanted = [literal.step(x) for x in task.features]
    np.testing.assert_allclose(run_stream(method, task, 7)[1].scores, wanted, rtol=1e-9, atol=1e-15)


def test_context_is_where_classes_differ() -> None:
    text = np.asarray([[0.6, 0.8, 0.0], [0.6, 0.0, 0.8]])
    np.testing.assert_allclose(context(text), [0, 0.5**0.5, 0.5**0.5])
    np.testing.assert_allclose(context(text[:1]), 3**-0.5)


def test_a_stream_keeps_the_latest_images_and_a_batch_all() -> None:
    task = Task(*embeddings(60, 5, 16))
    all_, few = ECALP(memory=60), ECALP(memory=20)
    np.testing.assert_array_equal(few.fit_predict(task).scores, run_stream(all_, task, 60)[1].scores)
    state, bounded = run_stream(few, task, 9)
    np.testing.assert_allclose(bounded.scores[:20], run_stream(all_, task, 9)[1].scores[:20], rtol=1e-12)
    newest = task.features[40:]
    assert state.features.shape == (20, 16)
    assert np.allclose(np.sort(state.features @ newest.T, axis=1)[:, -1], 1)  # each is one of the last 20
    assert state.near.max() < 20
    assert (bounded.labels == all_.fit_predict(task).labels).mean() > 0.8


def test_without_any_weight_the_answer_is_zero_shot() -> None:
    result = ECALP().fit_predict(np.asarray([[0.0, 0.0, 1.0]]), np.eye(3)[:2])
    np.testing.assert_allclose(result.probs, result.zero_shot)
