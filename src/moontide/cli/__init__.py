"""The command line, one file per command. Bad input prints one sentence on stderr and exits with status 2.

Other statuses: 1 if a run found nothing to do or succeeded only in part, 130 after Ctrl-C, 143 after SIGTERM,
and 141 (silently, as other programs in a pipe) if the reader of the output has gone.

>>> main(["--version"])
0.2.0
0
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

from cyclopts import App, CycloptsError, Parameter

import moontide
from moontide.cli.adapt import adapt
from moontide.cli.bench import bench
from moontide.cli.classify import classify
from moontide.cli.common import note, value_of
from moontide.cli.compare import compare
from moontide.cli.completion import completion
from moontide.cli.demo import demo
from moontide.cli.doctor import doctor
from moontide.cli.encode import encode
from moontide.cli.export import export
from moontide.cli.export_labels import export_labels
from moontide.cli.import_labels import import_labels
from moontide.cli.methods import methods
from moontide.cli.output import CONFIG, NAMED, Defaults, everywhere, output, write_line
from moontide.cli.serve import serve
from moontide.cli.stream import stream
from moontide.cli.undo import undo
from moontide.errors import MoontideError, shorten, without_credentials
from moontide.interrupts import ending, leave, on_interrupt, until_it_came_through

app = App(
    "moontide",
    help="Better zero-shot labels by looking at the whole batch at once.",
    version=moontide.__version__,
    help_format="markdown",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
    default_parameter=Parameter(converter=value_of),
    config=Defaults(CONFIG, must_exist=bool(NAMED)),
)
# each imports what it needs when it is called
for command in (
    classify, encode, adapt, stream, compare, serve, export_labels, import_labels, export, methods, doctor, demo, undo,
    completion,
):  # fmt: skip
    app.command(everywhere(command))
app.command(bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of the process) and return the exit status."""
    own = arguments is None
    try:
        if own:
            on_interrupt(until_it_came_through)
        status = _speak(arguments)
        if own:
            on_interrupt(signal.SIG_IGN)
        return status
    except KeyboardInterrupt:
        status = _fail(*ending())
        if own:
            leave()
        return status


def _speak(arguments: Sequence[str] | None) -> int:
    """Run a command line with both outputs and with warnings of one sentence each."""
    _open_outputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _printer()
        try:
            return _run(arguments)
        except BrokenPipeError:  # the reader of our output, say `head`, has gone
            _drop_outputs()
            return 141


def _run(arguments: Sequence[str] | None) -> int:
    try:
        status = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return int(status or 0)
    except (CycloptsError, MoontideError) as error:
        return _fail(str(error), 2)
    except SystemExit as error:  # rich's way to end on a broken pipe
        raise error.__context__ or error from None
    except BrokenPipeError:
        raise
    except UnicodeEncodeError as error:
        what = error.object[error.start : error.end]
        if re.search("[\ud800-\udfff]", what):
            return _fail(f"{what!a} is half a character of UTF-16, which no file can hold; correct the name.", 2)
        return _fail(f"{what!a} cannot be written in the character set of this locale; set PYTHONUTF8=1.", 2)
    except OSError as error:
        if error.errno is None:
            raise
        if error.filename is None and isinstance(error, FileNotFoundError):  # of os.getcwd
            return _fail("The current folder does not exist any more; change to another one.", 2)
        if error.filename is None:  # a write to standard output: files have names
            _drop_outputs(sys.stdout)
            return _fail(f"Standard output cannot be written: {error.strerror}.", 2)
        return _fail(f"{os.fsdecode(error.filename)} cannot be read or written: {error.strerror}.", 2)
    except SystemError as error:  # Ctrl-C in the middle of a call of compiled code
        raise error.__cause__ if isinstance(error.__cause__, KeyboardInterrupt) else error from None
    except Exception as error:
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # numpy's or torch's
            return _fail("There is not enough memory; split the samples into batches (--batch-size).", 2)
        raise


def _open_outputs() -> None:
    """Have both outputs: where the caller has closed stdout, a write fails, and no file takes the number of either.

    What the character set of the locale lacks is written as \\xNN or \\uNNNN.
    """
    for number, name, way in ((1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, way)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        channel = getattr(sys, name)
        if isinstance(channel, io.TextIOWrapper):
            channel.reconfigure(errors="backslashreplace")


def _drop_outputs(*outputs: TextIO) -> None:
    """Let what is still to be written go nowhere, so that the end of the program does not fail once more."""
    null = os.open(os.devnull, os.O_WRONLY)
    for channel in outputs or (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # one without a number
            os.dup2(null, channel.fileno())
    os.close(null)


def _fail(sentence: str, status: int) -> int:
    with suppress(BrokenPipeError):
        write_line(without_credentials(f"error: {shorten(' '.join(sentence.split()))}"), sys.stderr)
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
            note(f"warning: {message}")

    return show
