"""How sure TIDE is of single images: as zero-shot where nothing else is there, and near accuracy in streams."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moontide import TIDE, Stream, Task
from moontide.simulate import simulate

PACK = Path(__file__).parents[2] / "shared" / "features" / "imagenet1k_vitb32.npz"


def test_the_confidence_of_one_image_is_that_of_zero_shot() -> None:
    data = simulate(12, 100, seed=0)
    for row in data.features:
        alone = TIDE().fit_predict(Task(row[None], data.text))
        np.testing.assert_allclose(alone.probs, alone.zero_shot, atol=1e-4)
        first = Stream(text=data.text).push(row[None])
        np.testing.assert_allclose(first.confidence, alone.zero_shot.max(axis=1), atol=1e-4)


@pytest.mark.skipif(not PACK.exists(), reason="the pack of ImageNet features is not here")
@pytest.mark.parametrize("size", [1, 4, 16])
def test_confidence_in_small_batches_is_near_accuracy_on_real_features(size: int) -> None:
    held, rows = np.load(PACK), np.random.default_rng(0).permutation(6984)[:192]
    x, labels, text = held["image_features"][rows].astype(np.float32), held["labels"][rows], held["text_features"]
    stream = Stream(text=text)
    parts = [slice(i, i + size) for i in range(0, len(x), size)]
    apart = [TIDE().fit_predict(Task(x[part], text)) for part in parts]
    in_line = [stream.push(x[part]) for part in parts]
    for results in (apart, in_line):
        sure = np.concatenate([result.confidence for result in results])
        right = np.concatenate([result.labels for result in results]) == labels
        assert abs(sure.mean() - right.mean()) < 0.08
