"""Joining a Ray cluster, or starting one on this machine: for runs over shards and for encoding images."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moontide.errors import ResourceError, first_line, missing_extra


@contextmanager
def joined(address: str | None, cpus: int | None = None) -> Iterator[bool]:
    """Join the cluster at an address, or start Ray on this machine until the end; yield whether it was started."""
    try:
        import ray
    except ImportError:
        raise missing_extra("ray", "ray", "The engine 'ray'") from None
    if ray.is_initialized():
        yield False
        return
    own: dict[str, Any] = {"num_cpus": cpus, "include_dashboard": False} if address is None else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ResourceError(f"There is no Ray cluster at {address!r} ({first_line(error)}).") from error
    try:
        yield True
    finally:
        ray.shutdown()


def resources() -> dict[str, float]:
    """Return what the cluster has: CPU, GPU, memory in bytes."""
    import ray

    return ray.cluster_resources()  # type: ignore[no-any-return]


def worker_count(workers: int | None, device: str = "cpu") -> int:
    """Return how many workers to start: `workers`, or one per CPU or GPU. More than the cluster has is an error."""
    kind = "GPU" if device.startswith("cuda") else "CPU"
    have = int(resources().get(kind, 0))
    if have < (workers or 1):
        raise ResourceError(f"The Ray cluster has {have} {kind}s, and each of {workers or 1} workers needs one.")
    return workers or have
