"""Methods by name, and what an import of the package brings with it."""

import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint

import numpy as np
import pytest

import moontide
from moontide import registry
from moontide.bench.suites import load_suite
from moontide.cli.common import Choice
from moontide.errors import OptionError, UnknownNameError
from moontide.evaluate import compare_methods
from moontide.protocols import Method


@pytest.mark.parametrize("name", moontide.method_names())
def test_every_file_of_methods_is_a_method_of_that_name(name: str) -> None:
    made = moontide.method(name)
    assert isinstance(made, Method)
    assert made.name == name
    assert type(made).__module__ == f"moontide.methods.{name}"
    assert made == moontide.method(name)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"There is no method 'mooon'. Did you mean 'moon'. Known: .* more"):
        moontide.method("mooon")
    with pytest.raises(UnknownNameError, match=r"There is no method 'xyzzy'. Known:"):
        moontide.method("xyzzy")
    with pytest.raises(UnknownNameError, match=r"There is no option of moon 'betta'. Did you mean 'beta'"):
        moontide.method("moon", betta="soft")
    with pytest.raises(UnknownNameError, match=r"There is no preset of moon 'papers'. Did you mean 'paper'"):
        moontide.MOON.from_preset("papers")
    with pytest.raises(OptionError, match=r"'iterations' option of moon must be an integer of at least 1 and .* Got 0"):
        moontide.method("moon", iterations=0)


@pytest.mark.parametrize("name", ["moon_auto", "moon_stream"])
def test_a_replaced_name_is_answered_with_the_one_that_replaces_it(name: str) -> None:
    sentence = f"There is no method '{name}' any more; use 'tide', which replaces it."
    made: list[Callable[[], object]] = [
        lambda: moontide.method(name),
        lambda: moontide.Stream(name, np.eye(2)),
        lambda: compare_methods("features.npz", ["moon", name]),
        lambda: load_suite("batch-64").choose([name]),
        lambda: Choice(method=name).make(),
    ]
    for make in made:
        with pytest.raises(UnknownNameError) as raised:
            make()
        assert str(raised.value) == sentence


def test_a_method_of_another_package_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "moontide.methods.zero_shot:ZeroShot", "moontide.methods")

    def entry_points(group: str, name: str | None = None) -> list[EntryPoint]:
        return [point] if group == "moontide.methods" and name in (None, "theirs") else []

    monkeypatch.setattr(registry, "entry_points", entry_points)
    for cached in (registry.method_names, registry.method_type):
        cached.cache_clear()
    try:
        assert "theirs" in registry.method_names()
        assert type(registry.method("theirs")).__name__ == "ZeroShot"
    finally:
        for cached in (registry.method_names, registry.method_type):
            cached.cache_clear()


def test_import_is_light() -> None:
    heavy = ["torch", "scipy", "pyarrow", "matplotlib"]
    code = f"import sys, moontide; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listing_and_running_a_method_on_numpy_does_not_import_torch() -> None:
    code = (
        "import sys, numpy as np, moontide; moontide.method_names();"
        "moontide.MOON().fit_predict(np.eye(4), np.eye(4)); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
