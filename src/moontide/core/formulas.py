"""The scalar formulas of MOON, each written once: arithmetic and nothing else.

They take numbers, numpy arrays and torch tensors as they are; Numba (`backends.loops`) and Triton (`backends.kernels`)
compile this very source for their loops. What bounds an argument (r < 1, kappa > 0) is left to the caller.
"""

from __future__ import annotations

from typing import Any  # noqa: F401  in the comments, since Triton reads the rest


def shrinkage(n, alpha):  # type: (Any, Any) -> Any
    """Eq. expfam-shrinkage: beta_k = n_k / (n_k + alpha_k), n_k = sum_i gamma_i z_ik or counts of labels (app. A)."""
    return n / (n + alpha + 1e-12)


def entropy_weight(h, log_k):  # type: (Any, Any) -> Any
    """Eq. pl: gamma_i = 1 - H(z_i) / log K."""
    return 1 - h / log_k


def banerjee(d, r):  # type: (Any, Any) -> Any
    """Eq. banerjee: kappa from r = A_d(kappa), with 1 - r^2 as (1 - r) (1 + r), which keeps its digits near 1."""
    return (r * d - r * r * r) / ((1 - r) * (1 + r))


def log_c(d, kappa, log_kappa):  # type: (Any, Any, Any) -> Any
    """App. vMF: log C_d(kappa) = (d - 1) / 2 log kappa - kappa, for large kappa and without its constant."""
    return (d - 1) / 2 * log_kappa - kappa


def anchor_kl(log_c0, log_c, r0, kappa0, kappa, aligned):  # type: (Any, Any, Any, Any, Any, Any) -> Any
    """App. KL: KL(V' || V) = log C_d(kappa') - log C_d(kappa) + A_d(kappa') (kappa' - kappa mu . mu')."""
    return log_c0 - log_c + r0 * (kappa0 - kappa * aligned)
