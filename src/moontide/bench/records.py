"""Records of runs, one line of JSON each: a killed process loses only the current run, and a torn line does no harm.

Every process writes its own file, `<suite>.<number>.jsonl`. A line is handed to the system before the next run starts,
and forced to the disk about a second later. Infinite options are written as the text "inf", as JSON has no number for
them.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import moontide
from moontide.errors import FileError
from moontide.options import json_safe

Record = dict[str, Any]
Key = tuple[Any, ...]
SYNC_SECONDS = 1.0


class Log:
    """A new file of records in a folder; it is created with the first line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Log(folder, "demo").write({"run": 0})
    ...     list(read_records(folder))
    [{'run': 0}]
    """

    def __init__(self, folder: str | Path, suite: str) -> None:
        self.folder, self.suite = Path(folder), suite
        self._path: Path | None = None
        self._synced = 0.0

    def write(self, record: Record) -> None:
        """Append a line and hand it to the system; once a second it is also forced to the disk."""
        line = json.dumps(json_safe(record), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            self._path = self._path or self._claim()
            with open(self._path, "ab") as handle:
                handle.write(line)
                handle.flush()
                if time.monotonic() - self._synced > SYNC_SECONDS:
                    os.fsync(handle.fileno())
                    self._synced = time.monotonic()
        except OSError as error:
            raise FileError(f"No record can be written to {self.folder}: {error.strerror}.") from error

    def _claim(self) -> Path:
        number = len(list(self.folder.glob(f"{self.suite}.*.jsonl")))
        while True:
            path = self.folder / f"{self.suite}.{number:03d}.jsonl"
            try:
                path.touch(exist_ok=False)
                return path
            except FileExistsError:  # another process took it
                number += 1


def read_records(folder: str | Path) -> Iterator[Record]:
    """Yield every record of the .jsonl files directly in a folder, leaving out a last line that was truncated.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.jsonl").write_text('{"run": 0}\\n{"ru')
    ...     list(read_records(folder))
    [{'run': 0}]
    """
    for path in sorted(Path(folder).glob("*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines[:-1], 1):  # what follows the last line end is empty, or torn
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                raise FileError(f"Line {number} of {path} is damaged; remove it and run the suite again.") from None
            yield record


def key(record: Record) -> Key:
    """Return the key of a run: two records with the same key are the same run done twice.

    >>> a = {"suite": "s", "version": 1, "dataset": "d", "features": "f", "scenario": {"id": "x"}, "run": 0}
    >>> key({**a, "method": "moon", "options": {}, "seconds": 1}) == key({**a, "method": "moon", "options": {}})
    True
    """
    try:
        options = json.dumps(json_safe(record["options"]), sort_keys=True)
        words = [record[name] for name in ("suite", "version", "dataset", "features")]
        return (*words, record["scenario"]["id"], record["run"], record["method"], options)
    except (KeyError, TypeError):
        raise FileError("A .jsonl file of the results is not of 'moontide bench run'; name another folder.") from None


def key_of_run(found: Key, run: int) -> Key:
    """Return the key of another run of the same method.

    >>> key_of_run(("s", 1, "d", "f", "x", 0, "moon", "{}"), 7)
    ('s', 1, 'd', 'f', 'x', 7, 'moon', '{}')
    """
    return (*found[:5], run, *found[6:])


def environment() -> Record:
    """Return the versions and the machine behind a record.

    >>> sorted(environment())
    ['commit', 'machine', 'moontide', 'numpy', 'python', 'torch']
    """
    return {
        "moontide": moontide.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "torch": _installed("torch"),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}, {os.cpu_count()} CPUs",
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown processor"


def _commit() -> str | None:
    """Return the git commit of this code, marked if it was changed since, or None outside a checkout."""
    here = Path(__file__)
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        found = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.decode().strip()
