"""The common checks, for the methods of this package and of others.

Which ones a method gets follows from its type: all methods the common ones, batch methods those on the order of
samples, online methods those on their state. A new method is checked by one line, `check_method(MyMethod())`, or under
pytest one check at a time:

    @pytest.mark.parametrize(("name", "check"), checks_for(MyMethod()))
    def test_my_method(name, check):
        check()

A method that needs more than features and views gets it from `extras`, a function of the task:
`check_method(MyMethod(), extras=lambda task: {"images": ..., "encoder": ...})`.

A method that computes in blocks names their size in a module constant BLOCK..., which is how a check makes them small.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from moontide.checks import common, fuzz, online
from moontide.checks.tasks import Extras, Tasks
from moontide.protocols import Method, OnlineMethod

__all__ = ["Extras", "Tasks", "check_method", "checks_for"]

CHOSEN = {"check_permuted_samples", "check_torch_equals_numpy", "check_objective_never_rises"}  # not for every method


def checks_for(method: Method, extras: Extras | None = None) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, check) for every check of a method; a check that fails raises AssertionError with a sentence.

    >>> import moontide
    >>> for name, check in checks_for(moontide.method("zero_shot")):
    ...     check()
    """
    chosen = [check for name, check in vars(common).items() if name.startswith("check_") and name not in CHOSEN]
    chosen.append(fuzz.check_random_tasks)
    if find_spec("torch"):
        chosen.append(common.check_torch_equals_numpy)
    if isinstance(method, OnlineMethod):
        chosen += [check for name, check in vars(online).items() if name.startswith("check_")]
    else:
        chosen.append(common.check_permuted_samples)
    return [(check.__name__, partial(check, method, Tasks(extras))) for check in chosen]


def check_method(method: Method, extras: Extras | None = None) -> None:
    """Run every check of a method, and raise AssertionError with a line for each that fails.

    >>> import moontide
    >>> check_method(moontide.method("zero_shot"))
    """
    failed = []
    for name, check in checks_for(method, extras):
        try:
            check()
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise AssertionError("\n".join([f"{method.name} fails {len(failed)} checks", *failed]))
