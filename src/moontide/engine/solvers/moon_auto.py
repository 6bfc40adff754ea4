"""AutoMOON as a map over shards: what `methods.moon_auto` takes from all samples is a sum, or a largest value, of each.

Equations and symbols as in `methods.moon_auto`. An iteration maps twice: e_ik needs n_k of all samples, and what a
class scores needs E_k, the sum of all e_ik. So `Shard.weigh` adds up the evidence and S_k of the assignments as they
are, and `Shard.step` makes new ones. Products are made for the classes that are live in some shard, and zero-shot again
in each step, since its N x K cosines are not kept.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moontide.core.arrays import Array, columns, device, like, namespace, put, row_dots, to_numpy
from moontide.core.ple import EPS, entropy_weights, sample_weights, softmax_rows, weighted_sums
from moontide.core.progress import track
from moontide.core.threads import in_threads
from moontide.engine.rows import Rows
from moontide.engine.solvers import Plan, Run
from moontide.engine.sums import LARGER, Doubles, Sums
from moontide.methods.moon_auto import (
    LIVE,
    cosine_to_others,
    excess_of,
    log_presence,
    present_share,
    sample_evidence,
    share_bounds,
)

if TYPE_CHECKING:
    from moontide.methods.moon_auto import AutoMOON

Floats = NDArray[np.float32]


@dataclass
class Surveyed(Sums):
    """What the first pass adds up."""

    n: int
    features: Doubles  # (d,) sum_i f_i
    soft: Doubles  # (K,) n_k = sum_i y_ik
    own: float  # sum_i |y_i|^2
    alike: float  # sum_ij M_ij y_i . y_j
    heard: float  # sum_ij M_ij |y_i|^2
    largest: Doubles = field(metadata=LARGER)  # (K,) max_i y_ik


@dataclass
class Weighed(Sums):
    """What the live classes have of the assignments as they are."""

    evidence: Doubles  # (L,) sum_i e_ik
    sums: Doubles  # (L, d) S_k
    counts: Doubles  # (L,) sum_i gamma_i z_ik


@dataclass
class Assigned(Sums):
    """What an E-step adds up."""

    soft: Doubles  # (K,) n_k = sum_i z_ik
    changed: int  # labels that differ from those before
    largest: Doubles = field(metadata=LARGER)  # (K,) max_i z_ik


class Scene(NamedTuple):
    """What zero-shot says of all samples together."""

    n: int
    low: float  # rho_0
    agreement: float  # h
    centre: Array  # (d,)


class Live(NamedTuple):
    """The classes that some sample has more than a trace of."""

    at: Array  # (L,)
    soft: Array  # (L,) n_k
    expected: float  # samples of an average class that is there, N / (K rho)


class Present(NamedTuple):
    """What the evidence says of them, and their means."""

    proof: Array  # (L,) E_k
    share: float  # rho
    pulled: Array  # (L, d) T_k


class Shard(Rows):
    """Some rows of a task for AutoMOON.

    >>> from moontide import method
    >>> shard = Shard(method("moon_auto"), np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), 100.0)
    >>> shard.first_pass().soft
    array([1., 1., 1.])
    """

    STATE: ClassVar[tuple[str, ...]] = ("z", "labels", "zero_shot_labels", "gamma", "log_evidence", "mates")
    COLUMNS: ClassVar[tuple[str, ...]] = (*Rows.COLUMNS, "unknown")

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        n = len(self.f)
        self.new = self._empty(*self.z.shape, dtype=self.z.dtype)  # (n, K)
        self.gamma, self.log_evidence = self._empty(n), self._empty(n)
        self.mates = self._empty()  # () samples of the same class that a sample can expect

    def first_pass(self) -> Surveyed:
        """Make the zero-shot predictions, and what tells of the presence of classes and how far to trust neighbours."""
        xp = namespace(self.f)
        found = reduce(operator.add, map(self._survey, track(self.blocks, "zero-shot")))
        heard = self.votes_of(xp.ones_like(self.gamma[:, None]))[:, 0]  # (n,) sum_j M_ij, and M is symmetric
        for at in self.blocks:
            y = self._wide(at)  # (b, K)
            found.alike += float(xp.sum(row_dots(y, self._votes(at))))
            found.heard += float(heard[at] @ row_dots(y, y))
        return found

    def weigh(self, live: Live) -> Weighed:
        """Add up the evidence and the features of the live classes."""
        live = self._here(live)
        return reduce(operator.add, (self._weigh(rows, live) for rows in track(self.blocks, "evidence")))

    def step(self, scene: Scene, live: Live, present: Present) -> Assigned:
        """E-step with the classes given."""
        scene, live, present = (self._here(x) for x in (scene, live, present))
        self.mates[...] = (scene.n - 1) / (len(self.text) * scene.low)
        before, self.labels = self.labels, namespace(self.labels).empty_like(self.labels)
        blocks = track(self.blocks, "iteration")
        found = reduce(operator.add, (self._assign(rows, before[rows], scene, live, present) for rows in blocks))
        kept = self.keep and self.z is self.y
        self.z, self.new = self.new, self._empty(*self.z.shape, dtype=self.z.dtype) if kept else self.z
        return found

    def predictions(self) -> dict[str, NDArray[Any]]:
        """Return also how unlike all classes each row is."""
        xp, text = namespace(self.f), self.text
        own = xp.concat([row_dots(self.f[at], text[self.labels[at]]) for at in self.blocks])  # (n,)
        found, y = super().predictions(), xp.exp(self.logit_scale * own - self.log_evidence)  # y: (n,)
        confidence = self._joined(y, like(found["confidence"], y))
        unknown = self.log_evidence - 2 * self.logit_scale * own
        return {**found, "confidence": to_numpy(confidence), "unknown": to_numpy(unknown)}

    def unpack_joined(self) -> tuple[Array, Array, Array]:
        """Return p, y and z as floating-point numbers of the same size, made in place: the shard ends with this."""
        z, y = self.unpack()
        p, xp = self.new.view(z.dtype), namespace(z)  # (n, K)
        for at in self.blocks:
            p[at] = self._joined(*(xp.astype(x[at], xp.float32) for x in (y, z)))
        return p, y, z

    def _joined(self, y: Array, z: Array) -> Array:
        """Return calibrated probabilities: alone a sample is what zero-shot says, with mates what they say."""
        return (y + self.mates * z) / (1 + self.mates)

    def _survey(self, rows: slice) -> Surveyed:
        y, _, self.log_evidence[rows] = self._zero_shot(rows)  # (b, K)
        self.gamma[rows], xp = sample_weights(y), namespace(y)
        features, soft = _double(xp.sum(self.f[rows], axis=0)), _double(xp.sum(y, axis=0))  # (d,), (K,)
        return Surveyed(len(y), features, soft, float(xp.sum(y * y)), 0.0, 0.0, _double(xp.max(y, axis=0)))

    def _weigh(self, rows: slice, live: Live) -> Weighed:
        z, xp = self._floats(columns(self.z[rows], live.at)), namespace(self.f)  # (b, L)

        def block(at: slice) -> Doubles:
            e = sample_evidence(z[_inside(rows, at)], live.soft, live.expected)  # (b, L)
            return _double(xp.sum(e, axis=0))

        evidence = np.sum(in_threads(block, self._cut(rows)), axis=0)  # (L,)
        sums, counts = weighted_sums(z, self.gamma[rows], self.f[rows])  # (L, d), (L,)
        return Weighed(evidence, _double(sums), _double(counts))

    def _assign(self, rows: slice, before: Array, scene: Scene, live: Live, present: Present) -> Assigned:
        f, n, k, xp = self.f[rows], scene.n, len(self.text), namespace(self.f)
        logits = self.logit_scale * (f @ self.text.T)  # (b, K)
        dots, image = f @ present.pulled.T, f @ scene.centre  # (b, L), (b,)
        squares = row_dots(present.pulled, present.pulled)  # (L,)
        absent = log_presence(0 * present.proof, present.share, n, k)  # (L,)

        def block(at: slice) -> tuple[Any, ...]:
            part, old = _inside(rows, at), self._wide(at)  # old: (b, K)
            z, gamma = columns(old, live.at), self.gamma[at][:, None]  # (b, L), (b, 1)
            e = sample_evidence(z, live.soft, live.expected)  # (b, L)
            a, votes = logits[part], scene.agreement * self._votes(at)  # (b, K), (b, K)
            like_it = cosine_to_others(dots[part], squares, (1 - scene.low) * gamma * z) - image[part, None]  # (b, L)
            there = log_presence(present.proof - e, present.share, n, k) - absent  # (b, L)
            a[:, live.at] += self.method.sharpness * like_it + there
            a += votes
            p, labels, _, h, _, _ = softmax_rows(a, votes, old)
            self.new[at], self.labels[at], self.gamma[at] = self._narrow(p), labels, entropy_weights(h, k)
            return _double(xp.sum(p, axis=0)), _double(xp.max(p, axis=0))

        soft, largest = zip(*in_threads(block, self._cut(rows)), strict=True)
        changed = int((self.labels[rows] != before).sum())
        return Assigned(np.sum(soft, axis=0), changed, np.max(largest, axis=0))

    def _here(self, given: Any) -> Any:
        """Bring the arrays of a tuple beside the features."""
        xp, beside = namespace(self.f), device(self.f)
        return given._make(xp.asarray(x, device=beside) if isinstance(x, np.ndarray) else x for x in given)


def _inside(rows: slice, at: slice) -> slice:
    """Return where rows `at` are in a block of `rows`."""
    return slice(at.start - rows.start, at.stop - rows.start)


def _double(x: Array) -> Doubles:
    return to_numpy(x).astype(np.float64)


@dataclass
class Solution:
    """What `solve` knows at the end; the assignments are in the shards."""

    converged: bool
    beta: Floats  # (K,)
    presence: Floats  # (K,)
    share: float
    agreement: float


def plan(method: AutoMOON) -> Plan:
    """First pass, and two calls for each E-step.

    >>> from moontide import method
    >>> plan(method("moon_auto"))
    Plan(calls=23, steps=11)
    """
    return Plan(2 * method.iterations + 3, method.iterations + 1)


def solve(method: AutoMOON, run: Run, text: Floats, logit_scale: float) -> Solution:
    """Alternate evidence and E-steps on shards. `run(name, *arguments)` calls a method of every shard and adds up.

    >>> from moontide import method
    >>> eye = np.eye(3, dtype=np.float32)
    >>> shard = Shard(method("moon_auto"), eye, eye, 100.0)
    >>> solve(method("moon_auto"), lambda name, *given: getattr(shard, name)(*given), eye, 100.0).converged
    True
    """
    k, first = len(text), run("first_pass")
    n = first.n
    bounds = share_bounds(excess_of(first.soft, np.asarray(first.own), n, k))
    centre = first.features / n  # (d,)
    centre = (centre / max(np.linalg.norm(centre), EPS)).astype(text.dtype)
    scene = Scene(n, float(bounds.low), first.alike / max(first.heard, EPS), centre)
    share, now = scene.low, first
    for _ in range(method.iterations + 1):
        at = np.flatnonzero(now.largest > LIVE)  # (L,)
        soft = now.soft[at]
        live = Live(at, soft.astype(text.dtype), n / (k * share))
        found = run("weigh", live)
        proof = found.evidence + np.log1p(soft) / 2  # (L,)
        share = float(present_share(proof, bounds, n, k))
        pulled = found.sums + method.pseudo_count * centre  # (L, d)
        now = run("step", scene, live, Present(proof.astype(text.dtype), share, pulled.astype(text.dtype)))
    none = np.zeros(k)
    beta = put(none, at, found.counts / (found.counts + method.pseudo_count)).astype(text.dtype)
    presence = np.exp(log_presence(put(none, at, proof), share, n, k)).astype(text.dtype)
    return Solution(now.changed == 0, beta, presence, share, scene.agreement)
