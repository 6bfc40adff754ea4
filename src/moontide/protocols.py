"""The two protocols of methods. Everything else (command line, checks, benchmark, streams) uses only these.

Batch:   a frozen dataclass of options with `fit_predict(task) -> Result`.
Online:  the same with `start(task) -> State` and `step(state, x) -> (State, Result)`; a `State` is a frozen dataclass
         of arrays, and a step never modifies its input state, so saving, resuming and forking need no further code.

`PerBatch` runs a batch method on a stream; an online method runs on a batch by one `start` and one `step`.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from moontide.core.arrays import Array, as_real, device, is_torch_array, like, namespace, unit_rows
from moontide.core.backends import fused
from moontide.core.graph import Graph
from moontide.core.rows import Rows
from moontide.errors import InputError, MissingInputError, OptionError, unknown_name
from moontide.memory import require_memory
from moontide.options import Options
from moontide.plausible import ask
from moontide.types import Result, Task, UnverifiedTask, check_known

log = logging.getLogger(__name__)
logging.getLogger("moontide").addHandler(logging.NullHandler())  # silent until the user sets it up
M = TypeVar("M", bound="Method")

_NEEDS = {
    "views": "augmented views of each image, an array (N, V, d) with view 0 the image itself: pass views=..., "
    "put the array 'view_features' into the .npz, or pass images=... and encoder=... to make them",
    "images": "the images themselves: pass images=...",
    "encoder": "the image encoder: pass encoder=...",
}


ACCEPTED = {
    "known": "known labels",
    "class_prior": "a class balance",
    "negatives": "negative names",
}

NONE = -1.0  # the share of a class whose share was not given


class Plan(NamedTuple):
    """The length of a run over shards: calls of all shards, and how many of them are steps shown as progress."""

    calls: int
    steps: int


class Method(Options):
    """Base class of methods: options, a name (that of its file), a citation, presets, and needs beyond features."""

    name: ClassVar[str]
    citation: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    accepts: ClassVar[frozenset[str]] = frozenset()  # of the inputs in ACCEPTED, those that the method makes use of
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    rows_type: ClassVar[type[Rows] | None] = None  # the samples of a method that runs on shards
    replayed: ClassVar[bool] = False  # on a GPU, in a fraction of a millisecond: its input is looked at after the run

    def mixture(self, text: Array, logit_scale: float, **given: Any) -> Any:
        """Return what `core.driver.solve` needs of a method with a `rows_type`.

        `given`: `class_prior` (K,) and `negatives` (M, d), for a method that accepts them.
        """
        raise OptionError(f"The method {self.name} does not run on shards.")

    def plan(self) -> Plan:
        """Return how long a run over shards is; refuse options that do not work there."""
        raise OptionError(f"The method {self.name} does not run on shards.")

    def __init_subclass__(cls) -> None:
        """Name the method after its file."""
        cls.name = cls.__module__.rpartition(".")[2]

    @classmethod
    def from_preset(cls: type[M], preset: str, **options: Any) -> M:
        """Create the method from a preset, with some options overridden by `options`."""
        if preset not in cls.presets:
            raise unknown_name(f"preset of {cls.name}", preset, cls.presets)
        return cls(**{**cls.presets[preset], **options})

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory that a run needs beyond its inputs: a few N x K arrays, unit copies, and statistics."""
        return itemsize * (6 * n * k + 2 * n * d + 6 * k * d)

    def fit_predict(
        self,
        features: Task | Array,
        text: Array | None = None,
        *,
        logit_scale: float = 100.0,
        class_names: Sequence[str] | None = None,
        graph: Graph | None = None,
        known: Array | None = None,
        class_prior: Array | None = None,
        negatives: Array | None = None,
        **extras: Any,
    ) -> Result:
        """Label all samples of a task (or of arrays that make one) at once.

        `known` (N,) has the class numbers of samples whose label is known and -1 for all others, `class_prior` (K,) is
        the class balance where it is known, and `negatives` (M, d) are embeddings of names that no image should be.
        """
        if not isinstance(features, Task):
            if text is None:
                raise InputError(
                    "'text_features' is missing: pass the embeddings of the class names as second argument."
                )
            for key in extras:
                if key not in _NEEDS:
                    raise unknown_name("input", key, ["logit_scale", "class_names", "graph", *ACCEPTED, *_NEEDS])
            given = features, text, logit_scale, class_names, graph, extras, known, class_prior, negatives
            if self.replayed and fused(features):
                unverified = UnverifiedTask(*given)
                result = self.fit_predict(unverified)
                if unverified.verified():
                    ask(unverified, given[0])
                    return result
            features = Task(*given)  # which names the rows that are wrong, or scales them with care
            ask(features, given[0])
        task = features
        self.require(task)
        result = self._fit(task)
        if task.class_names is not None:
            result = dataclasses.replace(result, class_names=task.class_names)
        shape = (self.name, task.n, task.k, result.n_iter)
        log.debug("%s on %d samples and %d classes: %d iterations", *shape)
        return result

    def require(self, task: Task) -> None:
        """Refuse a task that lacks what the method needs, has what it cannot use, or does not fit into memory."""
        for name in ACCEPTED:
            if getattr(task, name) is not None:
                self.require_accepted(name)
        missing = sorted(self.needs - task.extras.keys())
        if missing:
            raise MissingInputError(f"The method {self.name} needs {' and '.join(_NEEDS[m] for m in missing)}.")
        itemsize = task.features.dtype.itemsize
        require_memory(
            self.peak_bytes(task.n, task.k, task.d, itemsize), f"{self.name} on {task.n} x {task.k}", task.features
        )

    def require_accepted(self, name: str) -> None:
        """Refuse one of the inputs in ACCEPTED that the method does not use."""
        if name not in self.accepts:
            raise InputError(
                f"The method {self.name} cannot use {ACCEPTED[name]} ({name!r}): leave them out, or use tide."
            )

    def _fit(self, task: Task) -> Result:
        raise TypeError(f"{type(self).__name__} implements neither _fit nor start and step.")


