"""How much memory there is, and a refusal in words before a run that cannot fit."""

from __future__ import annotations

import os
from pathlib import Path

from moontide.core.arrays import Array, is_torch_array
from moontide.errors import ResourceError

SMALL = 2**26  # what is not worth asking for: 64 MiB


def available_bytes() -> int | None:
    """Return the memory that a new job can take on this machine, or None where it cannot be told.

    >>> available_bytes() is None or available_bytes() > 0
    True
    """
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        if "SC_PHYS_PAGES" in os.sysconf_names:
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:  # a container's own limit (cgroup v2)
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            limits.append(int(limit) - used)
    except (OSError, ValueError):
        pass
    return max(0, min(limits)) if limits else None


def human(size: float) -> str:
    """Write a number of bytes for people.

    >>> human(3 * 2**30)
    '3.0 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def require_memory(need: int, what: str, ref: Array) -> None:
    """Refuse `what` where it needs more memory than the device of `ref` has.

    >>> import numpy as np
    >>> require_memory(10**18, "moon on 10 x 10", np.zeros(1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    moontide.errors.ResourceError: moon on 10 x 10 needs about 909494.7 TiB of memory, and ... is available. ...
    """
    if need < SMALL:
        return
    if is_torch_array(ref) and ref.device.type == "cuda":
        import torch

        have: int | None = torch.cuda.mem_get_info(ref.device)[0]
    else:
        have = available_bytes()
    if have is not None and need > have:
        raise ResourceError(
            f"{what} needs about {human(need)} of memory, and {human(have)} is available. "
            "Split the samples into batches (--batch-size), or use float32."
        )
