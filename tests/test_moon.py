"""MOON: its objective written out and never rising, every option at work, and nothing larger than a few N x K."""

import dataclasses
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide import MOON, Graph, Result, Task
from moontide.checks.tasks import embeddings
from moontide.core.arrays import unit_rows
from moontide.core.graph import nearest_neighbours
from moontide.core.ple import initial_resultant, log_c
from moontide.core.simplex import zero_shot
from moontide.core.vmf import bessel
from moontide.errors import OptionError
from moontide.progress import reporting

seeds = st.integers(0, 10_000)
TASK = Task(*embeddings(24, 12, 64))  # some classes have no sample
EXACT: dict[str, Any] = {
    "beta": "soft", "update": "exact", "inverse": "newton", "log_normaliser": "accurate", "kappa_cap": math.inf,
    "r_cap": 1.0, "count_epsilon": 0.0,
}  # fmt: skip
PAPER = dict(MOON.presets["paper"])


# The objective


def literal_objective(method: MOON, task: Task, result: Result) -> float:
    """Eq. ple-ours term by term, from the final assignments and parameters."""
    f, t, n = task.features, task.text, task.n
    z, y, mu, kappa = result.probs, result.zero_shot, result.details["mu"], result.kappa
    gamma, alpha, anchor_kappa = (result.details[name] for name in ("gamma", "alpha", "anchor_kappa"))
    along = (y * (f @ t.T)).sum(axis=0)
    anchor_r = np.clip(initial_resultant(y.sum(axis=0), along, method.count_epsilon), 0, method.r_cap)

    log_p = kappa * (f @ mu.T) + log_c(task.d, kappa, method.log_normaliser)  # (N, K)
    likelihood = -np.sum(gamma[:, None] * z * log_p) / method.temper
    text = np.sum(gamma[:, None] * z * (np.log(z + 1e-300) - method.text_weight * np.log(y + 1e-300)))

    affinity = np.zeros((n, n))
    graph = result.details["graph"]
    np.add.at(affinity, (np.arange(n)[:, None], graph.neighbours), graph.weights)
    votes = max(graph.m, 1)
    if method.graph == "symmetric":
        affinity, votes = affinity + affinity.T, 2 * votes
    affinity *= method.laplacian_weight / (votes if method.laplacian == "mean" else 1)
    if method.votes == "gamma":
        laplacian = -np.sum(np.outer(gamma, gamma) * affinity * (z @ z.T)) / 2
    else:
        laplacian = -np.sum(gamma[:, None] * affinity * (z @ z.T)) / 2

    log_ratio = log_c(task.d, anchor_kappa, method.log_normaliser) - log_c(task.d, kappa, method.log_normaliser)
    divergence = log_ratio + anchor_r * anchor_kappa - kappa * anchor_r * np.sum(mu * t, axis=1)  # (K,)
    return float(likelihood + text + laplacian + np.sum(alpha * divergence) / method.temper)


@pytest.mark.parametrize(
    "options",
    [
        {}, PAPER, EXACT, {**EXACT, "gamma": "zero_shot", "votes": "gamma"}, {"gamma": "off", "alpha": 2.0},
        {"laplacian_weight": 0.0}, {"text_weight": 0.5, "laplacian": "sum", "graph": "one-sided"},
        {"votes": "gamma", "laplacian_weight": 2.0}, {"update_mu": False}, {"update_kappa": False},
    ],
)  # fmt: skip
def test_the_objective_is_the_formula_after_every_e_step(options: dict[str, Any]) -> None:
    longest = MOON(**{**options, "iterations": 5}).fit_predict(TASK).objective
    for iterations in range(2, 6):
        method = MOON(**{**options, "iterations": iterations})
        result = method.fit_predict(TASK)
        assert len(result.objective) == method.m_steps + 1
        np.testing.assert_allclose(result.objective[-1], literal_objective(method, TASK, result), rtol=1e-9)
        np.testing.assert_allclose(result.objective, longest[: len(result.objective)], rtol=1e-12)


def full_graph(features: np.ndarray) -> Graph:
    """The Gram matrix with its diagonal: a positive semi-definite affinity, which m nearest neighbours are not."""
    n = len(features)
    return Graph(np.tile(np.arange(n), (n, 1)), features @ features.T)


