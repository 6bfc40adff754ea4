"""Settings of the test run: draws that repeat, and one thread a process, since more only slow small arrays down."""

import os
import signal
import threading

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, which children would inherit

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # read when numpy and torch are imported

from hypothesis import settings  # noqa: E402

settings.register_profile("moontide", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("moontide")
