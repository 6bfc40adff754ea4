"""`moontide adapt`: label a file of embeddings."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moontide.cli.common import (
    NO_CHOICE,
    NO_SOURCE,
    BatchSize,
    Choice,
    Features,
    Source,
    check_not_input,
    note,
    print_summary,
    progress_bar,
)
from moontide.errors import OptionError


def adapt(
    features: Features,
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
        Path | None, Parameter(help="Where to write the predictions: an .npz, .csv, .jsonl or .parquet.")
    ] = None,
    source: Source = NO_SOURCE,
) -> None:
    """Label a file of embeddings, all samples together, or in independent batches with --batch-size.

    Prints what changed against zero-shot and, where there are labels, the accuracy before and after. For example:

        moontide adapt features.npz --out predictions.csv
        moontide adapt images.parquet --text classes.npy --classes names.txt
        moontide adapt features.npz --method moon --preset paper --set neighbours=5
    """
    from moontide.evaluate import compare_predictions, run_batches
    from moontide.store.files import check_output, read_task, write_predictions

    if seed is not None and not shuffle:
        raise OptionError("'--seed' has no effect without '--shuffle'; leave it out, or add '--shuffle'.")
    solver = choice.make()
    if out is not None:
        check_output(out)
        check_not_input(out, features, source.text, source.labels)
    task, labels, ids = read_task(features, **asdict(source))
    start = time.perf_counter()
    with progress_bar(solver.name) as progress:
        result = run_batches(solver, task, batch_size, shuffle_seed=(seed or 0) if shuffle else None, progress=progress)
    if batch_size is not None:
        batches = -(-task.n // batch_size)
        note(f"{solver.name}: {task.n} samples in {batches} batches, {time.perf_counter() - start:.2f} s")
    if out is not None:
        write_predictions(out, result, ids, task.class_names)
        note(f"wrote {out}")
    print_summary(compare_predictions(labels, result), result, task)
