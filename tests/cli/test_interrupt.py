"""Ctrl-C, once or twice, while compiled loops run in threads: status 130, one line, and no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize(("method", "seconds", "times"), [("moon", 0.2, 1), ("tide", 0.5, 2), ("moon", 1.0, 3)])
def test_ctrl_c_ends_a_run_with_130_and_writes_nothing(tmp_path: Path, method: str, seconds: float, times: int) -> None:
    rng = np.random.default_rng(0)
    text = rng.normal(size=(300, 64)).astype(np.float32)
    x = text[rng.integers(300, size=60_000)] + rng.normal(size=(60_000, 64)).astype(np.float32)
    np.savez(tmp_path / "a.npz", image_features=x, text_features=text)
    started = (
        "import moontide.cli, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "print('ready', flush=True); moontide.cli.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", started, "adapt", "a.npz", "--method", method, "--out", "out.npz"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(seconds + 1)
        for _ in range(times):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