def per_class(axis: int | None, entries: str = "values") -> dict[str, Any]:
    """Return the metadata of a field of a `State` with an entry for each class along `axis`: classes can come and go.

    `entries`: "values", of any kind; "numbers" of classes along the last axis, -1 for none; "shares" of the classes in
    a sample; "classes", shares of all classes for each class, (K, K). Numbers of classes in an array that has no axis
    of classes have the axis None.

    >>> per_class(1)
    {'class_axis': 1, 'entries': 'values'}
    """
    return {"class_axis": axis, "entries": entries}


@dataclasses.dataclass(frozen=True)
class State:
    """What an online method remembers: arrays, and numbers that are saved as 0-d arrays.

    A method adds its own fields. An array with an axis of classes is declared with `metadata=per_class(axis)`. A field
    of an object that cannot be saved (an encoder) is declared with `metadata={"live": True}` and handed in again when
    the state is loaded.
    """

    text: Array = dataclasses.field(metadata=per_class(0))  # (K, d) unit rows
    logit_scale: float
    seen: int  # samples so far

    def fork(self: S) -> S:
        """Return an independent copy."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        live = {f.name for f in dataclasses.fields(self) if f.metadata.get("live")}
        return dataclasses.replace(self, **{k: v if k in live else copy_array(v) for k, v in own.items()})


S = TypeVar("S", bound=State)


def copy_array(x: Any) -> Any:
    """Copy a numpy array, a torch tensor or a number.

    >>> copy_array(3)
    3
    """
    return x.clone() if is_torch_array(x) else copy.copy(x)


class OnlineMethod(Method):
    """A method that processes samples in order and keeps a state. Subclasses define `start` and `_step`."""

    state_type: ClassVar[type[State]] = State

    def start(self, task: Task) -> State:
        """Create the state before the first sample; only text, logit scale and extras of the task are used."""
        return self.state_type(text=task.text, logit_scale=task.logit_scale, seen=0)

    def step(self, state: S, x: Array, known: Array | None = None) -> tuple[S, Result]:
        """Predict the samples `x` and return the state after them; `state` itself is not modified.

        `x` are the features (n, d), views (n, V, d) or images that the method reads. `known` (n,) has the class
        numbers of samples whose label is known, -1 for the others, for methods that accept known labels.
        """
        x = self.check(state, x)
        return self.advance(state, x, None if known is None else self.check_known(state, x, known))

    def advance(self, state: S, x: Array, known: Array | None = None) -> tuple[S, Result]:
        """Make a step with what `check` and `check_known` returned, or rows of a task: nothing is checked again."""
        after, result = self._step(state, x) if known is None else self._step(state, x, known)
        return dataclasses.replace(after, seen=state.seen + len(x)), result

    def follow(self, state: S, x: Array, known: Array | None = None) -> S | None:
        """Return the state that `step` would return, without its predictions; None where it depends on them.

        It takes next to no time, so that the next samples can be predicted at the same time.
        """
        x = self.check(state, x)
        after = self._follow(state, x, None if known is None else self.check_known(state, x, known))
        return None if after is None else dataclasses.replace(after, seen=state.seen + len(x))

    def _follow(self, state: S, x: Array, known: Array | None) -> S | None:
        return None

    def correct(self, state: S, x: Array, known: Array, before: Array | None = None) -> S:
        """Return the state after the true labels `known` (n,) of earlier samples `x` (n, d) were given.

        The next step uses them. A sample that the state no longer remembers counts as a labelled sample too. An entry
        of -1 takes back a label that was given by mistake. `before` (n,) are the labels that these samples had so far,
        -1 for none; they no longer count, so that each sample has one label however often it is corrected. Without
        `before`, samples that the state no longer remembers are assumed to have had no label.
        """
        x = self.check(state, x)
        known = self.check_known(state, x, known)
        none = known * 0 - 1
        return self._correct(state, x, known, none if before is None else self.check_known(state, x, before))

    def check_known(self, state: State, x: Array, known: Array) -> Array:
        """Return known labels as `_step` takes them, (n,), for a method that accepts them."""
        self.require_accepted("known")
        return check_known(known, len(x), int(state.text.shape[0]), state.text)

    def check(self, state: State, x: Array) -> Array:
        """Return samples as `_step` takes them, in new memory: unit rows of the state's kind; images are left alone."""
        if "images" in self.needs:
            return x
        ndim = 3 if "views" in self.needs else 2
        x = like(unit_rows(as_real(x, "x", ndim), "x"), state.text)
        if x.shape[-1] != state.text.shape[1]:
            raise InputError(
                f"'x' must have the dimension of the text features, {state.text.shape[1]}. Got {x.shape[-1]} instead."
            )
        return x

    def _step(self, state: S, x: Array, known: Array | None = None) -> tuple[S, Result]:
        raise TypeError(f"{type(self).__name__} does not implement _step.")

    def _correct(self, state: S, x: Array, known: Array, before: Array) -> S:
        raise TypeError(f"{type(self).__name__} accepts known labels but does not implement _correct.")

    def _fit(self, task: Task) -> Result:
        x = samples(self, task)
        return (self.advance if x is task.features else self.step)(self.start(task), x, task.known)[1]


