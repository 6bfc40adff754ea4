"""The command line, one file a command. Bad input gives one sentence on stderr and the exit status 2.

>>> main(["--version"])
0.2.0
0
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from cyclopts import App, CycloptsError
from cyclopts.config import Toml

import moontide
from moontide.cli.adapt import adapt
from moontide.cli.bench import bench
from moontide.cli.classify import classify
from moontide.cli.compare import compare
from moontide.cli.completion import completion
from moontide.cli.demo import demo
from moontide.cli.doctor import doctor
from moontide.cli.encode import encode
from moontide.cli.export import export
from moontide.cli.export_labels import export_labels
from moontide.cli.import_labels import import_labels
from moontide.cli.methods import methods
from moontide.cli.output import CONFIG, everywhere, output
from moontide.cli.serve import serve
from moontide.cli.stream import stream
from moontide.cli.undo import undo
from moontide.errors import MoontideError, shorten

INTERRUPTED = 130  # the exit status after Ctrl-C

app = App(
    "moontide",
    help="Better zero-shot labels by looking at the whole batch at once.",
    version=moontide.__version__,
    help_format="markdown",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    config=Toml(CONFIG),
)
# each imports its parts when it is called
for command in (
    classify, encode, adapt, stream, compare, serve, export_labels, import_labels, export, methods, doctor, demo, undo,
    completion,
):  # fmt: skip
    app.command(everywhere(command))
app.command(bench)


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
            return _interrupted(leave=arguments is None)
        except BrokenPipeError:  # the reader of our output, say `head`, has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        except Exception as error:
            if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # numpy's or torch's
                return _fail("There is not enough memory; split the samples into batches (--batch-size).", 2)
            raise


def _interrupted(leave: bool) -> int:
    """Say that the run was stopped, and leave the process at once where it is the program's own.

    Compiled loops may still be at work in other threads. To take the interpreter apart under them can crash it, and a
    second Ctrl-C would be met half-way: so what is registered for the exit is done, and no more.
    """
    if not leave:
        return _fail("interrupted", INTERRUPTED)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _fail("interrupted", INTERRUPTED)
    with suppress(Exception):
        atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(INTERRUPTED)


def _fail(sentence: str, status: int) -> int:
    print(f"error: {shorten(' '.join(sentence.split()))}", file=sys.stderr)
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
        if str(message) not in seen and not output().quiet:
            seen.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    return show
