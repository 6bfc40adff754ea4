"""Settings of the test run: draws that repeat, one thread a process, since more only slow small arrays down, and byte
code that is kept: hundreds of tests start a Python of their own, which would compile every module it imports again."""

import os
import signal
import sys
import threading
from pathlib import Path

if "PYTHONPYCACHEPREFIX" not in os.environ:
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parents[1] / ".pycache")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # children and the processes of pytest-xdist inherit both
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, which children would inherit

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # read when numpy and torch are imported

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("moontide", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("moontide")


@pytest.fixture
def moontide(capfd):
    """Run a command line; returns the exit status, stdout and stderr."""
    from moontide.cli import main

    def run(*arguments):
        status = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def tasks(monkeypatch):
    """Every task that a method gets."""
    from moontide.protocols import Method

    seen = []
    fit = Method.fit_predict
    monkeypatch.setattr(Method, "fit_predict", lambda self, task: seen.append(task) or fit(self, task))
    return seen
