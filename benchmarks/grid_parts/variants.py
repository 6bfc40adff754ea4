"""Methods by title: a registered one, TIDE without one of its parts, or one that is used in another way."""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import moontide
from grid_parts.ablations import ABLATIONS
from moontide.core import tide as equations
from moontide.methods import tide
from moontide.protocols import Method
from moontide.registry import method_type

NAMES = {
    "zero_shot": "zero-shot",
    "stata": "StatA",
    "moon": "MOON",
    "gda_clip": "GDA-CLIP",
    "tide": "TIDE",
}
# Ways to use a method, and which one it is: whose source a result depends on.
USES = {
    "MCM": "zero_shot",
    "prototypes": "zero_shot",
    "TIDE per batch": "tide",
    "TIDE with labels": "tide",
    "TIDE with negatives": "tide",
}


def name_of(title: str) -> str:
    """Return the name of a method in tables."""
    return NAMES.get(title, title)


def method_of(title: str) -> str:
    return "tide" if title in ABLATIONS else USES.get(title, title)


@contextmanager
def applied(title: str) -> Iterator[Method]:
    """Yield the method of a title; parts of TIDE that the title leaves out are disabled until the end of the block."""
    changes = ABLATIONS.get(title, {})
    options = {key: value for key, value in changes.items() if key in tide.TIDE.specs()}
    functions = {key: value for key, value in changes.items() if key not in options}
    places = {key: equations if hasattr(equations, key) else tide for key in functions}
    missing = [key for key, place in places.items() if not hasattr(place, key)]
    if missing:
        raise SystemExit(f"{missing[0]!r}, which the ablation {title!r} replaces, is no part and no option of TIDE.")
    before = {key: getattr(place, key) for key, place in places.items()}
    for key, value in functions.items():
        setattr(places[key], key, value)
    try:
        yield moontide.method(method_of(title), **options)
    finally:
        for key, value in before.items():
            setattr(places[key], key, value)


@cache
def fingerprint(title: str) -> str:
    """Return a hash of all the code and options that a result of this title depends on.

    These are the method's file, what it imports of `moontide.methods` and `moontide.core`, and what those import; the
    files that draw and measure; and what an ablation puts in the place of parts.
    """
    digest = hashlib.sha256(title.encode())
    here = Path(__file__).parent
    files = sources(Path(inspect.getfile(method_type(method_of(title)))))
    for path in [*files, here / "cells.py", here / "measures.py"]:
        digest.update(path.name.encode() + path.read_bytes())
    for key, value in sorted(ABLATIONS.get(title, {}).items()):
        digest.update(f"{key}={inspect.getsource(value) if callable(value) else repr(value)}".encode())
    return digest.hexdigest()


def sources(file: Path) -> list[Path]:
    """Return a file and those of the methods and the maths of moontide that it imports, directly or not, in order."""
    found, queue = set(), [file]
    while queue:
        path = queue.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            queue += [_file(name) for name in names if name.startswith(("moontide.core.", "moontide.methods."))]
    return sorted(found)


def _file(module: str) -> Path:
    """Return where a module of moontide lies; a name inside a module lies nowhere."""
    return Path(moontide.__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
