"""BCA against a literal account."""

from __future__ import annotations

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.methods.bca import BCA
from moontide.streams import run_stream
from moontide.types import Task


@pytest.mark.parametrize(
    ("t1", "n1", "t2", "n2"), [(0.05, 20000.0, 0.65, 1.0), (0.5, 1.0, 0.9, 1.0), (0.0, 3.0, 0.3, 2.0)]
)
def test_equals_the_literal_account(t1: float, n1: float, t2: float, n2: float) -> None:
    task = Task(*embeddings(80, 6, 24), 60.0)
    mu, r, c1, c2, wanted = task.text.copy(), np.eye(6), np.full(6, n1), np.full(6, n2), []
    for x in task.features:
        s = np.exp(60 * (mu @ x - 1))
        f = (s / s.sum()) @ r
        k = f.argmax()
        if f[k] > t1:
            mu[k] = (c1[k] * mu[k] + x) / (c1[k] + 1)
            mu[k] /= np.linalg.norm(mu[k])
            c1[k] += 1
        if f[k] > t2:
            r[k] = (c2[k] * r[k] + f) / (c2[k] + 1)
            c2[k] += 1
        wanted.append(f)
    method = BCA(centre_threshold=t1, centre_count=n1, belief_threshold=t2, belief_count=n2)
    state, result = run_stream(method, task, 9)
    np.testing.assert_allclose(result.scores, wanted, rtol=1e-9)
    np.testing.assert_allclose(state.beliefs, r, rtol=1e-9)
    np.testing.assert_allclose(state.centres, mu, rtol=1e-9)
    np.testing.assert_allclose(state.beliefs.sum(axis=1), 1)


def test_many_pseudo_samples_keep_the_centres_at_the_text() -> None:
    task = Task(*embeddings(80, 6, 24))
    state, _ = run_stream(BCA(), task, 80)
    assert ((state.centres * task.text).sum(axis=1) > 1 - 1e-5).all()
    assert (state.belief_counts > 1).any()
