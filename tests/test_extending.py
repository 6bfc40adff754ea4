"""The package of docs/extending.md, typed as it stands there: it is built, installed, run and checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def run(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_the_package_of_the_page_is_built_installed_and_found(tmp_path: Path) -> None:
    blocks = re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [name for name, _ in blocks] == ["sharpened.py", "pyproject.toml", "test_sharpened.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
    site = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), ".")
    built = run(tmp_path, *pip)
    if "No matching distribution" in built.stderr or "connection" in built.stderr.lower():
        pytest.skip("pip cannot get the build backend: no package index here")
    assert built.returncode == 0, built.stderr
    here = {"PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])}
    (tmp_path / "sharpened.py").unlink()  # the installed one is used
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "features.npz", image_features=rng.normal(size=(9, 8)), text_features=rng.normal(size=(3, 8)))
    page = re.search(r"After `pip install \.`:\n\n```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert page is not None
    for line in page[1].splitlines():
        arguments = line.split()[1:]
        done = run(tmp_path, sys.executable, "-m", "moontide", *arguments, **here)
        assert done.returncode == 0, done.stderr
    checked = run(tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sharpened.py", **here)
    assert checked.returncode == 0, checked.stdout
    assert re.search(r"^\d\d+ passed", checked.stdout, re.MULTILINE)
