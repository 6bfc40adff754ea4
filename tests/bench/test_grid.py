"""The grid benchmark: nothing is run twice, nothing depends on the processes, and only marked parts of pages change."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moontide.core.arrays import unit_rows
from moontide.metrics import expected_calibration_error
from moontide.simulate import simulate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from grid_parts import ablations, cells, measures, packs, report_more, tables, variants, work  # noqa: E402

from moontide.methods import tide  # noqa: E402

PARTS = ("summary", "grid", "photographs", "biased", "trust", "known")
PAGE = "# Before\n\n" + "\n".join(f"{name}: <!-- grid:{name} -->\nold\n<!-- /grid:{name} --> stays" for name in PARTS)


def save_pack(path, k, n, seed):
    data = simulate(n, k, dim=16, seed=seed)
    arrays = {"image_features": data.features, "text_features": data.text, "labels": data.labels}
    np.savez(path, logit_scale=data.logit_scale, **arrays)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two packs of one model, and photographs that are encoded already."""
    folder = tmp_path_factory.mktemp("grid")
    save_pack(folder / "six_sim.npz", 6, 150, 0)
    save_pack(folder / "eight_sim_test.npz", 8, 160, 1)
    return folder


def command(folder, out, *options):
    (folder / out).mkdir(exist_ok=True)
    if not (folder / out / "photographs_tiny.npz").exists():
        save_pack(folder / out / "photographs_tiny.npz", 5, 40, 2)
    names = [str(folder / "six_sim.npz"), str(folder / "eight_sim_test.npz")]
    log = str(folder / out / "grid.jsonl")
    return [sys.executable, str(ROOT / "benchmarks/grid.py"), "--packs", *names, "--out", log, *options]


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def run(folder, out, *options):
    every = ("--grid", "--biased", "--trust", "--known", "--runs", "2", *options)
    done = subprocess.run(
        command(folder, out, *every), env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


def records(folder, out):
    return sorted((folder / out / "grid.jsonl").read_text().splitlines())


@pytest.fixture(scope="module")
def finished(folder):
    page = folder / "page.md"
    page.write_text(PAGE)
    return run(folder, "one", "--jobs", "1", "--write", str(page))


def test_results_do_not_depend_on_the_number_of_processes(folder, finished):
    again = run(folder, "two", "--jobs", "2")
    assert again.stdout == finished.stdout
    assert records(folder, "two") == records(folder, "one")


def test_a_second_call_runs_only_what_is_missing(folder, finished):
    log, before = folder / "one" / "grid.jsonl", records(folder, "one")
    again = run(folder, "one")
    assert "\n0 results were missing" in f"\n{again.stderr}"
    assert again.stdout == finished.stdout
    log.write_bytes(log.read_bytes()[:-9])  # stopped while it wrote a line
    assert "\n1 results were missing" in f"\n{run(folder, 'one').stderr.splitlines()[-1]}"
    whole = [line for line in records(folder, "one") if line.endswith("}")]
    assert whole == before


def test_a_page_changes_only_between_its_markers(folder, finished):
    page = (folder / "page.md").read_text()
    for name in PARTS:
        found = tables.marked(page, name)
        assert found[2].strip() in finished.stdout
        assert "|" in found[2]
        page = page[: found.start(2)] + "old\n" + page[found.end(2) :]
    assert page == PAGE


def test_a_page_without_a_part_is_refused_before_anything_runs(folder):
    (folder / "empty.md").write_text("nothing\n")
    options = ("--grid", "--write", str(folder / "empty.md"))
    done = subprocess.run(
        command(folder, "three", *options), env=environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "has no part <!-- grid:summary -->" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "three" / "grid.jsonl").exists()


def test_the_page_of_the_documentation_has_every_part():
    import grid

    names = [name for title, part in grid.PARTS.items() if title != "all" for name in part.reports]
    tables.check_page(ROOT / "docs/tide.md", [*names, "cost", "cost-cuda"])
    tables.check_page(ROOT / "docs/lab/methods.md", grid.PARTS["all"].reports)


def test_an_interrupt_ends_it_with_a_sentence_and_whole_lines(folder):
    log = folder / "four" / "grid.jsonl"
    process = subprocess.Popen(
        command(folder, "four", "--grid", "--runs", "300", "--jobs", "1"),
        env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from there" in printed
    assert "Traceback" not in printed
    assert all(json.loads(line) for line in log.read_text().splitlines())


def pack_of(name, n, k, seed=0):
    data = simulate(n, k, dim=16, seed=seed)
    return packs.Pack(name, "sim", data.features, data.text, data.labels, data.logit_scale, name)


def test_the_cells_of_ten_classes_with_fifty_samples_each():
    found = cells.cells([pack_of("ten", 500, 10)])
    words = ["64 1-4", "64 2-10", "64 5-10", "64 all", "all 1-4", "all 2-10", "all 5-10", "all all"]
    assert [" ".join(cell.words[1:3]) for cell in found if not cell.imbalance] == words
    assert len(found) == 2 * len(words)
    assert {cell.classes for cell in found if cell.few} == {(1, 4)}
    assert [cells.runs_of(cell, 100) for cell in found if not cell.imbalance] == [100] * 4 + [20] * 3 + [1]
    assert [cells.runs_of(cell, 100) for cell in found if cell.imbalance] == [100] * 4 + [20] * 3 + [5]


def test_thousand_samples_need_a_pool_of_as_many():
    found = cells.cells([pack_of("hundred", 2000, 100)])
    large = [cell.words[2] for cell in found if cell.size == 1000 and not cell.imbalance]
    assert large == ["50-100", "all"]  # 5-25 classes have 300 samples on average


def test_the_calibration_error_of_a_cell_is_that_of_all_its_samples_together():
    rng = np.random.default_rng(0)
    batches = [(rng.random(50).astype(np.float32), rng.random(50) < 0.7) for _ in range(3)]
    gaps = sum(measures.calibration_gaps(sure, hit) for sure, hit in batches)
    sure, hit = (np.concatenate(part) for part in zip(*batches, strict=True))
    expected = expected_calibration_error(hit, np.ones_like(hit), sure)
    assert np.abs(gaps).sum() / 150 == pytest.approx(expected, abs=1e-9)


def test_the_auroc_counts_pairs_and_half_of_the_ties():
    rng = np.random.default_rng(0)
    score, positive = rng.integers(4, size=40), rng.random(40) < 0.4
    pairs = np.sign(score[positive][:, None] - score[~positive][None, :])
    assert measures.auroc(score, positive) == pytest.approx((pairs.mean() + 1) / 2)


def test_negatives_are_classes_of_other_packs_only():
    first, second = pack_of("first", 60, 6), pack_of("second", 60, 6, seed=1)
    both = second._replace(text=np.concatenate([first.text[:2], second.text]))
    found = measures.negatives_for(first, {"first": first, "second": both})
    assert (found @ first.text.T).max() <= measures.SAME
    assert len(found) == ((second.text @ first.text.T).max(axis=1) <= measures.SAME).sum()
    assert len(measures.negatives_for(first, {"first": first, "second": second._replace(model="another")})) == 0


def test_known_labels_are_true_and_never_all_of_a_class():
    labels = np.repeat(np.arange(3), [1, 3, 9])
    known = cells.draw_known(cells.KnownCell("toy", 4, 13), labels, 0)
    assert (known[known >= 0] == labels[known >= 0]).all()
    assert np.bincount(labels[known >= 0], minlength=3).tolist() == [0, 2, 4]


def test_streams_and_their_table(folder):
    titles = ("zero_shot", "moon", "TIDE per batch", "tide")
    bench, log = work.Bench((folder / "six_sim.npz",)), {}
    jobs = [work.Job("stream", cells.StreamCell("six", "separate", 16), run, titles) for run in (0, 1)]
    for job in jobs:
        for title, numbers in bench(job)[1]:
            log[bench.key(job, title)] = numbers
    text = report_more.report_streams(work.Results(bench, jobs, log), titles)
    assert text.splitlines()[2].startswith("| 16 | ")
    assert "| six | 16 |" in text
    assert "| separate | 16 |" in text


def test_the_table_of_costs_has_a_row_for_each_shape():
    assert report_more.report_cost("cpu", [(20, 5, 5)]).splitlines()[-1].startswith("| 20 | 5 | all | ")


@pytest.mark.parametrize("title", ablations.ABLATIONS)
def test_an_ablation_changes_tide_and_puts_it_back(title):
    few, dense = simulate(40, 10, dim=32, effective_classes=3, seed=0), simulate(200, 10, dim=32, seed=0)
    noisy = unit_rows(dense.text + 0.1 * np.random.default_rng(0).normal(size=dense.text.shape))
    before, changed = dict(vars(tide)), []
    unsure = (dense.features, noisy, 20.0)
    for given in ((few.features, few.text, 100.0), (dense.features, dense.text, 100.0), unsure):
        with variants.applied(title) as method:
            less = method.fit_predict(*given[:2], logit_scale=given[2]).probs
        assert dict(vars(tide)) == before
        changed.append(not np.allclose(less, tide.TIDE().fit_predict(*given[:2], logit_scale=given[2]).probs))
    assert any(changed)
    assert variants.fingerprint(title) != variants.fingerprint("tide")


def test_an_ablation_of_nothing_is_refused(monkeypatch):
    monkeypatch.setitem(ablations.ABLATIONS, "without nothing", {"nothing": 0})
    with pytest.raises(SystemExit, match="is no part and no option of TIDE"), variants.applied("without nothing"):
        pass


def test_a_result_depends_on_the_method_and_the_maths_it_imports_only():
    found = {path.name for path in variants.sources(Path(tide.__file__))}
    assert {"tide.py", "graph.py", "simplex.py"} <= found
    assert not {"moon.py", "stata.py", "stream.py"} & found
