"""`moontide methods`: list the methods and their options."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from moontide.cli.common import table_console
from moontide.cli.output import emit_whole
from moontide.options import json_safe

# Methods in the tables of the MOON paper, and methods first published here; the others are "rivals".
PAPER = {
    "adapt", "dmn", "em_dirichlet", "gda_clip", "moon", "moon_gaussian", "moon_samplewise", "mta", "oga", "stata",
    "stata_vmf", "tda", "tent", "transclip", "zero_shot", "zlap",
}  # fmt: skip
OURS = {"tide"}
GROUPS = {"ours": "ours", "paper": "the paper's", "rivals": "rivals"}


def methods(
    name: Annotated[str | None, Parameter(help="One method, with all its options and presets.")] = None,
    /,
) -> None:
    """List all methods, or one method with its options, defaults, allowed values and presets.

    For example:

        moontide methods
        moontide methods moon
    """
    from moontide.registry import method_names

    emit_whole(json_safe([describe(n) for n in method_names()] if name is None else describe(name)))
    if name is None:
        _print_all([describe(n) for n in method_names()])
    else:
        _print_one(describe(name))


def group_of(name: str) -> str:
    """Return the group of a method.

    >>> group_of("moon"), group_of("inmap"), group_of("tide")
    ('paper', 'rivals', 'ours')
    """
    return "paper" if name in PAPER else "ours" if name in OURS else "rivals"


def describe(name: str) -> dict[str, Any]:
    """Gather all information about a method.

    >>> describe("moon")["options"]["neighbours"]["allowed"]
    'an integer of at least 1 and of at most 1000'
    """
    from moontide.protocols import OnlineMethod
    from moontide.registry import method_type

    cls = method_type(name)
    return {
        "name": name,
        "group": group_of(name),
        "about": (cls.__doc__ or "").strip().partition("\n")[0],
        "kind": "online" if issubclass(cls, OnlineMethod) else "batch",
        "citation": cls.citation,
        "needs": sorted(cls.needs),
        "accepts": sorted(cls.accepts),
        "presets": {preset: dict(options) for preset, options in cls.presets.items()},
        "options": {
            key: {"default": spec.default, "allowed": spec.rule(), "doc": spec.doc} for key, spec in cls.specs().items()
        },
    }


def _print_all(found: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("method", "kind", "needs", "presets", "citation"):
        table.add_column(heading, no_wrap=heading in ("method", "kind"))
    for group, title in GROUPS.items():
        table.add_row(title, style="bold")
        for m in (m for m in found if m["group"] == group):
            table.add_row(m["name"], m["kind"], ", ".join(m["needs"]), ", ".join(m["presets"]), m["citation"])
        table.add_section()
    console = table_console()
    console.print(table)
    console.print("Needs are inputs beyond features. 'moontide methods NAME' lists the options of one.")


def _print_one(m: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("option", "default", "allowed", "what it does"):
        table.add_column(heading, no_wrap=heading in ("option", "default"))
    for key, spec in m["options"].items():
        table.add_row(key, str(spec["default"]), spec["allowed"], spec["doc"])
    console = table_console()
    console.print(f"{m['name']} ({m['kind']}): {m['about']}\n{m['citation']}")
    if m["needs"]:
        console.print(f"needs beyond features: {', '.join(m['needs'])}")
    if m["accepts"]:
        console.print(f"optional inputs: {', '.join(m['accepts'])}")
    console.print(table if m["options"] else "This method has no options.")
    for preset, options in m["presets"].items():
        settings = ", ".join(f"{key}={value}" for key, value in options.items())
        console.print(f"preset {preset}: {settings or 'the defaults'}")