@given(
    seeds, st.integers(1, 25), st.integers(1, 8), st.integers(3, 24), st.sampled_from([1.0, 7.0, 50.0]),
    st.sampled_from([1.0, 30.0, 100.0]), st.sampled_from(["sum", "mean"]), st.floats(0.1, 3),
    st.sampled_from([{"gamma": "off"}, {"gamma": "zero_shot", "votes": "gamma"}]), st.sampled_from(["1/lambda", 0.3]),
)  # fmt: skip
@settings(max_examples=60)
def test_the_objective_never_rises(
    seed: int, n: int, k: int, d: int, temper: float, logit_scale: float, laplacian: str, laplacian_weight: float,
    gamma: dict[str, str], alpha: Any,
) -> None:  # fmt: skip
    features, text = embeddings(n, k, d, seed)
    method = MOON(
        temper=temper, laplacian=laplacian, laplacian_weight=laplacian_weight, alpha=alpha, **EXACT, **gamma
    )  # fmt: skip
    result = method.fit_predict(features, text, logit_scale=logit_scale, graph=full_graph(features))
    objective = np.asarray(result.objective)
    assert len(objective) == result.n_iter + 1 <= 11
    assert np.diff(objective).max() <= 1e-9 * max(1, np.abs(objective).max())


@pytest.mark.parametrize(
    "change",
    [
        {"beta": "hard"}, {"update": "simplified"}, {"inverse": "banerjee"}, {"log_normaliser": "asymptotic"},
        {"gamma": "assignments"}, {"gamma": "zero_shot"},
    ],
)  # fmt: skip
def test_the_objective_can_rise_where_a_condition_does_not_hold(change: dict[str, Any]) -> None:
    """`votes="gamma"` is one of them: with zero-shot gamma and plain votes the objective of some task rises."""
    rises = []
    for seed in range(30):
        features, text = embeddings(12, 4, 8, seed)
        method = MOON(**{**EXACT, "gamma": "off", "temper": 1.0, **change})
        result = method.fit_predict(features, text, logit_scale=10.0, graph=full_graph(features))
        rises.append(np.diff(result.objective).max() / np.abs(result.objective).max())
    assert max(rises) > 1e-6


def test_the_m_step_leaves_absent_classes_at_their_anchor() -> None:
    features, text = embeddings(40, 7, 32)
    text[3] = -features.mean(axis=0)  # no sample is near it
    result = MOON(update="exact", kappa_cap=math.inf).fit_predict(features, text)
    assert result.beta[3] == 0
    np.testing.assert_allclose(result.kappa[3], result.details["anchor_kappa"][3], rtol=1e-12)
    np.testing.assert_allclose(result.details["mu"][3], unit_rows(text)[3], atol=1e-15)
    present = result.beta > 0
    assert (np.abs(result.details["mu"][present] - unit_rows(text)[present]).max(axis=1) > 1e-3).all()


def test_the_anchor_is_initialised_from_zero_shot() -> None:
    result = MOON(inverse="newton").fit_predict(TASK)
    y, f, t = zero_shot(TASK.features, TASK.text, 100.0), TASK.features, TASK.text
    distance = ((f[:, None, :] - t[None, :, :]) ** 2).sum(axis=2)
    wanted = 1 - (y * distance).sum(axis=0) / (2 * y.sum(axis=0))
    kappa = result.details["anchor_kappa"]
    np.testing.assert_allclose(kappa * bessel(64, kappa).a_by_x, wanted, rtol=1e-8)
    confidence = np.sqrt(y.mean(axis=0) * y.max(axis=0))
    np.testing.assert_allclose(result.details["alpha"], confidence.max() / confidence, rtol=1e-9)


# The options

OTHER: dict[str, list[Any]] = {
    "beta": ["soft"], "update": ["exact"], "alpha": ["lambda", "exp(-lambda)", 0.5, 3],
    "confidence": ["arithmetic", "harmonic", "average", "max"], "normalise_confidence": [False],
    "gamma": ["zero_shot", "off"], "gamma_in_counts": [True], "votes": ["gamma"], "update_mu": [False],
    "update_kappa": [False], "temper": [1.0, 1e3], "kappa_cap": [5.0, math.inf], "r_cap": [0.1, 0.3],
    "neighbours": [1, 100], "graph": ["one-sided"], "laplacian": ["sum"], "laplacian_weight": [0.0, 5.0],
    "text_weight": [0.0, 0.5], "log_normaliser": ["accurate"], "inverse": ["newton"], "precision": [],
    "iterations": [1, 3], "final_assignment": [False], "count_epsilon": [0.0, 1.0],
}  # fmt: skip


def test_the_table_of_values_has_every_option_and_choice() -> None:
    assert OTHER.keys() == MOON.specs().keys()
    for name, spec in MOON.specs().items():
        assert name == "precision" or {*spec.choices} <= {spec.default, *OTHER[name]}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OTHER.items() for value in values])
def test_every_value_of_every_option_changes_the_answer(name: str, value: Any) -> None:
    result = MOON(**{name: value}).fit_predict(TASK)
    assert np.isfinite(result.probs).all()
    np.testing.assert_allclose(result.probs.sum(axis=1), 1, rtol=1e-9)
    assert np.isfinite(result.objective).all()
    assert not np.array_equal(result.probs, MOON().fit_predict(TASK).probs)


