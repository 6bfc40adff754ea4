"""The documentation says what is true: names that exist, links that lead somewhere, help that is current."""

from __future__ import annotations

import importlib
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moontide import MOON
from moontide import __version__ as version
from moontide.bench.toml import read_toml
from moontide.simulate import simulate

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts)]


def text_of(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolve(name: str) -> Any:
    """Return the object of a dotted name."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_objects_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"\{py:\w+\}`(?:[^`<]*<)?~?([\w.]+)>?`", page.read_text(encoding="utf-8"))
    assert named or page not in (DOCS / "maths.md", DOCS / "api" / "index.md")
    for name in named:
        resolve(name)
    for name in re.findall(r"automodule:: ([\w.]+)\n   :members: (.+)", page.read_text(encoding="utf-8")):
        for member in name[1].split(", "):
            resolve(f"{name[0]}.{member}")


def test_every_equation_of_the_code_is_on_the_maths_page() -> None:
    """Docstrings of `core.ple` cite equations by name; the page has each of those, with its function."""
    page = (DOCS / "maths.md").read_text(encoding="utf-8")
    source = (ROOT / "src/moontide/core/ple.py").read_text(encoding="utf-8")
    cited = set(re.findall(r'"""Eq\. ([a-z-]+)', source))
    assert len(cited) >= 9
    for name in cited:
        assert f"**{name} (" in page, name
    numbers = [int(n) for n in re.findall(r"\((\d+)\)(?:,[^.*]+)?\.\*\*", page)]
    assert numbers == [*range(1, 16), 18], "the equations of the main text, in order; (16) to (18) are one entry"


def test_the_table_of_released_and_written_is_the_presets() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| `([^`]+)` \|", (DOCS / "maths.md").read_text(), re.MULTILINE)
    specs, paper = MOON.specs(), MOON.presets["paper"]
    assert {name for name, _, _ in rows} == set(paper)
    for name, released, written in rows:
        assert released == str(specs[name].default)
        assert written == str(paper[name])
    assert math.isinf(paper["kappa_cap"])


def test_the_table_of_the_readme_is_that_of_the_lab_notes(capsys: pytest.CaptureFixture[str]) -> None:
    tables = runpy.run_path(str(DOCS / "make_tables.py"))
    assert tables["main"](["--check"]) == 0
    assert tables["headline"]().count("**") == 4  # the best of either row


def test_nothing_is_said_to_be_installed_from_an_index_that_does_not_have_it() -> None:
    for page in PAGES:
        assert "pip install moontide" not in page.read_text(encoding="utf-8")
        assert "pip install 'moontide" not in page.read_text(encoding="utf-8"), page


def test_sphinx_settings_load() -> None:
    settings = runpy.run_path(str(DOCS / "conf.py"))
    assert settings["version"] == version
    for extension in settings["extensions"]:
        importlib.import_module(extension)


def test_docstrings_become_plain_text() -> None:
    lines = ["Say `x_k` * 2.", "", "    A_d", "", ">>> 2 * 3", "6"]
    runpy.run_path(str(DOCS / "conf.py"))["plain_text"](None, "function", "f", None, None, lines)
    assert lines == ["Say ``x_k`` \\* 2.", "", "::", "", "        A_d", "", ">>> 2 * 3", "6", "", ""]


def test_the_help_page_is_the_same_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    page = runpy.run_path(str(DOCS / "cli_help.py"))
    first = page["render"]()
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert page["render"]() == first
    assert "\x1b" not in first
    assert "## moontide bench run\n" in first
    assert max(map(len, first.splitlines())) <= 120


def test_a_stale_help_page_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = runpy.run_path(str(DOCS / "cli_help.py"))
    main = page["main"]
    main.__globals__["PAGE"] = tmp_path / "cli.md"
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert main(["--check"]) == 0
    with (tmp_path / "cli.md").open("a") as handle:
        handle.write("more")
    assert main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err


def test_one_version_everywhere() -> None:
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_a_method_of_another_package_is_found_run_and_checked(tmp_path: Path) -> None:
    """The files of the page on extending, laid out as `pip install` would, work as the page says."""
    page = (DOCS / "extending.md").read_text(encoding="utf-8")
    files = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in files] == ["sharpened.py", "pyproject.toml", "test_sharpened.py"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    project = read_toml(tmp_path / "pyproject.toml")["project"]
    info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["moontide.methods"].items()
    (info / "entry_points.txt").write_text("[moontide.methods]\n" + "\n".join(f"{k} = {v}" for k, v in points))
    data = simulate(20, 4, dim=16)
    np.savez(tmp_path / "features.npz", image_features=data.features, text_features=data.text, labels=data.labels)

    def python(*arguments: str) -> str:
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    commands = [shlex.split(line) for line in re.findall(r"^moontide .+$", page, re.MULTILINE)]
    assert len(commands) == 3
    said = [python("-c", f"from moontide.cli import main; exit(main({words[1:]!r}))") for words in commands]
    assert "what the logit scale is multiplied by" in said[0]
    assert "adapted" in said[1]
    assert "sharpened" in said[2]
    assert "passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sharpened.py")
