"""Options of every command: output, seed, and defaults from a configuration file.

`everywhere` adds the options to a command. While it runs, `say` prints a line of its summary, `emit` names a value for
`--json`, and `seed` is the seed. A file `moontide.toml` in the working folder (or that of the environment variable
MOONTIDE_CONFIG, which must exist then) has defaults, one table per command:

    [adapt]
    method = "moon"
    batch-size = 64

    [bench.run]
    runs = 20
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
from cyclopts import CycloptsError, Group, Parameter
from cyclopts.config import Toml

from moontide.errors import FileError, without_credentials

NAMED = os.environ.get("MOONTIDE_CONFIG", "")
CONFIG = Path(NAMED or "moontide.toml")
EVERYWHERE = Group("Every command")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
LINES = "lines"  # printed lines, for commands without other JSON
WHOLE = ""  # the name of a value that is the whole output


class Defaults(Toml):
    """The configuration file, with errors of one sentence."""

    def _load_config(self, path: Path) -> dict[str, Any]:
        from moontide.store.toml import read_toml

        try:
            return read_toml(path)
        except FileError as error:
            raise CycloptsError(msg=str(error)) from None


@Parameter(name="*", group=EVERYWHERE)
@dataclass(frozen=True)
class Output:
    """Options of every command."""

    as_json: Annotated[
        bool,
        Parameter(
            name="--json",
            negative="",
            show_default=False,
            help="Print the answer as JSON, and nothing else on standard output.",
        ),
    ] = False
    quiet: Annotated[
        bool, Parameter(negative="", show_default=False, help="Print no notes, warnings, progress or summary.")
    ] = False
    seed: Annotated[int | None, Parameter(help="Random seed (default: 0).")] = None
    print_config: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help=f"Print the options in effect, with {CONFIG.name}, and exit.",
        ),
    ] = False


NO_OUTPUT = Output()
_output: ContextVar[Output] = ContextVar("moontide_output", default=NO_OUTPUT)
_values: ContextVar[dict[str, Any] | None] = ContextVar("moontide_values", default=None)


def output() -> Output:
    """Return the output options of the current command.

    >>> output().quiet
    False
    """
    return _output.get()


def say(line: str) -> None:
    """Print a line of the summary, unless --quiet is set.

    >>> say("changed    3 of 9")
    changed    3 of 9
    """
    if not output().quiet:
        write_line(line, sys.stdout)


def write_line(line: str, channel: TextIO) -> None:
    """Print a line on an output; on stderr, one that cannot be written is lost, and changes nothing.

    >>> write_line("done", sys.stdout)
    done
    """
    try:
        print(printable(line), file=channel)
    except BrokenPipeError:
        raise
    except OSError:
        if channel is not sys.stderr:
            raise


def printable(text: str) -> str:
    r"""Return a text whose control characters, which a name may hold, do nothing to a terminal.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def counted(number: int, what: str) -> str:
    """Write a number of things.

    >>> counted(1, "image"), counted(2, "batch"), counted(0, "class")
    ('1 image', '2 batches', '0 classes')
    """
    plural = "" if number == 1 else "es" if what.endswith(("s", "ch")) else "s"
    return f"{number} {what}{plural}"


def emit(**values: Any) -> None:
    """Add named values to the output of --json.

    >>> emit(changed=3)
    """
    held = _values.get()
    if held is not None:
        held.update(values)


def emit_whole(value: Any) -> None:
    """Make a value the whole output of --json, for commands whose result is a list.

    >>> emit_whole([1, 2])
    """
    emit(**{WHOLE: value})


def seed() -> int:
    """Return the random seed.

    >>> seed()
    0
    """
    return output().seed or 0


@contextmanager
def speaking(chosen: Output) -> Iterator[None]:
    """Apply the output options to a command: with --json, only its values are printed, at the end.

    >>> with speaking(Output(as_json=True)):
    ...     say("changed    3 of 9")
    ...     emit(changed=3)
    {
      "changed": 3
    }
    """
    if chosen.seed is not None:
        _sow(chosen.seed)
    token, values = _output.set(chosen), _values.set({})
    try:
        if not chosen.as_json:
            yield
            return
        printed = io.StringIO()
        with redirect_stdout(printed):
            yield
        found = _values.get() or {LINES: printed.getvalue().splitlines()}
        print(json.dumps(plain(found.get(WHOLE, found)), ensure_ascii=False, allow_nan=False, indent=2))
    finally:
        _output.reset(token)
        _values.reset(values)


def _sow(number: int) -> None:
    """Seed every global random generator that a method of another package may use."""
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002 - others may use it
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(number)


def plain(value: Any) -> Any:
    """Convert a value to plain JSON: paths become text, arrays lists, and non-finite numbers null.

    >>> plain({"a": Path("b"), "c": float("nan")})
    {'a': 'b', 'c': None}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value if isinstance(value, str | int | type(None)) else str(value)


def everywhere(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command with the common options added.

    >>> def adapt(*, batch_size: int = 1) -> None:
    ...     say(f"in batches of {batch_size}")
    >>> _ = everywhere(adapt)(batch_size=4, output=Output(print_config=True))
    batch-size = 4
    """
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(*values: Any, output: Output = NO_OUTPUT, **options: Any) -> Any:
        if output.print_config:
            bound = signature.bind_partial(*values, **options)
            bound.apply_defaults()
            print_config(bound.arguments)
            return 0
        with speaking(output):
            return command(*values, **options)

    added = inspect.Parameter("output", inspect.Parameter.KEYWORD_ONLY, default=NO_OUTPUT, annotation=Output)
    del run.__wrapped__
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), added])  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()} | {"output": Output}
    return run


def print_config(arguments: Mapping[str, Any]) -> None:
    """Print the options of a command as a table for moontide.toml, without credentials.

    >>> print_config({"method": None, "shuffle": True, "template": ("a {}",)})
    # method is not set
    shuffle = true
    template = ["a {}"]
    """
    for name, value in arguments.items():
        if is_dataclass(value) and not isinstance(value, type):
            print_config({_called(value, one.name): getattr(value, one.name) for one in fields(value)})
        elif value is None:
            print(f"# {name.replace('_', '-')} is not set")
        else:
            print(without_credentials(f"{name.replace('_', '-')} = {json.dumps(plain(value), ensure_ascii=False)}"))


def _called(held: Any, name: str) -> str:
    """Return the name of an option on the command line, if it differs from the name of its field."""
    hints = inspect.get_annotations(type(held), eval_str=False)
    text = str(hints.get(name, ""))
    found = re.search(r"name=['\"]--([\w-]+)", text)
    return found[1] if found else name
