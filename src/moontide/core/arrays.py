"""Arrays of numpy or torch behind one set of functions (the array API standard), and the checks on what users pass in.

Computation runs in float32, or in float64 where the user's features are float64; float16 and bfloat16 are widened.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace, device, is_torch_array

from moontide.errors import InputError

Array: TypeAlias = Any  # a numpy.ndarray or a torch.Tensor

__all__ = [
    "Array",
    "as_matrix",
    "class_counts",
    "device",
    "is_torch_array",
    "like",
    "namespace",
    "to_numpy",
    "unit_rows",
]

_SHOWN = 8  # row numbers named in an error


def namespace(*arrays: Array) -> ModuleType:
    """Return the array API namespace of the arrays (numpy's or torch's).

    >>> namespace(np.zeros(2)).__name__
    'array_api_compat.numpy'
    """
    xp: ModuleType = array_namespace(*arrays)
    return xp


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Copy an array to the host as numpy; numpy arrays are returned as they are.

    >>> to_numpy(np.ones(2)).shape
    (2,)
    """
    if is_torch_array(x):
        return x.detach().cpu().numpy()  # type: ignore[no-any-return]
    return np.asarray(x)


def like(x: Any, ref: Array) -> Array:
    """Bring `x` into the namespace, device and floating dtype of `ref`.

    >>> like([1, 2], np.zeros(1, dtype=np.float32)).dtype
    dtype('float32')
    """
    xp = namespace(ref)
    if is_torch_array(x) and not is_torch_array(ref):
        x = to_numpy(x)
    return xp.asarray(x, dtype=ref.dtype, device=device(ref))


def _rows(bad: Array) -> str:
    """Name the first true entries of a mask: 'rows 3, 8 and 12 more'."""
    rows = np.flatnonzero(to_numpy(bad))
    shown = ", ".join(str(r) for r in rows[:_SHOWN])
    more = f" and {rows.size - _SHOWN} more" if rows.size > _SHOWN else ""
    return f"row{'s' if rows.size > 1 else ''} {shown}{more}"


def as_matrix(x: Any, name: str, ndim: int = 2) -> Array:
    """Check that `x` is a non-empty finite array of real numbers with `ndim` axes; widen half precision to float32.

    >>> as_matrix(np.ones((2, 3), dtype=np.float16), "image_features").dtype
    dtype('float32')
    """
    if is_torch_array(x):
        x = x.detach()
    else:
        try:
            x = np.asarray(x)
        except ValueError:
            raise InputError(
                f"'{name}' must be a rectangular array of numbers; its rows have different lengths."
            ) from None
    xp = namespace(x)
    if x.ndim != ndim:
        raise InputError(f"'{name}' must be a {ndim}-D array. Got {x.ndim}-D with shape {tuple(x.shape)} instead.")
    if 0 in x.shape:
        raise InputError(f"'{name}' must not be empty. Got shape {tuple(x.shape)}.")
    if not (xp.isdtype(x.dtype, "real floating") or xp.isdtype(x.dtype, "integral")):
        raise InputError(
            f"'{name}' must hold real numbers. Got dtype {x.dtype} instead; convert it with .astype('float32')."
        )
    if x.dtype != xp.float64:
        x = xp.astype(x, xp.float32)
    # A sum is finite if and only if nothing in the row is NaN or infinite (or overflows, which no embedding does).
    bad = ~xp.isfinite(xp.sum(x, axis=tuple(range(1, ndim))))
    if bool(xp.any(bad)):
        raise InputError(
            f"'{name}' must be finite. {_rows(bad).capitalize()} hold NaN or infinity; remove or recompute them."
        )
    return x


def unit_rows(x: Array, name: str | None = None) -> Array:
    """Scale the last axis to length 1, whatever it was; where `name` is given, a zero row is an error that says which.

    >>> unit_rows(np.asarray([[3.0, 4.0]]))
    array([[0.6, 0.8]])
    """
    xp = namespace(x)
    with np.errstate(over="ignore"):
        square = xp.vecdot(x, x)[..., None]
    if not bool(xp.all((square > 1e-24) & (square < 1e24))):  # near the limits of float32: scale by the largest first
        largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
        zero = largest == 0
        if name is not None and bool(xp.any(zero)):
            bad = xp.any(xp.reshape(zero, (x.shape[0], -1)), axis=-1)
            raise InputError(
                f"'{name}' must not have all-zero rows, which have no direction. "
                f"Got zeros in {_rows(bad)}; remove them."
            )
        x = x / xp.where(zero, xp.ones_like(largest), largest)
        square = xp.clip(xp.vecdot(x, x)[..., None], min=1)  # 1 or more, but for zero rows
    return x / xp.sqrt(square)


def class_counts(labels: Array, k: int, weights: Array | None = None) -> Array:
    """Sum the weights (1 each if none) of the samples of each class: c_k = sum_i w_i 1[labels_i = k].

    >>> class_counts(np.asarray([2, 0, 2]), 3)
    array([1, 0, 2])
    """
    if is_torch_array(labels):  # index_add, since bincount waits for the device
        weights = labels.new_ones(labels.shape) if weights is None else weights
        return weights.new_zeros(k).index_add_(0, labels, weights)
    return np.bincount(labels, weights, minlength=k)
