"""TIDE on real CLIP features, where they lie beside the repository."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moontide
from moontide.bench.data import Pack, read_pack
from moontide.samplers import BatchSampler, rng_for

PACKS = Path(__file__).parents[3] / "shared" / "features"

pytestmark = [
    pytest.mark.skipif(not PACKS.exists(), reason="the feature packs are not beside the repository"),
    pytest.mark.filterwarnings("ignore:class names appear more than once"),
]


@cache
def pack(name: str) -> Pack:
    return read_pack(PACKS / f"{name}.npz")


def accuracy(name: str, data: Pack, rows: Any, **given: Any) -> float:
    """Return the accuracy of a method in percent, with known labels that of the other samples."""
    task = data.task(rows)
    found = moontide.method(name).fit_predict(task.features, task.text, logit_scale=task.logit_scale, **given)
    free = given["known"] < 0 if given else np.ones(len(rows), bool)
    return 100 * float((found.labels == data.labels[rows])[free].mean())


FEW = [("imagenet1k_vitb32", (1, 4)), ("imagenet1k_vitb32", (5, 25)), ("pets24_vitb32", (1, 4)),
       ("cars_vitb32_val", (2, 10)), ("dtd_vitb32_test", (2, 10)), ("caltech65_vitb32", (2, 10)),
       ("cifar10_vitb32", (1, 4))]  # fmt: skip


def test_where_few_classes_are_there_it_is_at_least_moon_on_average() -> None:
    gains, over_zero_shot = [], []
    for name, classes in FEW:
        data = pack(name)
        for run in range(8):
            rows = BatchSampler(64, classes, None).draw(data.labels, rng_for("tide", name, str(classes), run))
            found = {m: accuracy(m, data, rows) for m in ("tide", "moon", "zero_shot")}
            gains.append(found["tide"] - found["moon"])
            over_zero_shot.append(found["tide"] - found["zero_shot"])
    assert np.mean(gains) >= 0
    assert np.mean(over_zero_shot) > 5


@pytest.mark.parametrize("name", ["dtd_vitb32_test", "pets24_vitb32", "caltech65_vitb32"])
def test_where_all_classes_are_there_it_is_above_zero_shot(name: str) -> None:
    data = pack(name)
    rows = np.arange(len(data.labels))
    assert accuracy("tide", data, rows) > accuracy("zero_shot", data, rows)


@pytest.mark.parametrize(("name", "least"), [("dtd_vitb32_test", 58), ("cars_vitb32_val", 67), ("clothing_tiny", 66)])
def test_four_known_labels_of_each_class_help_with_the_others(name: str, least: float) -> None:
    data = pack(name)
    right = []
    for seed in range(2):
        rng, known = np.random.default_rng(seed), np.full(len(data.labels), -1)
        for k in np.unique(data.labels):
            members = rng.permutation(np.flatnonzero(data.labels == k))
            known[members[: min(4, len(members) - 1)]] = k
        right.append(accuracy("tide", data, np.arange(len(known)), known=known))
    assert np.mean(right) >= least, right
