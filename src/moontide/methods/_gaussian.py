"""Gaussian mixtures with diagonal covariances: the equations shared by StatA, TransCLIP and MOON's Gaussian variant.

Shapes: features f are (N, d), means mu (K, d), variances (K, d), or (1, d) where all classes share one diagonal.

Squares are expanded into matrix products, so no array is larger than N x K, N x d or K x d. The features are centred
first, so that float32 loses little precision where the terms cancel. No variance is below FLOOR / d.
"""

from __future__ import annotations

from moontide.core.arrays import Array, clip, device, is_torch_array, namespace
from moontide.core.simplex import softmax

# Smallest variance, in units of 1 / d, the mean square of a coordinate of a unit row. Variances of CLIP features are
# 1e-2 to 1e2 of it; 1e-6 of it is near the rounding of half-precision features and carries no information on a class.
FLOOR = 1e-6
CHUNK = 2500  # rows that the published programs take at once
CACHED = 2**16  # entries of the means of some classes, beside which temporary arrays stay in the cache


def log_density(f: Array, mu: Array, variance: Array) -> Array:
    """Log N(f_i; mu_k, variance_k) without its constant: -1/2 sum_j [(f_ij - mu_kj)^2 / s_kj + log s_kj].

    >>> import numpy as np
    >>> log_density(np.asarray([[1.0], [3.0]]), np.asarray([[1.0], [2.0]]), np.asarray([[1.0], [0.5]])).round(3)
    array([[ 0.   , -0.653],
           [-2.   , -0.653]])
    """
    xp = namespace(f)
    centre = xp.mean(f, axis=0)  # (d,)
    f, mu = f - centre, mu - centre
    scaled = mu / variance  # (K, d)
    # (f - mu)^2 / s = f^2 / s - 2 f mu / s + mu^2 / s
    out = f @ scaled.T  # (N, K)
    out -= f**2 @ (0.5 / variance).T  # (N, K) or (N, 1)
    out -= xp.sum(mu * scaled + xp.log(variance), axis=1) / 2  # (K,)
    return out


def class_weights(log_z: Array) -> Array:
    """z_ik / sum_i z_ik as (K, N), from log z: rows sum to 1 even if every z_ik of a class underflows to 0.

    >>> import numpy as np
    >>> class_weights(np.asarray([[0.0, -2000.0], [0.0, -2000.0]]))
    array([[0.5, 0.5],
           [0.5, 0.5]])
    """
    return softmax(log_z.T)


def class_variance(squares: Array, v: Array, mu: Array) -> Array:
    """Eq. stata-shrinkage: T_k = sum_i w_ki (f_i - mu_k)^2 for weights w whose rows sum to 1, (K, d).

    `squares` is w f^2, which is overwritten, and `v` is w f. All have the same origin, close to the features, so that
    little cancels.

    >>> import numpy as np
    >>> w, f = np.asarray([[0.5, 0.5]]), np.asarray([[0.0], [2.0]])
    >>> class_variance(w @ f**2, w @ f, np.asarray([[4.0]]))
    array([[10.]])
    """
    squares -= v**2
    squares *= squares > 0
    between = v - mu
    between *= between
    squares += between
    return squares


def anchored_variance(variance: Array, beta: Array, apart: Array, anchor: Array) -> Array:
    """Eq. stata-shrinkage: Sigma_k = beta_k T_k + (1 - beta_k) (Sigma' + (t_k - mu_k)^2), at least the floor, (K, d).

    `variance` is T_k, `apart` t_k - mu_k. Both are overwritten: such arrays take most of the memory of a small batch.

    >>> import numpy as np
    >>> anchored_variance(np.asarray([[1.0]]), np.asarray([0.5]), np.asarray([[3.0]]), np.asarray([[2.0]]))
    array([[6.]])
    """
    variance *= beta[:, None]
    apart *= apart
    apart += anchor
    apart *= (1 - beta)[:, None]
    variance += apart
    return clip(variance, FLOOR / variance.shape[1])


def cached_classes(means: Array) -> list[slice]:
    """Cut the classes of some means (K, d) into parts whose temporary arrays stay in the cache; torch takes all."""
    k, size = len(means), len(means) if is_torch_array(means) else max(1, CACHED // means.shape[1])
    return [slice(start, start + size) for start in range(0, k, size)]


def weighted_moments(z: Array, f: Array, w: Array) -> tuple[Array, Array, Array]:
    """Return sum_i w_i z_ik f_i, (K, d), sum_i w_i f_i^2, (1, d), and sum_i w_i z_ik, (K,), of weights w (N,)."""
    return z.T @ (w[:, None] * f), (w @ f**2)[None, :], w @ z


def pooled_variance(sums: Array, squares: Array, soft: Array, mu: Array) -> Array:
    """App. "Revisiting StatA": Sigma'_j = sum_ik z_ik (f_ij - mu_kj)^2 / N, at least the floor, (1, d).

    The arguments are the `weighted_moments` with the weights of `row_weights`, and mu, all with the same origin.

    >>> import numpy as np
    >>> f = np.asarray([[0.0], [2.0]])
    >>> pooled_variance(*weighted_moments(np.eye(2), f, row_weights(f, False)), np.asarray([[1.0], [5.0]]))
    array([[5.]])
    """
    variance = squares + soft @ mu**2 - 2 * (mu * sums).sum(0)  # (1, d)
    return clip(variance, FLOOR / mu.shape[1])


def row_weights(f: Array, faithful: bool) -> Array:
    """Return the weight 1 / N of each sample in the pooled variance, (N,).

    The published programs add up chunks of 2500 rows and divide the running sum by N after each chunk. For N > 2500 a
    row is therefore divided by N once for every chunk from its own to the last; `faithful` repeats this.

    >>> import numpy as np
    >>> row_weights(np.zeros((4, 1)), True)
    array([0.25, 0.25, 0.25, 0.25])
    """
    xp = namespace(f)
    n = f.shape[0]
    rows = xp.arange(n, device=device(f))
    divisions = (n - 1) // CHUNK - rows // CHUNK + 1 if faithful else xp.ones_like(rows)  # (N,)
    weights: Array = float(n) ** -xp.astype(divisions, f.dtype)
    return weights
