"""MOON: mixture of von Mises-Fisher models with dynamic shrinkage.

J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026.

Symbols:  f_i -> features[i]   t_k = mu'_k -> text[k] (the anchor)   y_ik -> zero_shot[i, k]   z_ik -> z[i, k]
          kappa'_k -> anchor_kappa   A_d(kappa'_k) -> anchor_r   mu_k, kappa_k -> mu, kappa   v_k, R_k -> v, resultant
          lambda_k -> confidence   alpha_k -> alpha   gamma_i -> gamma   beta_k -> beta   omega_ij -> graph
          tau -> 1 / task.logit_scale   m -> neighbours   T -> iterations

The defaults are the released program, which made the paper's numbers; the preset "paper" is what the paper writes.
docs/maths.md explains where they differ, and has the objective, Eq. ple-ours, with the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from moontide.core.arrays import Array, clip, device_type, is_torch_array, like, namespace
from moontide.core.backends import choose, plain
from moontide.core.driver import Run, solve
from moontide.core.graph import Graph
from moontide.core.mixture import VMF, Anchors, Step, VMFClasses
from moontide.core.ple import anchor_weights, class_confidence, concentration, initial_resultant, objective
from moontide.core.rows import BLOCK_ENTRIES, LARGE, NEIGHBOURS, Rows, check_graph
from moontide.errors import OptionError
from moontide.options import option
from moontide.protocols import Method, Plan
from moontide.types import Result, Task

STILL = 4  # roundings: assignments that move by less no longer change


@dataclass(frozen=True)
class MOON(Method):
    """Training-free transduction: class means move away from their text anchors as the batch supports it.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 100, effective_classes=3, seed=0)
    >>> result = MOON().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    >>> bool((result.labels == data.labels).mean() > (result.zero_shot_labels == data.labels).mean())
    True
    """

    citation: ClassVar[str] = "Huang et al., ICML 2026"
    replayed: ClassVar[bool] = True
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
    votes: str = option("plain", "weight of a neighbour's vote: 1 or its gamma", choices=("plain", "gamma"))
    update_mu: bool = option(True, "move the mean directions")
    update_kappa: bool = option(True, "re-estimate the concentrations")
    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    kappa_cap: float = option(500.0, "largest re-estimated kappa (inf: none)", above=0, high=math.inf)
    r_cap: float = option(0.999, "largest mean resultant length (1: none)", above=0, high=1)
    neighbours: int = option(NEIGHBOURS, "m, neighbours of a sample in the graph", low=1)
    graph: str = option("symmetric", "neighbours vote for each other, or only for the sample whose neighbours they are",
                        choices=("symmetric", "one-sided"))  # fmt: skip
    laplacian: str = option("mean", "average or sum the neighbours' votes", choices=("mean", "sum"))
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    log_normaliser: str = option("asymptotic", "log C_d: the paper's large-kappa form or accurate",
                                 choices=("asymptotic", "accurate"))  # fmt: skip
    inverse: str = option("banerjee", "kappa from r: Banerjee's formula or Newton to full accuracy",
                          choices=("banerjee", "newton"))  # fmt: skip
    precision: str = option("full", "products on a GPU: float32, or rounded to 10 bits with float32 sums, faster; half "
                            "also stores z in 16 bits", choices=("full", "tf32", "half"))  # fmt: skip
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
            yield ("neighbours", "graph", "laplacian", "votes"), "with laplacian_weight=0"
        if not self.update_kappa:
            yield ("kappa_cap",), "with update_kappa=False"
        if self.m_steps == 0 or not (self.update_mu or self.update_kappa):
            reason = "without an M-step" if self.m_steps == 0 else "with update_mu=False and update_kappa=False"
            names = ("beta", "update", "alpha", "confidence", "normalise_confidence", "gamma_in_counts")
            yield (*names, "gamma") if self.votes == "plain" else names, reason
        if self.m_steps == 0:
            yield ("update_mu", "update_kappa", "kappa_cap"), "without an M-step"

    def _fit(self, task: Task) -> Result:
        check_graph(task.graph, self.name, self.neighbours)
        on_cpu = device_type(task.features) == "cpu"
        if self.precision != "full" and on_cpu:
            got = f"Got {self.precision!r}; leave it at 'full'."
            raise OptionError(f"The 'precision' option of moon has no effect on a CPU. {got}")
        large = on_cpu and task.n * task.k > LARGE  # in blocks, with probabilities in 16 bits
        backend: Any = plain if large else choose(task.features, task.k)

        def together(features: Array, text: Array) -> tuple[Any, ...]:
            rows = backend.Rows(self, features, text, task.logit_scale, task.graph, half=large, in_memory=not large)
            found = solve(VMFMixture(self, text, task.logit_scale, backend.m_step), rows.call)
            labels, edges = rows.labels if large else None, rows.graph  # labels before rounding to 16 bits
            return *found, *rows.unpack(), labels, rows.gamma, edges.neighbours, edges.weights, edges.recall

        # Newton's method, the accurate normaliser and a graph take constants from the host
        fixed = self.inverse == "banerjee" and self.log_normaliser == "asymptotic" and task.graph is None
        key = (self, task.logit_scale) if fixed else None
        found = backend.run(together, task.features, task.text, key, self.precision)
        *found, z, y, labels, gamma, neighbours, weights, recall = found
        of, graph = Solution(*found), Graph(neighbours, weights, recall)
        details = {"mu": of.mu, "alpha": of.alpha, "gamma": gamma, "anchor_kappa": of.anchor_kappa, "graph": graph}
        energy = of.energy.tolist()
        converged = int(of.changed) == 0
        return Result(z, y, None, energy, len(energy) - 1, converged, of.kappa, of.beta, details, decided=labels)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory beyond the inputs: six N x K arrays, or three of 2-byte numbers and blocks of rows."""
        assignments = 6 * n * k + 5 * 4 * BLOCK_ENTRIES if n * k > LARGE else 6 * n * k * itemsize
        return assignments + itemsize * (2 * n * d + 12 * k * d)

    rows_type: ClassVar[type[Rows]] = plain.Rows

    def mixture(self, text: Array, logit_scale: float) -> VMFMixture:  # type: ignore[override]
        """Return what `driver.solve` needs on shards."""
        return VMFMixture(self, text, logit_scale)

    def plan(self) -> Plan:
        """First pass, an E-step before and after each M-step, and the last terms of the objective."""
        if self.precision != "full":
            raise OptionError(f"The 'precision' option of moon must be 'full' on shards. Got {self.precision!r}.")
        return Plan(self.m_steps + 3, self.m_steps + 1)

    @property
    def m_steps(self) -> int:
        """The number of M-steps: T if a final E-step follows, otherwise T - 1."""
        return self.iterations - (not self.final_assignment)


