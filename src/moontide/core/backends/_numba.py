"""The loops of `backends.loops`, in Numba: float32, one row after another, each row read once while it is in the cache.

Sums may be made in any order (`reassoc`), so that they are vectorised; that is all that is left to the compiler. All
but the formulas stand in one file, since Numba renews what it cached of a function when that function's own file
changes, not when one does whose functions it calls.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

from moontide.core import formulas
from moontide.progress import follow_compiler

LOOPS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nnan", "nsz"}}
ZERO, ONE, SMALLEST = np.float32(0), np.float32(1), np.finfo(np.float32).smallest_normal
EPS, LEAST = 1e-12, np.float32(1e-30)
SHORT, WEAK = np.float32(0.1), np.float32(1e-9)  # |R_k| and sum_i gamma_i z_ik below which an M-step needs vectors
TINY = np.float32(1e-26).view(np.int32)  # bits of the least scale of a row: its sum would be near the end of float32
GROWTH = np.float32(16).view(np.int32)  # and of the largest: shared entries are then looked for again
CHUNK = 64  # numbers that a vectorised loop takes at a time, or a multiple of that

LOWEST = np.float32(-87)  # exp of less is taken as 0, near the end of float32
BIAS = np.float32(127.5)
LOG2_E = np.float32(1 / math.log(2))
LOG2_HIGH = np.float32(0.693359375)  # log 2 in two parts, the first with so few bits that n times it is exact
LOG2_LOW = np.float32(math.log(2) - 0.693359375)


def polynomial(function: Any, degree: int, low: float, high: float) -> tuple[np.float32, ...]:
    """Return coefficients, lowest first, of the polynomial that is `function` at Chebyshev's points of an interval."""
    found = np.polynomial.Chebyshev.interpolate(function, degree, (low, high)).convert(kind=np.polynomial.Polynomial)
    return tuple(np.float32(c) for c in found.coef)


E0, E1, E2, E3, E4, E5 = polynomial(  # exp(r) = 1 + r + r^2 (...)
    lambda r: (np.expm1(r) - r) / r**2, 5, -math.log(2) / 2, math.log(2) / 2
)
L0, L1, L2, L3, L4, L5, L6, L7 = polynomial(  # log(1 + r) = r - r^2 / 2 + r^3 (...)
    lambda r: (np.log1p(r) - r + r**2 / 2) / r**3, 7, math.sqrt(0.5) - 1, math.sqrt(2) - 1
)
ROOT_HALF = np.int32(0x3F3504F3)  # the bits of the root of 1/2
MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits but the sign


followed = follow_compiler()


def loops(function: Any) -> Any:
    """Compile a function when it is first called, once for this machine where its cache can be written."""
    followed.add(function)
    try:
        return njit(cache=True, **LOOPS)(function)
    except RuntimeError:  # no folder to write to
        return njit(**LOOPS)(function)


# What loops call is made part of each: a function of its own is one piece of code in the process that compiles it, and
# another with each loop that is loaded from the cache, whose sums then end in other bits.
inlined = njit(inline="always")


@inlined
def exp(x):
    """exp(x) for x < 88: 2^n exp(r) with |r| <= log(2) / 2; vectorised where a loop is."""
    y = max(x, LOWEST)
    biased = np.int32(y * LOG2_E + BIAS)  # n + 127, rounded to the nearest
    n = np.float32(biased - np.int32(127))
    r = y - n * LOG2_HIGH - n * LOG2_LOW
    q = ((((E5 * r + E4) * r + E3) * r + E2) * r + E1) * r + E0
    value = (q * r * r + r + ONE) * np.int32(biased << np.int32(23)).view(np.float32)
    return value if x > LOWEST else ZERO


