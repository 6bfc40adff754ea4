"""A small real encoder for checking methods that need one: an "image" is a row of numbers, the tower a layer norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moontide.core.arrays import to_numpy
from moontide.types import Task


class RowEncoder:
    """The interface of a TorchEncoder on rows of features, with a layer norm that methods can adapt.

    >>> encoder = RowEncoder(4)
    >>> encoder.image_features(encoder.tensors([encoder.prepare(np.arange(4.0))])).shape
    torch.Size([1, 4])
    """

    id, device = "rows", "cpu"

    def __init__(self, dim: int) -> None:
        import torch

        self.dim = dim
        self.visual = torch.nn.LayerNorm(dim).requires_grad_(False)

    def prepare(self, image: Any) -> dict[str, Any]:
        """Return the row as the tower's input."""
        return {"row": np.asarray(image, dtype=np.float32)}

    def tensors(self, batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Stack rows."""
        import torch

        return {"row": torch.from_numpy(np.stack([one["row"] for one in batch]))}

    def image_features(self, inputs: Mapping[str, Any]) -> Any:
        """Return the rows themselves while the layer norm is as it was made, and what it adds when it is not."""
        import torch

        rows = inputs["row"]
        return rows + self.visual(rows) - torch.nn.functional.layer_norm(rows, (self.dim,))


def rows_as_images(task: Task) -> dict[str, Any]:
    """Return the extras of a task whose images are its own features.

    >>> sorted(rows_as_images(Task(np.eye(2), np.eye(2))))
    ['encoder', 'images']
    """
    return {"encoder": RowEncoder(task.d), "images": list(to_numpy(task.features))}
