"""`moontide doctor`: show what is installed and what is missing."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

from moontide.cli.output import emit
from moontide.errors import install

DEVELOPERS = ("dev", "docs")  # extras for developers


def doctor() -> None:
    """Show versions, devices, CPU cores and memory, and which optional parts are missing.

    For example:

        moontide doctor
    """
    from moontide.memory import available_bytes, human

    required, extras = requirements()
    extras = {extra: names for extra, names in extras.items() if extra not in DEVELOPERS}
    packages = {name: installed(name) for names in (["moontide"], required, *extras.values()) for name in names}
    memory = available_bytes()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "CPU cores": cores,
        "memory": "unknown" if memory is None else f"{human(memory)} available",
        "devices": ", ".join(devices()),
        **{name: found or "not installed" for name, found in packages.items()},
    }
    for name, value in lines.items():
        print(f"{name:<{max(map(len, lines))}}  {value}")
    missing = {extra: [name for name in names if not packages[name]] for extra, names in extras.items()}
    emit(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_cores=cores,
        memory_bytes=memory,
        devices=devices(),
        packages=packages,
        missing={extra: names for extra, names in missing.items() if names},
    )
    for extra, names in missing.items():
        if names:
            print(f"The extra '{extra}' lacks {', '.join(names)}. {install(extra)}")
    if not any(missing.values()):
        print("All extras are installed.")


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Read the requirements of the package and of each extra from its metadata.

    >>> required, extras = requirements()
    >>> "numpy" in required, extras["torch"]
    (True, ['torch'])
    """
    required: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in requires("moontide") or []:
        name, marker = re.split(r"[^\w.-]", line, maxsplit=1)[0], re.search(r"extra == ['\"]([\w-]+)", line)
        if name != "moontide" and "python_version" not in line:
            (extras.setdefault(marker[1], []) if marker else required).append(name)
    return required, extras


def installed(package: str) -> str | None:
    """Return the version of a package without importing it, or None.

    >>> installed("no-such-package") is None
    True
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def devices() -> list[str]:
    """List the devices that methods can run on.

    >>> devices()[0]
    'cpu'
    """
    try:
        import torch
    except ImportError:
        return ["cpu"]
    found = [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    return ["cpu", *found, *(["mps"] if torch.backends.mps.is_available() else [])]
