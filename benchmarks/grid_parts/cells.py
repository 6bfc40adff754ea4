"""Which batches are measured: cells of pack, batch size, number of classes and balance, each drawn several times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from grid_parts.packs import Pack
from moontide.core.arrays import unit_rows
from moontide.samplers import BatchSampler, StreamSampler, rng_for

SIZES = (64, 1000, None)
RANGES = ((1, 4), (2, 10), (5, 25), (50, 100), None)
LONG_TAIL = 10.0  # the most frequent class has so many times the samples of the least
NOISE = 0.01  # standard deviation per dimension of what is added to unit rows of text
BIASED = ((2, 10), None)  # ranges that are measured with biased texts
ORDERS: dict[str, tuple[Any, float | None]] = {
    "dirichlet 0.1": ("dirichlet", 0.1),
    "dirichlet 0.01": ("dirichlet", 0.01),
    "dirichlet 0.001": ("dirichlet", 0.001),
    "separate": ("separate", None),
    "iid": ("iid", None),
}
STREAM_BATCHES = (1, 16, 128)
STREAM_SAMPLES, STREAM_RUNS = 640, 4
SHOTS, LABEL_RUNS = (1, 4), 5


class Cell(NamedTuple):
    """Batches of one kind from one pack; `few` and `samples` follow from the pack and the rest."""

    pack: str
    size: int | None
    classes: tuple[int, int] | None  # how many there are; None: all
    imbalance: float | None
    noise: float | None
    few: bool  # the mean number of classes is at most half of K
    samples: int  # that a batch has on average, if the classes were of one size

    @property
    def words(self) -> list[str]:
        classes = "-".join(map(str, self.classes)) if self.classes else "all"
        return [self.pack, str(self.size or "all"), classes, "long-tailed" if self.imbalance else "i.i.d."]

    def __str__(self) -> str:
        return " ".join([*self.words, *(["biased"] if self.noise else [])])


class StreamCell(NamedTuple):
    pack: str
    order: str
    size: int
    samples: int = STREAM_SAMPLES

    def __str__(self) -> str:
        return f"{self.pack} {self.order} {self.size}"


class KnownCell(NamedTuple):
    pack: str
    shots: int
    samples: int

    def __str__(self) -> str:
        return f"{self.pack} {self.shots} labels"


def cells(packs: Iterable[Pack]) -> list[Cell]:
    """Return all cells that the packs have the classes and the samples for."""
    found = []
    for pack in packs:
        n, k = len(pack.labels), len(pack.text)
        for size in SIZES:
            for wanted in RANGES:
                if wanted and wanted[0] >= k:
                    continue
                capped = (wanted[0], min(wanted[1], k)) if wanted else None
                mean = sum(capped) / 2 if capped else k
                pool = n / k * mean
                if (size == 1000 and (n <= 1000 or pool < 1000)) or (size is None and capped and pool <= 64):
                    continue
                samples = int(min(size or pool, pool))
                found += [Cell(pack.name, size, capped, t, None, mean <= k / 2, samples) for t in (None, LONG_TAIL)]
    return found


def biased_cells(packs: Iterable[Pack]) -> list[Cell]:
    packs = list(packs)
    ranges = {pack.name: [r and (r[0], min(r[1], len(pack.text))) for r in BIASED] for pack in packs}
    return [
        cell._replace(noise=NOISE) for cell in cells(packs) if cell.classes in ranges[cell.pack] and not cell.imbalance
    ]


def runs_of(cell: Cell, runs: int) -> int:
    """Return how many batches of a cell are drawn where `runs` of batches of 64 are."""
    if cell.noise:
        return max(4, runs // 5)
    if cell.size == 64:
        return runs
    if cell.size is None and cell.classes is None:
        return max(3, runs // 20) if cell.imbalance else 1
    return max(1, runs // 5)


def draw(cell: Cell, labels: Any, run: int) -> Any:
    """Return the rows of one batch; a cell with biased texts has the batches of the one without."""
    sampler = BatchSampler(cell.size, cell.classes, cell.imbalance)
    return sampler.draw(labels, rng_for("grid", cell.pack, str(cell._replace(noise=None)), run))


def text_of(pack: Pack, cell: Cell, run: int) -> Any:
    """Return the class texts, (K, d): the pack's, or with noise, which a run has of its own."""
    if not cell.noise:
        return pack.text
    noise = rng_for("grid", pack.name, "noise on the text", run).normal(size=pack.text.shape)
    return unit_rows(pack.text + cell.noise * noise.astype(pack.text.dtype))


def draw_stream(cell: StreamCell, labels: Any, run: int) -> list[Any]:
    """Return the rows of every batch of a stream."""
    kind, xi = ORDERS[cell.order]
    rng = rng_for("grid", cell.pack, str(cell), run)
    order = StreamSampler(kind, cell.size, xi).draw(labels, rng)[: cell.samples]
    return [order[start : start + cell.size] for start in range(0, len(order), cell.size)]


def draw_known(cell: KnownCell, labels: Any, run: int) -> Any:
    """Return known labels (N,), -1 for the others: `shots` of each class, but never all it has."""
    rng = rng_for("grid", cell.pack, str(cell), run)
    known = np.full(len(labels), -1)
    for number in np.unique(labels):
        members = np.flatnonzero(labels == number)
        known[rng.choice(members, min(cell.shots, len(members) - 1), replace=False)] = number
    return known
