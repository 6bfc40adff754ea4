"""All suites by one command: what it runs, what it finds again, how it estimates, and what it writes into a page."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moontide.bench import runner
from moontide.bench.records import read_records
from moontide.bench.suites import load_suite, suite_names
from moontide.registry import method_names, method_type

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import paper  # noqa: E402
from grid_parts import report_all, tables  # noqa: E402
from paper_parts import pages  # noqa: E402


def run(features, out, *options):
    given = ("--data", features, "--out", out, "--jobs", 1, "--suites", "alpha-design", "convergence", *options)
    return paper.main([str(option) for option in given])


def test_it_estimates_runs_and_goes_on_and_writes_its_page(features, tmp_path, capsys):
    page = tmp_path / "page.md"
    parts = ("checklist", "alpha-design", "convergence")
    page.write_text("".join(f"<!-- grid:{name} -->\n<!-- /grid:{name} -->\n" for name in parts))
    assert run(features, tmp_path / "out", "--estimate", "--runs", 2) is None
    first = [len(list(read_records(tmp_path / "out" / name))) for name in ("alpha-design", "convergence")]
    assert first == [4, 2 * 41]  # one run of every method in every scenario
    assert "core-minutes left" in capsys.readouterr().err
    assert run(features, tmp_path / "out", "--runs", 2, "--write", page) is None
    assert len(list(read_records(tmp_path / "out" / "alpha-design"))) == 8
    written = page.read_text()
    assert "| batches of 1000, medium | alpha = lambda |" in written
    assert "| batches of 64, very low | MOON |" in written
    details = tmp_path / "out" / "details.csv"
    assert paper.main(["--read", str(details), "--write", str(page)]) is None  # nothing is run
    assert page.read_text() == written


def test_what_suites_share_is_run_once(features, tmp_path, monkeypatch):
    calls = []
    score = runner.score
    monkeypatch.setattr(runner, "score", lambda method, *rest: calls.append(method.name) or score(method, *rest))
    monkeypatch.setattr(runner, "find_spec", lambda name: None)  # nothing compiles, and all have been run before
    monkeypatch.setattr(runner, "_warm", {(m, s) for m in ("zero_shot", "moon") for s in ("batch", "online")})
    given = ("--data", features, "--out", tmp_path, "--jobs", 1, "--methods", "zero_shot,moon", "--runs", 1)
    assert paper.main([*map(str, given), "--suites", "batch-64", "beta"]) is None
    assert sorted(calls) == ["moon"] * (3 + 10 + 7) + ["zero_shot"] * 10  # beta has all scenarios of batch-64, and soft
    same = [{tuple(r["seed"]): r["accuracy"] for r in read_records(tmp_path / suite) if not r["options"]}
            for suite in ("batch-64", "beta")]  # fmt: skip
    assert all(same[1][seed] == accuracy for seed, accuracy in same[0].items())


def test_it_takes_the_runs_that_fit_into_the_time():
    suite = load_suite("beta").choose(["moon"])
    scenario = suite.scenarios[0]
    fast, slow = paper.cells_of(suite, "f", scenario)
    known = paper.Known({}, {fast: 0.001, slow: 0.01}, Counter({fast: 1, slow: 1}))
    assert sum(paper.left([suite], known, None).values()) == pytest.approx(999 * 0.011)
    effort = paper.effort_for([suite], known, 1.1)
    assert sum(paper.left([suite], known, effort).values()) == pytest.approx(1.1, abs=0.25)
    assert paper.most_runs(1000, [0.01], paper.effort_for([suite], known, 1e6)) == 1000
    seconds = [paper.Effort(s, 1.0) for s in (0.001, 0.07, 0.1, 0.19, 10, 99)]
    assert [paper.most_runs(1000, [0.01], effort) for effort in seconds] == [paper.LEAST, 7, 10, 16, 1000, 1000]
    assert [paper.most_runs(1000, [t], paper.Effort(10, 0.5)) for t in (0.01, 1, 4, 100)] == [100, 10, 5, paper.LEAST]


def test_a_limit_of_seconds_holds_for_all_entries_of_a_method_alike(features, tmp_path):
    run(features, tmp_path / "out", "--seconds", 1e-9)
    runs = {}
    for record in read_records(tmp_path / "out" / "convergence"):
        runs.setdefault((record["method"], str(record["options"]), record["scenario"]["id"]), []).append(record["run"])
    assert set(map(tuple, map(sorted, runs.values()))) == {tuple(range(paper.LEAST))}
    suite = load_suite("convergence")
    cells = paper.cells_of(suite, "f", suite.scenarios[0], "moon")
    limit = paper.limit_by({cells[0]: 0.01, cells[-1]: 0.1}, suite, paper.Effort(5.0, 1.0))

    class Features:
        hash = "f"

    moons = [entry for entry in suite.entries if entry.name == "moon"]
    assert {limit(Features, suite.scenarios[0], entry) for entry in moons} == {40}
    assert limit(Features, suite.scenarios[1], moons[0]) == 1000  # nothing is known of it


def test_every_suite_of_the_paper_is_run_and_has_its_part_on_the_page():
    left_out = set(suite_names()) - set(paper.SUITES)
    assert left_out == {"backbones", "runtime", "long-tailed", "ttabc"}
    tables.check_page(ROOT / "docs/paper.md", ["checklist", *paper.SUITES])


def test_the_papers_numbers_stand_beside_ours_over_the_same_data_sets():
    common = {"suite": "batch-64", "version": "1", "backbone": "clip_vit_b32", "setting": "batch", "batch_size": "64",
              "scenario": "low", "label": "", "vary": "", "runs": "7", "half_interval": "0.5",
              "gain": "1.0", "gain_half_interval": "0.5"}  # fmt: skip
    made = [("imagenet", "moon", "70.0", "80.3"), ("dtd", "moon", "50.0", "47.3"), ("cifar10", "moon", "90.0", "")]
    rows = [
        {**common, "dataset": d, "method": m, "options": "{}", "accuracy": a, "paper": p} for d, m, a, p in made
    ]  # fmt: skip
    found = pages.pages(rows)
    (line,) = [line for line in found["batch-64"].splitlines() if "MOON" in line]
    assert line == "| batches of 64, low | MOON | 70.0 | 50.0 | 90.0 | 60.0 | 63.8 (B/32) | -3.8 |"
    assert "| `moontide bench run batch-64 --data FEATURES` | 2 | 63.8 | 60.0 | -3.8 | +1.0 |" in found["checklist"]


def test_a_slow_method_has_its_gain_on_the_batches_it_met_added_to_zero_shot_on_all(tmp_path):
    heads = (*pages.CELL, "label", "runs", "accuracy", "gain", "gain_half_interval", "paper")
    where = ("batch-64", "1", "clip_vit_b32", "batch", "64", "low", "dtd")
    lines = [(*where, "zero_shot", "{}", "", "", "100", "40.0", "0.0", "0.0", "42.7"),
             (*where, "moon", "{}", "", "", "3", "60.0", "5.0", "1.5", "47.9")]  # fmt: skip
    path = tmp_path / "details.csv"
    path.write_text("\n".join(",".join(line) for line in [heads, *lines]) + "\n")
    rows = pages.read_details([path])
    assert [float(row["accuracy"]) for row in rows] == [40.0, 45.0]
    assert (
        pages.counts(rows) == "3 runs per cell. Half the 95 % interval of a gain is 1.5 in the median and at most 1.5."
    )


def test_the_runtime_table_has_the_encoder_and_the_papers_times(tmp_path):
    forward = tmp_path / "forward.csv"
    forward.write_text("images,seconds\n128,0.05\n")
    rows = [{"dataset": "imagenet", "method": m, "batch_size": size, "samples": "500.0", "median_seconds": "0.002"}
            for m in ("zero_shot", "moon") for size in ("128", "50000")]  # fmt: skip
    assert pages.runtime(rows, pages.read_forward(forward)).splitlines()[2:] == [
        "| 128, ours | 50.0 | 2.0 | 2.0 |",
        "| 128, the paper | 8470.0 | – | 30.0 |",
        "| 500, ours | – | 2.0 | 2.0 |",
        "| 50,000, the paper | 36900.0 | – | 50.0 |",
    ]


def test_the_mean_of_a_method_is_zero_shot_on_all_batches_and_its_gain():
    class Found:
        def runs(self, measure, cell, title, name="accuracy"):
            own = {"zero_shot": {0: 50.0, 1: 90.0}, "slow": {0: 53.0}, "none": {}}[title]
            return list(own) if name == "run" else list(own.values())

    assert report_all._average(Found(), None, "zero_shot") == 70.0
    assert report_all._average(Found(), None, "slow") == 73.0
    assert np.isnan(report_all._average(Found(), None, "none"))


def test_the_table_of_all_methods_has_every_method_that_features_are_enough_for():
    assert set(report_all.titles()) == {name for name in method_names() if not method_type(name).needs}
    assert report_all.titles()[0] == "zero_shot"
    assert {"tide", "dota", "moon", "zero_shot"} <= set(report_all.on_streams()) <= set(report_all.titles())


@pytest.fixture
def packs(tmp_path):
    from .test_grid import save_pack

    save_pack(tmp_path / "six_sim.npz", 6, 150, 0)
    save_pack(tmp_path / "thirty_sim.npz", 30, 300, 1)
    return [tmp_path / "six_sim.npz", tmp_path / "thirty_sim.npz"]


def test_the_table_of_all_methods_has_few_all_a_stream_and_harm(packs, tmp_path, monkeypatch, capsys):
    import grid

    monkeypatch.setattr(report_all, "titles", lambda: ("zero_shot", "sinkhorn", "moon", "tda"))
    log = tmp_path / "all.jsonl"
    command = ["--all", "--packs", *map(str, packs), "--runs", "4", "--jobs", "1", "--out", str(log)]
    assert grid.main(command) is None
    printed = capsys.readouterr().out
    assert "| method | few of 64 | all of 64 | all of 1000 | a stream | worst cell against zero-shot |" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("| Sinkhorn |") and "of 6" in line]
    assert "– |" in line  # it has no memory
    assert line.split("|")[-3].strip().startswith("-")  # it does harm with few classes
    assert "| method | six, 1-4 classes | thirty, 2-10 classes |" in printed  # 10 of 6 are not few
    size = log.stat().st_size
    assert grid.main(command) is None
    assert log.stat().st_size == size
    assert np.isfinite(float(line.split("|")[2]))


@pytest.mark.filterwarnings("ignore::moontide.errors.ImplausibleWarning")
def test_the_table_of_rivals_behind_the_gate(packs, monkeypatch):
    import leads

    z, p, y = np.random.default_rng(0).dirichlet(np.ones(4), size=(3, 50))
    assert all((both.argmax(axis=1) == z.argmax(axis=1)).all() for both in leads.joined(z, p, y, 0.0).values())
    monkeypatch.setattr(leads, "RIVALS", ("sinkhorn",))
    jobs = leads.jobs_of([leads.read_pack(path) for path in packs], 1)
    answers = list(map(leads.Trial(tuple(packs)), jobs))
    assert all(0 < w < 1 and set(found) >= {"tide", "sinkhorn", "sinkhorn times"} for _, w, found in answers)
    text = leads.report(answers)
    assert "| Sinkhorn, times |" in text
    assert len([line for line in text.splitlines() if line.startswith("| Sinkhorn")]) == 2 * 3  # alone, times, mean
