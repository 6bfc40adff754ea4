"""What goes into a method and what comes out: `Task` and `Result`. A task has no labels, so no method can see them."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import (
    Array,
    as_matrix,
    as_real,
    device,
    is_torch_array,
    like,
    namespace,
    to_numpy,
    unit_rows,
)
from moontide.core.backends import fused
from moontide.core.graph import Graph
from moontide.errors import InputError, listed, missing_extra

if TYPE_CHECKING:
    import pandas

PER_SAMPLE = ("views", "images")  # extras with one row per sample
SHOWN = 5  # of the names in a warning
MOST_SCALE = 1e8  # of logits, whose squares and sums still fit into float32


@dataclass(frozen=True)
class Task:
    """Image embeddings and class-name embeddings in one space, checked and scaled to unit length on entry.

    Three inputs are for the methods whose `accepts` names them: `known` has the class numbers of samples whose label is
    known and -1 for all others; `class_prior` is the class balance that the samples are known to have; `negatives` are
    embeddings of names that none of the images should be. `extras` holds what some methods need beyond features, by
    name: `views` (N, V, d), `images`, `encoder`.

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
    known: Array | None = None  # (N,) class numbers, -1 where the label is not known
    class_prior: Array | None = None  # (K,) scaled to sum 1
    negatives: Array | None = None  # (M, d) unit rows

    def __post_init__(self) -> None:
        """Check everything once, so that no method has to."""
        features = as_real(self.features, "image_features")
        text = as_real(self.text, "text_features")
        if features.shape[1] != text.shape[1]:
            raise InputError(
                "'image_features' and 'text_features' must have the same dimension. "
                f"Got {features.shape[1]} and {text.shape[1]} instead; do they come from the same model?"
            )
        try:
            scale = float(self.logit_scale)
        except (TypeError, ValueError, OverflowError):  # such as an integer of 400 digits
            scale = math.nan
        if not 0 < scale <= MOST_SCALE:
            given = str(self.logit_scale)[:50]
            raise InputError(
                f"'logit_scale' must be a positive number up to {MOST_SCALE:.0e} (100 for CLIP). Got {given} instead."
            )
        set_ = object.__setattr__
        features, text = self._unit_rows(features, text)
        set_(self, "features", features)
        set_(self, "text", like(text, features))
        set_(self, "logit_scale", scale)
        if self.class_names is not None:
            set_(self, "class_names", check_class_names(self.class_names, self.k, self.n))
        if self.graph is not None:
            set_(self, "graph", adapt_graph(self.graph, self.features))
        if self.known is not None:
            numbers = class_numbers_of(self.known, self.class_names, "known")
            set_(self, "known", check_known(numbers, self.n, self.k, self.features))
        if self.class_prior is not None:
            set_(self, "class_prior", check_class_prior(self.class_prior, self.k, self.features))
        if self.negatives is not None:
            set_(self, "negatives", check_negatives(self.negatives, self.features))
        for name in PER_SAMPLE:
            if name in self.extras and len(self.extras[name]) != self.n:
                raise InputError(
                    f"'{name}' must have one row per sample ({self.n}). Got {len(self.extras[name])} instead."
                )

    def _unit_rows(self, features: Array, text: Array) -> tuple[Array, Array]:
        return unit_rows(features, "image_features"), unit_rows(text, "text_features")

    @classmethod
    def of_unit_rows(cls, features: Array, text: Array, logit_scale: float, **fields: Any) -> Task:
        """Make a task of unit rows of one kind that were checked before, such as those of a state, without a copy.

        >>> eye = np.eye(2)
        >>> Task.of_unit_rows(eye, eye, 100.0).text is eye
        True
        """
        made = object.__new__(cls)
        empty: dict[str, Any] = {"class_names": None, "graph": None, "extras": {}}
        empty |= {"known": None, "class_prior": None, "negatives": None}
        made.__dict__.update({**empty, "features": features, "text": text, "logit_scale": logit_scale, **fields})
        return made

    @classmethod
    def of_classes(cls, text: Array, logit_scale: float = 100.0, **fields: Any) -> Task:
        """Make a task from the inputs of a stream, checked and scaled; its only sample is a placeholder.

        >>> Task.of_classes(2 * np.eye(2), class_names=["cat", "dog"]).text
        array([[1., 0.],
               [0., 1.]])
        """
        text = as_real(text, "text_features")
        return cls(namespace(text).ones_like(text[:1, :]), text, logit_scale, **fields)

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
        return self._where(lambda x: x[start:stop])

    def take(self, rows: npt.ArrayLike) -> Task:
        """Return the task of some samples, in the order of `rows` (without the graph, which joins all of them).

        >>> Task(np.eye(3), np.eye(3)).take([2, 0]).features
        array([[0., 0., 1.],
               [1., 0., 0.]])
        """
        index: npt.NDArray[np.int64] = np.asarray(rows, dtype=np.int64)
        return self._where(lambda x: x[index] if hasattr(x, "dtype") else [x[i] for i in index])

    def _where(self, some: Callable[[Any], Any]) -> Task:
        extras = {k: some(v) if k in PER_SAMPLE else v for k, v in self.extras.items()}
        known = None if self.known is None else some(self.known)
        return self.trusted(features=some(self.features), graph=None, extras=extras, known=known)

    def trusted(self, **changes: Any) -> Task:
        """Return the task with some fields replaced by valid values; nothing is checked or scaled again.

        >>> task = Task(np.eye(2), np.eye(2))
        >>> task.trusted(features=task.features[:1]).text is task.text
        True
        """
        return Task.of_unit_rows(**{**self.__dict__, **changes})

    def batches(self, size: int) -> Iterator[Task]:
        """Split the samples in file order into independent tasks of `size`, the last one possibly smaller."""
        for start in range(0, self.n, size):
            yield self.rows(start, min(start + size, self.n))


