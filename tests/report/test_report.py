import csv
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from moontide.bench.records import Log
from moontide.errors import FileError
from moontide.report.bench import write_report
from moontide.report.paper import DATASETS, About, paper
from moontide.report.plots import figures, read_curves
from moontide.report.results import collect
from moontide.report.tables import accuracy_grids, measure_grids, runtime_grids, summary_grids, sweep_grids

ENVIRONMENT = {
    "moontide": "0.1.0", "commit": "a" * 40, "python": "3.11", "numpy": "2.4", "torch": None, "machine": "a box",
}  # fmt: skip
VERY_LOW = {
    "id": "batch-64-very_low", "name": "very_low", "setting": "batch", "batch_size": 64, "effective_classes": [1, 4],
}  # fmt: skip
LOW = {**VERY_LOW, "id": "batch-64-low", "name": "low", "effective_classes": [2, 10]}


def record(run, method, accuracy, **changes):
    made = {
        "suite": "batch-64", "version": 1, "timing": False, "dataset": "imagenet", "backbone": "clip_vit_b16",
        "features": "f" * 64, "samples": 50000, "classes": 1000, "scenario": VERY_LOW, "run": run, "method": method,
        "options": {}, "label": None, "vary": None, "accuracy": accuracy, "zero_shot": 0.5, "n": 64,
        "correct": round(64 * accuracy), "gaps": [6.4], "seconds": 0.02, "environment": ENVIRONMENT,
    }  # fmt: skip
    return {**made, **changes}


def write(folder, records):
    log = Log(folder, "batch-64")
    for line in records:
        log.write(line)
    return folder


@pytest.fixture
def results(tmp_path):
    rng = np.random.default_rng(0)
    records = []
    for scenario in (VERY_LOW, LOW):
        for name in ("imagenet", "cifar10"):
            for run in range(20):
                noise = rng.integers(-3, 4) / 64
                for method, level in (("zero_shot", 0.5), ("stata", 0.625), ("moon", 0.75)):
                    accuracy = level + (0 if method == "zero_shot" else noise)
                    records.append(record(run, method, accuracy, dataset=name, scenario=scenario))
    return write(tmp_path, records)


def line(grid, title, block=0):
    return next(line for line in grid.blocks[block][1] if line.title == title)


def test_the_table_has_means_gains_ranks_and_the_papers_numbers(results):
    (grid,) = accuracy_grids(collect(results).tables)
    assert list(grid.headings) == ["ImageNet", "cifar10", "Avg."]
    assert [name for name, _ in grid.blocks] == ["very low (1–4 classes)", "low (2–10 classes)"]
    moon, stata, zero = (line(grid, title) for title in ("MOON", "StatA", "zero-shot"))
    records = [json.loads(text) for text in next(results.glob("*.jsonl")).read_text().splitlines()]
    own = [
        r["accuracy"] for r in records if (r["method"], r["dataset"], r["scenario"]) == ("moon", "imagenet", VERY_LOW)
    ]
    assert moon.numbers[0].value == pytest.approx(100 * np.mean(own))
    assert moon.numbers[0].gain == pytest.approx(100 * np.mean(own) - 50)
    assert moon.numbers[2].value == pytest.approx((moon.numbers[0].value + moon.numbers[1].value) / 2)
    assert [n.rank for n in moon.numbers] == [1, 1, 1]
    assert [n.rank for n in stata.numbers] == [2, 2, 2]
    assert [n.rank for n in zero.numbers] == [0, 0, 0]
    assert zero.numbers[0].gain is None
    lines = grid.blocks[0][1]
    printed = lines[lines.index(moon) + 1]
    assert printed.kind == "paper"
    assert printed.numbers[0].value == 82.8
    assert printed.numbers[0].gain == pytest.approx(moon.numbers[0].value - 82.8)
    assert printed.numbers[1] is None  # the paper has no CIFAR-10
    assert printed.numbers[2] is None  # nor an average over these two
    test = lines[-1]
    assert test.kind == "test"
    assert all(n.value < 0.001 for n in test.numbers)  # MOON is 12.5 points above in every run


