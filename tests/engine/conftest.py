"""Shards of one simulated task, and a way to read the predictions back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="session")
def answers() -> Any:
    """Return the function that reads all predictions of a folder, by column."""

    def read(folder: str | Path) -> dict[str, np.ndarray]:
        table = pq.read_table([str(path) for path in sorted(Path(folder).glob("*.parquet"))])
        names = ("id", "label", "confidence", "zero_shot_label", "unknown")
        return {name: table.column(name).to_numpy() for name in names if name in table.column_names}

    return read


@pytest.fixture(scope="session")
def cut() -> Any:
    """Return the function that saves rows in shards of about equal size."""

    def save(folder: Path, features: np.ndarray, shards: int) -> str:
        folder.mkdir(parents=True)
        for i, rows in enumerate(np.array_split(features, shards)):
            np.save(folder / f"{i:03d}.npy", rows)
        return str(folder / "*.npy")

    return save
