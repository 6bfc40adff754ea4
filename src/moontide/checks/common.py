"""The checks that every method has to pass, one function each: valid results, and changes that must not affect them."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import numpy as np

from moontide.checks.tasks import (
    Tasks,
    embeddings,
    expect,
    expect_same,
    expect_sound,
    mapped,
    reordered,
    single,
)
from moontide.core.simplex import zero_shot
from moontide.protocols import Method
from moontide.registry import method, method_names, method_type
from moontide.types import Task

ROUNDING = 1e-6  # what another order of the same float64 operations may change
SINGLE = 1e-3  # what float32 may change
SMALL_BLOCK = 16  # of entries or rows: forty samples need several


def check_rows_are_probabilities(m: Method, tasks: Tasks) -> None:
    """Rows of `probs` and of `zero_shot` are finite, not negative and sum to 1, in the dtype of the features.

    >>> check_rows_are_probabilities(method("zero_shot"), Tasks())
    """
    for task in (tasks(), single(tasks())):
        expect_sound(m.fit_predict(task), task, str(task.features.dtype))


def check_labels_are_argmax(m: Method, tasks: Tasks) -> None:
    """`labels` is the argmax of `scores`, and no class is more probable than the label.

    >>> check_labels_are_argmax(method("zero_shot"), Tasks())
    """
    result = m.fit_predict(tasks())
    expect(np.array_equal(result.labels, result.scores.argmax(axis=1)), "labels are not the argmax of scores")
    short = float((result.probs.max(axis=1) - result.confidence).max())
    expect(short <= ROUNDING, f"a class is more probable than the label, by {short:.2e}")


def check_zero_shot_is_reported(m: Method, tasks: Tasks) -> None:
    """`zero_shot` is softmax(logit scale x cosine), the prediction without adaptation.

    >>> check_zero_shot_is_reported(method("zero_shot"), Tasks())
    """
    task = tasks.of(*embeddings(40, 7, 32), logit_scale=50.0)
    gap = float(np.abs(m.fit_predict(task).zero_shot - zero_shot(task.features, task.text, 50.0)).max())
    tolerance = SINGLE if "encoder" in m.needs else ROUNDING  # encoders compute in float32
    expect(gap <= tolerance, f"zero_shot is not the zero-shot prediction; off by up to {gap:.2e}")


def check_diagnostics(m: Method, tasks: Tasks) -> None:
    """Where given, the objective is finite, kappa finite and not negative, and beta in [0, 1], one for each class.

    >>> check_diagnostics(method("moon"), Tasks())
    """
    task = tasks()
    result = m.fit_predict(task)
    expect(all(math.isfinite(value) for value in result.objective), f"objective {result.objective} is not finite")
    for name, high in (("kappa", math.inf), ("beta", 1.0)):
        if (value := getattr(result, name)) is not None:
            expect(value.shape == (task.k,), f"{name} has shape {value.shape}, not ({task.k},)")
            expect(bool((np.isfinite(value) & (value >= 0) & (value <= high)).all()), f"{name} is {value}")


def check_float32_close_to_float64(m: Method, tasks: Tasks) -> None:
    """Single precision gives nearly the same answer.

    >>> check_float32_close_to_float64(method("zero_shot"), Tasks())
    """
    expect_same(m.fit_predict(single(tasks())), m.fit_predict(tasks()), SINGLE, "float32")


def check_float16_is_accepted(m: Method, tasks: Tasks) -> None:
    """Half-precision input is computed in float32.

    >>> check_float16_is_accepted(method("zero_shot"), Tasks())
    """
    task = mapped(tasks(), lambda x: x.astype(np.float16))
    same = mapped(tasks(), lambda x: x.astype(np.float16).astype(np.float32))
    result = m.fit_predict(task)
    expect_sound(result, task, "float16")
    expect_same(result, m.fit_predict(same), 0.0, "float16 against the same numbers in float32")


def check_torch_equals_numpy(m: Method, tasks: Tasks) -> None:
    """Torch tensors on the CPU give torch tensors with the numbers that numpy arrays give.

    >>> check_torch_equals_numpy(method("zero_shot"), Tasks())
    """
    torch = import_module("torch")
    for task, tolerance in ((tasks(), ROUNDING), (single(tasks()), SINGLE)):
        torch_task = mapped(task, torch.asarray)
        result = m.fit_predict(torch_task)
        expect_sound(result, torch_task, "torch")
        expect_same(result, m.fit_predict(task), tolerance, f"torch, {task.features.dtype}")


def check_permuted_classes(m: Method, tasks: Tasks) -> None:
    """Classes in another order give the answer in that order.

    >>> check_permuted_classes(method("zero_shot"), Tasks())
    """
    task = tasks()
    order = np.random.default_rng(1).permutation(task.k)
    found = m.fit_predict(dataclasses.replace(task, text=task.text[order]))
    expect_same(found, m.fit_predict(task), ROUNDING, "classes permuted", cols=order)


def check_permuted_samples(m: Method, tasks: Tasks) -> None:
    """Samples in another order give the answer in that order.

    >>> check_permuted_samples(method("zero_shot"), Tasks())
    """
    task = tasks()
    order = np.random.default_rng(1).permutation(task.n)
    expect_same(m.fit_predict(reordered(task, order)), m.fit_predict(task), ROUNDING, "samples permuted", rows=order)


@contextmanager
def small_blocks(m: Method) -> Iterator[None]:
    """Set every BLOCK... constant of `moontide.core` and of the method's module to a small value for a while.

    >>> from moontide.core import graph
    >>> with small_blocks(method("moon")):
    ...     graph.BLOCK_ROWS
    16
    """
    modules = [module for name, module in list(sys.modules.items())
               if name.startswith("moontide.core.") or name == type(m).__module__]  # fmt: skip
    saved = [(module, name, value) for module in modules for name, value in vars(module).items() if name[:5] == "BLOCK"]
    try:
        for module, name, _ in saved:
            setattr(module, name, SMALL_BLOCK)
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def check_blocks_change_nothing(m: Method, tasks: Tasks) -> None:
    """The size of the blocks in which the computation is done does not change the answer.

    >>> check_blocks_change_nothing(method("moon"), Tasks())
    """
    task = tasks()
    with small_blocks(m):
        found = m.fit_predict(task)
    expect_same(found, m.fit_predict(task), ROUNDING, f"blocks of {SMALL_BLOCK}")


def _check_sound(m: Method, task: Task, what: str) -> None:
    """Expect sound probabilities in float32, where more under- and overflows than in float64."""
    task = single(task)
    expect_sound(m.fit_predict(task), task, what)


def check_one_sample(m: Method, tasks: Tasks) -> None:
    """N = 1 works.

    >>> check_one_sample(method("zero_shot"), Tasks())
    """
    _check_sound(m, tasks(n=1), "one sample")


def check_one_class(m: Method, tasks: Tasks) -> None:
    """K = 1 works.

    >>> check_one_class(method("zero_shot"), Tasks())
    """
    _check_sound(m, tasks(k=1), "one class")
    _check_sound(m, tasks(n=1, k=1), "one sample and one class")


def check_fewer_samples_than_classes(m: Method, tasks: Tasks) -> None:
    """N < K works.

    >>> check_fewer_samples_than_classes(method("zero_shot"), Tasks())
    """
    _check_sound(m, tasks(n=3, k=20), "fewer samples than classes")


def check_empty_class(m: Method, tasks: Tasks) -> None:
    """A class that no sample is near, with a zero-shot probability that underflows, works.

    >>> check_empty_class(method("zero_shot"), Tasks())
    """
    features, text = embeddings(40, 7, 32)
    text[3] = -features.mean(axis=0)
    _check_sound(m, tasks.of(features, text), "an empty class")


def check_duplicate_rows(m: Method, tasks: Tasks) -> None:
    """Duplicate samples, or samples that are all equal, work.

    >>> check_duplicate_rows(method("zero_shot"), Tasks())
    """
    features, text = embeddings(40, 7, 32)
    _check_sound(m, tasks.of(features[np.arange(40) // 2], text), "every sample twice")
    _check_sound(m, tasks.of(features[np.zeros(40, dtype=int)], text), "all samples equal")


def check_duplicate_prototypes(m: Method, tasks: Tasks) -> None:
    """Two classes, or all classes, with the same embedding work.

    >>> check_duplicate_prototypes(method("zero_shot"), Tasks())
    """
    features, text = embeddings(40, 7, 32)
    _check_sound(m, tasks.of(features, text[[0, 0, 2, 3, 4, 5, 6]]), "two equal classes")
    _check_sound(m, tasks.of(features, text[[0] * 7]), "all classes equal")


def check_row_lengths_change_nothing(m: Method, tasks: Tasks) -> None:
    """Embeddings need not be of length 1.

    >>> check_row_lengths_change_nothing(method("zero_shot"), Tasks())
    """
    task = tasks()
    rng = np.random.default_rng(1)
    features, text, views = (x * rng.uniform(0.1, 30, size=(*x.shape[:-1], 1))
                             for x in (task.features, task.text, task.extras["views"]))  # fmt: skip
    scaled = Task(features, text, task.logit_scale, extras={**task.extras, "views": views})
    expect_same(m.fit_predict(scaled), m.fit_predict(task), ROUNDING, "rows of other lengths")


def check_other_logit_scales(m: Method, tasks: Tasks) -> None:
    """Models with another temperature work.

    >>> check_other_logit_scales(method("zero_shot"), Tasks())
    """
    for scale in (1.0, 30.4, 1000.0):
        _check_sound(m, tasks.of(*embeddings(40, 7, 32), logit_scale=scale), f"logit scale {scale}")


def check_wide_space(m: Method, tasks: Tasks) -> None:
    """A different embedding space works: 1280 dimensions of very different scales, temperature 0.033.

    >>> check_wide_space(method("zero_shot"), Tasks())
    """
    _check_sound(m, tasks.of(*embeddings(8, 3, 1280, decades=3), logit_scale=30.4), "1280 dimensions")


def check_inputs_untouched(m: Method, tasks: Tasks) -> None:
    """No array that is passed in is written to.

    >>> check_inputs_untouched(method("zero_shot"), Tasks())
    """
    task = tasks()
    arrays = {"features": task.features, "text": task.text, "views": task.extras["views"]}
    before = {name: x.copy() for name, x in arrays.items()}
    for given, extras in (((task,), {}), ((task.features, task.text), task.extras)):
        m.fit_predict(*given, **extras)
        for name, x in arrays.items():
            expect(np.array_equal(x, before[name]), f"{name} was written to")


def check_deterministic(m: Method, tasks: Tasks) -> None:
    """Two runs agree to the last bit.

    >>> check_deterministic(method("zero_shot"), Tasks())
    """
    expect_same(m.fit_predict(tasks()), m.fit_predict(tasks()), 0.0, "a second run")


def check_options_round_trip(m: Method, tasks: Tasks) -> None:
    """The options survive copying, printing, the command line and the registry, and every preset can be made.

    >>> check_options_round_trip(method("moon"), Tasks())
    """
    cls = type(m)
    options = {name: getattr(m, name) for name in cls.specs()}
    expect(dataclasses.replace(m) == m, "dataclasses.replace(method) is another method")  # type: ignore[type-var]
    for name, value in options.items():
        expect(f"{name}={value!r}" in repr(m), f"'{name}' is not shown by repr")
    parsed = cls.parse({name: str(value) for name, value in options.items()})
    expect(parsed == options, f"the command line reads {parsed} for {options}")
    if m.name in method_names() and method_type(m.name) is cls:
        expect(method(m.name, **options) == m, f"method({m.name!r}, ...) with the same options is another method")
    for preset in cls.presets:
        expect(cls.from_preset(preset) == cls(**cls.presets[preset]), f"the preset {preset!r} cannot be made")


def check_documented(m: Method, tasks: Tasks) -> None:
    """The method has a citation and a docstring, and every option has a description and a valid default.

    >>> check_documented(method("moon"), Tasks())
    """
    expect(bool(m.citation), "the method has no citation")
    expect(bool(type(m).__doc__), "the class has no docstring")
    for name, spec in m.specs().items():
        expect(bool(spec.doc), f"'{name}' has no words about it")
        expect(spec.allows(spec.default), f"the default of '{name}', {spec.default!r}, is not {spec.rule()}")


def check_objective_never_rises(m: Method, tasks: Tasks) -> None:
    """The objective never rises. Not every method claims it: run this one on those that do, with the options it needs.

    >>> exact = dict(beta="soft", update="exact", gamma="off", inverse="newton", log_normaliser="accurate")
    >>> check_objective_never_rises(method("moon", **exact, kappa_cap=math.inf, laplacian_weight=0.0), Tasks())
    """
    objective = np.asarray(m.fit_predict(tasks()).objective)
    expect(objective.size > 1, "the method reports no objective")
    rise = float(np.diff(objective).max())
    expect(rise <= 1e-9 * float(np.abs(objective).max()), f"the objective rises by {rise:.2e}: {objective}")
