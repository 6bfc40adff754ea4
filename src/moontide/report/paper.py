"""The paper's numbers, to stand beside one's own: `benchmarks/paper/*.toml` by what they are about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from moontide.bench.suites import Entry
from moontide.bench.toml import read_toml

_BY_DATASET = (
    "main-batch", "main-online", "batch-sizes", "backbones", "vlms", "all-classes", "random-classes", "sample-wise",
    "alpha-design",
)  # fmt: skip
_MEANS = ("ablation", "variants", "scaling")  # over all scenarios of a batch size
_TASKS = {  # what the rows of the table on lambda are about: (setting, batch size, scenario)
    "extreme": (("batch", 64, "low"), ("batch", 1000, "medium"), ("online", 128, "high")),
    "mild": (("batch", 64, "medium"), ("batch", 1000, "very_high"), ("online", 128, "low")),
}
DATASETS = (
    "imagenet", "sun397", "fgvc_aircraft", "eurosat", "stanford_cars", "food101", "oxford_pets", "oxford_flowers",
    "caltech101", "dtd", "ucf101",
)  # fmt: skip


class About(NamedTuple):
    """What a number is about; scenario None: every scenario alike, or the mean over all of them.

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
    """All numbers of the paper, in percent.

    >>> Paper({}, {}, {}).seconds
    {}
    """

    cells: dict[tuple[About, str], float]  # by dataset, with the average under "avg"
    means: dict[About, float]  # printed without datasets: averages over the eleven
    seconds: dict[tuple[int, str], float]  # by batch size and method, on ImageNet

    def cell(self, about: About, dataset: str) -> float | None:
        """Return what the paper prints for a dataset.

        >>> facts = {"backbone": "clip_vit_b16", "setting": "batch", "batch_size": 64, "scenario": "very_low"}
        >>> paper().cell(About.make(facts, "moon", {}), "imagenet")
        82.8
        """
        found = self.cells.get((about, dataset))
        return self.cells.get((about._replace(scenario=None), dataset)) if found is None else found

    def mean(self, about: About) -> float | None:
        """Return what the paper prints as the average over its eleven datasets.

        >>> paper().mean(About("clip_vit_b16", "batch", 64, "low", "zero_shot", "{}"))
        65.2
        """
        found = self.means.get(about)
        return self.cell(about, "avg") if found is None else found


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
    for name in (*_BY_DATASET, *_MEANS):
        for row in tables[name]:
            about = _about(row)
            if name in _MEANS:
                found.means[about] = row["avg"]
                continue
            average = {"avg": row["avg"]} if "avg" in row else {}
            found.cells.update({(about, dataset): value for dataset, value in {**row["values"], **average}.items()})
    for row in tables["beta"]:
        about = _about(row)
        found.means[about] = row["avg"]
        found.means.update({about._replace(scenario=scenario): value for scenario, value in row["values"].items()})
    for row in tables["lambda-design"]:
        for (setting, size, scenario), value in zip(_TASKS[row["imbalance"]], row["values"].values(), strict=True):
            found.means[_about(row)._replace(setting=setting, batch_size=size, scenario=scenario)] = value
    for row in tables["runtime"]:
        found.seconds[row["batch_size"], row["method"]] = row["seconds"]
    return found


def _about(row: Mapping[str, Any]) -> About:
    given = row.get("options")
    return About.make(row, row["method"], Entry.make(row["method"], given).options if given else {})
