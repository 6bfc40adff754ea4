"""Options: one line declares the range, the check, its sentence and the reading from the command line."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moontide import MOON
from moontide.errors import OptionError, UnknownNameError
from moontide.options import Options, option


@dataclass(frozen=True)
class Some(Options):
    count: int = option(3, "a count", low=1, high=9)
    width: float = option(0.5, "a width", above=0)
    kind: str = option("a", "a kind", choices=("a", "b"))
    either: str | float = option("auto", "a word or a number", choices=("auto",), low=0)
    flag: bool = option(True, "a flag")
    free: float = option(0.0, "any number")
    limit: float = option(5.0, "a limit (inf: none)", above=0, high=math.inf)
    idle: int = option(0, "has no effect without the flag", low=0)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        if not self.flag:
            yield ("idle", "kind"), "with flag=False"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("count", 0, "an integer of at least 1 and of at most 9"),
        ("count", 10, "an integer of at least 1 and of at most 9"),
        ("count", 2.0, "an integer of at least 1 and of at most 9"),
        ("count", True, "an integer of at least 1 and of at most 9"),
        ("count", "3", "an integer of at least 1 and of at most 9"),
        ("width", 0, "a number of at least 1e-06 and of at most 1000000"),
        ("width", math.nan, "a number of at least 1e-06 and of at most 1000000"),
        ("width", None, "a number of at least 1e-06 and of at most 1000000"),
        ("kind", "c", "'a' or 'b'"),
        ("kind", 1, "'a' or 'b'"),
        ("either", "manual", "'auto', or a number of at least 0 and of at most 1000000"),
        ("either", -1, "'auto', or a number of at least 0 and of at most 1000000"),
        ("flag", 1, "true or false"),
        ("flag", "true", "true or false"),
        ("free", "x", "a number of at least -1000000 and of at most 1000000"),
        ("free", 1e7, "a number of at least -1000000 and of at most 1000000"),
        ("free", math.inf, "a number of at least -1000000 and of at most 1000000"),
        ("idle", 10**30, "an integer of at least 0 and of at most 1000"),
        ("width", 10**400, "a number of at least 1e-06 and of at most 1000000"),
        ("limit", 10**400, "a number of at least 1e-06 and of at most 1000000, or inf"),
        ("width", 1e-320, "a number of at least 1e-06 and of at most 1000000"),
        ("limit", math.nan, "a number of at least 1e-06 and of at most 1000000, or inf"),
        ("limit", 1e308, "a number of at least 1e-06 and of at most 1000000, or inf"),
    ],
)
def test_a_value_outside_the_range_is_refused_with_the_rule(name: str, value: object, rule: str) -> None:
    with pytest.raises(OptionError) as error:
        Some(**{name: value})
    assert str(error.value) == f"The '{name}' option of Some must be {rule}. Got {repr(value)[:60]} instead."


def test_what_is_allowed_is_taken() -> None:
    some = Some(count=9, limit=math.inf, kind="b", either=2, flag=True, free=-1, idle=4)
    assert (some.count, some.limit, some.kind, some.either, some.free, some.idle) == (9, math.inf, "b", 2, -1, 4)
    assert Some(either=0.0).either == 0.0


def test_an_option_without_effect_is_refused_with_the_reason() -> None:
    assert Some(flag=False).idle == 0
    for name, value, default in (("idle", 1, 0), ("kind", "b", "a")):
        with pytest.raises(OptionError) as error:
            Some(flag=False, **{name: value})
        assert str(error.value) == (
            f"The '{name}' option of Some has no effect with flag=False. "
            f"Got {value!r}; leave it at {default!r} or change the other."
        )


def test_the_command_line_is_read_by_the_type_of_the_default() -> None:
    text = {"count": "4", "width": "1e-3", "kind": "b", "either": "auto", "flag": "False", "free": "inf", "idle": "2"}
    read = {"count": 4, "width": 1e-3, "kind": "b", "either": "auto", "flag": False, "free": math.inf, "idle": 2}
    assert Some.parse(text) == read
    assert Some.parse({"either": "2.5", "flag": "TRUE"}) == {"either": 2.5, "flag": True}
    with pytest.raises(UnknownNameError, match=r"There is no option of Some 'cuont'. Did you mean 'count'"):
        Some.parse({"cuont": "4"})


@pytest.mark.parametrize(("name", "text"), [("count", "4.5"), ("width", "wide"), ("flag", "yes"), ("kind", "c")])
def test_what_cannot_be_read_is_refused_by_the_check(name: str, text: str) -> None:
    with pytest.raises(OptionError, match=f"The '{name}' option of Some must be .* Got '{text}' instead"):
        Some(**Some.parse({name: text}))


@given(st.integers(1, 9), st.floats(1e-6, 1e6), st.sampled_from("ab"), st.booleans(), st.floats(-1e6, 1e6))
def test_reading_what_was_written_gives_the_same(count: int, width: float, kind: str, flag: bool, free: float) -> None:
    some = Some(count=count, width=width, kind=kind if flag else "a", flag=flag, free=free)
    assert Some(**Some.parse({name: str(getattr(some, name)) for name in Some.specs()})) == some


def test_a_misspelt_option_is_answered_with_the_nearest_one_in_python_too() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'neighbours'") as caught:
        MOON(neighbors=5)  # type: ignore[call-arg]
    assert len(str(caught.value)) <= 300
