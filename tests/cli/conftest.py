"""A small features file, and the command run in this process."""

import numpy as np
import pytest

from moontide.cli import main

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


@pytest.fixture
def moontide(capfd):
    """Run a command line; returns the exit status, stdout and stderr."""

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run
