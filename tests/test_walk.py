"""What a reader of a fit of MOON in numpy meets: few modules, and the functions that docs/maths.md names."""

from __future__ import annotations

import re
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

ROOT = Path(__file__).parents[1]
SOURCE = Path(moontide.__file__).parent
TOOLS = {"core.arrays", "core.threads", "core.progress"}  # general: they know nothing of mixtures
DATA = "types"  # a task, which is asked for its sizes
# Functions of docs/maths.md that MOON does not call, and why they are there.
OTHERS = {
    "moontide.samplers.vmf.sample": "draws, for simulations",
    "moontide.core.vmf.kl": "the divergence of any two laws, which ple.anchor_kl is held against",
    "moontide.core.bessel.bessel_ratio": "A_d itself; MOON only inverts it",
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"beta": "soft"},
    {"inverse": "newton", "log_normaliser": "accurate"},
    {"gamma": "zero_shot", "votes": "gamma"},
]


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


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[tuple[str, str, str]]]:
    """Return the calls of a fit with some options in the plain backend."""
    monkeypatch.setattr(moon, "choose", lambda features, k: plain)
    data = simulate(64, 100, effective_classes=3, seed=0)

    def run(**options: Any) -> set[tuple[str, str, str]]:
        method = moontide.MOON(**options)
        return calls(lambda: method.fit_predict(data.features, data.text))

    return run


def test_a_fit_goes_through_eight_modules(fit: Callable[..., set[tuple[str, str, str]]]) -> None:
    """Those that call another one: a call in them leads to another of them, or to a function that ends there."""
    between = [(caller, here) for caller, here, _ in fit() if caller and caller != here and here != DATA]
    walk = {caller for caller, here in between if caller not in TOOLS and here not in TOOLS}
    assert len(walk) <= 8, sorted(walk)
    assert {"protocols", "methods.moon", "core.driver", "core.rows", "core.backends.plain", "core.ple"} <= walk


def test_moon_calls_what_the_maths_names(fit: Callable[..., set[tuple[str, str, str]]]) -> None:
    page = (ROOT / "docs/maths.md").read_text(encoding="utf-8")
    of_moon = page[: page.index("\n## TIDE")]
    named = set(re.findall(r"{py:func}`[^<`]*<([\w.]+)>`", of_moon))
    stata = {name for name in named if name.startswith("moontide.methods._gaussian.")}
    assert len(named) > 20
    ran = {f"moontide.{here}.{name}" for options in VARIANTS for _, here, name in fit(**options)}
    assert named - ran - stata == set(OTHERS)


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
