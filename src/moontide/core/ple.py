"""The equations of the MOON paper, one function each; named in docs/maths.md and used by MOON and its relatives.

Shapes: z, zero_shot y and votes are (N, K), features f (N, d), text (K, d); alpha, beta, kappa, r are (K,); gamma (N,).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from moontide.core.arrays import Array, class_counts, namespace
from moontide.core.bessel import banerjee, inverse_bessel_ratio
from moontide.core.graph import Graph
from moontide.core.simplex import entropy
from moontide.core.vmf import log_normaliser, log_normaliser_asymptotic

EPS = 1e-12  # the released solver's guard in entropies, lambda, beta and norms


def sample_weights(p: Array) -> Array:
    """Eq. pl, instance-level adjustment: gamma_i = 1 - H(p_i) / log K.

    >>> import numpy as np
    >>> sample_weights(np.asarray([[1.0, 0.0], [0.5, 0.5]])).round(6)
    array([1., 0.])
    """
    xp = namespace(p)
    return xp.clip(1 - entropy(p, EPS) / (math.log(p.shape[1]) + EPS), min=0, max=1)  # (N,)


def class_confidence(y: Array, mean: str = "geometric", normalise: bool = True) -> Array:
    """Eq. as-lambda: lambda_k = sqrt(mean_i y_ik x max_i y_ik), or another mean of the two; `normalise`: / max_k.

    >>> import numpy as np
    >>> class_confidence(np.asarray([[0.5, 0.5], [1.0, 0.0]])).round(3)
    array([1.   , 0.408])
    """
    xp = namespace(y)
    average, largest = xp.mean(y, axis=0), xp.max(y, axis=0)  # (K,), (K,)
    confidence = {
        "geometric": lambda: xp.sqrt(average * largest),
        "arithmetic": lambda: (average + largest) / 2,
        "harmonic": lambda: 2 * average * largest / (average + largest + EPS),
        "average": lambda: average,
        "max": lambda: largest,
    }[mean]()
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
    xp = namespace(y)
    return 1 - xp.sum(y * (1 - cosine), axis=0) / _count(xp.sum(y, axis=0), epsilon)  # (K,)


def concentration(r: Array, d: int, inverse: str, r_cap: float) -> Array:
    """Eq. banerjee: kappa from the mean resultant length r = A_d(kappa), r held in [0, r_cap].

    >>> import numpy as np
    >>> concentration(np.asarray([0.0, 1.0]), 512, "banerjee", 0.999).round()
    array([     0., 255373.])
    """
    xp = namespace(r)
    r = xp.clip(r, min=0, max=min(r_cap, 1 - float(xp.finfo(r.dtype).eps)))
    return banerjee(d, r) if inverse == "banerjee" else inverse_bessel_ratio(d, r)  # (K,)


def log_c(d: int, kappa: Array, form: str) -> Array:
    """App. vMF: log C_d(kappa), accurate or in the paper's simplified large-kappa form.

    >>> import numpy as np
    >>> log_c(3, np.asarray([1.0]), "asymptotic")
    array([-1.])
    """
    return log_normaliser(d, kappa) if form == "accurate" else log_normaliser_asymptotic(d, kappa)


def assign(
    log_prior: Array, dots: Array, kappa: Array, log_norm: Array, votes: Array, temper: float
) -> tuple[Array, Array]:
    """Eq. update-z, the E-step: z ∝ prior x exp((kappa_k mu_k.f_i + log C_d(kappa_k)) / temper + votes).

    Also returns the logarithm of the sum that z was divided by, (N,).


    >>> import numpy as np
    >>> z, _ = assign(np.zeros((1, 2)), np.ones((1, 2)), np.ones(2), np.zeros(2), np.zeros((1, 2)), 1.0)
    >>> z
    array([[0.5, 0.5]])
    """
    xp = namespace(dots)
    z = dots * (kappa / temper)  # (N, K)
    z += log_norm / temper
    z += log_prior
    z += votes
    top = xp.max(z, axis=1, keepdims=True)  # (N, 1)
    z -= top
    z = xp.exp(z)
    total = xp.sum(z, axis=1, keepdims=True)  # (N, 1)
    z /= total
    return z, (top + xp.log(total))[:, 0]


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


def empirical_means(z: Array, gamma: Array, f: Array, epsilon: float) -> Array:
    """Alg. 1: v_k = sum_i gamma_i z_ik f_i / sum_i gamma_i z_ik.

    >>> import numpy as np
    >>> empirical_means(np.ones((2, 1)), np.ones(2), np.eye(2), 0.0)
    array([[0.5, 0.5]])
    """
    weighted = z * gamma[:, None]  # (N, K)
    return (weighted.T @ f) / _count(namespace(z).sum(weighted, axis=0), epsilon)[:, None]  # (K, d)


def shrink(v: Array, beta: Array, anchor: Array) -> Array:
    """Eq. expfam-shrinkage, the M-step in mean-parameter space: R_k = beta_k v_k + (1 - beta_k) anchor_k.

    >>> import numpy as np
    >>> shrink(np.asarray([[1.0, 0.0]]), np.asarray([0.25]), np.asarray([[0.0, 1.0]]))
    array([[0.25, 0.75]])
    """
    return beta[:, None] * v + (1 - beta)[:, None] * anchor  # (K, d)


def anchor_kl(text: Array, anchor_kappa: Array, anchor_r: Array, mu: Array, kappa: Array, d: int, form: str) -> Array:
    """App. KL: KL(V'_k || V_k) = log C_d(kappa') - log C_d(kappa) + A_d(kappa') (kappa' - kappa mu_k . mu'_k).

    >>> import numpy as np
    >>> anchor_kl(np.eye(3)[:1], np.ones(1), np.ones(1), np.eye(3)[:1], np.ones(1), 3, "accurate")
    array([0.])
    """
    aligned = namespace(mu).sum(mu * text, axis=1)  # (K,)
    return log_c(d, anchor_kappa, form) - log_c(d, kappa, form) + anchor_r * (anchor_kappa - kappa * aligned)


def objective(
    z: Array, gamma: Array, heard: Array, votes: Array, log_sum: Array, alpha: Array, kl: Array, temper: float
) -> float:
    """Eq. ple-ours after an E-step that heard the votes `heard` and gave `log_sum`; `votes` are those of the new z.

    With a = log prior + log p / temper + heard and z = softmax(a), the terms KL(z || y) - z . log p collapse to
    z . heard - log_sum, so that no further N x K x d work is needed.

    >>> import numpy as np
    >>> one = np.ones((1, 1))
    >>> objective(one, np.ones(1), 0 * one, 0 * one, np.ones(1), np.ones(1), np.zeros(1), 1.0)
    -1.0
    """
    xp = namespace(z)
    per_sample = xp.sum(z * (heard - votes / 2), axis=1) - log_sum  # (N,)
    return float(xp.sum(gamma * per_sample) + xp.sum(alpha * kl) / temper)


def neighbour_votes(graph: Graph, symmetric: bool, mean: bool, weight: float) -> Callable[[Array], Array]:
    """Eq. ple-ours, Laplacian: the map z -> weight x (W z), or (W + W') z, divided by the number of votes where `mean`.

    >>> import numpy as np
    >>> neighbour_votes(Graph(np.asarray([[1], [0]]), np.ones((2, 1))), True, True, 1.0)(np.eye(2))
    array([[0., 1.],
           [1., 0.]])
    """
    share = weight / (max(graph.m, 1) * (1 + symmetric)) if mean else weight
    return Graph(graph.neighbours, graph.weights * share).operator(symmetric)


def _count(total: Array, epsilon: float) -> Array:
    """Return a soft count fit to divide by: `epsilon` is the released guard, the smallest number guards 0 / 0."""
    xp = namespace(total)
    return xp.clip(total + epsilon, min=float(xp.finfo(total.dtype).smallest_normal))
