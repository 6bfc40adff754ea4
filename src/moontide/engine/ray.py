"""The engine of a cluster: Ray actors that hold shards, assignments and graphs in memory, and a tree of additions.

What travels in an iteration is K x d: the classes, once to each node, and one sum from each worker, added in pairs on
the cluster, so that the driver receives a single one. A worker that dies is replaced and its shards are read again, as
they were after their last step; the call is then repeated, which costs the others nothing (see `engine.worker`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moontide.engine.worker import Job, Tick, Worker
from moontide.errors import MoontideError, ResourceError, first_line

try:
    import ray
except ImportError:  # `cluster.joined` names the extra
    ray = None

ATTEMPTS = 5  # of one call
WATCH = "watch"
PATIENCE = 2.0  # seconds between requests for the progress of the workers


class Ray:
    """A worker on the cluster for each of the shares of the shards; `tick` is called as the shards answer."""

    def __init__(self, job: Job, shares: Sequence[Sequence[int]], resident: bool, tick: Tick) -> None:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._actor = ray.remote(
            num_cpus=1,
            num_gpus=int(job.device.startswith("cuda")),
            runtime_env={"env_vars": threads},
            concurrency_groups={WATCH: 1},  # a thread that reports how far the other is
        )(Worker)
        self._add = ray.remote(num_cpus=0)(lambda a, b: a + b)
        self._job, self._resident, self._tick, self.replaced = ray.put(job), resident, tick, 0
        self.shares, self.workers = shares, [self._start(share) for share in shares]

    def run(self, number: int, name: str, given: tuple[Any, ...]) -> Any:
        """Call a method on every shard and add up; workers that die meanwhile are replaced."""
        packed = ray.put(given)
        for _ in range(ATTEMPTS):
            parts = [worker.run.remote(number, name, packed) for worker in self.workers]
            try:
                self._wait(number, parts)
                return ray.get(self._tree(parts))
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                if isinstance(cause, MoontideError):
                    raise cause from None
                lost = not isinstance(error, ray.exceptions.RayTaskError) or isinstance(cause, ray.exceptions.RayError)
                if not self._replace_dead() and not lost:  # an addition fails, too, when what it adds was lost
                    raise
                last = error
        died = f"Workers died {ATTEMPTS} times in one call, probably for want of memory"
        raise ResourceError(f"{died}; split the shards, or use fewer workers on a machine ({first_line(last)}).")

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            ray.kill(worker)

    def _start(self, share: Sequence[int]) -> Any:
        return self._actor.remote(self._job, share, self._resident)

    def _wait(self, number: int, parts: list[Any]) -> None:
        """Report how many shards have answered, until all have."""
        running = parts
        while running:
            _, running = ray.wait(running, num_returns=len(running), timeout=PATIENCE, fetch_local=False)
            each = zip(self.workers, parts, self.shares, strict=True)
            self._tick(sum(_progress(w, number) if part in running else len(share) for w, part, share in each))

    def _tree(self, parts: list[Any]) -> Any:
        """Add up in pairs, on the cluster."""
        while len(parts) > 1:
            pairs = [self._add.remote(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
            parts = pairs + parts[2 * len(pairs) :]
        return parts[0]

    def _replace_dead(self) -> bool:
        """Start a new worker for each that does not answer; tell whether there was one."""
        before = self.replaced
        for w, worker in enumerate(self.workers):
            try:
                _progress(worker, 0)
            except ray.exceptions.RayError:  # it died, was ended for want of memory, could not start or be reached
                ray.kill(worker)  # one that could only not be reached would write the same files
                self.workers[w] = self._start(self.shares[w])
                self.replaced += 1
        return self.replaced > before


def _progress(worker: Any, number: int) -> int:
    """Return how many shards of a worker have answered a call."""
    last, shards = ray.get(worker.progress.options(concurrency_group=WATCH).remote())
    return int(shards) if last == number else 0
