"""Examples in docstrings have numpy as `np`."""

from typing import Any

import numpy as np
import pytest


@pytest.fixture(scope="session", autouse=True)
def names_of_examples(doctest_namespace: dict[str, Any]) -> None:
    """Give every example the same names."""
    doctest_namespace["np"] = np
