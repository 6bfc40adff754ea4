"""`moontide import-labels`: convert labels made in another tool to a file for `--known`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from moontide.cli.common import check_not_input, note
from moontide.cli.output import counted, emit
from moontide.errors import FileError, OptionError


def import_labels(
    labels: Annotated[Path, Parameter(help="A .json exported by Label Studio, or a folder exported by FiftyOne.")],
    /,
    *,
    source: Annotated[Literal["label-studio", "fiftyone"], Parameter(name="--from", help="What made it.")],
    out: Annotated[Path, Parameter(help="Output file for the known labels: a .csv.")],
    field: Annotated[str | None, Parameter(help="For FiftyOne: field of the labels (default: ground_truth).")] = None,
) -> None:
    """Convert labels made in another tool to a file for --known.

    For example:

        moontide import-labels annotations.json --from label-studio --out known.csv
        moontide classify photos/ --classes names.txt --known known.csv --out labels.csv
    """
    from moontide.integrations import fiftyone, label_studio
    from moontide.store.disk import replacing
    from moontide.store.files import check_output
    from moontide.store.tables import write_table

    if field is not None and source != "fiftyone":
        raise OptionError(f"'--field' is for '--from fiftyone'. Got '--from {source}' instead; leave it out.")
    check_output(out, (".csv",))
    check_not_input(out, labels)
    if source == "fiftyone":
        key, found = "path", fiftyone.read_labels(labels, field or "ground_truth")
    else:
        key, found = "id", label_studio.read_annotations(labels)
    if not found:
        raise FileError(f"{labels} has no annotations; annotate some images first.")
    with replacing(out) as handle:
        write_table(handle, {key: list(found), "label": list(found.values())}, ".csv")
    emit(out=out, known=len(found))
    note(f"wrote {out}: {counted(len(found), 'known label')}")
