"""docs/paper.md: all of the paper is on it, what it names exists, and its commands run on a feature file."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from moontide.bench.suites import suite_names
from moontide.cli import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from paper_parts.pages import ITEMS  # noqa: E402

PAGE = (ROOT / "docs/paper.md").read_text(encoding="utf-8")
SPANS = [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", PAGE)]
RUNS = sorted({span for span in SPANS if span.startswith("moontide bench run")})
SUITES = sorted({span.split()[3] for span in RUNS})


def test_every_suite_has_a_row_and_no_row_is_missing():
    assert {suite for _, suite in ITEMS} == set(suite_names()) == set(SUITES)
    assert "missing" not in PAGE.lower()


def test_every_file_that_is_named_exists():
    named = [span for span in SPANS if re.match(r"(tests|src|benchmarks|docs)/", span)]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_function_that_is_named_exists():
    for span in SPANS:
        if match := re.fullmatch(r"(core(?:\.\w+)*)\.(\w+)", span):
            module = f"moontide.{match[1]}"
            try:
                assert hasattr(importlib.import_module(module), match[2]), span
            except ModuleNotFoundError:
                pytest.fail(f"{span}: there is no {module}")


@pytest.mark.parametrize("span", [span for span in RUNS if "IMAGES" not in span])
def test_its_commands_run(span, features, tmp_path, capsys):
    if "--device cuda" in span and not cuda():
        span = span.replace("--device cuda", "--device cpu")
    words = [str(features) if word == "FEATURES" else word for word in shlex.split(span)[1:]]
    assert main([*words, "--runs", "1", "--out", str(tmp_path / "results")]) in (None, 0)
    assert list((tmp_path / "results").glob("*.jsonl"))


def cuda():
    torch = pytest.importorskip("torch")
    return torch.cuda.is_available()


def test_the_report_command_runs(features, tmp_path, capsys):
    out = tmp_path / "results"
    assert main(shlex.split(f"bench run alpha-design --data {features} --runs 2 --out {out}")) in (None, 0)
    assert main(["bench", "report", str(out)]) in (None, 0)
    assert (out / "report" / "report.html").exists()


def test_the_benchmarks_that_are_named_take_their_options():
    blocks = [line for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    named = [shlex.split(span)[1:] for span in (*SPANS, *blocks) if span.startswith("scripts/bench")]
    assert {"clip_forward", "speed", "paper"} <= {name for name, *_ in named}
    for name, *options in named:
        process = subprocess.run(
            [sys.executable, ROOT / f"benchmarks/{name}.py", "--help"], capture_output=True, text=True
        )
        assert process.returncode == 0, name
        unknown = [word for word in options if word.startswith("--") and not re.search(rf"{word}\b", process.stdout)]
        assert unknown == [], (name, unknown)
