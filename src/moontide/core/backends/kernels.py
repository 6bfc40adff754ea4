"""MOON on a GPU in float32: fused kernels, and a run that repeats is captured as a CUDA graph and replayed.

A small batch costs a few hundred kernel launches, which take longer than the work. The first call of a shape runs
plainly; from the second on, the whole run is one launch. Nothing here waits for the GPU, which is what makes that
possible. Captures, and the precision of products, belong to the process: one thread at a time uses them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from moontide.core.arrays import Array, class_counts
from moontide.core.backends import _triton, plain
from moontide.core.backends.plain import Solve
from moontide.core.graph import Affinity
from moontide.core.mixture import ALL, VMF, Laplacian, Scores, Step, VMFClasses

HALF = 2**23  # N x K above which precision "half" stores assignments in 16 bits: below, nothing is gained
LARGEST = 2**25  # N x K above which launches no longer matter
MANY, HUB = 2**13, 40  # above so many samples, those with more votes go first
KEPT = 4  # captured shapes
PLAIN = "plain"  # a shape whose run cannot be captured
BELOW_1 = 1 - torch.finfo(torch.float32).eps
PAD = 16  # columns beyond the features, so that rows begin at multiples of 32 bytes

_plans: OrderedDict[Any, Any] = OrderedDict()
_guard = threading.RLock()


def m_step(vmf: VMF, step: Step) -> VMFClasses:
    """Eqs. update-m and update-m-real; options that the kernel does not have are left to `plain`."""
    o = vmf.options
    if not (o.inverse == "banerjee" and o.log_normaliser == "asymptotic" and o.update_mu and o.update_kappa):
        return plain.m_step(vmf, step)
    (k, d), sums, soft = step.sums.shape, step.sums, step.soft  # these two may be columns of one matrix
    (mu, prototypes), (beta, kappa, offset, kl) = _triton.floats(sums, 2, k, d), _triton.floats(sums, 4, k)
    given = sums, soft, step.counts, *vmf.anchors, beta, mu, kappa, prototypes, offset, kl, d, sums.stride(0)
    limits = o.count_epsilon, min(o.r_cap, BELOW_1), min(o.kappa_cap, 3e38), vmf.scale, o.temper
    _triton.launch(_triton.m_step, k, d, *given, o.update == "exact", *limits)
    return vmf.classes(ALL, beta, kappa, kl, mu, prototypes, offset)


class Votes(Affinity):
    """The votes of the neighbours for kernels, which begin with the samples that get most votes: they take longest."""

    @cached_property
    def order(self) -> Array:
        """The samples in the order in which programs take them, (N,)."""
        n = len(self.pointer) - 1
        if n <= MANY:
            return torch.arange(n, device=self.pointer.device)
        return torch.argsort((torch.diff(self.pointer) <= HUB).to(torch.int8), stable=True)

    @property
    def edges(self) -> tuple[Array, ...]:
        """The arrays that kernels take."""
        return *super().edges, self.order

    def weighted(self, by: Array | None) -> Affinity:
        """Return the votes with that of each sample multiplied by its entry of `by`, (N,); None: 1."""
        return self if by is None else Votes(*super().weighted(by).edges)


class Rows(plain.Rows):
    """The samples of MOON, all in the memory of one GPU."""

    low: Any  # (N, d) the features as products take them: in 16 bits for many samples with precision "half"
    weighted: Any  # (N, d + PAD) gamma_i f_i and gamma_i, whose product with z is both sums of an E-step

    def _votes_of(self) -> Affinity:
        return Votes(*super()._votes_of().edges)

    def _zero_shot(self, rows: slice) -> tuple[Array, Array, Array]:
        self.cosine = self.f @ self.text.T  # (N, K)
        self.y, _, log_sum, *_ = _triton.zero_shot(self.cosine, self.logit_scale)
        half = self.method.precision == "half" and self.y.numel() > HALF
        self.z, self.low = (self.y.half(), self.f.half()) if half else (self.y, self.f)
        self.labels = torch.zeros(len(self.f), dtype=torch.int64, device=self.f.device)
        self.weighted = weighted_room(self.low)
        return self.y, self.cosine, log_sum

    def step(self, scores: Scores) -> Step:
        """E-step with the classes given, and the sums of the new assignments."""
        values, slope, offset = self.cosine, scores.slope, scores.at_anchor
        if scores.prototypes is not None:
            values, slope, offset = product(self.low, scores.prototypes.T), None, scores.offset  # (N, K)
        edges = self.votes_of.weighted(self.vote_weight).edges
        given = values, offset if slope is None else slope, offset, self.z, *edges, self.log_sum_y, self.gamma
        more = slope is not None, self.method.gamma != "assignments"
        self.z, self.labels, self.gamma, free, laplacian, counts = _triton.step(
            _triton.e_step, 3, self.z, self.low, self.weighted, (*given, self.labels), more
        )
        both, d = product(self.z.T, self.weighted), self.f.shape[1]  # (K, d + PAD)
        sums, soft = both[:, :d], both[:, d]  # `weighted_sums`
        changed, counts = counts[-1], counts[:-1]
        if self.method.beta == "soft":
            counts = soft.contiguous()
        elif self.method.gamma_in_counts:
            counts = class_counts(self.labels, len(self.text), self.gamma)
        return Step(sums, soft, counts, free, laplacian, changed, float("inf"), ALL)

    def finish(self) -> Laplacian:
        """Return gamma_i z_i . (M z)_i of the assignments as they are."""
        (n, k), edges = self.z.shape, self.votes_of.weighted(self.vote_weight).edges
        found = _triton.floats(self.f, n)  # a sparse product would sort the edges first, for which it waits
        _triton.launch(_triton.agreement, n, k, self.z, *edges, found, k, small=_triton.GATHER)
        return Laplacian(self.gamma * found)

    def unpack(self) -> tuple[Array, Array]:
        """Return z and y."""
        return self.z.to(self.f.dtype), self.y


def weighted_room(f: Array) -> Array:
    """Return where an E-step writes gamma_i f_i and gamma_i, (N, d + PAD), the columns beyond that zero."""
    return torch.zeros((len(f), f.shape[1] + PAD), dtype=f.dtype, device=f.device)


def product(a: Array, b: Array) -> Array:
    """Return a product in float32; of 16-bit numbers where `a` has them."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b.to(a.dtype), out_dtype=torch.float32) if a.device.type == "cuda" else a.float() @ b.float()