def test_numbers_printed_alike_share_their_rank(tmp_path):
    accuracies = {"zero_shot": 0.5, "stata": 0.70004, "moon": 0.70001, "tda": 0.6}
    write(tmp_path, [record(run, m, a) for run in range(3) for m, a in accuracies.items()])
    (grid,) = accuracy_grids(collect(tmp_path).tables)
    assert {l.title: l.numbers[0].rank for l in grid.blocks[0][1] if l.kind in ("method", "ours")} == {
        "zero-shot": 0, "TDA": 2, "StatA": 1, "MOON": 1,
    }  # fmt: skip


def test_further_measures(tmp_path):
    levels = [0.25, 0.5, 0.75, 1.0] * 5
    records = [record(run, m, a, n=8 if a == 1 else 64, correct=8 if a == 1 else round(64 * a), seconds=a,
                      gaps=[8.0, -2.0] if run % 2 else [-4.0, -2.0])
               for run, a in enumerate(levels) for m in ("zero_shot", "moon")]  # fmt: skip
    write(tmp_path, records)
    (grid,) = measure_grids(collect(tmp_path).tables)
    mean, pooled, top, tail, calibration, ms = (n and n.value for n in line(grid, "MOON").numbers)
    assert top is None  # records of before
    assert mean == pytest.approx(62.5)
    assert pooled == pytest.approx(100 * (16 + 32 + 48 + 8) / (3 * 64 + 8))
    assert tail == pytest.approx(25)  # the two worst of twenty runs
    assert calibration == pytest.approx(100 * (abs(10 * 8 - 10 * 4) + 20 * 2) / (5 * (3 * 64 + 8)))  # of all together
    assert ms == pytest.approx(625)


def test_sweeps_and_runtime(tmp_path):
    records = [record(0, "zero_shot", 0.5)]
    for value in (10, 1, 3):
        options = {"iterations": value}
        records.append(record(0, "moon", 0.6 + value / 100, options=options, vary="iterations"))
    scenario = {"id": "batch-128-128", "name": "128", "setting": "batch", "batch_size": 128}
    fast = {"suite": "runtime", "timing": True, "scenario": scenario}
    records += [record(run, "moon", 0.5, seconds=s, n=128, **fast) for run, s in enumerate((0.01, 0.02, 9.0))]
    write(tmp_path, records)
    tables = collect(tmp_path).tables
    (sweep,) = sweep_grids(tables)
    assert list(sweep.headings) == ["1", "3", "10"]
    assert [n.value for n in line(sweep, "MOON").numbers] == pytest.approx([61, 63, 70])
    (runtime,) = runtime_grids(tables)
    ours, theirs = runtime.blocks[0][1]
    assert list(runtime.headings) == ["encoder", "MOON"]
    assert (ours.title, ours.numbers[1].value) == ("128 samples", pytest.approx(20))  # the median
    assert ours.numbers[0] is None
    assert [number.value for number in theirs.numbers] == [8470, 30]
    assert accuracy_grids(tables) == []


def test_the_summary_is_over_datasets_and_scenarios(tmp_path):
    names = {64: ("very_low", "low", "medium"), 1000: ("medium", "high", "very_high")}
    scenarios = [
        {"id": f"batch-{size}-{name}", "name": name, "setting": "batch", "batch_size": size}
        for size in names for name in names[size]
    ]  # fmt: skip
    sets = [(scenario, name) for scenario in scenarios for name in DATASETS]
    rng = np.random.default_rng(0)
    records = [
        record(run, method, rng.uniform(), scenario=scenario, dataset=name, suite="ablation", options=options,
               label="without alpha" if options else None)
        for scenario, name in sets for run in range(2)
        for method, options in (("zero_shot", {}), ("moon", {}), ("moon", {"alpha": 1.0}))
    ]  # fmt: skip
    (grid,) = summary_grids(collect(write(tmp_path, records)).tables)
    assert list(grid.headings) == [f"batches of {n}, {what}" for n in (64, 1000) for what in ("ImageNet", "Avg.")]
    for column, size in ((1, 64), (3, 1000)):
        own = [r["accuracy"] for r in records if (r["options"], r["scenario"]["batch_size"]) == ({"alpha": 1.0}, size)]
        ours = line(grid, "without alpha")
        printed = grid.blocks[0][1][grid.blocks[0][1].index(ours) + 1]
        assert ours.numbers[column].value == pytest.approx(100 * np.mean(own))
        assert printed.numbers[column].value == {64: 69.0, 1000: 68.9}[size]  # the paper's, of eleven datasets


