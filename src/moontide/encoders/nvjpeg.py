"""JPEG files decoded on a GPU by torchvision, where it is installed and built with nvjpeg."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moontide.encoders import images
from moontide.errors import ImageError

if TYPE_CHECKING:
    import torch


def works(device: str) -> bool:
    """Return whether JPEG files can be decoded on a device, by trying one.

    >>> works("cpu")
    False
    """
    if device == "cpu":
        return False
    try:
        data = files("moontide.encoders").joinpath("photos", "hat.jpg").read_bytes()
        found = decode([np.frombuffer(data, dtype=np.uint8)], device)[0]
        return not isinstance(found, str) and found.is_cuda
    except Exception:  # torchvision is missing, does not fit torch, or has no nvjpeg
        return False


def decode(data: Sequence[npt.NDArray[np.uint8]], device: str) -> list[torch.Tensor | str]:
    """Decode JPEG files on a device, each (H, W, 3) of 8 bits, or the reason why it cannot be decoded.

    >>> decode([], "cpu")
    []
    """
    if not data:
        return []
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    inputs = [torch.from_numpy(np.array(one)) for one in data]
    try:
        found = decode_jpeg(inputs, ImageReadMode.RGB, device=device)
        return [pixels.permute(1, 2, 0) for pixels in found]
    except RuntimeError:
        if len(data) > 1:  # one of them is to blame
            return [found for one in data for found in decode([one], device)]
        return _by_pillow(data[0])


def _by_pillow(data: npt.NDArray[np.uint8]) -> list[torch.Tensor | str]:
    import torch

    try:
        return [torch.from_numpy(np.array(images.decode(data.tobytes())))]
    except ImageError as reason:
        return [str(reason)]
