"""The equations of the MOON paper, one function each; named in docs/maths.md and run by MOON and its relatives.

Shapes: z, zero_shot y and votes are (N, K), features f (N, d), text (K, d); alpha, beta, kappa, r are (K,); gamma (N,).
What is a formula of single numbers is in `core.formulas`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from moontide.core import formulas
from moontide.core.arrays import Array, clip, device, namespace, row_dots, row_sums
from moontide.core.simplex import entropy, softmax_log_sum
from moontide.core.vmf import inverse_bessel_ratio, log_normaliser

EPS = 1e-12  # the released program's guard in entropies, lambda, beta and norms


def zero_shot(cosine: Array, scale: float, out: Array | None = None) -> tuple[Array, Array]:
    """Eq. zero-shot: y_ik = exp(f_i . t_k / tau) / sum_j exp(f_i . t_j / tau), (N, K), and the logs of the sums, (N,).

    `scale` is 1 / tau; y is written to `out` if given.
    """
    logits = namespace(cosine).multiply(cosine, scale, out=out)
    return softmax_log_sum(logits, logits)


def sample_weights(p: Array) -> Array:
    """Eq. pl, instance-level adjustment: gamma_i = 1 - H(p_i) / log K."""
    return entropy_weights(entropy(p, EPS), p.shape[1])


def entropy_weights(h: Array, k: int) -> Array:
    """Eq. pl from the entropies h of the K probabilities of each sample."""
    return clip(formulas.entropy_weight(h, log_classes(k)), 0, 1)  # (N,)


def log_classes(k: int) -> float:
    """Return log K with a guard, so that one class does not lead to a division by zero."""
    return math.log(k) + EPS


def class_confidence(average: Array, largest: Array, mean: str = "geometric", normalise: bool = True) -> Array:
    """Eq. as-lambda: lambda_k = sqrt(mean_i y_ik x max_i y_ik), or another mean of both, (K,); `normalise`: / max_k."""
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
    """Eq. as-alpha, class-level adjustment: alpha_k = 1 / lambda_k, or the forms it was compared with."""
    if form == "exp(-lambda)":
        return namespace(confidence).exp(-confidence)
    return confidence + EPS if form == "lambda" else 1 / (confidence + EPS)


def initial_resultant(total: Array, along: Array, epsilon: float) -> Array:
    """Eq. init: A_d(kappa'_k) = 1 - sum_i y_ik |f_i - t_k|^2 / (2 sum_i y_ik), with |f - t|^2 / 2 = 1 - cosine.

    `total` is sum_i y_ik and `along` is sum_i y_ik cosine_ik, (K,) each.
    """
    return 1 - (total - along) / soft_count(total, epsilon)  # (K,)


def concentration(r: Array, d: int, inverse: str, r_cap: float) -> Array:
    """Eq. banerjee: kappa from the mean resultant length r = A_d(kappa), r held in [0, r_cap]."""
    xp = namespace(r)
    r = clip(r, 0, min(r_cap, 1 - float(xp.finfo(r.dtype).eps)))
    if inverse == "newton":
        return inverse_bessel_ratio(d, r)  # (K,)
    return xp.astype(formulas.banerjee(d, xp.astype(r, xp.float64)), r.dtype)  # (K,)


def log_c(d: int, kappa: Array, form: str) -> Array:
    """App. vMF: log C_d(kappa), accurate or in the paper's simplified large-kappa form."""
    if form == "accurate":
        return log_normaliser(d, kappa)
    kappa = clip(kappa, 1e-6)
    return formulas.log_c(d, kappa, namespace(kappa).log(kappa))


def prototypes(text: Array, mu: Array, kappa: Array, scale: float, temper: float) -> Array:
    """Fold zero-shot logits and tempered likelihood into one vector per class: scale t_k + (kappa_k / temper) mu_k.

    Its product with f_i, plus log C_d(kappa_k) / temper, is the logit of Eq. update-z, up to a constant of the row.
    """
    return scale * text + (kappa / temper)[:, None] * mu  # (L, d)


def at_anchor(cosine: Array, slope: Array, offset: Array) -> Array:
    """Return the logits of Eq. update-z of classes at their anchor, where mu_k = t_k, from the cosines, (N, K).

    `slope` (K,) is scale + kappa_k / temper, `offset` (K,) is log C_d(kappa_k) / temper.
    """
    logits = cosine * slope
    logits += offset
    return logits


class Assignment(NamedTuple):
    """What an E-step gives of each sample."""

    z: Array  # (N, K)
    labels: Array  # (N,) argmax of z
    log_sum: Array  # (N,) log of the sum that z was divided by
    gamma: Array  # (N,) entropy weight of z_i
    agreement: Array  # (N,) z_i . votes_i
    before: Array  # (N,) z_i . votes_i of the z that went in, whose votes these are


def e_step(logits: Array, votes: Array, z: Array, out: Array | None = None) -> Assignment:
    """Eq. update-z: z_i = softmax(logits_i + votes_i), written to `out`; the votes are of the previous z.

    Overwrites the logits.
    """
    xp, a = namespace(logits), logits
    a += votes  # (N, K)
    labels = xp.argmax(a, axis=1)  # (N,)
    top = a[xp.arange(a.shape[0], device=device(a)), labels]  # (N,)
    a -= top[:, None]
    p = xp.exp(a, out=out)  # (N, K)
    total = row_sums(p)  # (N,)
    p /= total[:, None]
    log_total = xp.log(total)  # (N,)
    gamma = entropy_weights(log_total - row_dots(p, a), a.shape[1])  # (N,)
    return Assignment(p, labels, top + log_total, gamma, row_dots(p, votes), row_dots(z, votes))


def weighted_sums(z: Array, gamma: Array, f: Array) -> tuple[Array, Array]:
    """Return the sufficient statistics sum_i gamma_i z_ik f_i, (K, d), and sum_i gamma_i z_ik, (K,)."""
    narrow = z.shape[1] < f.shape[1]  # the smaller of both is multiplied by gamma
    return (z * gamma[:, None]).T @ f if narrow else z.T @ (f * gamma[:, None]), gamma @ z


def means(sums: Array, counts: Array, epsilon: float) -> Array:
    """Alg. 1: v_k = sum_i gamma_i z_ik f_i / sum_i gamma_i z_ik, from both sums; `epsilon` is the released guard."""
    return sums / soft_count(counts, epsilon)[:, None]


def shrink(v: Array, beta: Array, anchor: Array) -> Array:
    """Eq. expfam-shrinkage, the M-step in mean-parameter space: R_k = beta_k v_k + (1 - beta_k) anchor_k."""
    mean = beta[:, None] * v  # (K, d)
    mean += (1 - beta)[:, None] * anchor
    return mean


def anchor_kl(aligned: Array, anchor_kappa: Array, anchor_r: Array, kappa: Array, d: int, form: str) -> Array:
    """App. KL, `formulas.anchor_kl` of all classes, with `aligned` = mu_k . mu'_k, (K,)."""
    both = log_c(d, anchor_kappa, form), log_c(d, kappa, form)
    return formulas.anchor_kl(*both, anchor_r, anchor_kappa, kappa, aligned)


def free_energy(gamma: Array, agreement: Array, log_sum: Array, log_sum_y: Array) -> Array:
    """Eq. ple-ours of each sample after an E-step, without its Laplacian: gamma_i (KL(z_i || y_i) - z_i . log p_i).

    With z = softmax(a), sum_k z_k (log z_k - a_k) = -log_sum, so that this is gamma_i (agreement_i - log_sum_i), plus
    `log_sum_y`, the row constant that was left out of a. No N x K x d work is needed.
    """
    return gamma * (agreement - log_sum + log_sum_y)


def objective(free: Array, laplacian: Array, alpha: Array, kl: Array, temper: float) -> Array:
    """Eq. ple-ours after an E-step: the samples' terms, their Laplacian halved, and the anchors' KL.

    `free` are the `free_energy` of the samples and `laplacian` is gamma_i z_i . (M z)_i of the new z, (..., N), or sums
    of these over samples; kl is (..., K). Leading axes (iterations) are kept.
    """
    xp = namespace(free)
    return xp.sum(free - laplacian / 2, axis=-1) + xp.sum(alpha * kl, axis=-1) / temper


def soft_count(total: Array, epsilon: float) -> Array:
    """Return soft counts with a guard for divisions: the released program's `epsilon`, and a least number above 0."""
    xp = namespace(total)
    return clip(total + epsilon, float(xp.finfo(total.dtype).smallest_normal))