class Solution(NamedTuple):
    """What is known of the classes at the end."""

    energy: Array  # (T + 1,) L_PLE after each E-step
    changed: Array  # labels that the last E-step changed
    beta: Array  # (K,)
    kappa: Array  # (K,)
    mu: Array  # (K, d)
    alpha: Array  # (K,)
    anchor_kappa: Array  # (K,)


class VMFMixture:
    """Algorithm 1 for `driver.solve`, from sums over the samples. The functions that compute its lines:

    1  ple.zero_shot                              7, 8  ple.prototypes, ple.log_c, ple.e_step
    2  ple.initial_resultant, ple.concentration   9     ple.entropy_weights, in ple.e_step
    3  graph.nearest_neighbours, with the rows    10    formulas.shrinkage
    4  ple.class_confidence, ple.anchor_weights   11    ple.weighted_sums, ple.means
    5  ple.sample_weights                         12    ple.shrink; 13: ple.concentration, formulas.banerjee
    """

    def __init__(
        self, options: MOON, text: Array, logit_scale: float, m_step: Callable[[VMF, Any], VMFClasses] = plain.m_step
    ) -> None:
        self.options, self.text, self.scale, self.m_step = options, text, options.text_weight * logit_scale, m_step
        self.m_steps = options.m_steps
        self.tolerance = STILL * float(namespace(text).finfo(text.dtype).eps)

    def begin(self, run: Run) -> VMFClasses:
        """Initialisation: zero-shot predictions, anchors, graph (made with the rows), class-level weights."""
        o, d, first = self.options, self.text.shape[1], run("first")  # Eq. zero-shot; z = y
        r = clip(like(initial_resultant(first.total, first.along, o.count_epsilon), self.text), 0, o.r_cap)  # Eq. init
        kappa = concentration(r, d, o.inverse, o.r_cap)  # Eq. banerjee, (K,)
        alpha: Array = o.alpha
        if isinstance(o.alpha, str):
            confidence = class_confidence(first.total / first.n, first.largest, o.confidence, o.normalise_confidence)
            alpha = anchor_weights(confidence, o.alpha)  # Eqs. as-lambda and as-alpha, (K,)
        self.vmf = VMF(o, Anchors(self.text, kappa, r, like(alpha, self.text) + 0 * r), self.scale)
        return self.vmf.begin()

    def broadcast(self, classes: VMFClasses) -> tuple[Any, ...]:
        """Return what the E-step (Eqs. likelihood, update-z and pl) needs: the logits of each class."""
        return (classes.scores,)

    def converged(self, step: Step) -> bool:
        """Tell whether no label changed and no assignment moved by more than rounding."""
        return step.moved < self.tolerance and not step.changed

    def update(self, step: Step) -> VMFClasses:
        """M-step: shrinkage beta_k, means v_k, mu_k and kappa_k (Eqs. update-m, update-m-real and banerjee)."""
        return self.m_step(self.vmf, step)

    def terms(self, classes: VMFClasses, step: Step) -> tuple[Array, Array, Array]:
        """Return the terms of L_PLE: of the samples, their Laplacian one E-step earlier, of the classes."""
        return step.free, step.laplacian, classes.kl

    def finish(self, run: Run, classes: VMFClasses, step: Step, trace: list[tuple[Array, Array, Array]]) -> Solution:
        """Return the classes, and Eq. ple-ours after each E-step."""
        free, laplacian, kl = zip(*trace, strict=True)
        laplacian, anchors = (*laplacian[1:], run("finish").value), self.vmf.anchors  # known one E-step later
        energy = objective(_rows(free), _rows(laplacian), anchors.alpha, _rows(kl), self.options.temper)  # (T + 1,)
        return Solution(energy, step.changed, *self.vmf.whole(classes), anchors.alpha, anchors.kappa)


def _rows(parts: Sequence[Any]) -> Array:
    """Put terms of samples (N,) or classes (K,), or sums of them, below each other: (T + 1, N), or (T + 1, 1)."""
    if is_torch_array(parts[0]):
        return namespace(parts[0]).stack(parts)
    return np.array(parts).reshape(len(parts), -1)  # numpy's own `stack` takes several times as long on small ones
