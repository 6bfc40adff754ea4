"""A table as Markdown, LaTeX, CSV or HTML with the paper's marks: best bold, second underlined, gains coloured."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from moontide.report.grids import AVERAGE, Grid, Number
from moontide.store.tables import csv_row

PREAMBLE = r"""\documentclass{article}
\usepackage[margin=2cm,landscape]{geometry}
\usepackage{booktabs,graphicx,textcomp}
\usepackage[table]{xcolor}
\definecolor{gain}{RGB}{0,128,0}
\definecolor{loss}{RGB}{192,0,0}
\definecolor{ours}{RGB}{230,230,230}
\newcommand{\up}[1]{$_{\textcolor{gain}{+#1}}$}
\newcommand{\down}[1]{$_{\textcolor{loss}{-#1}}$}
\newcommand{\same}[1]{$_{\textcolor{gray}{\pm#1}}$}
\newcommand{\within}[1]{{\tiny\,$\pm$#1}}
\begin{document}
"""
_LATEX = {
    "\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "ξ": r"$\xi$", "±": r"$\pm$", "–": "--",
    **{c: "\\" + c for c in "&%$#_{}"},
}  # fmt: skip


def latex_text(text: str) -> str:
    r"""Write text so that LaTeX prints it as it is.

    >>> latex_text("1–4 classes, 95 % of clip_rn50")
    '1--4 classes, 95 \\% of clip\\_rn50'
    >>> latex_text("\\input{x}\n^^5c")
    '\\textbackslash{}input\\{x\\} \\textasciicircum{}\\textasciicircum{}5c'
    """
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def signed(gain: float) -> tuple[str, str]:
    """Return the direction of a gain ("up", "down" or "same") and its size, both as printed.

    >>> signed(1.26), signed(-0.3), signed(0.04)
    (('up', '1.3'), ('down', '0.3'), ('same', '0.0'))
    """
    size = f"{abs(gain):.1f}"
    return ("same" if float(size) == 0 else "up" if gain > 0 else "down"), size


_SIGNS = {"up": "+", "down": "−", "same": "±"}


def extent(n: Number) -> str:
    """Return what is printed after a number: half its interval, and its gain.

    >>> extent(Number(81.2, half=0.5, gain=15.0))
    ' ±0.5 (+15.0)'
    """
    half = "" if n.half is None else f" ±{n.half:.1f}"
    if n.gain is None:
        return half
    way, size = signed(n.gain)
    return f"{half} ({_SIGNS[way]}{size})"


def markdown(grid: Grid) -> str:
    """Return a table for Markdown.

    >>> from moontide.report.grids import Line
    >>> line = Line("MOON", [Number(81.24, 0.5, 15.0, rank=1)], "ours")
    >>> print(markdown(Grid("t", "Accuracy.", ["ImageNet"], [("low", [line])])))
    Accuracy.
    <BLANKLINE>
    | scenario | method | ImageNet |
    |---|---|---:|
    | low | MOON | **81.2** ±0.5 (+15.0) |
    """

    def cell(n: Number | None) -> str:
        if n is None:
            return "–"
        value = f"{n.value:.{n.digits}f}"
        value = f"**{value}**" if n.rank == 1 else f"<u>{value}</u>" if n.rank == 2 else value
        return value + extent(n)

    def row(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    named = any(name for name, _ in grid.blocks)
    lines = [grid.caption, "", row([*["scenario"] * named, "method", *grid.headings])]
    lines.append("|" + "---|" * (1 + named) + "---:|" * len(grid.headings))
    for name, block in grid.blocks:
        for line in block:
            title = line.title if line.kind in ("method", "ours") else f"*{line.title}*"
            lines.append(row([*[name] * named, title, *map(cell, line.numbers)]))
    return "\n".join(lines)


def latex(grid: Grid) -> str:
    r"""Return a table environment for LaTeX; the colours and marks are commands of `PREAMBLE`.

    >>> from moontide.report.grids import Line
    >>> line = Line("MOON", [Number(81.24, 0.5, -1.0, rank=1)], "ours")
    >>> print(latex(Grid("t", "Accuracy.", ["ImageNet"], [("low", [line])])).splitlines()[8])
    low & \cellcolor{ours}MOON & \cellcolor{ours}\textbf{81.2}\within{0.5}\down{1.0} \\
    """

    def cell(n: Number | None) -> str:
        if n is None:
            return "--"
        value = f"{n.value:.{n.digits}f}"
        value = rf"\textbf{{{value}}}" if n.rank == 1 else rf"\underline{{{value}}}" if n.rank == 2 else value
        value += "" if n.half is None else rf"\within{{{n.half:.1f}}}"
        return value + ("" if n.gain is None else "\\{}{{{}}}".format(*signed(n.gain)))

    columns = "ll" + "r" * len(grid.headings)
    lines = [r"\begin{table}[htbp]", r"\centering\small", rf"\caption{{{latex_text(grid.caption)}}}"]
    lines += [r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{", rf"\begin{{tabular}}{{{columns}}}"]
    lines += [r"\toprule", " & ".join(["", "Method", *map(latex_text, grid.headings)]) + r" \\"]
    for name, block in grid.blocks:
        lines.append(r"\midrule")
        for number, line in enumerate(block):
            shade = r"\cellcolor{ours}" if line.kind == "ours" else ""
            style = r"\itshape\footnotesize " if line.kind in ("paper", "test") else ""
            cells = [shade + style + text for text in (latex_text(line.title), *map(cell, line.numbers))]
            lines.append(" & ".join([latex_text(name) if number == 0 else "", *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}}", r"\end{table}", ""])


def csv_text(grid: Grid) -> str:
    """Return the plain numbers of a table as CSV.

    >>> from moontide.report.grids import Line
    >>> print(csv_text(Grid("t", "Accuracy.", ["a"], [("low", [Line("MOON", [Number(81.25)])])])))
    scenario,kind,method,a
    low,method,MOON,81.25
    <BLANKLINE>
    """
    rows: list[list[Any]] = [["scenario", "kind", "method", *grid.headings]]
    for name, block in grid.blocks:
        for line in block:
            values = [None if n is None else round(n.value, 6) for n in line.numbers]
            rows.append([name, line.kind, line.title, *values])
    return "".join(map(csv_row, rows))


def html(grid: Grid) -> str:
    """Return a table for the page; `page.py` has the style.

    >>> from moontide.report.grids import Line
    >>> html(Grid("t", "Accuracy.", ["a"], [("", [Line("MOON", [Number(81.2, rank=1)])])])).count("<td")
    1
    """

    def cell(n: Number | None, heading: str) -> str:
        kind = ' class="average"' if heading == AVERAGE else ""
        if n is None:
            return f"<td{kind}>–</td>"
        value = f"{n.value:.{n.digits}f}"
        value = f"<b>{value}</b>" if n.rank == 1 else f"<u>{value}</u>" if n.rank == 2 else value
        gain = ""
        if n.gain is not None:
            way, size = signed(n.gain)
            gain = f'<span class="{way}">{_SIGNS[way]}{size}</span>'
        half = "" if n.half is None else f'<span class="half">±{n.half:.1f}</span>'
        return f'<td{kind}>{value}<span class="side">{half}{gain}</span></td>'

    named = any(name for name, _ in grid.blocks)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in ["Scenario"] * named + ["Method", *grid.headings])
    body = []
    for name, block in grid.blocks:
        body.append("<tbody>")
        for number, line in enumerate(block):
            span = f'<th class="scenario" rowspan="{len(block)}">{escape(name)}</th>' if named and not number else ""
            cells = "".join(map(cell, line.numbers, grid.headings))
            body.append(f'<tr class="{line.kind}">{span}<th>{escape(line.title)}</th>{cells}</tr>')
        body.append("</tbody>")
    caption = f"<figcaption>{escape(grid.caption)}</figcaption>"
    kind = "named" if named else "plain"
    table = f'<table class="{kind}"><thead><tr>{head}</tr></thead>{"".join(body)}</table>'
    return f'<figure id="{escape(grid.name)}">{caption}<div class="scroll">{table}</div></figure>'
