"""Read the TOML files that describe suites, datasets and the paper's tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moontide.store.disk import reading, text_of

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file.

    >>> read_toml(Path("no-such-suite.toml"))
    Traceback (most recent call last):
        ...
    moontide.errors.FileError: There is no file no-such-suite.toml.
    """
    text = text_of(path)
    with reading(path):
        return tomllib.loads(text)


def toml_files(folder: str) -> dict[str, Path]:
    """Return the files of a folder of `moontide/bench` by name.

    >>> "batch-64" in toml_files("suites")
    True
    """
    return {path.stem: path for path in sorted((Path(__file__).parents[1] / "bench" / folder).glob("*.toml"))}
