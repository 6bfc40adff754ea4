"""`moontide stream`: label a file in order, as if it arrived batch by batch."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from moontide.cli.answers import NO_ANSWER_CHOICE, AnswerChoice
from moontide.cli.common import (
    NO_CHOICE,
    NO_SOURCE,
    Choice,
    Features,
    Source,
    check_not_input,
    note,
    progress_bar,
)
from moontide.cli.given import NO_GIVEN, GivenFiles
from moontide.cli.output import counted, emit
from moontide.errors import OptionError

if TYPE_CHECKING:
    from moontide.protocols import Method
    from moontide.types import Result, Task


BATCH = 64  # samples per batch if nothing else is set


def stream(
    features: Features,
    /,
    *,
    choice: Choice = NO_CHOICE,
    batch_size: Annotated[
        int | None, Parameter(help="Samples per batch (default: that of the resumed state, or 64).")
    ] = None,
    drop_last: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Drop the last samples if they do not fill a batch, as in the published protocol.",
        ),
    ] = False,
    resume: Annotated[
        Path | None,
        Parameter(help="Resume from this state, with its method and options; the classes must be the same."),
    ] = None,
    save_state: Annotated[Path | None, Parameter(help="Output file for the state after the last batch.")] = None,
    out: Annotated[
        Path | None, Parameter(help="Output file for the predictions: an .npz, .csv, .jsonl, .json, .xlsx or .parquet.")
    ] = None,
    answers: AnswerChoice = NO_ANSWER_CHOICE,
    given: GivenFiles = NO_GIVEN,
    source: Source = NO_SOURCE,
) -> None:
    """Label a file in order, as if it arrived batch by batch; online methods remember earlier batches.

    A batch method labels each batch separately. For example:

        moontide stream monday.npz --method tda --save-state tda.safetensors
        moontide stream tuesday.npz --resume tda.safetensors --out tuesday.csv
        moontide stream monday.npz --known labels.csv --class-prior shares.csv
    """
    from moontide.store.files import PREDICTIONS, check_output, read_task
    from moontide.streams import save_state as write_state

    answers.check()
    for path, kinds in ((out, PREDICTIONS), (save_state, (".safetensors",))):
        if path is not None:
            check_output(path, kinds)
            check_not_input(path, features, source.text, source.labels, *given.paths)
    data = read_task(features, **asdict(source), questions=True)
    method, state, batch_size = _beginning(choice, given, data.task, resume, batch_size)
    task = given.add(data.task, data.ids)
    state, result = _run(method, task, batch_size, state, drop_last)
    if save_state is not None:
        write_state(save_state, method, state, batch_size)
        emit(state=save_state, seen=state.seen)
        note(f"wrote {save_state}, the state after {counted(state.seen, 'sample')}")
    answers.conclude(data, task, result, out, source.classes)


def _beginning(
    choice: Choice, given: GivenFiles, task: Task, resume: Path | None, batch_size: int | None
) -> tuple[Method, Any, int]:
    """Return the method, the state to resume from (or None), and the batch size."""
    from moontide.streams import load_state, saved_batch_size

    method, state = (choice.make(), None) if resume is None else load_state(resume, task.features)
    if resume is not None:
        check_same_method(choice, method, resume)
        if given.class_prior is not None or given.negatives is not None:
            raise OptionError("'--class-prior' and '--negatives' are part of a state; do not use them with '--resume'.")
        batch_size = saved_batch_size(resume) if batch_size is None else batch_size
    given.require(method)
    return method, state, BATCH if batch_size is None else batch_size


def _run(method: Method, task: Task, batch_size: int, state: Any, drop_last: bool) -> tuple[Any, Result]:
    """Label the task and print a summary."""
    from moontide.streams import run_stream

    start = time.perf_counter()
    with progress_bar(method.name) as progress:
        state, result = run_stream(method, task, batch_size, state=state, drop_last=drop_last, progress=progress)
    n = len(result.labels)
    how = f"{counted(n, 'sample')} in {counted(-(-n // batch_size), 'batch')}"
    note(f"{method.name}: {how}, {time.perf_counter() - start:.2f} s")
    return state, result


def check_same_method(choice: Choice, saved: Method, path: Path) -> None:
    """Refuse a method, preset or option that differs from those of the state.

    >>> import moontide
    >>> check_same_method(Choice("moon"), moontide.method("moon"), Path("moon.safetensors"))
    """
    from moontide.protocols import as_online

    if choice == NO_CHOICE:
        return
    asked = as_online(choice.make(saved.name))
    if asked != as_online(saved):
        raise OptionError(
            f"The state {path} was made by {in_words(saved)}. Got {in_words(asked)} instead; leave '--method', "
            "'--preset' and '--set' out to resume it."
        )


def in_words(method: Method) -> str:
    """Describe a method and its options that differ from the defaults.

    >>> import moontide
    >>> in_words(moontide.method("moon", beta="soft"))
    'moon with beta=soft'
    """
    from moontide.protocols import PerBatch

    inside = method.method if isinstance(method, PerBatch) else method
    values = {name: getattr(inside, name) for name in inside.specs()}
    changed = [f"{name}={value}" for name, value in values.items() if value != inside.specs()[name].default]
    return f"{inside.name} with {', '.join(changed) or 'its defaults'}"
