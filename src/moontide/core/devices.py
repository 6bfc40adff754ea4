"""Which device arrays are on, as users name it: cpu, cuda, cuda:1, mps."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from moontide.core.arrays import Array
from moontide.errors import OptionError, ResourceError, missing_extra


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have."""
    if device == "cpu":
        return
    kind, _, number = device.partition(":")
    if not (kind == "cuda" and (number.isdecimal() or device == "cuda")) and device != "mps":
        raise OptionError(f"'device' must be cpu, cuda, cuda:NUMBER or mps. Got {device[:40]!r} instead.")
    try:
        import torch
    except ImportError:
        raise missing_extra("torch", "torch", f"Running on {device}") from None
    count = torch.cuda.device_count() if kind == "cuda" else int(torch.backends.mps.is_available())
    if not count:
        found = f"torch finds no {kind.upper()} device on this machine"
        raise ResourceError(f"{found}; use the device 'cpu', or see what 'moontide doctor' says.")
    if int(number or 0) >= count:
        raise ResourceError(f"There is no device {device}: torch finds {count} on this machine, numbered from 0.")


def to_device(x: NDArray[Any], dtype: str | None, device: str) -> Array:
    """Bring a matrix to a dtype (None: its own) and a device."""
    dtype = "float32" if device == "mps" else dtype  # which knows no float64
    x = x.astype(dtype or x.dtype, copy=False)
    if device == "cpu":
        return x
    import torch

    return torch.tensor(x, device=device)
