"""The Triton source of `backends.kernels` and `tide_kernels`, imported only where Triton is installed.

A kernel runs one program per row, which reads it once: `launch` starts them. With TRITON_INTERPRET=1 they run on the
CPU, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import triton
import triton.language as tl

from moontide.core import formulas
from moontide.core.arrays import Array
from moontide.core.graph import SLOTS
from moontide.core.ple import log_classes

GATHER = 512  # columns of a row up to which 4 warps gather votes, which waits for memory

_compiled: Any = (lambda f: f) if os.environ.get("TRITON_INTERPRET") == "1" else triton.jit
_shrinkage, _entropy_weight = _compiled(formulas.shrinkage), _compiled(formulas.entropy_weight)
_banerjee, _log_c, _anchor_kl = map(_compiled, (formulas.banerjee, formulas.log_c, formulas.anchor_kl))


@triton.jit  # type: ignore[untyped-decorator]
def _votes_for(i, z, pointer, neighbour, weight, cols, k):
    """The weighted sum of the rows of the neighbours of row i."""
    votes = tl.zeros_like(cols).to(tl.float32)
    for e in range(tl.load(pointer + i), tl.load(pointer + i + 1)):
        j = tl.load(neighbour + e).to(tl.int64)
        votes += tl.load(weight + e) * tl.load(z + j * k + cols, mask=cols < k, other=0.0).to(tl.float32)
    return votes


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(a, cols, k, log_k, BLOCK: tl.constexpr):
    """The softmax of the k logits of a row, its label, the log of the sum of their exponentials, and gamma (Eq. pl)."""
    inside = cols < k
    top = tl.max(tl.where(inside, a, float("-inf")), axis=0)
    label = tl.min(tl.where(inside & (a == top), cols, BLOCK), axis=0)
    shifted = tl.where(inside, a - top, 0.0)
    p = tl.where(inside, tl.exp(shifted), 0.0)
    total = tl.sum(p, axis=0)
    p = p / total
    gamma = _entropy_weight(tl.log(total) - tl.sum(p * shifted, axis=0), log_k)
    return p, label, top + tl.log(total), tl.minimum(tl.maximum(gamma, 0.0), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _count(i, label, g, before, labels, gamma, counts, f, weighted, k, d, wide, DEPTH: tl.constexpr):
    """Store the label and the weight g of row i, count the label and its change, and prepare `weighted_sums`."""
    tl.store(labels + i, label.to(tl.int64))
    tl.store(gamma + i, g)
    tl.atomic_add(counts + label, 1.0)  # whole numbers: the order of adding does not matter
    tl.atomic_add(counts + k, 1.0, mask=label != tl.load(before + i))
    depth = tl.arange(0, DEPTH)
    row = g * tl.load(f + i * d + depth, mask=depth < d, other=0.0)
    tl.store(weighted + i * wide + depth, row.to(weighted.dtype.element_ty), mask=depth < d)
    tl.store(weighted + i * wide + d, g.to(weighted.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(x, text, unit_x, unit_text, flaws, n, d, BLOCK: tl.constexpr):
    """One program per row of either matrix: the row over its length; one without a fit length becomes zeros, a flaw."""
    i = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    of_x = cols < tl.where(i < n, d, 0)
    of_text = cols < tl.where(i < n, 0, d)
    row = tl.load(x + i * d + cols, mask=of_x, other=0.0) + tl.load(text + (i - n) * d + cols, mask=of_text, other=0.0)
    length = tl.sqrt(tl.sum(row * row, axis=0))
    fit = (length > 1e-12) & (length < 1e12)  # false for NaN
    row = tl.where(fit, row / length, 0.0)
    tl.store(unit_x + i * d + cols, row, mask=of_x)
    tl.store(unit_text + (i - n) * d + cols, row, mask=of_text)
    if not fit:
        tl.atomic_add(flaws, 1)


@triton.jit  # type: ignore[untyped-decorator]
def _top_m(x, values, found, n, m, d: tl.constexpr, precision: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
           DEPTH: tl.constexpr, SLOTS: tl.constexpr):  # fmt: skip
    """Each program keeps the best `m` columns of ROWS rows while it walks over all columns in tiles."""
    first = tl.program_id(0) * ROWS
    rows = first + tl.arange(0, ROWS)
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
        if (start + COLS > n) | ((start < first + ROWS) & (first < start + COLS)):  # at the end, or on the diagonal
            tile = tl.where((cols[None, :] < n) & (cols[None, :] != rows[:, None]), tile, float("-inf"))
        top, worst = tl.max(tile, axis=1), tl.min(best, axis=1)
        while tl.max((top > worst).to(tl.int32), axis=0) > 0:  # take the best column of each row that it improves
            at = tl.min(tl.where(tile == top[:, None], cols[None, :], n), axis=1)
            where = tl.min(tl.where(best == worst[:, None], slot, SLOTS), axis=1)
            replace = (top > worst)[:, None] & (slot == where[:, None])
            best = tl.where(replace, top[:, None], best)
            index = tl.where(replace, at[:, None], index)
            tile = tl.where(cols[None, :] == at[:, None], float("-inf"), tile)
            top, worst = tl.max(tile, axis=1), tl.min(best, axis=1)
    best = tl.where(slot < m, best, float("-inf"))
    for j in range(m):  # write the list in order; of equals, the lower index first
        top = tl.max(best, axis=1)
        at = tl.min(tl.where(best == top[:, None], index, n), axis=1)
        tl.store(values + rows.to(tl.int64) * m + j, top, mask=rows < n)
        tl.store(found + rows.to(tl.int64) * m + j, at.to(tl.int64), mask=rows < n)
        best = tl.where(index == at[:, None], float("-inf"), best)


@triton.jit  # type: ignore[untyped-decorator]
def _zero_shot(cosine, y, labels, log_sum, sure, unlike, scale, k, BLOCK: tl.constexpr):
    """The softmax of scaled cosines, and what is one number per sample."""
    i = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    near = tl.load(cosine + i * k + cols, mask=cols < k, other=0.0)
    p, label, log_total, _ = _softmax(scale * near, cols, k, 1.0, BLOCK)
    tl.store(y + i * k + cols, p, mask=cols < k)
    tl.store(labels + i, label.to(tl.int64))
    tl.store(log_sum + i, log_total)
    tl.store(sure + i, tl.max(p, axis=0))
    top = tl.max(tl.where(cols < k, near, float("-inf")), axis=0)
    tl.store(unlike + i, 1 - (top - tl.sum(near, axis=0) / k))  # unlikeness


@triton.jit  # type: ignore[untyped-decorator]
def e_step(values, slope, offset, z, pointer, neighbour, weight, order, log_sum, gamma, before, f, new, labels,
            new_gamma, free, laplacian, counts, weighted, k, d, wide, log_k, AT_ANCHOR: tl.constexpr,
            FIXED: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Votes of the neighbours, softmax, and what else is read off it while it is on the chip.

    The logits are values_ik + offset_k plus votes; AT_ANCHOR, slope_k values_ik + offset_k plus votes. `gamma` is that
    of the z before, and of the new one where it is FIXED.
    """
    i = tl.load(order + tl.program_id(0))
    cols = tl.arange(0, BLOCK)
    inside = cols < k
    a = tl.load(values + i * k + cols, mask=inside, other=0.0)
    if AT_ANCHOR:
        a *= tl.load(slope + cols, mask=inside, other=0.0)
    a += tl.load(offset + cols, mask=inside, other=0.0)
    own = tl.load(z + i * k + cols, mask=inside, other=0.0).to(tl.float32)
    votes = _votes_for(i, z, pointer, neighbour, weight, cols, k)
    g = tl.load(gamma + i)
    tl.store(laplacian + i, g * tl.sum(own * votes, axis=0))
    p, label, log_total, new_g = _softmax(a + votes, cols, k, log_k, BLOCK)
    tl.store(new + i * k + cols, p.to(new.dtype.element_ty), mask=inside)
    g = g if FIXED else new_g
    tl.store(free + i, g * (tl.sum(p * votes, axis=0) - log_total + tl.load(log_sum + i)))  # free_energy
    _count(i, label, g, before, labels, new_gamma, counts, f, weighted, k, d, wide, DEPTH)