@given(st.fixed_dictionaries({name: st.sampled_from([MOON.specs()[name].default, *OTHER[name]]) for name in OTHER}))
@settings(max_examples=150)
def test_every_combination_runs_or_says_what_has_no_effect(options: dict[str, Any]) -> None:
    try:
        method = MOON(**options)
    except OptionError as error:
        if "has no effect" not in str(error):
            raise
        return
    for dtype in ("float32", "float64"):
        result = method.fit_predict(TASK.features.astype(dtype), TASK.text)
        assert np.isfinite(result.probs).all()
        assert np.isfinite(result.kappa).all()


NO_M_STEP = ("beta", "update", "alpha", "confidence", "normalise_confidence", "gamma_in_counts", "gamma")
INERT = [
    ({"alpha": 2.0}, ("confidence", "normalise_confidence")),
    ({"beta": "soft"}, ("gamma_in_counts",)),
    ({"gamma": "off"}, ("gamma_in_counts", "votes")),
    ({"laplacian_weight": 0.0}, ("neighbours", "graph", "laplacian", "votes")),
    ({"update_kappa": False}, ("kappa_cap",)),
    ({"update_mu": False, "update_kappa": False}, (*NO_M_STEP, "kappa_cap")),
    ({"iterations": 1, "final_assignment": False}, (*NO_M_STEP, "update_mu", "update_kappa", "kappa_cap")),
]


@pytest.mark.parametrize(("base", "inert"), INERT)
def test_an_option_without_effect_is_refused_by_name(base: dict[str, Any], inert: tuple[str, ...]) -> None:
    method = MOON(**base)
    assert {name for names, _ in method.inert() for name in names} == set(inert)
    for name in inert:
        for value in OTHER[name]:
            with pytest.raises(OptionError, match=f"^The '{name}' option of moon has no effect with"):
                MOON(**base, **{name: value})


@pytest.mark.parametrize(("base", "inert"), [row for row in INERT if "gamma" not in row[0]])
def test_what_is_refused_has_indeed_no_effect(base: dict[str, Any], inert: tuple[str, ...]) -> None:
    wanted = MOON(**base).fit_predict(TASK)
    for name in inert:
        for value in OTHER[name]:
            forced = MOON(**base)
            object.__setattr__(forced, name, value)
            np.testing.assert_array_equal(forced.fit_predict(TASK).labels, wanted.labels)
            np.testing.assert_allclose(forced.fit_predict(TASK).probs, wanted.probs, atol=1e-12)


@pytest.mark.parametrize("precision", ["tf32", "half"])
def test_lower_precision_is_for_a_gpu(precision: str) -> None:
    with pytest.raises(OptionError, match="'precision' option of moon has no effect on a CPU"):
        MOON(precision=precision).fit_predict(TASK)


def test_presets() -> None:
    assert MOON.from_preset("released") == MOON()
    paper = MOON.from_preset("paper", iterations=4)
    assert dataclasses.replace(paper, iterations=10) == MOON(**PAPER)
    assert paper.m_steps == 3
    assert MOON().m_steps == 10


# The graph and the memory


def test_a_given_graph_is_used() -> None:
    features, text = TASK.features, TASK.text
    built = MOON().fit_predict(features, text)
    same = MOON().fit_predict(features, text, graph=nearest_neighbours(features, 3))
    np.testing.assert_allclose(same.probs, built.probs, rtol=1e-12)
    other = MOON().fit_predict(features, text, graph=nearest_neighbours(features, 9))
    assert not np.allclose(other.probs, built.probs)
    with pytest.raises(OptionError, match="'neighbours' option of moon has no effect on a task that brings its own"):
        MOON(neighbours=5).fit_predict(features, text, graph=nearest_neighbours(features, 3))


def test_convergence_is_reported() -> None:
    few, many = (MOON(iterations=iterations).fit_predict(TASK) for iterations in (1, 10))
    assert many.converged
    assert many.n_iter == 10
    assert few.n_iter == 1


def test_a_thousand_samples_and_classes_take_less_than_100_megabytes() -> None:
    rng = np.random.default_rng(0)
    features, text = (unit_rows(rng.normal(size=(1000, 512)).astype("float32")) for _ in range(2))
    tracemalloc.start()
    MOON().fit_predict(features, text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert peak < 1.5 * MOON().peak_bytes(1000, 1000, 512, 4)  # what a run asks for before it starts


def test_a_run_tells_how_far_it_is() -> None:
    reports: list[tuple[str, int, int]] = []
    with reporting(lambda what, done, total: reports.append((what, done, total))):
        MOON(iterations=2).fit_predict(TASK)
    assert [x for x in reports if x[0] != "neighbours"] == [("iterations", done, 3) for done in range(3)]
