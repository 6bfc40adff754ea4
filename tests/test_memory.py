"""How much memory there is: the least of what the machine, the container and the process have left."""

import subprocess
import sys
from pathlib import Path

import pytest

from moontide.memory import _cgroup_limits, available_bytes

CODE = """
import resource
from moontide.memory import available_bytes
resource.setrlimit(resource.{kind}, ({limit}, {limit}))
print(available_bytes())
"""


@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limit_of_the_process_is_respected(kind: str) -> None:
    limit = 3 * 2**30
    code = CODE.format(kind=kind, limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < limit


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_the_limits_of_every_group_are_respected(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    write(root / "a", memory__max="1000\n", memory__current="300\n")
    write(root / "a" / "b", memory__max="max\n", memory__current="200\n")
    membership.write_text("0::/a/b\n")
    assert _cgroup_limits(root, membership) == [700]
    write(root / "memory" / "c", memory__limit_in_bytes="500", memory__usage_in_bytes="100")
    membership.write_text("4:cpu:/\n3:memory:/c\n")
    assert _cgroup_limits(root, membership) == [400]
    assert _cgroup_limits(tmp_path / "none", tmp_path / "nothing") == []


def test_there_is_some() -> None:
    found = available_bytes()
    assert found is None or found > 0
