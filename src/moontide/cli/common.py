"""Options and output that several commands share: inputs, methods, and summaries of results."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Group, Parameter

from moontide.cli.output import counted, emit, output, say, write_line
from moontide.errors import FileError, OptionError, shorten, without_credentials

if TYPE_CHECKING:
    from cyclopts import Token
    from rich.console import Console

    from moontide.answers import Answers
    from moontide.evaluate import Comparison
    from moontide.protocols import Method
    from moontide.types import Result, Task

INPUT = Group("Input")
SHOWN_CLASSES, SHOWN_GROUPS = 5, 20
DIGITS = 18  # the most digits of an integer, which then fits into 64 bits
CLASS_FILES = (
    "a comma-separated list; a .txt with one per line; a .json, a list or names with synonyms and descriptions; or a "
    ".csv or .tsv with a column 'name'"
)

Features = Annotated[
    Path,
    Parameter(
        help="Image embeddings: a store made by 'moontide encode'; an .npz with image_features, text_features and, "
        "optionally, labels, classnames, logit_scale or temperature, view_features; or an .npy, .safetensors, "
        ".parquet, .csv or .pt together with --text.",
        group=INPUT,
    ),
]
BatchSize = Annotated[int | None, Parameter(help="Samples per batch; the last batch may be smaller.")]


@Parameter(name="*", group=INPUT)
@dataclass(frozen=True)
class Source:
    """Options for the input that goes with the image embeddings."""

    text: Annotated[
        Path | None,
        Parameter(help="Class embeddings, in a file or store of the same kinds; overrides those in FEATURES."),
    ] = None
    classes: Annotated[str | None, Parameter(help=f"Class names: {CLASS_FILES}.")] = None
    labels: Annotated[
        Path | None,
        Parameter(
            help="True classes (names, or numbers from 0), only for scoring: an .npy, or a text file with one per line."
        ),
    ] = None
    logit_scale: Annotated[
        float | None, Parameter(help="Logit scale of the model, 1 / temperature (default: that of the file, or 100).")
    ] = None
    dtype: Annotated[
        Literal["float32", "float64"] | None,
        Parameter(help="Precision of the computation (default: float64 for a float64 file, otherwise float32)."),
    ] = None
    device: Annotated[
        str,
        Parameter(help="Device: cpu uses numpy; cuda, cuda:1 or mps use torch, which must be installed."),
    ] = "cpu"


@Parameter(name="*")
@dataclass(frozen=True)
class Choice:
    """Options for the method.

    >>> Choice(settings=("beta=soft", "neighbours=5")).make("moon").neighbours
    5
    """

    method: Annotated[str | None, Parameter(help="The method (default: tide); 'moontide methods' lists all.")] = None
    preset: Annotated[str | None, Parameter(help="A named set of options of the method.")] = None
    settings: Annotated[
        tuple[str, ...],
        Parameter(
            name="--set",
            negative="",
            show_default=False,
            metavar="OPTION=VALUE",
            help="One option of the method, as option=value; may be repeated.",
        ),
    ] = ()

    def make(self, default: str | None = None) -> Method:
        """Create the method. `default` is used if none is named; None stands for tide."""
        from moontide.registry import DEFAULT, method_type

        given = {}
        for setting in self.settings:
            option, equals, value = setting.partition("=")
            if not equals:
                raise OptionError(f"'--set' must have the form option=value. Got {setting!r} instead.")
            if option in given:
                raise OptionError(f"'--set' sets the option {option!r} more than once; keep one.")
            given[option] = value
        cls = method_type(self.method or default or DEFAULT)
        options = cls.parse(given)
        return cls(**options) if self.preset is None else cls.from_preset(self.preset, **options)


NO_SOURCE, NO_CHOICE = Source(), Choice()  # no option given


def check_not_input(out: Path, *inputs: Path | None) -> None:
    """Refuse an output that would overwrite an input.

    >>> check_not_input(Path("out.npz"), Path("in.npz"), None)
    """
    if any(path is not None and os.path.realpath(path) == os.path.realpath(out) for path in inputs):
        raise FileError(f"The output {out} is also an input of this command; choose another name.")


def value_of(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert the words of an argument to its type; refuse empty words, and numbers such as 1.5 for integers.

    Errors contain only the text after the name of the argument.

    >>> from cyclopts import Token
    >>> value_of(int | None, [Token(keyword="--seed", value="7")])
    7
    >>> value_of(int, [Token(keyword="--seed", value="1.5")])
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: it must be a whole number. Got '1.5' instead.
    """
    from cyclopts import convert

    for token in tokens:
        if not token.value.strip():
            raise OptionError("it must not be empty." if token.keyword else "An argument must not be empty.")
        if "\0" in token.value:  # a configuration file can hold it
            raise OptionError(f"it must not contain a NUL character. Got {shorten(ascii(token.value), 60)} instead.")
        if int in (kind, *get_args(kind)):
            if not re.fullmatch(r"[+-]?[0-9]+", token.value):
                raise OptionError(f"it must be a whole number. Got {token.value!r} instead.")
            if len(token.value) > DIGITS:
                raise OptionError(f"it must have {DIGITS} digits at most. Got {len(token.value)} instead.")
    return convert(kind, tokens)


