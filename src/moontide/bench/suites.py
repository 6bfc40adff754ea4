"""Suites: what a benchmark runs, as versioned TOML.

    version = 1
    title = "Batch adaptation, batches of 64"
    runs = 1000                                # of every scenario
    timing = false                             # true: time is measured, so runs never overlap
    confident_views = 0.1                      # if there are views: features are the mean of the most confident tenth
    include = ["batch-64", "online-128/low"]   # scenarios of other suites, all or one, and their methods if none here
    methods = ["zero_shot", "moon"]            # methods with their defaults

    [[method]]                                 # a method with options
    name = "moon"
    label = "without alpha"                    # what reports call it
    preset = "paper"                           # the options of one of its presets, ...
    options = { alpha = 1.0 }                  # ... some of them changed
    sweep = { iterations = [1, 2, 3] }         # one entry for each value of one option

    [[scenario]]                               # a batch: BatchSampler
    name = "very_low"
    batch_size = 64                            # left out: the whole dataset
    effective_classes = [1, 4]                 # a number, a range, "random", or left out: all

    [[scenario]]                               # a stream: StreamSampler
    name = "low"
    stream = "dirichlet"
    batch_size = 128
    xi = 0.1

A batch is determined by (suite, dataset, scenario id, run), where the suite is the one that declares the scenario.
Suites that include it draw the same batches. The version is raised if results change their meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from moontide.errors import FileError, OptionError, unknown_name
from moontide.options import json_safe
from moontide.protocols import Method
from moontide.registry import method, method_names, method_type
from moontide.samplers import BatchSampler, StreamSampler, rng_for
from moontide.store.toml import read_toml, toml_files

_SUITE = {"version", "title", "runs", "timing", "confident_views", "include", "methods", "method", "scenario"}
_METHOD = {"name", "label", "preset", "options", "sweep"}


@dataclass(frozen=True)
class Scenario:
    """Which samples a method sees together, and the number of runs.

    >>> Scenario("very_low", BatchSampler(64, (1, 4)), runs=1000).id
    'batch-64-very_low'
    """

    name: str
    sampler: BatchSampler | StreamSampler
    runs: int
    suite: str = ""  # the one that declares it

    @property
    def setting(self) -> str:
        """Either "batch", independent batches, or "online", the batches of a stream."""
        return "online" if isinstance(self.sampler, StreamSampler) else "batch"

    @property
    def id(self) -> str:
        """The part of a run's seed that is specific to the scenario."""
        return f"{self.setting}-{self.sampler.batch_size or 'all'}-{self.name}"

    def seed(self, dataset: str, run: int) -> tuple[str, str, str, int]:
        """Return the seed of the batches of a run, in words."""
        return self.suite, dataset, self.id, run

    def batches(self, dataset: str, labels: ArrayLike, run: int) -> list[np.ndarray[Any, Any]]:
        """Return the indices of each batch of a run: one batch, or all of a stream.

        >>> scenario = Scenario("two", BatchSampler(3, 2), runs=1)
        >>> [len(batch) for batch in scenario.batches("toy", [0, 0, 1, 1, 2, 2], 0)]
        [3]
        """
        rng = rng_for(*self.seed(dataset, run))
        if isinstance(self.sampler, StreamSampler):
            return list(self.sampler.batches(labels, rng))
        return [self.sampler.draw(labels, rng)]

    def facts(self) -> dict[str, Any]:
        """Return the fields of a record that describe the scenario."""
        facts = {key: value for key, value in vars(self.sampler).items() if value is not None}
        return {"id": self.id, "name": self.name, "setting": self.setting, **facts}


