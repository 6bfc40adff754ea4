"""The Triton source of `moontide.core.kernels`, imported only where Triton is installed."""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from moontide.core.kernels import SLOTS


@triton.jit  # type: ignore[untyped-decorator]
def _top_m(x, values, found, n, m, d: tl.constexpr, precision: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
           DEPTH: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Each program keeps the best `m` columns of ROWS rows while it walks over all columns in tiles."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.arange(0, SLOTS)[None, :]
    best = tl.where(slot < m, float("-inf"), float("inf")) + tl.zeros((ROWS, SLOTS), tl.float32)  # unused slots: full
    index = tl.full((ROWS, SLOTS), -1, tl.int32)
    depth = tl.arange(0, DEPTH)
    for start in range(0, n, COLS):
        cols = start + tl.arange(0, COLS)
        tile = tl.zeros((ROWS, COLS), tl.float32)
        for k in range(0, d, DEPTH):
            inside = (k + depth) < d
            a = tl.load(x + rows[:, None].to(tl.int64) * d + (k + depth)[None, :],
                        mask=(rows < n)[:, None] & inside[None, :], other=0.0)  # fmt: skip
            b = tl.load(x + cols[None, :].to(tl.int64) * d + (k + depth)[:, None],
                        mask=(cols < n)[None, :] & inside[:, None], other=0.0)  # fmt: skip
            tile = tl.dot(a, b, tile, input_precision=precision)
        tile = tl.where((cols[None, :] < n) & (cols[None, :] != rows[:, None]), tile, float("-inf"))
        again = 1
        while again > 0:  # take the best column of each row until none improves its row's list
            top = tl.max(tile, axis=1)
            at = tl.min(tl.where(tile == top[:, None], cols[None, :], n), axis=1)
            worst = tl.min(best, axis=1)
            where = tl.min(tl.where(best == worst[:, None], slot, SLOTS), axis=1)
            better = top > worst
            replace = better[:, None] & (slot == where[:, None])
            best = tl.where(replace, top[:, None], best)
            index = tl.where(replace, at[:, None], index)
            tile = tl.where(cols[None, :] == at[:, None], float("-inf"), tile)
            again = tl.max(better.to(tl.int32), axis=0)
    best = tl.where(slot < m, best, float("-inf"))
    for j in range(m):  # write the list in order; of equals, the lower index first
        top = tl.max(best, axis=1)
        at = tl.min(tl.where(best == top[:, None], index, n), axis=1)
        tl.store(values + rows.to(tl.int64) * m + j, top, mask=rows < n)
        tl.store(found + rows.to(tl.int64) * m + j, at.to(tl.int64), mask=rows < n)
        best = tl.where(index == at[:, None], float("-inf"), best)


@triton.jit  # type: ignore[untyped-decorator]
def _e_step(logits, z, pointer, neighbour, weight, new, labels, log_sum, gamma, heard, echo, counts, k, log_k,
            BLOCK: tl.constexpr):  # fmt: skip
    """One program a row: votes of the neighbours, softmax, and what else is read off it while it is on the chip."""
    i = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < k
    votes = tl.zeros((BLOCK,), tl.float32)
    for e in range(tl.load(pointer + i), tl.load(pointer + i + 1)):
        j = tl.load(neighbour + e).to(tl.int64)
        votes += tl.load(weight + e) * tl.load(z + j * k + cols, mask=inside, other=0.0).to(tl.float32)
    own = tl.load(z + i * k + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(echo + i, tl.sum(own * votes, axis=0))
    a = tl.load(logits + i * k + cols, mask=inside, other=float("-inf")) + votes
    top = tl.max(a, axis=0)
    label = tl.min(tl.where(a == top, cols, BLOCK), axis=0)
    tl.store(labels + i, label.to(tl.int64))
    tl.atomic_add(counts + label, 1.0)  # whole numbers: the order of adding does not matter
    shifted = tl.where(inside, a - top, 0.0)
    p = tl.where(inside, tl.exp(shifted), 0.0)
    total = tl.sum(p, axis=0)
    p = p / total
    tl.store(new + i * k + cols, p.to(new.dtype.element_ty), mask=inside)
    tl.store(log_sum + i, top + tl.log(total))
    entropy = tl.log(total) - tl.sum(p * shifted, axis=0)
    tl.store(gamma + i, tl.minimum(tl.maximum(1 - entropy / log_k, 0.0), 1.0))
    tl.store(heard + i, tl.sum(p * votes, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _m_step(sums, soft, counts, text, anchor_kappa, anchor_r, alpha, beta, mu, kappa, prototypes, offset, kl,
            d, EXACT: tl.constexpr, epsilon, r_cap, kappa_cap, scale, temper, BLOCK: tl.constexpr):  # fmt: skip
    """One program a class; the comments name the function of `core.ple` that each line is."""
    k = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < d
    at = k.to(tl.int64) * d + cols
    n, a, r0, k0 = tl.load(counts + k), tl.load(alpha + k), tl.load(anchor_r + k), tl.load(anchor_kappa + k)
    t = tl.load(text + at, mask=inside, other=0.0)
    b = n / (n + a + 1e-12)  # shrinkage
    v = tl.load(sums + at, mask=inside, other=0.0) / tl.maximum(tl.load(soft + k) + epsilon, 1.17549435e-38)  # means
    resultant = b * v + (1 - b) * t * (r0 if EXACT else 1.0)  # shrink
    norm = tl.sqrt(tl.sum(resultant * resultant, axis=0))
    m = resultant / tl.maximum(norm, 1e-12)
    r = tl.minimum(norm, r_cap)
    c = tl.minimum((r * d - r * r * r) / (1 - r * r), kappa_cap)  # concentration
    c1, c0 = tl.maximum(c, 1e-6), tl.maximum(k0, 1e-6)
    log_c, log_c0 = (d - 1) / 2 * tl.log(c1) - c1, (d - 1) / 2 * tl.log(c0) - c0  # log_c
    tl.store(beta + k, b)
    tl.store(kappa + k, c)
    tl.store(offset + k, log_c / temper)
    tl.store(kl + k, log_c0 - log_c + r0 * (k0 - c * tl.sum(m * t, axis=0)))  # anchor_kl
    tl.store(mu + at, m, mask=inside)
    tl.store(prototypes + at, scale * t + c / temper * m, mask=inside)  # prototypes


def launch_top_m(x: Any, values: Any, found: Any, n: int, d: int, m: int, precision: str) -> None:
    """Run `_top_m` with tiles that fill the device: small ones for few rows."""
    half = x.element_size() == 2
    rows, cols, warps = (128, 256 if half else 128, 8) if n > 16384 else (64, 128, 4) if n > 2048 else (32, 128, 4)
    _top_m[(triton.cdiv(n, rows),)](
        x, values, found, n, m, d, precision, rows, cols, 64 if half else 32, SLOTS, num_warps=warps
    )


def launch_e_step(logits: Any, *rest: Any) -> None:
    """Run `_e_step`, one program a sample."""
    n, k = logits.shape
    block = max(16, triton.next_power_of_2(k))
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    _e_step[(n,)](logits, *rest, k, math.log(k) + 1e-12, block, num_warps=warps)


def launch_m_step(sums: Any, *rest: Any) -> None:
    """Run `_m_step`, one program a class."""
    k, d = sums.shape
    _m_step[(k,)](sums, *rest, max(16, triton.next_power_of_2(d)), num_warps=4)
