"""The equations of the MOON paper, one function each; named in docs/maths.md and used by MOON and its relatives.

Shapes: z, zero_shot y and votes are (N, K), features f (N, d), text (K, d); alpha, beta, kappa, r are (K,); gamma (N,).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from moontide.core import kernels
from moontide.core.arrays import (
    Array,
    class_counts,
    clip,
    column_dots,
    columns,
    device,
    namespace,
    put_columns,
    row_dots,
    row_sums,
)
from moontide.core.bessel import banerjee, inverse_bessel_ratio
from moontide.core.compiled import loops_for
from moontide.core.graph import Affinity, Graph
from moontide.core.simplex import entropy, softmax_evidence_
from moontide.core.threads import in_threads, row_blocks
from moontide.core.vmf import log_normaliser, log_normaliser_asymptotic

NO_COLUMNS = slice(0, 0)
EPS = 1e-12  # the released solver's guard in entropies, lambda, beta and norms


def sample_weights(p: Array) -> Array:
    """Eq. pl, instance-level adjustment: gamma_i = 1 - H(p_i) / log K.

    >>> import numpy as np
    >>> sample_weights(np.asarray([[1.0, 0.0], [0.5, 0.5]])).round(6)
    array([1., 0.])
    """
    return entropy_weights(entropy(p, EPS), p.shape[1])


def entropy_weights(h: Array, k: int) -> Array:
    """Eq. pl where the entropies h of the K probabilities of each sample are known already.

    >>> import numpy as np
    >>> entropy_weights(np.log(np.asarray([1.0, 2.0])), 4)
    array([1. , 0.5])
    """
    return clip(1 - h / log_classes(k), 0, 1)  # (N,)


def log_classes(k: int) -> float:
    """Return log K fit to divide by, also for one class.

    >>> log_classes(1)
    1e-12
    """
    return math.log(k) + EPS


def class_confidence(y: Array, mean: str = "geometric", normalise: bool = True) -> Array:
    """Eq. as-lambda: lambda_k = sqrt(mean_i y_ik x max_i y_ik), or another mean of the two; `normalise`: / max_k.

    >>> import numpy as np
    >>> class_confidence(np.asarray([[0.5, 0.5], [1.0, 0.0]])).round(3)
    array([1.   , 0.408])
    """
    xp = namespace(y)
    return join_confidence(xp.mean(y, axis=0), xp.max(y, axis=0), mean, normalise)


def join_confidence(average: Array, largest: Array, mean: str, normalise: bool) -> Array:
    """Eq. as-lambda from the mean and the maximum of y_ik over the samples, (K,) each.

    >>> import numpy as np
    >>> join_confidence(np.asarray([0.25]), np.asarray([1.0]), "geometric", False)
    array([0.5])
    """
    xp = namespace(average)
    if mean == "geometric":
        confidence = xp.sqrt(average * largest)
    elif mean == "arithmetic":
        confidence = (average + largest) / 2
    elif mean == "harmonic":
        confidence = 2 * average * largest / (average + largest + EPS)
    else:
        confidence = average if mean == "average" else largest
    return confidence / xp.max(confidence) if normalise else confidence


def anchor_weights(confidence: Array, form: str = "1/lambda") -> Array:
    """Eq. as-alpha, class-level adjustment: alpha_k = 1 / lambda_k, or the forms it was compared with.

    >>> import numpy as np
    >>> anchor_weights(np.asarray([1.0, 0.5]))
    array([1., 2.])
    """
    xp = namespace(confidence)
    if form == "1/lambda":
        return 1 / (confidence + EPS)
    return confidence + EPS if form == "lambda" else xp.exp(-confidence)


def initial_resultant(y: Array, cosine: Array, epsilon: float) -> Array:
    """Eq. init: A_d(kappa'_k) = 1 - sum_i y_ik |f_i - t_k|^2 / (2 sum_i y_ik), with |f - t|^2 / 2 = 1 - cosine.

    >>> import numpy as np
    >>> initial_resultant(np.ones((2, 1)), np.asarray([[0.2], [0.4]]), 0.0).round(6)
    array([0.3])
    """
    return resultant_of(namespace(y).sum(y, axis=0), column_dots(y, cosine), epsilon)


def resultant_of(total: Array, along: Array, epsilon: float) -> Array:
    """Eq. init from sum_i y_ik and sum_i y_ik cosine_ik, (K,) each.

    >>> import numpy as np
    >>> resultant_of(np.asarray([2.0]), np.asarray([0.6]), 0.0).round(6)
    array([0.3])
    """
    return 1 - (total - along) / soft_count(total, epsilon)  # (K,)


class Moments(NamedTuple):
    """What Eq. init and Eq. as-lambda need of zero-shot predictions, (K,) each."""

    total: Array  # sum_i y_ik
    largest: Array  # max_i y_ik
    along: Array  # sum_i y_ik cosine_ik


def zero_shot_moments(cosine: Array, scale: float, out: Array | None = None) -> tuple[Array, Array, Moments]:
    """Eq. zero-shot: y = softmax(scale cosine), (N, K), written to `out`, the logs of its sums, (N,), and its moments.

    >>> import numpy as np
    >>> zero_shot_moments(np.asarray([[0.5, 0.5]]), 100.0)[0]
    array([[0.5, 0.5]])
    """
    xp = namespace(cosine)
    if loops := loops_for(cosine):
        y = np.empty_like(cosine) if out is None else out
        log_evidence, *moments = loops.zero_shot(cosine, np.float32(scale), y)
        return y, log_evidence, Moments(*moments)
    y, log_evidence = softmax_evidence_(xp.multiply(cosine, scale, out=out))
    return y, log_evidence, Moments(xp.sum(y, axis=0), xp.max(y, axis=0), column_dots(y, cosine))


def concentration(r: Array, d: int, inverse: str, r_cap: float) -> Array:
    """Eq. banerjee: kappa from the mean resultant length r = A_d(kappa), r held in [0, r_cap].

    >>> import numpy as np
    >>> concentration(np.asarray([0.0, 1.0]), 512, "banerjee", 0.999).round()
    array([     0., 255373.])
    """
    xp = namespace(r)
    r = clip(r, 0, min(r_cap, 1 - float(xp.finfo(r.dtype).eps)))
    return banerjee(d, r) if inverse == "banerjee" else inverse_bessel_ratio(d, r)  # (K,)


def log_c(d: int, kappa: Array, form: str) -> Array:
    """App. vMF: log C_d(kappa), accurate or in the paper's simplified large-kappa form.

    >>> import numpy as np
    >>> log_c(3, np.asarray([1.0]), "asymptotic")
    array([-1.])
    """
    return log_normaliser(d, kappa) if form == "accurate" else log_normaliser_asymptotic(d, kappa)


def prototypes(text: Array, mu: Array, kappa: Array, scale: float, temper: float) -> Array:
    """Fold zero-shot logits and tempered vMF likelihood into one vector a class: scale t_k + (kappa_k / temper) mu_k.

    Its product with f_i, plus log C_d(kappa_k) / temper, is text_weight log y_ik + log p_ik / temper of Eq. update-z,
    up to a constant of the row, which the softmax removes.

    >>> import numpy as np
    >>> prototypes(np.eye(2)[:1], np.eye(2)[1:], np.asarray([500.0]), 100.0, 50.0)
    array([[100.,  10.]])
    """
    return scale * text + (kappa / temper)[:, None] * mu  # (L, d)


class AnchorLogits(NamedTuple):
    """Those logits for classes at their anchor, where mu_k = t_k and the product is the cosine: made when asked for.

    >>> import numpy as np
    >>> AnchorLogits(np.ones((1, 1)), np.full(1, 100.0), np.ones(1))[:]
    array([[101.]])
    """

    cosine: Array  # (N, K)
    slope: Array  # (K,) scale + kappa_k / temper
    offset: Array  # (K,) log C_d(kappa_k) / temper

    def __getitem__(self, rows: Any) -> Array:
        """Return the logits of some rows as a new array, (b, K)."""
        logits = self.cosine[rows, :] * self.slope
        logits += self.offset
        return logits


def at_anchor(cosine: Array, kappa: Array, d: int, form: str, scale: float, temper: float) -> AnchorLogits:
    """Return the logits of classes at their anchor, to be made block by block.

    >>> import numpy as np
    >>> at_anchor(np.ones((1, 1)), np.ones(1), 3, "asymptotic", 100.0, 1.0).slope
    array([101.])
    """
    return AnchorLogits(cosine, scale + kappa / temper, log_c(d, kappa, form) / temper)


class Assignment(NamedTuple):
    """What an E-step gives of each sample."""

    z: Array  # (N, K)
    labels: Array  # (N,) argmax of z
    log_sum: Array  # (N,) log of the sum that z was divided by
    gamma: Array  # (N,) entropy weight of z_i
    heard: Array  # (N,) z_i . votes_i
    echo: Array  # (N,) z_i . votes_i of the z that went in, whose votes these are
    counts: Array  # (K,) how many samples have each label


def e_step(
    logits: Array | AnchorLogits,
    z: Array,
    votes_of: Affinity,
    live: Array | slice = NO_COLUMNS,
    values: Array | None = None,
    out: Array | None = None,
) -> Assignment:
    """Eq. update-z: z_i = softmax(logits_i + votes_i), the votes those of the previous z.

    Where `values` (N, L) are given, they stand for the columns `live` of the logits. On a CPU, z is written to `out`.

    >>> import numpy as np
    >>> alone = Graph(np.zeros((1, 0), int), np.zeros((1, 0))).operator(symmetric=True)
    >>> e_step(np.zeros((1, 2)), np.ones((1, 2)), alone).z
    array([[0.5, 0.5]])
    """
    xp = namespace(z)
    if fused(z):
        whole = logits[:] if values is None else values  # (N, K)
        if values is not None and not isinstance(live, slice):
            whole = put_columns(logits[:], live, values)
        return Assignment(*kernels.e_step(whole, z, (votes_of.pointer, votes_of.neighbour, votes_of.weight)))
    new = xp.empty_like(z) if out is None else out  # (N, K)
    if loops := loops_for(z):
        return _e_step_in_loops(loops, logits, z, votes_of, live, values, new)

    def block(part: tuple[slice, Any]) -> tuple[Array, ...]:
        rows, matrix = part
        votes = matrix @ z  # (b, K)
        a = logits[rows] + votes  # (b, K)
        if values is not None:
            a[:, live] = values[rows, :] + columns(votes, live)
        return softmax_rows(a, votes, z[rows, :], new[rows, :])[1:]

    parts = in_threads(block, votes_of.blocks(z.shape[1]))
    labels, log_sum, h, heard, echoed = (xp.concat(column) for column in zip(*parts, strict=True))
    counts = xp.astype(class_counts(labels, z.shape[1]), z.dtype)  # (K,)
    return Assignment(new, labels, log_sum, entropy_weights(h, z.shape[1]), heard, echoed, counts)


def _e_step_in_loops(
    loops: Any, logits: Any, z: Any, votes_of: Affinity, live: Any, values: Any, new: Any
) -> Assignment:
    n, k = z.shape
    if not isinstance(logits, AnchorLogits):
        logits = AnchorLogits(logits, np.ones_like(z, shape=k), np.zeros_like(z, shape=k))
    if values is None:
        live, values = np.zeros(0, np.int64), z[:, :0]
    elif isinstance(live, slice):
        live = np.arange(k)[live]
    labels, (log_sum, gamma, heard, echoed) = np.empty(n, np.int64), np.empty((4, n), z.dtype)
    edges = votes_of.pointer, votes_of.neighbour, votes_of.weight
    rows = (labels, log_sum, gamma, heard, echoed, log_classes(k))

    def block(part: slice) -> None:
        loops.e_step(part.start, part.stop, *logits, live, values, *edges, z, new, *rows)

    in_threads(block, row_blocks(n, n * k))
    counts = np.bincount(labels, minlength=k).astype(z.dtype)  # (K,)
    return Assignment(new, labels, log_sum, gamma, heard, echoed, counts)


def softmax_rows(
    a: Array, votes: Array, z: Array, out: Array | None = None
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return softmax(a) of some rows, labels, log of the sums, entropies, and new and old z . votes; overwrites `a`.

    `out`: where to write the softmax.

    >>> import numpy as np
    >>> softmax_rows(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((1, 2)))[0]
    array([[0.5, 0.5]])
    """
    xp = namespace(a)
    labels = xp.argmax(a, axis=1)  # (b,)
    top = a[xp.arange(a.shape[0], device=device(a)), labels]  # (b,)
    a -= top[:, None]
    p = xp.exp(a, out=out)  # (b, K)
    total = row_sums(p)  # (b,)
    p /= total[:, None]
    log_total = xp.log(total)  # (b,)
    entropy = log_total - row_dots(p, a)  # (b,)
    return p, labels, top + log_total, entropy, row_dots(p, votes), row_dots(z, votes)


def echo(z: Array, votes_of: Affinity) -> Array:
    """Return z_i . (M z)_i, the Laplacian term of each sample, (N,).

    >>> import numpy as np
    >>> echo(np.eye(2), Graph(np.asarray([[1], [0]]), np.ones((2, 1))).operator(symmetric=False))
    array([0., 0.])
    """
    if fused(z):
        return kernels.e_step(z, z, (votes_of.pointer, votes_of.neighbour, votes_of.weight))[5]
    if loops := loops_for(z):
        return loops.echo(votes_of.pointer, votes_of.neighbour, votes_of.weight, z)
    return row_dots(z, votes_of(z))


def fused(x: Array) -> bool:
    """Tell whether the fused GPU kernel can take the rows of `x`, (N, K).

    >>> import numpy as np
    >>> fused(np.zeros((1, 1)))
    False
    """
    return x.dtype != namespace(x).float64 and x.shape[1] <= kernels.MAX_CLASSES and kernels.usable(x)


def shrinkage(z: Array, gamma: Array, labels: Array, alpha: Array, beta: str, gamma_in_counts: bool) -> Array:
    """Eq. update-m-real: beta_k = n_k / (n_k + alpha_k), n_k = sum_i gamma_i z_ik, or counts of labels (app. A).

    >>> import numpy as np
    >>> shrinkage(np.eye(2), np.ones(2), np.asarray([0, 0]), np.ones(2), "hard", False).round(3)
    array([0.667, 0.   ])
    """
    xp = namespace(z)
    if beta == "soft":
        counts = gamma @ z  # (K,)
    else:
        counts = xp.astype(class_counts(labels, z.shape[1], gamma if gamma_in_counts else None), z.dtype)  # (K,)
    return counts / (counts + alpha + EPS)


def weighted_sums(z: Array, gamma: Array, f: Array) -> tuple[Array, Array]:
    """Return the sufficient statistics sum_i gamma_i z_ik f_i, (K, d), and sum_i gamma_i z_ik, (K,).

    >>> import numpy as np
    >>> weighted_sums(np.ones((2, 1)), np.ones(2), np.eye(2))
    (array([[1., 1.]]), array([2.]))
    """
    if z.dtype != gamma.dtype:  # half precision on a GPU
        gamma = gamma.to(z.dtype)
        return kernels.half_product(z.T, f * gamma[:, None]), kernels.half_product(z.T, gamma[:, None])[:, 0]
    if z.shape[1] < f.shape[1]:
        return (z * gamma[:, None]).T @ f, gamma @ z
    return z.T @ (f * gamma[:, None]), gamma @ z


def empirical_means(z: Array, gamma: Array, f: Array, epsilon: float) -> Array:
    """Alg. 1: v_k = sum_i gamma_i z_ik f_i / sum_i gamma_i z_ik.

    >>> import numpy as np
    >>> empirical_means(np.ones((2, 1)), np.ones(2), np.eye(2), 0.0)
    array([[0.5, 0.5]])
    """
    return means(*weighted_sums(z, gamma, f), epsilon)


def means(sums: Array, counts: Array, epsilon: float) -> Array:
    """Divide sufficient statistics: v_k = sums_k / counts_k, `epsilon` the released guard.

    >>> import numpy as np
    >>> means(np.ones((1, 2)), np.asarray([2.0]), 0.0)
    array([[0.5, 0.5]])
    """
    return sums / soft_count(counts, epsilon)[:, None]


def shrink(v: Array, beta: Array, anchor: Array) -> Array:
    """Eq. expfam-shrinkage, the M-step in mean-parameter space: R_k = beta_k v_k + (1 - beta_k) anchor_k.

    >>> import numpy as np
    >>> shrink(np.asarray([[1.0, 0.0]]), np.asarray([0.25]), np.asarray([[0.0, 1.0]]))
    array([[0.25, 0.75]])
    """
    return beta[:, None] * v + (1 - beta)[:, None] * anchor  # (K, d)


def anchor_kl(aligned: Array, anchor_kappa: Array, anchor_r: Array, kappa: Array, d: int, form: str) -> Array:
    """App. KL: KL(V'_k || V_k) = log C_d(kappa') - log C_d(kappa) + A_d(kappa') (kappa' - kappa mu_k . mu'_k).

    `aligned` is mu_k . mu'_k.

    >>> import numpy as np
    >>> one = np.ones(1)
    >>> anchor_kl(one, one, one, one, 3, "accurate")
    array([0.])
    """
    return log_c(d, anchor_kappa, form) - log_c(d, kappa, form) + anchor_r * (anchor_kappa - kappa * aligned)


def objective(gamma: Array, heard: Array, log_sum: Array, log_evidence: Array, echo: Array, alpha: Array, kl: Array,
              temper: float) -> Array:  # fmt: skip
    """Eq. ple-ours after an E-step: gamma_i (KL(z_i || y_i) - z_i . log p_i) - echo_i / 2, and the anchors' KL.

    With z = softmax(a), sum_k z_k (log z_k - a_k) = -log_sum, so that a sample's first terms are heard - log_sum, and
    `log_evidence` is the row constant left out of a. `echo` is the Laplacian term gamma_i z_i . (M z)_i of the new z.
    No N x K x d work is needed, and leading axes (iterations) are kept: (..., N) and (..., K) give (...).

    >>> import numpy as np
    >>> one, zero = np.ones(1), np.zeros(1)
    >>> float(objective(one, zero, one, zero, zero, one, zero, 1.0))
    -1.0
    """
    xp = namespace(gamma)
    per_sample = gamma * (heard - log_sum + log_evidence) - echo / 2  # (..., N)
    return xp.sum(per_sample, axis=-1) + xp.sum(alpha * kl, axis=-1) / temper


def neighbour_votes(graph: Graph, symmetric: bool, mean: bool, weight: float) -> Affinity:
    """Eq. ple-ours, Laplacian: the map z -> weight x (W z), or (W + W') z, divided by the number of votes where `mean`.

    >>> import numpy as np
    >>> neighbour_votes(Graph(np.asarray([[1], [0]]), np.ones((2, 1))), True, True, 1.0)(np.eye(2))
    array([[0., 1.],
           [1., 0.]])
    """
    share = weight / (max(graph.m, 1) * (1 + symmetric)) if mean else weight
    return Graph(graph.neighbours, graph.weights * share).operator(symmetric)


def soft_count(total: Array, epsilon: float) -> Array:
    """Return a soft count fit to divide by: `epsilon` is the released guard, the smallest number guards 0 / 0.

    >>> import numpy as np
    >>> soft_count(np.asarray([2.0]), 0.5)
    array([2.5])
    """
    xp = namespace(total)
    return clip(total + epsilon, float(xp.finfo(total.dtype).smallest_normal))
