"""`moontide adapt`: label a file of embeddings, or many shards of one task."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moontide.cli.common import (
    INPUT,
    NO_CHOICE,
    NO_SOURCE,
    BatchSize,
    Choice,
    Source,
    check_not_input,
    note,
    print_summary,
    progress_bar,
)
from moontide.cli.shards import NO_CLUSTER, Cluster, adapt_many, is_many
from moontide.errors import OptionError


def adapt(
    features: Annotated[
        str,
        Parameter(
            help="Image embeddings: an .npz with image_features, text_features and, if there are any, labels, "
            "classnames, logit_scale or temperature, view_features; or an .npy, .safetensors or .parquet together with "
            "--text. A folder, or a glob such as 's3://bucket/*.parquet', is one task in many shards.",
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
            help="Draw the batches at random; the rows of the output stay in file order.",
        ),
    ] = False,
    seed: Annotated[int | None, Parameter(help="Seed of --shuffle (else 0).")] = None,
    out: Annotated[
        str | None,
        Parameter(help="Where to write the predictions: an .npz, .csv, .jsonl or .parquet; of shards, a folder."),
    ] = None,
    cluster: Cluster = NO_CLUSTER,
    source: Source = NO_SOURCE,
) -> None:
    """Label embeddings, all samples together, or in independent batches with --batch-size.

    Prints what changed against zero-shot and, where there are labels, the accuracy before and after. For example:

        moontide adapt features.npz --out predictions.csv
        moontide adapt images.parquet --text classes.npy --classes names.txt
        moontide adapt features.npz --method moon --preset paper --set neighbours=5
        moontide adapt 'shards/*.parquet' --text classes.npy --engine ray --out predictions/
    """
    from moontide.core.progress import reporting
    from moontide.evaluate import compare_predictions, run_batches
    from moontide.store.files import check_output, read_task, write_predictions

    if seed is not None and not shuffle:
        raise OptionError("'--seed' has no effect without '--shuffle'; leave it out, or add '--shuffle'.")
    many = is_many(features, cluster)
    solver = choice.make("moon" if many else None)
    if many:
        if batch_size is not None or shuffle:
            raise OptionError("All shards are one task: '--batch-size' and '--shuffle' do not go with them.")
        adapt_many(features, solver, out, cluster, source)
        return
    if out is not None:
        check_output(out)
        check_not_input(Path(out), Path(features), source.text, source.labels)
    task, labels, ids = read_task(features, **asdict(source))
    start = time.perf_counter()
    with progress_bar(solver.name) as progress, ExitStack() as stack:
        if batch_size is None:  # one long run tells of its parts
            stack.enter_context(reporting(lambda what, done, total: progress(done, total, what)))
        result = run_batches(solver, task, batch_size, shuffle_seed=(seed or 0) if shuffle else None, progress=progress)
    if batch_size is not None:
        batches = -(-task.n // batch_size)
        note(f"{solver.name}: {task.n} samples in {batches} batches, {time.perf_counter() - start:.2f} s")
    graph = result.details.get("graph")
    if graph is not None and graph.recall < 1:
        note(f"neighbours: searched approximately, {100 * graph.recall:.1f} % of the true ones found on a sample")
    if out is not None:
        write_predictions(out, result, ids, task.class_names)
        note(f"wrote {out}")
    print_summary(compare_predictions(labels, result), result, task)
