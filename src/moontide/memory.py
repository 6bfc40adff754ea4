"""How much memory is available, and an error before a run that would need more."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from moontide.errors import ResourceError

SMALL = 2**26  # what is not worth asking for: 64 MiB


def available_bytes() -> int | None:
    """Return the memory that a new job can use on this machine, or None if unknown."""
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        if "SC_PHYS_PAGES" in os.sysconf_names:
            limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limits += [*_cgroup_limits(), *_process_limits()]
    return max(0, min(limits)) if limits else None


def _cgroup_limits(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return what is left below the limits of the container and of every group above it (cgroup v2 and v1)."""
    found = []
    groups = {"memory.max": ("", "memory.current"), "memory.limit_in_bytes": ("memory", "memory.usage_in_bytes")}
    lines = membership.read_text().splitlines() if membership.exists() else []
    for name, (controller, usage) in groups.items():
        paths = [line.split(":", 2)[2] for line in lines if controller in line.split(":", 2)[1].split(",")]
        top = root / controller
        for folder in {top, *(top / part for path in paths for part in (Path(path[1:]), *Path(path[1:]).parents))}:
            try:  # unreadable, or "max": no limit
                found.append(int((folder / name).read_text()) - int((folder / usage).read_text()))
            except (OSError, ValueError):
                continue
    return found


def _process_limits() -> list[int]:
    """Return what is left below the limits that `ulimit` sets: of the address space, and of the data in it."""
    try:
        import resource

        sizes = [int(size) * resource.getpagesize() for size in Path("/proc/self/statm").read_text().split()]
    except (ImportError, OSError):
        return []
    used = {resource.RLIMIT_AS: sizes[0], resource.RLIMIT_DATA: sizes[5]}
    limits = {kind: resource.getrlimit(kind)[0] for kind in used}
    return [limit - used[kind] for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]


def human(size: float) -> str:
    """Write a number of bytes for people.

    >>> human(3 * 2**30)
    '3.0 GiB'
    """
    power = min(4, max(0, int(math.log2(max(size, 1)) // 10)))
    return f"{size / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def require_memory(need: int, what: str, ref: Any) -> None:
    """Refuse `what` if it needs more memory than the device of the array `ref` has."""
    if need < SMALL:
        return
    if getattr(ref, "is_cuda", False):
        import torch

        have: int | None = torch.cuda.mem_get_info(ref.device)[0]
    else:
        have = available_bytes()
    if have is not None and need > have:
        raise ResourceError(
            f"{what} needs about {human(need)} of memory, and {human(have)} is available. "
            "Split the samples into batches (--batch-size), or use float32."
        )
