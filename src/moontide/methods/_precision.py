"""Ridge-regularised inverses of a covariance matrix, shared by the Gaussian methods (GDA-CLIP, ADAPT, OGA).

S = sum_i (x_i - mean)(x_i - mean)' is the scatter of n rows, Cov = S / (n - 1). S + ridge tr(S) I is positive definite
unless all rows are equal; in that case the pseudo-inverse of the published programs is 0. So Cholesky's decomposition
is enough. Rows are unit vectors or differences of them, so the size of a scatter shows whether it consists of rounding
errors only.
"""

from __future__ import annotations

from typing import TypeAlias

from moontide.core.arrays import Array, device, is_torch_array, namespace

Spread: TypeAlias = tuple[Array, ...]  # sums of x x' and of x, and their number


def ridge_precision(x: Array) -> Array:
    """P = d pinv((n - 1) Cov(x) + tr(Cov(x)) I) of n residual rows, (n, d) -> (d, d); I for a single row.

    >>> import numpy as np
    >>> ridge_precision(np.asarray([[0.5, 0.0], [-0.5, 0.0]]))
    array([[2., 0.],
           [0., 4.]])
    """
    return times_precision(_identity(x.shape[1], x), x)


def times_precision(b: Array, x: Array) -> Array:
    """Return b P for rows b, (m, d), and P = `ridge_precision(x)`, without computing P if there are few rows x.

    >>> import numpy as np
    >>> times_precision(np.asarray([[1.0, 1.0]]), np.asarray([[0.5, 0.0], [-0.5, 0.0]]))
    array([[2., 4.]])
    """
    n, d = x.shape
    return b if n == 1 else d * times_ridge_inverse(b, x, 1 / (n - 1))


def moments(x: Array) -> Spread:
    """Return the sums of x x', (d, d), and of x, (d,), over n rows, and n; they can be updated row by row.

    >>> import numpy as np
    >>> moments(np.asarray([[1.0], [2.0]]))
    (array([[5.]]), array([3.]), 2)
    """
    return x.T @ x, namespace(x).sum(x, axis=0), x.shape[0]


def whitened(b: Array, square: Array, total: Array, n: int) -> Array:
    """Return b L^-T, rows whose products are b P b', for P = `ridge_precision` of n rows given by their moments.

    L L' is the inverse of P. P itself is not computed; that would be most of the work.

    >>> import numpy as np
    >>> whitened(np.asarray([[1.0, 1.0]]), np.diag([0.5, 0.0]), np.zeros(2), 2).round(6)
    array([[1.414214, 2.      ]])
    """
    xp, d = namespace(b), square.shape[0]
    if n == 1:
        return b
    scatter = square - total[:, None] * total[None, :] / n
    trace = float(xp.linalg.trace(scatter))
    if _no_spread(trace, n, scatter):
        return xp.zeros_like(b)
    return d**0.5 * over_factor(b, scatter + trace / (n - 1) * _identity(d, scatter))


def times_ridge_inverse(b: Array, x: Array, ridge: float) -> Array:
    """Return b (S + ridge tr(S) I)^-1 for rows b, (m, d), and the scatter S of rows x, (n, d); 0 where x are all equal.

    >>> import numpy as np
    >>> times_ridge_inverse(np.asarray([[1.0, 1.0]]), np.asarray([[1.0, 0.0], [-1.0, 0.0]]), 0.5)
    array([[0.33333333, 1.        ]])
    """
    xp = namespace(x)
    n, d = x.shape
    x = x - xp.mean(x, axis=0)  # (n, d)
    if 2 * n >= d:
        return b @ scatter_inverse(x.T @ x, n, ridge)
    trace = float(xp.sum(x * x))
    if _no_spread(trace, n, x):
        return xp.zeros_like(b)
    r = ridge * trace
    # Woodbury: (X'X + r I)^-1 = (I - X' (X X' + r I)^-1 X) / r, an inverse of n x n
    return (b - (b @ x.T) @ spd_inverse(x @ x.T + r * _identity(n, x)) @ x) / r


def scatter_inverse(scatter: Array, n: int, ridge: float) -> Array:
    """Return (S + ridge tr(S) I)^-1 for a given scatter S of n rows, or 0 where S is 0; (d, d) -> (d, d).

    >>> import numpy as np
    >>> scatter_inverse(np.diag([2.0, 0.0]), 2, 0.5)
    array([[0.33333333, 0.        ],
           [0.        , 1.        ]])
    """
    xp = namespace(scatter)
    trace = float(xp.linalg.trace(scatter))
    if _no_spread(trace, n, scatter):
        return xp.zeros_like(scatter)
    return spd_inverse(scatter + ridge * trace * _identity(scatter.shape[0], scatter))


def spd_inverse(a: Array) -> Array:
    """Invert a symmetric positive definite matrix through its Cholesky factor.

    >>> import numpy as np
    >>> spd_inverse(np.diag([2.0, 4.0]))
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    if is_torch_array(a):
        import torch

        return torch.cholesky_inverse(torch.linalg.cholesky(a))
    from scipy.linalg import get_lapack_funcs  # several times faster than the LU factors of numpy.linalg.inv

    potrf, potri = get_lapack_funcs(("potrf", "potri"), (a,))
    lower = potri(potrf(a, lower=True)[0], lower=True)[0]  # (d, d), zero above the diagonal
    inverse = lower + lower.T
    inverse.flat[:: a.shape[0] + 1] /= 2
    return inverse


def over_factor(b: Array, a: Array) -> Array:
    """Return b L^-T for rows b, (m, d), and the Cholesky factor L of a symmetric positive definite matrix, (d, d).

    >>> import numpy as np
    >>> over_factor(np.asarray([[2.0, 4.0]]), np.diag([4.0, 16.0]))
    array([[1., 1.]])
    """
    if is_torch_array(a):
        import torch

        return torch.linalg.solve_triangular(torch.linalg.cholesky(a), b.T, upper=False).T
    from scipy.linalg import get_lapack_funcs

    potrf, trtrs = get_lapack_funcs(("potrf", "trtrs"), (a,))
    return trtrs(potrf(a, lower=True)[0], b.T, lower=1)[0].T


def _identity(d: int, ref: Array) -> Array:
    return namespace(ref).eye(d, dtype=ref.dtype, device=device(ref))


def _no_spread(trace: float, n: int, ref: Array) -> bool:
    """Return whether the mean squared distance of unit rows to their mean is within rounding of 0."""
    return trace <= 16 * float(namespace(ref).finfo(ref.dtype).eps) * n


def single_in_double(x: Array) -> Array:
    """Return numbers rounded to float32, in float64 and new memory: inputs of programs that magnify rounding.

    >>> import numpy as np
    >>> single_in_double(np.asarray([1 + 1e-12]))
    array([1.])
    """
    xp = namespace(x)
    return xp.astype(xp.astype(x, xp.float32), xp.float64)