class UnverifiedTask(Task):
    """A task on a GPU, scaled without waiting for the check that no row is zero: call `verified` after the run.

    Waiting would make a fit of a fraction of a millisecond half as long again.
    """

    flaws: ClassVar[Array | None] = None

    def _unit_rows(self, features: Array, text: Array) -> tuple[Array, Array]:
        if not (fused(features) and fused(text) and features.device == text.device and features.dtype == text.dtype):
            return super()._unit_rows(features, text)
        from moontide.core.backends import _triton

        *rows, flaws = _triton.scaled_pair(features, text)
        object.__setattr__(self, "flaws", flaws)
        return rows[0], rows[1]

    def verified(self) -> bool:
        """Return whether every row could be scaled to unit length; the others are zeros."""
        return self.flaws is None or not int(self.flaws)


def check_class_names(names: Sequence[str], k: int, n: int | None = None) -> tuple[str, ...]:
    """Check the number of class names, and warn about duplicates; n is the number of samples, for the error.

    >>> check_class_names(["cat", "dog"], 2)
    ('cat', 'dog')
    """
    names = tuple(str(name) for name in names)
    if len(names) != k:
        raise InputError(
            f"'class_names' must have one name for each of the {k} rows of 'text_features'. Got {len(names)}"
            + ("; are image and text features swapped?" if len(names) == n else ".")
        )
    double = sorted(name for name, count in Counter(names).items() if count > 1)
    if double:
        more = f" and {len(double) - SHOWN} more" if len(double) > SHOWN else ""
        shown = ", ".join(double[:SHOWN])
        warnings.warn(f"class names appear more than once: {shown}{more}; name each once", UserWarning, stacklevel=3)
    return names


