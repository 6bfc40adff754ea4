"""TENT: gradient steps on the normalisation layers of the image tower that lower the entropy of the predictions.

D. Wang et al., ICLR 2021, after what their program (DequanWang/tent) computes.

Symbols:  gamma, beta of the normalisation layers -> weights (one flat array)   momentum buffer -> momentum
          H(softmax(s f(x) . t)) averaged over the batch -> loss

CLIP's image tower has no batch normalisation; as in the published comparisons, weight and bias of its layer norms (and
of group and batch norms, where a tower has them) are adapted by SGD with Nesterov momentum, and the prediction of a
batch is the one before its last update. The paper gives five steps per batch; the program ran one, the default.

The state holds weights and momentum. The encoder has them during a step and gets its own back afterwards. The original
programs leave the adapted weights in the model, so that a second run starts where the first one ended; `faithful=True`
does that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from moontide.core.arrays import Array, like
from moontide.core.simplex import softmax
from moontide.errors import InputError
from moontide.options import option
from moontide.protocols import OnlineMethod, State
from moontide.types import Result, Task


@dataclass(frozen=True)
class TentState(State):
    """The adapted affine parameters, flat, and their momentum."""

    weights: Array  # (P,)
    momentum: Array  # (P,)
    encoder: Any = field(metadata={"live": True})


@dataclass(frozen=True)
class TENT(OnlineMethod):
    """Entropy minimisation on images; needs an encoder with a torch image tower.

    >>> sorted(TENT().needs)
    ['encoder', 'images']
    """

    citation: ClassVar[str] = "Wang et al., ICLR 2021"
    needs: ClassVar[frozenset[str]] = frozenset({"encoder", "images"})
    state_type: ClassVar[type[State]] = TentState

    learning_rate: float = option(1e-3, "learning rate of SGD", above=0)
    momentum: float = option(0.9, "Nesterov momentum of SGD", low=0, high=1)
    steps: int = option(1, "updates per batch", low=1)
    faithful: bool = option(False, "leave the adapted weights in the encoder, as the original programs do")

    def start(self, task: Task) -> TentState:
        """Begin with the encoder's own weights."""
        encoder = task.extras["encoder"]
        weights = np.concatenate([p.detach().cpu().numpy().ravel() for p in affine_parameters(encoder)])
        return TentState(task.text, task.logit_scale, 0, weights, np.zeros_like(weights), encoder)

    def _step(self, state: TentState, x: Sequence[Any]) -> tuple[TentState, Result]:  # type: ignore[override]
        import torch

        encoder = state.encoder
        text = torch.as_tensor(state.text, dtype=torch.float32, device=encoder.device)  # (K, d)
        inputs = encoder.tensors([encoder.prepare(image) for image in x])
        parameters = affine_parameters(encoder)
        weights, momentum = torch.as_tensor(state.weights), torch.as_tensor(state.momentum)  # (P,), (P,)

        def logits() -> Any:
            features = torch.nn.functional.normalize(encoder.image_features(inputs).float(), dim=1)  # (n, d)
            return state.logit_scale * features @ text.T  # (n, K)

        with torch.no_grad():
            own = logits()  # with the encoder's own weights
        with adapted(parameters, restore=not self.faithful), torch.enable_grad():
            for _ in range(self.steps):
                put(parameters, weights)
                found = logits()
                gradients = torch.autograd.grad(mean_entropy(found), parameters)
                gradient = torch.cat([g.detach().cpu().ravel() for g in gradients])
                weights, momentum = nesterov(weights, momentum, gradient, self.learning_rate, self.momentum)
            if self.faithful:
                put(parameters, weights)
        scores, zero_shot = (like(a.detach().cpu().numpy(), state.text) for a in (found, own))
        numbers = {"weights": weights.numpy(), "momentum": momentum.numpy()}
        after = dataclasses.replace(state, **numbers)
        return after, Result(softmax(scores), softmax(zero_shot), scores, n_iter=self.steps)


def affine_parameters(encoder: Any) -> list[Any]:
    """Return weight and bias of every normalisation layer of the encoder's image tower."""
    import torch

    kinds = (torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.modules.batchnorm._BatchNorm)
    if not isinstance(getattr(encoder, "visual", None), torch.nn.Module):
        name = getattr(encoder, "id", type(encoder).__name__)
        raise InputError(
            f"tent adapts a torch image tower, and the encoder {name} has none; use an hf or openclip one."
        )
    layers = (layer for layer in encoder.visual.modules() if isinstance(layer, kinds))
    found = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    if not found:
        raise InputError(
            f"The image tower of {encoder.id} has no normalisation layers for tent to adapt; use another encoder."
        )
    return found


def mean_entropy(logits: Any) -> Any:
    """The loss: -(1/n) sum_i sum_k p_ik ln p_ik, p = softmax(logits)."""
    log_p = logits.log_softmax(dim=1)  # (n, K)
    return -(log_p.exp() * log_p).sum(dim=1).mean()


def nesterov(weights: Any, buffer: Any, gradient: Any, rate: float, momentum: float) -> tuple[Any, Any]:
    """SGD with Nesterov momentum: b <- momentum b + g;  w <- w - rate (g + momentum b).

    >>> nesterov(1.0, 0.0, 1.0, 0.1, 0.9)
    (0.81, 1.0)
    """
    buffer = momentum * buffer + gradient
    return weights - rate * (gradient + momentum * buffer), buffer


def put(parameters: Sequence[Any], flat: Any) -> None:
    """Write a flat array into the parameters, one after another."""
    import torch

    with torch.no_grad():
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.copy_(part.view_as(parameter))


@contextmanager
def adapted(parameters: Sequence[Any], restore: bool) -> Iterator[None]:
    """Let gradients reach the parameters, and restore their values afterwards, even after an error."""
    before = [(p.requires_grad, p.detach().clone()) for p in parameters]
    try:
        for p in parameters:
            p.requires_grad_(True)
        yield
    finally:
        for p, (wanted, value) in zip(parameters, before, strict=True):
            p.requires_grad_(wanted)
            if restore:
                p.data.copy_(value)
