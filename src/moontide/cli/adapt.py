"""`moontide adapt`: label a file of embeddings, or many shards of one task."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from moontide.cli.answers import NO_ANSWER_CHOICE, AnswerChoice
from moontide.cli.common import (
    INPUT,
    NO_CHOICE,
    NO_SOURCE,
    BatchSize,
    Choice,
    Source,
    check_not_input,
    note,
    progress_bar,
)
from moontide.cli.given import NO_GIVEN, GivenFiles, GroupBy
from moontide.cli.output import counted, seed
from moontide.cli.shards import NO_CLUSTER, Cluster, adapt_many, is_many
from moontide.errors import OptionError

if TYPE_CHECKING:
    from moontide.protocols import Method
    from moontide.types import Result, Task


def adapt(
    features: Annotated[
        str,
        Parameter(
            help="Image embeddings: a store made by 'moontide encode'; an .npz with image_features, text_features "
            "and, optionally, labels, classnames, logit_scale or temperature, view_features; or an .npy, "
            ".safetensors, .parquet, .csv or .pt together with --text. Another folder, or a glob such as "
            "'s3://bucket/*.parquet', is one task in many shards.",
            group=INPUT,
        ),
    ],
    /,
    *,
    choice: Choice = NO_CHOICE,
    batch_size: BatchSize = None,
    shuffle: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Draw batches at random; the output stays in file order.",
        ),
    ] = False,
    group_by: GroupBy = None,
    out: Annotated[
        str | None,
        Parameter(
            help="Output for the predictions: an .npz, .csv, .jsonl, .json, .xlsx or .parquet; for shards, a folder."
        ),
    ] = None,
    answers: AnswerChoice = NO_ANSWER_CHOICE,
    given: GivenFiles = NO_GIVEN,
    cluster: Cluster = NO_CLUSTER,
    source: Source = NO_SOURCE,
) -> None:
    """Label embeddings: all samples together, in independent batches (--batch-size), or by group (--group-by).

    Prints what changed from zero-shot and, if there are labels, the accuracy before and after.

    For example:

        moontide adapt features.npz --out predictions.csv
        moontide adapt features.npz --known labels.csv --class-prior shares.csv
        moontide adapt images.parquet --text classes.npy --group-by camera --out predictions.csv
        moontide adapt images.parquet --text classes.npy --classes names.txt
        moontide adapt features.npz --method moon --preset paper --set neighbours=5
        moontide adapt 'shards/*.parquet' --text classes.npy --engine ray --out predictions/
    """
    answers.check()
    method = choice.make()
    if not is_many(features, cluster):
        order = seed() if shuffle else None
        _adapt_file(Path(features), method, out, answers, given, source, group_by, batch_size, order)
        return
    if batch_size is not None or shuffle or group_by is not None or answers != NO_ANSWER_CHOICE:
        raise OptionError(
            "All shards are one task: '--batch-size', '--shuffle', '--group-by', '--unknown', '--roll-up' and "
            "'--multi' do not work with shards."
        )
    adapt_many(features, method, out, cluster, source, given)


def _adapt_file(
    features: Path,
    method: Method,
    out: str | None,
    answers: AnswerChoice,
    given: GivenFiles,
    source: Source,
    group_by: str | None,
    batch_size: int | None,
    shuffle_seed: int | None,
) -> None:
    """Label one file or store, write the predictions and print the summary."""
    from moontide.store.files import check_output, read_task
    from moontide.store.inputs import read_groups

    given.require(method)
    if out is not None:
        check_output(out)
        check_not_input(Path(out), features, source.text, source.labels, *given.paths)
    data = read_task(features, **asdict(source), questions=True)
    task = given.add(data.task, data.ids)
    groups = None if group_by is None else read_groups(features, group_by, data.ids, task.n)
    result = _run(method, task, groups, batch_size, shuffle_seed)
    answers.conclude(data, task, result, out, source.classes, groups)


def _run(
    method: Method, task: Task, groups: Sequence[str] | None, batch_size: int | None, shuffle_seed: int | None
) -> Result:
    """Label the task and print a summary."""
    from moontide.evaluate import run_groups, split_rows
    from moontide.progress import reporting

    parts = len(split_rows(task.n, groups, batch_size, shuffle_seed))
    start = time.perf_counter()
    with progress_bar(method.name) as progress, ExitStack() as stack:
        if parts == 1:  # one long run reports its own progress
            stack.enter_context(reporting(lambda what, done, total: progress(done, total, what)))
        result = run_groups(method, task, groups, batch_size, shuffle_seed=shuffle_seed, progress=progress)
    if batch_size is not None or groups is not None:
        how = [] if groups is None else [counted(len(set(groups)), "group")]
        how += [] if batch_size is None else [counted(parts, "batch")]
        note(f"{method.name}: {counted(task.n, 'sample')} in {' and '.join(how)}, {time.perf_counter() - start:.2f} s")
    graph = result.details.get("graph")
    if graph is not None and graph.recall < 1:
        note(f"neighbours: approximate search, {100 * graph.recall:.1f} % of the true ones found on a sample")
    return result
