"""Batches with few effective classes, the batch protocol of StatA and MOON.

Zanella et al., "Realistic Test-Time Adaptation of Vision-Language Models", CVPR 2025 (arXiv:2501.03729), used as is by
MOON (appendix "Data Sampler"). Symbols: B -> `batch_size`, K_eff -> `effective_classes`, K -> `len(classes)`.

The further case `imbalance` makes the classes of a batch long-tailed, with the exponential profile of Cui et al.,
"Class-Balanced Loss Based on Effective Number of Samples", CVPR 2019 (arXiv:1901.05555).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from moontide.errors import OptionError
from moontide.samplers.common import Indices, as_labels, check_count, check_imbalance, long_tailed


@dataclass(frozen=True)
class BatchSampler:
    """Draws one batch: some classes first, then samples of those classes only.

    batch_size: the most samples in a batch; None takes every sample of the chosen classes.
    effective_classes: how many classes are chosen: a number, an inclusive range (low, high) to draw the number from,
        "random" for the range from 1 to min(batch size, classes), or None for all classes.
    imbalance: None draws uniformly from the chosen classes, so large classes are more frequent; a number makes the
        classes long-tailed, the most frequent with `imbalance` times the samples of the least (1 is balanced).

    A number of classes above those in the data means all of them; a pool smaller than `batch_size` is the batch. A
    chosen class can end up with no sample.

    >>> labels = np.repeat(np.arange(100), 20)
    >>> batch = BatchSampler(batch_size=64, effective_classes=(2, 10)).draw(labels, np.random.default_rng(0))
    >>> len(batch), len(np.unique(labels[batch]))
    (64, 9)
    >>> tail = BatchSampler(35, effective_classes=3, imbalance=4).draw(labels, np.random.default_rng(0))
    >>> sorted(np.unique(labels[tail], return_counts=True)[1].tolist())
    [5, 10, 20]
    """

    batch_size: int | None = None
    effective_classes: int | tuple[int, int] | Literal["random"] | None = None
    imbalance: float | None = None

    def __post_init__(self) -> None:
        """Check the parameters."""
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, ", or None for all")
        check_imbalance(self.imbalance)
        match self.effective_classes:
            case None | "random":
                pass
            case (low, high):
                check_count("effective_classes", low)
                check_count("effective_classes", high)
                if low > high:
                    raise OptionError(
                        f"'effective_classes' as a range is (low, high) with low <= high. Got ({low}, {high}) instead."
                    )
            case number:
                check_count("effective_classes", number, ", a range (low, high), 'random', or None for all")

    def draw(self, labels: ArrayLike, rng: np.random.Generator) -> Indices:
        """Return the indices of one batch, in random order.

        >>> BatchSampler(batch_size=64).draw([0, 1, 1], np.random.default_rng(0)).tolist()
        [2, 0, 1]
        """
        labels = as_labels(labels)
        classes = np.unique(labels)
        k = min(self._number_of_classes(len(labels), len(classes), rng), len(classes))
        chosen = rng.choice(classes, k, replace=False)  # (k,) in random order
        if self.imbalance is None:
            pool = np.flatnonzero(np.isin(labels, chosen))
            return rng.permutation(pool)[: self.batch_size]
        return rng.permutation(long_tailed(labels, chosen, self.imbalance, self.batch_size, rng))

    def _number_of_classes(self, samples: int, classes: int, rng: np.random.Generator) -> int:
        match self.effective_classes:
            case None:
                return classes
            case "random":  # K_eff ~ U{1, ..., min(N, K)}, N the samples of the batch
                return int(rng.integers(1, min(self.batch_size or samples, classes), endpoint=True))
            case (low, high):  # K_eff ~ U{low, ..., high}
                return int(rng.integers(low, high, endpoint=True))
            case number:
                return number
