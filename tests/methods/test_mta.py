"""MTA against a literal account, image by image."""

from __future__ import annotations

import numpy as np
import pytest

from moontide.checks import Tasks
from moontide.errors import InputError, MissingInputError, OptionError
from moontide.methods.mta import MTA, bandwidth
from moontide.types import Task
from moontide.views import make_views


def literal(x: np.ndarray, text: np.ndarray, scale: float, stop: float) -> np.ndarray:
    """Return the scores of one image from its views (V, d), every loop leaving when its step is below `stop`."""
    v = len(x)
    squares = ((x[:, None] - x) ** 2).sum(axis=2)
    h = np.sort(squares, axis=1)[:, 1 : int(0.3 * (v - 1)) + 1].mean(axis=1) / 2
    s = np.exp(scale * x @ text.T)
    s /= s.sum(axis=1, keepdims=True)
    w, y, m = s @ s.T, np.full(v, 1 / v), x[0]
    for _ in range(5):
        kernel = np.exp(-((x - m) ** 2).sum(axis=1) / (2 * h))
        for _ in range(5):
            before, y = y, np.exp((kernel + 4 * w @ y) / 0.2)
            y = y / y.sum()
            if np.linalg.norm(y - before) < stop:
                break
        for _ in range(5):
            weights = np.exp(-((x - m) ** 2).sum(axis=1) / (2 * h)) * y
            before, m = m, weights @ x / weights.sum()
            m = m / np.linalg.norm(m)
            if np.linalg.norm(m - before) < stop:
                break
    return scale * m @ text.T


@pytest.mark.parametrize("stop", [1e-6, 0.02])  # the second makes images leave their loops at different steps
@pytest.mark.parametrize("block", [2**22, 1500])
def test_equals_the_literal_account(stop: float, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moontide.methods.mta.BLOCK_ENTRIES", block)
    task = Tasks()(n=25, k=5, d=16)
    wanted = [literal(x, task.text, task.logit_scale, stop) for x in task.extras["views"]]
    result = MTA(tolerance=stop).fit_predict(task)
    np.testing.assert_allclose(result.scores, wanted, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(result.details["mode"], axis=1), 1)


def test_an_outlying_view_counts_little() -> None:
    rng = np.random.default_rng(0)
    text = np.eye(8)[:2]
    views = np.eye(8)[0] + 0.1 * rng.normal(size=(1, 10, 8))
    views[0, 7] = np.eye(8)[1]
    mode = MTA().fit_predict(views[:, 0], text, views=views).details["mode"][0]
    assert mode @ text[1] < views.mean(axis=1)[0] @ text[1]
    assert mode @ text[0] > 0.95


def test_equal_views_have_that_view_as_mode() -> None:
    for dtype in (np.float32, np.float64):
        views = np.repeat(Tasks()(n=4, k=3).features.astype(dtype)[:, None], 6, axis=1)
        result = MTA().fit_predict(views[:, 0], np.eye(32, dtype=dtype)[:3], views=views)
        np.testing.assert_allclose(result.details["mode"], views[:, 0], atol=1e-6)


def test_bandwidth_is_half_the_mean_of_the_nearest_others() -> None:
    x = Tasks()(n=3).extras["views"]
    squares = np.sort(((x[:, :, None] - x[:, None]) ** 2).sum(axis=3), axis=2)
    np.testing.assert_allclose(bandwidth(x, 2), squares[:, :, 1:3].mean(axis=2) / 2)


def test_too_few_views_are_refused() -> None:
    x = np.random.default_rng(0).normal(size=(2, 4, 8))
    with pytest.raises(
        InputError, match=r"'views' must hold at least 5 views per image.* Got 4 instead; make more views"
    ):
        MTA().fit_predict(x[:, 0], np.eye(8), views=x)
    assert MTA(nearest=0.5).fit_predict(x[:, 0], np.eye(8), views=x).probs.shape == (2, 8)


def test_unusable_views_are_refused() -> None:
    x = np.random.default_rng(0).normal(size=(2, 6, 8))
    with pytest.raises(MissingInputError, match="mta needs augmented views"):
        MTA().fit_predict(x[:, 0], np.eye(8))
    with pytest.raises(InputError, match=r"'views' must have the dimension of the features, 8\. Got 7 instead"):
        MTA().fit_predict(x[:, 0], np.eye(8), views=x[:, :, :7])
    with pytest.raises(InputError, match="'views' must be a 3-D array"):
        MTA().fit_predict(x[:, 0], np.eye(8), views=x[:, 0])
    x[1, 3] = 0
    with pytest.raises(InputError, match=r"'views' must not have all-zero rows.*[Rr]ow 1"):
        MTA().fit_predict(Task(x[:, 0], np.eye(8), extras={"views": x}))


class Colours:
    """An encoder that sees the mean colour of the middle and of the whole."""

    def encode_images(self, images: list) -> np.ndarray:
        small = [np.asarray(image.resize((4, 4)), dtype=np.float32) / 255 for image in images]
        return np.stack([np.concatenate([s.mean(axis=(0, 1)), s[1:3, 1:3].mean(axis=(0, 1)) + 0.1]) for s in small])


def test_views_are_made_of_images_with_an_encoder() -> None:
    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    images = [image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)) for _ in range(3)]
    features, text = Colours().encode_images(images), rng.normal(size=(4, 6))
    found = MTA(views=8, seed=1).fit_predict(features, text, images=images, encoder=Colours())
    views = make_views(Colours(), images, 8, seed=1)
    np.testing.assert_allclose(views[:, 0], features)  # view 0 is the image
    assert np.abs(views[:, 1:] - features[:, None]).max() > 1e-3
    np.testing.assert_allclose(found.probs, MTA().fit_predict(features, text, views=views).probs)
    again = MTA(views=8, seed=2).fit_predict(features, text, images=images, encoder=Colours())
    assert np.abs(again.probs - found.probs).max() > 0
    with pytest.raises(OptionError, match=r"The 'seed' option of mta has no effect if views=\.\.\. is given"):
        MTA(seed=2).fit_predict(features, text, views=views)
    with pytest.raises(MissingInputError, match="mta needs augmented views"):
        MTA().fit_predict(features, text, images=images)
