"""MOON one sample at a time (the dagger variant), with statistics of a bank of the last samples instead of a batch.

J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026, Tab. sample-wise; behaviour of the released program.

Symbols:  f_j, z_j, gamma_j of the bank -> bank_features, bank_z, bank_gamma   y -> y   beta_k -> beta   m -> neighbours
          v_k = S_k / n_k, S_k = sum_j gamma_j z_jk f_j, n_k = sum_j gamma_j z_jk   R_k = beta_k v_k + (1 - beta_k) t_k

A sample is predicted from the bank, z ∝ y^text_weight exp((kappa_k mu_k.f + log C_d(kappa_k) + message_k) / temper),
and then replaces the oldest one in it. The first sample keeps its zero-shot prediction. The result does not depend on
how many samples are passed per step.

The defaults are the released program. The preset "paper" is what the paper writes, each part of which is an option:
alpha_k of Eqs. 10 and 11 from the bank, soft counts, votes of the whole bank weighted by cosines, and no tempering.

The released program adds each new sample to S_k and subtracts the one that leaves, so that rounding errors accumulate
along the stream. Here everything is computed from the bank for every sample, so errors are those of one sum over the
bank, and no work of size K x d is needed: with a_jk = beta_k gamma_j z_jk / n_k

    R_k.f = sum_j a_jk f_j.f + (1 - beta_k) t_k.f
    |R_k|^2 = sum_jl a_jk f_j.f_l a_lk + 2 (1 - beta_k) sum_j a_jk f_j.t_k + (1 - beta_k)^2
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from moontide.core.arrays import Array, class_counts, device, namespace
from moontide.core.ple import EPS, anchor_weights, class_confidence, concentration, log_c, sample_weights
from moontide.core.simplex import log_softmax, softmax
from moontide.options import option
from moontide.protocols import OnlineMethod, State, copy_array, per_class
from moontide.types import Result, Task

BLOCK_ROWS = 128  # samples whose products with the bank and each other are made at once
FLOOR = 1e-6  # smallest mean resultant length and smallest kappa


@dataclass(frozen=True)
class BankState(State):
    """The last B samples, oldest first; zeros in front until B were seen."""

    bank_features: Array  # (B, d)
    bank_z: Array = field(metadata=per_class(1, "shares"))  # (B, K)
    bank_gamma: Array  # (B,)


@dataclass(frozen=True)
class SamplewiseMOON(OnlineMethod):
    """MOON on a stream of single samples, with a bank of the last ones.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> SamplewiseMOON(bank=4).fit_predict(rng.normal(size=(8, 16)), rng.normal(size=(3, 16))).probs.shape
    (8, 3)
    """

    citation: ClassVar[str] = "Huang et al., ICML 2026"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {
            "alpha": "1/lambda", "beta": "soft", "messages": "all", "temper": 1.0, "kappa_cap": math.inf, "r_cap": 1.0,
        }
    }  # fmt: skip
    state_type: ClassVar[type[State]] = BankState

    bank: int = option(128, "B, samples remembered", low=1, high=100_000)
    alpha: str | float = option(1.0, "anchor weight: one for all classes, or by the confidence of each in the bank",
                                choices=("1/lambda",), above=0)  # fmt: skip
    beta: str = option("hard", "counts in beta_k: of labels, or of gamma-weighted assignments",
                       choices=("hard", "soft"))  # fmt: skip
    messages: str = option("nearest", "samples of the bank that vote: the m nearest, weighted by the softmax of their "
                           "cosines, or all, weighted by the cosines", choices=("nearest", "all"))  # fmt: skip
    neighbours: int = option(3, "m, nearest samples of the bank that vote", low=1)
    temper: float = option(100.0, "what the log-likelihood and the message are divided by", above=0)
    laplacian_weight: float = option(1.0, "weight of the message", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction", low=0)
    kappa_cap: float = option(500.0, "largest kappa (inf: none)", above=0, high=math.inf)
    r_cap: float = option(0.999, "largest mean resultant length (1: none)", above=0, high=1)

    def alpha_k(self, cosine: Array, logit_scale: float) -> Array | float:
        """Return the anchor weight: the same for all classes, or 1 / lambda_k of the bank's zero-shot predictions."""
        if isinstance(self.alpha, str):
            y = softmax(logit_scale * cosine)  # (b, K)
            xp = namespace(y)
            confidence = class_confidence(xp.mean(y, axis=0), xp.max(y, axis=0), "geometric", normalise=False)  # (K,)
            return anchor_weights(confidence, self.alpha)
        return self.alpha

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Add the bank and its copy to the usual estimate."""
        return super().peak_bytes(n, k, d, itemsize) + itemsize * 2 * self.bank * (k + d)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the options that have no effect given the others."""
        if self.laplacian_weight == 0:
            yield ("neighbours", "messages"), "with laplacian_weight=0"
        if self.messages == "all":
            yield ("neighbours",), "with messages='all'"

    def start(self, task: Task) -> BankState:
        """Make an empty bank."""
        xp = namespace(task.text)
        kind = {"dtype": task.text.dtype, "device": device(task.text)}
        features, z = xp.zeros((self.bank, task.d), **kind), xp.zeros((self.bank, task.k), **kind)
        return BankState(task.text, task.logit_scale, 0, features, z, xp.zeros((self.bank,), **kind))

    def _step(self, state: BankState, x: Array) -> tuple[BankState, Result]:  # type: ignore[override]
        results = []
        for start in range(0, x.shape[0], BLOCK_ROWS):
            state, result = self.block(state, x[start : start + BLOCK_ROWS, :])
            results.append(result)
        return state, Result.concatenate(results)

    def block(self, state: BankState, x: Array) -> tuple[BankState, Result]:
        """Predict samples one after the other; their products are computed together."""
        xp = namespace(x)
        n, b = x.shape[0], self.bank
        f = xp.concat([state.bank_features, x])  # (B + n, d) the bank of sample i ends before row B + i
        gram, cosine = f @ f.T, f @ state.text.T  # (B + n, B + n), (B + n, K)
        log_y = log_softmax(state.logit_scale * cosine[b:, :])  # (n, K)
        y = xp.exp(log_y)  # (n, K)
        log_prior = self.text_weight * xp.clip(log_y, min=math.log(EPS))  # (n, K)
        z = xp.concat([state.bank_z, y])  # (B + n, K) rows from B on still to be predicted
        gamma = xp.concat([state.bank_gamma, xp.zeros_like(x[:, 0])])  # (B + n,)
        weighted = z * gamma[:, None]  # (B + n, K)
        labels = xp.argmax(z, axis=1)  # (B + n,)
        for i in range(n):
            now = b + i
            held = slice(max(i, b - state.seen), now)  # rows of the bank
            if held.start < now:
                dots, kappa = self.parameters(weighted[held, :], labels[held], gram[held, held], cosine[held, :],
                                              gram[held, now], cosine[now, :], x.shape[1],
                                              self.alpha_k(cosine[held, :], state.logit_scale))  # fmt: skip
                log_likelihood = kappa * dots + log_c(x.shape[1], kappa, "asymptotic")  # (K,)
                votes = message(gram[held, now], z[held, :], None if self.messages == "all" else self.neighbours)
                smoothing = self.laplacian_weight * votes  # (K,)
                z[now, :] = softmax(log_prior[i, :] + (log_likelihood + smoothing) / self.temper)
                labels[now] = xp.argmax(z[now, :])
            gamma[now] = sample_weights(z[now : now + 1, :])[0]
            weighted[now, :] = gamma[now] * z[now, :]
        last = slice(n, n + b)
        bank = {"bank_features": f[last, :], "bank_z": z[last, :], "bank_gamma": gamma[last]}
        after = replace(state, seen=state.seen + n, **{name: copy_array(rows) for name, rows in bank.items()})
        return after, Result(z[b:, :], y)

    def parameters(self, weighted: Array, labels: Array, gram: Array, cosine: Array, near: Array, to_text: Array,
                   d: int, alpha: Array | float) -> tuple[Array, Array]:  # fmt: skip
        """Return mu_k.f for the sample f and kappa_k from a bank of b samples, (K,) and (K,).

        `weighted` (b, K) is gamma_j z_jk, `gram` (b, b) f_j.f_l, `cosine` (b, K) f_j.t_k, `near` (b,) f_j.f and
        `to_text` (K,) f.t_k.
        """
        xp = namespace(weighted)
        if self.beta == "soft":
            count = xp.sum(weighted, axis=0)  # (K,)
        else:
            count = xp.astype(class_counts(labels, to_text.shape[0]), to_text.dtype)  # (K,)
        beta = count / (count + alpha + EPS)  # (K,)
        a = weighted * (beta / (xp.sum(weighted, axis=0) + EPS))  # (b, K)
        square = xp.sum(a * (gram @ a + 2 * (1 - beta) * cosine), axis=0) + (1 - beta) ** 2  # (K,) |R_k|^2
        r = xp.sqrt(xp.clip(square, min=FLOOR**2))  # (K,)
        dots = (near @ a + (1 - beta) * to_text) / r  # (K,)
        return dots, xp.clip(concentration(r, d, "banerjee", self.r_cap), min=FLOOR, max=self.kappa_cap)


def message(near: Array, z: Array, m: int | None) -> Array:
    """Return the votes of the m nearest samples of the bank, weighted by the softmax of their cosines, (K,).

    With m=None all samples vote, each weighted by its cosine: the sum of the paper's Eq. 17.

    >>> import numpy as np
    >>> message(np.asarray([0.3, 0.9, 0.3]), np.eye(3), 1), message(np.asarray([0.3, 0.9, 0.3]), np.eye(3), None)
    (array([0., 1., 0.]), array([0.3, 0.9, 0.3]))
    """
    xp = namespace(near)
    if m is None:
        return near @ z
    nearest = xp.argsort(-near)[:m]  # (m,) stable: of equally near samples the older
    return softmax(near[nearest]) @ z[nearest, :]