@triton.jit  # type: ignore[untyped-decorator]
def m_step(sums, soft, counts, text, anchor_kappa, anchor_r, alpha, beta, mu, kappa, prototypes, offset, kl,
            d, wide, EXACT: tl.constexpr, epsilon, r_cap, kappa_cap, scale, temper, BLOCK: tl.constexpr):  # fmt: skip
    """One program per class, as `plain.m_step`; `wide` is the stride of both sums. Comments name functions of `ple`."""
    k = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    inside = cols < d
    at = k.to(tl.int64) * d + cols
    n, a, r0, k0 = tl.load(counts + k), tl.load(alpha + k), tl.load(anchor_r + k), tl.load(anchor_kappa + k)
    t = tl.load(text + at, mask=inside, other=0.0)
    b = _shrinkage(n, a)
    v = tl.load(sums + k.to(tl.int64) * wide + cols, mask=inside, other=0.0)
    v = v / tl.maximum(tl.load(soft + k.to(tl.int64) * wide) + epsilon, 1.17549435e-38)  # means
    resultant = b * v + (1 - b) * t * (r0 if EXACT else 1.0)  # shrink
    norm = tl.sqrt(tl.sum(resultant * resultant, axis=0))
    m = resultant / tl.maximum(norm, 1e-12)
    r = tl.minimum(norm, r_cap)
    c = tl.minimum(_banerjee(d, r), kappa_cap)
    c1, c0 = tl.maximum(c, 1e-6), tl.maximum(k0, 1e-6)
    log_c, log_c0 = _log_c(d, c1, tl.log(c1)), _log_c(d, c0, tl.log(c0))
    tl.store(beta + k, b)
    tl.store(kappa + k, c)
    tl.store(offset + k, log_c / temper)
    tl.store(kl + k, _anchor_kl(log_c0, log_c, r0, k0, c, tl.sum(m * t, axis=0)))
    tl.store(mu + at, m, mask=inside)
    tl.store(prototypes + at, scale * t + c / temper * m, mask=inside)  # prototypes


