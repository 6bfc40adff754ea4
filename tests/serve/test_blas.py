"""A server computes a product on the thread that asks for it."""

import os
import subprocess
import sys

import pytest


def test_openblas_computes_on_the_thread_that_calls_it() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    code = "import numpy\nfrom moontide.serve import blas\nstay = blas.products_stay_here\nprint(stay(), *stay()[:1])"
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    after = run.stdout.split()[-1]
    if after == "[]":
        pytest.skip("numpy does not use an OpenBLAS that is found here")
    assert after == "1"
