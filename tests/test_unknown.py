"""Scores for "none of the classes" against literal accounts of their descriptions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moontide.checks.tasks import embeddings
from moontide.core.arrays import to_numpy
from moontide.errors import InputError, OptionError
from moontide.unknown import TANL, mcm, mine_negatives, neglabel, otsu

F, T = embeddings(30, 5, 16)
U = embeddings(1, 230, 16, seed=3)[1]


def exponentials(f: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.exp(100 * (f @ t.T - 1))


def test_mcm_is_the_largest_softmax_of_the_cosines() -> None:
    p = np.exp(F @ T.T)
    np.testing.assert_allclose(mcm(F, T), (p / p.sum(axis=1, keepdims=True)).max(axis=1), rtol=1e-12)
    msp = exponentials(F, T)
    np.testing.assert_allclose(mcm(3 * F, T, tau=0.01), msp.max(axis=1) / msp.sum(axis=1), rtol=1e-9)


def test_mined_names_have_the_lowest_quantile_of_cosines() -> None:
    q = np.quantile(U @ T.T, 0.95, axis=1)
    np.testing.assert_array_equal(mine_negatives(U, T), np.argsort(q)[: int(0.15 * 230)])
    furthest = mine_negatives(U, T, share=0.5, quantile=1.0)
    np.testing.assert_array_equal(furthest, np.argsort((U @ T.T).max(axis=1))[:115])


@pytest.mark.parametrize("groups", [1, 7, None])
def test_neglabel_is_the_mean_share_of_the_classes_over_groups(groups: int | None) -> None:
    count = 2 if groups is None else groups  # 230 // 100
    size = 230 // count
    order = np.random.default_rng(4).permutation(size * count).reshape(count, size)
    known = exponentials(F, T).sum(axis=1)
    wanted = np.mean([known / (known + exponentials(F, U[group]).sum(axis=1)) for group in order], axis=0)
    np.testing.assert_allclose(neglabel(F, T, U, groups=groups, seed=4), wanted, rtol=1e-9)


def test_blocks_of_images_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = neglabel(F, T, U)
    monkeypatch.setattr("moontide.unknown.BLOCK_ROWS", 7)
    np.testing.assert_allclose(neglabel(F, T, U), whole, rtol=1e-12)


def literal_otsu(scores: np.ndarray) -> float:
    found = []
    for th in np.arange(100) / 100:
        low, high = scores[scores < th], scores[scores >= th]
        empty = not (len(low) and len(high))
        found.append(np.inf if empty else (len(low) * low.var() + len(high) * high.var()) / len(scores))
    equal = np.flatnonzero(np.isclose(found, min(found), rtol=1e-9) | np.isinf(min(found)))
    return float(equal[len(equal) // 2] / 100)


@pytest.mark.parametrize("seed", range(5))
def test_the_threshold_is_otsus(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = np.append(rng.beta(2, 5, 20), rng.beta(6, 2, 30))
    assert otsu(scores) == literal_otsu(scores)
    assert otsu(np.zeros(4)) == literal_otsu(np.zeros(4)) == 0.5


class LiteralTANL:
    """The state and one step as their description reads, with one loop for each prefix."""

    def __init__(self, options: TANL, noise: np.ndarray) -> None:
        self.o = options
        start = T[np.random.default_rng(0).permutation(len(T))[-options.queue :]]
        self.known, self.unknown = self.rows(start), self.rows(noise)
        self.h = self.score(np.append(start, noise, axis=0), self.unknown.mean(0) - self.known.mean(0))

    def rows(self, f: np.ndarray) -> np.ndarray:
        e = exponentials(f, np.append(T, U, axis=0))
        return (e / e.sum(axis=1, keepdims=True))[:, len(T) :]

    def score(self, f: np.ndarray, a: np.ndarray) -> np.ndarray:
        sel = U[np.argsort(-a)[: self.o.selected]]
        known = exponentials(f, T).sum(axis=1)
        ends = range(self.o.gamma, self.o.selected + 1, self.o.gamma) if self.o.gamma else [self.o.selected]
        return np.mean([known / (known + exponentials(f, sel[:end]).sum(axis=1)) for end in ends], axis=0)

    def step(self, f: np.ndarray) -> np.ndarray:
        s = self.score(f, self.unknown.mean(0) - self.known.mean(0))
        self.h = np.append(self.h, s)[-self.o.history :]
        th, rows = literal_otsu(self.h), self.rows(f)
        sure = rows[s > th + self.o.gap * (1 - th)], rows[s < th - self.o.gap * th]
        means = [
            self.o.alpha * old.mean(0) + (1 - self.o.alpha) * (new.mean(0) if len(new) else old.mean(0))
            for old, new in zip((self.known, self.unknown), sure, strict=True)
        ]
        self.known, self.unknown = (
            np.append(old, new, axis=0)[-self.o.queue :]
            for old, new in zip((self.known, self.unknown), sure, strict=True)
        )
        return self.score(f, means[1] - means[0])


@pytest.mark.parametrize(
    "options",
    [TANL(selected=40), TANL(selected=50, gamma=0, alpha=0.3), TANL(selected=10, gamma=1, queue=4, history=25)],
)
def test_tanl_is_its_description(options: TANL) -> None:
    noise = np.random.default_rng(5).normal(size=(15, 16))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    literal, state = LiteralTANL(options, noise[-options.queue :]), options.start(T, U, noise=noise)
    stream = np.append(F, embeddings(30, 9, 16, seed=8)[0], axis=0)[np.random.default_rng(6).permutation(60)]
    for batch in np.split(stream, 4):
        before = state.known_rows.copy(), state.history.copy()
        after, scores = options.step(state, batch)
        assert np.array_equal(state.known_rows, before[0])
        assert np.array_equal(state.history, before[1])
        np.testing.assert_allclose(scores, literal.step(batch), rtol=1e-6)
        state = after
    np.testing.assert_allclose(state.known_rows, literal.known, rtol=1e-6)
    np.testing.assert_allclose(state.unknown_rows, literal.unknown, rtol=1e-6)
    assert state.known_rows.shape[0] <= options.queue
    assert state.history.shape[0] <= options.history


def test_torch_gives_what_numpy_gives() -> None:
    f, t, u = (torch.asarray(x) for x in (F, T, U))
    np.testing.assert_allclose(to_numpy(mcm(f, t)), mcm(F, T), rtol=1e-9)
    np.testing.assert_array_equal(to_numpy(mine_negatives(u, t)), mine_negatives(U, T))
    np.testing.assert_allclose(to_numpy(neglabel(f, t, u)), neglabel(F, T, U), rtol=1e-9)
    tanl = TANL(selected=20)
    state, scores = tanl.step(tanl.start(t, u), f)
    np.testing.assert_allclose(to_numpy(scores), tanl.step(tanl.start(T, U), F)[1], rtol=1e-9)
    assert isinstance(state.history, torch.Tensor)


def test_scores_are_finite_in_float32_at_any_scale() -> None:
    f, t, u = (x.astype("float32") for x in (F, -T, U))
    for scale in (1.0, 100.0, 1000.0):
        tanl = TANL(selected=20)
        for scores in (neglabel(f, t, u, logit_scale=scale), tanl.step(tanl.start(t, u, logit_scale=scale), f)[1]):
            assert scores.dtype == np.float32
            assert np.isfinite(scores).all()
            assert (scores >= 0).all()
            assert (scores <= 1).all()


def test_bad_input_is_refused_in_a_sentence() -> None:
    for call, sentence in {
        lambda: mcm(F, T, tau=0): "'tau' must be a number above 0. Got 0 instead",
        lambda: mcm(F, T[:, :8]): "'text_features' must have the dimension of the others, 16. Got 8 instead",
        lambda: mine_negatives(U[:3], T): "'share' must keep at least one candidate. Got 0.15 of 3; raise it",
        lambda: mine_negatives(U, T, quantile=2): "'quantile' must be a number from 0 to 1. Got 2 instead",
        lambda: neglabel(F, T, U, groups=500): "'groups' must be an integer from 1 to the 230 negatives. Got 500",
        lambda: neglabel(F, T, U[:0]): "'negatives' must not be empty",
        lambda: TANL(gap=2.0): "The 'gap' option of TANL must be a number of at least 0 and of at most 1",
    }.items():
        with pytest.raises((InputError, OptionError), match=sentence):
            call()