@triton.jit  # type: ignore[untyped-decorator]
def _votes(z, pointer, neighbour, weight, order, found, k, AGREEMENT: tl.constexpr, BLOCK: tl.constexpr):
    """The votes of the neighbours of a row, or its agreement z_i . votes_i with them."""
    i = tl.load(order + tl.program_id(0))
    cols = tl.arange(0, BLOCK)
    inside = cols < k
    votes = _votes_for(i, z, pointer, neighbour, weight, cols, k)
    if AGREEMENT:
        own = tl.load(z + i * k + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(found + i, tl.sum(own * votes, axis=0))
    else:
        tl.store(found + i * k + cols, votes, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def class_numbers(sums, soft, counts, anchor, new_soft, new_counts, squares, along, d, wide, BLOCK: tl.constexpr):
    """One program per class: what `cosine_to_means` and `class_pull` need, in arrays that are read side by side.

    These are soft counts, counts, |S_k|^2 and S_k . anchor_k; `sums`, `soft` and `counts` are columns of one matrix.
    """
    k = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    tl.store(new_soft + k, tl.load(soft + k * wide))
    tl.store(new_counts + k, tl.load(counts + k * wide))
    s = tl.load(sums + k * wide + cols, mask=cols < d, other=0.0)
    tl.store(squares + k, tl.sum(s * s, axis=0))
    tl.store(along + k, tl.sum(s * tl.load(anchor + k * d + cols, mask=cols < d, other=0.0), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def tide_step(base, cosine, dots, z, pointer, neighbour, weight, order, hard, soft, counts, squares, along, gamma,
               before, y, numbers, f, new, labels, new_gamma, right, new_hard, weighted, k, d, wide, log_k, scale,
               FIRST: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Eq. 11 of TIDE; the comments name the function of `core.tide` that a line is.

    `base` are the logits at the anchors, without votes and prior; `numbers` are u, the weight of votes, a*, s, alpha, g
    and (N - 1) / K. The FIRST step, with all classes at their anchors, makes `base`: `dots` are the cosines to the text
    there, `gamma` the logs of what y was divided by, `squares` the presence, and of the classes `counts` alone is read.
    """
    i = tl.load(order + tl.program_id(0))
    cols = tl.arange(0, BLOCK)
    inside = cols < k
    at = i * k + cols
    left_out, votes_count, smoothing = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    votes = _votes_for(i, z, pointer, neighbour, weight, cols, k)
    old = tl.load(z + at, mask=inside, other=0.0)
    n = tl.load(counts + cols, mask=inside, other=0.0)
    sharpness, alpha = tl.load(numbers + 3), tl.load(numbers + 4)
    t = tl.load(cosine + at, mask=inside, other=0.0)
    dot = tl.load(dots + at, mask=inside, other=0.0)
    if FIRST:
        pi = tl.load(squares + cols, mask=inside, other=0.0)
        bias = tl.log((n + 1 - old) / (tl.load(numbers + 6) + 1))  # text_bias
        bias = tl.where(bias < 0, bias * pi * pi, bias)
        a = scale * dot - tl.load(gamma + i) - tl.load(numbers + 5) * bias + sharpness * t
        tl.store(base + at, a, mask=inside)
        a += votes_count * votes + tl.log(n + smoothing)  # class_pull
    else:
        a = tl.load(base + at, mask=inside, other=0.0) + votes_count * votes
        a += tl.log(tl.maximum(n - left_out * old, 0.0) + smoothing)  # class_pull
        mine = left_out * tl.load(gamma + i) * old  # cosine_to_means, to `nearer`
        own = tl.where(cols == tl.load(before + i), left_out, 0.0)
        h = tl.maximum(tl.load(hard + cols, mask=inside, other=0.0) - own, 0.0)
        beta = h / (h + alpha)
        other = 1 - beta
        beta = beta / tl.maximum(tl.load(soft + cols, mask=inside, other=1.0) - mine, 1e-9)
        square = tl.load(squares + cols, mask=inside, other=0.0) + mine * (mine - 2 * dot)
        side = tl.load(along + cols, mask=inside, other=0.0) - mine * t
        length = beta * (beta * square + 2 * other * side) + other * other
        nearer = (beta * (dot - mine) + other * t) / tl.sqrt(tl.maximum(length, 1e-12)) - t
        a += sharpness * nearer
    p, label, _, g = _softmax(a, cols, k, log_k, BLOCK)  # assign
    tl.store(new + at, p, mask=inside)
    tl.store(right + i, tl.load(y + i * k + label))
    _count(i, label, g, before, labels, new_gamma, new_hard, f, weighted, k, d, wide, DEPTH)


@triton.jit  # type: ignore[untyped-decorator]
def tide_rows(y, total, agree, own, scale, even_own, others, k, BLOCK: tl.constexpr):
    """Eqs. 1 and 2 of TIDE: the agreement of a row, |y_i|^2, and the scale and |e_i|^2 of `evened`."""
    i = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    p = tl.load(y + i * k + cols, mask=cols < k, other=0.0)
    sums = tl.load(total + cols, mask=cols < k, other=0.0)
    e = p / (sums + 1)
    by = 1 / tl.sum(e, axis=0)
    tl.store(agree + i, tl.sum(p * (sums - p), axis=0) / others)
    tl.store(own + i, tl.sum(p * p, axis=0))
    tl.store(scale + i, by)
    tl.store(even_own + i, by * by * tl.sum(e * e, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _column_sums(y, x, by, square_by, parts, n, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sums over some rows of y by, y x and y^2 square_by, and the largest y, (4, K) of each part of the rows."""
    part, step = tl.program_id(0), tl.num_programs(0) * ROWS
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total, along, top = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
    squares = tl.zeros((COLS,), tl.float32)
    for start in range(part * ROWS, n, step):
        rows = start + tl.arange(0, ROWS)
        at = rows[:, None].to(tl.int64) * k + cols[None, :]
        inside = (rows < n)[:, None] & (cols < k)[None, :]
        p = tl.load(y + at, mask=inside, other=0.0)
        total += tl.sum(p * tl.load(by + rows, mask=rows < n, other=0.0)[:, None], axis=0)
        along += tl.sum(p * tl.load(x + at, mask=inside, other=0.0), axis=0)
        squares += tl.sum(p * p * tl.load(square_by + rows, mask=rows < n, other=0.0)[:, None], axis=0)
        top = tl.maximum(top, tl.max(p, axis=0))
    out = parts + part * k + cols
    part_size = tl.num_programs(0) * k
    tl.store(out, total, mask=cols < k)
    tl.store(out + part_size, along, mask=cols < k)
    tl.store(out + 2 * part_size, squares, mask=cols < k)
    tl.store(out + 3 * part_size, top, mask=cols < k)


@triton.jit  # type: ignore[untyped-decorator]
def _newton(target, confidence, rise, state, new, parts, n, BLOCK: tl.constexpr):
    """One step of `core.tide.calibration`, from parts of two sums over n samples; the state: low, high and T."""
    sure, slope = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sure += tl.load(confidence + at, mask=at < parts, other=0.0)
        slope += tl.load(rise + at, mask=at < parts, other=0.0)
    low, high, power = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    gap = tl.load(target) - tl.sum(sure, axis=0) / n
    low, high = tl.where(gap > 0, power, low), tl.where(gap > 0, high, power)
    step = power * tl.exp(tl.minimum(tl.maximum(gap / tl.maximum(tl.sum(slope, axis=0) / n, 1e-6), -1.0), 1.0))
    tl.store(new, low)
    tl.store(new + 1, high)
    tl.store(new + 2, tl.where((low <= step) & (step <= high), step, tl.sqrt(low * high)))


@triton.jit  # type: ignore[untyped-decorator]
def tide_confidence(z, label, power, confidence, slope, k, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    """Eq. 14 of TIDE: `confidences` under the power that z is raised to; with WRITE, z^T takes the place of z."""
    i = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < k
    by = tl.load(power)
    x = tl.log(tl.load(z + i * k + cols, mask=inside, other=1.0) + 1e-30)  # log_ratios
    x -= tl.log(tl.load(z + i * k + tl.load(label + i)) + 1e-30)
    e = tl.where(inside, tl.exp(by * x), 0.0)
    c = 1 / tl.sum(e, axis=0)
    tl.store(confidence + i, c)
    tl.store(slope + i, -by * tl.sum(e * x, axis=0) * c * c)
    if WRITE:
        tl.store(z + i * k + cols, e * c, mask=inside)


def launch(kernel: Any, rows: int, columns: int, *given: Any, few: int = 2048, **more: Any) -> None:
    """Run one program per row, which holds all its columns; up to `few` columns are handled by 4 warps."""
    block = padded(columns)
    kernel[(rows,)](*given, BLOCK=block, num_warps=4 if block <= few else 8 if block <= 8192 else 16, **more)


def padded(columns: int) -> int:
    """Return the width of a block that holds so many columns: the next power of two, at least 16."""
    return int(max(16, triton.next_power_of_2(columns)))


def floats(ref: Array, *shape: int) -> Array:
    """Return an uninitialised array in float32 beside another."""
    return torch.empty(shape, dtype=torch.float32, device=ref.device)


def numbers(values: Iterable[Any], ref: Array) -> Array:
    """Return numbers in float32 beside an array, without a copy from the host, for which a captured run would wait."""
    kind = {"dtype": torch.float32, "device": ref.device}
    return torch.stack([x.to(**kind) if isinstance(x, torch.Tensor) else torch.full((), x, **kind) for x in values])


def scaled_pair(x: Array, text: Array) -> tuple[Array, Array, Array]:
    """Return unit rows of two matrices, and how many rows have no length to divide by, which become zeros.

    Nothing waits for that number.
    """
    x, text = x.contiguous(), text.contiguous()
    (n, d), found = x.shape, (torch.empty_like(x), torch.empty_like(text))
    flaws = torch.zeros(1, dtype=torch.int32, device=x.device)
    launch(_scaled, n + len(text), d, x, text, *found, flaws, n, d)
    return *found, flaws


def top_m(features: Array, m: int, precision: str) -> tuple[Array, Array]:
    """Return (neighbours, weights), (N, m) each: the m largest cosines to other rows, sorted; ties: the lower index."""
    n, d = features.shape
    x = (features.half() if precision == "half" else features.float()).contiguous()
    values, found = floats(x, n, m), torch.empty((n, m), dtype=torch.int64, device=x.device)
    half = x.element_size() == 2  # tiles that fill the device: small ones for few rows
    rows, cols, warps = (128, 256 if half else 128, 8) if n > 16384 else (64, 128, 4)
    depth = 64 if half else 32
    if n <= 2048:
        rows, cols, depth, warps = (16, 256, 128, 4) if half else (16, 128, 64, 8)
    _top_m[(triton.cdiv(n, rows),)](
        x, values, found, n, m, d, "tf32x3" if precision == "full" else "tf32", rows, cols, depth, SLOTS,
        num_warps=warps,
    )  # fmt: skip
    return found, values.to(features.dtype)


def zero_shot(cosine: Array, scale: float) -> tuple[Array, ...]:
    """Return Eq. zero-shot from cosines: y (N, K), and of each sample, (N,), what `_numba.zero_shot` has.

    That is the label, the log of the sum, the probability of the label, and `core.tide.unlikeness`.
    """
    (n, k), y = cosine.shape, torch.empty_like(cosine)
    labels, rows = torch.empty(n, dtype=torch.int64, device=cosine.device), floats(cosine, 3, n)
    launch(_zero_shot, n, k, cosine, y, labels, *rows, scale, k)
    return y, labels, *rows


def votes(z: Array, edges: tuple[Array, ...], agreement: bool = False) -> Array:
    """Return the votes of the neighbours, (N, K), or the `agreement` z_i . votes_i of each sample with them, (N,).

    A sparse product would sort the edges first, for which it waits.
    """
    n, k = z.shape
    found = floats(z, n) if agreement else floats(z, n, k)
    launch(_votes, n, k, z.contiguous(), *edges, found, k, agreement, few=GATHER)
    return found


def step(kernel: Any, count: int, z: Array, f: Array, weighted: Array, given: Any, more: Any) -> tuple[Array, ...]:
    """Return what `e_step` or `tide_step` writes: z, labels, the given count of numbers per sample, and K + 1 counts.

    `given` are the arguments before these outputs, `more` those after them. z keeps its dtype. The counts: labels of
    each class, and labels that changed. gamma_i f_i and gamma_i are written to `weighted`, (N, > d).
    """
    (n, k), d = z.shape, f.shape[1]
    new, labels = torch.empty_like(z), torch.empty(n, dtype=torch.int64, device=z.device)
    rows, counts = floats(z, count, n), torch.zeros(k + 1, dtype=torch.float32, device=z.device)
    given = *given, f, new, labels, *rows, counts, weighted, k, d, weighted.shape[1], log_classes(k), *more
    launch(kernel, n, k, *given, few=GATHER, DEPTH=padded(d))
    return new, labels, *rows, counts


def column_sums(y: Array, x: Array, by: Array, square_by: Array) -> tuple[Array, ...]:
    """Return sum_i by_i y_ik, sum_i y_ik x_ik, sum_i square_by_i y_ik^2 and max_i y_ik >= 0, (K,) each, in one pass."""
    n, k = y.shape
    tiles = min(triton.cdiv(n, 32), 64)
    parts = floats(y, 4, tiles, k)
    _column_sums[(tiles, triton.cdiv(k, 128))](y, x, by, square_by, parts, n, k, 32, 128, num_warps=4)
    return *parts[:3].sum(1), parts[3].amax(0)


def calibration(target: Array, sums_at: Callable[[Array], tuple[Array, Array]], n: int, low: float, high: float,
                rounds: int) -> Array:  # fmt: skip
    """Return the T of `core.tide.calibration`; `sums_at(T)` may be arrays, which one kernel per round adds up."""
    target, state = target.float(), numbers((low, high, 1.0), target)
    for _ in range(rounds):
        (confidence, rise), new = (x.float() for x in sums_at(state[2])), torch.empty_like(state)
        _newton[(1,)](target, confidence, rise, state, new, confidence.numel(), n, 1024, num_warps=8)
        state = new
    return state[2]
