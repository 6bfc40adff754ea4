"""The paper's numbers from `benchmarks/paper/*.toml`, for comparison with measured ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moontide.bench.suites import Entry
from moontide.store.toml import read_toml

_BY_DATASET = (
    "main-batch", "main-online", "batch-sizes", "backbones", "vlms", "all-classes", "random-classes", "sample-wise",
    "alpha-design",
)  # fmt: skip
_OVER_SCENARIOS = ("variants", "ablation", "scaling", "beta")  # the one with more digits first
_TASKS = {  # what the rows of the table on lambda are about: (setting, batch size, scenario)
    "extreme": (("batch", 64, "low"), ("batch", 1000, "medium"), ("online", 128, "high")),
    "mild": (("batch", 64, "medium"), ("batch", 1000, "very_high"), ("online", 128, "low")),
}
_SCENARIOS = {  # those that the paper's means over scenarios are over
    ("batch", 64): {"very_low", "low", "medium"},
    ("batch", 1000): {"medium", "high", "very_high"},
    ("online", 128): {"low", "medium", "high", "separate"},
}
DATASETS = (
    "imagenet", "sun397", "fgvc_aircraft", "eurosat", "stanford_cars", "food101", "oxford_pets", "oxford_flowers",
    "caltech101", "dtd", "ucf101",
)  # fmt: skip
AVERAGE = "avg"


class About(NamedTuple):
    """What a number is about; the scenario None stands for every scenario, or for the mean over all of them.

    >>> About.make({"setting": "batch", "batch_size": 64}, "moon", {"beta": "soft"}).options
    '{"beta": "soft"}'
    """

    backbone: str | None
    setting: str | None
    batch_size: int | None
    scenario: str | None
    method: str
    options: str  # JSON, without defaults

    @staticmethod
    def make(facts: Mapping[str, Any], method: str, options: Mapping[str, Any]) -> About:
        """Collect the facts of a number."""
        backbone, setting, size, scenario = map(facts.get, ("backbone", "setting", "batch_size", "scenario"))
        return About(backbone, setting, size, scenario, method, json.dumps(dict(options), sort_keys=True))


class Paper(NamedTuple):
    """All numbers of the paper, in percent."""

    cells: dict[tuple[About, str], float]  # by dataset, with the average over all eleven under "avg"
    over_scenarios: dict[tuple[About, str], float]  # the same, as means over the scenarios of a batch size
    seconds: dict[tuple[int, str], float]  # by batch size and method, on ImageNet

    def cell(self, about: About, dataset: str) -> float | None:
        """Return what the paper prints for a dataset, or for all of them ("avg").

        >>> facts = {"backbone": "clip_vit_b16", "setting": "batch", "batch_size": 64, "scenario": "very_low"}
        >>> paper().cell(About.make(facts, "moon", {}), "imagenet")
        82.8
        """
        found = self.cells.get((about, dataset))
        return self.cells.get((about._replace(scenario=None), dataset)) if found is None else found

    def average(self, about: About, datasets: Sequence[str]) -> float | None:
        """Return the paper's average over some datasets; over all eleven of them it is the printed one.

        >>> about = About("clip_vit_b16", "batch", 64, "low", "zero_shot", "{}")
        >>> paper().average(about, DATASETS), paper().average(about, ["imagenet", "dtd"])
        (65.2, 55.05)
        """
        printed = self.cell(about, AVERAGE) if tuple(datasets) == DATASETS else None
        return printed if printed is not None else _mean(self.cell(about, dataset) for dataset in datasets)

    def summary(self, abouts: Sequence[About], datasets: Sequence[str]) -> float | None:
        """Return the paper's mean over some scenarios of one batch size, of the average over some datasets.

        A mean that is printed for all scenarios is used only if these are all of them.

        >>> low = About("clip_vit_b16", "batch", 64, "low", "moon", "{}")
        >>> every = [low._replace(scenario=name) for name in ("very_low", "low", "medium")]
        >>> paper().summary(every, DATASETS), round(paper().summary(every[1:], DATASETS), 2)
        (72.36, 71.25)
        """
        first = abouts[0]
        if {about.scenario for about in abouts} == _SCENARIOS.get((first.setting or "", first.batch_size or 0)):
            key = datasets[0] if len(datasets) == 1 else AVERAGE if tuple(datasets) == DATASETS else ""
            printed = self.over_scenarios.get((first._replace(scenario=None), key))
            if printed is not None:
                return printed
        return _mean(self.average(about, datasets) for about in abouts)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, or None where a value is missing."""
    found = list(values)
    return float(np.mean(found)) if found and None not in found else None  # type: ignore[arg-type]


@cache
def paper() -> Paper:
    """Read the tables that come with Moontide.

    >>> paper().seconds[128, "moon"]
    0.03
    """
    inside = Path(__file__).parents[1] / "bench" / "paper"  # as installed
    folder = inside if inside.exists() else Path(__file__).parents[3] / "benchmarks" / "paper"  # in a checkout
    tables = {path.stem: read_toml(path)["row"] for path in folder.glob("*.toml")}
    found = Paper({}, {}, {})
    for name in _BY_DATASET:
        for row in tables[name]:
            average = {AVERAGE: row[AVERAGE]} if AVERAGE in row else {}
            found.cells.update({(_about(row), key): value for key, value in {**row["values"], **average}.items()})
    for name in _OVER_SCENARIOS:
        for row in tables[name]:
            about = _about(row)
            found.over_scenarios.setdefault((about, AVERAGE), row[AVERAGE])
            for key, value in row.get("values", {}).items():
                if key in DATASETS:
                    found.over_scenarios[about, key] = value
                else:  # the table on beta has scenarios there
                    found.cells.setdefault((about._replace(scenario=key), AVERAGE), value)
    for row in tables["lambda-design"]:
        for (setting, size, scenario), value in zip(_TASKS[row["imbalance"]], row["values"].values(), strict=True):
            about = _about(row)._replace(setting=setting, batch_size=size, scenario=scenario)
            found.cells.setdefault((about, AVERAGE), value)
    for row in tables["runtime"]:
        found.seconds[row["batch_size"], row["method"]] = row["seconds"]
    return found


def _about(row: Mapping[str, Any]) -> About:
    given = row.get("options")
    return About.make(row, row["method"], Entry.make(row["method"], given).options if given else {})