def test_older_versions_other_features_and_partial_results_are_named(tmp_path):
    records = [record(0, "moon", 0.1), record(0, "moon", 0.9, version=2), record(0, "stata", 0.8, version=2)]
    records += [record(run, "moon", 0.7, version=2, features="e" * 64, samples=5) for run in range(2)]
    records.append(
        record(0, "moon", 0.9, version=2, environment={**ENVIRONMENT, "machine": "another box"})
    )  # done twice
    write(tmp_path, records)
    found = collect(tmp_path)
    assert sorted(c for t in found.tables for c in t.columns) == ["imagenet eeeeee", "imagenet ffffff"]
    assert found.notes[0] == "1 records of older versions of their suites are left out."
    assert "come from several versions or machines" in found.notes[1]
    assert "ImageNet (5 samples of 1000 classes, not 50000 of 1000)" in found.notes[2]
    assert "cells have 1 to 2 runs" in found.notes[3]


def test_a_batch_that_is_always_the_whole_dataset_counts_once(tmp_path):
    levels = {"zero_shot": 0.5, "moon": 0.75}
    whole = [record(run, m, a, samples=64, dataset="all") for run in range(30) for m, a in levels.items()]
    part = [record(run, m, a + run / 1000, dataset="some") for run in range(30) for m, a in levels.items()]
    found = collect(write(tmp_path, whole + part))
    (grid,) = accuracy_grids(found.tables)
    always, sampled, mean = line(grid, "MOON").numbers
    assert (always.value, always.half) == (75, None)
    assert sampled.half > 0
    assert mean.half == pytest.approx(sampled.half / 2)
    assert [n is None for n in grid.blocks[0][1][-1].numbers] == [True, False, False]  # no test on one run
    assert "batch-64, batch-64-very_low: every batch is the whole of all, so it counts once." in found.notes


def test_every_table_of_the_paper_can_be_looked_up():
    b16 = {"backbone": "clip_vit_b16", "setting": "batch", "batch_size": 64}
    cells = paper().cells
    assert len({about.backbone for about, _ in cells}) == 8
    assert paper().cell(About.make({**b16, "scenario": "low"}, "zero_shot", {}), "dtd") == 43.5  # holds everywhere
    assert paper().cell(About.make({**b16, "scenario": "low"}, "moon", {"alpha": 1.0}), "dtd") is None

    def mean(facts, *given):
        return paper().average(About.make({**b16, **facts}, *given), DATASETS)

    assert mean({"scenario": "low"}, "moon", {}) == 73.1
    assert mean({"scenario": "low"}, "zero_shot", {}) == 65.2
    assert mean({"scenario": "very_low"}, "moon", {"beta": "soft"}) == 75.3
    assert mean({"scenario": "medium"}, "moon", {"confidence": "max"}) == 69.0  # lambda, mild
    assert paper().seconds[1000, "stata"] == 0.31


def test_the_papers_means_over_scenarios_are_over_the_same_scenarios_and_datasets():
    about = About("clip_vit_b16", "batch", 1000, None, "moon", "{}")
    scenarios = [about._replace(scenario=name) for name in ("medium", "high", "very_high")]
    assert paper().summary(scenarios, DATASETS) == 71.14  # as printed with the variants
    assert paper().summary(scenarios[:2], DATASETS) == pytest.approx((72.9 + 71.3) / 2)
    assert paper().summary(scenarios[:2], ["imagenet"]) == pytest.approx((81.6 + 81.8) / 2)
    ablated = [one._replace(options='{"alpha": 1.0}') for one in scenarios]
    assert paper().summary(ablated, DATASETS) == 68.9
    assert paper().summary(ablated[:2], DATASETS) is None  # printed for all three together only
    assert paper().summary(ablated, ["imagenet", "dtd"]) is None
    scaled = [one._replace(backbone="siglip") for one in scenarios]
    assert paper().summary(scaled, DATASETS) == 85.1
    assert paper().summary(scaled, ["imagenet"]) == 91.3  # the scaling table's column


