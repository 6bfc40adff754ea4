"""The Triton source of `backends.kernels` and `tide_kernels`, imported only where Triton is installed.

A kernel runs one program per row, which reads it once: `launch` starts them. With TRITON_INTERPRET=1 they run on the
CPU, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
import triton
import triton.language as tl

from moontide.core import formulas
from moontide.core import tide as eq
from moontide.core.arrays import Array
from moontide.core.ple import log_classes

LEAST = tl.constexpr(1 / eq.LARGEST)
GATHER = 512  # columns of a row up to which 4 warps gather votes, which waits for memory

_compiled: Any = (lambda f: f) if os.environ.get("TRITON_INTERPRET") == "1" else triton.jit
_shrinkage, _entropy_weight = _compiled(formulas.shrinkage), _compiled(formulas.entropy_weight)
_banerjee, _log_c, _anchor_kl = map(_compiled, (formulas.banerjee, formulas.log_c, formulas.anchor_kl))


@triton.jit  # type: ignore[untyped-decorator]
def _clamped(x, low, high=float("inf")):
    """`core.tide.clamped`."""
    return tl.minimum(tl.maximum(x, low), high)


def _equation(f: Any, *inner: Any) -> Any:
    """Compile an equation of `core.tide` between single numbers from its source, with those that it calls."""
    named = {name: tl.constexpr(getattr(eq, name)) for name in ("EPS", "LARGEST", "OUTLASTS", "DOUBTED")}
    named |= {x.__name__: _equation(x) for x in inner} | {"clamped": _clamped}
    return _compiled(FunctionType(f.__code__, {**vars(eq), **named}))


_corroborated_excess = _equation(eq.corroborated_excess, eq.excess, eq.outlasting, eq.corroboration, eq.mean_agreement)
_prior_counts = _equation(eq.prior_counts)


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
def agreement(z, pointer, neighbour, weight, order, found, k, BLOCK: tl.constexpr):
    """The agreement z_i . votes_i of a row with its neighbours."""
    i = tl.load(order + tl.program_id(0))
    cols = tl.arange(0, BLOCK)
    own = tl.load(z + i * k + cols, mask=cols < k, other=0.0).to(tl.float32)
    tl.store(found + i, tl.sum(own * _votes_for(i, z, pointer, neighbour, weight, cols, k), axis=0))


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
def tide_rows(y, total, f, scale, sure, unknown, pointer, neighbour, weight, order, rows, products, in_metric, averaged,
              n, k, d, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """A row's predictions beside those of all others and of its neighbours; comments name functions of `core.tide`.

    Written are numbers, (5, N), and products, (3, N, K), whose sums are those of `Compared`; the row in the metric; and
    its score for the unknown.
    """
    i = tl.load(order + tl.program_id(0)).to(tl.int64)
    cols, depth = tl.arange(0, BLOCK), tl.arange(0, DEPTH)
    inside, at, plane = cols < k, products + i * k + cols, tl.num_programs(0).to(tl.int64) * k
    p, sums = tl.load(y + i * k + cols, mask=inside, other=0.0), tl.load(total + cols, mask=inside, other=0.0)
    own, degree, around = tl.load(unknown + i), 0.0, 0.0
    for edge in range(tl.load(pointer + i), tl.load(pointer + i + 1)):
        degree += tl.load(weight + edge)
        around += tl.load(weight + edge) * tl.load(unknown + tl.load(neighbour + edge))
    around = tl.where(degree > 0, around / tl.maximum(degree, 1e-12), own)
    tl.store(averaged + i, (own + around) / 2)  # with_neighbours
    agree, e = tl.sum(p * (sums - p), axis=0) / tl.maximum(n - 1, 1), p / (sums + 1)  # agreements
    e = e / tl.sum(e, axis=0)  # evened
    tl.store(rows + i, agree)
    tl.store(rows + n + i, agree * agree)
    tl.store(rows + 2 * n + i, tl.sum(p * p, axis=0))
    tl.store(rows + 3 * n + i, tl.load(sure + i))
    tl.store(rows + 4 * n + i, tl.sum(e * e, axis=0))
    tl.store(at, p * _votes_for(i, y, pointer, neighbour, weight, cols, k), mask=inside)  # agreement_by_class
    tl.store(at + plane, degree * p * p, mask=inside)
    tl.store(at + 2 * plane, e, mask=inside)
    row = tl.load(f + i * d + depth, mask=depth < d, other=0.0)
    row = row / tl.load(scale + depth, mask=depth < d, other=1.0)
    tl.store(in_metric + i * d + depth, row / tl.sqrt(tl.sum(row * row, axis=0)), mask=depth < d)


@triton.jit  # type: ignore[untyped-decorator]
def tide_occupancy(agree, square, own, sure, even_own, even, near, most, occupancy, n, k, m, ALONE: tl.constexpr):
    """`core.tide.occupancy_of`, by one program; ALONE: there is one sample or one class."""
    u, false = tl.load(agree) / n, (1 - tl.load(sure) / n) * n / k
    error = tl.sqrt(tl.maximum(tl.load(square) / n - u * u, 0.0) / n)
    even_own, even, near, most = tl.load(even_own), tl.load(even), tl.load(near), tl.load(most)
    v, rho, chi = _corroborated_excess(u, error, tl.load(own), even_own, even, near, most, n, k, m)
    v, rho, chi = tl.where(ALONE, LEAST, v), tl.where(ALONE, 1.0, rho), tl.where(ALONE, 1.0, chi)
    a, w, smoothing = _prior_counts(v * chi, false)
    tl.store(occupancy, v)
    tl.store(occupancy + 1, rho)
    tl.store(occupancy + 2, chi)
    tl.store(occupancy + 3, a)
    tl.store(occupancy + 4, w)
    tl.store(occupancy + 5, smoothing)


@triton.jit  # type: ignore[untyped-decorator]
def tide_power(z, label, target, before, state, parts_before, parts, n, k, coldest, warmest, FIRST: tl.constexpr,
               LAST: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Eq. 14 of TIDE: a step of `calibration`, and `confidences` and slopes at the T it leads to; z^T if LAST.

    Each program adds up some rows, and all of them the parts of the step before. The state: low, high, T; equal: found.
    """
    i, programs, cols = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCK)
    low, high, by, stop = coldest, warmest, 1.0, n
    if not FIRST:
        at = tl.arange(0, PARTS)
        low, high, power = tl.load(before), tl.load(before + 1), tl.load(before + 2)
        gap = tl.load(target) - tl.sum(tl.load(parts_before + at, mask=at < programs, other=0.0), axis=0) / n
        rise = tl.sum(tl.load(parts_before + programs + at, mask=at < programs, other=0.0), axis=0) / n
        found = (tl.abs(gap) < 1e-5) | (high - low < 1e-3 * low)
        low, high = tl.where((gap > 0) | found, power, low), tl.where((gap > 0) & ~found, high, power)
        step = power * tl.exp(_clamped(gap / tl.maximum(rise, 1e-6), -1.0, 1.0))
        by = tl.where(found, power, tl.where((low <= step) & (step <= high), step, tl.sqrt(low * high)))
        stop = n if LAST else tl.where(found, 0, n)
    tl.store(state, low)
    tl.store(state + 1, high)
    tl.store(state + 2, by)
    confidence, slope = 0.0, 0.0
    for row in range(i, stop, programs):
        x = tl.log(tl.load(z + row * k + cols, mask=cols < k, other=1.0) + 1e-30)  # log_ratios
        x -= tl.log(tl.load(z + row * k + tl.load(label + row)) + 1e-30)
        e = tl.where(cols < k, tl.exp(by * x), 0.0)
        c = 1 / tl.sum(e, axis=0)
        confidence += c
        slope -= by * tl.sum(e * x, axis=0) * c * c
        if LAST:
            tl.store(z + row * k + cols, e * c, mask=cols < k)
    tl.store(parts + i, confidence)
    tl.store(parts + programs + i, slope)


