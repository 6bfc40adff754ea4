"""The compiled loops against the numpy that stands in for them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide import method
from moontide.core import compiled, ple, threads
from moontide.core.arrays import unit_rows
from moontide.core.graph import Graph, nearest_neighbours
from moontide.core.mixture import Anchors
from moontide.simulate import simulate

numba = pytest.importorskip("numba")
loops = pytest.importorskip("moontide.core._numba")

seeds = st.integers(0, 10_000)
sizes = st.sampled_from([1, 2, 7, 63, 64, 65, 130])  # about what a vectorised loop takes at a time


def passes() -> Any:
    """Do without the loops, as where Numba is missing."""
    patch = pytest.MonkeyPatch()
    patch.setattr(compiled, "_loops", lambda: None)
    return patch


def problem(seed: int, n: int, k: int) -> tuple[np.random.Generator, ple.AnchorLogits, Graph]:
    rng = np.random.default_rng(seed)
    cosine = rng.normal(0.2, 0.05, size=(n, k)).astype(np.float32)
    slope = rng.uniform(80, 120, size=k).astype(np.float32)
    graph = nearest_neighbours(unit_rows(rng.normal(size=(n, 8)).astype(np.float32)), 3)
    return rng, ple.AnchorLogits(cosine, slope, rng.normal(size=k).astype(np.float32)), graph


def test_exp_is_that_of_numpy() -> None:
    @numba.njit
    def of(x: Any) -> Any:
        out = np.empty_like(x)
        for i in range(x.shape[0]):
            out[i] = loops.exp(x[i])
        return out

    x = np.linspace(-86, 87, 100_001).astype(np.float32)
    np.testing.assert_allclose(of(x), np.exp(x.astype(float)), rtol=3e-7)
    assert of(np.asarray([-np.inf, -1e4, -88, 0], np.float32)).tolist() == [0, 0, 0, 1]


@settings(max_examples=60)
@given(seeds, st.integers(1, 9), sizes, st.booleans(), st.booleans())
def test_an_e_step(seed: int, n: int, k: int, symmetric: bool, plain_logits: bool) -> None:
    rng, rest, graph = problem(seed, n, k)
    votes_of = ple.neighbour_votes(graph, symmetric, True, 1.0)
    live = np.flatnonzero(rng.uniform(size=k) < 0.3)
    z, values = rng.dirichlet(np.ones(k), size=n).astype(np.float32), rest[:][:, live] + np.float32(1)
    logits = rest[:] if plain_logits else rest
    found = ple.e_step(logits, z, votes_of, live, values)
    wide = [x.astype(float) for x in (rest[:], z, values)]
    wanted = ple.e_step(wide[0], wide[1], votes_of, live, wide[2])
    for name in ple.Assignment._fields:
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), atol=1e-5, err_msg=name)
    np.testing.assert_allclose(ple.echo(z, votes_of), ple.echo(wide[1], votes_of), atol=1e-6)


@settings(max_examples=40)
@given(seeds, st.integers(1, 20), st.integers(1, 6))
def test_the_nearest_by_all_products(seed: int, n: int, m: int) -> None:
    f = unit_rows(np.random.default_rng(seed).integers(-2, 3, size=(n, 3)).astype(np.float32) + np.float32(0.5))
    gram = f @ f.T  # with many equals
    found = nearest_neighbours(f, m, gram=gram.copy())
    patch = passes()
    wanted = nearest_neighbours(f, m, gram=gram.copy())
    patch.undo()
    np.testing.assert_array_equal(found.neighbours, wanted.neighbours)
    np.testing.assert_array_equal(found.weights, wanted.weights)


@settings(max_examples=40)
@given(seeds, st.integers(1, 9), sizes)
def test_zero_shot_and_its_moments(seed: int, n: int, k: int) -> None:
    _, rest, _ = problem(seed, n, k)
    y, evidence, moments = ple.zero_shot_moments(rest.cosine, 100.0)
    exact = ple.zero_shot_moments(rest.cosine.astype(float), 100.0)
    np.testing.assert_allclose(y, exact[0], atol=2e-6)
    np.testing.assert_allclose(evidence, exact[1], rtol=1e-6)
    for name in ple.Moments._fields:
        np.testing.assert_allclose(getattr(moments, name), getattr(exact[2], name), rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(seeds, st.integers(1, 12), st.integers(1, 9), st.sampled_from(["simplified", "exact"]))
def test_an_m_step_in_the_span_of_the_samples(seed: int, n: int, few: int, update: str) -> None:
    rng = np.random.default_rng(seed)
    f, text = (unit_rows(rng.normal(size=(rows, 16)).astype(np.float32)) for rows in (n, few))
    z, gamma = rng.dirichlet(np.ones(few), size=n).astype(np.float32), rng.uniform(0.1, 1, size=n).astype(np.float32)
    anchors = Anchors(
        text, *(rng.uniform(low, high, few).astype(np.float32) for low, high in ((1, 9), (0.2, 1), (1, 4)))
    )
    given_ = (z, gamma, rng.integers(1, 9, few).astype(np.float32), anchors, f @ text.T, f @ f.T)
    step = method("moon", update=update).m_step(100.0)
    found = step.in_span(*given_)
    patch = passes()
    wanted = step.in_span(*given_)
    patch.undo()
    assert (found is None) == (wanted is None)
    for name, a, b in zip(wanted._fields if wanted else (), found or (), wanted or (), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("n", "k", "present"), [(40, 30, 4), (150, 300, 10), (600, 50, 50)])
def test_moon_answers_the_same_without_them(n: int, k: int, present: int) -> None:
    data = simulate(n, k, effective_classes=present, seed=0)
    found = method("moon").fit_predict(data.features, data.text)
    patch = passes()
    wanted = method("moon").fit_predict(data.features, data.text)
    patch.undo()
    np.testing.assert_array_equal(found.labels, wanted.labels)
    np.testing.assert_allclose(found.probs, wanted.probs, atol=3e-5)


@pytest.mark.parametrize("options", [{}, {"gamma_in_counts": True}, {"beta": "soft"}], ids=str)
@pytest.mark.parametrize("compiled_loops", [True, False])
def test_samples_that_say_nothing_leave_no_class_live(options: Any, compiled_loops: bool) -> None:
    rng = np.random.default_rng(0)
    features, text = rng.normal(size=(64, 512)).astype(np.float32), np.ones((300, 512), np.float32)
    patch = pytest.MonkeyPatch() if compiled_loops else passes()
    result = method("moon", **options).fit_predict(features, text)
    patch.undo()
    np.testing.assert_allclose(result.zero_shot, 1 / 300, rtol=1e-5)
    np.testing.assert_allclose(result.probs.sum(axis=1), 1, rtol=1e-5)


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = simulate(60, 300, effective_classes=5, seed=0)
    alone = method("moon").fit_predict(data.features, data.text)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "LEAST", 1)
    assert len(threads.row_blocks(60, 60 * 300)) == 3
    np.testing.assert_array_equal(method("moon").fit_predict(data.features, data.text).probs, alone.probs)


def test_they_can_be_switched_off_and_are_not_loaded_before_they_are_used() -> None:
    program = """