@dataclasses.dataclass(frozen=True)
class GivenState(State):
    """A state with the inputs that are given once per stream; `given_inputs` makes its fields."""

    class_prior: Array = dataclasses.field(metadata=per_class(0))  # (K,) shares of the classes, NONE where not given
    negatives: Array  # (M, d) embeddings of names that no image should be


def given_inputs(task: Task) -> dict[str, Array]:
    """Return the fields of a `GivenState` for a task.

    >>> import numpy as np
    >>> given_inputs(Task(np.eye(2), np.eye(2)))["class_prior"]
    array([-1., -1.])
    """
    return {
        "class_prior": 0 * task.text[:, 0] + NONE if task.class_prior is None else task.class_prior,
        "negatives": task.text[:0, :] if task.negatives is None else task.negatives,
    }


def given_shares(prior: Array) -> Array | None:
    """Return the class shares of a `GivenState`, (K,), the average where one is missing; None if all are missing.

    >>> import numpy as np
    >>> given_shares(np.asarray([0.5, 0.5, -1.0])).round(2)
    array([0.33, 0.33, 0.33])
    """
    xp, given = namespace(prior), prior >= 0
    total = float(xp.sum(xp.where(given, prior, 0 * prior)))
    if not total:
        return None
    shares = xp.where(given, prior, total / float(xp.sum(given)) + 0 * prior)
    return shares / xp.sum(shares)


