"""Methods by name: the files of `moontide/methods`, and entry points in the group `moontide.methods`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from moontide import methods as builtin
from moontide.errors import replaced_name, unknown_name
from moontide.protocols import Method

DEFAULT = "tide"  # the method where none is named
# The names of methods that are gone, and what replaces them
REPLACED = {"moon_auto": "tide", "moon_stream": "tide"}


@cache
def method_names() -> tuple[str, ...]:
    """List the names of all methods, without importing them.

    >>> "moon" in method_names()
    True
    """
    files = [found.name for found in pkgutil.iter_modules(builtin.__path__) if not found.name.startswith("_")]
    return tuple(sorted({*files, *(point.name for point in entry_points(group="moontide.methods"))}))


def check_name(name: str) -> None:
    """Refuse an unknown method name.

    >>> check_name("moon")
    """
    if name in method_names():
        return
    if name in REPLACED:
        raise replaced_name("method", name, REPLACED[name])
    raise unknown_name("method", name, method_names())


@cache
def method_type(name: str) -> type[Method]:
    """Find the class of a method.

    >>> method_type("zero_shot").__name__
    'ZeroShot'
    """
    check_name(name)
    for point in entry_points(group="moontide.methods", name=name):
        loaded: type[Method] = point.load()
        return loaded
    module = importlib.import_module(f"{builtin.__name__}.{name}")
    found: type[Method] = next(
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, Method) and cls.__module__ == module.__name__
    )
    return found


def method(name: str, /, **options: Any) -> Method:
    """Create a registered method with its options.

    >>> method("moon", beta="soft").beta
    'soft'
    """
    cls = method_type(name)
    for key in options:
        if key not in cls.specs():
            raise unknown_name(f"option of {name}", key, cls.specs())
    return cls(**options)
