"""MOON that finds out how many of the classes are there, and adapts as far as the batch supports it.

Beyond J. Huang et al., "Von Mises-Fisher Mixture Model with Dynamic Shrinkage for Realistic Test-Time Transduction",
ICML 2026; derived in docs/maths.md, measured in docs/auto.md. No option has to be chosen for a task.

Symbols:  f_i -> features[i]   t_k -> text[k]   y_ik -> y   z_ik -> z   gamma_i -> gamma   tau -> 1 / task.logit_scale
          c -> centre (the mean image, unit length)   S_k = sum_i gamma_i z_ik f_i -> sums   alpha -> pseudo_count
          T_k = S_k + alpha c -> pulled   u_ik = (1 - w) gamma_i z_ik -> left_out   w = rho_0 -> low   s -> sharpness
          v -> excess   rho -> share   E_k, e_ik -> evidence   P_ik -> log_presence   h -> agreement

How MOON differs and why (each was measured alone):

    z_ik  ∝  y_ik  exp( s cos(f_i, T_k - u_ik f_i) + votes_ik )  P_ik

- The anchor of a class mean is the mean image, not the text, which lies across the modality gap: a class without
  samples scores as an average image does, no less. The text speaks once, in y.
- What pushes absent classes away is therefore explicit: P_ik, the probability that class k is in the batch, from the
  other samples. Its prior share rho starts from v, how much more often two samples agree than they would if all classes
  were equally frequent.
- A sample is left out of its own class mean as far as classes are absent (w = 1 / (1 + v) of it stays).
- Neighbours count by h, how well the zero-shot predictions of neighbours agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from moontide.core import kernels
from moontide.core.arrays import (
    Array,
    clip,
    column_dots,
    columns,
    device,
    device_type,
    namespace,
    put,
    row_dots,
)
from moontide.core.compiled import loops_for
from moontide.core.graph import Affinity, Graph
from moontide.core.ple import (
    EPS,
    NO_COLUMNS,
    AnchorLogits,
    e_step,
    echo,
    entropy_weights,
    fused,
    weighted_sums,
    zero_shot_moments,
)
from moontide.core.progress import track
from moontide.core.replay import replay
from moontide.core.smoothing import products_of_samples, smoother
from moontide.core.sparse import Resting, worthwhile
from moontide.methods.moon import LARGE
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

LIVE = 0.1  # share of some sample above which a class is looked at
SURE = 1 - 2.0**-20  # z above which the evidence of a sample no longer grows: log 2^20 is proof enough
STEPS = 16  # values of rho that are compared
CERTAIN = 30.0  # nats of evidence above which a class is simply there


class Presence(NamedTuple):
    """What zero-shot says of how many classes are there, as bounds of the share rho."""

    low: Array  # () rho_0: the classes there are equally frequent
    high: Array  # () they differ as much as shares drawn at random


class Scene(NamedTuple):
    """What of a task the logits are made of, besides the classes."""

    n: int
    k: int
    bounds: Presence
    image: Array  # (N,) f_i . c
    sharpness: float


@dataclass(frozen=True)
class AutoMOON(Method):
    """MOON that finds out how many of the classes are there, with better confidences and a score for the unknown.

    >>> from moontide.simulate import simulate
    >>> data = simulate(64, 100, effective_classes=3, seed=0)
    >>> result = AutoMOON().fit_predict(data.features, data.text, logit_scale=data.logit_scale)
    >>> bool((result.labels == data.labels).mean() > (result.zero_shot_labels == data.labels).mean())
    True
    >>> result.unknown.shape
    (64,)
    """

    citation: ClassVar[str] = "beyond Huang et al., ICML 2026"

    sharpness: float = option(10.0, "s, nats of a cosine of 1 between a sample and a class mean", low=0)
    pseudo_count: float = option(0.5, "alpha, samples that the mean image counts for in a class mean", above=0)
    neighbours: int = option(3, "m, neighbours of a sample in the graph", low=1)
    iterations: int = option(10, "T, rounds of E-step and M-step before the last E-step", low=1)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory beyond the inputs: ten N x K arrays, or three of 2-byte numbers for large N."""
        assignments = 6 * n * k if n * k > LARGE else 10 * n * k * itemsize
        return assignments + itemsize * (2 * n * d + 4 * k * d)

    def _fit(self, task: Task) -> Result:
        if task.n * task.k > LARGE and device_type(task.features) == "cpu":
            return self._fit_in_blocks(task)
        out = replay(self._solve, task, "full")
        graph = Graph(out.pop("neighbours"), out.pop("weights"), float(out.pop("recall")) if "recall" in out else 1.0)
        z, y, p, beta, unknown = (out.pop(name) for name in ("z", "y", "p", "beta", "unknown"))
        same, details = bool(out.pop("same")), {**out, "graph": graph}
        return Result(p, y, z, (), self.iterations, same, None, beta, details, unknown)

    def _fit_in_blocks(self, task: Task) -> Result:
        """Solve a task whose N x K arrays are too many for memory as one shard; probabilities come in 16 bits."""
        from moontide.engine.solvers import one_shard

        shard, found = one_shard(self, task)
        unknown = shard.predictions()["unknown"]  # (N,)
        details = {
            "presence": found.presence, "share": found.share, "agreement": found.agreement, "gamma": shard.gamma,
            "graph": shard.graph,
        }  # fmt: skip
        p, y, z = shard.unpack_joined()  # (N, K) each
        result = Result(p, y, z, (), self.iterations, found.converged, None, found.beta, details, unknown)
        result.__dict__["labels"] = shard.labels  # as computed, before rounding to 16 bits
        return result

    def _solve(self, task: Task) -> dict[str, Array]:
        """Alternate M-steps and E-steps. Nothing here waits for a GPU, so that the whole run can be replayed there."""
        xp, f, scale, (n, k) = namespace(task.features), task.features, task.logit_scale, (task.n, task.k)
        on_cpu = device_type(f) == "cpu"
        cosine = f @ task.text.T  # (N, K)
        y, log_evidence, _ = zero_shot_moments(cosine, scale)  # (N, K), (N,)
        presence = share_bounds(excess(y))
        centre = xp.mean(f, axis=0)  # (d,)
        length = clip(xp.linalg.vector_norm(centre), EPS)  # ()
        centre /= length
        gram = products_of_samples(task)  # (N, N)
        graph, votes_of = smoother(task, self.name, self.neighbours, 1.0, gram=gram)
        h = agreement(y, votes_of)  # ()
        votes_of = replace(votes_of, weight=votes_of.weight * h)

        # A class that is no part of any sample to speak of rests: its logit is that of zero-shot and a number that
        # all resting classes share, which is taken from the `values` of the L `live` ones (on a GPU all, with zeros).
        every = xp.ones_like(cosine[0, :])  # (K,)
        rest = AnchorLogits(cosine, scale * every, 0 * every)
        z, labels = y, xp.argmax(y, axis=1)  # (N, K), (N,)
        gamma = entropy_weights(log_evidence - scale * row_dots(y, cosine), k)  # (N,)
        share = presence.low  # ()
        in_kernels = fused(y)
        live: Any = slice(None) if in_kernels else NO_COLUMNS
        scene = Scene(n, k, presence, f @ centre, self.sharpness)

        def dots_of(part: Array) -> tuple[Array, Array]:
            if gram is None:
                return class_dots(f, weighted_sums(part, gamma, f)[0], centre, self.pseudo_count)
            return class_dots_in_span(part * gamma[:, None], gram, self.pseudo_count / (n * length))

        step: Any = None
        few: Resting | None = None  # z, where few classes are live
        for it in track(range(self.iterations + 1), "iterations"):
            if few and few.largest > LIVE:
                z, few = few.dense(), None
            if few is None and not in_kernels:
                live = xp.nonzero(xp.max(z, axis=0) > LIVE)[0] if on_cpu else slice(None)  # (L,)
                text_logits = scale * columns(cosine, live)  # (N, L)
                if it and worthwhile(z, live):
                    few = Resting(rest, z, step.log_sum, live, votes_of)
            if in_kernels:
                proof, share, soft, values = fused_logits(
                    z, gamma, f, cosine, centre, share, presence, scale, self.sharpness, self.pseudo_count
                )  # (K,), (), (K,), (N, K)
            else:
                part = few.z if few else columns(z, live)  # (N, L)
                proof, share, soft, values = live_logits(part, gamma, share, text_logits, dots_of, scene)
            step = few.e_step(values) if few else None
            if step is None:
                z, few = few.dense() if few else z, None
                step = e_step(rest, z, votes_of, live, values)
                z = step.z  # (N, K)
            before, labels, gamma = labels, step.labels, step.gamma
        z = few.dense() if few else z
        mates = (n - 1) / (k * presence.low)  # () samples of the same class that a sample can expect
        p = (y + mates * z) / (1 + mates)  # (N, K)
        own = xp.take_along_axis(cosine, labels[:, None], axis=1)[:, 0]  # (N,)
        return {
            "z": z, "y": y, "p": p, "same": xp.all(labels == before), "unknown": log_evidence - 2 * scale * own,
            "beta": put(0 * every, live, soft / (soft + self.pseudo_count)),
            "presence": put(0 * every + xp.exp(log_presence(0 * share, share, n, k)), live,
                            xp.exp(log_presence(proof, share, n, k))),
            "share": share, "agreement": h, "gamma": gamma, "neighbours": graph.neighbours, "weights": graph.weights,
            **({"recall": xp.asarray(graph.recall)} if graph.recall < 1 else {}),
        }  # fmt: skip