@inlined
def log(x):
    """log(x) of a positive normal number: n log 2 + log(1 + r), 1 + r between the roots of 1/2 and 2; vectorised."""
    bits = np.float32(x).view(np.int32)
    whole = (bits - ROOT_HALF) >> np.int32(23)
    r = np.int32(bits - (whole << np.int32(23))).view(np.float32) - ONE
    q = ((((((L7 * r + L6) * r + L5) * r + L4) * r + L3) * r + L2) * r + L1) * r + L0
    n = np.float32(whole)
    return n * LOG2_HIGH + (n * LOG2_LOW + q * r * r * r - np.float32(0.5) * r * r + r)


shrinkage, entropy_weight = loops(formulas.shrinkage), loops(formulas.entropy_weight)
banerjee, log_c, anchor_kl = map(loops, (formulas.banerjee, formulas.log_c, formulas.anchor_kl))


@inlined
def weight_of(h, log_k):
    """Eq. pl, held in [0, 1]."""
    return min(max(np.float32(entropy_weight(h, log_k)), ZERO), ONE)


@loops
def log_c_of(d, kappa):
    """App. vMF: log C_d(kappa) for kappa of at least 1e-6."""
    return log_c(d, max(kappa, 1e-6), math.log(max(kappa, 1e-6)))


@loops
def padded(k, value):
    """Return an array of k copies of a number, rounded up to whole steps of a vectorised loop."""
    return np.full((k + CHUNK - 1) // CHUNK * CHUNK, value, np.float32)


@inlined
def gather(i, edges, z, votes):
    """votes = sum_j M_ij z_j, two neighbours at a time; `edges` are those of an `Affinity`."""
    pointer, neighbour, weight = edges
    votes[:] = ZERO
    k, edge, end = votes.shape[0], pointer[i], pointer[i + 1]
    while edge + 1 < end:
        one, two, v, w = z[neighbour[edge]], z[neighbour[edge + 1]], weight[edge], weight[edge + 1]
        for c in range(k):
            votes[c] += v * one[c] + w * two[c]
        edge += 2
    if edge < end:
        one, v = z[neighbour[edge]], weight[edge]
        for c in range(k):
            votes[c] += v * one[c]


@loops
def votes(edges, z, out):
    """Write the votes for all rows to `out`, and return it."""
    for i in range(out.shape[0]):
        gather(i, edges, z, out[i])
    return out


@inlined
def largest(a):
    """Return the largest number, by integers that sort like the bits of floats: their maximum is vectorised."""
    top = np.int32(-(2**31))
    for c in range(a.shape[0]):
        bits = np.float32(a[c]).view(np.int32)
        key = np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))
        if key > top:
            top = key
    return np.int32(top ^ ((top >> np.int32(31)) & MAGNITUDE)).view(np.float32)


@inlined
def first_at(values, top):
    """Return where a value stands first; the last place where it is not there, as NaN never is."""
    at, end = 0, values.shape[0] - 1
    while at < end and values[at] != top:
        at += 1
    return at


@loops
def nearest(gram, m):
    """Return columns and values of the m largest entries of each row off the diagonal; ties: the lower column."""
    n = gram.shape[0]
    found, values = np.zeros((n, m), np.int64), np.full((n, m), -np.inf, np.float32)
    for i in range(n):
        row, best, at = gram[i], values[i], found[i]
        for c in range(n):
            if row[c] > best[m - 1] and c != i:
                j = m - 1
                while j > 0 and row[c] > best[j - 1]:
                    best[j], at[j] = best[j - 1], at[j - 1]
                    j -= 1
                best[j], at[j] = row[c], c
    return found, values


