"""Options for prior knowledge: labels of some samples, the class balance, and negatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from moontide.cli.common import note

if TYPE_CHECKING:
    from moontide.protocols import Method
    from moontide.types import Task

GIVEN = Group("What is known")

GroupBy = Annotated[
    str | None,
    Parameter(
        help="Label each group (such as a camera) separately: 'folder' for the folder of each id, or the name of a "
        "column or array of the input."
    ),
]


@Parameter(name="*", group=GIVEN)
@dataclass(frozen=True)
class Given:
    """Files with prior knowledge."""

    known: Annotated[
        Path | None,
        Parameter(
            help="Labels of some samples: a .csv with the columns id (or path, or row) and label, or an .npz with "
            "known, or with ids and labels; an empty label is unknown."
        ),
    ] = None
    class_prior: Annotated[
        Path | None,
        Parameter(help="The class balance: a .csv with the columns class and share, a .json, an .npy or an .npz."),
    ] = None

    def require(self, method: Method) -> None:
        """Refuse input that the method cannot use, before anything is read."""
        for field in fields(self):
            if getattr(self, field.name) is not None:
                method.require_accepted(field.name)


@Parameter(name="*", group=GIVEN)
@dataclass(frozen=True)
class GivenNames(Given):
    """Prior knowledge about images, with negatives as names.

    >>> GivenNames() == NO_NAMES_GIVEN
    True
    """

    negatives: Annotated[
        str | None,
        Parameter(
            help="Names of other things, to sharpen the column unknown: a comma-separated list, or a "
            "text file with one name per line."
        ),
    ] = None

    def names(self, classes: Sequence[str]) -> list[str] | None:
        """Return the negative names that are not classes, and report the others."""
        from moontide.encoders.negatives import drop_classes
        from moontide.store.classes import read_class_names

        if self.negatives is None:
            return None
        kept, dropped = drop_classes(read_class_names(self.negatives), classes)
        if dropped:
            note(f"negatives: left out names that are classes: {', '.join(dropped)}")
        return kept


@Parameter(name="*", group=GIVEN)
@dataclass(frozen=True)
class GivenFiles(Given):
    """Prior knowledge about embeddings, with negatives as embeddings.

    >>> GivenFiles() == NO_GIVEN
    True
    """

    negatives: Annotated[
        Path | None,
        Parameter(
            help="Embeddings of names of other things, to sharpen the column unknown: an .npy, .safetensors or .npz."
        ),
    ] = None

    @property
    def paths(self) -> list[Path | None]:
        """The files, to check that none is overwritten."""
        return [getattr(self, field.name) for field in fields(self)]

    def add(self, task: Task, ids: Sequence[Any] | None) -> Task:
        """Return the task with the contents of the files; without ids, samples are identified by row number."""
        from moontide.store.inputs import read_class_prior, read_known, read_negatives
        from moontide.types import check_class_prior, check_known, check_negatives

        found: dict[str, Any] = {}
        if self.known is not None:
            known = read_known(self.known, range(task.n) if ids is None else ids, task.class_names, task.k)
            found["known"] = check_known(known, task.n, task.k, task.features)
        if self.class_prior is not None:
            shares = read_class_prior(self.class_prior, task.class_names, task.k)
            found["class_prior"] = check_class_prior(shares, task.k, task.features)
        if self.negatives is not None:
            found["negatives"] = check_negatives(read_negatives(self.negatives), task.features)
        return task.trusted(**found)  # its embeddings were checked as they were read


NO_NAMES_GIVEN, NO_GIVEN = GivenNames(), GivenFiles()  # no option given
