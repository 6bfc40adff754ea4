"""Tables of text: .csv that no spreadsheet computes, and .jsonl."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

FORMULA = re.compile(r"'*[=+\-@\t\r\n]")  # how text begins that a spreadsheet computes, or that is written like it


def write_table(handle: BinaryIO, columns: Mapping[str, Sequence[Any]], kind: str) -> None:
    """Write named columns as .csv with a header, or as .jsonl.

    >>> buffer = io.BytesIO()
    >>> write_table(buffer, {"id": [0], "name": ["cat"]}, ".jsonl")
    >>> buffer.getvalue()
    b'{"id": 0, "name": "cat"}\\n'
    """
    text = io.TextIOWrapper(handle, encoding="utf-8", newline="")
    rows = zip(*columns.values(), strict=True)
    if kind == ".csv":
        text.write(csv_row(columns))
        text.writelines(map(csv_row, rows))
    else:
        for row in rows:
            text.write(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, default=str) + "\n")
    text.detach()


def csv_row(values: Iterable[Any]) -> str:
    """Return a line of a .csv; quoted is also the text with a return in it, which Python's writer leaves as it is.

    >>> csv_row(["a,b", 0.5, None, "=1"])
    '"a,b",0.5,,\\'=1\\n'
    """
    cells = ("" if value is None else str(as_cell(value)) for value in values)
    quoted = (f'"{cell.replace(chr(34), chr(34) * 2)}"' if re.search(r'[",\r\n]', cell) else cell for cell in cells)
    return ",".join(quoted) + "\n"


def as_cell(value: Any) -> Any:
    """Return a value as a cell of a .csv: text that a spreadsheet would take for a formula gets a ' in front.

    >>> as_cell("=HYPERLINK(A1)"), as_cell(-0.5), as_cell("cat")
    ("'=HYPERLINK(A1)", -0.5, 'cat')
    """
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value


def from_cell(text: str) -> str:
    """Read a cell that `as_cell` wrote.

    >>> from_cell("'=HYPERLINK(A1)"), from_cell("'tis")
    ('=HYPERLINK(A1)', "'tis")
    """
    return text[1:] if text[:1] == "'" and FORMULA.match(text[1:]) else text