@contextmanager
def progress_bar(label: str, unit: str | None = None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr if it is a terminal, with the speed in `unit`/s; yields (done, total) -> None.

    The function takes an optional third argument, a description of the current step.

    >>> with progress_bar("moon") as advance:
    ...     advance(1, 2)
    """
    from rich import progress as rich
    from rich.console import Console

    class Speed(rich.ProgressColumn):
        def render(self, task: rich.Task) -> str:
            return f"{task.speed:.1f} {unit}/s" if unit and task.speed else ""

    console = Console(stderr=True)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), Speed())
    with rich.Progress(
        *columns,
        rich.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=output().quiet or not console.is_terminal,
    ) as bar:
        job = bar.add_task(label, total=None)

        def advance(done: int, total: int, what: str = "") -> None:
            bar.update(job, description=f"{label}, {what}" if what else label, completed=done, total=total)

        yield advance


def note(sentence: str) -> None:
    """Print a note on stderr, without credentials.

    >>> note("done")
    """
    if not output().quiet:
        write_line(without_credentials(sentence), sys.stderr)


def table_console() -> Console:
    """Return the console for tables; a pipe gets wide lines, so that rows are not wrapped.

    >>> table_console().width > 0
    True
    """
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(markup=False, highlight=False, width=160)


def percent(share: float) -> str:
    """Format a share as a percentage.

    >>> percent(0.6128)
    '61.28 %'
    """
    return f"{100 * share:.2f} %"


def print_summary(found: Comparison, result: Result, task: Task, answers: Answers | None = None) -> None:
    """Print what changed and, if there are labels, the accuracy; otherwise the largest predicted classes.

    >>> import numpy as np, moontide
    >>> from moontide.evaluate import compare_predictions
    >>> task = moontide.Task(np.eye(2), np.eye(2), class_names=("cat", "dog"))
    >>> result = moontide.MOON().fit_predict(task)
    >>> print_summary(compare_predictions(None, result), result, task)
    changed    0 of 2
    classes    cat 50.00 %, dog 50.00 %
    >>> print_summary(compare_predictions(np.asarray([0, 1]), result), result, task)
    zero-shot  100.00 %
    adapted    100.00 % (+0.00)
    changed    0 of 2: 0 for better, 0 for worse, 0 sideways
    """
    import numpy as np

    from moontide.core.arrays import to_numpy

    emit(**asdict(found))
    if task.known is not None:
        n = len(result.labels)
        known = int((to_numpy(task.known)[:n] >= 0).sum())
        say(f"known      {known} of {n} labels, which are not counted below")
    if found.accuracy is not None and found.zero_shot_accuracy is not None:
        gain = 100 * (found.accuracy - found.zero_shot_accuracy)
        say(f"zero-shot  {percent(found.zero_shot_accuracy)}")
        say(f"adapted    {percent(found.accuracy)} ({gain:+.2f})")
        how = f": {found.better} for better, {found.worse} for worse, {found.sideways} sideways"
        say(f"changed    {found.changed} of {found.samples}{how}")
        return
    say(f"changed    {found.changed} of {found.samples}")
    if answers is not None:
        print_classes(np.bincount(answers.labels, minlength=len(answers.names)), answers.names)
    else:
        print_classes(np.bincount(to_numpy(result.labels), minlength=task.k), task.class_names)


def print_answers(answers: Answers) -> None:
    """Print how many samples are of none of the classes, and how many were rolled up in the class tree.

    >>> import numpy as np
    >>> from moontide.answers import answer
    >>> from moontide.types import Result
    >>> result = Result(np.eye(2), np.eye(2), unknown=np.asarray([0.1, 0.2]))
    >>> print_answers(answer(result, ["cat", "dog"], unknown=0.5))
    none       1 of 2 are none of these, and not counted below
    """
    n, none, upper = len(answers.labels), int(answers.none.sum()), int((answers.labels >= answers.choices).sum())
    emit(none=none, rolled_up=upper)
    if none:
        say(f"none       {none} of {n} are none of these, and not counted below")
    if upper:
        say(f"rolled up  {upper} of {n} to an upper level, and not counted below")


def print_groups(found: Mapping[str, Comparison]) -> None:
    """Print one line per group, for up to SHOWN_GROUPS groups.

    >>> from moontide.evaluate import Comparison
    >>> print_groups({"north": Comparison(9, 2), "south": Comparison(4, 1, 0.5, 0.75, 1, 0)})
    group north: 9 samples, 2 changed
    group south: 4 samples, 1 changed, 50.00 % to 75.00 %
    """
    emit(groups={name: asdict(one) for name, one in found.items()})
    for name, one in list(found.items())[:SHOWN_GROUPS]:
        scores = (one.zero_shot_accuracy, one.accuracy)
        change = "" if None in scores else f", {' to '.join(percent(share) for share in scores if share is not None)}"
        say(f"group {name}: {counted(one.samples, 'sample')}, {one.changed} changed{change}")
    if len(found) > SHOWN_GROUPS:
        say(f"and {counted(len(found) - SHOWN_GROUPS, 'more group')}")


def print_classes(counts: Any, class_names: Sequence[str] | None) -> None:
    """Print the largest predicted classes from the number of samples of each, (K,).

    >>> import numpy as np
    >>> print_classes(np.asarray([1, 3]), ["cat", "dog"])
    classes    dog 75.00 %, cat 25.00 %
    """
    names = class_names or [f"class {k}" for k in range(len(counts))]
    emit(classes={str(names[k]): int(counts[k]) for k in range(len(counts)) if counts[k]})
    largest = [k for k in (-counts).argsort(kind="stable")[:SHOWN_CLASSES] if counts[k]]
    say(f"classes    {', '.join(f'{names[k]} {percent(counts[k] / counts.sum())}' for k in largest)}")