def excess(y: Array) -> Array:
    """v: by how much two samples agree more often than if all classes were equally frequent, 0 or more, ().

    U = sum_{i != j} y_i . y_j / N(N - 1) is the probability that two samples have the same class (Simpson's index,
    without bias), if y is calibrated: 1 / K where all classes are equally frequent. Two samples of one class agree
    with probability q = mean |y_i|^2 at most, so v = (K U - 1) / q, where q, too, is taken above 1 / K.

    >>> import numpy as np
    >>> float(excess(np.eye(4))), float(excess(np.asarray([[1.0, 0, 0, 0]] * 4)))
    (0.0, 3.0)
    """
    xp = namespace(y)
    return excess_of(xp.sum(y, axis=0), xp.sum(row_dots(y, y)), *y.shape)


def excess_of(total: Array, own: Array, n: int, k: int) -> Array:
    """v from sum_i y_i, (K,), and sum_i |y_i|^2, ().

    >>> import numpy as np
    >>> float(excess_of(np.asarray([4.0, 0, 0, 0]), np.asarray(4.0), 4, 4))
    3.0
    """
    if n < 2 or k < 2:
        return 0 * own
    pairs = namespace(total).sum(total**2) - own  # ()
    sure = (own / n - 1 / k) / (1 - 1 / k)
    return clip((k * pairs / (n * (n - 1)) - 1) / clip(sure, EPS), 0)


