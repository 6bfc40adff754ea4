"""MOON: mixture of von Mises-Fisher models with dynamic shrinkage.

J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026.

Symbols:  f_i -> features[i]   t_k = mu'_k -> text[k] (the anchor)   y_ik -> zero_shot[i, k]   z_ik -> z[i, k]
          kappa'_k -> anchor_kappa   A_d(kappa'_k) -> anchor_r   mu_k, kappa_k -> mu, kappa   v_k, R_k -> v, resultant
          lambda_k -> confidence   alpha_k -> alpha   gamma_i -> gamma   beta_k -> beta   omega_ij -> graph
          tau -> 1 / task.logit_scale   m -> neighbours   T -> iterations

The defaults are the released solver, which made the paper's numbers; the preset "paper" is what the paper writes.
They differ in: `temper` (the released likelihood is divided by 50, its Laplacian by 2m), `normalise_confidence`,
`update`, `gamma_in_counts`, `graph`, `kappa_cap`, `r_cap`, `final_assignment` and `count_epsilon`.

L_PLE, Eq. ple-ours with these options, is  sum_i gamma_i [ KL-like(z_i, y_i^text_weight) - z_i . log p_i / temper ]
- 1/2 sum_i gamma_i z_i . (M z)_i + sum_k alpha_k KL(V'_k || V_k) / temper,  M the affinity times its weight. The
E-step minimises it over z with the Laplacian linearised, the exact M-step over (mu, kappa): it never rises for soft
beta, exact update, Newton inverse, accurate normaliser, no caps, positive semi-definite M and a gamma that is fixed. A
fixed gamma that is not constant makes gamma_i M_ij asymmetric, which the paper's proof overlooks; there the statement
holds with `votes="gamma"`, where a neighbour's vote counts by its own gamma too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moontide.core.arrays import (
    Array,
    affine,
    buffers,
    class_counts,
    clip,
    columns,
    device_type,
    last,
    namespace,
    put,
    stack,
)
from moontide.core.graph import Graph
from moontide.core.mixture import Anchors, MStep
from moontide.core.ple import (
    NO_COLUMNS,
    Assignment,
    Moments,
    anchor_weights,
    at_anchor,
    concentration,
    e_step,
    echo,
    join_confidence,
    objective,
    resultant_of,
    sample_weights,
    weighted_sums,
    zero_shot_moments,
)
from moontide.core.progress import track
from moontide.core.replay import replay
from moontide.core.smoothing import NEIGHBOURS, products_of_samples, smoother
from moontide.core.sparse import COARSE, NEGLIGIBLE, Resting, worthwhile
from moontide.errors import OptionError
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

STILL = 4  # roundings: assignments that move by less no longer change
HALF = 2**23  # N x K above which precision "half" stores assignments in 16 bits: below, nothing is gained
LARGE = 2**27  # N x K above which a CPU works in blocks of rows, with assignments in 16 bits


@dataclass(frozen=True)
class MOON(Method):
    """Training-free transduction: class means move from their text anchors as far as the batch gives evidence.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 100, effective_classes=3, seed=0)
    >>> result = MOON().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    >>> bool((result.labels == data.labels).mean() > (result.zero_shot_labels == data.labels).mean())
    True
    """

    citation: ClassVar[str] = "Huang et al., ICML 2026"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {},
        "paper": {
            "update": "exact", "gamma_in_counts": True, "normalise_confidence": False, "graph": "one-sided",
            "laplacian": "sum", "temper": 1.0, "kappa_cap": math.inf, "r_cap": 1.0, "final_assignment": False,
            "count_epsilon": 0.0,
        },
    }  # fmt: skip

    beta: str = option("hard", "counts in beta_k: argmax labels or soft assignments", choices=("hard", "soft"))
    update: str = option("simplified", "M-step with A_d(kappa') taken as 1, or exact", choices=("simplified", "exact"))
    alpha: str | float = option("1/lambda", "anchor weight alpha_k from the class confidence, or one constant for all",
                                choices=("1/lambda", "lambda", "exp(-lambda)"), above=0)  # fmt: skip
    confidence: str = option("geometric", "lambda_k from the mean and maximum of y_ik over the batch",
                             choices=("geometric", "arithmetic", "harmonic", "average", "max"))  # fmt: skip
    normalise_confidence: bool = option(True, "divide lambda by its largest value")
    gamma: str = option("assignments", "entropy weight of a sample: from z, from zero-shot, or 1",
                        choices=("assignments", "zero_shot", "off"))  # fmt: skip
    gamma_in_counts: bool = option(False, "weigh hard counts by gamma")
    votes: str = option("plain", "a neighbour's vote counts 1 or its gamma", choices=("plain", "gamma"))
    update_mu: bool = option(True, "move the mean directions")
    update_kappa: bool = option(True, "re-estimate the concentrations")
    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    kappa_cap: float = option(500.0, "largest re-estimated kappa (inf: none)", above=0, high=math.inf)
    r_cap: float = option(0.999, "largest mean resultant length (1: none)", above=0, high=1)
    neighbours: int = option(NEIGHBOURS, "m, neighbours of a sample in the graph", low=1)
    graph: str = option("symmetric", "a sample hears its neighbours and those it is neighbour of, or only the first",
                        choices=("symmetric", "one-sided"))  # fmt: skip
    laplacian: str = option("mean", "neighbours' votes are averaged or summed", choices=("mean", "sum"))
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    log_normaliser: str = option("asymptotic", "log C_d: the paper's large-kappa form or accurate",
                                 choices=("asymptotic", "accurate"))  # fmt: skip
    inverse: str = option("banerjee", "kappa from r: Banerjee's formula or Newton to full accuracy",
                          choices=("banerjee", "newton"))  # fmt: skip
    precision: str = option("full", "products on a GPU: float32, or rounded to 10 bits with float32 sums, faster; half "
                            "also stores z in 16 bits", choices=("full", "tf32", "half"))  # fmt: skip
    exact: bool = option(True, "False: on a CPU, votes that add less than 6e-5 to a probability may be left out; "
                         "details['dropped'] of the result bounds what that changes")  # fmt: skip
    iterations: int = option(10, "T, rounds of E-step and M-step", low=1)
    final_assignment: bool = option(True, "one more E-step after the last M-step")
    count_epsilon: float = option(1e-10, "added to soft counts where they divide", low=0)

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Name the options that the others switch off."""
        if not isinstance(self.alpha, str):
            yield ("confidence", "normalise_confidence"), "with a constant alpha"
        if self.beta == "soft":
            yield ("gamma_in_counts",), "with beta='soft', which is gamma-weighted already"
        if self.gamma == "off":
            yield ("gamma_in_counts", "votes"), "with gamma='off'"
        if self.laplacian_weight == 0:
            yield ("neighbours", "graph", "laplacian", "votes", "exact"), "with laplacian_weight=0"
        if not self.update_kappa:
            yield ("kappa_cap",), "with update_kappa=False"
        if self.m_steps == 0 or not (self.update_mu or self.update_kappa):
            reason = "without an M-step" if self.m_steps == 0 else "with update_mu=False and update_kappa=False"
            yield ("beta", "update", "alpha", "confidence", "normalise_confidence", "gamma_in_counts"), reason
            if self.votes == "plain":
                yield ("gamma",), reason
        if self.m_steps == 0:
            yield ("update_mu", "update_kappa", "kappa_cap"), "without an M-step"

    def _fit(self, task: Task) -> Result:
        if self.precision != "full" and device_type(task.features) == "cpu":
            raise OptionError(
                f"The 'precision' option of moon has no effect on a CPU. Got {self.precision!r}; leave it at 'full'."
            )
        if task.n * task.k > LARGE and device_type(task.features) == "cpu":
            return self._fit_in_blocks(task)
        plain = (
            self.inverse == "banerjee" and self.log_normaliser == "asymptotic"
        )  # the others take constants from the host
        out = replay(self._solve, task, self.precision, capture=plain)
        *energy, same = out.pop("energy").tolist()
        graph = Graph(out.pop("neighbours"), out.pop("weights"), float(out.pop("recall")) if "recall" in out else 1.0)
        z, y, kappa, beta = (out.pop(name) for name in ("z", "y", "kappa", "beta"))
        return Result(z, y, None, energy, len(energy) - 1, bool(same), kappa, beta, {**out, "graph": graph})

    def _fit_in_blocks(self, task: Task) -> Result:
        """Solve a task whose N x K arrays are too many for memory as one shard; probabilities come in 16 bits."""
        from moontide.engine.solvers import one_shard

        shard, found = one_shard(self, task)
        details = {
            "mu": found.mu, "alpha": found.alpha, "gamma": shard.gamma, "anchor_kappa": found.anchor_kappa,
            "graph": shard.graph,
        }  # fmt: skip
        z, y = shard.unpack()  # (N, K) each
        result = Result(z, y, None, found.energy, self.m_steps, found.converged, found.kappa, found.beta, details)
        result.__dict__["labels"] = shard.labels  # as computed, before rounding to 16 bits
        return result

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory beyond the inputs: six N x K arrays, or three of 2-byte numbers for large N."""
        assignments = 6 * n * k if n * k > LARGE else 6 * n * k * itemsize
        return assignments + itemsize * (2 * n * d + 8 * k * d)

    def _solve(self, task: Task) -> dict[str, Array]:
        """Alternate E-steps and M-steps. Nothing here waits for a GPU, so that the whole run can be replayed there."""
        xp = namespace(task.features)
        f, text, d, m_step = task.features, task.text, task.d, self.m_step(task.logit_scale)
        spare = buffers(f, 4, (task.n, task.k))  # in numpy, the (N, K) arrays of the whole run
        cosine = xp.matmul(f, text.T, out=last(spare))  # (N, K)
        y, log_evidence, moments = zero_shot_moments(cosine, task.logit_scale, last(spare))  # (N, K), (N,)
        r = clip(resultant_of(moments.total, moments.along, self.count_epsilon), 0, self.r_cap)  # (K,)
        anchors = Anchors(text, concentration(r, d, self.inverse, self.r_cap), r, self.alpha_k(moments, task.n))
        symmetric, mean = self.graph == "symmetric", self.laplacian == "mean"
        gram = products_of_samples(task)  # (N, N)
        graph, votes_of = smoother(
            task, self.name, self.neighbours, self.laplacian_weight, symmetric, mean, self.precision, gram
        )

        # A class without samples is at its anchor: what it scores there, `rest`, is computed once, and the products of
        # an iteration are made for the L `live` classes only (on a GPU for all: counting them would make it wait).
        none = xp.zeros_like(r)  # (K,)
        rest_kappa, rest_kl = m_step.at_rest(anchors)  # (K,), (K,)
        on_cpu = device_type(f) == "cpu"
        rest, logits = (  # (N, K), (N, K)
            at_anchor(cosine, kappa, d, self.log_normaliser, m_step.scale, self.temper)
            for kappa in (rest_kappa, anchors.kappa)
        )
        live: Any = NO_COLUMNS
        values: Array = None
        beta, mu, kappa, kl = none, text, anchors.kappa, none  # (K,), (K, d), (K,), (K,)
        labels = None if self.m_steps else xp.argmax(y, axis=1)  # (N,)
        early = self.gamma == "zero_shot" or self.votes == "gamma"  # whether gamma is asked for before the first E-step
        gamma = sample_weights(y) if early else xp.ones_like(log_evidence)  # (N,)
        z, low = y, f  # (N, K), (N, d)
        if self.precision == "half" and task.n * task.k > HALF:
            z, low = y.half(), f.half()
        few: Resting | None = None  # z, where few classes are live
        limit, dropped = NEGLIGIBLE if self.exact else COARSE, 0.0
        still = STILL * float(xp.finfo(f.dtype).eps)
        trace: list[tuple[Array, ...]] = []  # what L_PLE after each E-step is made of
        for it in track(range(self.m_steps + 1), "iterations"):
            step = few.e_step(values, self.voice(gamma)) if few else None
            if step is None:
                old, few, out = few.dense() if few else z, None, last(spare)
                step = e_step(logits, self.said(old, gamma), votes_of, live, values, out)
                z = step.z  # (N, K)
                if out is not None and old is not y:
                    spare.append(old)
            elif few and not self.exact:
                dropped = max(dropped, few.dropped)
            before, labels = labels, step.labels  # (N,), (N,)
            if self.gamma == "assignments":
                gamma = step.gamma  # (N,)
            weight = xp.ones_like(gamma) if self.votes == "gamma" else gamma  # what was said has gamma in it already
            trace.append((gamma, step.heard, step.log_sum, step.echo, weight, kl))
            if it == self.m_steps:
                break
            if on_cpu and it and bool((labels == before).all()):
                moved = few.moved if few else float(xp.max(xp.abs(z - old)))
                if moved < still:
                    break  # further iterations would repeat this one
            counts = self.counts(step, gamma)  # (K,)
            if few and not few.covers(counts):
                z, few = few.dense(), None
            if few is None:
                live = xp.nonzero(counts)[0] if on_cpu else slice(None)  # (L,)
                held, near = anchors.rows(live), None if gram is None else columns(cosine, live)  # near: (N, L)
                if it and worthwhile(z, live):
                    few = Resting(rest, z, step.log_sum, live, votes_of, last(spare), limit)
            part = few.z if few else columns(z, live)  # (N, L)
            span = None if gram is None else m_step.in_span(part, gamma, counts[live], held, near, gram)
            classes: Any = span or m_step(*weighted_sums(part, gamma, low), counts[live], held)
            values = span.values if span else affine(f, classes.prototypes, classes.offset)  # (N, L)
            logits, kl = rest, put(rest_kl, live, classes.kl)  # (N, K), (K,)
        if self.m_steps:
            directions = m_step.means_of(span, f, held.text) if span else classes.mu  # (L, d)
            beta, mu = put(none, live, classes.beta), put(text, live, directions)
            kappa = put(rest_kappa, live, classes.kappa)
        gammas, heard, log_sum, echoes, weights, kl = map(stack, zip(*trace, strict=True))
        final = few.echo(self.voice(gamma)) if few else echo(self.said(z, gamma), votes_of)  # (N,)
        echoes = xp.concat([echoes[1:, :], final[None, :]])  # known one E-step later
        z = few.dense() if few else z
        log_evidence *= self.text_weight
        same = xp.astype(xp.all(labels == before), f.dtype)  # travels with the energies
        energy = objective(gammas, heard, log_sum, log_evidence, weights * echoes, anchors.alpha, kl, self.temper)
        return {
            "z": xp.astype(z, f.dtype), "y": y, "energy": xp.concat([energy, same[None]]),
            "beta": beta, "kappa": kappa, "mu": mu, "alpha": anchors.alpha, "gamma": gamma,
            "anchor_kappa": anchors.kappa, "neighbours": graph.neighbours, "weights": graph.weights,
            **({"recall": xp.asarray(graph.recall)} if graph.recall < 1 else {}),
            **({} if self.exact else {"dropped": xp.asarray(dropped)}),
        }  # fmt: skip

    def voice(self, gamma: Array) -> Array:
        """Return what the vote of each sample counts, (N,)."""
        return gamma if self.votes == "gamma" else namespace(gamma).ones_like(gamma)

    def said(self, z: Array, gamma: Array) -> Array:
        """Return the votes that samples cast, (N, K)."""
        return z * gamma[:, None] if self.votes == "gamma" else z

    def counts(self, step: Assignment, gamma: Array) -> Array:
        """Return the n_k that beta_k is made of: soft, hard, or hard and gamma-weighted, (K,)."""
        if self.beta == "soft":
            xp = namespace(gamma)
            return xp.astype(xp.astype(gamma, step.z.dtype) @ step.z, gamma.dtype)
        return class_counts(step.labels, step.counts.shape[0], gamma) if self.gamma_in_counts else step.counts

    def m_step(self, logit_scale: float) -> MStep:
        """Return the M-step with these options."""
        return MStep(
            self.update, self.update_mu, self.update_kappa, self.inverse, self.log_normaliser, self.r_cap,
            self.kappa_cap, self.count_epsilon, self.temper, self.text_weight * logit_scale,
        )  # fmt: skip

    @property
    def m_steps(self) -> int:
        """The number of M-steps: T where a final E-step follows, else T - 1."""
        return self.iterations - (not self.final_assignment)

    def alpha_k(self, of: Moments, n: int) -> Array:
        """Return the anchor weight of each class, (K,)."""
        if isinstance(self.alpha, str):
            confidence = join_confidence(of.total / n, of.largest, self.confidence, self.normalise_confidence)
            return anchor_weights(confidence, self.alpha)
        return namespace(of.total).full_like(of.total, self.alpha)