@loops
def zero_shot(start, stop, cosine, scale, y, labels, log_sum, confidence, unlike):
    """Eq. zero-shot of rows from `start` to `stop`: y = softmax(scale cosine), and what is one number per sample.

    Returns sums of y and of y cosine and the largest y of each class, (K,) each, and sum_i |y_i|^2.
    """
    k = y.shape[1]
    total, along, most, own = np.zeros(k, np.float32), np.zeros(k, np.float32), np.zeros(k, np.float32), 0.0
    for i in range(start, stop):
        row, p = cosine[i], y[i]
        top, norm, mean, squares = largest(row), ZERO, ZERO, ZERO
        for c in range(k):
            p[c] = exp(scale * (row[c] - top))
            norm += p[c]
            mean += row[c]
        labels[i], by = first_at(row, top), ONE / norm
        log_sum[i], confidence[i], unlike[i] = scale * top + np.log(norm), by, ONE - (top - mean / np.float32(k))
        for c in range(k):
            p[c] *= by
            total[c] += p[c]
            along[c] += p[c] * row[c]
            most[c] = max(most[c], p[c])
            squares += p[c] * p[c]
        own += squares
    return total, along, most, own


@inlined
def softmax(a, k, q, absent, absent_log):
    """Write q = e^(a - top) of k logits a: return their largest column, 1 / sum q, log sum e^a and the entropy.

    `a`, which becomes a - top, and `q` are padded. `absent` and `absent_log`, sums of e^b and b e^b over logits b of
    absent classes, count in all sums.
    """
    top, total, inner = largest(a[:k]), ZERO, ZERO
    label = first_at(a[:k], top)
    if absent > ZERO:
        top = max(top, np.log(absent))
        total, inner = np.exp(-top) * absent, np.exp(-top) * (absent_log - top * absent)
    for c in range(k):
        a[c] -= top  # not the padding, which stays far below zero
    for c in range(a.shape[0]):
        q[c] = exp(a[c])
        total += q[c]
        inner += q[c] * a[c]
    by, log_total = ONE / total, np.log(total)
    return label, by, top + log_total, log_total - inner * by


@loops
def class_weights(z, columns, gamma, cosine, some):
    """Return gamma_i z_ik and the cosines to the anchors t_k of some classes, (N, L) each, and two sums over them.

    These are sum_i gamma_i z_ik and S_k . t_k = sum_i gamma_i z_ik f_i . t_k, (L,) each. The classes are `some` of the
    columns of `cosine`, and `columns` of z.
    """
    n, width = z.shape[0], some.shape[0]
    weight, near = np.empty((n, width), np.float32), np.empty((n, width), np.float32)
    soft, along = np.zeros(width, np.float32), np.zeros(width, np.float32)
    for i in range(n):
        row, other, own, at, by = z[i], cosine[i], weight[i], near[i], gamma[i]
        for l in range(width):
            own[l], at[l] = by * row[columns[l]], other[some[l]]
        for l in range(width):
            soft[l] += own[l]
            along[l] += own[l] * at[l]
    return weight, near, soft, along


@loops
def m_step(near, soft, along, dots, squares, counts, kappa0, r0, alpha, exact, d, epsilon, r_cap, kappa_cap, temper,
           scale):  # fmt: skip
    """Eqs. update-m and update-m-real: R_k = a_k S_k + b_k t_k, of which the products of `loops.products` are known.

    `dots`, f_i . S_k, become logits. Returns beta, kappa, KL, a / |R| and b / |R|, (L,) each, and
    whether every |R_k| and every weight of S_k is large enough for products in float32 to be accurate.
    """
    n, width = dots.shape
    found, accurate = np.empty((5, width), np.float32), True
    by_dots, by_near, offset = padded(width, ZERO), padded(width, ZERO), padded(width, ZERO)
    for l in range(width):
        beta = np.float32(shrinkage(counts[l], alpha[l]))
        a, b = beta / max(soft[l] + epsilon, SMALLEST), (ONE - beta) * (r0[l] if exact else ONE)
        r = math.sqrt(max(a * (a * squares[l] + 2 * b * along[l]) + b * b, ZERO))
        kappa, inverse = min(banerjee(d, min(float(r), r_cap)), kappa_cap), ONE / max(r, EPS)
        own_log_c, anchor_log_c = log_c_of(d, kappa), log_c_of(d, float(kappa0[l]))
        kl = anchor_kl(anchor_log_c, own_log_c, r0[l], float(kappa0[l]), kappa, (a * along[l] + b) * inverse)
        accurate &= r >= SHORT and soft[l] >= WEAK
        found[0, l], found[1, l], found[2, l], found[3, l], found[4, l] = beta, kappa, kl, a * inverse, b * inverse
        by_dots[l], by_near[l] = kappa / temper * found[3, l], kappa / temper * found[4, l] + scale
        offset[l] = own_log_c / temper
    for i in range(n):
        own, at = dots[i], near[i]
        for l in range(width):
            own[l] = own[l] * by_dots[l] + at[l] * by_near[l] + offset[l]
    return found, accurate


