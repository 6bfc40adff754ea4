"""The guides run as they are written, from top to bottom: Python, commands, and requests to a real server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from moontide.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted((DOCS / "guides").glob("*.md")), DOCS / "integrations.md", DOCS / "model_card.md"]
GUIDES = [*sorted((DOCS / "guides").glob("*.md")), *(DOCS / f"{name}.md" for name in (
    "classify", "encoders", "streams", "serve", "integrations", "scale", "notebooks"
))]  # fmt: skip
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
TINY = find_spec("efficientnet_lite_pytorch") is not None  # the offline encoder, an extra
NEEDS = {
    "integrations.md": ("datasets", "lancedb", "pyarrow"),
    "embeddings.md": ("cleanlab", "pandas", "sklearn"),
    "streams.md": ("fastapi", "httpx"),
    "photos.md": ("openpyxl",),
}


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the fenced blocks of Python and commands, in their order."""
    return re.findall(r"^```(python|bash)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with some of the photographs that come with the project."""
    for kind in ("hat", "pants", "shoes"):
        (tmp_path / "examples" / "clothing" / kind).mkdir(parents=True)
        for photo in sorted((ROOT / "examples" / "clothing" / kind).iterdir())[:4]:
            shutil.copy(photo, tmp_path / "examples" / "clothing" / kind)
    shutil.copy(ROOT / "examples" / "clothing.txt", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Shell:
    """Runs the commands of a page; a server that a page starts runs until the page ends, on a port of its own."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.address = "localhost:8000"  # as pages call it

    def run(self, block: str) -> None:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["moontide", "serve"]:
                self.serve(words[2:])
            elif words[:1] == ["moontide"]:
                assert main(words[1:]) == 0, line
            elif words[:1] == ["curl"]:
                self.curl(words)
            else:
                assert not words, f"{words[0]} is not a program that this test knows"

    def serve(self, words: list[str]) -> None:
        words = [word if word != "8000" else "0" for word in words]
        words += [] if "--port" in words else ["--port", "0"]
        program = "import sys; from moontide.cli import main; sys.exit(main())"
        self.server = subprocess.Popen(
            [sys.executable, "-c", program, "serve", *words], stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        self.address = re.findall(r"http://(\S+)", self.server.stdout.readline())[0]

    def curl(self, words: list[str]) -> None:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        words = [word.replace("localhost:8000", self.address) for word in words]
        done = subprocess.run(
            [*words, "--fail-with-body", "--retry", "5", "--retry-connrefused"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        json.loads(done.stdout)

    def close(self) -> None:
        if self.server is not None:
            self.server.terminate()
            assert self.server.wait(120) == 0
            assert self.server.stdout is not None
            self.server.stdout.close()


@pytest.fixture
def shell() -> Iterator[Shell]:
    made = Shell()
    yield made
    made.close()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_guide_runs_from_top_to_bottom(page: Path, folder: Path, shell: Shell) -> None:
    for package in NEEDS.get(page.name, ()):
        pytest.importorskip(package)
    text = page.read_text(encoding="utf-8")
    if "--encoder tiny" in text and not TINY:
        pytest.skip("the extra 'tiny' is not installed")
    names: dict[str, object] = {}
    found = blocks(page)
    assert found
    for language, block in found:
        if language == "bash":
            shell.run(block)
        else:
            code = block.replace("localhost:8000", shell.address)
            exec(compile(code, page.name, "exec"), names)  # later blocks use what earlier ones made


def test_the_photographs_end_with_labels_that_were_corrected(folder: Path, shell: Shell) -> None:
    if not TINY:
        pytest.skip("the extra 'tiny' is not installed")
    names: dict[str, object] = {}
    for language, block in blocks(DOCS / "guides" / "photos.md"):
        shell.run(block) if language == "bash" else exec(compile(block, "photos.md", "exec"), names)
    known = dict(line.rsplit(",", 1) for line in (folder / "corrections.csv").read_text().splitlines()[1:])
    labels = json.loads((folder / "tasks.json").read_text())
    given = {task["data"]["id"]: task["predictions"][0]["result"][0]["value"]["choices"][0] for task in labels}
    assert len(given) == 12
    assert {one: given[one] for one in known} == known


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_every_guide_has_a_picture(page: Path) -> None:
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    assert shown
    assert all((page.parent / path).is_file() for path in shown)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, as Jupyter runs it; nothing is written beside it."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if "tiny" in path.read_text() and not TINY:
        pytest.skip("the extra 'tiny' is not installed")
    monkeypatch.setenv("MPLBACKEND", "agg")
    source = str(ROOT / "src")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are kept without outputs"
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()


def test_there_are_three_notebooks_and_four_journeys() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["embeddings", "images", "stream"]
    assert [path.stem for path in sorted((DOCS / "guides").glob("*.md"))] == [
        "embeddings",
        "photos",
        "research",
        "streams",
    ]


def test_the_navigation_has_four_groups_and_every_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert re.findall(r":caption: (.+)", index) == ["Start", "Guides", "Reference", "Lab notes"]
    listed = set(re.findall(r"^([\w/]+)$", index, re.MULTILINE))
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert listed == {page for page in pages if not page.startswith("api/") and page != "index"} | {"api/index"}