def class_numbers_of(labels: Any, class_names: Sequence[str] | None, name: str) -> Any:
    """Return labels that are class names as class numbers, -1 for an empty one; other labels are returned as they are.

    >>> class_numbers_of(["dog", "", "cat"], ["cat", "dog"], "known")
    array([ 1, -1,  0])
    """
    if is_torch_array(labels):
        return labels
    values = np.asarray(labels)
    if values.dtype.kind not in "USO" or not all(isinstance(one, str | bytes) or one is None for one in values.flat):
        return labels
    texts = [
        "" if one is None else one.decode(errors="replace") if isinstance(one, bytes) else str(one)
        for one in values.flat
    ]
    if all(re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text) for text in texts):
        return values.astype(np.int64)  # numbers that were stored as text
    if class_names is None:
        raise InputError(f"'{name}' has names, and the task has none to find them in: pass 'class_names', or numbers.")
    number = {"": -1} | {str(one): k for k, one in reversed(list(enumerate(class_names)))}
    bad = sorted({text for text in texts if text not in number})
    if bad:
        raise InputError(f"'{name}' must be class names. There is no class called {listed(map(repr, bad))}.")
    return np.asarray([number[text] for text in texts], dtype=np.int64).reshape(values.shape)


def adapt_graph(graph: Graph, features: Array) -> Graph:
    """Check that a graph covers the rows of `features`, and bring it to their namespace, device and dtype."""
    if graph.neighbours.shape[0] != features.shape[0]:
        raise InputError(
            f"'graph' must have one row per sample ({features.shape[0]}). Got {graph.neighbours.shape[0]} instead."
        )
    n, xp = features.shape[0], namespace(features)
    if graph.m and not (int(graph.neighbours.min()) >= 0 and int(graph.neighbours.max()) < n):
        raise InputError(f"'neighbours' of a graph must be row numbers from 0 to {n - 1}.")
    neighbours = graph.neighbours if is_torch_array(features) else to_numpy(graph.neighbours)
    neighbours = xp.asarray(neighbours, dtype=xp.int64, device=device(features))
    return Graph(neighbours, like(graph.weights, features), graph.recall)


def check_known(known: Any, n: int, k: int, ref: Array) -> Array:
    """Check one class number per sample, -1 where the label is not known, and bring them to the device of `ref`.

    >>> check_known([-1, 1], 2, 2, np.zeros(1))
    array([-1,  1])
    """
    values: Any = to_numpy(known)
    if values.shape != (n,):
        raise InputError(f"'known' must have one entry for each of the {n} samples. Got shape {values.shape} instead.")
    if not np.issubdtype(values.dtype, np.integer):
        raise InputError(
            f"'known' must be integers, class numbers from 0, or -1 where the label is not known. "
            f"Got dtype {values.dtype} instead."
        )
    bad = np.flatnonzero((values < -1) | (values >= k))
    if bad.size:
        raise InputError(
            f"'known' must be class numbers from 0 to {k - 1}, or -1 where the label is not known. "
            f"Got {values[bad[0]]} in row {bad[0]}."
        )
    xp = namespace(ref)
    return xp.asarray(values, dtype=xp.int64, device=device(ref))


def check_class_prior(prior: Any, k: int, ref: Array) -> Array:
    """Check one share per class, at least 0, and scale them to sum 1, in the kind of `ref`.

    >>> check_class_prior([1, 3], 2, np.zeros(1))
    array([0.25, 0.75])
    """
    prior = as_matrix(prior, "class_prior", 1)
    if prior.shape[0] != k:
        raise InputError(f"'class_prior' must have one share for each of the {k} classes. Got {prior.shape[0]}.")
    xp = namespace(prior)
    if not (float(xp.min(prior)) >= 0 and float(xp.sum(prior)) > 0):
        raise InputError(
            "'class_prior' must be shares of at least 0, not all of them 0. Got a negative one, or only 0."
        )
    return like(prior / xp.sum(prior), ref)


def check_negatives(negatives: Any, ref: Array) -> Array:
    """Check embeddings (M, d) of names that none of the images should be, and return unit rows of the kind of `ref`.

    >>> check_negatives([[0, 2]], np.zeros((1, 2)))
    array([[0., 1.]])
    """
    negatives = as_real(negatives, "negatives")
    if negatives.shape[1] != ref.shape[1]:
        raise InputError(
            f"'negatives' must have the dimension of the text features, {ref.shape[1]}. "
            f"Got {negatives.shape[1]} instead; do they come from the same model?"
        )
    return like(unit_rows(negatives, "negatives"), ref)


