"""TIDE: transduction that asks the batch how many of the classes are there.

Our own method, beyond J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time
Transduction", ICML 2026. docs/maths.md derives its equations, docs/tide.md measures them.

Symbols:  f_i -> f[i]   t_k -> text[k]   y_ik -> y   z_ik -> z   p_k = mean_i y_ik -> p   gamma_i -> gamma
          W -> votes   v -> excess   rho -> agreement   chi -> corroboration   a -> pseudo_count   w -> density
          a* -> smoothing   pi_k -> presence   mu'_k -> anchor   s -> sharpness   alpha -> anchor_weight
          beta_ik -> beta

TIDE first estimates how concentrated the classes of the batch are, one number v from pairs of zero-shot predictions
(Eq. 1), as far as it outlasts a correction of the text and neighbours in the graph bear it out (Eq. 2). From it follow
the pseudo-count a of a symmetric Dirichlet prior over the class shares and the density w = a / (1 + a), near 0 if few
of the classes are present and near 1 if all are (Eq. 3), and w sets everything else:

    log z_ik = log y_ik - g b_ik + s cos(f_i, R_ik) + (2 - w) (W z)_ik + log(n_k - u z_ik + a*) + const      (Eq. 11)

b is the bias of the text with its weight g (Eq. 5), R_ik the mean of class k, shrunk to its anchor (Eqs. 4, 8) and
without the share u = 1 - w^2 of sample i (Eq. 9), and n_k = sum_i z_ik. Cosines are taken in a metric of the batch
(Eq. 6).

A stream is the same model over the last `memory` samples: a batch is a stream without a past. Known labels are clamped;
what the model gets wrong on them discounts what it believes of the other samples (Eqs. 12, 13).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from moontide.core import tide as eq
from moontide.core.arrays import Array, device, device_type, is_torch_array, like, namespace, to_numpy
from moontide.core.backends import choose, compiled, fused, tide_plain
from moontide.core.driver import Mixture, Run, solve
from moontide.core.graph import Graph
from moontide.core.ple import EPS
from moontide.core.rows import BLOCK_ENTRIES, LARGE, NEIGHBOURS, check_graph
from moontide.core.simplex import one_hot
from moontide.core.tide import NEWTON, Assigned, Labels
from moontide.memory import require_memory
from moontide.options import option
from moontide.protocols import GivenState, OnlineMethod, Plan, State, copy_array, given_inputs, given_shares, per_class
from moontide.types import Result, Task

SAME_SAMPLE = 1e-6  # how far features may differ and still be those of one sample


@dataclass(frozen=True)
class TIDEState(GivenState):
    """The last samples, oldest first, with what is known of them, and the labelled samples before those.

    `cosine` goes with a state that a step made, and is made again where it is not there: it is not saved.
    """

    cosine: ClassVar[Array | None] = None  # (W, K) of the last samples and the text
    recent: Array  # (M, d) features, with rows of zeros in front until M samples were seen
    recent_known: Array = field(metadata=per_class(None, "numbers"))  # (M,) class numbers, -1 where not known
    known_sums: Array = field(metadata=per_class(0))  # (K, d) sum of the labelled features that are no longer recent
    known_counts: Array = field(metadata=per_class(0))  # (K,) their number


@dataclass(frozen=True)
class TIDE(OnlineMethod):
    """Transduction for batches with few of the classes and with all of them, for streams and for known labels.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 100, effective_classes=3, seed=0)
    >>> result = TIDE().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    >>> bool((result.labels == data.labels).mean() > (result.zero_shot_labels == data.labels).mean())
    True
    """

    citation: ClassVar[str] = "ours, beyond Huang et al., ICML 2026"
    replayed: ClassVar[bool] = True
    accepts: ClassVar[frozenset[str]] = frozenset({"known", "class_prior", "negatives"})
    state_type: ClassVar[type[State]] = TIDEState

    memory: int = option(64, "samples of a stream that are labelled together, the latest included", low=0, high=10_000)
    neighbours: int = option(NEIGHBOURS, "m, neighbours of a sample in the graph", low=1)
    sharpness: float = option(8.0, "weight of the cosine to a class mean where few classes are there", low=0)
    iterations: int = option(8, "T, rounds of M-step and E-step after the first E-step", low=1)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory beyond the inputs: twelve N x K arrays, or three of 2-byte numbers and blocks of rows."""
        n += self.memory
        assignments = 6 * n * k + 7 * 4 * BLOCK_ENTRIES if n * k > LARGE else 12 * n * k * itemsize
        return assignments + itemsize * (4 * n * d + 12 * k * d)

    def start(self, task: Task) -> TIDEState:
        """Remember nothing but the class balance and the negatives."""
        xp, k, d = namespace(task.text), task.k, task.d
        kind = {"dtype": task.text.dtype, "device": device(task.text)}
        none = xp.full((self.memory,), -1, dtype=xp.int64, device=device(task.text))
        return TIDEState(
            text=task.text, logit_scale=task.logit_scale, seen=0, recent=xp.zeros((self.memory, d), **kind),
            recent_known=none, known_sums=xp.zeros((k, d), **kind), known_counts=xp.zeros((k,), **kind),
            **given_inputs(task),
        )  # fmt: skip

    def _fit(self, task: Task) -> Result:
        check_graph(task.graph, self.name, self.neighbours)
        shares = None if task.class_prior is None else given_shares(task.class_prior)
        negatives = task.text[:0, :] if task.negatives is None else task.negatives
        known = None if task.known is None else Labels.of(task.known, self.start(task))
        given = {"class_prior": shares, "negatives": negatives, "known": known}
        return self.solve(task, task.features, given, task.graph)

    def advance(self, state: TIDEState, x: Array, known: Array | None = None) -> tuple[TIDEState, Result]:  # type: ignore[override]
        """Label the samples together with the recent ones, so many of those that they are `memory` samples in all."""
        n = x.shape[0]
        old = min(state.seen, max(self.memory - n, 0))
        first = self.memory - old  # of the recent samples, those from here on are labelled again
        every, numbers = with_recent(state, x, known)
        leaving = remember(state, every[:first, :], numbers[:first])
        cosine = recent_cosines(state, x, old)
        found = self.solve(state, every[first:, :], given_by(leaving, numbers[first:]), None, cosine)
        after = replace(moved_on(state, every, numbers, n), seen=state.seen + n)
        object.__setattr__(after, "cosine", cosine)
        columns = ((name, getattr(found, name)) for name in ("probs", "zero_shot", "unknown", "decided"))
        new: dict[str, Any] = {name: x if x is None else x[old:, ...] for name, x in columns}
        return after, replace(found, **new)

    def _follow(self, state: TIDEState, x: Array, known: Array | None) -> TIDEState:  # type: ignore[override]
        """Return the state after some samples, which does not depend on their predictions."""
        return moved_on(state, *with_recent(state, x, known), x.shape[0])

    def _correct(self, state: TIDEState, x: Array, known: Array, before: Array) -> TIDEState:  # type: ignore[override]
        """Label recent samples where they are; add others to the labelled samples of the past, where they were not."""
        xp, recent, past = namespace(x), state.recent_known, []
        for i in range(x.shape[0]):
            same = xp.all(xp.abs(state.recent - x[i, :]) <= SAME_SAMPLE, axis=1)  # (M,)
            recent = xp.where(same, known[i], recent)
            past += [i] if not bool(xp.any(same)) and int(known[i]) != int(before[i]) else []
        chosen = xp.asarray(past, dtype=xp.int64, device=device(x))
        f = xp.take(x, chosen, axis=0)
        state = remember(remember(state, -f, xp.take(before, chosen), -1), f, xp.take(known, chosen))
        return replace(state, recent_known=recent)

    def solve(
        self, of: Task | TIDEState, f: Array, given: dict[str, Any], graph: Graph | None, cosine: Array | None = None
    ) -> Result:
        """Label samples together: in memory, or, where there are too many, in blocks with probabilities in 16 bits.

        The classes are those of a task or a state; `given` is what `TIDEMixture` takes besides. `cosine` (N, K) are the
        cosines of samples and text, if they were computed before.
        """
        (n, k), text, scale, kind = (f.shape[0], of.text.shape[0]), of.text, of.logit_scale, namespace(f)
        shares, labels = given["class_prior"], given["known"]
        large = n * k > LARGE and device_type(f) == "cpu" and labels is None
        if large:
            f, text = to_numpy(f), to_numpy(text)
        elif n * k > LARGE:
            require_memory(12 * n * k * f.dtype.itemsize, f"{self.name} on {n} x {k} at once", f)
        literal = large or labels is not None or (shares is not None and fused(f))  # the equations as they stand
        backend: Any = choose(f, k, "tide_", literal)
        how = {"half": large, "in_memory": not large, "known": labels, "cosine": cosine}

        def together(f: Array, text: Array) -> tuple[Any, ...]:
            rows = backend.TIDERows(self, f, text, scale, graph, **how)
            found = solve(TIDEMixture(self, text, **given, backend=backend), rows.call)
            return *rows.unpack(), rows.unknown, rows.labels if large else None, *found

        fixed = shares is None and graph is None and not len(given["negatives"])
        found = backend.run(together, f, text, (self, scale) if fixed else None)
        z, y, unknown, decided, steps, beta, numbers = found
        names = "changed", "anchor_weight", "sharpness", *eq.Occupancy._fields
        details = dict(zip(names, numbers.tolist() if is_torch_array(numbers) else map(float, numbers), strict=True))
        converged = details.pop("changed") == 0
        if large:
            z, y, unknown, decided, beta = map(kind.asarray, (z, y, unknown, decided, beta))
        return Result(z, y, None, (), steps, converged, None, beta, details, unknown, decided)

    def mixture(self, text: Array, logit_scale: float, **given: Any) -> TIDEMixture:
        """Return what `driver.solve` needs."""
        return TIDEMixture(self, text, **given)

    def plan(self) -> Plan:
        """First pass, comparison, an E-step before and after each M-step, the calibration."""
        return Plan(self.iterations + NEWTON + 5, self.iterations + 1)


