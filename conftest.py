"""Tests compute on one thread, as scripts/test has it, and examples in docstrings have numpy as `np`."""

import os
from typing import Any

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")  # before numpy is loaded: its sums depend on the number of threads


@pytest.fixture(scope="session", autouse=True)
def names_of_examples(doctest_namespace: dict[str, Any]) -> None:
    """Give every example the same names."""
    import numpy as np

    doctest_namespace["np"] = np
