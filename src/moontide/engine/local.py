"""The engine of one process: the shards one after the other, each on all cores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from moontide.engine.worker import Job, Worker


class Engine(Protocol):
    """What a run needs: call a method on all shards and add up their sums."""

    replaced: int  # workers that died and were replaced

    def run(self, number: int, name: str, *given: Any) -> Any:
        """Call `name` on every shard; `number` tells this call from those before it."""

    def close(self) -> None:
        """Let the workers go."""


class Local:
    """One worker, here. `tick(shards)` is called after every shard.

    >>> import numpy as np
    >>> from moontide import method
    >>> from moontide.store.disk import writing
    >>> from moontide.store.shards import look
    >>> with writing("memory://local/a.npy") as handle:
    ...     np.save(handle, np.eye(3))
    >>> job = Job(method("zero_shot"), np.eye(3, dtype=np.float32), 100.0, (look("memory://local/a.npy"),), (),
    ...           "memory://local/checkpoint")
    >>> Local(job, resident=True).run(1, "first")
    Counted(n=3)
    """

    def __init__(self, job: Job, resident: bool, tick: Callable[[int], None] = lambda shards: None) -> None:
        self.replaced = 0
        self._worker = Worker(job, tuple(range(job.parts)), resident, lambda: tick(1))

    def run(self, number: int, name: str, *given: Any) -> Any:
        """Call a method on every shard and add up."""
        return self._worker.call(number, name, given)

    def close(self) -> None:
        """Nothing is held elsewhere."""
