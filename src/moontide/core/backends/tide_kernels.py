"""TIDE on a GPU in float32: the E-step is one kernel, and a run that repeats is replayed as one CUDA graph.

Nothing waits for the GPU: numbers that the batch decides, as how many of its classes are there, stay on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from moontide.core import tide as eq
from moontide.core.arrays import Array
from moontide.core.backends import _triton, kernels, tide_plain
from moontide.core.graph import Affinity
from moontide.core.tide import ALL, Assigned, Confident


def run(solve: Callable[[Array, Array], tuple[Any, ...]], key: Any, f: Array, text: Array) -> tuple[Any, ...]:
    """Return solve(f, text), by a captured graph where one is there or worth it; `key` is all else it depends on."""
    with kernels.products("full"):
        return kernels.replayed(solve, key, f, text)


class Votes(Affinity):
    """The votes of all neighbours, by a kernel."""

    def __call__(self, z: Array) -> Array:
        """Return the votes of the neighbours, (N, K)."""
        return _triton.votes(z, self.edges)


class TIDERows(tide_plain.TIDERows):
    """The samples of TIDE, all in the memory of one GPU, none with a known label."""

    fixed: eq.Fixed | None = None  # what the numbers are of
    numbers: Any = None  # (5,) in the order of `_triton.tide_step`
    weighted: Any  # (N, d + PAD) gamma_i f_i, gamma_i and 1

    def _votes_of(self) -> Affinity:
        of = super()._votes_of()
        return Votes(*of.edges)

    def _keep(self, fixed: eq.Fixed) -> None:
        """Keep what all E-steps need: log_y becomes the logits at the anchors, without votes and prior."""
        super()._keep(fixed)
        self.log_y += fixed.sharpness * self.at_anchor
        self.weighted = kernels.weighted_room(self.f)
        self.weighted[:, self.f.shape[1] + 1].fill_(1)  # whose product with z counts

    def step(self, fixed: eq.Fixed, classes: Assigned) -> Assigned:
        """E-step with the classes given, Eq. 11, and the sums of Eq. 8 for the next M-step."""
        if self.at_anchor is None:
            self._keep(fixed)
        if self.fixed is not fixed:
            numbers = fixed.left_out, fixed.vote_weight, fixed.smoothing, fixed.sharpness, fixed.alpha
            self.fixed, self.numbers = fixed, torch.stack([self._number(x) for x in numbers])  # (5,)
        f, dots = self.in_metric, None
        of: tuple[Array, ...] = (classes.counts.contiguous(),) * 5
        if len(classes.hard):
            dots = f @ classes.sums.T  # (n, K)
            of = classes.hard, *_triton.class_numbers(classes.sums, classes.soft, classes.counts, self.anchor)
        given = self.gamma, self.labels, self.y, self.numbers, f, self.weighted
        self.z, self.labels, self.gamma, right, hard = _triton.tide_step(
            self.log_y, self.at_anchor, dots, self.z, self.votes_of.edges, of, *given
        )
        (changed, hard), d, both = (hard[-1], hard[:-1]), f.shape[1], self.z.T @ self.weighted  # (K, d + PAD)
        found = both[:, :d], both[:, d], hard, both[:, d + 1], hard
        return Assigned(*found, right.sum(), len(f), changed, math.inf, ALL)

    def _number(self, x: Any) -> Array:
        """Return a number on the GPU, without a copy from the host, for which a captured run would wait."""
        if isinstance(x, torch.Tensor):
            return x.to(self.f.dtype)
        return torch.full((), x, dtype=self.f.dtype, device=self.f.device)

    def confidence(self, power: Any) -> Confident:
        """Return the confidences under a power of z and their slopes (Eq. 14), (n,) each, which `_triton` adds up."""
        return Confident(*_triton.tide_confidence(self.z, self.labels, power.to(self.f.dtype)))
