"""Arrays of numpy or torch behind one set of functions (the array API standard), and the checks on what users pass in.

Computation runs in float32, or in float64 where the user's features are float64; float16 and bfloat16 are widened.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device
from array_api_compat import is_torch_array as is_tensor

from moontide.errors import InputError

_namespaces: dict[type, ModuleType] = {}  # asking is not free, and a solve asks a thousand times
Array: TypeAlias = Any  # a numpy.ndarray or a torch.Tensor

_SHOWN = 8  # row numbers named in an error
_FINITE = "'{}' must be finite. Got NaN or infinity in {}; remove or recompute them."
_ZERO = "'{}' must not have all-zero rows, which have no direction. Got zeros in {}; remove them."


def namespace(*arrays: Array) -> ModuleType:
    """Return the array API namespace of the arrays (numpy's or torch's), kept by the type of the first."""
    kind = type(arrays[0])
    if kind not in _namespaces:
        _namespaces[kind] = array_namespace(*arrays)
    return _namespaces[kind]


def is_torch_array(x: Any) -> bool:
    """Tell whether this is a tensor of torch."""
    return type(x) is not np.ndarray and bool(is_tensor(x))


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Copy an array to the host as numpy; numpy arrays are returned as they are."""
    if is_torch_array(x):
        return x.detach().cpu().numpy()  # type: ignore[no-any-return]
    return np.asarray(x)


def like(x: Any, ref: Array) -> Array:
    """Bring `x` into the namespace, device and floating dtype of `ref`."""
    if type(x) is type(ref) and x.dtype == ref.dtype and x.device == ref.device:
        return x
    x = to_numpy(x) if is_torch_array(x) and not is_torch_array(ref) else x
    return namespace(ref).asarray(x, dtype=ref.dtype, device=device(ref))


def as_matrix(x: Any, name: str, ndim: int = 2) -> Array:
    """Check that `x` is a non-empty finite array of real numbers with `ndim` axes; widen half precision to float32."""
    x = as_real(x, name, ndim)
    _refuse(~namespace(x).isfinite(x), name, _FINITE)
    return x


def as_real(x: Any, name: str, ndim: int = 2) -> Array:
    """Check that `x` is a non-empty array of real numbers, whose finiteness `unit_rows` finds on its way."""
    if is_torch_array(x):
        x = x.detach()
    else:
        try:
            x = np.asarray(x)
            if x.dtype == object and x.ndim == 1 and all(np.ndim(row) for row in x):  # as in a column of a data frame
                x = np.stack([np.asarray(row) for row in x])
        except ValueError:
            raise InputError(f"'{name}' must be a rectangular array of numbers; its rows differ in length.") from None
    xp = namespace(x)
    if x.ndim != ndim:
        raise InputError(f"'{name}' must be a {ndim}-D array. Got {x.ndim}-D with shape {tuple(x.shape)} instead.")
    if 0 in x.shape:
        raise InputError(f"'{name}' must not be empty. Got shape {tuple(x.shape)}.")
    if x.dtype in (xp.float32, xp.float64):
        return x
    if not xp.isdtype(x.dtype, ("real floating", "integral")):
        remedy = "convert it with .astype('float32')"
        raise InputError(f"'{name}' must hold real numbers. Got dtype {x.dtype} instead; {remedy}.")
    return xp.astype(x, xp.float32)


def unit_rows(x: Array, name: str | None = None) -> Array:
    """Scale the last axis to length 1; `name`: rows with NaN, infinity or only zeros are named errors."""
    xp = namespace(x)
    if 0 in x.shape:
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        norm = row_norms(x)[..., None]
    low, high = xp.stack(norm.aminmax()).tolist() if is_torch_array(norm) else (norm.min(), norm.max())
    if not (low > 1e-12 and high < 1e12):  # NaN, zero or near the limits of float32: scale by the largest first
        _refuse(~xp.isfinite(x), name, _FINITE)
        largest = xp.max(xp.abs(x), axis=-1, keepdims=True)
        _refuse(largest == 0, name, _ZERO)
        x = x / xp.where(largest == 0, xp.ones_like(largest), largest)
        norm = clip(row_norms(x)[..., None], 1)  # 1 or more, but for zero rows
    return x / norm


