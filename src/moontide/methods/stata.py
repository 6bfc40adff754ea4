"""StatA: a Gaussian mixture whose classes are anchored to the statistics of their text.

M. Zanella, C. Fuchs, C. De Vleeschouwer, I. Ben Ayed, "Realistic Test-Time Adaptation of Vision-Language Models",
CVPR 2025. Equations as in the MOON paper, app. "Revisiting StatA".

Symbols:  f_i -> features[i]   t_k = mu'_k -> text[k]   Sigma' -> anchor   log y_ik -> log_y   log z_ik -> log_z
          v_k -> v   T_k -> class_variance   beta_k -> beta   mu_k -> mu   Sigma_k -> spread   omega_ij -> graph
          tau -> 1 / task.logit_scale   m -> neighbours   T -> iterations

The defaults are the published program, which made the numbers of both papers. Beyond the equations it divides the
log-likelihood by 50 (`temper`) and the Laplacian by 2m, repeats the assignment 5 times with one likelihood
(`inner_iterations`), scales v_k and then mu_k to unit length, and has one more E-step after the last M-step.

For more than 2500 samples that program gets Sigma' wrong (see `core.gaussian.row_weights`). The equation is followed
here for any N; `faithful=True` repeats the defect, and changes nothing up to 2500 samples. Where the program gives NaN,
in float32 for a class whose z_ik all underflow or a dimension without variance, nothing does here: class means are
formed from log z, and variances have a floor of 1e-6 / d.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from moontide.core.arrays import Array, affine, class_counts, like, namespace, row_dots, unit_rows
from moontide.core.driver import Run, solve
from moontide.core.gaussian import FLOOR, row_weights
from moontide.core.ple import means, shrink, shrinkage
from moontide.core.rows import NEIGHBOURS, Rows, check_graph
from moontide.core.simplex import log_softmax, softmax, softmax_evidence_
from moontide.core.sums import Doubles, Sums
from moontide.errors import OptionError
from moontide.options import option
from moontide.protocols import Method, Plan
from moontide.types import Result, Task

TINY = 1e-20  # probabilities below count for nothing, and products of them take a hundred times as long


@dataclass
class Centre(Sums):
    """The sum of the features."""

    n: int
    sums: Doubles  # (d,)


@dataclass
class Moments(Sums):
    """What the samples add up, f around their mean."""

    n: int
    sums: Doubles  # (K, d) sum_i z_ik f_i
    squares: Doubles  # (K, d) sum_i z_ik f_i^2; of zero-shot predictions (1, d) sum_i f_i^2
    soft: Doubles  # (K,) sum_i z_ik
    counts: Doubles  # (K,) labels of each class
    changed: Any  # labels that differ from the z before


class StatARows(Rows):
    """The samples of StatA: scores are quadratic in f, which is taken around the mean of all samples.

    >>> import numpy as np
    >>> rows = StatARows(StatA(), np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), 100.0)
    >>> rows.mean().sums
    array([1., 1., 1.])
    """

    SCORES: ClassVar[int] = 1

    around: tuple[Array, Array] | None = None

    def mean(self) -> Centre:
        """Add up the features."""
        found: Centre = self._add_up(lambda at: Centre(at.stop - at.start, self.f[at].sum(0)), "mean")
        return found

    def first(self, centre: Array) -> Moments:  # type: ignore[override]
        """Make the zero-shot predictions and what the anchor variance needs of them."""
        centre = like(centre, self.f)
        weight = len(self.f) * row_weights(self.f, self.method.faithful)  # (n,) of 1, but for `faithful`

        def block(at: slice) -> Moments:
            y, _, _ = self._zero_shot(at)
            f, w = self.f[at] - centre, weight[at]  # (b, d), (b,)
            return Moments(len(y), y.T @ (w[:, None] * f), (w @ f**2)[None, :], w @ y, 0 * y[0], 0)

        found: Moments = self._add_up(block, "zero-shot")
        if self.keep and self.z.dtype == self.f.dtype:
            self.y, self.z = self.z, 1 * self.z
        return found

    def step(self, centre: Array, linear: Array, quadratic: Array, offset: Array) -> Moments:
        """E-step with scores f linear' - f^2 quadratic' + offset, repeated; then the sums for the next M-step."""
        centre, linear, quadratic, offset = (like(x, self.f) for x in (centre, linear, quadratic, offset))
        xp, k, before = namespace(self.f), len(self.text), self.labels
        scores = self._empty(len(self.f), k)  # (n, K)
        for at in self.blocks:
            f, square = self._centred(at, centre)  # (b, d), (b, d)
            scores[at] = affine(f, linear, offset)
            scores[at] -= square @ quadratic.T  # (b, K) or (b, 1)
        new = self._empty(len(self.f), k, dtype=self.z.dtype)
        for _ in range(self.method.inner_iterations - 1):
            for at in self.blocks:
                self._assign(at, scores, new)
            self.z, new = new, self.z
        labels = xp.empty_like(before)

        def block(at: slice) -> Moments:
            (f, square), p = self._centred(at, centre), self._assign(at, scores, new)  # (b, d), (b, d), (b, K)
            p *= p >= TINY
            labels[at] = xp.argmax(p, axis=1)
            counts = xp.astype(class_counts(labels[at], k), self.f.dtype)
            return Moments(len(p), p.T @ f, p.T @ square, p.sum(0), counts, (labels[at] != before[at]).sum())

        found: Moments = self._add_up(block, "iteration")
        self.z, self.labels = new, labels
        return found

    def _centred(self, rows: slice, centre: Array) -> tuple[Array, Array]:
        """Return some features around the mean, and their squares, (b, d) each; in memory they are kept."""
        if not self.alone:
            f = self.f[rows] - centre
            return f, f**2
        if self.around is None:
            f = self.f - centre
            self.around = f, f**2
        return self.around

    def _assign(self, rows: slice, scores: Array, new: Array) -> Array:
        """Eq. update-z of some rows, written to `new`: softmax(scores + votes), (b, K)."""
        wide = new.dtype == self.f.dtype
        p = new[rows] if wide else self._empty(rows.stop - rows.start, len(self.text))  # (b, K)

        def part(at: slice) -> tuple[Any, ...]:
            logits = self._votes(at)
            logits += scores[at]
            p[at.start - rows.start : at.stop - rows.start] = softmax_evidence_(logits)[0]
            return ()

        self._in_parts(part, rows)
        if not wide:
            new[rows] = self._narrow(p)
        return p


@dataclass(frozen=True)
class StatA(Method):
    """Transduction with class means and variances that are shrunk towards text by one weight alpha for all classes.

    >>> import numpy as np
    >>> features = np.asarray([[1.0, 0.1, 0.5], [0.9, 0.2, 0.5], [0.2, 0.9, 0.5]])
    >>> result = StatA().fit_predict(features, np.eye(3))
    >>> result.labels, result.beta.round(2)
    (array([0, 0, 1]), array([0.67, 0.5 , 0.  ]))
    """

    citation: ClassVar[str] = "Zanella et al., CVPR 2025"

    beta: str = option("hard", "counts in beta_k: argmax labels or soft assignments", choices=("hard", "soft"))
    alpha: float = option(1.0, "anchor weight, the same for all classes", low=0)
    temper: float = option(50.0, "what the log-likelihood is divided by in the E-step", above=0)
    neighbours: int = option(NEIGHBOURS, "m, neighbours of a sample in the graph", low=1)
    laplacian_weight: float = option(1.0, "weight of the neighbours' votes", low=0)
    text_weight: float = option(1.0, "weight of the zero-shot prediction in the E-step", low=0)
    iterations: int = option(10, "T, M-steps; an E-step is before each and after the last", low=1)
    inner_iterations: int = option(5, "updates of the assignments in an E-step", low=1)
    faithful: bool = option(False, "above 2500 samples, repeat the published program's error in the anchor variance")

    def inert(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Name the options that the others switch off."""
        if self.laplacian_weight == 0:
            yield ("neighbours", "inner_iterations"), "with laplacian_weight=0"

    def _fit(self, task: Task) -> Result:
        check_graph(task.graph, self.name, self.neighbours)
        rows = StatARows(self, task.features, task.text, task.logit_scale, task.graph, alone=True)
        found = solve(self.mixture(task.text, task.logit_scale), rows.call)
        details = {"mu": found.mu, "spread": found.spread}
        return Result(*rows.unpack(), None, (), self.iterations, found.converged, None, found.beta, details)

    rows_type: ClassVar[type[Rows]] = StatARows

    def mixture(self, text: Array, logit_scale: float) -> GaussianMixture:  # type: ignore[override]
        """Return what `driver.solve` needs."""
        return GaussianMixture(self, text, logit_scale)

    def plan(self) -> Plan:
        """Mean, first pass, and an E-step before and after each M-step.

        >>> StatA().plan()
        Plan(calls=13, steps=11)
        """
        if self.faithful:
            raise OptionError("The 'faithful' option of stata depends on the order of rows; leave it out on shards.")
        return Plan(self.iterations + 3, self.iterations + 1)


