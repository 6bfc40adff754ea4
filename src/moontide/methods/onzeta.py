"""OnZeta: online zero-shot transfer, with labels balanced by a dual variable and proxies learnt along a stream.

OnZeta, ECCV 2024, after what its program (idstcv/OnZeta) computes.

Symbols:  x -> x   t_k -> text[k]   w_k -> proxies[k]   rho -> dual   p -> p   v -> v   i -> i   n -> horizon
          tau_t -> 1 / logit_scale   tau_i -> tau   c_w -> proxy_step   c_r -> dual_step   alpha -> balance
          beta -> proxy_weight

For sample i, counted from 1:

    p ∝ softmax_k(x.t_k / tau_t) exp(rho),         rho <- max(0, rho - c_r / sqrt(i) (p - alpha / K))
    v = softmax_k(x.w_k / tau_i),                  z = b v + (1 - b) p,  b = beta sqrt(i / n)
    w_k <- w_k - c_w / (sqrt(i) tau_i) (v_k - p_k) x, to unit length

z is the answer, or p alone with `answer="label"` (the paper's OnLab). n is the length of the stream, which the
published program knows in advance. Here it is N for a batch and the option `horizon` for a stream, with i / n at most
1; without a horizon, b = beta from the first sample on. K is the number of texts, whereas the program counts the
classes among the true labels.

With the published step c_w = 0.5 the updates are chaotic: steps are longer than the proxies, and a difference in the
16th digit grows by a factor of 1e7 to 1e9 over a few hundred samples. Text and temperature are therefore rounded to
float32, as in the published program, and everything is computed in float64, so that numpy and torch agree, and so do
streams with other sizes of steps. Labels still depend on whether the features are float32 or float64. The preset
"small_step" (0.02) is well behaved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from moontide.core.arrays import Array, clip, namespace, row_norms
from moontide.core.simplex import softmax, zero_shot
from moontide.methods._precision import single_in_double
from moontide.options import option
from moontide.protocols import OnlineMethod, State, per_class
from moontide.types import Result, Task


@dataclass(frozen=True)
class OnZetaState(State):
    """The proxies and the dual variable, in float64."""

    proxies: Array = field(metadata=per_class(0))  # (K, d) unit rows
    dual: Array = field(metadata=per_class(0))  # (K,) not negative


@dataclass(frozen=True)
class OnZeta(OnlineMethod):
    """Balanced text labels combined with those of proxies that learn from them, one sample at a time.

    >>> import numpy as np
    >>> OnZeta().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "OnZeta, ECCV 2024"
    state_type: ClassVar[type[State]] = OnZetaState
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "label": {"answer": "label"},
        "small_step": {"proxy_step": 0.02},
    }

    answer: str = option("mixed", "the text labels and those of the proxies, or the balanced text labels alone",
                         choices=("mixed", "label"))  # fmt: skip
    horizon: int = option(0, "n, length of the stream; 0: unknown (for a batch, its own length)", low=0, high=10**9)
    tau: float = option(0.04, "tau_i, temperature of the similarities to the proxies", above=0)
    proxy_step: float = option(0.5, "c_w, length of the steps of the proxies", low=0)
    dual_step: float = option(20.0, "c_r, length of the steps of the dual variable", low=0)
    balance: float = option(1.0, "alpha, minimum share of every class, times K; 0: none", low=0)
    proxy_weight: float = option(0.8, "beta, weight of the proxies at the end of the stream", low=0, high=1)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the options that have no effect given the others."""
        if self.answer == "label":
            yield ("horizon", "tau", "proxy_step", "proxy_weight"), "with answer='label'"
        if self.proxy_weight == 0:
            yield ("horizon", "tau", "proxy_step"), "with proxy_weight=0"
        if self.dual_step == 0:
            yield ("balance",), "with dual_step=0"

    def start(self, task: Task) -> OnZetaState:
        """Make the proxies of the text, and a dual variable of 0."""
        proxies = single_in_double(task.text)  # (K, d)
        return OnZetaState(task.text, task.logit_scale, 0, proxies, namespace(proxies).zeros_like(proxies[:, 0]))

    def _fit(self, task: Task) -> Result:
        known = self.horizon or self.answer == "label" or self.proxy_weight == 0
        return super(OnZeta, self if known else replace(self, horizon=task.n))._fit(task)

    def _step(self, state: OnZetaState, x: Array) -> tuple[OnZetaState, Result]:  # type: ignore[override]
        xp = namespace(x)
        wide = xp.astype(x, xp.float64)  # (n, d)
        logits = float(np.float32(state.logit_scale)) * (wide @ single_in_double(state.text).T)  # (n, K)
        w, rho, rows = state.proxies, state.dual, []
        k = w.shape[0]
        for i, (f, c) in enumerate(zip(wide, logits, strict=True), state.seen + 1):
            p = softmax(c + rho)  # (K,)
            rho = clip(rho - self.dual_step / math.sqrt(i) * (p - self.balance / k), 0)  # (K,)
            v = softmax((w @ f) / self.tau)  # (K,)
            b = self.proxy_weight * math.sqrt(min(i / self.horizon, 1) if self.horizon else 1)
            rows.append(b * v + (1 - b) * p if self.answer == "mixed" else p)
            w = moved(w, f, v - p, self.proxy_step / (math.sqrt(i) * self.tau))
        z = xp.astype(xp.stack(rows), x.dtype)  # (n, K)
        return replace(state, proxies=w, dual=rho), Result(z, zero_shot(x, state.text, state.logit_scale))


def moved(w: Array, x: Array, error: Array, step: float) -> Array:
    """w_k <- w_k - step error_k x, to unit length, (K, d).

    >>> import numpy as np
    >>> moved(np.asarray([[1.0, 0.0]]), np.asarray([0.0, 1.0]), np.asarray([-1.0]), 1.0).round(3)
    array([[0.707, 0.707]])
    """
    w = w - (step * error)[:, None] * x[None, :]
    return w / clip(row_norms(w), 1e-12)[:, None]
