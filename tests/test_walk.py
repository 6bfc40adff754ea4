"""What a fit in numpy and a step of a stream run through: few modules, and every check once."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import moontide
from moontide.simulate import simulate

SOURCE = Path(moontide.__file__).parent
WALK = {  # those that a reader follows
    "protocols", "methods.moon", "core.backends", "core.driver", "core.rows", "core.backends.plain", "core.ple",
    "core.mixture",
}  # fmt: skip
HELPERS = {  # those that can be taken at their word: none of them knows a mixture
    "types", "plausible", "memory", "progress",  # the input, checks of it, progress bars
    "core.arrays", "core.graph", "core.simplex", "core.formulas", "core.threads",  # general functions
}  # fmt: skip


def calls(run: Callable[[], Any]) -> set[tuple[str, str, str]]:
    """Return (module that calls, module, function) of all calls of functions of moontide in a run."""
    found = set()

    def module(frame: FrameType | None) -> str:
        path = Path(frame.f_code.co_filename) if frame is not None else Path()
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts) if SOURCE in path.parents else ""
        return name.removesuffix(".__init__")

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (here := module(frame)):
            found.add((module(frame.f_back), here, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_a_fit_goes_through_eight_modules_and_a_few_helpers() -> None:
    data = simulate(64, 100, effective_classes=3, seed=0)
    features, text = data.features.astype(np.float64), data.text.astype(np.float64)  # which no compiled loops take
    method = moontide.MOON()
    method.fit_predict(features, text)  # imports what it needs
    found = {here for _, here, _ in calls(lambda: method.fit_predict(features, text))}
    assert found == WALK | HELPERS
    assert len(WALK) <= 8


@pytest.mark.parametrize("name", sorted(HELPERS))
def test_a_helper_of_a_fit_can_be_read_by_itself(name: str) -> None:
    source = (SOURCE / name.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    imported = {f"{node.module}.{alias.name}" for node in nodes for alias in node.names}
    of_mixtures = [f"moontide.{one}." for one in WALK - {"core.backends"}]
    assert not [each for each in imported if f"{each}.".startswith(tuple(of_mixtures))]


def test_a_step_of_a_stream_checks_its_rows_once_and_the_text_not_at_all() -> None:
    """With many classes, scaling the text again would take longer than the rest of a small step."""
    data = simulate(8, 2000, effective_classes=3, seed=0)
    for name in ("moon", "tide", "zero_shot"):
        stream = moontide.Stream(name, data.text)
        stream.push(data.features[:2])
        own, seen = stream.state.text, []

        def note(frame: FrameType, event: str, _: Any, own: Any = own, seen: list[bool] = seen) -> None:
            if event == "call" and frame.f_code.co_name in ("unit_rows", "as_real", "as_matrix"):
                seen.append(np.shares_memory(frame.f_locals["x"], own))

        sys.setprofile(note)
        try:
            stream.push(data.features[2:3])
        finally:
            sys.setprofile(None)
        assert not any(seen), f"{name} looks at the text again"
        assert len(seen) >= 2
        rows = calls(lambda stream=stream: stream.push(data.features[3:4]))
        assert ("protocols", "core.arrays", "as_real") in rows


@pytest.mark.parametrize("name", ["moon", "tide", "tda"])
def test_new_classes_of_a_stream_are_checked_and_those_it_has_are_not(name: str) -> None:
    data = simulate(8, 2000, effective_classes=3, seed=0)
    stream, seen = moontide.Stream(name, data.text[:-3]), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name in ("unit_rows", "as_real", "as_matrix"):
            seen.append(len(frame.f_locals["x"]))

    sys.setprofile(note)
    try:
        stream.add_classes(data.text[-3:])
        stream.remove_classes([0])
    finally:
        sys.setprofile(None)
    assert seen == [3, 3]  # `as_real`, `unit_rows`
