"""docs/paper.md: all of the paper is on it, what it names exists, and its commands run on a feature file."""

import importlib
import re
import shlex
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
SUITES = sorted({span.split()[3] for span in SPANS if span.startswith("moontide bench run")})


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


@pytest.mark.parametrize("suite", SUITES)
def test_its_commands_run(suite, features, tmp_path, capsys):
    command = f"bench run {suite} --data {features} --runs 1 --out {tmp_path / 'results'}"
    assert main(shlex.split(command)) in (None, 0)
    assert list((tmp_path / "results").glob("*.jsonl"))


def test_the_report_command_runs(features, tmp_path, capsys):
    out = tmp_path / "results"
    assert main(shlex.split(f"bench run alpha-design --data {features} --runs 2 --out {out}")) in (None, 0)
    assert main(["bench", "report", str(out)]) in (None, 0)
    assert (out / "report" / "report.html").exists()


def test_the_benchmarks_that_are_named_exist():
    named = {match[1] for span in SPANS if (match := re.match(r"scripts/bench (\w+)", span))}
    assert {"clip_forward", "speed"} <= named
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in named)
