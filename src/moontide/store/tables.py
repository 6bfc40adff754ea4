"""Tables of named columns as .csv (without formulas for a spreadsheet), .jsonl, .json, .xlsx and .parquet.

Values that are lists, such as the most likely classes, stay lists where the format has them, and are JSON in one cell
of a .csv or .xlsx.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

from moontide.errors import missing_extra
from moontide.store.files import parquet_module

# how text begins that a spreadsheet computes, also after spaces or with the full-width and small signs of East Asian
# keyboards, or that is written like it
SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20\ufe66\ufe62\ufe63\ufe6b"
FORMULA = re.compile(rf"'*(?:[\t\r\n]|[\s\x00-\x1f\u200b-\u200f\u2060\ufeff]*[{SIGNS}])")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")  # what a cell of an .xlsx cannot hold


def write_table(handle: BinaryIO, columns: Mapping[str, Sequence[Any]], kind: str) -> None:
    """Write named columns, one row per sample, in the format of `kind`, the ending of a file.

    >>> buffer = io.BytesIO()
    >>> write_table(buffer, {"id": [0], "name": ["cat"]}, ".jsonl")
    >>> buffer.getvalue()
    b'{"id": 0, "name": "cat"}\\n'
    """
    if kind == ".parquet":
        parquet_module("Writing").write_columns(handle, columns)
        return
    if kind == ".xlsx":
        _write_xlsx(handle, columns)
        return
    text = io.TextIOWrapper(handle, encoding="utf-8", newline="")
    rows = zip(*columns.values(), strict=True)
    if kind == ".csv":
        text.write(csv_row(columns))
        text.writelines(map(csv_row, rows))
    else:
        whole = kind == ".json"
        ends = ["[\n", ",\n", "\n]\n"] if whole else ["", "\n", "\n"]
        text.write(ends[0])
        empty = True
        for i, row in enumerate(rows):
            found = json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False, default=str)
            text.write((ends[1] if i else "") + found)
            empty = False
        text.write("" if empty and not whole else ends[2])
    text.detach()


def csv_row(values: Iterable[Any]) -> str:
    """Return a line of a .csv; text with a carriage return is quoted too, which Python's writer does not do.

    >>> csv_row(["a,b", 0.5, None, "=1"])
    '"a,b",0.5,,\\'=1\\n'
    """
    cells = ("" if value is None else str(as_cell(_flat(value))) for value in values)
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


def _flat(value: Any) -> Any:
    """Return a value as one cell holds it."""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict | tuple) else value


def require_xlsx() -> Any:
    """Return what writes .xlsx files, or raise an error that names what is missing.

    >>> require_xlsx().__name__
    'openpyxl'
    """
    try:
        import openpyxl
    except ImportError:
        raise missing_extra("openpyxl", "xlsx", "Writing .xlsx files") from None
    return openpyxl


def _write_xlsx(handle: BinaryIO, columns: Mapping[str, Sequence[Any]]) -> None:
    openpyxl = require_xlsx()
    from openpyxl.cell import WriteOnlyCell

    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("labels")

    def cell(value: Any) -> Any:
        value = _flat(value)
        value = value if isinstance(value, int | float | str | type(None)) else str(value)
        if not isinstance(value, str):
            return value
        made = WriteOnlyCell(sheet, value=CONTROL.sub(" ", value)[:32_767])
        made.data_type = "s"  # a name that begins with = is no formula
        return made

    sheet.append([cell(name) for name in columns])
    for row in zip(*columns.values(), strict=True):
        sheet.append([cell(value) for value in row])
    book.save(handle)
