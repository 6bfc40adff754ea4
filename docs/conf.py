"""Settings of the documentation: sphinx-build -b html docs docs/_build/html."""

import re
import textwrap

import moontide

project = "Moontide"
author = "The Moontide authors"
version = release = moontide.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Moontide {version}"
html_show_copyright = False

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100


def plain_text(app, what, name, obj, options, lines):
    """Show docstrings as they are written: `code` as code, indented paragraphs verbatim, no other markup."""
    paragraphs = []
    for text in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if not text.lstrip().startswith(">>>"):  # an example
            if re.search(r"^\s", text, re.MULTILINE):
                text = "::\n\n" + textwrap.indent(text, "    ")
            else:
                parts = re.split(r"(`[^`]+`)", text)
                text = "".join(
                    f"`{part}`" if part[:1] == "`" else re.sub(r"([\\*_|`])", r"\\\1", part) for part in parts
                )
        paragraphs.append(text)
    lines[:] = "\n\n".join([*paragraphs, ""]).split("\n")


def setup(app):
    """Register the hook."""
    app.connect("autodoc-process-docstring", plain_text)
