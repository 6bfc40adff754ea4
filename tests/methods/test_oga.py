"""OGA against a literal account with pseudo-inverses, and what `faithful` means."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moontide.checks import check_method
from moontide.checks.tasks import embeddings
from moontide.methods.oga import OGA, OGAState, precision_of
from moontide.streams import run_stream
from moontide.types import Task


class Literal:
    """The model as its description reads; `half` rounds as the published program stores."""

    def __init__(self, text: np.ndarray, scale: float, faithful: bool) -> None:
        self.text, self.scale, self.faithful = text, scale, faithful
        k, d = text.shape
        self.memory, self.filled = np.zeros((k, 8, d)), np.zeros((k, 8), dtype=bool)
        self.entropy = np.full((k, 8), self.half(math.log(k)))
        self.mu, self.precision = text.copy(), d * np.eye(d)

    def half(self, x: np.ndarray | float) -> np.ndarray:
        return np.asarray(x, dtype=np.float16 if self.faithful else float).astype(float)

    def zero_shot(self, f: np.ndarray) -> np.ndarray:
        c = self.scale * f @ self.text.T
        p = np.exp(c - c.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True)

    def update(self, batch: np.ndarray) -> None:
        for f, p in zip(batch, self.zero_shot(batch), strict=True):
            k, h = int(p.argmax()), float(-(p * np.log(p + 1e-9)).sum())
            if (h < self.entropy[k]).any():
                slot = int(self.entropy[k].argmax())
                self.memory[k, slot], self.entropy[k, slot], self.filled[k, slot] = self.half(f), self.half(h), True
        counts, d = self.filled.sum(axis=1), self.text.shape[1]
        for k in np.flatnonzero(counts >= 2):
            total = self.memory[k][self.filled[k]].sum(axis=0)
            self.mu[k] = self.half(total / (8 if self.faithful else counts[k]))
        if counts.max() > 2:
            x = (self.memory - self.mu[:, None])[self.filled]
            x -= x.mean(axis=0)
            n, m = len(x), x.T @ x / (len(x) - 1)
            ridge = (n - 1) * m + np.trace(m) * np.eye(d)
            self.precision = d * np.linalg.pinv(ridge) if n <= 4 * d else np.linalg.pinv(m)

    def predict(self, batch: np.ndarray, tau: float) -> np.ndarray:
        apart = batch[:, None] - self.mu
        g = np.exp(-tau / 2 * np.einsum("nkd,de,nke->nk", apart, self.precision, apart))
        z = self.zero_shot(batch) * g / g.sum(axis=1, keepdims=True)
        return z / z.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("faithful", [True, False])
@pytest.mark.parametrize(("k", "d"), [(6, 24), (20, 8)], ids=["ridge", "plain"])  # up to 8 K rows against 4 d
@pytest.mark.parametrize("access", ["batch", "sample"])
def test_equals_the_literal_account(access: str, k: int, d: int, faithful: bool) -> None:
    task = Task(*embeddings(120, k, d), 50.0)
    literal, wanted = Literal(task.text, 50.0, faithful), []
    for batch in task.batches(1 if access == "sample" else 40):
        literal.update(batch.features)
        wanted.append(literal.predict(batch.features, 0.05))
    assert (literal.filled.sum() > 4 * d) == (k == 20)
    state, result = run_stream(OGA(access=access, tau=0.05, faithful=faithful), task, 40)
    assert isinstance(state, OGAState)
    np.testing.assert_allclose(result.probs, np.concatenate(wanted), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(state.mu, literal.mu, rtol=1e-12)


def test_faithful_means_are_shortened_until_the_class_is_full() -> None:
    f, text = np.eye(4)[[0, 0, 0, 0]] + 0.01 * np.eye(4), np.eye(4)[:2]
    short = OGA().step(OGA().start(Task(f, text)), f)[0].mu[0]
    right = OGA(faithful=False).step(OGA(faithful=False).start(Task(f, text)), f)[0].mu[0]
    assert np.linalg.norm(right) == pytest.approx(1, abs=1e-3)
    assert np.linalg.norm(short) == pytest.approx(4 / 8, abs=1e-3)


def test_memory_is_in_half_precision_where_faithful() -> None:
    task = Task(*embeddings(30, 3, 16))
    assert run_stream(OGA(), task, 10)[0].keys.dtype == np.float16
    assert run_stream(OGA(faithful=False), task, 10)[0].keys.dtype == np.float64


def test_a_class_of_one_sample_stays_at_its_text() -> None:
    task = Task(*embeddings(1, 3, 16))
    state, _ = run_stream(OGA(), task, 1)
    assert np.isfinite(state.entropy).sum() == 1
    np.testing.assert_array_equal(state.mu, task.text)
    np.testing.assert_array_equal(state.precision, 16 * np.eye(16))


def test_an_undecided_sample_is_not_stored() -> None:
    text = np.eye(6)[:5]  # the entropy ln 5 is above itself in half precision, which empty slots start with
    state, _ = OGA().step(OGA().start(Task(text, text)), np.asarray([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]))
    assert not np.isfinite(state.entropy).any()


def test_precision_without_full_rank_is_a_pseudo_inverse() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 3)) @ rng.normal(size=(3, 6))  # rank 3 of 6, more rows than 4 d
    np.testing.assert_allclose(precision_of(rows), np.linalg.pinv(np.cov(rows.T), rcond=1e-9), atol=1e-9)
    assert not precision_of(np.zeros((40, 6))).any()  # all rows equal


def test_common_checks_of_the_other_options() -> None:
    check_method(OGA(access="sample"))
    check_method(OGA(faithful=False))
