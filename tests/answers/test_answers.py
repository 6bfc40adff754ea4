"""Answers: none of the classes, levels of a tree, several classes; tables of every kind; folders, and their undoing."""

from __future__ import annotations

import csv
import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import moontide
from moontide import Result, Task
from moontide.answers import NONE_OF_THESE, UNSURE, answer
from moontide.cli import main
from moontide.errors import FileError, InputError, MoontideError, OptionError
from moontide.multi import multi_label
from moontide.simulate import simulate
from moontide.sorting import UNDO, apply, plan, undo
from moontide.store.tables import write_table

TREE = ["animal/dog/beagle", "animal/dog/pug", "animal/cat", "car"]


@pytest.fixture
def features(tmp_path: Path) -> Path:
    data = simulate(60, 4, seed=0)
    np.savez(tmp_path / "a.npz", image_features=data.features, text_features=data.text, labels=data.labels)
    return tmp_path / "a.npz"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as handle:
        return list(csv.DictReader(handle))


def test_the_share_that_is_least_like_any_class_is_none_of_these_in_every_table(features: Path, tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    pq = pytest.importorskip("pyarrow.parquet")
    for kind in ("csv", "json", "jsonl", "xlsx", "parquet", "npz"):
        out = tmp_path / f"out.{kind}"
        assert main(["adapt", str(features), "--classes", "a,b,c,d", "--unknown", "0.2", "--out", str(out)]) == 0
    held = rows(tmp_path / "out.csv")
    names = [row["class_name"] for row in held]
    assert names.count(NONE_OF_THESE) == 12
    assert {row["label"] for row in held if row["class_name"] == NONE_OF_THESE} == {"-1"}
    scores = np.asarray([float(row["unknown"]) for row in held])
    marked = np.asarray([name == NONE_OF_THESE for name in names])
    assert scores[marked].min() >= scores[~marked].max()
    tables = [json.loads((tmp_path / "out.json").read_text())]
    tables.append([json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()])
    tables.append(pq.read_table(tmp_path / "out.parquet").to_pylist())
    for table in tables:
        assert [row["class_name"] for row in table] == names
        for row in table:
            shares = [one["confidence"] for one in row["top5"]]
            assert shares == sorted(shares, reverse=True)
    sheet = list(openpyxl.load_workbook(tmp_path / "out.xlsx").active.values)
    assert [row[sheet[0].index("class_name")] for row in sheet[1:]] == names
    arrays = np.load(tmp_path / "out.npz")
    assert arrays["answers"].tolist() == names
    assert arrays["top5_labels"].shape == (60, 4)


def test_a_name_that_begins_like_a_formula_stays_a_text_in_a_workbook(features: Path, tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    out = tmp_path / "out.xlsx"
    assert main(["adapt", str(features), "--classes", "=1+1,b,c,d", "--out", str(out)]) == 0
    cells = [cell for row in openpyxl.load_workbook(out).active.iter_rows() for cell in row if cell.value == "=1+1"]
    assert cells
    assert all(cell.data_type == "s" for cell in cells)


def test_a_workbook_can_be_opened_whatever_its_names_hold(tmp_path: Path) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    names = ["a\x00b", "a\x1bb", "a\ud800b", "a\ufffeb", "a\uffffb", "a\udce9b"]
    with open(tmp_path / "out.xlsx", "wb") as handle:
        write_table(handle, {"name": names}, ".xlsx")
    held = [row[0] for row in openpyxl.load_workbook(tmp_path / "out.xlsx").active.values]
    assert held == ["name", *["a b"] * len(names)]


@pytest.mark.parametrize("rule", ["2", "-0.1", "many", ">", ">nan"])
def test_a_rule_for_the_unknown_that_is_none_is_refused(rule: str) -> None:
    result = Result(np.ones((2, 1)), np.ones((2, 1)), unknown=np.asarray([0.1, 0.2]))
    with pytest.raises(OptionError, match="'unknown' must be a share"):
        answer(result, ["a"], unknown=rule)


def test_a_method_that_does_not_score_the_unknown_says_so() -> None:
    with pytest.raises(InputError, match="use tide"):
        answer(Result(np.ones((2, 1)), np.ones((2, 1))), ["a"], unknown=0.5)


def test_known_samples_are_never_none_and_marked_ones_always_are() -> None:
    result = Result(np.eye(3), np.eye(3), unknown=np.asarray([0.9, 0.8, 0.1]))
    found = answer(result, list("abc"), unknown=0.34, known=np.asarray([0, -1, -1]), is_none=[False, False, True])
    assert found.texts == ["a", "b", NONE_OF_THESE]


def test_the_deepest_level_that_is_sure_enough_is_answered() -> None:
    paths = [tuple(name.split("/")) for name in TREE]
    probs = np.asarray([[0.9, 0.05, 0.05, 0.0], [0.5, 0.4, 0.1, 0.0], [0.4, 0.2, 0.3, 0.1], [0.3, 0.2, 0.1, 0.4]])
    names = [path[-1] for path in paths]
    found = answer(Result(probs, probs), names, roll_up=0.8, paths=paths)
    assert found.texts == ["beagle", "animal/dog", "animal", UNSURE]
    np.testing.assert_allclose(found.confidence[:3], [0.9, 0.9, 0.9])
    assert found.numbers(4).tolist() == [0, -1, -1, -1]


def test_a_class_with_others_below_it_is_an_answer_too() -> None:
    probs = np.asarray([[0.45, 0.5, 0.05]])
    found = answer(Result(probs, probs), ["dog", "pug", "cat"], roll_up=0.9, paths=[("dog",), ("dog", "pug"), ("cat",)])
    assert found.texts == ["dog"]


@pytest.mark.parametrize("sure", [0.5, 0.0, 1.1])
def test_two_answers_cannot_be_sure(sure: float) -> None:
    with pytest.raises(OptionError, match=r"above 0\.5"):
        answer(Result(np.eye(2), np.eye(2)), ["a", "b"], roll_up=sure, paths=[("a",), ("b",)])


def test_rolling_up_needs_a_tree(features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapt", str(features), "--classes", "a,b,c,d", "--roll-up", "0.8"]) == 2
    assert "needs classes in a tree" in capsys.readouterr().err
    (tmp_path / "tree.txt").write_text("\n".join(TREE))
    out = str(tmp_path / "out.csv")
    assert main(["adapt", str(features), "--classes", str(tmp_path / "tree.txt"), "--roll-up", "1", "--out", out]) == 0
    held = rows(tmp_path / "out.csv")
    assert {row["deepest"] for row in held} <= {"beagle", "pug", "cat", "car"}
    assert {row["class_name"] for row in held} & {"animal", "animal/dog", UNSURE}


def test_probabilities_of_several_classes_are_calibrated_and_find_both_of_two() -> None:
    data = simulate(600, 20, seed=1)
    truth = np.eye(20)[data.labels]
    task = Task(data.features, data.text)
    found = multi_label(task, moontide.TIDE().fit_predict(task))
    assert found.sum(axis=1).mean() == pytest.approx(1, abs=1e-6)
    sure = found > 0.5
    assert truth[sure].mean() == pytest.approx(found[sure].mean(), abs=0.1)
    other = np.random.default_rng(0).permutation(600)
    both = np.maximum(truth, truth[other])
    mixed = Task(data.features + data.features[other], data.text)
    pairs = multi_label(mixed, moontide.TIDE().fit_predict(mixed), per_image=both.sum(axis=1).mean())
    assert both[pairs > 0.5].mean() > 0.8
    assert (pairs > 0.5)[both > 0].mean() > 0.6


def test_several_classes_are_ranked_no_worse_than_by_the_method_and_listed_better() -> None:
    measures = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "multi.py"))["measures"]
    rng = np.random.default_rng(1)
    data = simulate(800, 30, effective_classes=10, seed=3)
    pairs = rng.integers(800, size=(400, 2))
    there = np.unique(data.labels)
    truth = np.eye(30, dtype=bool)[data.labels[pairs]].any(axis=1)
    task = Task(data.features[pairs].sum(axis=1), data.text, data.logit_scale)
    result = moontide.TIDE().fit_predict(task)
    found = multi_label(task, result, per_image=truth.sum(axis=1).mean())
    of_multi, of_tide = measures(found, truth), measures(np.asarray(result.probs, np.float64), truth)
    assert len(there) == 10
    assert of_multi[0] > of_tide[0] - 1  # by class
    assert of_multi[1] > of_tide[1] - 1  # by image
    assert of_multi[2] > of_tide[2] + 5  # F1
    assert of_multi[3] < of_tide[3]  # calibration


def images(folder: Path) -> list[Path]:
    folder.mkdir()
    found = [folder / f"{name}.jpg" for name in "abc"]
    for path in found:
        path.write_text(path.name)
    return found


@pytest.mark.parametrize("copy", [False, True])
def test_images_are_sorted_into_folders_and_back(tmp_path: Path, copy: bool) -> None:
    files, out = images(tmp_path / "in"), tmp_path / "out"
    moves = plan(files, ["cat", "none of these", "../cat"], [0.9, 0.8, 0.7], out, copy=copy)
    apply(moves, out)
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*.jpg"))
    assert found == ["_cat/c.jpg", "cat/a.jpg", "none of these/b.jpg"]
    assert (out / "cat" / "a.jpg").read_text() == "a.jpg"
    assert (out / "cat" / "a.jpg").is_symlink() != copy
    with pytest.raises(FileError, match="reverse that first"):
        apply(moves, out)
    assert undo(out) == 3
    assert not out.exists()
    assert [path.read_text() for path in files] == ["a.jpg", "b.jpg", "c.jpg"]


def test_what_was_changed_since_is_not_removed(tmp_path: Path) -> None:
    files, out = images(tmp_path / "in"), tmp_path / "out"
    apply(plan(files, ["x"] * 3, [1.0] * 3, out, copy=True), out)
    (out / "x" / "a.jpg").write_text("edited by hand")
    assert undo(out) == 2
    assert [path.name for path in out.rglob("*") if path.is_file()] == ["a.jpg"]


def test_images_are_renamed_where_they_are_and_back_even_onto_names_of_others(tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    moves = plan(files, ["b", "c", "a"], [1.0] * 3, pattern="{label}{name}")
    apply(moves, tmp_path / "in")
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["ac.jpg", "ba.jpg", "cb.jpg", UNDO]
    assert undo(tmp_path / "in") == 3
    assert [path.read_text() for path in files] == ["a.jpg", "b.jpg", "c.jpg"]


def test_a_failure_on_the_way_takes_all_back(tmp_path: Path) -> None:
    files, out = images(tmp_path / "in"), tmp_path / "out"
    moves = plan([*files, tmp_path / "in" / "gone.jpg"], ["x"] * 4, [1.0] * 4, out, copy=True)
    with pytest.raises(MoontideError, match="Everything was reversed"):
        apply(moves, out)
    assert not out.exists()


def test_nothing_is_replaced(tmp_path: Path) -> None:
    files = images(tmp_path / "in")
    (tmp_path / "in" / "xa.jpg").write_text("mine")
    with pytest.raises(FileError, match="is not overwritten"):
        apply(plan(files[:1], ["x"], [1.0], pattern="{label}{name}"), tmp_path / "in")
    assert (tmp_path / "in" / "xa.jpg").read_text() == "mine"