@dataclasses.dataclass(frozen=True)
class PerBatch(OnlineMethod):
    """Runs a batch method on a stream: every step is an independent call.

    >>> import numpy as np, moontide
    >>> online = PerBatch(moontide.method("zero_shot"))
    >>> state = online.start(Task(np.eye(2), np.eye(2)))
    >>> state, result = online.step(state, np.eye(2)[:1])
    >>> state.seen, result.labels
    (1, array([0]))
    """

    method: Method

    def __post_init__(self) -> None:
        """Take over the name and needs of the inner method; the state has given inputs only if the method uses them."""
        for attribute in ("name", "needs", "accepts", "citation"):
            object.__setattr__(self, attribute, getattr(self.method, attribute))
        if self.accepts & {"class_prior", "negatives"}:
            object.__setattr__(self, "state_type", GivenState)

    def start(self, task: Task) -> State:
        """Keep the inputs that are given once per stream, if the method uses them."""
        given = given_inputs(task) if self.state_type is GivenState else {}
        return self.state_type(text=task.text, logit_scale=task.logit_scale, seen=0, **given)

    def _step(self, state: S, x: Array, known: Array | None = None) -> tuple[S, Result]:
        features = x[:, 0] if "views" in self.needs else x
        extras = {"views": x} if "views" in self.needs else {}
        task = Task.of_unit_rows(features, state.text, state.logit_scale, extras=extras, known=known)
        if isinstance(state, GivenState):
            negatives = state.negatives if len(state.negatives) else None
            task = task.trusted(class_prior=given_shares(state.class_prior), negatives=negatives)
        self.method.require(task)
        return state, self.method._fit(task)

    def _follow(self, state: S, x: Array, known: Array | None) -> S:
        return state


def as_online(method: Method) -> OnlineMethod:
    """Return the method itself if it is online, otherwise an adapter around it.

    >>> import moontide
    >>> as_online(moontide.method("moon")).name
    'moon'
    """
    return method if isinstance(method, OnlineMethod) else PerBatch(method)


def samples(method: Method, task: Task) -> Any:
    """Return the samples of a task as the method's `step` takes them: features, views or images.

    >>> import numpy as np, moontide
    >>> samples(moontide.method("moon"), Task(np.eye(2), np.eye(2))).shape
    (2, 2)
    """
    for name in ("views", "images"):
        if name in method.needs:
            return task.extras[name]
    return task.features


def renumber(numbers: Array, keep: Sequence[int], k: int) -> Array:
    """Return numbers of k classes as their positions in `keep`, -1 for classes that are not there and for -1.

    >>> import numpy as np
    >>> renumber(np.asarray([2, 0, -1]), [1, 2], 3)
    array([ 1, -1, -1])
    """
    xp = namespace(numbers)
    table = xp.full((k + 1,), -1, dtype=numbers.dtype, device=device(numbers))  # the last entry is for -1
    kept = xp.asarray(list(keep), dtype=xp.int64, device=device(numbers))
    table[kept] = xp.arange(len(keep), dtype=numbers.dtype, device=device(numbers))
    return table[numbers]


