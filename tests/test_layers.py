"""No module imports upwards: what may import what is one list, lowest first."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src/moontide"
LAYERS = (
    ("cluster", "errors", "interrupts", "memory", "progress"),
    ("core", "metrics", "projection"),
    ("options", "types", "samplers", "simulate", "plausible", "multi", "views"),
    ("protocols",),
    ("methods", "registry"),
    ("store", "answers", "sorting"),
    ("streams", "engine", "evaluate", "unknown", "sklearn"),
    ("encoders", "checks"),
    ("bench",),
    ("report", "demo", "serve", "client"),
    ("classify", "integrations"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports(path: Path) -> Iterator[str]:
    """Yield the modules of moontide that a file imports, as names below the package."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "moontide":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("moontide.") for name in names if name.startswith("moontide."))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_imports_upwards(path: Path) -> None:
    own = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    if own == "__init__":  # the package itself offers what is below
        return
    layer = own.partition(".")[0]
    assert layer in RANK, f"{own} is in no layer"
    for name in imports(path):
        other = name.partition(".")[0]
        if other in RANK:
            assert RANK[other] <= RANK[layer], f"{own} imports {name}, which is above it"


def test_every_layer_is_there() -> None:
    there = {path.stem for path in SOURCE.iterdir()}
    assert set(RANK) <= there | {"__main__"}
