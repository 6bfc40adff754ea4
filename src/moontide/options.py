"""The options of a method: dataclass fields that carry their own documentation, range and checks.

A method declares `neighbours: int = option(3, "neighbours of each sample", low=0)`; from that line come the check with
its error sentence, the listing of `moontide methods`, and the reading of `--set neighbours=5` on the command line.

Every number has an upper bound, so that no value makes a run endless or its answer overflow: where the declaration has
none, `MOST` by type, or ten times the default where that is more. Only an option with `high=math.inf` takes infinity.
`above=0` means `LEAST` or more, or the default where that is less, so that what is divided by it stays finite. An
option that is a size has a memory too, which the method's `peak_bytes` counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moontide.errors import OptionError, unknown_name

if TYPE_CHECKING:
    from typing_extensions import Self

MOST = {int: 1000, float: 1e6}
LEAST = 1e-6


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare an option: one of `choices`, or a number in [low, high] or > above, of the type of its default.

    An option with choices and a numeric range takes either. Without `high`, the upper bound is the default that the
    docstring of this module describes.

    >>> @dataclasses.dataclass(frozen=True)
    ... class M(Options):
    ...     m: int = option(3, "neighbours", low=0, high=9)
    >>> M(m=-1)
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: The 'm' option of M must be an integer of at least 0 and of at most 9. Got -1 instead.
    """
    if above is not None:
        low = above + (LEAST if isinstance(default, str) else min(LEAST, default - above))
    if high is None:
        high = MOST[int if isinstance(default, int) else float]
        high = high if isinstance(default, str) else max(high, 10 * default)
    if low is None and not choices:
        low = -high
    return dataclasses.field(default=default, metadata={"spec": Spec(default, doc, choices, low, high)})


@dataclasses.dataclass(frozen=True)
class Spec:
    """The specification of an option.

    >>> Spec(3, "neighbours", (), 0, 1000).rule()
    'an integer of at least 0 and of at most 1000'
    """

    default: Any
    doc: str
    choices: tuple[str, ...]
    low: float | None  # None: no number
    high: float

    def rule(self) -> str:
        """Describe the allowed values."""
        if isinstance(self.default, bool):
            return "true or false"
        words = [" or ".join(repr(c) for c in self.choices)] if self.choices else []
        if self.low is not None:
            number = "an integer" if isinstance(self.default, int) else "a number"
            most = f"{MOST[float]:.15g}, or inf" if self.high == math.inf else f"{self.high:.15g}"
            words.append(f"{number} of at least {self.low:.15g} and of at most {most}")
        return ", or ".join(words)

    def allows(self, value: Any) -> bool:
        """Return whether `value` may be set."""
        if isinstance(self.default, bool) or isinstance(value, bool):
            return isinstance(self.default, bool) and isinstance(value, bool)
        if isinstance(value, str):
            return value in self.choices
        if self.low is None or not isinstance(value, int | float):  # NaN is in no range
            return False
        if isinstance(self.default, int) and not isinstance(value, int):
            return False
        return self.low <= value <= (MOST[float] if self.high == math.inf else self.high) or value == self.high

    def parse(self, text: str) -> Any:
        """Parse a value from the command line; return unparsable text unchanged, for the check to refuse."""
        if isinstance(self.default, bool):
            return {"true": True, "false": False}.get(text.lower(), text)
        if text in self.choices:
            return text
        try:
            return int(text) if isinstance(self.default, int) else float(text)
        except ValueError:
            return text


class Options:
    """A frozen dataclass whose fields are declared with `option` and checked on creation."""

    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Refuse an option that does not exist with the nearest one that does."""
        known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise unknown_name(f"option of {cls.title()}", name, known)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Refuse values outside their range, and options that are set but have no effect."""
        for name, spec in self.specs().items():
            if not spec.allows(value := getattr(self, name)):
                raise OptionError(
                    f"The '{name}' option of {self.title()} must be {spec.rule()}. Got {repr(value)[:60]} instead."
                )
        for names, why in self.inert():
            for name in names:
                if getattr(self, name) != (default := self.specs()[name].default):
                    raise OptionError(
                        f"The '{name}' option of {self.title()} has no effect {why}. "
                        f"Got {getattr(self, name)!r}; leave it at {default!r} or change the other."
                    )

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (option names, reason) for options that have no effect given the values of the others."""
        return iter(())

    @classmethod
    def title(cls) -> str:
        """The name used in error sentences."""
        return str(getattr(cls, "name", cls.__name__))

    @classmethod
    def specs(cls) -> dict[str, Spec]:
        """All options of the class by name."""
        return {f.name: f.metadata["spec"] for f in dataclasses.fields(cls) if "spec" in f.metadata}  # type: ignore[arg-type]

    @classmethod
    def parse(cls, settings: Mapping[str, str]) -> dict[str, Any]:
        """Read option values from text, as on the command line."""
        specs = cls.specs()
        for name in settings:
            if name not in specs:
                raise unknown_name(f"option of {cls.title()}", name, specs)
        return {name: specs[name].parse(text) for name, text in settings.items()}


def json_safe(value: Any) -> Any:
    """Write infinities as text, which JSON has no number for.

    >>> json_safe({"cap": float("inf"), "m": [3]})
    {'cap': 'inf', 'm': [3]}
    """
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value
