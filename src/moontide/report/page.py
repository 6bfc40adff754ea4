"""The report as one HTML page that needs no other file: style, tables and figures are inside it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from moontide.report.grids import Grid
from moontide.report.plots import Figure
from moontide.report.render import html

STYLE = """
:root { --ink: #1a1a1a; --soft: #6b6b6b; --rule: #1a1a1a; --hair: #dcdcdc; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 84rem; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--hair); }
p, li { max-width: 52rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
a { color: #0057a8; }
.lead, footer { color: var(--soft); }
figure { margin: 1.5rem 0 2rem; }
figcaption { max-width: 60rem; margin-bottom: .5rem; color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums;
  border-top: 2px solid var(--rule); border-bottom: 2px solid var(--rule); }
thead th { border-bottom: 1px solid var(--rule); font-weight: 600; vertical-align: bottom; }
tbody + tbody { border-top: 1px solid var(--rule); }
th, td { padding: .2rem .4rem; text-align: right; white-space: nowrap; vertical-align: top; }
tbody th { text-align: left; font-weight: 400; }
thead th:first-child { text-align: left; }
th.scenario { white-space: normal; max-width: 6rem; padding-right: .8rem; }
.named thead th:nth-child(2) { text-align: left; }
tr.ours > :not(.scenario) { background: #ececec; }
td.average { background: #fff1d9; }
tr.ours td.average { background: #f3e2c2; }
tr.paper td, tr.paper th:not(.scenario), tr.test td, tr.test th:not(.scenario) {
  color: var(--soft); font-size: .78rem; font-style: italic; padding-top: 0; }
.side { display: inline-flex; flex-direction: column; align-items: flex-start; margin-left: .3em; font-size: .72em;
  line-height: 1.1; vertical-align: middle; }
span.up { color: #007a00; } span.down { color: #c00000; } span.same { color: var(--soft); }
tr.paper span.up, tr.paper span.down { color: inherit; }
span.half { color: var(--soft); }
img { max-width: 100%; height: auto; }
@media print { body { max-width: none; padding: 0; } figure { break-inside: avoid; } }
"""


class Section(NamedTuple):
    """The part of a report about one suite."""

    name: str
    title: str
    parts: Sequence[Grid | Figure]


def page(sections: Sequence[Section], notes: Sequence[str], made: Sequence[str]) -> str:
    """Return the page: notes on the results, one section per suite, and the versions that made them.

    >>> page([Section("demo", "A demo", [])], ["Only a demo."], ["Moontide"]).count("<section")
    1
    """
    links = "".join(f'<a href="#{escape(section.name)}">{escape(section.name)}</a>' for section in sections)
    body = []
    for name, title, parts in sections:
        inner = "".join(html(part) if isinstance(part, Grid) else _image(part) for part in parts)
        body.append(f'<section id="{escape(name)}"><h2>{escape(title)}</h2>{inner}</section>')
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Moontide benchmark report</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>Benchmark report</h1>
<p class="lead">Every number comes from the records of single runs. <b>Best</b> and <u>second</u> of each column are
marked; ± is half the 95 % bootstrap interval, <span class="up">+</span> and <span class="down">−</span> are points
gained and lost against zero-shot on the same samples. p compares the two best methods on the same runs (sign-flip
permutation test).</p>
<nav>{links}</nav>
</header>
<main>
{_list("What to know", notes)}
{"".join(body)}
</main>
<footer>
{_list("Made by", made)}
</footer>
</body>
</html>
"""


def _image(figure: Figure) -> str:
    data = base64.b64encode(figure.svg).decode()
    image = f'<img alt="{escape(figure.caption)}" src="data:image/svg+xml;base64,{data}">'
    return f'<figure id="{escape(figure.name)}"><figcaption>{escape(figure.caption)}</figcaption>{image}</figure>'


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return f"<h2>{escape(title)}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
