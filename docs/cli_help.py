"""Write docs/cli.md from the help of every command; with --check, fail where that page is stale.

python docs/cli_help.py
python docs/cli_help.py --check
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

from cyclopts import App
from rich.console import Console

from moontide.cli import app

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100

INTRODUCTION = """# Command line

This page shows the output of `moontide COMMAND --help`; `python docs/cli_help.py` generates it. [](quickstart.md) has
examples.

Bad input prints one sentence on standard error, exits with status 2 and writes nothing; so does a standard output that
is full or closed. Messages that cannot be written are lost, and change nothing. The status is 130 after Ctrl-C, 143
after SIGTERM, and 141 if the reader of a pipe has gone. The user, password and query of a URL are never printed.
"""


def command_paths(group: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, each group before its own commands."""
    yield path
    for name in sorted(name for name in group if not name.startswith("-")):
        yield from command_paths(group[name], (*path, name))


def help_of(path: tuple[str, ...]) -> str:
    """Return the help of a command as plain text of fixed width."""
    page = io.StringIO()
    app.help_print(path, console=Console(file=page, width=WIDTH, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in page.getvalue().strip().splitlines())


def render() -> str:
    """Return the page."""
    sections = [f"## {' '.join(('moontide', *path))}\n\n```text\n{help_of(path)}\n```\n" for path in command_paths(app)]
    return "\n".join([INTRODUCTION, *sections])


def main(arguments: list[str]) -> int:
    """Write or check the page, and return the exit status."""
    if arguments not in ([], ["--check"]):
        print("usage: python docs/cli_help.py [--check]", file=sys.stderr)
        return 2
    if not arguments:
        PAGE.write_text(render(), encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != render():
        print("docs/cli.md is stale; run: python docs/cli_help.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