def share_bounds(v: Array) -> Presence:
    """Between which values rho, the share of the classes that are there, can be for a given v.

    rho K equally frequent classes have K U = 1 / rho, hence rho_0 = 1 / (1 + v). If their shares differ, they are more;
    shares drawn uniformly from the simplex add 1 to K U where all classes are there, and more than that is not granted.

    >>> import numpy as np
    >>> low, high = share_bounds(np.asarray(1.0))
    >>> float(low), float(high)
    (0.5, 1.0)
    """
    return Presence(1 / (1 + v), 1 / (1 + clip(v - 1, 0)))


def agreement(y: Array, votes_of: Affinity) -> Array:
    """h = sum_ij M_ij y_i . y_j / sum_ij M_ij (|y_i|^2 + |y_j|^2) / 2: 1 where neighbours predict the same, ().

    >>> import numpy as np
    >>> votes_of = Graph(np.asarray([[1], [0]]), np.ones((2, 1))).operator(symmetric=True)
    >>> float(agreement(np.eye(2), votes_of)), float(agreement(np.ones((2, 1)), votes_of))
    (0.0, 1.0)
    """
    xp = namespace(y)
    heard = echo(xp.ones_like(y[:, :1]), votes_of)  # (N,) sum_j M_ij, and M is symmetric
    return xp.sum(echo(y, votes_of)) / clip(xp.sum(heard * row_dots(y, y)), EPS)