TIDE.rows_type = tide_plain.TIDERows


class TIDEMixture(Mixture[Assigned, tuple[int, Array, Any]]):
    """TIDE for `driver.solve`: what it makes of the sums over its samples, equation by equation."""

    def __init__(
        self, options: TIDE, text: Array, class_prior: Any = None, negatives: Any = None, known: Labels | None = None,
        backend: Any = tide_plain,
    ) -> None:  # fmt: skip
        self.options, self.text, self.shares, self.negatives, self.known = options, text, class_prior, negatives, known
        self.m_steps, self.started, self.backend = options.iterations, False, backend

    def begin(self, run: Run) -> Assigned:
        """Zero-shot predictions, how many classes are there, anchors and metric (Eqs. 1 to 7 and 10)."""
        o, text, shares, k, first = self.options, self.text, self.shares, len(self.text), run("first", self.negatives)
        self.n = n = first.n
        scale = eq.metric(first.square / n, first.sums, first.counts, n)  # (d,)
        found = run("compare", first.total, n, scale)
        if shares is None:
            self.occupancy = self.backend.occupancy_of(found, n, k, o.neighbours)
            expected, prior, weight = (n - 1) / k, None, eq.bias_weight(self.occupancy.pseudo_count)
            there = eq.presence(found.near, found.most, first.total, self.occupancy.agreement)  # (K,)
        else:
            self.occupancy, shares = eq.Occupancy.of_shares(shares), like(shares, scale)
            expected, prior, weight = (n - 1) * shares, namespace(scale).log(shares + EPS), 1.0
            there = 0 * first.total + 1
        w, text = self.occupancy.density, like(text, scale)
        slope, offset = eq.anchors(text, first.total / n, first)
        anchor = eq.anchor_rows(text[first.some, ...], slope, offset, scale)  # (H, d)
        self.alpha = eq.anchor_weight(anchor, found.sums, first.counts, n)
        sharpness = o.sharpness * eq.sharpening(w, n / k, self.alpha)
        bias, numbers = (first.total, expected, there, weight), (self.alpha, sharpness, 1 - w * w, 2 - w)
        self.fixed = eq.Fixed(scale, slope, offset, *bias, *numbers, self.occupancy.smoothing, prior).like(self.text)
        if self.known is not None:
            self.known = self.known._replace(sums=self.known.sums / (scale * (found.length / n)))
        none, some = self.fixed.total[:0], namespace(text).arange(0, device=device(self.text))
        return Assigned(self.text[:0, :], none, none, self.fixed.total, none, 0.0, 0, 0, 0.0, some)

    def broadcast(self, classes: Assigned) -> tuple[eq.Fixed, Assigned]:
        """Return what the E-step of Eq. 11 needs; in the first, classes are at their anchors and none is left out."""
        return self.fixed if len(classes.hard) else self.fixed._replace(left_out=0.0), classes

    def converged(self, step: Assigned) -> bool:
        """Tell whether no label changed and no assignment moved by much, after the first E-step."""
        before, self.started = self.started, True
        return before and step.moved == 0 and step.changed == 0

    def update(self, step: Assigned) -> Assigned:
        """Eq. 8: the classes with labels, from the sums of their samples and of labelled samples of the past."""
        if isinstance(step.some, slice):  # of all classes, as on shards
            step = step.like(self.text)
            if not is_torch_array(step.hard):
                some = step.hard.nonzero()[0]
                step = replace(step, some=some, sums=step.sums[some], soft=step.soft[some], hard=step.hard[some])
        if self.known is not None:
            sums, more = self.known.sums[step.some, ...], self.known.counts[step.some]
            step = replace(step, sums=step.sums + sums, soft=step.soft + more, hard=step.hard + more)
        return step

    def finish(self, run: Run, classes: Assigned, step: Assigned, trace: list[None]) -> tuple[int, Array, Any]:
        """Eq. 14, the calibration; returns the rounds, beta (K,), and the numbers that `solve` reports."""
        run("finish", self.backend.power(run, step, self.occupancy.density, self.n) if step.free else None)
        hard = like(step.labels, self.text) + (0 if self.known is None else self.known.counts)  # (K,)
        numbers: Any = step.changed, self.alpha, self.fixed.sharpness, *self.occupancy
        if is_torch_array(step.changed):  # on a GPU, where all are waited for at once
            numbers = namespace(step.changed).stack(numbers)
        return len(trace) - 1, hard / (hard + self.alpha), numbers