class Outline(HTMLParser):
    """Checks that tags are closed in order, and collects what a page refers to."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href")]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_is_written_in_all_forms(results):
    out = results / "report"
    written = write_report(results, out)
    assert [path.name for path in written] == ["report.html", "report.md", "report.tex", "details.csv"]
    page = Outline((out / "report.html").read_text(encoding="utf-8"))
    assert all(link.startswith(("#", "data:image/svg+xml;base64,")) for link in page.links)  # needs nothing else
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    markdown = (out / "report.md").read_text(encoding="utf-8")
    assert re.search(r"\| very low \(1–4 classes\) \| MOON \| \*\*7\d\.\d\*\* ±\d\.\d \(\+\d\d\.\d\)", markdown)
    for image in re.findall(r"\]\((.+?)\)", markdown):
        assert (out / image).read_bytes().startswith(b"<?xml")
    latex = (out / "report.tex").read_text(encoding="utf-8")
    for image in re.findall(r"includegraphics\[.*?\]\{(.+?)\}", latex):
        assert (out / image).read_bytes().startswith(b"%PDF")
    assert latex.count(r"\begin{") == latex.count(r"\end{")
    assert re.search(r"\\cellcolor\{ours\}\\textbf\{7\d\.\d\}\\within\{\d\.\d\}\\up\{\d\d\.\d\}", latex)
    with open(out / "details.csv", encoding="utf-8") as handle:
        details = list(csv.DictReader(handle))
    assert len(details) == 12
    moon = next(
        row for row in details if (row["method"], row["dataset"], row["scenario"]) == ("moon", "imagenet", "very_low")
    )
    assert (moon["runs"], moon["paper"]) == ("20", "82.8")
    assert sorted(path.name for path in (out / "tables").iterdir()) == [
        f"batch-64-clip_vit_b16-{what}.csv" for what in ("accuracy", "measures")
    ]


def test_a_report_is_the_same_every_time(results):
    write_report(results, results / "a")
    write_report(results, results / "b")
    for path in (results / "a").rglob("*.*"):
        assert path.read_bytes() == (results / "b" / path.relative_to(results / "a")).read_bytes(), path


def test_without_matplotlib_there_are_tables_and_a_sentence(results):
    code = (
        "import sys; sys.modules['matplotlib'] = None; import moontide.report.bench as r; r.write_report(*sys.argv[1:])"
    )
    subprocess.run([sys.executable, "-c", code, str(results), str(results / "out")], check=True)
    page = (results / "out" / "report.html").read_text(encoding="utf-8")
    assert "pip install &#x27;.[plot]&#x27;" in page
    assert "<img" not in page
    assert "<b>7" in page


def test_no_results_is_an_error(tmp_path):
    with pytest.raises(FileError, match="There are no results in"):
        write_report(tmp_path, tmp_path / "report")


def test_names_are_escaped(tmp_path):
    name = "<script>alert(1)</script> & 100%_x"
    write(tmp_path, [record(0, m, 0.6, dataset=name) for m in ("zero_shot", "moon")])
    write_report(tmp_path, tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert r"\& 100\%\_x" in (tmp_path / "report" / "report.tex").read_text(encoding="utf-8")


def test_curves_of_ones_own_and_the_papers_number_stand_beside_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    records = [record(0, "zero_shot", 0.5)]
    records += [
        record(0, "moon", 0.6 + v / 100, options={"iterations": v}, vary="iterations", suite="convergence")
        for v in (1, 10)
    ]
    write(tmp_path, [{**r, "suite": "convergence"} for r in records])
    path = tmp_path / "curves.csv"
    lines = ["option,title,dataset,scenario,value,accuracy", *(f"iterations,Fig. 3,imagenet,,{x},{y}" for x, y in
             ((1, 80), (10, 82)))]  # fmt: skip
    path.write_text("\n".join(lines))
    (curve,) = read_curves(path)
    assert curve.points == [(1.0, 80.0), (10.0, 82.0)]
    drawn = {f.name: f.svg for f in figures(collect(tmp_path).tables, [curve])}
    name = "convergence-clip_vit_b16-iterations-curve"
    with_both, without = drawn[name], {f.name: f.svg for f in figures(collect(tmp_path).tables)}[name]
    assert b"Fig. 3" in with_both
    assert b"the paper" in without  # its number at T = 10
    path.write_text("option,title\niterations,x\n")
    with pytest.raises(FileError, match="must have the columns option, title"):
        read_curves(path)
