"""The benchmark on real CLIP features, where they lie beside the repository."""

from dataclasses import replace
from pathlib import Path

import pytest

from moontide.bench.records import read_records
from moontide.bench.runner import run_suite
from moontide.bench.suites import load_suite
from moontide.report.results import collect
from moontide.report.stats import sign_flip_p

PACKS = Path(__file__).parents[3] / "shared" / "features"

pytestmark = [
    pytest.mark.skipif(not PACKS.exists(), reason="the feature packs are not beside the repository"),
    pytest.mark.filterwarnings("ignore:class names appear more than once"),
]


def test_the_packs_run_as_they_are(tmp_path):
    outcome = run_suite(load_suite("batch-64").choose(["zero_shot", "moon"]).shorten(1), PACKS, tmp_path)
    packs = len(list(PACKS.glob("*.npz")))  # in three scenarios with two methods each
    assert (outcome.written, outcome.skipped, dict(outcome.failed)) == (6 * packs, [], {})
    found = {(r["dataset"], r["backbone"]) for r in read_records(tmp_path)}
    assert {("imagenet", "clip_vit_b32"), ("cifar10", "clip_vit_b32"), ("clothing_tiny", None)} < found


@pytest.mark.parametrize("pack", ["imagenet1k_vitb32", "pets24_vitb32", "cifar10_vitb32"])
def test_alpha_and_the_update_of_mu_help_where_few_classes_are_present(tmp_path, pack):
    suite = load_suite("ablation").choose(["moon"]).shorten(40)
    run_suite(replace(suite, scenarios=suite.scenarios[:1]), PACKS / f"{pack}.npz", tmp_path)
    (table,) = collect(tmp_path).tables
    rows = {row.title: row for row in table.rows}
    (column,) = table.columns
    for part in ("without alpha", "without update of mu"):
        gain = table.cells[rows["MOON"], column].paired(table.cells[rows[part], column])
        assert gain.mean() > 0
        assert sign_flip_p(gain) < 0.01
