"""MOON as its equations read: dense, every class in every iteration, N x N similarities.

Tests compare every backend with it, and so do measurements of speed. It implements the released preset (docs/maths.md)
for numpy and torch, without regard to memory or speed.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace


def reference(f: Any, t: Any, scale: float = 100.0, m: int = 3, iterations: int = 10) -> Any:
    """Return the assignments z (N, K) of unit rows f (N, d) and t (K, d)."""
    xp = array_namespace(f)
    (n, d), k = f.shape, t.shape[0]
    m = min(m, n - 1)

    def softmax(a: Any) -> Any:
        e = xp.exp(a - xp.max(a, axis=1, keepdims=True))
        return e / xp.sum(e, axis=1, keepdims=True)

    def concentration(r: Any) -> Any:
        r = xp.clip(r, min=0.0, max=0.999)
        return (r * d - r**3) / (1 - r**2)

    y = softmax(scale * (f @ t.T))
    similarity = f @ f.T - 3 * xp.eye(n, dtype=f.dtype, device=f.device)  # below every cosine on the diagonal
    order = xp.argsort(similarity, axis=1, descending=True)[:, :m]
    w = xp.zeros((n, n), dtype=f.dtype, device=f.device)
    rows = xp.arange(n, device=f.device)
    for j in range(order.shape[1]):
        w[rows, order[:, j]] = similarity[rows, order[:, j]]
    confidence = xp.sqrt(xp.mean(y, axis=0) * xp.max(y, axis=0))
    alpha = 1 / (confidence / xp.max(confidence) + 1e-12)
    count = xp.sum(y, axis=0)
    r = 1 - (count - xp.sum(y * (f @ t.T), axis=0)) / (count + 1e-10)
    mu, kappa, z = t, concentration(r), y
    for it in range(iterations + 1):
        log_c = (d - 1) / 2 * xp.log(xp.clip(kappa, min=1e-6)) - xp.clip(kappa, min=1e-6)
        likelihood = kappa * (f @ mu.T) + log_c
        z = softmax(xp.log(xp.clip(y, min=1e-30)) + likelihood / 50 + (w.T @ z + w @ z) / max(2 * m, 1))
        if it == iterations:
            return z
        gamma = 1 + xp.sum(z * xp.log(z + 1e-12), axis=1) / (math.log(k) + 1e-12)
        hard = xp.astype(xp.argmax(z, axis=1)[:, None] == xp.arange(k, device=f.device)[None, :], f.dtype)
        beta = xp.sum(hard, axis=0) / (alpha + xp.sum(hard, axis=0) + 1e-12)
        weighted = gamma[:, None] * z
        v = (weighted.T @ f) / (xp.sum(weighted, axis=0) + 1e-10)[:, None]
        resultant = beta[:, None] * v + (1 - beta)[:, None] * t
        norm = xp.linalg.vector_norm(resultant, axis=1)
        mu = resultant / xp.clip(norm, min=1e-12)[:, None]
        kappa = xp.clip(concentration(norm), max=500.0)
    return z
