"""Probabilities on the simplex: softmax, entropy and the zero-shot prediction that every method starts from."""

from __future__ import annotations

from moontide.core.arrays import Array, is_torch_array, namespace, row_sums


def softmax(logits: Array, out: Array | None = None) -> Array:
    """Return the softmax over the last axis, computed without overflow; `out`: another array where it is written."""
    if is_torch_array(logits):  # one kernel
        return namespace(logits).softmax(logits, -1, out=out)
    return softmax_log_sum(logits, out)[0]


def log_softmax(logits: Array) -> Array:
    """Return the logarithm of the softmax over the last axis; nothing underflows."""
    xp = namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)  # (..., K)
    shifted -= xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))
    return shifted


def softmax_log_sum(logits: Array, out: Array | None = None) -> tuple[Array, Array]:
    """Return the softmax over the last axis and log sum_k exp(logits_k), computed without overflow.

    `out`: where the softmax is written, which may be the logits; None: a new array.
    """
    xp = namespace(logits)
    top = xp.max(logits, axis=-1, keepdims=True)  # (..., 1)
    p = xp.subtract(logits, top, out=out)  # (..., K)
    p = p.exp_() if is_torch_array(p) else xp.exp(p, out=p)
    total = row_sums(p)[..., None]  # (..., 1)
    p /= total
    return p, (top + xp.log(total))[..., 0]


def zero_shot(features: Array, text: Array, logit_scale: float) -> Array:
    """Eq. zero-shot: y_ik = softmax_k(f_i . t_k / tau), with logit_scale = 1 / tau and unit rows."""
    return softmax(logit_scale * (features @ text.T))  # (N, K)


def entropy(p: Array, eps: float = 1e-12) -> Array:
    """Return the Shannon entropy in nats of each row, H = -sum_k p_k ln(p_k + eps)."""
    xp = namespace(p)
    return -xp.sum(p * xp.log(p + eps), axis=-1)  # (...,)


def one_hot(labels: Array, k: int, ref: Array) -> Array:
    """Return the one-hot rows of integer labels, in the namespace, device and dtype of `ref`."""
    xp = namespace(ref)
    return xp.astype(labels[:, None] == xp.arange(k, device=labels.device)[None, :], ref.dtype)  # (N, K)