@loops
def e_step(start, stop, anchor, present, values, edges, z, other, new, names, labels, found, log_k):
    """Eq. update-z of rows from `start` to `stop`; returns the largest change of an entry of z, and whether `bounded`.

    The logits are cosine slope + offset - shift, which `anchor` has, or `values` if `present`. `names` are the classes
    of the columns. `other` (5, N) has of each row, over entries of other columns, the sums of q = exp(logit), q log q,
    q votes and z votes, and the largest q; where that is the largest of all, the label is -1. `found` (5, N) are the
    logs of the sums, gamma, the agreement of the votes with the new z and with z, and the scales, exp of minus the
    logs, which are `bounded` if all are in (TINY, GROWTH].
    """
    (cosine, slope, offset, shift), k, bounded = anchor, z.shape[1], True
    votes, a, q, change = padded(k, ZERO), padded(k, LOWEST - BIAS), padded(k, ZERO), padded(k, ZERO)
    for i in range(start, stop):
        row, p, old, of_p, of_old, less = cosine[i], new[i], z[i], ZERO, ZERO, shift[i]
        gather(i, edges, z, votes[:k])
        for c in range(k):
            a[c] = row[c] * slope[c] + offset[c] - less + votes[c]
        for l in range(present.shape[0]):
            a[present[l]] = values[i, l] + votes[present[l]]
        column, by, log_sum, entropy = softmax(a, k, q, other[0, i], other[1, i])
        for c in range(k):
            p[c] = q[c] * by
            of_p += p[c] * votes[c]
            of_old += old[c] * votes[c]
            change[c] = max(change[c], abs(p[c] - old[c]))
        scale = np.exp(-log_sum) if other[0, i] > ZERO else ZERO
        bounded &= TINY < np.float32(scale).view(np.int32) <= GROWTH  # not where it is NaN
        labels[i] = names[column] if other[4, i] * scale <= p[column] else -1
        found[0, i], found[1, i], found[4, i] = log_sum, weight_of(entropy, log_k), scale
        found[2, i], found[3, i] = of_p + scale * other[2, i], of_old + other[3, i]
    return largest(change), bounded


@loops
def split(cosine, slope, offset, shift, present, edges, z, p, sums, negligible):
    """Return the positions and row starts of shared entries of z, in which the present columns are 0.

    `p` becomes exp(logits - shift) of the other entries; `sums` what `other` of `e_step` is without votes.
    """
    n, k = z.shape
    votes, found, starts, count = np.empty(k, np.float32), np.empty(n + k, np.int64), np.empty(n + 1, np.int64), 0
    for i in range(n):
        row, old, out, by = cosine[i], z[i], p[i], shift[i]
        gather(i, edges, z, votes)
        for c in range(k):
            votes[c] *= old[c]
            out[c] = exp(row[c] * slope[c] + offset[c] - by)
        for l in range(present.shape[0]):
            out[present[l]] = ZERO
        starts[i] = count
        if count + k > found.shape[0]:
            found = np.append(found, found)
        for c in range(k):
            found[count] = i * k + c
            count += votes[c] > negligible  # otherwise the next one overwrites it
        for s in range(starts[i], count):
            out[found[s] - i * k] = ZERO
        add, product = ZERO, ZERO
        for c in range(k):
            add += out[c]
            product += out[c] * (row[c] * slope[c] + offset[c] - by)
        sums[0, i], sums[1, i], sums[4, i] = add, product, largest(out)
    starts[n] = count
    return found[:count].copy(), starts


