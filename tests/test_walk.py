"""What a fit in numpy and a step of a stream run through: few modules, and every check once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import moontide
from moontide.core.backends import plain
from moontide.methods import moon
from moontide.simulate import simulate

SOURCE = Path(moontide.__file__).parent
TOOLS = {"core.arrays", "core.threads", "progress"}  # general: they know nothing of mixtures
DATA = "types"  # a task, which is asked for its sizes


def calls(run: Callable[[], Any]) -> set[tuple[str, str, str]]:
    """Return (module that calls, module, function) of all calls of functions of moontide in a run."""
    found = set()

    def module(frame: FrameType | None) -> str:
        path = Path(frame.f_code.co_filename) if frame is not None else Path()
        return ".".join(path.relative_to(SOURCE).with_suffix("").parts) if SOURCE in path.parents else ""

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (here := module(frame)):
            found.add((module(frame.f_back), here, frame.f_code.co_name))

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def test_a_fit_goes_through_eight_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that call another one: a call in them leads to another of them, or to a function that ends there."""
    monkeypatch.setattr(moon, "choose", lambda features, k: plain)
    data, method = simulate(64, 100, effective_classes=3, seed=0), moontide.MOON()
    found = calls(lambda: method.fit_predict(data.features, data.text))
    between = [(caller, here) for caller, here, _ in found if caller and caller != here and here != DATA]
    walk = {caller for caller, here in between if caller not in TOOLS and here not in TOOLS}
    assert len(walk) <= 8, sorted(walk)
    assert {"protocols", "methods.moon", "core.driver", "core.rows", "core.backends.plain", "core.ple"} <= walk


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