def _refuse(bad: Array, name: str | None, sentence: str) -> None:
    """Raise an error that names an array and the rows of a mask, if there are any: 'rows 3, 8 and 12 more'."""
    if name is None or not bool(namespace(bad).any(bad)):
        return
    rows = np.flatnonzero(to_numpy(bad).reshape(bad.shape[0], -1).any(axis=1))
    more = f" and {rows.size - _SHOWN} more" if rows.size > _SHOWN else ""
    shown = ", ".join(map(str, rows[:_SHOWN]))
    raise InputError(sentence.format(name, f"row{'s' if rows.size > 1 else ''} {shown}{more}"))


def class_counts(labels: Array, k: int, weights: Array | None = None) -> Array:
    """Sum the weights (1 each if none) of the samples of each class: c_k = sum_i w_i 1[labels_i = k]."""
    if is_torch_array(labels):  # index_add, since bincount waits for the device
        weights = labels.new_ones(labels.shape) if weights is None else weights
        return weights.new_zeros(k).index_add_(0, labels, weights)
    return np.bincount(labels, weights, minlength=k)


def class_sums(labels: Array, x: Array, k: int) -> Array:
    """Sum the rows of `x` (N, d) of each class, (K, d)."""
    if is_torch_array(x):
        return x.new_zeros(k, x.shape[1]).index_add_(0, labels, x)
    from scipy.sparse import csr_array

    each = np.arange(x.shape[0] + 1)
    return csr_array((np.ones(x.shape[0], x.dtype), labels, each), shape=(x.shape[0], k)).T @ x


def clip(x: Array, low: float | None = None, high: float | None = None) -> Array:
    """Hold the entries of `x` in [low, high]; the standard's function takes several times as long on small arrays."""
    if is_torch_array(x):
        return x.clamp(low, high)
    if low is not None:
        x = np.maximum(x, x.dtype.type(low))
    return x if high is None else np.minimum(x, x.dtype.type(high))


def row_dots(x: Array, y: Array) -> Array:
    """Return x_i . y_i of each row, (N,)."""
    return (x * y).sum(-1) if is_torch_array(x) else np.vecdot(x, y)


def row_norms(x: Array) -> Array:
    """Return the lengths of the rows, (N,)."""
    return namespace(x).linalg.vector_norm(x, axis=-1) if is_torch_array(x) else np.sqrt(np.vecdot(x, x))


def row_sums(x: Array) -> Array:
    """Return the sum of each row, (N,): in numpy by a product, which takes a third of the time."""
    if is_torch_array(x):
        return x.sum(-1)
    with np.errstate(invalid="ignore"):  # products of finite rows were seen to raise the flag, without a NaN in them
        return x @ np.ones(x.shape[-1], x.dtype)


def column_dots(x: Array, y: Array) -> Array:
    """Return sum_i x_ik y_ik of each column, (K,)."""
    return (x * y).sum(0) if is_torch_array(x) else np.einsum("ik,ik->k", x, y)


def device_type(x: Array) -> str:
    """Return the kind of device that an array is on: "cpu", "cuda", ..."""
    return str(x.device.type) if is_torch_array(x) else "cpu"


def columns(x: Array, which: Array | slice) -> Array:
    """Return some columns of a matrix; `slice(None)` is all of them, without a copy."""
    return x if isinstance(which, slice) else namespace(x).take(x, which, axis=1)


def put(x: Array, which: Array, values: Array) -> Array:
    """Return an array with some rows replaced by `values`, as a new array."""
    x = x.clone() if is_torch_array(x) else x.copy()
    x[which] = values
    return x


def affine(x: Array, w: Array, b: Array) -> Array:
    """Return x w' + b in one pass over the result where the library can, (N, K) from (N, d), (K, d) and (K,)."""
    if is_torch_array(x):
        return b.addmm(x, w.T)  # the bias is added as the product is written
    out = x @ w.T
    out += b
    return out
