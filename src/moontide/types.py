"""What goes into a method and what comes out: `Task` and `Result`. A task has no labels, so no method can see them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from moontide.core.arrays import Array, as_real, is_torch_array, like, namespace, unit_rows
from moontide.core.graph import Graph, adapt_graph
from moontide.errors import InputError

PER_SAMPLE = ("views", "images")  # extras with one row a sample


@dataclass(frozen=True)
class Task:
    """Image embeddings and class-name embeddings in one space, checked and scaled to unit length on entry.

    `extras` holds what some methods need beyond features, by name: `views` (N, V, d), `images`, `encoder`.

    >>> import numpy as np
    >>> task = Task(np.eye(3), 2 * np.eye(3)[:2], class_names=("cat", "dog"))
    >>> task.n, task.k, task.d
    (3, 2, 3)
    """

    features: Array  # (N, d) unit rows
    text: Array  # (K, d) unit rows
    logit_scale: float = 100.0  # 1 / tau of the model
    class_names: Sequence[str] | None = None
    graph: Graph | None = None  # precomputed neighbours; None: each method builds the one it asks for
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check everything once, so that no method has to."""
        features = as_real(self.features, "image_features")
        text = as_real(self.text, "text_features")
        if features.shape[1] != text.shape[1]:
            raise InputError(
                "'image_features' and 'text_features' must have the same dimension. "
                f"Got {features.shape[1]} and {text.shape[1]} instead; were they made by one model?"
            )
        scale = float(self.logit_scale)
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"'logit_scale' must be a positive number (100 for CLIP). Got {self.logit_scale} instead.")
        set_ = object.__setattr__
        set_(self, "features", unit_rows(features, "image_features"))
        set_(self, "text", like(unit_rows(text, "text_features"), features))
        set_(self, "logit_scale", scale)
        if self.class_names is not None:
            set_(self, "class_names", check_class_names(self.class_names, self.k))
        if self.graph is not None:
            set_(self, "graph", adapt_graph(self.graph, self.features))
        for name in PER_SAMPLE:
            if name in self.extras and len(self.extras[name]) != self.n:
                raise InputError(
                    f"'{name}' must have one row a sample ({self.n}). Got {len(self.extras[name])} instead."
                )

    @property
    def n(self) -> int:
        """The number of samples N."""
        return int(self.features.shape[0])

    @property
    def k(self) -> int:
        """The number of candidate classes K."""
        return int(self.text.shape[0])

    @property
    def d(self) -> int:
        """The dimension d of the embedding space."""
        return int(self.features.shape[1])

    def rows(self, start: int, stop: int) -> Task:
        """Return the task of some consecutive samples (without the graph, which joins all of them)."""
        extras = {k: v[start:stop] if k in PER_SAMPLE else v for k, v in self.extras.items()}
        return replace(self, features=self.features[start:stop, :], graph=None, extras=extras)

    def batches(self, size: int) -> Iterator[Task]:
        """Split the samples in file order into independent tasks of `size`, the last one possibly smaller."""
        for start in range(0, self.n, size):
            yield self.rows(start, min(start + size, self.n))


def check_class_names(names: Sequence[str], k: int) -> tuple[str, ...]:
    """Check the number of class names, and warn about duplicates.

    >>> check_class_names(["cat", "dog"], 2)
    ('cat', 'dog')
    """
    names = tuple(str(name) for name in names)
    if len(names) != k:
        raise InputError(
            f"'class_names' must have one name for each of the {k} rows of 'text_features'. Got {len(names)}."
        )
    double = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < k else []
    if double:
        warnings.warn(f"class names appear more than once: {', '.join(double)}", UserWarning, stacklevel=3)
    return names


@dataclass(frozen=True)
class Result:
    """What a method says of the N samples of a task; arrays are of the kind that went in.

    >>> import numpy as np
    >>> r = Result(probs=np.asarray([[0.2, 0.8]]), zero_shot=np.asarray([[0.6, 0.4]]))
    >>> r.labels, r.zero_shot_labels, r.changed
    (array([1]), array([0]), array([ True]))
    """

    probs: Array  # (N, K) rows sum to 1
    zero_shot: Array  # (N, K) the prediction without adaptation
    native_scores: Array | None = None  # (N, K) what the original program returns, where that is not probs
    objective: Sequence[float] = ()  # L_PLE after each E-step, where the method has one
    n_iter: int = 1
    converged: bool = True  # whether the last iteration changed no label
    kappa: Array | None = None  # (K,) concentrations
    beta: Array | None = None  # (K,) share of the batch in each class mean; 0: the class is at its anchor
    details: Mapping[str, Any] = field(default_factory=dict)  # further arrays by name
    unknown: Array | None = None  # (N,) the higher, the less likely is any of the classes; for methods that tell

    @property
    def scores(self) -> Array:
        """The (N, K) scores whose argmax is the label: the original program's, or the probabilities."""
        return self.probs if self.native_scores is None else self.native_scores

    @cached_property
    def labels(self) -> Array:
        """The predicted class of each sample, (N,)."""
        return namespace(self.probs).argmax(self.scores, axis=1)

    @cached_property
    def zero_shot_labels(self) -> Array:
        """The class that zero-shot would predict, (N,)."""
        return namespace(self.probs).argmax(self.zero_shot, axis=1)

    @property
    def changed(self) -> Array:
        """Which predictions differ from zero-shot, (N,)."""
        return self.labels != self.zero_shot_labels

    @property
    def confidence(self) -> Array:
        """The probability of the predicted class, (N,)."""
        xp = namespace(self.probs)
        return xp.take_along_axis(self.probs, self.labels[:, None], axis=1)[:, 0]

    @staticmethod
    def concatenate(results: Sequence[Result]) -> Result:
        """Join the results of independent batches; per-class and per-iteration values of more than one are dropped."""
        if len(results) == 1:
            return results[0]
        xp = namespace(results[0].probs)
        native = [r.native_scores for r in results]
        unknown = [r.unknown for r in results]
        return Result(
            probs=xp.concat([r.probs for r in results]),
            zero_shot=xp.concat([r.zero_shot for r in results]),
            native_scores=None if native[0] is None else xp.concat(native),
            n_iter=max(r.n_iter for r in results),
            converged=all(r.converged for r in results),
            unknown=None if unknown[0] is None else xp.concat(unknown),
        )


__all__ = ["Array", "Graph", "Result", "Task", "check_class_names", "is_torch_array"]
