"""Options for the form of the labels: a class, a level of a class tree, none of the classes, or several classes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from moontide.cli.common import note, print_answers, print_groups, print_summary
from moontide.cli.output import emit
from moontide.errors import OptionError

if TYPE_CHECKING:
    from moontide.answers import Answers
    from moontide.store.classes import ClassList
    from moontide.store.files import FileTask
    from moontide.types import Result, Task

ANSWERS = Group("Answers")


@Parameter(name="*", group=ANSWERS)
@dataclass(frozen=True)
class AnswerChoice:
    """Options that turn probabilities into labels.

    >>> AnswerChoice(unknown="0.2") == NO_ANSWER_CHOICE
    False
    """

    unknown: Annotated[
        str | None,
        Parameter(
            help="Label samples 'none of these': the share that is least like any class (0.2), or all above a "
            "score in the column unknown ('>0.9')."
        ),
    ] = None
    roll_up: Annotated[
        float | None,
        Parameter(
            help="Answer with the deepest level of a class tree (animal/dog/beagle, or a column 'parent') that has at "
            "least this probability, say 0.8."
        ),
    ] = None
    multi: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="Also list all classes in the image, each with its probability, in the column multi.",
        ),
    ] = False
    classes_per_image: Annotated[
        float | None, Parameter(help="Mean number of classes per image, for --multi (default: 1).")
    ] = None

    def check(self) -> None:
        """Refuse values outside their ranges, before anything is read."""
        from moontide.answers import check_roll_up, check_unknown

        if self.unknown is not None:
            check_unknown(self.unknown)
        if self.roll_up is not None:
            check_roll_up(self.roll_up)
        if self.classes_per_image is not None and not self.multi:
            raise OptionError("'--classes-per-image' has no effect without '--multi'; add it, or leave it out.")

    def make(
        self, task: Task, result: Result, classes: ClassList | None, is_none: Any = None
    ) -> tuple[Answers | None, dict[str, Sequence[Any]]]:
        """Return the answers (None if they are plain classes) and further columns of the table."""
        from moontide.answers import answer
        from moontide.multi import listed_classes, multi_label
        from moontide.store.classes import ClassList

        n = len(result.labels)
        names = task.class_names or tuple(f"class {k}" for k in range(task.k))
        more: dict[str, Sequence[Any]] = {}
        answers = None
        if self.unknown is not None or self.roll_up is not None or (is_none is not None and any(is_none)):
            paths = (classes or ClassList.of(names)).paths
            known = None if task.known is None else task.known[:n]
            answers = answer(
                result, names, unknown=self.unknown, roll_up=self.roll_up, paths=paths, known=known, is_none=is_none
            )
            self._question(result, answers)
            if self.roll_up is not None:
                more["deepest"] = [names[k] for k in answers.classes]
        if self.multi:
            found = multi_label(task.rows(0, n), result, self.classes_per_image or 1.0)
            more["multi"] = listed_classes(found, names)
        return answers, more

    def conclude(
        self,
        data: FileTask,
        task: Task,
        result: Result,
        out: str | Path | None,
        classes: str | None,
        groups: Sequence[str] | None = None,
    ) -> None:
        """Write the predictions of a file and print the summary; `task` is that of `data` with what else is known."""
        from moontide.evaluate import compare_groups, compare_predictions, scored_rows
        from moontide.store.classes import read_classes
        from moontide.store.predictions import more_columns, write_predictions

        n = len(result.labels)  # of a stream, full batches alone may count
        answers, more = self.make(task, result, None if classes is None else read_classes(classes))
        if out is not None:
            more = more_columns(task, groups, n) | more
            write_predictions(out, result, data.ids and data.ids[:n], task.class_names, more, answers)
            note(f"wrote {out}")
            emit(out=out)
        rows = scored_rows(task, n, answers)
        if groups is not None:
            print_groups(compare_groups(data.labels, result, groups, rows))
        if answers is not None:
            print_answers(answers)
        print_summary(compare_predictions(data.labels, result, rows), result, task, answers)

    def _question(self, result: Result, answers: Answers) -> None:
        """Warn if a threshold marks all samples or none; scores are not on a fixed scale."""
        from moontide.core.arrays import to_numpy

        if str(self.unknown).strip().startswith(">") and answers.none.all() | ~answers.none.any():
            scores = to_numpy(result.unknown)
            many = "all" if answers.none.all() else "none"
            warnings.warn(
                f"'--unknown {self.unknown}' marks {many} of the samples: scores in the column unknown range from "
                f"{scores.min():.4g} to {scores.max():.4g} here; choose a value between them, or a share such as 0.1.",
                UserWarning,
                stacklevel=2,
            )


@Parameter(name="*", group=ANSWERS)
@dataclass(frozen=True)
class SortChoice:
    """Options that sort images into folders."""

    sort_into: Annotated[
        Path | None,
        Parameter(
            help="Create this folder with links to the images, one sub-folder per label; 'moontide undo' reverses it."
        ),
    ] = None
    copy: Annotated[
        bool, Parameter(negative="", show_default=False, help="With --sort-into: copies instead of links.")
    ] = False
    rename: Annotated[
        str | None,
        Parameter(
            help="New names, with {label}, {name}, {number} or {confidence}: of links and copies or, without "
            "--sort-into, of the images themselves; 'undo' reverses it."
        ),
    ] = None

    def check(self) -> None:
        """Refuse invalid combinations, and a folder that is in use or cannot be made."""
        from moontide.sorting import check_folder

        if self.copy and self.sort_into is None:
            raise OptionError("'--copy' has no effect without '--sort-into'; add it, or leave '--copy' out.")
        if self.rename is not None and not any(field in self.rename for field in ("{name}", "{number}")):
            raise OptionError(f"'--rename' must contain {{name}} or {{number}}. Got {self.rename[:80]!r} instead.")
        if self.sort_into is not None:
            check_folder(self.sort_into)

    def check_names(self, names: ClassList) -> None:
        """Refuse classes that would name a folder or file and cannot."""
        from moontide.sorting import check_labels

        if self.sort_into is not None or "{label}" in (self.rename or ""):
            check_labels({*names.names, *(level for path in names.paths or () for level in path)})


NO_ANSWER_CHOICE, NO_SORT_CHOICE = AnswerChoice(), SortChoice()  # no option given
