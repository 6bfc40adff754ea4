"""ADAPT against literal accounts of both modes with a pseudo-inverse, and what the modes and options do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide.checks.tasks import embeddings
from moontide.core.simplex import log_softmax, softmax
from moontide.errors import OptionError
from moontide.methods.adapt import ADAPT, most_confident
from moontide.streams import run_stream
from moontide.types import Task


def entropy(p: np.ndarray) -> float:
    return float(-(p * np.log(p)).sum())


def gaussian(x: np.ndarray, mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """w and b of the classifier whose residual rows are x."""
    n, d = x.shape
    cov = np.eye(d) if n == 1 else np.cov(x, rowvar=False)
    p = d * np.linalg.pinv((n - 1) * cov + np.trace(cov) * np.eye(d))
    return mu @ p, np.log(1 / len(mu)) - 0.5 * np.einsum("kd,de,ke->k", mu, p, mu)


def fused(c: np.ndarray, g: np.ndarray, sim: np.ndarray, q: np.ndarray, scale: float) -> np.ndarray:
    a = log_softmax(g) + scale / (2 * len(q)) * sim @ q
    return c * np.exp((a - a.max()) / scale)


def transductive(task: Task, size: int, alpha: float, scale: float) -> np.ndarray:
    f, t = task.features, task.text
    c = task.logit_scale * f @ t.T
    p = softmax(c)
    label = p.argmax(axis=1)
    mu = t.copy()
    bank = []
    for k in range(task.k):
        held = sorted(np.flatnonzero(label == k), key=lambda i: entropy(p[i]))[:size]
        bank += held
        if held:
            top = sum(p[i, k] * f[i] for i in held) + p[:, k] @ f
            mu[k] = top / (p[held, k].sum() + p[:, k].sum())
    mu = alpha * mu + (1 - alpha) * t
    w, b = gaussian(f[bank] - mu[label[bank]], mu)
    q = np.where(np.arange(task.k) == label[bank][:, None], p[bank], 0)
    return np.stack([fused(c[i], f[i] @ w.T + b, f[i] @ f[bank].T, q, scale) for i in range(task.n)])


def online(task: Task, size: int, alpha: float, scale: float, stale: bool) -> np.ndarray:
    t, mu = task.text, task.text.copy()
    bank: list[list] = [[] for _ in range(task.k)]  # of (entropy, feature, probability)
    out = []
    for f in task.features:
        c = task.logit_scale * t @ f
        p = softmax(c)
        k, h = int(p.argmax()), entropy(p)
        worst = max(bank[k], key=lambda e: e[0], default=None)
        entered = len(bank[k]) < size or h < worst[0]
        if entered:
            if len(bank[k]) == size:
                bank[k] = [e for e in bank[k] if e is not worst]
            bank[k].append((h, f, p[k]))
            top = sum(e[2] * e[1] for e in bank[k]) + p[k] * f
            mu[k] = alpha * top / (sum(e[2] for e in bank[k]) + p[k]) + (1 - alpha) * t[k]
        v = np.stack([e[1] for held in bank for e in held])
        of = np.asarray([j for j, held in enumerate(bank) for _ in held])
        weight = np.asarray([e[2] for held in bank for e in held])
        if entered or not stale:
            sim, q = f @ v.T, np.where(np.arange(task.k) == of[:, None], weight[:, None], 0)
        w, b = gaussian(v - mu[of], mu)
        score = fused(c, f @ w.T + b, sim, q, scale)
        out.append(score / score.sum())
    return np.stack(out)


@pytest.mark.parametrize(("n", "d", "size"), [(60, 16, 3), (20, 48, 12), (5, 8, 1)])
def test_a_batch_equals_the_literal_account(n: int, d: int, size: int) -> None:
    task = Task(*embeddings(n, 9, d), 50.0)
    result = ADAPT(bank=size, alpha=0.8, scale=20.0).fit_predict(task)
    np.testing.assert_allclose(result.scores, transductive(task, size, 0.8, 20.0), atol=1e-8)


@pytest.mark.parametrize("faithful", [False, True])
@pytest.mark.parametrize(("d", "size"), [(16, 2), (48, 12)])  # banks that fill, banks with fewer samples than d
def test_a_stream_equals_the_literal_account(d: int, size: int, faithful: bool) -> None:
    task = Task(*embeddings(60, 5, d), 50.0)
    method = ADAPT(bank=size, alpha=0.8, scale=5.0, faithful=faithful)
    wanted = online(task, size, 0.8, 5.0, stale=faithful)
    for batch_size in (1, 7, 60):  # the borders of batches mean nothing
        np.testing.assert_allclose(run_stream(method, task, batch_size)[1].scores, wanted, atol=1e-8)


def test_the_stale_similarities_differ_once_a_bank_is_full() -> None:
    task = Task(*embeddings(60, 5, 16), 50.0)
    scores = [online(task, 2, 0.9, 50.0, stale) for stale in (False, True)]
    assert not np.allclose(*scores, atol=1e-3)


def test_modes() -> None:
    task = Task(*embeddings(40, 5, 16))
    stream, batch = run_stream(ADAPT(), task, 20)[1], ADAPT().fit_predict(task)
    np.testing.assert_allclose(ADAPT(mode="online").fit_predict(task).scores, stream.scores, atol=1e-9)
    np.testing.assert_array_equal(ADAPT(mode="transductive").fit_predict(task).scores, batch.scores)
    state, alone = run_stream(ADAPT(mode="transductive"), task, 20)
    np.testing.assert_allclose(alone.scores[20:], ADAPT().fit_predict(task.rows(20, 40)).scores, atol=1e-9)
    assert state.bank.size == 0


def test_a_row_of_negative_logits_keeps_its_order() -> None:
    features, text = embeddings(30, 5, 16)
    task = Task(np.concat([features, -features[:3]]), text)
    result = ADAPT(mode="online").fit_predict(task)
    assert (result.scores[-3:].sum(axis=1) < 0).all()
    np.testing.assert_array_equal(result.probs.argmax(axis=1), result.labels)


def test_the_bank_keeps_the_most_confident_samples() -> None:
    task = Task(*embeddings(200, 3, 16), 20.0)
    state, _ = run_stream(ADAPT(bank=4), task, 50)
    p = softmax(20.0 * task.features @ task.text.T)
    for k in range(3):
        wanted = np.sort([entropy(row) for row in p[p.argmax(axis=1) == k]])[:4]
        np.testing.assert_allclose(np.sort(state.entropy[k]), wanted, atol=1e-12)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 2)), min_size=1, max_size=30), st.integers(1, 5))
def test_most_confident(samples: list[tuple[int, float]], size: int) -> None:
    labels, h = (np.asarray(x) for x in zip(*samples, strict=True))
    rows = most_confident(h, labels, size)
    for k in range(5):
        of = np.flatnonzero(labels == k)
        np.testing.assert_array_equal(rows[labels[rows] == k], of[np.argsort(h[of], kind="stable")][:size])


def test_faithful_says_nothing_about_a_transductive_run() -> None:
    with pytest.raises(OptionError, match="'faithful' option of adapt has no effect with mode='transductive'"):
        ADAPT(mode="transductive", faithful=True)
