"""TIDE on a GPU in float32: the E-step is one kernel, and a run that repeats is replayed as one CUDA graph.

Nothing waits for the GPU: numbers that the batch decides, as how many of its classes are there, stay on it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from moontide.core import tide as eq
from moontide.core.arrays import Array, class_sums
from moontide.core.backends import _triton, kernels, tide_plain
from moontide.core.driver import Run
from moontide.core.graph import Affinity
from moontide.core.sums import Counted
from moontide.core.tide import ALL, Assigned, Compared, Predicted

run = kernels.run


def occupancy_of(found: Compared, n: int, k: int, m: int) -> eq.Occupancy:
    """Eqs. 1, 2 and 3 from sums over all n samples, with m neighbours each."""
    pairs = found.agree, found.agree_square, found.own, found.confidence, found.even_own
    occupancy, classes = _triton.floats(found.near, 6), ((found.even**2).sum(), found.near.sum(), found.most.sum())
    _triton.tide_occupancy[(1,)](*pairs, *classes, occupancy, n, k, min(m, n - 1), n < 2 or k < 2, num_warps=1)
    return eq.Occupancy(*occupancy)


def power(run: Run, step: Assigned, density: Any, n: int) -> Any:
    """Eq. 14: return the share of labels that is expected right, for which `TIDERows.finish` finds the power."""
    return eq.expected_right(step.right.sum() / n, density, n)  # type: ignore[attr-defined]


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
        self.y, self.labels, self.log_sum, self.sure, self.unknown = _triton.zero_shot(self.cosine, self.logit_scale)
        if negatives is not None and len(negatives):
            self.unknown += eq.negative_odds(self.f, negatives, self.log_sum, self.logit_scale)
        self.z = self.y
        return Predicted.of(self.f, self.y, self.labels, self.sure)

    def compare(self, total: Array, n: int, scale: Array) -> Compared:
        """Compare the zero-shot predictions with those of all samples and of the neighbours (Eqs. 1, 2)."""
        (_, d), f, k, new = self.f.shape, self.f, len(self.text), partial(_triton.floats, self.f)
        rows, products, alone, self.in_metric = new(5, n), new(3, n, k), self.unknown, torch.empty_like(f)
        self.unknown = torch.empty_like(alone)
        given = self.y, total, f, scale, self.sure, alone, *self.votes_of.edges, rows, products
        given = *given, self.in_metric, self.unknown, n, k, d
        _triton.launch(_triton.tide_rows, n, k, *given, small=_triton.GATHER, DEPTH=_triton.padded(d))
        sums = class_sums(self.labels, self.in_metric, k)
        return Compared(*rows.sum(1, dtype=torch.float64), *products.sum(1), math.nan, sums)  # type: ignore[call-arg]

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
        return Assigned(*found, right, len(f), changed, math.inf, ALL)

    def finish(self, power: Any) -> Counted:
        """Calibrate the assignments: raise z to the power T of `core.tide.calibration` for the target `power`."""
        (n, k), rounds = self.z.shape, eq.NEWTON + 1
        programs = min(n, 512 if n <= kernels.MANY else 2048)  # that share the rows
        state, parts = _triton.floats(self.z, rounds, 3), _triton.floats(self.z, rounds, 2, programs)
        for i in range(rounds):
            given = self.z, self.labels, power, state[i - 1], state[i], parts[i - 1], parts[i], n, k
            last = eq.COLDEST, eq.WARMEST, i == 0, i == rounds - 1
            _triton.launch(_triton.tide_power, programs, k, *given, *last, PARTS=_triton.padded(programs))
        return Counted(n)
