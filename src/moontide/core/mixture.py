"""The class distributions of a von Mises-Fisher mixture: anchors V'_k, distributions V_k, what samples see of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from moontide.core.arrays import Array, clip, column_dots, namespace, put
from moontide.core.ple import anchor_kl, concentration, log_c
from moontide.core.sums import ADDED, LARGER, SAME, Doubles, Sums

ALL = slice(None)


@dataclass
class First(Sums):
    """What the anchors need of the zero-shot predictions, (K,) each."""

    n: int
    total: Doubles  # sum_i y_ik
    along: Doubles  # sum_i y_ik cosine_ik
    largest: Doubles = field(metadata=LARGER)  # max_i y_ik

    @classmethod
    def of(cls, y: Array, cosine: Array) -> First:
        """Add up zero-shot predictions y (N, K) class by class."""
        xp = namespace(y)
        return cls(len(y), xp.sum(y, axis=0), column_dots(y, cosine), xp.max(y, axis=0))


@dataclass
class Step(Sums):
    """What an E-step adds up, of the L classes that have samples: the others stay at their anchors."""

    sums: Array  # (L, d) sum_i gamma_i z_ik f_i
    soft: Array  # (L,) sum_i gamma_i z_ik
    counts: Array  # (L,) what beta is made of
    free: Any = field(metadata=ADDED)  # free energy of the samples, (N,), or their sum
    laplacian: Any = field(metadata=ADDED)  # gamma_i z_i . (M z)_i of the z before, (N,), or their sum
    changed: Any  # labels that differ from the z before
    moved: float = field(metadata=LARGER)  # the largest change of z, where it is known
    present: Any = field(default_factory=lambda: ALL, metadata=SAME)  # (L,) class numbers; a slice: all


@dataclass
class Laplacian(Sums):
    """The Laplacian term of the objective."""

    value: Any = field(metadata=ADDED)  # gamma_i z_i . (M z)_i, (N,), or their sum


class Anchors(NamedTuple):
    """The anchor distribution V'_k of each class and how strongly it holds."""

    text: Array  # (K, d) mu'_k = t_k
    kappa: Array  # (K,) kappa'_k
    r: Array  # (K,) A_d(kappa'_k)
    alpha: Array  # (K,) alpha_k


class Scores(NamedTuple):
    """What an E-step needs of the classes: the logits of the present ones and those of the others, at their anchors."""

    present: Any  # (L,) class numbers, or a slice: all
    slope: Array  # (K,) of a class at its anchor the logit is slope_k cosine_ik + at_anchor_k
    at_anchor: Array  # (K,)
    prototypes: Array | None = None  # (L, d); None: all classes are at their anchors
    offset: Array | None = None  # (L,)
    values: Array | None = None  # (N, L) the logits themselves, where they are known


class VMFClasses(NamedTuple):
    """The distributions V_k of the present classes, (L,) each."""

    scores: Scores
    beta: Array
    kappa: Array
    kl: Array  # (K,) KL(V'_k || V_k) of all classes
    mu: Any  # (L, d), or a function that returns it


class VMF:
    """The mixture of a task, with the options of MOON: its anchors, and concentrations of classes without samples."""

    def __init__(self, options: Any, anchors: Anchors, scale: float) -> None:
        self.options, self.anchors, self.scale, self.d = options, anchors, scale, int(anchors.text.shape[1])
        self.at_anchor = self.logits_at(anchors.kappa)  # (K,), (K,)
        self._some: tuple[Any, Anchors] = (ALL, anchors)  # the classes whose anchors were asked for last, and these

    def anchors_of(self, present: Array | slice) -> Anchors:
        """Return the anchors of some of the classes."""
        if present is not self._some[0]:
            self._some = present, Anchors(*(x[present] for x in self.anchors))
        return self._some[1]

    def kappa(self, r: Array) -> Array:
        """Eq. banerjee: the concentrations of resultant lengths r, capped, (L,)."""
        o = self.options
        return clip(concentration(r, self.d, o.inverse, o.r_cap), high=o.kappa_cap)

    def logits_at(self, kappa: Array) -> tuple[Array, Array]:
        """Return slope and offset, log C_d(kappa) / temper, of the logits of classes at their anchors, (K,) each."""
        o = self.options
        return self.scale + kappa / o.temper, log_c(self.d, kappa, o.log_normaliser) / o.temper

    def begin(self) -> VMFClasses:
        """Return the classes before the first E-step, all at their anchors."""
        text, kappa, r, _ = self.anchors
        return VMFClasses(Scores(ALL, *self.at_anchor), 0 * r, kappa, 0 * r, text)

    def classes(self, present: Any, beta: Array, kappa: Array, kl: Array, mu: Any, *logits: Any) -> VMFClasses:
        """Return the classes after an M-step; `logits` are prototypes and offset of the present ones, or values."""
        if isinstance(present, slice):  # there are no others
            return VMFClasses(Scores(present, *self.at_anchor, *logits), beta, kappa, kl, mu)
        return VMFClasses(Scores(present, *self.absent[2:], *logits), beta, kappa, put(self.absent[1], present, kl), mu)

    @cached_property
    def absent(self) -> tuple[Array, Array, Array, Array]:
        """kappa, KL, slope and offset of classes without samples: beta is 0, so that only kappa may have moved."""
        o, anchors, kappa = self.options, self.anchors, self.anchors.kappa
        one = namespace(kappa).ones_like(kappa)
        if o.update_kappa:  # simplified: A_d is taken as 1
            kappa = self.kappa(anchors.r) if o.update == "exact" else one * self.kappa(one[:1])  # (K,)
        kl = anchor_kl(one, anchors.kappa, anchors.r, kappa, self.d, o.log_normaliser)
        return kappa, kl, *self.logits_at(kappa)

    def whole(self, classes: VMFClasses) -> tuple[Array, Array, Array]:
        """Return beta (K,), kappa (K,) and mu (K, d) of all classes."""
        present, mu = classes.scores.present, classes.mu() if callable(classes.mu) else classes.mu
        if isinstance(present, slice):
            return classes.beta, classes.kappa, mu
        kappa, mu = put(self.absent[0], present, classes.kappa), put(self.anchors.text, present, mu)
        return put(0 * kappa, present, classes.beta), kappa, mu
