"""`moontide export-labels`: convert a table of labels to the format of another tool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from cyclopts import Parameter

from moontide.cli.common import check_not_input, note
from moontide.cli.output import counted, emit
from moontide.errors import FileError, OptionError

if TYPE_CHECKING:
    from collections.abc import Callable

    from moontide.integrations import Labels

Tool = Literal["coco", "megadetector", "speciesnet", "label-studio", "fiftyone", "datasets", "vectors"]
FOLDERS = ("fiftyone", "datasets")  # formats that are folders; the others are one file


def export_labels(
    labels: Annotated[
        Path, Parameter(help="A table of labels written by 'moontide classify': a .csv, .jsonl, .json or .parquet.")
    ],
    /,
    *,
    to: Annotated[
        Tool,
        Parameter(
            help="coco: COCO Camera Traps JSON. megadetector, speciesnet: their JSON, which Timelapse reads. "
            "label-studio: tasks with predictions. fiftyone, datasets: a folder for FiftyOne or Hugging Face datasets. "
            "vectors: Parquet for LanceDB and Embedding Atlas."
        ),
    ],
    out: Annotated[Path, Parameter(help="Output: a .json, a .parquet for vectors, or a new folder.")],
    features: Annotated[
        Path | None, Parameter(help="A store made by 'moontide encode' with the embeddings of these images.")
    ] = None,
    prefix: Annotated[
        str | None, Parameter(help="For label-studio: prefix of the image addresses (default: local storage).")
    ] = None,
) -> None:
    """Convert labels to the format of another tool.

    For example:

        moontide export-labels labels.csv --to coco --out labels.coco.json
        moontide export-labels labels.csv --to label-studio --prefix https://photos.example.org/ --out tasks.json
        moontide export-labels labels.csv --to vectors --features store/ --out vectors.parquet
    """
    from moontide.integrations import Labels
    from moontide.store.files import check_output

    if prefix is not None and to != "label-studio":
        raise OptionError(f"'--prefix' is for '--to label-studio'. Got '--to {to}' instead; leave it out.")
    if features is not None and to not in (*FOLDERS, "vectors"):
        raise OptionError(f"'--features' is for '--to fiftyone, datasets or vectors'. Got '--to {to}'; leave it out.")
    if to in FOLDERS:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise FileError(f"The output {out} must be a new or empty folder; choose another.")
    else:
        check_output(out, (".parquet",) if to == "vectors" else (".json",))
        check_not_input(out, labels)
    found = Labels.read(labels)
    if features is not None:
        found = _with_vectors(found, labels, features)
    _write(found, to, out, prefix)
    emit(out=out, labels=len(found.ids), to=to)
    note(f"wrote {out}: {counted(len(found.ids), 'label')} for {to}")


def _with_vectors(found: Labels, table: Path, folder: Path) -> Labels:
    """Add the embeddings of a store, by the ids of its images."""
    from moontide.store.features import FeatureStore

    store = FeatureStore.open(folder)
    rows = {one: i for i, one in enumerate(store.ids)}
    missing = [one for one in found.ids if one not in rows]
    if missing:
        raise FileError(
            f"The store {folder} has no image {missing[0][:60]!r} of {table}, nor {len(missing) - 1} others; use the "
            "store that these labels come from."
        )
    return replace(found, vectors=store.take([rows[one] for one in found.ids]))


def _write(found: Labels, to: Tool, out: Path, prefix: str | None) -> None:
    from moontide.integrations import coco, fiftyone, huggingface, label_studio, megadetector, vectors

    if to == "label-studio":
        label_studio.write_tasks(found, out, label_studio.LOCAL if prefix is None else prefix)
        return
    writers: dict[str, Callable[[Labels, Path], None]] = {
        "coco": coco.write_coco,
        "megadetector": megadetector.write_megadetector,
        "speciesnet": megadetector.write_speciesnet,
        "fiftyone": fiftyone.write_fiftyone,
        "datasets": huggingface.write_dataset,
        "vectors": vectors.write_vectors,
    }
    assert {*writers, "label-studio"} == set(get_args(Tool))
    writers[to](found, out)
