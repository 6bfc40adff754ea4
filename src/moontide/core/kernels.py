"""Fused GPU kernels in Triton; plain torch does the same where Triton or a GPU is missing.

`top_m`   similarity and top-m search in one pass over tiles: the N x N similarities never leave the chip.
`e_step`  one program a sample: gathers the neighbours' votes, adds the logits, softmax, entropy, label and the two
          products that L_PLE needs, reading every row once.
`m_step`  one program a class: shrinkage, mean direction, concentration, prototype and KL from the sums.

With TRITON_INTERPRET=1 they run on the CPU, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

from moontide.core.arrays import Array, is_torch_array

MAX_CLASSES = 16384  # a row of K logits is held in registers
SLOTS = 8  # candidates kept for a sample: at most this many neighbours


def usable(x: Array) -> bool:
    """Tell whether the kernels can run on `x`: a CUDA tensor (or any tensor in Triton's interpreter), Triton installed.

    >>> import numpy as np
    >>> usable(np.zeros(1))
    False
    """
    if not is_torch_array(x) or find_spec("triton") is None:
        return False
    return x.device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _compiled() -> ModuleType:
    from moontide.core import _triton

    return _triton


def top_m(features: Array, m: int, precision: str) -> tuple[Array, Array]:
    """Return (neighbours, weights), (N, m) each: the m largest cosines to other rows, sorted; ties: the lower index."""
    import torch

    n, d = features.shape
    x = features.half() if precision == "half" else features.float()
    x = x.contiguous()
    values = torch.empty((n, m), dtype=torch.float32, device=x.device)
    found = torch.empty((n, m), dtype=torch.int64, device=x.device)
    _compiled().launch_top_m(x, values, found, n, d, m, "tf32x3" if precision == "full" else "tf32")
    return found, values.to(features.dtype)


def e_step(logits: Array, z: Array, csr: tuple[Array, Array, Array]) -> tuple[Array, ...]:
    """Return the fields of `core.ple.Assignment` of an E-step; z keeps its dtype."""
    import torch

    n, k = logits.shape
    new = torch.empty_like(z)
    labels = torch.empty(n, dtype=torch.int64, device=z.device)
    rows = [torch.empty(n, dtype=torch.float32, device=z.device) for _ in range(4)]
    counts = torch.zeros(k, dtype=torch.float32, device=z.device)
    _compiled().launch_e_step(logits, z, *csr, new, labels, *rows, counts)
    return new, labels, *rows, counts


def m_step(
    sums: Array,
    soft: Array,
    counts: Array,
    anchors: tuple[Array, ...],
    exact: bool,
    epsilon: float,
    r_cap: float,
    kappa_cap: float,
    scale: float,
    temper: float,
) -> tuple[Array, ...]:
    """Return (beta, mu, kappa, prototypes, offset, kl) of the M-step, as MOON's `m_step` in plain arrays."""
    import torch

    k, d = sums.shape
    mu, prototypes = torch.empty_like(sums), torch.empty_like(sums)
    beta, kappa, offset, kl = (torch.empty(k, dtype=torch.float32, device=sums.device) for _ in range(4))
    _compiled().launch_m_step(
        sums, soft, counts, *anchors, beta, mu, kappa, prototypes, offset, kl,
        d, exact, epsilon, min(r_cap, 1 - torch.finfo(torch.float32).eps), min(kappa_cap, 3e38), scale, temper,
    )  # fmt: skip
    return beta, mu, kappa, prototypes, offset, kl


def half_product(a: Array, b: Array) -> Array:
    """Return a @ b in float32 from half-precision operands, with sums in float32."""
    import torch

    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
