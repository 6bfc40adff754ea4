"""What is left of TIDE when a part of it is taken away.

Every row is a title and what replaces what: options of `TIDE`, or functions and constants of `moontide.methods.tide`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moontide.core.arrays import namespace, row_dots


def dense(y: Any) -> float:
    """No excess: all classes are taken to be there."""
    return 1e-3


def excess_without_error(y: Any) -> float:
    """The excess with no standard error taken off."""
    n, k = y.shape
    if n < 2 or k < 2:
        return 1e-3
    xp = namespace(y)
    total, own = xp.sum(y, axis=0), row_dots(y, y)
    agree = (y @ total - own) / (n - 1)
    sure = (float(xp.mean(own)) - 1 / k) / (1 - 1 / k)
    return float(max((k * float(xp.mean(agree)) - 1) / max(sure, 1e-6), 1e-3))


def no_votes(*graph_and_weights: Any) -> Callable[[Any], Any]:
    """Neighbours that give nothing."""
    return lambda z: 0 * z


ABLATIONS: dict[str, dict[str, Any]] = {
    "no push: all classes taken to be there (1, 2)": {"excess": dense},
    "excess without its standard error (1)": {"excess": excess_without_error},
    "without votes of neighbours (6)": {"neighbour_votes": no_votes},
    "without class means (3, 5, 8)": {"sharpness": 0.0},
}