class Mixture(NamedTuple):
    """The parameters of a mixture between two E-steps.

    >>> Mixture(mu=[[1.0, 0.0]], spread=[[0.1, 0.1]], beta=[0.5]).beta
    [0.5]
    """

    mu: Array  # (K, d)
    spread: Array  # variances (K, d), or (1, d) for all classes; in a von Mises-Fisher mixture concentrations (K,)
    beta: Array  # (K,) share of the batch in each mean


class Solution(NamedTuple):
    """What is known of the classes at the end; the assignments are with the samples."""

    converged: bool
    beta: Array  # (K,)
    mu: Array  # (K, d)
    spread: Array  # (K, d)


class GaussianMixture:
    """StatA for `driver.solve`: what it makes of the sums over its samples."""

    def __init__(self, options: StatA, text: Array, logit_scale: float) -> None:
        self.options, self.text, self.scale = options, text, options.text_weight * logit_scale
        self.m_steps = options.iterations

    def begin(self, run: Run) -> Mixture:
        """App. "Revisiting StatA": Sigma'_j = sum_ik y_ik (f_ij - t_kj)^2 / N, the square expanded."""
        mean = run("mean")
        self.centre = mean.sums / mean.n  # (d,)
        first = run("first", self.centre)
        self.t = like(self.text, self.centre)
        self.scaled_text = self.scale * self.t
        far = self.t - self.centre  # (K, d)
        anchor = (first.squares + first.soft @ far**2 - 2 * (far * first.sums).sum(0)) / first.n  # (1, d)
        self.anchor = namespace(anchor).clip(anchor, min=FLOOR / self.text.shape[1])
        return Mixture(self.t, self.anchor, 0 * self.t[:, 0])

    def shown(self, classes: Mixture) -> tuple[Array, ...]:
        """Fold zero-shot logits and the tempered Gaussian likelihood into f linear' - f^2 quadratic' + offset."""
        temper, away, spread = self.options.temper, classes.mu - self.centre, classes.spread
        scaled = away / spread  # (K, d)
        inside = row_dots(away, scaled) + namespace(spread).log(spread).sum(1)  # (K,)
        offset = self.scale * (self.t @ self.centre) - inside / (2 * temper)  # (K,)
        scaled /= temper
        scaled += self.scaled_text
        return self.centre, scaled, (0.5 / temper) / spread, offset

    def still(self, step: Moments) -> bool:
        """Run all iterations, as the published program does."""
        return False

    def update(self, classes: Mixture, step: Moments) -> Mixture:
        """Eq. stata-shrinkage: means and variances of the classes from their statistics."""
        o, t, xp = self.options, self.t, namespace(self.t)
        beta = shrinkage(step.soft if o.beta == "soft" else step.counts, o.alpha)  # (K,)
        v = means(step.sums, step.soft, 0.0)  # v_k around the centre, (K, d)
        mean = v + self.centre
        mu = unit_rows(shrink(unit_rows(mean), beta, t))  # mu_k = beta_k v_k + (1 - beta_k) t_k, (K, d)
        within = means(step.squares, step.soft, 0.0) - v**2  # (K, d)
        variance = xp.clip(within, min=0.0) + (mean - mu) ** 2  # T_k, (K, d)
        spread = shrink(variance, beta, self.anchor + (t - mu) ** 2)  # Sigma_k, (K, d)
        return Mixture(mu, xp.clip(spread, min=FLOOR / t.shape[1]), beta)

    def terms(self, classes: Mixture, step: Moments) -> None:
        """Keep nothing: StatA has no objective here."""

    def finish(self, run: Run, classes: Mixture, step: Moments, trace: list[None]) -> Solution:
        """Return the classes."""
        mu, spread, beta = (like(x, self.text) for x in classes)
        return Solution(int(step.changed) == 0, beta, mu, spread)


