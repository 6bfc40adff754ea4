"""`moontide adapt` on shards: options and execution."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from moontide.cli.common import Source, note, print_classes, progress_bar
from moontide.cli.given import GivenFiles
from moontide.cli.output import counted, emit, say
from moontide.errors import OptionError
from moontide.protocols import Method

SHARDS = Group("Shards")

Address = Annotated[
    str | None, Parameter(help="The Ray cluster to join, as host:port or auto (default: start one here).")
]


@Parameter(name="*", group=SHARDS)
@dataclass(frozen=True)
class Cluster:
    """Options for processing shards."""

    engine: Annotated[
        Literal["local", "ray"] | None, Parameter(help="Process shards in this process (default) or on Ray.")
    ] = None
    address: Address = None
    workers: Annotated[int | None, Parameter(help="Workers on Ray (default: one per CPU or GPU).")] = None
    graph: Annotated[
        Literal["local", "global"], Parameter(help="Search for neighbours within each shard, or across all of them.")
    ] = "local"
    skip_bad_rows: Annotated[
        bool,
        Parameter(
            negative="", show_default=False, help="Skip rows with NaN, infinity or only zeros, and report how many."
        ),
    ] = False
    allow_remote: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="A further protocol for fetching shards, such as https, besides s3, gs and az; may be repeated.",
        ),
    ] = ()


NO_CLUSTER = Cluster()  # no option given


def is_many(features: str, cluster: Cluster) -> bool:
    """Return whether FEATURES are shards: a glob, a folder that is no store, a URL, or anything with --engine.

    >>> is_many("a/*.npy", NO_CLUSTER), is_many("a.npy", NO_CLUSTER)
    (True, False)
    """
    from moontide.store.files import is_store

    folder = Path(features).is_dir() and not is_store(features)
    many = cluster.engine is not None or "://" in features or any(c in features for c in "*?[") or folder
    if not many and cluster != NO_CLUSTER:
        raise OptionError(
            "'--address', '--workers', '--graph', '--skip-bad-rows', '--allow-remote' are for shards; add '--engine'."
        )
    if cluster.engine != "ray" and (cluster.address is not None or cluster.workers is not None):
        raise OptionError("'--address' and '--workers' have no effect without '--engine ray'.")
    if cluster.workers is not None and cluster.workers < 1:
        raise OptionError(f"'--workers' must be 1 or more. Got {cluster.workers} instead.")
    return many


def adapt_many(
    features: str, method: Method, out: str | None, cluster: Cluster, source: Source, given: GivenFiles
) -> None:
    """Run a method over shards and print what changed."""
    from moontide.core.devices import check_device
    from moontide.engine.run import ShardTask, Workers, adapt_shards
    from moontide.store.classes import read_classes
    from moontide.store.features import FeatureStore
    from moontide.store.files import is_store, read_text
    from moontide.store.inputs import read_class_prior, read_negatives

    if given.known is not None:
        raise OptionError("'--known' does not work with shards; leave it out, or use one file.")
    given.require(method)
    store = is_store(features)
    if out is None or (source.text is None and not store):
        raise OptionError(
            f"{features} is a folder or pattern of shards: add '--text', the class embeddings, and "
            "'--out', a folder for the predictions."
        )
    if source.labels is not None or source.dtype is not None:
        raise OptionError("'--labels' and '--dtype' do not work with shards; leave them out.")
    check_device(source.device)
    anchors = read_text(source.text or features)
    if store and anchors.origin is not None:
        FeatureStore.open(features).check_space(anchors.origin)
    scales = (source.logit_scale, anchors.logit_scale(), 100.0)
    names, text = anchors.class_names(), anchors.matrix("text_features")
    if source.classes is not None:
        classes = read_classes(source.classes)
        names, text = list(classes.names), classes.means(text)
    prior = None if given.class_prior is None else read_class_prior(given.class_prior, names, len(text))
    task = ShardTask(
        features,
        text,
        next(scale for scale in scales if scale is not None),
        names,
        prior,
        None if given.negatives is None else read_negatives(given.negatives),
        cluster.skip_bad_rows,
        cluster.allow_remote,
    )
    workers = Workers(cluster.engine or "local", cluster.address, cluster.workers, device=source.device)
    start = time.perf_counter()
    with progress_bar(method.name) as progress:
        found = adapt_shards(task, method, out, workers=workers, graph=cluster.graph, report=note, progress=progress)
    replaced = f", {counted(found.replaced, 'worker')} replaced" if found.replaced else ""
    note(f"wrote {counted(len(found.files), 'file')} to {out} in {time.perf_counter() - start:.1f} s{replaced}")
    emit(out=out, samples=found.n, changed=found.changed)
    say(f"changed    {found.changed} of {found.n}")
    print_classes(found.counts, names)
