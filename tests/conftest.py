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

from hypothesis import settings  # noqa: E402

settings.register_profile("moontide", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("moontide")