def evidence(z: Array, expected: Array) -> tuple[Array, Array]:
    """E_k, the log of how much likelier the batch is with class k than without it, and the part e_ik of each sample.

    Let class k have t times the share 1 / (K rho) of an average class that is there, t exponentially distributed, and
    o_ik = z_ik / (1 - z_ik) be the odds of sample i where t = 1. With x = N / (K rho) expected samples,

        exp(E_k) / (1 + x) = int exp(-t (1 + x)) prod_i (1 + t o_ik) dt,

    by Laplace at t_k = (1 + n_k) / (1 + x), n_k = sum_i z_ik: E_k = sum_i e_ik + log(1 + n_k) / 2 with
    e_ik = log(1 + t_k o_ik) - z_ik. Faint z in fewer samples than expected speak against a class; a z near 1 is proof.

    >>> import numpy as np
    >>> evidence(np.asarray([[0.0, 0.1, 0.9]] * 2), np.asarray(5.0))[1].round(2)
    array([ 0.  , -0.06,  2.01])
    """
    xp = namespace(z)
    n = xp.sum(z, axis=0)  # (L,)
    e = sample_evidence(z, n, expected)  # (N, L)
    return e, xp.sum(e, axis=0) + xp.log1p(n) / 2


def sample_evidence(z: Array, n: Array, expected: Array) -> Array:
    """e_ik of some samples, (N, L), from their z and n_k of all, (L,).

    >>> import numpy as np
    >>> sample_evidence(np.asarray([[0.0, 0.5]]), np.ones(2), np.asarray(1.0)).round(3)
    array([[0.   , 0.193]])
    """
    xp = namespace(z)
    t = (1 + n) / (1 + expected)  # (L,)
    z = clip(z, high=SURE)
    e = (t - 1) * z  # (N, L)
    e += 1
    e /= 1 - z
    e = xp.log(e)  # log is several times faster than log1p in numpy
    e -= z
    return e


def present_share(proof: Array, bounds: Presence, n: int, k: int) -> Array:
    """rho with the largest evidence, prod_k [1 - rho + rho exp(E_k) / (1 + N / (K rho))], within its bounds, ().

    1 / (1 + N / (K rho)) is the probability that a class that is there has no sample, its share drawn at random
    around 1 / (K rho). Classes at rest have E_k = 0.

    >>> import numpy as np
    >>> half = Presence(np.asarray(0.5), np.asarray(1.0))
    >>> float(present_share(np.full(2, 9.0), half, 80, 8)), float(present_share(np.full(8, 9.0), half, 80, 8))
    (0.5, 1.0)
    """
    xp = namespace(proof)
    steps = xp.arange(STEPS, dtype=proof.dtype, device=device(proof)) / (STEPS - 1)  # (J,)
    rho = (bounds.low * (bounds.high / bounds.low) ** steps)[:, None]  # (J, 1)
    seen = rho / (1 + n / (k * rho))
    there = xp.sum(xp.log(1 - rho + seen * xp.exp(clip(proof, high=CERTAIN))), axis=1)  # (J,)
    absent = (k - proof.shape[0]) * xp.log(1 - rho + seen)[:, 0]  # (J,)
    return xp.take(rho[:, 0], xp.argmax(there + absent, keepdims=True))[0]


def log_presence(proof: Array, share: Array, n: int, k: int) -> Array:
    """log P = -log(1 + (1 - rho) / rho (1 + (N - 1) / (K rho)) exp(-E)): the class is there, from evidence E.

    >>> import numpy as np
    >>> np.exp(log_presence(np.asarray([0.0, 9.0]), np.asarray(0.5), 41, 8)).round(3)
    array([0.083, 0.999])
    """
    xp = namespace(proof)
    against = xp.exp(-proof)
    against *= (1 - share) / share * (1 + (n - 1) / (k * share))
    against += 1
    return -xp.log(against)


