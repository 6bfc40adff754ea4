"""Questions about implausible input: asked of each kind of mistake, and never of data as encoders give them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moontide import TIDE, Task
from moontide.errors import ImplausibleWarning, InputError
from moontide.metrics import check_labels
from moontide.plausible import doubt, doubt_labels
from moontide.simulate import simulate

PACKS = sorted((Path(__file__).parents[2] / "shared" / "features").glob("*.npz"))
RNG = np.random.default_rng(0)


def rotation(d: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0]


MISTAKES = {
    "swapped": (lambda x, t: (t, x, 100.0), "swapped, pass the image features first"),
    "another space": (lambda x, t: (x, t @ rotation(t.shape[1]), 100.0), "Make both with the same model"),
    "a scale of 1": (lambda x, t: (x, t, 1.0), "--logit-scale 100"),
    "a temperature as scale": (lambda x, t: (x, t, 0.01), "--logit-scale 100"),
    "centred": (lambda x, t: (x - x.mean(0), t, 100.0), "neither centred nor standardised"),
    "standardised": (lambda x, t: ((x - x.mean(0)) / x.std(0), t, 100.0), "neither centred nor standardised"),
    "one array for both": (lambda x, t: (x, x[:60], 100.0), "same file or array for both"),
    "lengths": (lambda x, t: (x * np.geomspace(1, 1000, len(x))[:, None], t, 100.0), "lengths from"),
    "alike": (lambda x, t: (x[:1] + 0.001 * x[1:11], np.concatenate([t] * 4), 100.0), "almost the same"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_answered_by_one_warning_with_the_remedy(name: str) -> None:
    data = simulate(600, 60, seed=3)
    change, remedy = MISTAKES[name]
    x, t, scale = change(data.features, data.text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TIDE().fit_predict(x, t, logit_scale=scale)
    (one,) = [w for w in caught if w.category is ImplausibleWarning]
    assert remedy in str(one.message)
    assert len(str(one.message)) <= 300


def warned(x: np.ndarray, t: np.ndarray, scale: float = 100.0) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TIDE().fit_predict(x, t, logit_scale=scale)
    return any(w.category is ImplausibleWarning for w in caught)


def test_after_a_few_plausible_batches_of_one_shape_only_the_logit_scale_is_checked() -> None:
    data = simulate(61, 17, seed=3)  # a shape that no other test has
    good, bad = (data.features, data.text), (data.features - data.features.mean(0), data.text)
    assert [warned(*each) for each in (good, bad, good, good, good)] == [False, True, False, False, False]
    assert warned(*bad)  # as one of the last four tasks was doubtful
    assert [warned(*each) for each in (good, good, good, good, bad)] == [False] * 5
    assert warned(*good, scale=1.0)
    assert warned(*bad)  # since the one before was doubtful


def batches(x: np.ndarray, labels: np.ndarray) -> Iterator[np.ndarray]:
    """Rows of batches as they come: of any class, and of few."""
    yield np.arange(len(x))
    for size in (1, 4, 10, 16, 32, 64, 256):
        yield RNG.permutation(len(x))[:size]
        for classes in (1, 2, 5):
            chosen = RNG.permutation(np.unique(labels))[:classes]
            yield RNG.permutation(np.flatnonzero(np.isin(labels, chosen)))[:size]


@pytest.mark.parametrize("shape", [(500, 10), (200, 200), (64, 1000)])
def test_the_simulator_is_never_questioned(shape: tuple[int, int]) -> None:
    data = simulate(*shape, seed=1)
    for rows in batches(data.features, data.labels):
        assert doubt(Task(data.features[rows], data.text), data.features[rows]) is None


@pytest.mark.skipif(not PACKS, reason="the packs of real features are not here")
@pytest.mark.parametrize("path", PACKS, ids=lambda path: path.stem)
def test_real_features_are_never_questioned_and_their_mistakes_are(path: Path) -> None:
    held = np.load(path)
    x, t, y = held["image_features"].astype(np.float32), held["text_features"], held["labels"]
    scale = 1 / float(held["temperature"]) if "temperature" in held else 100.0
    for rows in batches(x, y):
        assert doubt(Task(x[rows], t, scale), x[rows]) is None
    assert "centred" in (doubt(Task(x - x.mean(0), t, scale)) or "")
    if t.shape[1] == 512:
        assert "swapped" in (doubt(Task(t, x, scale)) or "")


def test_labels_that_count_from_1_or_are_in_another_order_are_questioned() -> None:
    data = simulate(400, 20, seed=0)
    found = TIDE().fit_predict(data.features, data.text).zero_shot_labels
    assert doubt_labels(data.labels, found, 20) is None
    few = data.labels < 19
    assert "Subtract" in (doubt_labels(data.labels[few] + 1, found[few], 20) or "")
    assert "different order" in (doubt_labels((data.labels + 7) % 20, found, 20) or "")
    with pytest.raises(InputError, match="count from 1"):
        check_labels(data.labels + 1, 400, 20)


def test_names_of_the_number_of_samples_hint_at_a_swap() -> None:
    with pytest.raises(InputError, match="swapped"):
        Task(np.eye(3)[:2], np.eye(3), class_names=["a", "b"])