@loops
def shared_votes(entries, row_of, edges, slot):
    """Find which shared entries vote for which: where those of each begin (S + 1,), voters and weights (P,).

    `slot` (N K,) is overwritten.
    """
    pointer, neighbour, weight = edges
    k, room, count = slot.shape[0] // (pointer.shape[0] - 1), 1, 0
    slot[:] = -1
    for s in range(entries.shape[0]):
        slot[entries[s]] = s
        room += pointer[row_of[s] + 1] - pointer[row_of[s]]
    first, voter, by = np.empty(entries.shape[0] + 1, np.int64), np.empty(room, np.int32), np.empty(room, np.float32)
    for s in range(entries.shape[0]):
        i = row_of[s]
        first[s], c = count, entries[s] - i * k
        for edge in range(pointer[i], pointer[i + 1]):
            at = slot[neighbour[edge] * k + c]
            voter[count], by[count] = at, weight[edge]
            count += at >= 0  # otherwise the next one overwrites it
    first[entries.shape[0]] = count
    return first, voter[:count].copy(), by[:count].copy()


@loops
def shared_sums(q, scale, by, logits, starts, first, voter, weight, sums):
    """Return q = exp(logit) of the shared entries (S,), and with them `other` of `e_step`.

    So far their z were q scale, and the votes of a sample count `by`, (N,) each; `sums` are of entries not shared.
    """
    z, cast, votes, x = np.empty_like(q), np.empty_like(q), np.empty_like(q), np.empty_like(q)
    new, other = np.empty_like(q), sums.copy()
    for i in range(scale.shape[0]):
        for s in range(starts[i], starts[i + 1]):
            z[s] = q[s] * scale[i]
            cast[s] = z[s] * by[i]
    for s in range(q.shape[0]):
        vote = ZERO
        for edge in range(first[s], first[s + 1]):
            vote += weight[edge] * cast[voter[edge]]
        votes[s], x[s] = vote, logits[s] + vote
    for s in range(q.shape[0]):
        new[s] = exp(x[s])
    for i in range(scale.shape[0]):
        total, inner, of_new, of_old, most = ZERO, ZERO, ZERO, ZERO, ZERO
        for s in range(starts[i], starts[i + 1]):
            total += new[s]
            inner += new[s] * x[s]
            of_new += new[s] * votes[s]
            of_old += z[s] * votes[s]
            most = max(most, new[s])
        other[0, i], other[1, i], other[2, i] = other[0, i] + total, other[1, i] + inner, of_new
        other[3, i], other[4, i] = of_old, max(other[4, i], most)
    return new, other


@loops
def tide_compare(start, stop, y, total, edges, agree):
    """Eqs. 1 and 2 of TIDE for rows from `start` to `stop`: y_i . (sum_j y_j - y_i), and sums over the rows.

    Returns sum_ij W_ij y_ik y_jk, sum_ij W_ij y_ik^2 and (n_k + 1) sum_i e_ik, (K,) each, and sum_i |e_i|^2, with n_k
    and e of `evened`.
    """
    pointer, _, weight = edges
    k, even_own = y.shape[1], 0.0
    votes, inverse = np.empty(k, np.float32), ONE / (total + ONE)
    near, most, even = np.zeros(k, np.float32), np.zeros(k, np.float32), np.zeros(k, np.float32)
    for i in range(start, stop):
        p, degree, product, sum_e, squares = y[i], ZERO, ZERO, ZERO, ZERO
        gather(i, edges, y, votes)
        for edge in range(pointer[i], pointer[i + 1]):
            degree += weight[edge]
        for c in range(k):
            near[c] += p[c] * votes[c]
            most[c] += degree * p[c] * p[c]
            product += p[c] * (total[c] - p[c])
            e = p[c] * inverse[c]
            sum_e += e
            squares += e * e
        scale = ONE / sum_e
        for c in range(k):
            even[c] += scale * p[c]
        agree[i] = product
        even_own += scale * scale * squares
    return near, most, even, even_own