def change_classes(method: OnlineMethod, state: State, keep: Sequence[int], text: Array | None = None) -> State:
    """Return a state with the classes `keep`, in that order, followed by new classes that have no past.

    Only fields that are declared `per_class` change; their entries for new classes are those that `start` makes.

    >>> import moontide, numpy as np
    >>> tda = moontide.method("tda")
    >>> state = tda.start(Task(np.eye(3), np.eye(3)))
    >>> change_classes(tda, state, [2], np.eye(3)[:1]).text
    array([[0., 0., 1.],
           [1., 0., 0.]])
    """
    xp = namespace(state.text)
    index = xp.asarray(list(keep), dtype=xp.int64, device=device(state.text))  # (K',)
    wanted = xp.take(state.text, index, axis=0)
    if text is not None:
        added = like(unit_rows(as_real(text, "text_features"), "text_features"), state.text)
        if added.shape[1] != wanted.shape[1]:
            raise InputError(
                "'text_features' must have the dimension of the stream, "
                f"{wanted.shape[1]}. Got {added.shape[1]} instead."
            )
        wanted = xp.concat([wanted, added])
    fields = dataclasses.fields(state)
    live = {f.name: getattr(state, f.name) for f in fields if f.metadata.get("live")}
    fresh = method.start(Task.of_unit_rows(wanted[:1, :], wanted, state.logit_scale, extras=live))
    changed = {
        f.name: carry(getattr(state, f.name), getattr(fresh, f.name), index, state.text.shape[0], **f.metadata)
        for f in fields
        if "class_axis" in f.metadata
    }
    return dataclasses.replace(state, **changed)


def carry(old: Array, fresh: Array, index: Array, k: int, class_axis: int | None, entries: str) -> Array:
    """Return an array with the entries of the classes `index` (of k), followed by those of `fresh` for the new classes.

    Class numbers are changed accordingly, and the shares of the classes that stay are scaled to sum 1. An array of
    "classes" holds for each class its shares of all classes, (K, K).

    >>> import numpy as np
    >>> carry(np.asarray([[0.2, 0.2, 0.6]]), np.zeros((1, 3)), np.asarray([0, 1]), 3, 1, "shares")
    array([[0.5, 0.5, 0. ]])
    """
    if class_axis is None:
        return renumber(old, index, k)
    xp, kept = namespace(old), index.shape[0]
    if entries == "classes":
        none = xp.zeros((k, fresh.shape[1]), dtype=old.dtype, device=device(old))  # the shares of new classes
        old = carry(old, none, index, k, 1, "shares")
    new = xp.arange(kept, fresh.shape[class_axis], device=device(old))
    total = xp.sum(old, axis=class_axis, keepdims=True)
    old = xp.take(old, index, axis=class_axis)
    if entries == "numbers":
        old, width = renumber(old, index, k), fresh.shape[-1]
        order = xp.argsort(xp.astype(old < 0, xp.int64), axis=-1, stable=True)  # the classes first
        padding = xp.full((*old.shape[:-1], width), -1, dtype=old.dtype, device=device(old))
        old = xp.concat([xp.take_along_axis(old, order, axis=-1), padding], axis=-1)[..., :width]
    if entries == "shares" and kept < k:
        left = xp.sum(old, axis=class_axis, keepdims=True)
        shares = old / xp.where(left > 0, left, xp.ones_like(left))
        lost = (left == 0) & (total > 0)  # all that the sample had
        old = xp.where(lost, xp.full_like(old, 1 / max(kept, 1)), shares)
    return xp.concat([old, xp.take(fresh, new, axis=class_axis)], axis=class_axis)
