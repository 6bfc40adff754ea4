"""TDA against a literal account of its caches, and the behaviour of each cache."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moontide.checks.tasks import embeddings
from moontide.errors import OptionError
from moontide.methods.tda import TDA, TDAState, masks
from moontide.streams import run_stream
from moontide.types import Task


class Literal:
    """TDA as its description reads: sorted lists of entries, one sample at a time."""

    def __init__(self, text: np.ndarray, scale: float) -> None:
        self.text, self.scale = text, scale
        self.positive: dict[int, list] = {}
        self.negative: dict[int, list] = {}

    def update(self, f: np.ndarray) -> None:
        c = self.scale * self.text @ f
        p = np.exp(c - c.max())
        p /= p.sum()
        h = -(p * np.log(p)).sum()
        self.enter(self.positive, 3, (h, f, p))
        if 0.2 < h / math.log2(len(p)) < 0.5:
            self.enter(self.negative, 2, (h, f, p))

    @staticmethod
    def enter(cache: dict[int, list], capacity: int, entry: tuple) -> None:
        held = cache.setdefault(int(entry[2].argmax()), [])
        if len(held) < capacity:
            held.append(entry)
        elif entry[0] < held[-1][0]:
            held[-1] = entry
        held.sort(key=lambda e: e[0])

    def predict(self, f: np.ndarray) -> np.ndarray:
        out = self.scale * self.text @ f
        for k, held in self.positive.items():
            out[k] += sum(2.0 * math.exp(-5 * (1 - f @ key)) for _, key, _ in held)
        for held in self.negative.values():
            for _, key, p in held:
                out -= 0.117 * math.exp(-(1 - f @ key)) * ((p > 0.03) & (p < 1.0))
        return out


@pytest.mark.parametrize("access", ["batch", "sample"])
@pytest.mark.parametrize("scale", [20.0, 100.0])
def test_equals_the_literal_account(access: str, scale: float) -> None:
    task = Task(*embeddings(90, 6, 24), scale)
    literal, wanted = Literal(task.text, scale), []
    for batch in task.batches(1 if access == "sample" else 30):
        for f in batch.features:
            literal.update(f)
        wanted += [literal.predict(f) for f in batch.features]
    assert sum(map(len, literal.negative.values())) > 3  # both caches are at work
    _, result = run_stream(TDA(access=access, scores="logits"), task, 30)
    np.testing.assert_allclose(result.scores, wanted, rtol=1e-9)


def test_scores_are_the_softmax_of_the_logits() -> None:
    task = Task(*embeddings(20, 4, 16))
    logits = TDA(scores="logits").fit_predict(task)
    assert TDA().fit_predict(task).native_scores is None
    np.testing.assert_array_equal(TDA().fit_predict(task).probs, logits.probs)
    np.testing.assert_array_equal(logits.labels, logits.probs.argmax(axis=1))


def test_one_at_a_time_does_not_see_batch_borders() -> None:
    task = Task(*embeddings(40, 5, 16))
    whole, parts = TDA(access="sample").fit_predict(task), run_stream(TDA(), task, 1)[1]
    np.testing.assert_allclose(whole.probs, parts.probs, rtol=1e-12)


def test_caches_keep_the_lowest_entropies_of_each_class() -> None:
    task = Task(*embeddings(300, 4, 16), 30.0)
    state, result = run_stream(TDA(), task, 50)
    assert isinstance(state, TDAState)
    p = result.zero_shot
    h, labels = -(p * np.log(p)).sum(axis=1), p.argmax(axis=1)
    uncertain = (h / 2 > 0.2) & (h / 2 < 0.5)
    for k in range(4):
        np.testing.assert_allclose(np.sort(state.positive_entropy[k]), np.sort(h[labels == k])[:3])
        np.testing.assert_allclose(np.sort(state.negative_entropy[k]), np.sort(h[(labels == k) & uncertain])[:2])


def test_masks_grow_with_the_classes_not_their_square() -> None:
    rng = np.random.default_rng(0)
    state = TDA().start(Task(np.ones((1, 4)), rng.normal(size=(5000, 4))))
    assert isinstance(state, TDAState)
    assert state.negative_classes.shape == (5000, 2, 33)  # at most 33 classes have p > 0.03


def test_masked_classes_are_those_between_the_bounds() -> None:
    p = np.random.default_rng(0).dirichlet(np.full(50, 0.1), size=40)
    np.testing.assert_array_equal(masks(TDA().masked_classes(p), 50, p), (p > 0.03) & (p < 1))
    np.testing.assert_array_equal(
        masks(TDA(mask_low=0.2, mask_high=0.5).masked_classes(p), 50, p), (p > 0.2) & (p < 0.5)
    )


def test_an_option_of_a_cache_without_weight_is_refused() -> None:
    with pytest.raises(OptionError, match="'entropy_low' option of tda has no effect with negative_weight=0"):
        TDA(negative_weight=0.0, entropy_low=0.1)
    with pytest.raises(OptionError, match="'positive_capacity' option of tda has no effect"):
        TDA(positive_weight=0.0, positive_capacity=5)