@loops
def anchor_lengths(text, slope, offset, scale):
    """Return 1 / |(slope t_k + offset) / scale|, (K,): what makes unit rows of the anchors of Eq. 4."""
    found = np.empty(text.shape[0], np.float32)
    for c in range(text.shape[0]):
        row, square = text[c], ZERO
        for j in range(row.shape[0]):
            x = (slope * row[j] + offset[j]) * scale[j]
            square += x * x
        found[c] = ONE / np.sqrt(max(square, np.float32(EPS)))
    return found


@loops
def tide_keep(start, stop, cosine, zero_shot, at_anchor, anchors, bias, sharpness, base):
    """Write the logits at the anchors to `base`, without votes and prior (Eqs. 4, 5 and 11 of TIDE).

    `at_anchor`, f_i . t_k in the metric, becomes the cosines to the anchors. `zero_shot` is the logit scale, the logs
    of the sums, and y; `anchors` their slope, f_i . offset and inverse lengths; `bias` sum_i y_i, 1 / (expected + 1)
    and pi^2 of Eq. 5, (K,) each, and its weight.
    """
    (scale, log_sum, y), (slope, offset, by), (total, expected, presence, weight) = zero_shot, anchors, bias
    k = y.shape[1]
    less = padded(k, ZERO)
    for i in range(start, stop):
        row, p, near, out, add, shift = cosine[i], y[i], at_anchor[i], base[i], offset[i], log_sum[i]
        for c in range(k):
            near[c] = (slope * near[c] + add) * by[c]
        for c in range(k):
            b = weight * log((total[c] + ONE - p[c]) * expected[c])
            less[c] = b * presence[c] if b < ZERO else b
        for c in range(k):
            out[c] = scale * row[c] - shift + sharpness * near[c] - less[c]


@loops
def tide_step(start, stop, base, y, counts, numbers, edges, z, new, means, present, other, before, found, log_k):
    """Eq. 11 of TIDE, of rows from `start` to `stop`: `class_pull`, `cosine_to_means` and `assign` in one pass.

    `numbers` are u in the counts and in the means, a*, the weight of votes, s, alpha, and what an assignment moves by.
    `means` are the classes with labels, (H,), their columns, how many labels they have, and their `loops.products`.
    `present` (L,) are the classes of the columns, `other` (2, N) the sums of q = exp(logit) and of q log q over the
    others; `before` are the labels so far, `found` the new ones, gamma and the logs of the sums. Returns
    sum_i z_i (L,) and the numbers of labels (K,), the sum of the zero-shot probabilities of the labels, how many labels
    changed, and how many z_ik moved.
    """
    labels, gamma, log_sum = found
    left_out, without, smoothing, vote_weight, sharpness, alpha, still = numbers
    some, columns, hard, weight, near, soft, along, dots, squares = means
    k, width = z.shape[1], some.shape[0]
    votes, a, q = padded(k, ZERO), padded(k, LOWEST - BIAS), padded(k, ZERO)
    more, beta, total = padded(width, ZERO), padded(width, ZERO), np.zeros(k, np.float32)
    numbers_of = np.zeros(y.shape[1], np.float32)
    right, changed, moved = 0.0, 0, 0.0
    for h in range(width):
        beta[h] = hard[h] / (hard[h] + alpha)
    for i in range(start, stop):
        row, p, old, far = base[i], new[i], z[i], ZERO
        gather(i, edges, z, votes[:k])
        for c in range(k):
            a[c] = row[c] + vote_weight * votes[c] + log(max(counts[c] - left_out * old[c], ZERO) + smoothing)
        if width:
            h = np.searchsorted(some, before[i])
            less = max(hard[h] - without, ZERO)
            others, beta[h] = beta[h], less / (less + alpha)
            add_nearer(beta, without, weight[i], dots[i], near[i], squares, along, soft, more, columns, sharpness, a)
            beta[h] = others
        column, by, log_sum[i], entropy = softmax(a, k, q, other[0, i], other[1, i])
        for c in range(k):
            p[c] = q[c] * by
            far += ONE if abs(p[c] - old[c]) >= still else ZERO
            total[c] += p[c]
        label = present[column]
        labels[i], gamma[i] = label, weight_of(entropy, log_k)
        numbers_of[label] += ONE
        right += y[i, label]
        changed += label != before[i]
        moved += far
    return total, numbers_of, right, changed, moved