def alternate(
    log_y: Array,
    mixture: Mixture,
    log_likelihood: Callable[[Mixture], Array],
    m_step: Callable[[Array], Mixture],
    votes_of: Callable[[Array], Array],
    *,
    text_weight: float,
    temper: float,
    iterations: int,
    inner_iterations: int,
) -> Result:
    """Run `iterations` M-steps, an E-step before each and after the last, from the zero-shot log y and a mixture.

    `log_likelihood` gives log p_ik of a mixture as a new array (N, K), which is overwritten; `m_step` takes log z.

    >>> import numpy as np
    >>> log_y, start = np.log([[0.5, 0.5]]), Mixture(0, np.asarray([[0.0, 1.0]]), 0)
    >>> still = dict(text_weight=1.0, temper=1.0, iterations=1, inner_iterations=1)
    >>> result = alternate(log_y, start, lambda m: 1 * m.spread, lambda log_z: start, np.zeros_like, **still)
    >>> result.probs.round(3)
    array([[0.269, 0.731]])
    """
    xp, log_z = namespace(log_y), log_y

    def e_step(verb: str, mixture: Mixture) -> Array:
        nonlocal log_z
        scores = log_likelihood(mixture)  # (N, K)
        scores /= temper
        scores += text_weight * log_y
        log_z = assignments(scores, votes_of, log_z, inner_iterations)
        return log_z

    found, (before, labels) = solve(Alternation(mixture, m_step, iterations), e_step)
    return Result(
        probs=softmax(log_z),
        zero_shot=xp.exp(log_y),
        n_iter=iterations,
        converged=bool(xp.all(before == labels)),
        beta=found.beta,
        details={"mu": found.mu, "spread": found.spread},
    )


