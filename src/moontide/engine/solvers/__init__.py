"""TIDE on shards, until it is on the driver."""

from __future__ import annotations

from typing import Any

from moontide.core.arrays import to_numpy
from moontide.core.driver import Run, solve
from moontide.core.rows import Rows
from moontide.protocols import Method, Plan

__all__ = ["Plan", "Run", "one_shard", "plan_of", "rows_of", "solve_shards"]


def rows_of(method: Method) -> type[Rows]:
    if method.name == "tide":
        from moontide.engine.solvers import tide

        return tide.Shard
    if method.rows_type is None:
        method.plan()
    return method.rows_type  # type: ignore[return-value]


def plan_of(method: Any) -> Any:
    if method.name == "tide":
        from moontide.engine.solvers import tide

        return tide.plan(method)
    return method.plan()


def solve_shards(method: Any, run: Run, text: Any, logit_scale: float, **given: Any) -> Any:
    if method.name == "tide":
        from moontide.engine.solvers import tide

        return tide.solve(method, run, text, logit_scale, **given)
    return solve(method.mixture(text, logit_scale, **given), run)


def one_shard(method: Any, task: Any) -> tuple[Any, Any]:
    shard = rows_of(method)(
        method, to_numpy(task.features), to_numpy(task.text), task.logit_scale, task.graph, half=True
    )
    given = {name: to_numpy(x) for name in ("class_prior", "negatives") if (x := getattr(task, name)) is not None}
    return shard, solve_shards(method, shard.call, shard.text, task.logit_scale, **given)
