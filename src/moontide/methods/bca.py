"""BCA: Bayesian class adaptation, class centres and class distributions that follow a stream.

"Bayesian Test-Time Adaptation for Vision-Language Models", CVPR 2025, after the port in the benchmark TTABC.

Symbols:  x -> x   mu_k -> centres[k]   R -> beliefs, row k the class distribution of centre k   f -> f
          t1, n1 -> centre_threshold, centre_count   t2, n2 -> belief_threshold, belief_count
          counts c1_k, c2_k -> centre_counts[k], belief_counts[k]

    s = softmax_k(mu_k . x / tau),  f = s'R,  k = argmax f,  m = max f
    m > t1:  mu_k <- (c1_k mu_k + x) / (c1_k + 1), to unit length,  c1_k <- c1_k + 1
    m > t2:  R_k <- (c2_k R_k + f) / (c2_k + 1),  c2_k <- c2_k + 1

The centres start at the text, R at the identity, and the counts at n1 and n2. A sample is predicted, then learnt from.
The defaults are the one setting of a public benchmark (TTABC) for all data sets; its n1 = 20000 leaves the centres
almost where they are, so that what changes predictions is R. The published constants of each data set are not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from moontide.core.arrays import Array, device, namespace, unit_rows
from moontide.core.simplex import softmax, zero_shot
from moontide.options import option
from moontide.protocols import OnlineMethod, State, copy_array, per_class
from moontide.types import Result, Task


@dataclass(frozen=True)
class BCAState(State):
    """Class centres, the class distribution of each, and how many samples each was made of."""

    centres: Array = field(metadata=per_class(0))  # (K, d) unit rows
    beliefs: Array = field(metadata=per_class(0, "classes"))  # (K, K) rows sum to 1
    centre_counts: Array = field(metadata=per_class(0))  # (K,)
    belief_counts: Array = field(metadata=per_class(0))  # (K,)


@dataclass(frozen=True)
class BCA(OnlineMethod):
    """Likelihoods from moving class centres, weighted by the class distribution of each centre.

    >>> import numpy as np
    >>> BCA().fit_predict(np.eye(3), np.eye(3)).labels
    array([0, 1, 2])
    """

    citation: ClassVar[str] = "BCA, CVPR 2025"
    state_type: ClassVar[type[State]] = BCAState

    centre_threshold: float = option(0.05, "t1, probability above which a sample moves the centre of its class", low=0)
    centre_count: float = option(20000.0, "n1, weight of the text in a centre, in samples", above=0)
    belief_threshold: float = option(
        0.65, "t2, probability above which a sample updates the beliefs of its centre", low=0
    )
    belief_count: float = option(1.0, "n2, weight of the identity in the class distributions, in samples", above=0)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus R and its copies."""
        return super().peak_bytes(n, k, d, itemsize) + itemsize * 3 * k * k

    def start(self, task: Task) -> BCAState:
        """Make the centres of the text, each standing for its own class."""
        xp, kind = namespace(task.text), {"dtype": task.text.dtype, "device": device(task.text)}
        counts = (xp.full((task.k,), n, **kind) for n in (self.centre_count, self.belief_count))  # (K,), (K,)
        return BCAState(task.text, task.logit_scale, 0, copy_array(task.text), xp.eye(task.k, **kind), *counts)

    def _step(self, state: BCAState, x: Array) -> tuple[BCAState, Result]:  # type: ignore[override]
        xp = namespace(x)
        after, rows = state.fork(), []  # the copy that this step writes to
        for i in range(x.shape[0]):
            f = softmax(state.logit_scale * (after.centres @ x[i])) @ after.beliefs  # (K,)
            rows.append(f)
            k = int(xp.argmax(f))
            m = float(f[k])
            if m > self.centre_threshold:
                after.centres[k] = unit_rows(learnt(after.centres[k], after.centre_counts[k], x[i]))
                after.centre_counts[k] += 1
            if m > self.belief_threshold:
                after.beliefs[k] = learnt(after.beliefs[k], after.belief_counts[k], f)
                after.belief_counts[k] += 1
        f = xp.stack(rows)  # (n, K)
        return after, Result(f / xp.sum(f, axis=1, keepdims=True), zero_shot(x, state.text, state.logit_scale), f)


def learnt(mean: Array, count: Array, new: Array) -> Array:
    """(c mean + new) / (c + 1): the mean after one more sample.

    >>> import numpy as np
    >>> learnt(np.asarray([1.0, 0.0]), np.asarray(3.0), np.asarray([0.0, 1.0]))
    array([0.75, 0.25])
    """
    return (count * mean + new) / (count + 1)