@dataclass
class Alternation:
    """A mixture for `driver.solve` whose M-step looks at all assignments, log z (N, K), in memory."""

    start: Mixture
    m_step: Callable[[Array], Mixture]
    m_steps: int

    def begin(self, run: Run) -> Mixture:
        """Return the classes before the first E-step."""
        return self.start

    def shown(self, classes: Mixture) -> tuple[Mixture]:
        """Return all of them."""
        return (classes,)

    def still(self, step: Array) -> bool:
        """Run all iterations, as the published programs do."""
        return False

    def update(self, classes: Mixture, step: Array) -> Mixture:
        """Return the classes that follow from log z."""
        return self.m_step(step)

    def terms(self, classes: Mixture, step: Array) -> Array:
        """Keep the labels, (N,)."""
        return namespace(step).argmax(step, axis=1)

    def finish(self, run: Run, classes: Mixture, step: Array, trace: list[Array]) -> tuple[Mixture, list[Array]]:
        """Return the classes, and the labels of the last two E-steps."""
        return classes, trace[-2:]


def assignments(scores: Array, votes_of: Callable[[Array], Array], log_z: Array, inner_iterations: int) -> Array:
    """Eq. update-z, repeated with the same scores = log prior + log p / temper: log z = scores + votes(z), normalised.

    >>> import numpy as np
    >>> np.exp(assignments(np.log([[0.1, 0.3]]), np.zeros_like, np.zeros((1, 2)), 5)).round(3)
    array([[0.25, 0.75]])
    """
    logits = log_z
    for it in range(inner_iterations):
        z = softmax_evidence_(logits)[0] if it else softmax(logits)  # (N, K)
        logits = votes_of(z)
        logits += scores
    return log_softmax(logits)


def counted(z: Array, gamma: Array, beta: str) -> Array:
    """Return the n_k that beta_k is made of, (K,): soft, sum_i gamma_i z_ik, or counts of labels, which gamma leaves.

    >>> import numpy as np
    >>> counted(np.asarray([[0.2, 0.8]]), np.ones(1), "hard")
    array([0., 1.])
    """
    xp = namespace(z)
    if beta == "soft":
        return gamma @ z
    return xp.astype(class_counts(xp.argmax(z, axis=1), z.shape[1]), z.dtype)
