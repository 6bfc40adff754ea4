"""A small features file, and the command run in this process."""

import numpy as np
import pytest

N, K, D = 40, 4, 16


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    text = rng.normal(size=(K, D)).astype(np.float32)
    labels = rng.integers(K, size=N)
    image = text[labels] + 1.2 * rng.normal(size=(N, D)).astype(np.float32)
    return {"image_features": image, "text_features": text, "labels": labels}


@pytest.fixture
def features(tmp_path, arrays):
    path = tmp_path / "features.npz"
    np.savez(path, **arrays, classnames=["ant", "bee", "cat", "dog"], logit_scale=20.0)
    return path
