"""What the README and the quick start tell to type runs: Python snippets, and commands on data made here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from moontide.cli import app, main
from moontide.cli.methods import GROUPS, group_of
from moontide.registry import method_names, method_type
from moontide.simulate import simulate
from moontide.store.toml import read_toml

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/quickstart.md")
TINY = find_spec("efficientnet_lite_pytorch") is not None  # the offline encoder, an extra


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", read(page), re.MULTILINE | re.DOTALL)


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command of a block."""
    for line in block.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the files that the pages speak of."""
    for kind in ("hat", "pants"):
        for photo in sorted((ROOT / "examples" / "clothing" / kind).iterdir())[:2]:
            (tmp_path / "examples" / "clothing" / kind).mkdir(parents=True, exist_ok=True)
            shutil.copy(photo, tmp_path / "examples" / "clothing" / kind)
    shutil.copy(ROOT / "examples" / "clothing.txt", tmp_path / "examples")
    names = [f"thing {k}" for k in range(12)]
    for seed, name in enumerate(("features", "monday", "tuesday")):
        data = simulate(80, 12, dim=32, effective_classes=4, class_names=names)
        rows = np.random.default_rng(seed).permutation(80)
        np.savez(
            tmp_path / f"{name}.npz", image_features=data.features[rows], text_features=data.text,
            labels=data.labels[rows], classnames=names, logit_scale=data.logit_scale,
        )  # fmt: skip
    (tmp_path / "labels.csv").write_text("id,label,confidence\na.jpg,hat,0.5\n")
    choice = {"value": {"choices": ["hat"]}}
    (tmp_path / "annotations.json").write_text(
        json.dumps([{"data": {"id": "a"}, "annotations": [{"result": [choice]}]}])
    )
    (tmp_path / "shards").mkdir()
    for i, rows in enumerate(np.split(data.features, 2)):
        np.save(tmp_path / "shards" / f"{i}.npy", rows)
    np.save(tmp_path / "classes.npy", data.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parses(words: list[str]) -> None:
    """Check that a command exists and has these options, without running it."""
    app.parse_args(words, exit_on_error=False, print_error=False)


def runs_here(arguments: list[str]) -> bool:
    """Tell whether a command ends by itself and needs no model of a hub."""
    if arguments[0] in ("classify", "encode", "export"):
        return TINY and "tiny" in arguments
    return arguments[0] not in ("serve", "undo")  # undo needs a folder that classify sorted; test_guides runs it


def run(words: list[str]) -> None:
    """Run a command of a page where it can run here, else check all that can be checked of it."""
    program, *arguments = words
    if program == "moontide" and not runs_here(arguments):
        parses(arguments)
    elif program == "moontide":
        assert main(arguments) == 0, f"{' '.join(words)} fails"
    elif program == "pip":
        extras = re.search(r"\[(.*)\]", words[-1])
        offered = read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
        assert not extras or set(extras[1].split(",")) <= set(offered)
    else:
        assert program.startswith("scripts/"), f"{program} is not a program that this test knows"
        assert os.access(ROOT / program, os.X_OK)


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, folder: Path) -> None:
    data = simulate(64, 12, dim=32)
    names = {"image_features": data.features, "text_features": data.text}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)  # later blocks use what earlier ones made
    assert names["result"].probs.shape[0] == 64


@pytest.mark.parametrize(("page", "block"), [(page, block) for page in PAGES for block in blocks(page, "bash")])
def test_the_commands_of_a_page_run(page: str, block: str, folder: Path) -> None:
    for words in commands(block):
        run(words)


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_in_the_text_of_a_page_exist(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", read(page), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"`moontide ([^`]+)`", text)
    assert found
    for words in map(shlex.split, found):
        assert words[0] in list(app)
        if len(words) > 1:
            parses(words)


def test_the_pages_say_the_two_commands() -> None:
    named = [words[0] for block in blocks("README.md", "bash") for words in commands(block)]
    assert {"scripts/demo", "moontide", "pip"} <= set(named)
    assert "`scripts/test`" in read("README.md")


def test_the_first_screen_of_the_readme_has_the_picture_the_table_and_three_commands() -> None:
    screen = "\n".join(read("README.md").splitlines()[:28])
    assert "docs/images/before_after.jpg" in screen
    assert "| TIDE |" in screen
    assert len([words for block in blocks("README.md", "bash")[:1] for words in commands(block)]) == 3
    assert blocks("README.md", "bash")[0] in screen + "\n"


def test_every_command_is_in_the_readme() -> None:
    named = {words[1] for block in blocks("README.md", "bash") for words in commands(block) if words[0] == "moontide"}
    assert named | {"demo"} == {name for name in app if not name.startswith("-")}  # scripts/demo runs that one


def test_the_table_of_methods_is_complete_and_true() -> None:
    page = "docs/methods.md"
    rows = [line for line in read(page).splitlines() if re.match(r"\| `\w+` \|.*\| (batch|online) \|", line)]
    table = {re.findall(r"`(\w+)`", row)[0]: row for row in rows}
    assert sorted(table) == sorted(method_names())
    groups = [group_of(name) for name in table]
    assert groups == sorted(groups, key=list(GROUPS).index)
    for name, row in table.items():
        cls = method_type(name)
        assert ("| online |" in row) == hasattr(cls, "step")
        for need in cls.needs:
            assert need in row
        assert f"| {cls.citation} |" in row
