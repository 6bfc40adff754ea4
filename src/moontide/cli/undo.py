"""`moontide undo`: reverse --sort-into or --rename."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moontide.cli.output import counted, emit, say


def undo(folder: Annotated[Path, Parameter(help="The folder of --sort-into, or of the renamed images.")], /) -> None:
    """Reverse --sort-into or --rename of 'moontide classify'.

    For example:

        moontide undo sorted/
    """
    from moontide.sorting import undo as take_back

    done = take_back(folder)
    emit(undone=done)
    say(f"undone     {counted(done, 'image')}")