def given_by(state: TIDEState, known: Array) -> dict[str, Any]:
    """Return what `TIDEMixture` takes of a state besides the classes, for samples of which some labels are `known`."""
    shares = given_shares(state.class_prior)
    return {"class_prior": shares, "negatives": state.negatives, "known": Labels.of(known, state)}


def with_recent(state: TIDEState, x: Array, known: Array | None) -> tuple[Array, Array]:
    """Return the recent samples and then some more, (M + n, d), and their known labels, -1 where there are none."""
    xp, n = namespace(x), x.shape[0]
    known = xp.full((n,), -1, dtype=xp.int64, device=device(x)) if known is None else known
    return xp.concat([state.recent, x]), xp.concat([state.recent_known, known])


def moved_on(state: TIDEState, every: Array, known: Array, n: int) -> TIDEState:
    """Return the state after n samples, from the recent ones and these, (M + n, d), and their known labels."""
    after = remember(state, every[:n, :], known[:n])
    return replace(after, recent=copy_array(every[n:, :]), recent_known=copy_array(known[n:]))


def remember(state: TIDEState, f: Array, known: Array, count: int = 1) -> TIDEState:
    """Return the state with labelled samples (n, d) added to the class sums; with -f and -1 as `count`, taken out."""
    xp = namespace(f)
    if not bool(xp.any(known >= 0)):
        return state
    hot = one_hot(known, state.text.shape[0], f)  # (n, K)
    sums, counts = state.known_sums + hot.T @ f, state.known_counts + count * xp.sum(hot, axis=0)
    return replace(state, known_sums=sums, known_counts=counts)


def recent_cosines(state: TIDEState, x: Array, old: int) -> Array | None:
    """Return the cosines of the last `old` samples and of new ones to the text, (old + n, K), for compiled loops.

    Unlike a product of matrices, they do not depend on how many samples came at a time. None without loops, without
    samples before these, or with so many that keeping their cosines would take more memory than the text.
    """
    xp, past = namespace(x), state.cosine
    if compiled(x) is None or not 0 < old < state.text.shape[1]:
        return None
    if past is None or len(past) < old:
        past = xp.vecdot(state.recent[len(state.recent) - old :, None, :], state.text)
    return xp.concat([past[len(past) - old :, :], xp.vecdot(x[:, None, :], state.text)])