@inlined
def add_nearer(beta, left_out, own, dots, cosine, squares, along, soft, more, among, sharpness, a):
    """Eqs. 8 and 9 of TIDE: add the sharpness times a sample's cosines to class means, less those to the anchors.

    Its own part, the share `left_out` of `own` (H,), is not in the means. `a` are logits, `among` (H,) their columns.
    """
    for h in range(own.shape[0]):
        mine, dot, t = left_out * own[h], dots[h], cosine[h]
        other, by = ONE - beta[h], beta[h] / max(soft[h] - mine, np.float32(1e-9))
        square = by * (squares[h] + mine * (mine - np.float32(2) * dot))
        length = by * (square + np.float32(2) * other * (along[h] - mine * t)) + other * other
        more[h] = (by * (dot - mine) + other * t) / np.sqrt(max(length, np.float32(EPS))) - t
    for h in range(own.shape[0]):
        a[among[h]] += sharpness * more[h]


@loops
def tide_idle(start, stop, present, idle, arrays, kept, shares, logs):
    """Split z, logits and cosines into those of the `present` classes, `kept` (3, N, L), and of the `idle` ones.

    Of each row, logits are then less the largest of an idle class; `shares` are exp of theirs, `logs` that times them.
    """
    z, base, at_anchor = arrays
    for i in range(start, stop):
        row, e, x = base[i], shares[i], logs[i]
        for r in range(idle.shape[0]):
            x[r] = row[idle[r]]
        top = largest(x)
        for r in range(idle.shape[0]):
            x[r] -= top
            e[r] = exp(x[r])
            x[r] *= e[r]
        for l in range(present.shape[0]):
            k = present[l]
            kept[0, i, l], kept[1, i, l], kept[2, i, l] = z[i, k], row[k] - top, at_anchor[i, k]


@loops
def tide_logs(start, stop, z, labels, present, idle, shares, pull, by, out):
    """`log_ratios` of TIDE, of rows from `start` to `stop`; `idle` classes have z_ik = shares pull by."""
    for i in range(start, stop):
        row = out[i]
        for l in range(present.shape[0]):
            row[present[l]] = z[i, l]
        for r in range(idle.shape[0]):
            row[idle[r]] = shares[i, r] * pull[r] * by[i]
        shift = log(row[labels[i]] + LEAST)
        for c in range(row.shape[0]):
            row[c] = log(row[c] + LEAST) - shift


@loops
def tide_confidence(start, stop, log_z, power, z):
    """Eq. 14 of TIDE: the sums of `confidences` over rows from `start` to `stop`; z^T, unless `z` has no columns."""
    confidence, slope, width = 0.0, 0.0, z.shape[1]
    for i in range(start, stop):
        row, p, total, inner = log_z[i], z[i], ZERO, ZERO
        for c in range(row.shape[0]):
            e = exp(power * row[c])
            total += e
            inner += e * row[c]
        confidence += ONE / total
        slope -= power * inner / (total * total)
        for c in range(width):
            p[c] = exp(power * row[c]) / total
    return confidence, slope
