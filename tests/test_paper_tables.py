import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAPER = ROOT / "benchmarks" / "paper"
SOURCE = ROOT.parent / "shared" / "paper" / "moon.tex"
TABLES = {path.stem: tomllib.loads(path.read_text(encoding="utf-8"))["row"] for path in PAPER.glob("*.toml")}

DATASETS = [
    "imagenet", "sun397", "fgvc_aircraft", "eurosat", "stanford_cars", "food101", "oxford_pets", "oxford_flowers",
    "caltech101", "dtd", "ucf101",
]  # fmt: skip
ROWS = {  # scenarios x methods + rows that hold in every scenario, for every part of a table
    "main-batch": 2 * (3 * 7 + 2), "main-online": 4 * 7 + 2, "batch-sizes": 3 * (2 * 2 + 1),
    "backbones": 4 * (2 * (3 * 2 + 1) + (4 * 2 + 1)), "vlms": 3 * (3 * 2 + 1), "all-classes": 3,
    "random-classes": 6 * 3, "scaling": 7 * 2, "models": 8, "ablation": 5 * 2, "alpha-design": 3,
    "lambda-design": 2 * 5, "beta": 3 * 2, "variants": 4 * 3, "sample-wise": 4, "runtime": 3 * 5, "datasets": 11,
}  # fmt: skip
FULL = ["main-batch", "main-online", "batch-sizes", "backbones", "vlms", "all-classes", "random-classes"]

# What the paper prints and its own numbers contradict by more than rounding.
SLIPS = {
    "tab:app-more-bs: clip_vit_b16 128 medium stata: change of dtd printed +4.2, computed +3.6": (
        "47.1 against 43.5 is +3.6; the average of the row agrees with 47.1"
    )
}


def close(a, b):
    """Equal but for the rounding of a, and of every number that b was computed from, to one decimal."""
    return abs(a - b) <= 0.1 + 1e-9


def find(table, **facts):
    """Rows of a table with these facts."""
    return [row for row in TABLES[table] if all(row.get(key) == value for key, value in facts.items())]


def moon_average(table, **facts):
    """Mean of MOON's printed averages over the scenarios of a setting."""
    return mean(row["avg"] for row in find(table, method="moon", **facts))


def test_every_table_is_there_with_all_its_rows():
    assert {name: len(rows) for name, rows in TABLES.items()} == ROWS


@pytest.mark.parametrize("table", FULL)
def test_rows_hold_eleven_datasets_and_their_printed_average(table):
    for row in TABLES[table]:
        assert list(row["values"]) == DATASETS
        assert close(row["avg"], mean(row["values"].values())), row
        assert all(0 < value < 100 for value in row["values"].values())


@pytest.mark.parametrize("table", ["lambda-design", "beta"])
def test_averages_over_tasks_and_scenarios_are_the_printed_ones(table):
    assert all(close(row["avg"], mean(row["values"].values())) for row in TABLES[table])


@pytest.mark.parametrize("table", ["main-batch", "main-online"])
def test_the_main_tables_have_seven_methods_in_every_scenario(table):
    scenarios = {(row["batch_size"], row["scenario"]) for row in TABLES[table] if "scenario" in row}
    for size, scenario in scenarios:
        methods = {row["method"] for row in find(table, batch_size=size, scenario=scenario)}
        assert len(methods) == 7
        assert {"adapt", "stata", "moon"} <= methods
    if table == "main-batch":
        few, many = ("very_low", "low", "medium"), ("medium", "high", "very_high")
        assert scenarios == {(64, s) for s in few} | {(1000, s) for s in many}
    else:
        assert scenarios == {(128, s) for s in ("low", "medium", "high", "separate")}
        assert [row.get("xi") for row in find(table, method="moon")] == [0.1, 0.01, 0.001, None]


def test_no_two_rows_speak_of_the_same_thing():
    for table, rows in TABLES.items():
        facts = [str({k: v for k, v in row.items() if k not in ("values", "avg", "seconds")}) for row in rows]
        assert len(set(facts)) == len(facts), table


def test_zero_shot_and_mta_are_the_same_wherever_they_are_printed():
    for method in ("zero_shot", "mta"):
        printed = {}
        for table in FULL:
            for row in find(table, method=method):
                assert printed.setdefault(row["backbone"], row["values"]) == row["values"]


def test_tables_agree_with_one_another():
    for row in find("scaling", method="moon"):  # the mean over the three scenarios with batches of 1000
        table = "backbones" if row["backbone"].startswith("clip") else "vlms"
        parts = find(table, backbone=row["backbone"], batch_size=1000, method="moon")
        assert close(row["avg"], mean(part["avg"] for part in parts))
        assert close(row["values"]["imagenet"], mean(part["values"]["imagenet"] for part in parts))
    for row in find("beta", options={"beta": "hard"}):  # MOON as in the main tables
        for scenario, value in row["values"].items():
            (main,) = find(f"main-{row['setting']}", method="moon", batch_size=row["batch_size"], scenario=scenario)
            assert value == main["avg"]
    for row in find("ablation", options={}) + find("variants", method="moon"):
        assert close(row["avg"], moon_average(f"main-{row['setting']}", batch_size=row["batch_size"]))
    for row in TABLES["sample-wise"]:
        for main in find("main-online", method=row["method"], scenario="medium"):
            assert all(main["values"][dataset] == value for dataset, value in row["values"].items())
    (ours,) = find("alpha-design", options={"alpha": "1/lambda"})
    (main,) = find("main-batch", method="moon", batch_size=1000, scenario="medium")
    assert (ours["values"]["imagenet"], ours["avg"]) == (main["values"]["imagenet"], main["avg"])


def test_the_dataset_table():
    rows = {row["dataset"]: row for row in TABLES["datasets"]}
    assert sorted(rows) == sorted(DATASETS)
    assert (rows["dtd"]["classes"], rows["dtd"]["samples"], rows["dtd"]["template"]) == (47, 1692, "{} texture.")
    assert all(row["template"].count("{}") == 1 for row in rows.values())


@pytest.mark.skipif(not SOURCE.exists(), reason="the LaTeX source of the paper is not beside the repository")
def test_the_files_are_what_the_script_makes_of_the_paper(tmp_path):
    command = [sys.executable, str(PAPER / "transcribe.py"), str(SOURCE), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout.splitlines() == list(SLIPS)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_bytes() for path in PAPER.glob("*.toml")}


@pytest.mark.skipif(not SOURCE.exists(), reason="the LaTeX source of the paper is not beside the repository")
@pytest.mark.parametrize(
    ("printed", "changed", "report"),
    [
        (r"72.9\pos{6.3}", r"72.9\pos{7.3}", "very_low stata: change of imagenet printed +7.3, computed +6.3"),
        (r"72.9\pos{6.3}", r"72.9\negval{6.3}", "very_low stata: change of imagenet printed -6.3, computed +6.3"),
        (r"72.9\pos{6.3}", r"92.9\pos{26.3}", "very_low stata: average printed +70.4, computed +72.2"),
    ],
)
def test_the_script_reports_numbers_that_contradict_each_other(tmp_path, printed, changed, report):
    tex = tmp_path / "changed.tex"
    tex.write_text(SOURCE.read_text(encoding="utf-8").replace(printed, changed, 1), encoding="utf-8")
    command = [sys.executable, str(PAPER / "transcribe.py"), str(tex), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8")
    assert f"tab:main-batch: clip_vit_b16 64 {report}" in done.stdout.splitlines()