@dataclass(frozen=True, repr=False)
class Result:
    """The predictions of a method for the N samples of a task; arrays are of the kind that went in.

    probs: (N, K) probabilities of the classes, rows sum to 1. zero_shot: (N, K) the same without adaptation.
    native_scores: (N, K) what the original program returns, where that is not `probs`.
    objective: the value of the objective after each iteration, where the method has one.
    n_iter: iterations. converged: whether the last one changed no label.
    kappa: (K,) concentrations. beta: (K,) the share of the batch in each class mean, 0 for a class at its text.
    details: further arrays by name. unknown: (N,) the higher, the less likely is any of the classes, for methods that
    score it. class_names: the names of the K classes, where the task has them.

    Computed from these: `labels`, `zero_shot_labels`, `changed`, `confidence` and `scores`; `to_pandas` is a table.

    >>> import numpy as np
    >>> r = Result(probs=np.asarray([[0.2, 0.8]]), zero_shot=np.asarray([[0.6, 0.4]]))
    >>> r.labels, r.zero_shot_labels, r.changed
    (array([1]), array([0]), array([ True]))
    >>> print(r)
    Result of 1 sample and 2 classes: 1 label differs from zero-shot
      labels      [1]
      confidence  [0.8]
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
    unknown: Array | None = None  # (N,) the higher, the less likely is any of the classes; for methods that score it
    decided: Array | None = None  # (N,) labels, where probabilities are rounded after the decision
    class_names: Sequence[str] | None = None

    def __repr__(self) -> str:
        """Return a few lines, whatever the size."""
        n, k = self.probs.shape
        changed = int(self.changed.sum())
        lines = [
            f"Result of {n} {'sample' if n == 1 else 'samples'} and {k} {'class' if k == 1 else 'classes'}: "
            f"{changed} {'label differs' if changed == 1 else 'labels differ'} from zero-shot"
        ]
        for name in ("labels", "confidence", "unknown"):
            values = getattr(self, name)
            if values is not None:
                text = np.array2string(to_numpy(values), precision=4, threshold=8, edgeitems=3, max_line_width=120)
                lines.append(f"  {name:<10}  {text}")
        return "\n".join(lines)

    @property
    def scores(self) -> Array:
        """The (N, K) scores whose argmax is the label: the original program's, or the probabilities."""
        return self.probs if self.native_scores is None else self.native_scores

    @cached_property
    def labels(self) -> Array:
        """The predicted class of each sample, (N,)."""
        return self.decided if self.decided is not None else namespace(self.probs).argmax(self.scores, axis=1)

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

    def to_pandas(self, ids: Sequence[Any] | None = None) -> pandas.DataFrame:
        """Return a pandas table with one row per sample, named by `ids`, or numbered from 0.

        The columns are label (a class number), class_name (where there are names), confidence, zero_shot_label,
        changed, and unknown (where the method scores it).

        >>> r = Result(np.asarray([[0.2, 0.8]]), np.asarray([[0.6, 0.4]]), class_names=("cat", "dog"))
        >>> r.to_pandas(["a.jpg"]).loc["a.jpg", "class_name"]
        'dog'
        """
        try:
            import pandas
        except ImportError:
            raise missing_extra("pandas", "pandas", "A pandas table") from None
        labels = to_numpy(self.labels)
        columns: dict[str, Any] = {"label": labels}
        if self.class_names is not None:
            columns["class_name"] = [self.class_names[k] for k in labels]
        columns["confidence"] = to_numpy(self.confidence)
        columns["zero_shot_label"] = to_numpy(self.zero_shot_labels)
        columns["changed"] = to_numpy(self.changed)
        if self.unknown is not None:
            columns["unknown"] = to_numpy(self.unknown)
        return pandas.DataFrame(columns, index=None if ids is None else pandas.Index(ids, name="id"))

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
            class_names=results[0].class_names,
        )


__all__ = ["Array", "Graph", "Result", "Task", "check_class_names", "is_torch_array"]
