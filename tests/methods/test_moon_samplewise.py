"""Sample-wise MOON against a literal account with running sums, and what its bank forgets."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from moontide.checks.tasks import embeddings, single
from moontide.methods.moon_samplewise import BankState, SamplewiseMOON
from moontide.streams import run_stream
from moontide.types import Task


class Literal:
    """The variant as the released program runs it: sums that samples are added to and subtracted from."""

    def __init__(self, text: np.ndarray, scale: float, bank: int) -> None:
        self.text, self.scale, self.bank = text, scale, bank
        self.k, self.d = text.shape
        self.entries: list[tuple] = []
        self.s, self.soft, self.hard = np.zeros(text.shape), np.zeros(self.k), np.zeros(self.k)

    def predict(self, f: np.ndarray) -> np.ndarray:
        c = self.scale * self.text @ f
        y = np.exp(c - c.max())
        y /= y.sum()
        z = y
        if self.entries:
            near = np.asarray([f @ g for g, *_ in self.entries])
            order = np.argsort(-near)[:3]
            w = np.exp(near[order]) / np.exp(near[order]).sum()
            message = sum(a * self.entries[j][1] for a, j in zip(w, order, strict=True))
            log_c = (self.d - 1) / 2 * np.log(self.kappa) - self.kappa
            z = np.maximum(y, 1e-12) * np.exp((self.kappa * (self.mu @ f) + log_c + message) / 100)
            z /= z.sum() + 1e-12
        gamma = 1 + (z * np.log(z + 1e-12)).sum() / (math.log(self.k) + 1e-12)
        self.count(f, z, gamma, 1)
        self.entries.append((f, z, gamma))
        if len(self.entries) > self.bank:
            self.count(*self.entries.pop(0), -1)
        v, beta = self.s / (self.soft[:, None] + 1e-12), (self.hard / (self.hard + 1 + 1e-12))[:, None]
        resultant = beta * v + (1 - beta) * self.text
        length = np.linalg.norm(resultant, axis=1)
        self.mu, r = resultant / length[:, None], np.clip(length, 1e-6, 0.999)
        self.kappa = np.clip((r * self.d - r**3) / (1 - r**2), 1e-6, 500)
        return z

    def count(self, f: np.ndarray, z: np.ndarray, gamma: float, sign: int) -> None:
        self.s += sign * gamma * np.outer(z, f)
        self.soft += sign * gamma * z
        self.hard[z.argmax()] += sign


@pytest.mark.parametrize("scale", [20.0, 100.0])
def test_equals_the_literal_account(scale: float) -> None:
    task = Task(*embeddings(100, 6, 24), scale)
    literal = Literal(task.text, scale, 16)
    wanted = [literal.predict(f) for f in task.features]
    result = SamplewiseMOON(bank=16).fit_predict(task)
    np.testing.assert_allclose(result.probs, wanted, rtol=1e-7, atol=1e-12)


def test_borders_of_batches_and_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task, method = Task(*embeddings(70, 5, 16)), SamplewiseMOON(bank=8)
    wanted = method.fit_predict(task).probs
    for size, rows in ((1, 128), (13, 128), (70, 5)):
        monkeypatch.setattr("moontide.methods.moon_samplewise.BLOCK_ROWS", rows)
        np.testing.assert_allclose(run_stream(method, task, size)[1].probs, wanted, rtol=1e-10)


def test_the_bank_holds_the_last_samples_oldest_first() -> None:
    task = Task(*embeddings(20, 4, 16))
    state, result = run_stream(SamplewiseMOON(bank=6), task, 7)
    assert isinstance(state, BankState)
    np.testing.assert_allclose(state.bank_features, task.features[-6:])
    np.testing.assert_array_equal(state.bank_z, result.probs[-6:])
    early, _ = run_stream(SamplewiseMOON(bank=6), task.rows(0, 2), 2)
    assert isinstance(early, BankState)
    assert (early.bank_features != 0).any(axis=1).tolist() == [False] * 4 + [True] * 2


def test_what_left_the_bank_is_forgotten() -> None:
    method, (features, text) = SamplewiseMOON(bank=8), embeddings(40, 5, 16)
    other = np.concatenate([-features[:20], features[20:]])
    state, _ = run_stream(method, Task(features[:28], text), 28)
    changed, _ = run_stream(method, Task(other[:28], text), 28)
    assert isinstance(state, BankState)
    assert isinstance(changed, BankState)
    np.testing.assert_array_equal(state.bank_features, changed.bank_features)
    same = replace(changed, bank_z=state.bank_z, bank_gamma=state.bank_gamma)  # the answers may differ
    np.testing.assert_array_equal(method.step(same, features[28:])[1].probs, method.step(state, features[28:])[1].probs)


def test_the_first_sample_keeps_its_zero_shot_prediction() -> None:
    result = SamplewiseMOON().fit_predict(Task(*embeddings(3, 4, 16)))
    np.testing.assert_array_equal(result.probs[0], result.zero_shot[0])
    assert (result.probs[1] != result.zero_shot[1]).any()


def test_rounding_does_not_add_up_along_a_stream() -> None:
    task = Task(*embeddings(1500, 5, 16))
    gap = np.abs(run_stream(SamplewiseMOON(bank=32), single(task), 100)[1].probs
                 - run_stream(SamplewiseMOON(bank=32), task, 100)[1].probs).max(axis=1)  # fmt: skip
    assert gap[-300:].max() < 2e-4
    assert gap.max() < 2e-4


def test_the_preset_paper_is_the_text() -> None:
    task = Task(*embeddings(40, 5, 24), 30.0)
    given = SamplewiseMOON.from_preset("paper", bank=12, temper=50.0, kappa_cap=300.0, r_cap=0.99)
    found = given.fit_predict(task).probs
    f, t, d = np.asarray(task.features), np.asarray(task.text), task.d
    logits = 30.0 * f @ t.T
    y = np.exp(logits - logits.max(axis=1, keepdims=True))
    y /= y.sum(axis=1, keepdims=True)
    z = y.copy()
    for i in range(1, len(f)):
        bank = range(max(0, i - 12), i)
        gamma = np.asarray([1 + (z[j] * np.log(z[j])).sum() / math.log(5) for j in bank])
        confidence = np.sqrt(y[bank].mean(axis=0) * y[bank].max(axis=0))  # lambda_k, of the bank
        n = (gamma[:, None] * z[bank]).sum(axis=0)
        beta = (n / (n + 1 / confidence))[:, None]
        v = (gamma[:, None] * z[bank]).T @ f[bank] / n[:, None]
        resultant = beta * v + (1 - beta) * t
        r = np.minimum(np.linalg.norm(resultant, axis=1), 0.99)
        mu = resultant / np.linalg.norm(resultant, axis=1)[:, None]
        kappa = np.minimum((d * r - r**3) / (1 - r**2), 300.0)
        log_p = kappa * (mu @ f[i]) + (d - 1) / 2 * np.log(kappa) - kappa
        votes = sum((f[i] @ f[j]) * z[j] for j in bank)  # the whole bank
        score = np.log(y[i]) + (log_p + votes) / 50
        z[i] = np.exp(score - score.max())
        z[i] /= z[i].sum()
    assert np.allclose(found, z, atol=1e-6)
