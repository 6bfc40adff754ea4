"""Every common check over every registered method, and over methods that are broken on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import moontide
from moontide.checks import Extras, Tasks, check_method, checks_for
from moontide.checks.common import check_objective_never_rises
from moontide.checks.encoder import rows_as_images
from moontide.checks.tasks import expect_sound, single
from moontide.core.arrays import to_numpy
from moontide.core.simplex import zero_shot
from moontide.errors import InputError
from moontide.methods.zero_shot import ZeroShot
from moontide.options import option
from moontide.protocols import Method, OnlineMethod, PerBatch, State
from moontide.registry import method_type
from moontide.types import Result, Task

CLOTHING = Path(__file__).parents[2] / "shared" / "features" / "clothing_tiny.npz"

# What a method needs beyond features and views, by method.
EXTRAS: dict[str, Extras] = {"tent": rows_as_images}

# (method, check): why the method does not pass it. A row whose check passes fails the suite.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def methods() -> Iterator[tuple[str, Method]]:
    for name in moontide.method_names():
        default = moontide.method(name)
        yield name, default
        for preset in method_type(name).presets:
            if (method := method_type(name).from_preset(preset)) != default:  # which is checked already
                yield f"{name}[{preset}]", method
    yield "PerBatch(moon)", PerBatch(moontide.method("moon"))


def missing(method: Method) -> str:
    """Say what a method needs that nothing here gives it."""
    needs = sorted(method.needs - {"views"})
    return f"{method.name} needs {needs}, and EXTRAS has no row for it" if needs and method.name not in EXTRAS else ""


def cases(exceptions: dict[tuple[str, str], str]) -> Iterator[Any]:
    for name, method in methods():
        for check_name, check in checks_for(method, EXTRAS.get(method.name)):
            marks = []
            if lacks := missing(method):
                marks.append(pytest.mark.skip(reason=lacks))
            if reason := exceptions.get((name, check_name)):
                marks.append(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
            yield pytest.param(check, id=f"{name}-{check_name}", marks=marks)


@pytest.mark.parametrize("check", list(cases(EXCEPTIONS)))
def test_every_method_passes(check: Callable[[], None]) -> None:
    check()


def test_every_exception_is_of_a_check_and_has_a_reason() -> None:
    known = {(name, check) for name, method in methods() for check, _ in checks_for(method)}
    assert set(EXCEPTIONS) <= known
    assert all(len(reason) > 20 for reason in EXCEPTIONS.values())


def test_an_exception_for_a_check_that_passes_fails() -> None:
    row = {("zero_shot", "check_deterministic"): "for a try"}
    [marks] = [case.marks for case in cases(row) if case.id == "zero_shot-check_deterministic"]
    assert [(mark.name, mark.kwargs["strict"], mark.kwargs["reason"]) for mark in marks] == [
        ("xfail", True, "for a try")
    ]


@pytest.mark.skipif(not CLOTHING.exists(), reason=f"{CLOTHING.name} is not here")
@pytest.mark.parametrize("name", moontide.method_names())
def test_no_method_gives_nan_in_another_embedding_space(name: str) -> None:
    if lacks := missing(moontide.method(name)):
        pytest.skip(lacks)
    data = np.load(CLOTHING)
    features, text = data["image_features"].astype("float32")[::10], data["text_features"].astype("float32")
    task = single(Tasks(EXTRAS.get(name)).of(features, text, 1 / float(data["temperature"])))
    expect_sound(moontide.method(name).fit_predict(task), task, name)


EXACT = {"beta": "soft", "update": "exact", "inverse": "newton", "log_normaliser": "accurate", "kappa_cap": math.inf,
         "r_cap": 1.0, "count_epsilon": 0.0, "laplacian_weight": 0.0}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"), [("moon", {**EXACT, "gamma": "off"}), ("moon", {**EXACT, "gamma": "zero_shot"})]
)
def test_the_objective_falls_where_a_method_says_so(name: str, options: dict[str, Any]) -> None:
    check_objective_never_rises(moontide.method(name, **options), Tasks())


# The checks can fail: each of these is a zero-shot classifier with one fault, which the check named finds.

BLOCK_ROWS = 1000  # what `in_blocks` computes at once
GENERATOR = np.random.default_rng(0)


def predicted(x: Any, task: Task) -> Any:
    return zero_shot(x, task.text, task.logit_scale)


def in_blocks(task: Task) -> Any:
    parts = [task.features[i : i + BLOCK_ROWS] for i in range(0, task.n, BLOCK_ROWS)]
    return np.concatenate([predicted(x - x.mean(axis=0), task) for x in parts])


def written_to(task: Task) -> Any:
    task.text[:] = task.text[::-1]
    return predicted(task.features, task)


def raising(error: Exception) -> Any:
    raise error


def to_simplex(p: Any) -> Any:
    return p / p.sum(axis=1, keepdims=True)


FAULTS: dict[str, list[Callable[[Task, Result], Result]]] = {
    "check_rows_are_probabilities": [
        lambda t, r: replace(r, probs=2 * r.probs),
        lambda t, r: replace(r, probs=r.probs * math.nan),
        lambda t, r: replace(r, probs=r.probs[:, :-1]),
        lambda t, r: replace(r, probs=to_simplex(r.probs.astype("float64"))),
        lambda t, r: replace(r, zero_shot=-r.zero_shot),
    ],
    "check_labels_are_argmax": [lambda t, r: replace(r, native_scores=-r.probs)],
    "check_zero_shot_is_reported": [lambda t, r: replace(r, zero_shot=zero_shot(t.features, t.text, 100.0))],
    "check_diagnostics": [
        lambda t, r: replace(r, objective=(1.0, math.inf)),
        lambda t, r: replace(r, kappa=np.full(t.k, math.nan)),
        lambda t, r: replace(r, beta=np.full(t.k, 1.5)),
        lambda t, r: replace(r, beta=np.zeros(t.n)),
    ],
    "check_float32_close_to_float64": [
        lambda t, r: replace(r, probs=zero_shot(t.features, t.text, 98.0 if t.text.dtype == "float32" else 100.0))
    ],
    "check_float16_is_accepted": [
        lambda t, r: r if t.extras["views"].dtype != "float16" else replace(r, probs=to_simplex(r.probs + 1))
    ],
    "check_torch_equals_numpy": [lambda t, r: replace(r, probs=to_numpy(r.probs))],
    "check_permuted_classes": [lambda t, r: replace(r, probs=to_simplex(r.probs * np.arange(1, t.k + 1)))],
    "check_permuted_samples": [lambda t, r: replace(r, probs=to_simplex(r.probs + r.probs[:1]))],
    "check_blocks_change_nothing": [lambda t, r: replace(r, probs=in_blocks(t))],
    "check_one_sample": [lambda t, r: replace(r, probs=r.probs / (t.n > 1))],
    "check_one_class": [lambda t, r: replace(r, probs=r.probs / (t.k > 1))],
    "check_fewer_samples_than_classes": [lambda t, r: replace(r, probs=r.probs / (t.n >= t.k))],
    "check_empty_class": [lambda t, r: replace(r, native_scores=np.log(r.probs))],
    "check_duplicate_rows": [lambda t, r: replace(r, native_scores=r.probs / np.ptp(t.features, axis=0).max())],
    "check_duplicate_prototypes": [lambda t, r: replace(r, native_scores=r.probs / np.ptp(t.text, axis=0).max())],
    "check_row_lengths_change_nothing": [lambda t, r: replace(r, native_scores=t.extras["views"][:, 0] @ t.text.T)],
    "check_other_logit_scales": [lambda t, r: replace(r, native_scores=np.exp(t.logit_scale * t.features @ t.text.T))],
    "check_wide_space": [lambda t, r: replace(r, native_scores=r.probs / t.features.var(axis=0).min() ** 5)],
    "check_inputs_untouched": [lambda t, r: replace(r, probs=written_to(t))],
    "check_random_tasks": [
        lambda t, r: replace(r, probs=r.probs / (t.d > 5)),
        lambda t, r: replace(r, probs=r.probs / (t.logit_scale > 1e-9)),
        lambda t, r: raising(InputError("Two\nlines.")) if t.d % 3 == 0 else r,
        lambda t, r: raising(InputError("long " * 100)) if t.d % 3 == 0 else r,
    ],
    "check_deterministic": [lambda t, r: replace(r, probs=to_simplex(r.probs + GENERATOR.random()))],
}  # fmt: skip


@dataclass(frozen=True)
class Faulty(Method):
    """Zero-shot with a fault."""

    citation: ClassVar[str] = "none"
    fault: Callable[[Task, Result], Result]

    def _fit(self, task: Task) -> Result:
        with np.errstate(all="ignore"):
            return self.fault(task, ZeroShot()._fit(task))


@pytest.mark.parametrize(("check", "fault"), [(check, fault) for check in FAULTS for fault in FAULTS[check]])
def test_the_checks_find_faults(check: str, fault: Callable[[Task, Result], Result]) -> None:
    with pytest.raises(AssertionError, match=f"(?m)^{check}: "):
        check_method(Faulty(fault))


@dataclass(frozen=True)
class Memory(State):
    total: Any = None  # (d,)
    log: Any = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class Adaptive(OnlineMethod):
    """Adds the mean so far to the text embeddings, and is sound; the classes below are not."""

    citation: ClassVar[str] = "none"
    state_type: ClassVar[type[State]] = Memory

    def start(self, task: Task) -> Memory:
        return Memory(task.text, task.logit_scale, 0, 0 * task.text[0])

    def _step(self, state: Any, x: Any) -> Any:
        probs = zero_shot(x, state.text + state.total / (state.seen + 100), state.logit_scale)
        return replace(state, total=state.total + x.sum(0)), Result(probs, zero_shot(x, state.text, state.logit_scale))


class Biased(Adaptive):
    def _step(self, state: Any, x: Any) -> Any:
        after, result = super()._step(state, x)
        return after, replace(result, native_scores=-result.probs)


class Miscounting(Adaptive):
    def step(self, state: Any, x: Any) -> Any:
        after, result = super().step(state, x)
        return replace(after, seen=after.seen + 1), result


class Overwriting(Adaptive):
    def _step(self, state: Any, x: Any) -> Any:
        state.total[:] += x.sum(0)
        y = zero_shot(x, state.text, state.logit_scale)
        return state, Result(y, y)


class Shared(Memory):
    def fork(self) -> Any:
        return self


class Unforkable(Adaptive):
    def start(self, task: Task) -> Memory:
        return Shared(task.text, task.logit_scale, 0, 0 * task.text[0])


class Growing(Adaptive):
    def _step(self, state: Any, x: Any) -> Any:
        after, result = super()._step(state, x)
        return replace(after, log=np.concatenate([state.log, x[:, 0]])), result


class Forgetful(Adaptive):
    seen_by_class: ClassVar[list[int]] = []

    def _step(self, state: Any, x: Any) -> Any:
        self.seen_by_class.append(len(x))
        after, result = super()._step(state, x)
        return after, replace(result, probs=to_simplex(result.probs + 1e-3 * len(self.seen_by_class)))


class Undeclared(Adaptive):
    def start(self, task: Task) -> Memory:
        return replace(super().start(task), log=np.zeros(task.k))


class Hasty(Adaptive):
    def _follow(self, state: Any, x: Any, known: Any) -> Any:
        return replace(state, total=state.total + 2 * x.sum(0))


ONLINE_FAULTS = {
    "check_the_state_that_follows": Hasty,
    "check_cold_start": Biased,
    "check_seen_is_counted": Miscounting,
    "check_step_leaves_the_state": Overwriting,
    "check_fork_is_independent": Unforkable,
    "check_memory_is_bounded": Growing,
    "check_state_is_all": Forgetful,
    "check_classes_come_and_go": Undeclared,
}


@pytest.mark.parametrize("check", ONLINE_FAULTS)
def test_the_online_checks_find_faults(check: str) -> None:
    with pytest.raises(AssertionError, match=f"(?m)^{check}: "):
        check_method(ONLINE_FAULTS[check]())


def test_a_sound_online_method_passes_all_but_what_needs_the_registry() -> None:
    for name, check in checks_for(Adaptive()):
        if name != "check_state_round_trips":  # a method read from a file is found by name
            check()


def test_options_without_words_or_with_a_bad_default_are_found() -> None:
    @dataclass(frozen=True)
    class Unsaid(ZeroShot):
        secret: int = option(3, "")

    with pytest.raises(AssertionError, match="'secret' has no words"):
        check_method(Unsaid())

    @dataclass(frozen=True)
    class Hidden(ZeroShot):
        secret: int = field(default=3, repr=False, metadata=option(3, "a number").metadata)

    with pytest.raises(AssertionError, match="'secret' is not shown by repr"):
        check_method(Hidden())


def test_every_check_is_seen_to_fail() -> None:
    elsewhere = {"check_options_round_trip", "check_documented", "check_state_round_trips"}
    every = {name for method in (ZeroShot(), Adaptive()) for name, _ in checks_for(method)}
    assert every == FAULTS.keys() | ONLINE_FAULTS.keys() | elsewhere


def test_a_rising_objective_is_found() -> None:
    with pytest.raises(AssertionError, match="the objective rises by"):
        check_objective_never_rises(Faulty(lambda t, r: replace(r, objective=(1.0, 2.0))), Tasks())
    with pytest.raises(AssertionError, match="reports no objective"):
        check_objective_never_rises(ZeroShot(), Tasks())


def test_extras_are_handed_to_the_method() -> None:
    @dataclass(frozen=True)
    class Needy(ZeroShot):
        needs: ClassVar[frozenset[str]] = frozenset({"encoder"})

        def _fit(self, task: Task) -> Result:
            return replace(super()._fit(task), details={"encoder": task.extras["encoder"]})

    check_method(Needy(), extras=lambda task: {"encoder": "an encoder"})
    with pytest.raises(AssertionError, match="needs the image encoder"):
        check_method(Needy())
