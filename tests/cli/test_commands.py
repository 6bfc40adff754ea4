"""The commands that show things: version, help, methods, doctor, compare."""

import csv
import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

import moontide as library
from moontide.cli import app
from moontide.cli.compare import print_table
from moontide.evaluate import Outcome, compare_methods

COMMANDS = ["adapt", "stream", "compare", "methods", "doctor"]


def test_version_is_quick_to_say():
    code = """
import sys
from moontide.cli import main
assert main(["--version"]) == 0
heavy = {"scipy", "torch", "pyarrow", "safetensors", "matplotlib"} & sys.modules.keys()
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{library.__version__}\n", "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_and_says_what_each_flag_does(moontide, command):
    status, out, err = moontide(command, "--help")
    assert (status, err) == (0, "")
    assert f"moontide {command}" in out.partition("For example:")[2]
    for argument in app[command].assemble_argument_collection():
        assert argument.parameter.help or argument.name == "*", argument.name


def test_help_lists_the_commands_with_a_word_on_each(moontide):
    status, out, _ = moontide("--help")
    assert status == 0
    for command in COMMANDS:
        line = next(line for line in out.splitlines() if f" {command} " in line)
        assert len(line.strip("│ ").split()) > 3


def test_methods_lists_all_of_them(moontide):
    status, out, _ = moontide("methods")
    assert status == 0
    for name in library.method_names():
        assert f" {name} " in out
    assert "Huang et al., ICML 2026" in out
    assert "released, paper" in out


def test_methods_are_listed_by_group(moontide):
    lines = [line.split()[0] for line in moontide("methods")[1].splitlines() if line.split()]
    places = [lines.index(word) for word in ("ours", "tide", "the", "moon", "rivals", "otter")]
    assert places == sorted(places)


def test_methods_says_what_one_takes(moontide):
    assert "optional inputs: class_prior" in moontide("methods", "otter")[1]


def test_methods_shows_the_options_of_one(moontide):
    status, out, _ = moontide("methods", "moon")
    assert status == 0
    for name, spec in library.MOON.specs().items():
        line = next(line for line in out.splitlines() if line.strip().startswith(f"{name} "))
        assert str(spec.default) in line
    assert "an integer of at least 1" in out
    assert "preset paper: update=exact" in out


def test_methods_says_what_one_needs(moontide):
    assert "needs beyond features: views" in moontide("methods", "mta")[1]


def test_methods_as_json(moontide):
    found = json.loads(moontide("methods", "--json")[1])
    assert [method["name"] for method in found] == list(library.method_names())
    one = json.loads(moontide("methods", "moon", "--json")[1])
    assert one == next(method for method in found if method["name"] == "moon")
    assert one["presets"]["paper"]["kappa_cap"] == "inf"
    assert one["options"]["beta"]["allowed"] == "'hard' or 'soft'"


def test_doctor_sees_what_is_there(moontide):
    status, out, _ = moontide("doctor")
    assert status == 0
    lines = dict(line.split(maxsplit=1) for line in out.splitlines() if "  " in line)
    assert lines["numpy"] == np.__version__
    assert lines["devices"].startswith("cpu")
    assert lines["memory"].endswith("available")
    assert "CPU cores" in out


def test_doctor_sees_what_is_not_there(moontide, monkeypatch):
    module = importlib.import_module("moontide.cli.doctor")
    real = module.installed
    monkeypatch.setattr(module, "installed", lambda name: None if name == "pyarrow" else real(name))
    out = moontide("doctor")[1]
    assert "The extra 'parquet' lacks pyarrow. In Moontide's folder run: pip install '.[parquet]'" in out
    assert "All extras are installed" not in out


def test_compare_is_one_table_with_the_best_first(moontide, features, tmp_path):
    arguments = ["--methods", "zero_shot,moon,mta", "--out", tmp_path / "table.csv"]
    status, out, err = moontide("compare", features, *arguments)
    assert (status, err) == (0, f"wrote {tmp_path / 'table.csv'}\n")
    assert "peak memory" in out
    assert "mta skipped: The method mta needs augmented views" in out
    with open(tmp_path / "table.csv", encoding="utf-8", newline="") as handle:
        rows = {row["method"]: row for row in csv.DictReader(handle)}
    task_labels = np.load(features)["labels"]
    result = library.MOON().fit_predict(*(np.load(features)[f"{side}_features"] for side in ("image", "text")),
                                        logit_scale=20.0)  # fmt: skip
    assert float(rows["moon"]["accuracy"]) == pytest.approx(np.mean(result.labels == task_labels))
    assert int(rows["moon"]["changed"]) == result.changed.sum()
    assert float(rows["moon"]["seconds"]) > 0
    shares = [float(row["accuracy"]) for row in rows.values() if row["status"] == "ran"]
    assert shares == sorted(shares, reverse=True)
    assert list(rows)[-1] == "mta"


def test_compare_as_json_without_labels(moontide, tmp_path, arrays):
    np.savez(tmp_path / "f.npz", image_features=arrays["image_features"], text_features=arrays["text_features"])
    status, out, _ = moontide("compare", tmp_path / "f.npz", "--methods", "zero_shot", "--batch-size", "16", "--json")
    (row,) = json.loads(out)
    assert status == 0
    assert (row["method"], row["status"], row["accuracy"], row["changed"]) == ("zero_shot", "ran", None, 0)
    print_table([Outcome(**row)])  # without an accuracy to print


def test_compare_of_nothing_that_runs_has_another_status(moontide, features):
    assert moontide("compare", features, "--methods", "mta")[0] == 1


def test_one_failing_method_does_not_stop_the_others(features, tmp_path, monkeypatch):
    """A method of another package, registered by entry point, that cannot import what it needs."""
    (tmp_path / "broken.py").write_text("import no_such_module\n")
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[moontide.methods]\nbroken = broken:Broken\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code = f"""
import sys
from moontide.cli import main
sys.exit(main(["compare", {str(features)!r}, "--methods", "broken,zero_shot"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "broken failed: ModuleNotFoundError: No module named 'no_such_module'" in done.stdout
    assert "zero_shot" in done.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is measured on Linux only")
def test_peak_memory_is_that_of_the_run(tmp_path):
    rng = np.random.default_rng(0)
    n, k, d = 20_000, 200, 16
    np.savez(tmp_path / "f.npz", image_features=rng.normal(size=(n, d)), text_features=rng.normal(size=(k, d)))
    (outcome,) = compare_methods(tmp_path / "f.npz", ["zero_shot"])
    logits = n * k * 8
    assert 2 * logits < outcome.peak_bytes < 6 * logits


def test_piped_into_a_reader_that_stops_early():
    code = "import sys; from moontide.cli import main; sys.exit(main())"
    command = f"{sys.executable} -c '{code}' methods --json | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[\n", "")
