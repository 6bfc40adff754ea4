"""Read the TOML files that describe suites, datasets and the paper's tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from moontide.errors import FileError

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
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"There is no file {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise FileError(f"{path} cannot be read as TOML ({error}).") from error


def toml_files(folder: str) -> dict[str, Path]:
    """Return the files of a folder of this package by name.

    >>> "batch-64" in toml_files("suites")
    True
    """
    return {path.stem: path for path in sorted((Path(__file__).parent / folder).glob("*.toml"))}
