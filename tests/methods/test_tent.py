"""TENT against torch's own optimiser, and what it leaves behind: nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moontide.checks.encoder import RowEncoder, rows_as_images
from moontide.checks.tasks import Tasks
from moontide.errors import InputError, MissingInputError, OptionError
from moontide.methods.tent import TENT, nesterov
from moontide.streams import load_state, run_stream, save_state

torch = pytest.importorskip("torch")

TASK = Tasks(rows_as_images)(n=24, k=5, d=16)


def parameters(encoder: RowEncoder) -> np.ndarray:
    return np.concatenate([encoder.visual.weight.numpy().copy(), encoder.visual.bias.numpy().copy()])


def test_the_weights_of_the_encoder_are_restored_to_the_bit() -> None:
    encoder = TASK.extras["encoder"]
    before = parameters(encoder)
    method = TENT(learning_rate=0.5, steps=3)
    state, result = run_stream(method, TASK, 8)
    assert (parameters(encoder) == before).all()
    assert not any(p.requires_grad for p in encoder.visual.parameters())
    assert np.abs(state.weights - before).max() > 0.01  # the state did move
    assert (result.labels != result.zero_shot_labels).any()


def test_they_are_restored_after_an_error_too() -> None:
    encoder = RowEncoder(16)
    before, features = parameters(encoder), encoder.image_features
    state = TENT().start(Tasks(lambda task: {"encoder": encoder, "images": [0] * task.n})(n=4, k=3, d=16))

    def fails_under_gradients(inputs: dict) -> object:
        if torch.is_grad_enabled():
            raise RuntimeError("out of memory")
        return features(inputs)

    encoder.image_features = fails_under_gradients  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        TENT().step(state, [np.ones(16)] * 3)
    assert (parameters(encoder) == before).all()
    assert not encoder.visual.weight.requires_grad


def test_faithful_leaves_them_changed() -> None:
    task = Tasks(rows_as_images)(n=24, k=5, d=16)
    before = parameters(task.extras["encoder"])
    state, _ = run_stream(TENT(faithful=True), task, 8)
    assert (parameters(task.extras["encoder"]) == state.weights).all()
    assert (state.weights != before).any()


def test_the_first_batch_is_predicted_before_its_update() -> None:
    result = TENT(learning_rate=1.0).fit_predict(TASK)
    np.testing.assert_array_equal(result.probs, result.zero_shot)


def test_updates_are_those_of_torch() -> None:
    encoder = RowEncoder(16)
    rows = torch.from_numpy(np.stack(TASK.extras["images"]).astype(np.float32))
    text = torch.from_numpy(TASK.text.astype(np.float32))
    encoder.visual.requires_grad_(True)
    optimiser = torch.optim.SGD(encoder.visual.parameters(), lr=1e-2, momentum=0.9, nesterov=True)
    for _ in range(4):
        logits = 100 * torch.nn.functional.normalize(encoder.image_features({"row": rows}), dim=1) @ text.T
        optimiser.zero_grad()
        torch.distributions.Categorical(logits=logits).entropy().mean().backward()
        optimiser.step()
    method = TENT(learning_rate=1e-2, steps=4)
    state, result = method.step(method.start(TASK), TASK.extras["images"])
    wanted = np.concatenate([p.detach().numpy() for p in encoder.visual.parameters()])
    np.testing.assert_allclose(state.weights, wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result.scores, logits.detach().numpy(), rtol=1e-4, atol=1e-4)


def test_entropy_falls() -> None:
    method = TENT(learning_rate=1e-2, steps=30)
    result = method.fit_predict(TASK)

    def entropy(p: np.ndarray) -> float:
        return float(-(p * np.log(p + 1e-12)).sum(axis=1).mean())

    assert entropy(result.probs) < 0.9 * entropy(result.zero_shot)


def test_a_state_is_saved_without_the_encoder_and_goes_on(tmp_path: Path) -> None:
    method, images = TENT(learning_rate=1e-2), TASK.extras["images"]
    state, _ = method.step(method.start(TASK), images[:8])
    save_state(tmp_path / "tent.safetensors", method, state)
    again, loaded = load_state(tmp_path / "tent.safetensors", encoder=TASK.extras["encoder"])
    assert again == method
    wanted, found = method.step(state, images[8:])[1], again.step(loaded, images[8:])[1]
    np.testing.assert_array_equal(wanted.probs, found.probs)


def test_momentum_zero_is_plain_descent() -> None:
    assert nesterov(1.0, 5.0, 2.0, 0.5, 0.0) == (0.0, 2.0)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(MissingInputError, match=r"tent needs the image encoder: pass encoder=.* and the images"):
        TENT().fit_predict(TASK.features, TASK.text)
    with pytest.raises(InputError, match="tent adapts a torch image tower, and the encoder object has none"):
        TENT().fit_predict(TASK.features, TASK.text, encoder=object(), images=TASK.extras["images"])
    with pytest.raises(OptionError, match=r"The 'steps' option of tent must be an integer of at least 1 and .* Got 0"):
        TENT(steps=0)
