"""How much memory there is: the least of what the machine, the container and the process have left."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import moontide
from moontide.memory import _cgroup_limits, available_bytes
from moontide.protocols import as_online

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


@pytest.mark.parametrize("name", ["tide", "moon"])
def test_the_estimate_for_a_task_in_blocks_covers_what_it_takes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tasks are worked on in blocks above 2^27 entries, whose arrays count beside those of all rows."""
    monkeypatch.setattr(f"moontide.methods.{name}.LARGE", 2**20)
    n, k, d = 500, 12_000, 64
    features, text = (np.random.default_rng(0).normal(size=(m, d)).astype("float32") for m in (n, k))
    online = as_online(moontide.method(name))
    state, _ = online.step(online.start(moontide.Task(text[:1], text)), features[:1])
    tracemalloc.start()
    online.step(state, features)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    need = moontide.method(name).peak_bytes(n, k, d, 4)
    assert peak <= need < 2 * peak
