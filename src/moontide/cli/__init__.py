"""The command line, one file a command. Bad input gives one sentence on stderr and the exit status 2.

>>> main(["--version"])
0.2.0
0
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

from cyclopts import App, CycloptsError

import moontide
from moontide.cli.adapt import adapt
from moontide.cli.bench import bench
from moontide.cli.classify import classify
from moontide.cli.compare import compare
from moontide.cli.demo import demo
from moontide.cli.doctor import doctor
from moontide.cli.encode import encode
from moontide.cli.export import export
from moontide.cli.export_labels import export_labels
from moontide.cli.import_labels import import_labels
from moontide.cli.methods import methods
from moontide.cli.serve import serve
from moontide.cli.stream import stream
from moontide.errors import MoontideError

app = App(
    "moontide",
    help="Better zero-shot labels by looking at the whole batch at once.",
    version=moontide.__version__,
    help_format="markdown",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
# each imports its parts when it is called
for command in (
    classify, encode, adapt, stream, compare, serve, export_labels, import_labels, bench, export, methods, doctor, demo
):  # fmt: skip
    app.command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the program's own) and return the exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _printer()
        try:
            status = app(arguments, exit_on_error=False, print_error=False)
            sys.stdout.flush()
            return int(status or 0)
        except (CycloptsError, MoontideError) as error:
            return _fail(str(error), 2)
        except KeyboardInterrupt:
            return _fail("interrupted", 130)
        except BrokenPipeError:  # the reader of our output, say `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except Exception as error:
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # numpy's or torch's
                return _fail("There is not enough memory; split the samples into batches (--batch-size).", 2)
            raise


def _fail(sentence: str, status: int) -> int:
    print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    return status


def _printer() -> Any:
    """Return a replacement for `warnings.showwarning` that prints each sentence once."""
    seen = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    return show
