"""Ctrl-C and SIGTERM, once or twice, while compiled loops run in threads: one line, their status, and no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from moontide.cli import main
from moontide.core.threads import in_threads
from moontide.interrupts import ENDINGS


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize(
    ("method", "seconds", "times", "number"),
    [
        ("moon", 0.2, 1, signal.SIGINT),
        ("tide", 0.5, 2, signal.SIGINT),
        ("moon", 1.0, 3, signal.SIGTERM),
        ("moon", 0.2, 1, signal.SIGTERM),
    ],
)
def test_a_signal_ends_a_run_with_its_status_and_writes_nothing(
    tmp_path: Path, method: str, seconds: float, times: int, number: signal.Signals
) -> None:
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
            process.send_signal(number)
            time.sleep(0.02)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert err.splitlines()[-1] == f"error: {ENDINGS[number]}"
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize("number", list(ENDINGS))
def test_a_signal_while_the_program_is_loaded_is_one_line_too(number: signal.Signals) -> None:
    """The import of numpy, by then the first of several, gets the signal in the middle."""
    started = (
        "import builtins, os, signal, sys; load = builtins.__import__; number = int(sys.argv.pop())\n"
        "def slow(name, *rest):\n"
        "    if name == 'numpy':\n"
        "        os.kill(os.getpid(), number)\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = slow\n"
        "from moontide.__main__ import main\n"
        "print('loaded', 'numpy' in sys.modules, flush=True)\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", started, "--version", str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    ending = f"error: {ENDINGS[number]}\n"
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "loaded False\n", ending)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of another kind")
@pytest.mark.parametrize("number", list(ENDINGS))
def test_a_signal_after_the_command_is_too_late(number: signal.Signals) -> None:
    started = (
        "import atexit, os, signal, sys; from moontide.__main__ import main\n"
        "number = int(sys.argv.pop()); atexit.register(lambda: os.kill(os.getpid(), number))\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", started, "--version", str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer that would raise it again")
def test_a_ctrl_c_that_python_ignores_comes_again(tmp_path: Path) -> None:
    """As in a callback of a weak reference: Python prints that it ignores the exception, and goes on."""
    started = (
        "import os, signal, sys, time, weakref; import moontide.cli as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Held: pass\n"
        "def run(*arguments, **options):\n"
        "    held = Held()\n"
        "    seen = weakref.ref(held, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "    del held\n"
        "    time.sleep(60)\n"
        "    open('out', 'w').close()\n"
        "cli.app = run\n"
        "sys.exit(cli.main())"
    )
    done = subprocess.run([sys.executable, "-c", started], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert "Exception ignored" in done.stderr
    assert (done.returncode, list(tmp_path.iterdir())) == (130, [])
    assert done.stderr.splitlines()[-1] == "error: interrupted"


def test_blocks_in_threads_are_done_when_an_error_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    done, begun = [], threading.Event()

    def block(i: int) -> None:
        if i == 0:
            begun.wait()
            raise ValueError("first")
        begun.set()
        time.sleep(0.2)
        done.append(i)

    with pytest.raises(ValueError, match="first"):
        in_threads(block, [0, 1])
    assert done == [1]


def test_ctrl_c_that_compiled_code_wraps_is_an_interruption(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrapped(*arguments: object, **options: object) -> None:
        raise SystemError("a dispatcher returned a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr("moontide.cli.app", wrapped)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"