def launch(kernel: Any, rows: int, columns: int, *given: Any, small: int = 2048, **more: Any) -> None:
    """Run one program per row, which holds all its columns; up to `small` columns are handled by 4 warps."""
    block = padded(columns)
    kernel[(rows,)](*given, BLOCK=block, num_warps=4 if block <= small else 8 if block <= 8192 else 16, **more)


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


def top_m(features: Array, m: int, slots: int, precision: str) -> tuple[Array, Array]:
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
        x, values, found, n, m, d, "tf32x3" if precision == "full" else "tf32", rows, cols, depth, slots,
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


def step(kernel: Any, count: int, z: Array, f: Array, weighted: Array, given: Any, more: Any) -> tuple[Array, ...]:
    """Return what `e_step` or `tide_step` writes: z, labels, the given count of numbers per sample, and K + 1 counts.

    `given` are the arguments before these outputs, `more` those after them. z keeps its dtype. The counts: labels of
    each class, and labels that changed. gamma_i f_i and gamma_i are written to `weighted`, (N, > d).
    """
    (n, k), d = z.shape, f.shape[1]
    new, labels = torch.empty_like(z), torch.empty(n, dtype=torch.int64, device=z.device)
    rows, counts = floats(z, count, n), torch.zeros(k + 1, dtype=torch.float32, device=z.device)
    given = *given, f, new, labels, *rows, counts, weighted, k, d, weighted.shape[1], log_classes(k), *more
    launch(kernel, n, k, *given, small=GATHER, DEPTH=padded(d))
    return new, labels, *rows, counts