def live_logits(
    z: Array, gamma: Array, share: Array, text_logits: Array, dots_of: Callable[[Array], tuple[Array, Array]],
    scene: Scene,
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Return (E, rho, soft counts, logits), (L,), (), (L,) and (N, L), of the classes that z (N, L) is of.

    The logits are those of the module's equation, less what is the same for all classes at rest. `dots_of` gives the
    `class_dots` of assignments.
    """
    n, k, bounds, image, sharpness = scene
    if loops := loops_for(z):
        limits = (np.float32(LIVE), np.float32(SURE), np.float32(CERTAIN))
        low, high = (float(x) for x in bounds)
        part, t, proof, rho = loops.evidence(z, k, float(share), low, high, *limits, STEPS)
        dots, squares = dots_of(part)
        numbers = (k, low, rho, np.float32(sharpness), *limits[1:])
        loops.presence_logits(dots, part, gamma, text_logits, image, t, proof, squares, *numbers)
        return proof, np.asarray(rho, z.dtype), gamma @ part, dots
    xp = namespace(z)
    part = z * (xp.max(z, axis=0) > LIVE)  # (N, L) the columns may have classes at rest
    e, proof = evidence(part, n / (k * share))  # (N, L), (L,)
    share = present_share(proof, bounds, n, k)  # ()
    dots, squares = dots_of(part)  # (N, L), (L,)
    likeness = cosine_to_others(dots, squares, (1 - bounds.low) * gamma[:, None] * part) - image[:, None]  # (N, L)
    values = sharpness * likeness + text_logits
    values += log_presence(proof - e, share, n, k) - log_presence(0 * share, share, n, k)
    return proof, share, gamma @ part, values


def class_dots(f: Array, sums: Array, centre: Array, pseudo_count: float) -> tuple[Array, Array]:
    """f_i . T_k and |T_k|^2, (N, L) and (L,), with T_k = S_k + alpha c.

    T_k has the direction of the posterior mean of a vMF mean direction with a prior of alpha samples at c.

    >>> import numpy as np
    >>> class_dots(np.eye(2), 3 * np.eye(2), np.asarray([0.6, 0.8]), 0.0)[1]
    array([9., 9.])
    """
    pulled = sums + pseudo_count * centre  # (L, d)
    return f @ pulled.T, row_dots(pulled, pulled)


def class_dots_in_span(weights: Array, gram: Array, pull: Array) -> tuple[Array, Array]:
    """The same from gamma_i z_ik (N, L) and f_i . f_j (N, N): T_k = sum_i (gamma_i z_ik + pull) f_i.

    For N <= d this is less work. `pull` is alpha / |sum_i f_i|.

    >>> import numpy as np
    >>> class_dots_in_span(np.asarray([[1.0], [0.0]]), np.eye(2), np.asarray(1.0))
    (array([[2.],
           [1.]]), array([5.]))
    """
    weights = weights + pull
    dots = gram @ weights  # (N, L)
    return dots, column_dots(weights, dots)


def cosine_to_others(dots: Array, squares: Array, left_out: Array) -> Array:
    """cos(f_i, T_k - u_ik f_i) from f_i . T_k, (N, L), |T_k|^2, (L,), and u, (N, L).

    Nothing but f_i . T_k is N x L x d work: |T_k - u f_i|^2 = |T_k|^2 - 2 u f_i . T_k + u^2.

    >>> import numpy as np
    >>> cosine_to_others(np.full((1, 1), 1.6), np.full(1, 4.0), np.zeros((1, 1)))
    array([[0.8]])
    """
    xp = namespace(dots)
    others = dots - left_out  # (N, L)
    square = others + dots  # (N, L)
    square *= -left_out
    square += squares
    others /= xp.sqrt(clip(square, EPS))
    return others


def fused_logits(z: Array, gamma: Array, f: Array, cosine: Array, centre: Array, share: Array, bounds: Presence,
                 scale: float, sharpness: float, pseudo_count: float) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Return (E, rho, soft counts, logits) of all classes by fused kernels, where these can run.

    The logits lack the constants -cos(f_i, c) and -log P(E = 0), which a softmax over all classes does not see.
    """
    t, proof, rho = kernels.evidence(z, share, *bounds, LIVE, SURE, CERTAIN, STEPS)  # (K,), (K,), ()
    pulled, square, soft = kernels.pull(*weighted_sums(z, gamma, f), t, centre, pseudo_count)  # (K, d), (K,), (K,)
    dots = f @ pulled.T  # (N, K)
    values = kernels.presence_logits(
        dots, z, gamma, cosine, t, proof, square, bounds.low, rho, scale, sharpness, SURE
    )  # (N, K)
    return proof, rho, soft, values