import sys, numpy as np
import moontide
from moontide.core.compiled import loops_for
assert "numba" not in sys.modules
assert loops_for(np.zeros((1, 1), np.float32)) is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "NUMBA_DISABLE_JIT": "1"})


def test_compiling_is_shown_once(tmp_path: Path) -> None:
    program = """
import numpy as np
from moontide.core.compiled import loops_for
from moontide.core.progress import reporting
told, gram = [], np.eye(3, dtype=np.float32)
with reporting(lambda *given: told.append(given)):
    for _ in range(2):
        loops_for(gram).nearest(gram, 1)
print(told)
"""
    command, env = [sys.executable, "-c", program], {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert re.fullmatch(r"\[\('compiling, once', 0, \d+\)\]\n", first)
    assert second == "[]\n"  # from the cache


def test_where_numba_cannot_be_used_numpy_is_and_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs another NumPy')")
    program = (
        "import numpy as np, moontide; print(moontide.MOON().fit_predict(np.eye(3, dtype='f4'), np.eye(3)).labels)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout == "[0 1 2]\n"
    assert "Numba cannot be used, so that numpy does its work, slower: Numba needs another NumPy" in done.stderr


def test_they_take_what_they_are_made_for() -> None:
    assert compiled.loops_for(np.zeros((2, 2), np.float32)) is loops
    for other in (np.zeros((2, 2)), np.zeros((2, 2), np.float32).T[:1].T, [1.0]):
        assert compiled.loops_for(other) is None


def test_where_nothing_can_be_cached_they_are_compiled_all_the_same() -> None:
    scope: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x", scope)  # a function without a file
    assert loops.loops(scope["double"])(2) == 4


@pytest.mark.parametrize("compiled_loops", [True, False])
@pytest.mark.parametrize("scale", [1, 100, 200, 300, 1000, 5000, 1e5])
def test_a_row_far_from_every_class_keeps_its_mass(scale: float, compiled_loops: bool) -> None:
    """The padding of a row of logits gets no mass, however far below zero the best logit is."""
    text = np.asarray([[1, 0]], np.float32)
    patch = pytest.MonkeyPatch() if compiled_loops else passes()
    alone = method("moon").fit_predict(-text, text, logit_scale=scale)
    far = np.asarray([[-1, 0], [-1, 0.1], [-1, 1e-3]], np.float32)
    two = method("moon").fit_predict(far, np.eye(2, dtype=np.float32), logit_scale=scale)
    patch.undo()
    np.testing.assert_array_equal(alone.probs, [[1.0]])
    np.testing.assert_allclose(two.probs.sum(axis=1), 1, rtol=1e-6)
