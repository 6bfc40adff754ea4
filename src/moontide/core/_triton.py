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


@triton.jit  # type: ignore[untyped-decorator]
def _column_totals(z, total, largest, n, k, rows_each, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Each program adds up one chunk of the rows of COLS columns, and finds their largest."""
    chunk = tl.program_id(1)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < k
    first = chunk * rows_each
    last = tl.minimum(first + rows_each, n)
    part, top = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        tile = tl.load(z + rows[:, None].to(tl.int64) * k + cols[None, :],
                       mask=(rows < last)[:, None] & inside[None, :], other=0.0)  # fmt: skip
        part += tl.sum(tile, axis=0)
        top = tl.maximum(top, tl.max(tile, axis=0))
    tl.store(total + chunk * k + cols, part, mask=inside)
    tl.store(largest + chunk * k + cols, top, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _log1p(x):
    u = 1 + x
    return tl.where(u == 1, x, tl.log(u) * (x / tl.where(u == 1, 1.0, u - 1)))


@triton.jit  # type: ignore[untyped-decorator]
def _sample_evidence(z, t, sure):
    """e = log(1 + t o) - z with the odds o of z."""
    z = tl.minimum(z, sure)
    return _log1p(t * (z / (1 - z))) - z


@triton.jit  # type: ignore[untyped-decorator]
def _evidence(z, total, largest, share, t, partial, n, k, rows_each, chunks, live, sure, CHUNKS: tl.constexpr,
              ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """The programs of `_column_totals` again: t of each class (0: at rest), and its evidence from a chunk of rows."""
    chunk = tl.program_id(1)
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = cols < k
    each = tl.arange(0, CHUNKS)
    at, there = each[:, None] * k + cols[None, :], (each < chunks)[:, None] & inside[None, :]
    count = tl.sum(tl.load(total + at, mask=there, other=0.0), axis=0)
    alive = tl.max(tl.load(largest + at, mask=there, other=0.0), axis=0) > live
    times = tl.where(alive, (1 + count) / (1 + n / (k * tl.load(share))), 0.0)
    first = chunk * rows_each
    last = tl.minimum(first + rows_each, n)
    proof = tl.where(alive, _log1p(count) / 2, 0.0) / chunks
    for start in range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        tile = tl.load(z + rows[:, None].to(tl.int64) * k + cols[None, :],
                       mask=(rows < last)[:, None] & alive[None, :], other=0.0)  # fmt: skip
        proof += tl.sum(_sample_evidence(tile, times[None, :], sure), axis=0)
    tl.store(partial + chunk * k + cols, proof, mask=inside)
    tl.store(t + cols, times, mask=inside)  # the same from every chunk


@triton.jit  # type: ignore[untyped-decorator]
def _present_share(partial, low, high, proof, share, n, k, chunks, certain, CHUNKS: tl.constexpr, COLS: tl.constexpr,
                   STEPS: tl.constexpr):  # fmt: skip
    """One program: the evidence of each class from its parts, and the rho that has the largest."""
    lowest = tl.load(low)
    step = tl.arange(0, STEPS)
    rho = tl.minimum(lowest * tl.exp(tl.log(tl.load(high) / lowest) * step / (STEPS - 1)), 1.0)
    seen = rho / (1 + n / (k * rho))
    score = tl.zeros((STEPS,), tl.float32)
    each = tl.arange(0, CHUNKS)
    for start in range(0, k, COLS):
        cols = start + tl.arange(0, COLS)
        inside = cols < k
        parts = tl.load(partial + each[:, None] * k + cols[None, :],
                        mask=(each < chunks)[:, None] & inside[None, :], other=0.0)  # fmt: skip
        found = tl.sum(parts, axis=0)
        tl.store(proof + cols, found, mask=inside)
        likelier = tl.log((1 - rho)[:, None] + seen[:, None] * tl.exp(tl.minimum(found, certain))[None, :])
        score += tl.sum(tl.where(inside[None, :], likelier, 0.0), axis=1)
    best = tl.min(tl.where(score == tl.max(score, axis=0), step, STEPS), axis=0)
    tl.store(share, tl.sum(tl.where(step == best, rho, 0.0), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _pull(sums, soft, t, centre, pulled, square, kept, d, pseudo_count, BLOCK: tl.constexpr):
    """One program a class: T = S + alpha c and its squared length, S and its soft count 0 at rest."""
    k = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < d
    at = k.to(tl.int64) * d + cols
    alive = tl.where(tl.load(t + k) > 0, 1.0, 0.0)
    own = alive * tl.load(sums + at, mask=inside, other=0.0)
    whole = own + pseudo_count * tl.load(centre + cols, mask=inside, other=0.0)
    tl.store(pulled + at, whole, mask=inside)
    tl.store(square + k, tl.sum(whole * whole, axis=0))
    tl.store(kept + k, alive * tl.load(soft + k))


@triton.jit  # type: ignore[untyped-decorator]
def _presence_logits(dots, z, gamma, cosine, t, proof, square, low, share, n, k, scale, sharpness, sure,
                     ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """One program a tile, written over `dots`: text, likeness and presence; e is made again, which beats reading it."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < k
    at = rows[:, None].to(tl.int64) * k + cols[None, :]
    mask = (rows < n)[:, None] & inside[None, :]
    times = tl.load(t + cols, mask=inside, other=0.0)
    own = tl.load(z + at, mask=mask & (times > 0)[None, :], other=0.0)
    left_out = (1 - tl.load(low)) * tl.load(gamma + rows, mask=rows < n, other=0.0)[:, None] * own
    dot = tl.load(dots + at, mask=mask, other=0.0)
    length = tl.load(square + cols, mask=inside, other=1.0)[None, :] + left_out * (left_out - 2 * dot)
    likeness = (dot - left_out) / tl.sqrt(tl.maximum(length, 1e-12))
    rho = tl.load(share)
    others = tl.load(proof + cols, mask=inside, other=0.0)[None, :] - _sample_evidence(own, times[None, :], sure)
    against = tl.log((1 - rho) / rho * (1 + (n - 1) / (k * rho))) - others  # log odds that the class is not there
    absence = tl.maximum(against, 0.0) + tl.log(1 + tl.exp(-tl.abs(against)))  # -log_presence
    tl.store(dots + at, scale * tl.load(cosine + at, mask=mask, other=0.0) + sharpness * likeness - absence, mask=mask)


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


def launch_evidence(z: Any, share: Any, low: Any, high: Any, t: Any, proof: Any, new_share: Any, scratch: Any,
                    live: float, sure: float, certain: float, steps: int) -> None:  # fmt: skip
    """Run `_column_totals`, `_evidence` and `_present_share`; `scratch` is (3, chunks of rows, K)."""
    n, k = z.shape
    chunks = scratch.shape[1]
    each = triton.cdiv(n, chunks)
    padded = triton.next_power_of_2(chunks)
    rows, cols = min(128, max(16, triton.next_power_of_2(each))), 32
    grid = (triton.cdiv(k, cols), chunks)
    total, largest, partial = scratch
    _column_totals[grid](z, total, largest, n, k, each, rows, cols, num_warps=4)
    _evidence[grid](z, total, largest, share, t, partial, n, k, each, chunks, live, sure, padded, rows, cols,
                    num_warps=4)  # fmt: skip
    _present_share[(1,)](partial, low, high, proof, new_share, n, k, chunks, certain, padded, 256, steps, num_warps=8)


def launch_pull(sums: Any, *rest: Any) -> None:
    """Run `_pull`, one program a class."""
    k, d = sums.shape
    *arrays, pseudo_count = rest
    _pull[(k,)](sums, *arrays, d, pseudo_count, max(16, triton.next_power_of_2(d)), num_warps=4)


def launch_presence_logits(dots: Any, *rest: Any) -> None:
    """Run `_presence_logits`, one program a tile."""
    n, k = dots.shape
    *arrays, scale, sharpness, sure = rest
    rows, cols = 16, 128
    _presence_logits[(triton.cdiv(n, rows), triton.cdiv(k, cols))](
        dots, *arrays, n, k, scale, sharpness, sure, rows, cols, num_warps=4
    )