@dataclass(frozen=True)
class Entry:
    """One method with its options, and its name in reports; `vary` names the option that a sweep varies.

    >>> Entry.make("moon", {"beta": "soft", "gamma": "assignments"}).options  # defaults are left out
    {'beta': 'soft'}
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    vary: str | None = None

    @staticmethod
    def make(name: str, options: Mapping[str, Any], label: str | None = None, vary: str | None = None) -> Entry:
        """Check the options and leave out those at their defaults, except for the one that varies."""
        specs = method(name, **options).specs()
        return Entry(name, {k: v for k, v in options.items() if k == vary or v != specs[k].default}, label, vary)

    @property
    def key(self) -> tuple[str, str]:
        """The method and its options as JSON, on which the results depend."""
        return self.name, json.dumps(json_safe(dict(self.options)), sort_keys=True)

    def build(self) -> Method:
        """Make the method."""
        return method(self.name, **self.options)


@dataclass(frozen=True)
class Suite:
    """A benchmark: methods, scenarios and run counts under a name and a version."""

    name: str
    version: int
    title: str
    scenarios: tuple[Scenario, ...]
    entries: tuple[Entry, ...]
    timing: bool = False
    confident_views: float | None = None

    def choose(self, names: list[str] | None) -> Suite:
        """Return the suite with some of its methods, or others with their defaults; ["all"] means every method.

        >>> [e.name for e in load_suite("batch-64").choose(["moon", "zero_shot"]).entries]
        ['moon', 'zero_shot']
        """
        if names is None:
            return self
        if names == ["all"]:
            own = {entry.name for entry in self.entries}
            more = (Entry(name) for name in method_names() if name not in own)
            return replace(self, entries=(*self.entries, *more))
        chosen: list[Entry] = []
        for name in names:
            own_entries = [entry for entry in self.entries if name in (entry.name, entry.label)]
            chosen += own_entries or [Entry(method_type(name).name)]
        return replace(self, entries=tuple(chosen))

    def shorten(self, runs: int | None) -> Suite:
        """Return the suite with at most `runs` runs of every scenario.

        >>> load_suite("online-128").shorten(3).scenarios[0].runs
        3
        """
        if runs is None:
            return self
        if runs < 1:
            raise OptionError(f"'runs' must be at least 1. Got {runs} instead.")
        return replace(self, scenarios=tuple(replace(s, runs=min(runs, s.runs)) for s in self.scenarios))


def suite_names() -> tuple[str, ...]:
    """List the suites that come with Moontide.

    >>> "ablation" in suite_names()
    True
    """
    return tuple(toml_files("suites"))


def load_suite(name: str) -> Suite:
    """Read a suite by its name, or from a TOML file.

    >>> suite = load_suite("batch-64")
    >>> [scenario.id for scenario in suite.scenarios], suite.scenarios[0].runs
    (['batch-64-very_low', 'batch-64-low', 'batch-64-medium'], 1000)
    """
    path = Path(name) if name.endswith(".toml") else toml_files("suites").get(name)
    if path is None:
        raise unknown_name("suite", name, suite_names())
    table = read_toml(path)
    try:
        return _suite(path.stem, table)
    except (KeyError, TypeError) as error:
        raise FileError(f"{path} is not a suite: {type(error).__name__} {error}.") from None


def _suite(name: str, table: dict[str, Any]) -> Suite:
    _known("key of a suite", table, _SUITE)
    included = [_include(part) for part in table.get("include", [])]
    scenarios = [scenario for part in included for scenario in part.scenarios]
    if "runs" in table:
        scenarios = [replace(scenario, runs=table["runs"]) for scenario in scenarios]
    scenarios += [_scenario(name, dict(row), table.get("runs")) for row in table.get("scenario", [])]
    entries = [Entry(method_name) for method_name in table.get("methods", [])]
    entries += [entry for row in table.get("method", []) for entry in _entries(row)]
    if not entries and included:
        entries = list(included[0].entries)
    ids = [scenario.id for scenario in scenarios]
    if not entries or not ids or len(set(ids)) < len(ids):
        raise TypeError("a suite has at least one method, and scenarios that are all different")
    return Suite(
        name, table["version"], table["title"], tuple(scenarios), tuple(entries), table.get("timing", False),
        table.get("confident_views"),
    )  # fmt: skip


def _include(part: str) -> Suite:
    name, _, wanted = part.partition("/")
    suite = load_suite(name)
    chosen = tuple(scenario for scenario in suite.scenarios if wanted in ("", scenario.name))
    if not chosen:
        raise unknown_name(f"scenario of {name}", wanted, [scenario.name for scenario in suite.scenarios])
    return replace(suite, scenarios=chosen)


def _scenario(suite: str, row: dict[str, Any], default_runs: int | None) -> Scenario:
    name, runs = row.pop("name"), row.pop("runs", default_runs)
    if not isinstance(runs, int):
        raise TypeError(f"'runs' of the scenario {name} must be a whole number")
    classes = row.get("effective_classes")
    if isinstance(classes, list):
        row["effective_classes"] = tuple(classes)
    if "stream" in row:
        return Scenario(name, StreamSampler(row.pop("stream"), **row), runs, suite)
    return Scenario(name, BatchSampler(**row), runs, suite)


def _entries(row: dict[str, Any]) -> list[Entry]:
    _known("key of a method", row, _METHOD)
    options = row.get("options", {})
    if "preset" in row:
        presets = method_type(row["name"]).presets
        if row["preset"] not in presets:
            raise unknown_name(f"preset of {row['name']}", row["preset"], presets)
        options = {**presets[row["preset"]], **options}
    if "sweep" not in row:
        return [Entry.make(row["name"], options, row.get("label"))]
    ((option, values),) = row["sweep"].items()
    return [Entry.make(row["name"], {**options, option: value}, row.get("label"), option) for value in values]


def _known(kind: str, row: Mapping[str, Any], known: set[str]) -> None:
    for key in row:
        if key not in known:
            raise unknown_name(kind, key, known)
