"""No module imports upwards: what may import what is the list of layers in ARCHITECTURE.md, lowest first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import moontide

SOURCE = Path(moontide.__file__).parent
ARCHITECTURE = (Path(__file__).parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
LAYERS = re.findall(r"^\d+\. (.*(?:\n   .*)*)", ARCHITECTURE.partition("## Layers")[2], re.M)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in re.findall(r"`(\w+)`", layer)}
FACADE = vars(moontide)["_MODULES"]  # what the package itself offers, and where each name comes from
FILES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of moontide that code uses, in functions too, as names below the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, "imports name their module in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # moontide.MOON
            names = [f"{node.value.id}.{node.attr}"]
        else:
            continue
        below = (name.removeprefix("moontide.") for name in names if name.startswith("moontide."))
        yield from (FACADE.get(name, name) for name in below)


@pytest.mark.parametrize("own", sorted(FILES))
def test_no_module_imports_upwards(own: str) -> None:
    layer = own.partition(".")[0]
    if layer in ("__init__", "__main__"):  # the package itself offers what is below, and the command starts it
        return
    assert layer in RANK, f"{own} is in no layer"
    for name in imports(ast.parse(FILES[own].read_text(encoding="utf-8"))):
        assert RANK.get(name.partition(".")[0], 0) <= RANK[layer], f"{own} imports {name}, which is above it"


def test_every_layer_is_there() -> None:
    assert len(LAYERS) > 5
    assert set(RANK) == {name.partition(".")[0] for name in FILES} - {"__init__", "__main__"}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("def f():\n    from moontide.cli import common", "cli.common"),
        ("import moontide\nx = moontide.Stream('moon')", "streams"),
        ("from moontide import method", "registry"),
        ("if TYPE_CHECKING:\n    import moontide.serve.state", "serve.state"),
    ],
)
def test_every_way_to_import_is_seen(code: str, name: str) -> None:
    assert name in list(imports(ast.parse(code)))


def test_no_two_rooms_import_each_other() -> None:
    used: dict[str, set[str]] = {room: set() for room in RANK}
    for own, path in FILES.items():
        room = own.partition(".")[0]
        if room in RANK:
            used[room] |= {name.partition(".")[0] for name in imports(ast.parse(path.read_text(encoding="utf-8")))}
    assert [(a, b) for a in used for b in used if a < b and b in used[a] and a in used[b]] == []