@contextmanager
def products(precision: str) -> Iterator[None]:
    """Let float32 products on the GPU use the tensor cores, unless `precision` is "full"; for one thread at a time."""
    with _guard:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision != "full"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


def run(solve: Solve, f: Array, text: Array, key: Any = None, precision: str = "full") -> tuple[Any, ...]:
    """Return solve(f, text), captured the second time and replayed from then on.

    `key` is everything else that it depends on; None: it cannot be repeated. `precision` is that of products.
    """
    with products(precision):
        return solve(f, text) if key is None else replayed(solve, key, f, text)


def replayed(solve: Solve, key: Any, f: Array, text: Array) -> tuple[Any, ...]:
    """Return solve(f, text), by a captured graph where one is there or worth it."""
    if f.device.type != "cuda" or len(f) * len(text) > LARGEST:
        return solve(f, text)
    key = (key, tuple(f.shape), tuple(text.shape), f.dtype, f.device)
    seen, plan = key in _plans, _plans.pop(key, None)
    plan = _captured(solve, f, text) if seen and plan is None else plan
    out = plan.run(f, text) if isinstance(plan, _Captured) else solve(f, text)
    _plans[key] = plan
    if len(_plans) > KEPT:
        _plans.popitem(last=False)
    return out


def _captured(solve: Solve, f: Array, text: Array) -> Any:
    """Return a captured run, or PLAIN where something in it cannot be captured by this version of torch or driver."""
    try:
        return _Captured(solve, f, text)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        torch.cuda.synchronize()
        return PLAIN


class _Captured:
    """A run of one shape with its inputs and outputs at fixed places."""

    def __init__(self, solve: Solve, f: Array, text: Array) -> None:
        self.f, self.text = f.clone(), text.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # a run outside the capture sets up libraries and compiles kernels
            solve(self.f, self.text)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # other threads may use the GPU
            self.out = solve(self.f, self.text)
            tensors = [v for v in self.out if isinstance(v, torch.Tensor)]
            of = {dtype: [v.reshape(-1) for v in tensors if v.dtype == dtype] for dtype in {v.dtype for v in tensors}}
            self.packed = {dtype: torch.cat(parts) for dtype, parts in of.items()}  # one copy out for each dtype
        self.sizes = {dtype: [len(part) for part in parts] for dtype, parts in of.items()}

    def run(self, f: Array, text: Array) -> tuple[Any, ...]:
        self.f.copy_(f)
        self.text.copy_(text)
        self.graph.replay()
        copies = {dtype: iter(flat.clone().split(self.sizes[dtype])) for dtype, flat in self.packed.items()}
        return tuple(next(copies[v.dtype]).view(v.shape) if isinstance(v, torch.Tensor) else v for v in self.out)
