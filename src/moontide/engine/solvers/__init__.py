"""The methods that run on shards, found like methods by their file's name: one file of this folder each.

A file NAME.py, NAME that of the method, has three things:

- `Shard`, a subclass of `engine.rows.Rows` with the map over the rows of a shard: functions that take K x d arrays and
  return `engine.sums.Sums`, dataclasses whose fields add up. Those that `CHANGES` names change the shard (its
  assignments `z`, `labels`, and whatever else `STATE` names), which is then saved; the others only look. `SCORES` is
  for the estimate of memory.
- `solve(method, run, text, logit_scale)`, the driver: `run("step", ...)` calls that function of every shard and returns
  the sum of what they return. What comes out has a field `converged`.
- `plan(method)`: how many calls that takes and how many of them are called "step", for the time left; it raises
  `OptionError` where options of the method cannot be had on shards.

A call may be repeated after any failure, so that what `solve` does must follow from what `run` returns.

>>> names()
('moon', 'stata', 'zero_shot')
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from moontide.core.arrays import to_numpy
from moontide.core.smoothing import check_graph
from moontide.errors import OptionError

if TYPE_CHECKING:
    from moontide.engine.rows import Rows
    from moontide.types import Task


class Plan(NamedTuple):
    """How long a run is: calls of all shards, and how many of those are the steps that are reported."""

    calls: int
    steps: int


class Solved(Protocol):
    """What the driver of any method returns."""

    @property
    def converged(self) -> bool:
        """Whether the last step changed no label."""


class Run(Protocol):
    """Call a function of every shard, by name, and add up what they return."""

    def __call__(self, name: str, *given: Any) -> Any:
        """Return the sum."""


class Solver(Protocol):
    """A file of this folder."""

    Shard: type[Rows]

    def solve(self, method: Any, run: Run, text: Any, logit_scale: float) -> Solved:
        """Drive the shards to the answer."""

    def plan(self, method: Any) -> Plan:
        """Tell how long that is."""


def names() -> tuple[str, ...]:
    """List the methods that run on shards."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__)))


def solver(name: str) -> Solver:
    """Return the file of a method.

    >>> solver("zlap")
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: Only moon, stata and zero_shot run on shards. Got 'zlap'.
    """
    if name not in names():
        raise OptionError(f"Only {', '.join(names()[:-1])} and {names()[-1]} run on shards. Got {name!r}.")
    return cast(Solver, importlib.import_module(f"{__name__}.{name}"))


def one_shard(method: Any, task: Task) -> tuple[Any, Any]:
    """Solve a task as one shard, here, with assignments in 16 bits; return the shard and what the driver returns.

    >>> import numpy as np
    >>> from moontide import Task, method
    >>> shard, found = one_shard(method("moon"), Task(np.eye(3), np.eye(3)))
    >>> shard.labels, found.converged
    (array([0, 1, 2]), True)
    """
    check_graph(task, method.name, method.neighbours)
    chosen = solver(method.name)
    shard = chosen.Shard(method, to_numpy(task.features), to_numpy(task.text), task.logit_scale, task.graph)
    found = chosen.solve(method, lambda name, *given: getattr(shard, name)(*given), shard.text, task.logit_scale)
    return shard, found
