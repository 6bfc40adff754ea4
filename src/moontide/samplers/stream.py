"""Streams whose classes come and go, the online protocol of StatA and MOON.

Zanella et al., "Realistic Test-Time Adaptation of Vision-Language Models", CVPR 2025 (arXiv:2501.03729), after Yuan et
al., "Robust Test-Time Adaptation in Dynamic Scenarios", CVPR 2023 (arXiv:2303.13899), used as is by MOON (appendix
"Data Sampler"). Symbols: xi -> `xi`, B -> `batch_size`, N -> `len(y)`; S, the number of slots -> `slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moontide.errors import InputError, OptionError, unknown_name
from moontide.samplers.common import Indices, as_labels, check_count, check_imbalance, long_tailed

Kind = Literal["dirichlet", "separate", "iid", "order"]


@dataclass(frozen=True)
class StreamSampler:
    """Orders a dataset into a stream and cuts it into batches.

    kind: "dirichlet" spreads every class over min(N // B, K) consecutive slots by a draw of Dirichlet(`xi`, ..., `xi`);
        "separate" shows one class after the other; "iid" shuffles; "order" leaves the samples as they are.
    batch_size: the samples in a batch.
    xi: for "dirichlet" only; the smaller, the fewer slots a class appears in (0.1, 0.01 and 0.001 are published).
    imbalance: None keeps every sample; a number first thins the classes to a long tail, the most frequent with
        `imbalance` times the samples of the least.
    drop_last: whether samples after the last full batch are dropped, as published.

    >>> labels = np.repeat(np.arange(4), 3)
    >>> stream = StreamSampler("separate", batch_size=3)
    >>> [labels[batch].tolist() for batch in stream.batches(labels, np.random.default_rng(0))]
    [[1, 1, 1], [2, 2, 2], [0, 0, 0], [3, 3, 3]]
    """

    kind: Kind
    batch_size: int = 128
    xi: float | None = None
    imbalance: float | None = None
    drop_last: bool = True

    def __post_init__(self) -> None:
        """Check the parameters."""
        if self.kind not in get_args(Kind):
            raise unknown_name("stream kind", self.kind, get_args(Kind))
        check_count("batch_size", self.batch_size)
        check_imbalance(self.imbalance)
        if self.kind != "dirichlet" and self.xi is not None:
            raise OptionError(f"'xi' has no effect on a {self.kind!r} stream: leave it out. Got {self.xi!r}.")
        if self.kind == "dirichlet" and not (isinstance(self.xi, int | float) and 1e-6 <= self.xi <= 1e6):
            raise OptionError(
                f"'xi' must be a number from 1e-6 to 1e6 for a 'dirichlet' stream. Got {self.xi!r} instead."
            )

    def draw(self, labels: ArrayLike, rng: np.random.Generator) -> Indices:
        """Return the indices of the whole stream, in order of arrival.

        >>> StreamSampler("iid", batch_size=2).draw([0, 0, 1, 1], np.random.default_rng(0)).tolist()
        [2, 0, 1, 3]
        """
        labels = as_labels(labels)
        kept = np.arange(len(labels))
        if self.imbalance is not None:
            classes = rng.permutation(np.unique(labels))
            kept = np.sort(long_tailed(labels, classes, self.imbalance, None, rng))  # dataset order
        if self.kind == "order":
            return kept
        slot = self._slots(labels[kept], rng)
        order = rng.permutation(len(kept))  # shuffled inside every slot, slots in order
        return kept[order[np.argsort(slot[order], kind="stable")]]

    def batches(self, labels: ArrayLike, rng: np.random.Generator) -> list[Indices]:
        """Return the stream in consecutive batches.

        >>> labels = np.zeros(5, dtype=int)
        >>> [len(batch) for batch in StreamSampler("iid", batch_size=2).batches(labels, np.random.default_rng(0))]
        [2, 2]
        """
        order = self.draw(labels, rng)
        if self.drop_last and len(order) < self.batch_size:
            raise InputError(
                f"'batch_size' is {self.batch_size} but the stream has {len(order)} samples, so no batch is full. "
                f"Use a smaller 'batch_size', or drop_last=False to keep the incomplete batch."
            )
        stop = len(order) - len(order) % self.batch_size if self.drop_last else len(order)
        return [order[start : start + self.batch_size] for start in range(0, stop, self.batch_size)]

    def _slots(self, labels: NDArray[np.integer], rng: np.random.Generator) -> Indices:
        """Return the slot of every sample, (N,)."""
        classes, y = np.unique(labels, return_inverse=True)
        if self.kind == "iid":
            return np.zeros_like(y)
        if self.xi is None:  # "separate"
            return rng.permutation(len(classes))[y]
        slots = max(1, min(len(y) // self.batch_size, len(classes)))
        return dirichlet_slots(y, slots, self.xi, rng)


def dirichlet_slots(y: Indices, slots: int, xi: float, rng: np.random.Generator) -> Indices:
    """Return the slot of every sample, class k spread over slots by shares P_k ~ Dirichlet(xi, ..., xi).

    Normalised Gamma(xi) draws would all underflow for a small xi and give 0 / 0. numpy's `Generator` (unlike the old
    `RandomState`) then uses Beta draws (stick breaking), so no share is ever NaN.

    >>> dirichlet_slots(np.array([0, 0, 0, 1, 1, 1]), slots=3, xi=1e-6, rng=np.random.default_rng(1)).tolist()
    [2, 2, 2, 1, 1, 1]
    """
    return cut(y, rng.dirichlet(np.full(slots, xi), size=int(y.max()) + 1))


def cut(y: Indices, shares: NDArray[np.float64]) -> Indices:
    """Return the slot of every sample: class k in dataset order, cut at floor(cumsum(P_k)[:-1] * n_k).

    >>> cut(np.array([0, 1, 0, 0, 0]), np.array([[0.5, 0.5], [0.3, 0.7]])).tolist()
    [0, 1, 0, 1, 1]
    """
    slot = np.empty_like(y)
    by_class = np.split(np.argsort(y, kind="stable"), np.cumsum(np.bincount(y))[:-1])  # dataset order inside a class
    for members, row in zip(by_class, shares, strict=True):  # (n_k,), (S,)
        cuts = np.floor(np.cumsum(row)[:-1] * len(members))  # (S - 1,)
        slot[members] = np.searchsorted(cuts, np.arange(len(members)), side="right")
    return slot
