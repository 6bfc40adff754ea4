import json

import numpy as np
import pytest


def test_run_twice_and_report(moontide, features, tmp_path):
    out = tmp_path / "results"
    command = (
        "bench",
        "run",
        "batch-64",
        "--data",
        features,
        "--methods",
        "zero_shot, moon",
        "--runs",
        2,
        "--out",
        out,
    )
    status, printed, notes = moontide(*command)
    assert (status, notes) == (0, f"12 runs done and 0 found in {out}\n")
    assert "scenario" in printed
    assert "MOON" in printed
    assert moontide(*command) == (0, printed, f"0 runs done and 12 found in {out}\n")
    records = [json.loads(line) for line in (out / "batch-64.000.jsonl").read_text().splitlines()]
    assert len(records) == 12
    status, reported, notes = moontide("bench", "report", out)
    assert (status, reported) == (0, printed)
    assert notes.splitlines()[0] == f"wrote {out / 'report' / 'report.html'}"
    assert (out / "report" / "report.html").exists()
    assert moontide("bench", "report", out, "--out", tmp_path / "elsewhere")[0] == 0
    assert (tmp_path / "elsewhere" / "report.md").exists()


def test_skipped_methods_are_named(moontide, features, tmp_path):
    data = features / "toy_vitb32.npz"
    command = (
        "bench",
        "run",
        "batch-64",
        "--data",
        data,
        "--methods",
        "moon,mta",
        "--runs",
        1,
        "--out",
        tmp_path / "r",
    )
    status, _, notes = moontide(*command)
    assert status == 0
    assert "skipped: mta on toy: it needs views." in notes


def test_data_of_which_none_can_be_used_are_bad_input(moontide, features, tmp_path):
    np.savez(tmp_path / "a.npz", image_features=np.eye(2), text_features=np.eye(2))
    line = ("bench", "run", "batch-64", "--methods", "moon", "--runs", "1", "--out", tmp_path / "r", "--data")
    status, _, notes = moontide(*line, tmp_path / "a.npz")
    assert status == 2
    assert "a.npz has no labels to score with." in notes
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "batch-65", "--data", "."), "There is no suite 'batch-65'. Did you mean 'batch-64'?"),
        (("run", "batch-64", "--data", "nowhere"), "There is no file or folder nowhere with features."),
        (("run", "batch-64", "--data", ".", "--methods", "mooon"), "There is no method 'mooon'. Did you mean 'moon'?"),
        (("run", "batch-64", "--data", ".", "--runs", "0"), "'runs' must be at least 1. Got 0 instead."),
        (("run", "batch-64", "--data", ".", "--jobs", "0"), "'jobs' must be at least 1. Got 0 instead."),
        (("run", "batch-64", "--data", ".", "--methods", "moon", "--encoder", "no"), "'--encoder' has no effect"),
        (("report", "nowhere"), "There are no results in nowhere"),
    ],
)
def test_mistakes_get_a_sentence(moontide, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    status, out, notes = moontide("bench", *arguments)
    assert (status, out) == (2, "")
    assert notes.startswith("error: ")
    assert words in notes
    assert list(tmp_path.iterdir()) == []  # nothing was written


def test_the_list_of_suites(moontide):
    status, out, _ = moontide("bench", "list")
    assert status == 0
    assert "batch-64 v1" in out
    assert "without update of kappa" in out
