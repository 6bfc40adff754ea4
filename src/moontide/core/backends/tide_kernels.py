"""TIDE on a GPU in float32: the E-step is one kernel, and a run that repeats is replayed as one CUDA graph.

Nothing waits for the GPU: numbers that the batch decides, as how many of its classes are there, stay on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from moontide.core import tide as eq
from moontide.core.arrays import Array, class_sums
from moontide.core.backends import _triton, kernels, tide_plain
from moontide.core.graph import Affinity
from moontide.core.sums import Counted
from moontide.core.tide import ALL, Assigned, Compared, Confident, Predicted


def run(solve: Callable[[Array, Array], tuple[Any, ...]], key: Any, f: Array, text: Array) -> tuple[Any, ...]:
    """Return solve(f, text), by a captured graph where one is there or worth it; `key` is all else it depends on."""
    with kernels.products("full"):
        return kernels.replayed(solve, key, f, text)


class TIDERows(tide_plain.TIDERows):
    """The samples of TIDE, all in the memory of one GPU, none with a known label."""

    fixed: eq.Fixed | None = None  # what the numbers are of
    numbers: Any = None  # (7,) in the order of `_triton.tide_step`
    weighted: Any  # (N, d + PAD) gamma_i f_i, gamma_i and 1

    def _votes_of(self) -> Affinity:
        return kernels.Votes(*super()._votes_of().edges)

    def first(self, negatives: Array | None) -> Predicted:  # type: ignore[override]
        """Make the zero-shot predictions, and score how unlike all of the classes each sample is (Eq. 15)."""
        self.cosine = self.f @ self.text.T  # (N, K)
        found = _triton.zero_shot(self.cosine, self.logit_scale)
        self.y, self.labels, self.log_sum, self.sure, self.unknown = found
        if negatives is not None and len(negatives):
            self.unknown += eq.negative_odds(self.f, negatives, self.log_sum, self.logit_scale)
        self.z = self.y
        return Predicted.of(self.f, self.y, self.labels, self.sure)

    def compare(self, total: Array, n: int, scale: Array) -> Compared:
        """Compare the zero-shot predictions with those of all samples and of the neighbours (Eqs. 1, 2)."""
        degree, k, others = self.votes_of(torch.ones_like(self.f[:, :1])), len(self.text), float(max(n - 1, 1))
        agree, own, by, even_own = _triton.floats(self.y, 4, n)
        _triton.launch(_triton.tide_rows, n, k, self.y, total, agree, own, by, even_own, others, k)
        even, near, most, _ = _triton.column_sums(self.y, self.votes_of(self.y), by, degree)
        self.in_metric, lengths = self._scaled(self.blocks[0], scale)
        rows = torch.stack([agree, agree, own, self.sure, even_own, lengths]).double()
        rows[1].square_()
        agreed, squared, same, sure, evened, length = rows.sum(1)
        sums = class_sums(self.labels, self.in_metric, len(self.text))
        return Compared(agreed, squared, same, sure, evened, near, most, even / (total + 1), length, sums)

    def step(self, fixed: eq.Fixed, classes: Assigned) -> Assigned:
        """E-step with the classes given, Eq. 11, and the sums of Eq. 8 for the next M-step."""
        first, f = self.numbers is None, self.in_metric
        if first:
            self.anchor = eq.anchor_rows(self.text, fixed.slope, fixed.offset, fixed.scale)  # (K, d)
            self.at_anchor, self.log_y = f @ self.anchor.T, torch.empty_like(self.y)  # (N, K); written in this step
            self.weighted = kernels.weighted_room(f)
            self.weighted[:, f.shape[1] + 1].fill_(1)  # whose product with z counts
        if self.fixed is not fixed:
            names = "left_out", "vote_weight", "smoothing", "sharpness", "alpha", "bias_weight", "expected"
            self.fixed, self.numbers = fixed, _triton.numbers((getattr(fixed, name) for name in names), f)
        if first:
            dots, gamma, of = self.cosine, self.log_sum, (*(classes.counts,) * 3, fixed.presence, classes.counts)
            self.cosine = None
        else:
            (k, d), sums, gamma = classes.sums.shape, classes.sums, self.gamma
            dots, found = f @ sums.T, _triton.floats(sums, 4, k)  # (N, K), (4, K)
            of, sizes = (classes.hard, *found), (d, sums.stride(0))
            given: Any = sums, classes.soft, classes.counts, self.anchor, *found
            _triton.launch(_triton.class_numbers, k, d, *given, *sizes)
        given = self.log_y, self.at_anchor, dots, self.z, *self.votes_of.edges, *of, gamma, self.labels, self.y
        self.z, self.labels, self.gamma, right, hard = _triton.step(
            _triton.tide_step, 2, self.z, f, self.weighted, (*given, self.numbers), (self.logit_scale, first)
        )
        (changed, hard), d, both = (hard[-1], hard[:-1]), f.shape[1], self.z.T @ self.weighted  # (K, d + PAD)
        found = both[:, :d], both[:, d], hard, both[:, d + 1], hard
        return Assigned(*found, right.sum(), len(f), changed, math.inf, ALL)

    def confidence(self, power: Any, write: bool = False) -> Confident:
        """Return the confidences under a power of z and their slopes (Eq. 14), (n,) each, which `_triton` adds up.

        With `write`, z is raised to that power.
        """
        (n, k), found = self.z.shape, _triton.floats(self.z, 2, len(self.z))
        _triton.launch(_triton.tide_confidence, n, k, self.z, self.labels, power.to(self.f.dtype), *found, k, write)
        return Confident(*found)

    def finish(self, power: Any) -> Counted:
        """Calibrate the assignments by a temperature, and average scores for the unknown with those of neighbours."""
        self.confidence(power, write=True)
        self.unknown = eq.with_neighbours(self.unknown, self.votes_of)
        return Counted(len(self.f))
