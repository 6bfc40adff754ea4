"""The documentation says what is true: names that exist, links that lead somewhere, help that is current."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from moontide import MOON, Task
from moontide import __version__ as version
from moontide.checks.tasks import embeddings
from moontide.methods.moon import VMFMixture
from moontide.samplers.vmf import sample

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


def test_what_the_maths_page_names_for_moon_is_what_moon_runs() -> None:
    """Every function beside an equation of the main text or a line of Alg. 1 is called, if options ask for it."""
    page = (DOCS / "maths.md").read_text(encoding="utf-8")
    main_text = page[page.index("## The problem") : page.index("**Sample-wise")]
    named = {resolve(name) for name in re.findall(r"\{py:func\}`[^`<]*<(moontide[\w.]+)>`", main_text)}
    lines = inspect.getdoc(VMFMixture) or ""
    assert {int(n) for n in re.findall(r"\b\d+\b", lines.partition(":")[2])} == {*range(1, 14)} - {6}  # which is `for`
    named |= {resolve(f"moontide.core.{name}") for name in re.findall(r"\b(?:ple|graph|formulas)\.\w+", lines)}
    wanted = {function.__code__: function.__name__ for function in named - {sample}}  # that one only draws
    assert len(wanted) > 15
    called = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in wanted:
            called.add(frame.f_code)

    task = Task(*embeddings(24, 12, 64))
    sys.setprofile(note)
    try:
        MOON(gamma="zero_shot").fit_predict(task)
        MOON(inverse="newton", log_normaliser="accurate").fit_predict(task)
    finally:
        sys.setprofile(None)
    assert {wanted[code] for code in wanted.keys() - called} == set()


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


def test_no_page_installs_from_an_index_that_does_not_have_the_package() -> None:
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
