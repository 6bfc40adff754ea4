"""What is left of TIDE when a part of it is taken away.

Every row is a title and what replaces what: options of `TIDE`, or functions of `moontide.core.tide`.
"""

from __future__ import annotations

from typing import Any

from moontide.core import tide
from moontide.core.backends import tide_plain

_original = {name: getattr(tide, name) for name in ("Occupancy", "class_pull", "cosine_to_means", "excess", "Fixed")}


def no_excess(agree: float, sure: float, k: int) -> float:
    """All classes are taken to be there."""
    return 1 / float(tide.LARGEST)


def plain_excess(agree: float, sure: float, k: int) -> float:
    """An excess of unsure predictions is not scaled up."""
    return float(_original["excess"](agree, 1.0, k))


def whole_excess(v: float, left: float) -> float:
    """The whole excess is one of the class shares."""
    return v


def trusted_excess(rho: float, company: float, m: int) -> float:
    """Neighbours are not asked."""
    return 1.0


class Unsmoothed(tide.Occupancy):
    """The pseudo-count is the same for any number of samples."""

    @classmethod
    def of(cls, excess: float, agreement: float, corroboration: float, false: float) -> Any:
        return _original["Occupancy"].of(excess, agreement, corroboration, 0.0)


def text_anchors(text: Any, p: Any, first: Any) -> Any:
    """Classes without samples are at their text."""
    return 1.0, 0 * first.centre


def full_slope(text: Any, p: Any, first: Any) -> Any:
    """Images are taken to follow their text in full."""
    return 1.0, first.centre / first.n - p @ text


def no_bias(y: Any, total: Any, expected: Any, presence: Any) -> Any:
    """How often a class is predicted says nothing of its text."""
    return 0 * y


def all_present(near: Any, most: Any, total: Any, rho: Any) -> Any:
    """Every class that is predicted seldom is helped."""
    return 0 * total + 1


def plain_metric(square: Any, sums: Any, count: Any, n: int) -> Any:
    """All dimensions count the same."""
    return 0 * square + 1


def one(*given: Any) -> float:
    return 1.0


def with_itself(dots: Any, at_anchor: Any, mine: Any, hard: Any, classes: Any, along: Any, alpha: Any) -> Any:
    """A sample stays in the mean of its class."""
    return _original["cosine_to_means"](dots, at_anchor, 0 * mine, 0 * hard + classes.hard, classes, along, alpha)


def pull_with_itself(fixed: Any, counts: Any, z: Any, left_out: Any) -> Any:
    """A sample stays in the count of its class."""
    return _original["class_pull"](fixed, counts, z, 0 * left_out)


def no_pull(fixed: Any, counts: Any, z: Any, left_out: Any) -> Any:
    """How many samples a class has says nothing of the next one."""
    return 0 * z


def alone(*given: Any) -> Any:
    """Neighbours have no votes."""
    return _original["Fixed"](*given)._replace(vote_weight=0.0)


def plain(features: Any, k: int, family: str, literal: bool) -> Any:
    """The compiled E-step has all of its parts: what replaces one is called by the plain one."""
    return tide_plain


ABLATIONS: dict[str, dict[str, Any]] = {
    "all classes taken to be there (1)": {"excess": no_excess},
    "excess as if predictions were sure (1)": {"excess": plain_excess},
    "excess that need not outlast a correction (2)": {"outlasting": whole_excess},
    "excess not borne out by neighbours (2)": {"corroboration": trusted_excess},
    "pseudo-count not smoothed (3)": {"Occupancy": Unsmoothed},
    "text as anchors (4)": {"anchors": text_anchors},
    "slope 1 (4)": {"anchors": full_slope},
    "without the bias of the text (5)": {"text_bias": no_bias, "choose": plain},
    "absent classes helped as well (5)": {"presence": all_present},
    "without the metric (6)": {"metric": plain_metric},
    "anchor weight 1 (7)": {"anchor_weight": one},
    "without class means (8)": {"sharpness": 0.0},
    "without leave-one-out (9)": {"cosine_to_means": with_itself, "class_pull": pull_with_itself, "choose": plain},
    "without sharpening (10)": {"sharpening": one},
    "without votes of neighbours (10)": {"Fixed": alone},
    "without the class prior (11)": {"class_pull": no_pull, "choose": plain},
}
