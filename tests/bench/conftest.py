import numpy as np
import pytest


@pytest.fixture
def features(tmp_path):
    """A folder with one small feature file, six classes that overlap."""
    folder = tmp_path / "features"
    folder.mkdir()
    rng = np.random.default_rng(0)
    text = rng.normal(size=(6, 16))
    labels = rng.permutation(np.repeat(np.arange(6), 50))
    image = text[labels] + 2.0 * rng.normal(size=(300, 16))
    arrays = {"image_features": image, "text_features": text, "labels": labels, "logit_scale": 10.0}
    np.savez(folder / "toy_vitb32.npz", **arrays)
    return folder
