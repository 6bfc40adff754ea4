"""Every backend against the dense equations of benchmarks/reference.py, and step by step against each other."""

import math
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moontide import MOON, TIDE, Stream, method
from moontide.checks.tasks import embeddings
from moontide.core import backends, formulas, threads
from moontide.core.arrays import unit_rows
from moontide.core.backends import plain
from moontide.core.graph import nearest_neighbours
from moontide.core.mixture import VMF, Anchors, Step
from moontide.core.ple import weighted_sums
from moontide.methods import moon
from moontide.methods.moon import VMFMixture
from moontide.simulate import simulate

numba = pytest.importorskip("numba")
_numba = pytest.importorskip("moontide.core.backends._numba")
loops = pytest.importorskip("moontide.core.backends.loops")
reference = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/reference.py"))["reference"]

seeds = st.integers(0, 10_000)
sizes = st.sampled_from([1, 2, 7, 63, 64, 65, 130])  # about what a vectorised loop takes at a time
OPTIONS: list[dict[str, Any]] = [
    {}, {"votes": "gamma"}, {"graph": "one-sided", "laplacian": "sum"}, {"gamma": "zero_shot"}, {"temper": 20.0},
    {"laplacian_weight": 0.0}, {"gamma_in_counts": True, "update": "exact"}, {"laplacian_weight": 4.0},
    {"iterations": 2}, {"beta": "soft"}, {"update_mu": False}, {"update_kappa": False}, {"gamma": "off"},
    {"inverse": "newton", "log_normaliser": "accurate"}, {"iterations": 1, "final_assignment": False},
]  # fmt: skip


def kinds(name: str, data: Any) -> tuple[Any, Any]:
    """Return features and text as a backend takes them."""
    if name == "torch":
        torch = pytest.importorskip("torch")
        return torch.tensor(data.features), torch.tensor(data.text)
    dtype = np.float64 if name == "double" else np.float32
    return data.features.astype(dtype), data.text.astype(dtype)


def without_loops(patch: pytest.MonkeyPatch) -> None:
    """Do without Numba, as where it is missing."""
    patch.setattr(backends, "_loops", lambda: None)


# The whole run


@pytest.mark.parametrize("backend", ["plain", "double", "torch", "loops", "blocks"])
@pytest.mark.parametrize(
    ("n", "k", "d", "present"), [(1, 1, 8, 1), (2, 3, 8, 2), (40, 30, 64, 4), (150, 300, 64, 10), (300, 50, 512, 50)]
)
def test_every_backend_gives_the_reference(
    backend: str, n: int, k: int, d: int, present: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = simulate(n, k, dim=d, effective_classes=present, seed=0)
    features, text = kinds(backend, data)
    if backend in ("plain", "blocks"):
        without_loops(monkeypatch)
    if backend == "blocks":
        monkeypatch.setattr(moon, "LARGE", 0)
        monkeypatch.setattr("moontide.core.rows.BLOCK_ENTRIES", 40 * k)
    monkeypatch.setattr(loops, "SMALL", 0)
    found = MOON().fit_predict(features, text, logit_scale=data.logit_scale)
    f, t = (unit_rows(x.astype(np.float64)) for x in (data.features, data.text))
    wanted = reference(f, t, data.logit_scale)
    np.testing.assert_allclose(
        np.asarray(found.probs), wanted, atol={"double": 1e-9, "blocks": 5e-4}.get(backend, 2e-5)
    )
    np.testing.assert_array_equal(np.asarray(found.labels), wanted.argmax(axis=1))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("n", "k", "present"), [(40, 100, 4), (150, 300, 10)])
def test_loops_give_what_the_equations_give(
    options: dict[str, Any], n: int, k: int, present: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moon, "STILL", 0)  # as many iterations in both
    monkeypatch.setattr(loops, "SMALL", 0)
    for seed in range(2):
        data = simulate(n, k, dim=(64, 512)[seed], effective_classes=present, seed=seed)
        found = MOON(**options).fit_predict(data.features, data.text)
        wanted = MOON(**options).fit_predict(data.features.astype(np.float64), data.text)
        np.testing.assert_allclose(found.probs, wanted.probs, atol=3e-5)
        np.testing.assert_array_equal(found.labels, wanted.labels)
        np.testing.assert_allclose(found.objective, wanted.objective, rtol=1e-5)
        np.testing.assert_allclose(found.details["gamma"], wanted.details["gamma"], atol=3e-5)
        np.testing.assert_allclose(found.details["mu"], wanted.details["mu"], atol=3e-5)
        for name in ("beta", "kappa"):
            np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=2e-4, atol=1e-5)


def test_absent_classes_are_left_alone_where_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    worthwhile = loops.worthwhile
    monkeypatch.setattr(loops, "worthwhile", lambda z, present: asked.append(worthwhile(z, present)) or asked[-1])
    monkeypatch.setattr(loops, "SMALL", 0)
    data = simulate(60, 200, effective_classes=5, seed=0)
    MOON().fit_predict(data.features, data.text)
    assert asked == [True]
    MOON(temper=1e4, text_weight=0.0).fit_predict(data.features, data.text)  # every z_ik near 1 / K
    assert not any(asked[1:])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_iterations_that_would_repeat_the_last_are_left_out(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = simulate(60, 100, effective_classes=5, seed=0)
    features = data.features.astype(dtype)
    short = MOON(iterations=300).fit_predict(features, data.text)
    assert 3 < short.n_iter < 300
    assert short.converged
    assert len(short.objective) == short.n_iter + 1
    monkeypatch.setattr(moon, "STILL", 0)
    full = MOON(iterations=300).fit_predict(features, data.text)
    assert full.n_iter == 300
    np.testing.assert_allclose(short.probs, full.probs, atol=1e-5)
    np.testing.assert_allclose(short.objective[-1], full.objective[-1], rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"gamma_in_counts": True}, {"beta": "soft"}], ids=str)
@pytest.mark.parametrize("with_loops", [True, False])
def test_samples_without_evidence_leave_no_class_present(
    options: Any, with_loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    features, text = rng.normal(size=(64, 512)).astype(np.float32), np.ones((300, 512), np.float32)
    if not with_loops:
        without_loops(monkeypatch)
    result = method("moon", **options).fit_predict(features, text)
    np.testing.assert_allclose(result.zero_shot, 1 / 300, rtol=1e-5)
    np.testing.assert_allclose(result.probs.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("with_loops", [True, False])
@pytest.mark.parametrize("scale", [1, 100, 200, 300, 1000, 5000, 1e5])
def test_a_row_far_from_every_class_keeps_its_mass(
    scale: float, with_loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding of a row of logits gets no mass, however far below zero the best logit is."""
    text = np.asarray([[1, 0]], np.float32)
    if not with_loops:
        without_loops(monkeypatch)
    alone = method("moon").fit_predict(-text, text, logit_scale=scale)
    far = np.asarray([[-1, 0], [-1, 0.1], [-1, 1e-3]], np.float32)
    two = method("moon").fit_predict(far, np.eye(2, dtype=np.float32), logit_scale=scale)
    np.testing.assert_array_equal(alone.probs, [[1.0]])
    np.testing.assert_allclose(two.probs.sum(axis=1), 1, rtol=1e-6)


# Step by step


@settings(max_examples=40, deadline=None)
@given(
    seeds,
    st.sampled_from([(12, 9, 4), (40, 30, 64)]),
    st.sampled_from([{}, {"votes": "gamma"}, {"graph": "one-sided"}]),
)
def test_every_step_of_the_loops_is_that_of_the_equations(seed: int, shape: Any, options: dict[str, Any]) -> None:
    n, k, d = shape
    data = simulate(n, k, dim=d, effective_classes=min(3, k), seed=seed)
    f, t = (unit_rows(x) for x in (data.features, data.text))
    wide = f.astype(np.float64), t.astype(np.float64)
    graph = nearest_neighbours(wide[0], 3)
    narrow = type(graph)(graph.neighbours, graph.weights.astype(np.float32))
    options_ = MOON(**options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "SMALL", 0)
        patch.setattr(loops, "SHARE", 1.0)
        found = loops.Rows(options_, f, t, 100.0, narrow, in_memory=True)
        wanted = plain.Rows(options_, *wide, 100.0, graph, in_memory=True)
        a, b = VMFMixture(options_, t, 100.0, loops.m_step), VMFMixture(options_, wide[1], 100.0)
        mine, theirs = a.begin(found.call), b.begin(wanted.call)
        for _ in range(4):
            step, other = found.step(mine.scores), wanted.step(theirs.scores)
            sure = np.diff(np.sort(wanted.z, axis=1)[:, -2:], axis=1)[:, 0] > 1e-4 if k > 1 else np.ones(n, bool)
            if not sure.all():
                return  # a tie may be decided either way
            for name in ("free", "laplacian"):
                np.testing.assert_allclose(
                    getattr(step, name), getattr(other, name), rtol=1e-4, atol=2e-4, err_msg=name
                )
            mine, theirs = a.update(step), b.update(other)
            for one, another in zip(a.vmf.whole(mine), b.vmf.whole(theirs), strict=True):
                np.testing.assert_allclose(one, another, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(found._dense(), wanted.z, atol=1e-4)


def rows_with_absent_classes(seed: int = 0) -> tuple[Any, Any, Any]:
    """Return rows after two E-steps with most classes absent, the next classes, and their logits."""
    data = simulate(40, 60, effective_classes=4, seed=seed)
    rows = loops.Rows(MOON(), data.features, data.text, 100.0, in_memory=True)
    mixture = VMFMixture(MOON(), data.text, 100.0, loops.m_step)
    classes = mixture.begin(rows.call)
    for _ in range(2):
        classes = mixture.update(rows.step(classes.scores))
    return rows, classes, classes.scores.values


def test_what_absent_classes_cannot_do_accurately_is_left_to_the_dense_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "SMALL", 0)
    for change in (100, -100):  # beyond the range of float32; rows whose largest class vanishes
        rows, _, values = rows_with_absent_classes()
        assert rows.absent is not None
        before = rows.absent.z.copy()
        assert rows.absent.e_step(values + np.float32(change)) is None
        np.testing.assert_array_equal(rows.absent.z, before)  # as if nothing had been asked


def test_shared_entries_are_all_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "SMALL", 0)
    rows, _, _ = rows_with_absent_classes()
    matrix, present, entry = rows.votes_of.matrix.toarray(), rows.absent.present, rows.absent.entry
    z = rows._dense().copy()
    z[:, present] = 0
    wanted = np.flatnonzero(z * (np.abs(matrix) @ z) > loops.NEGLIGIBLE)
    np.testing.assert_array_equal(entry, wanted)


@settings(max_examples=40)
@given(seeds, st.integers(1, 12), st.integers(1, 9), st.sampled_from([8, 32]), st.sampled_from(["simplified", "exact"]))
def test_an_m_step_by_products_with_the_sums(seed: int, n: int, count: int, d: int, update: str) -> None:
    rng = np.random.default_rng(seed)
    f, text = (unit_rows(x) for x in embeddings(n, count, d, seed))
    f, text = f.astype(np.float32), text.astype(np.float32)
    z, gamma = rng.dirichlet(np.ones(count), size=n).astype(np.float32), rng.uniform(0.1, 1, n).astype(np.float32)
    anchors = Anchors(
        text, *(rng.uniform(low, high, count).astype(np.float32) for low, high in ((1, 9), (0.2, 1), (1, 4)))
    )
    counts = rng.integers(1, 9, count).astype(np.float32)
    vmf, none = VMF(MOON(update=update), anchors, 100.0), np.zeros(n, np.float32)
    rows = loops.Rows(MOON(), f, text, 100.0, in_memory=True)
    rows.gamma, rows.cosine, rows.z = gamma, f @ text.T, z
    given_ = counts, none, none, 0, 0.0, np.arange(count)
    found = loops.m_step(vmf, loops.LoopStep(None, None, *given_, rows))
    wanted = plain.m_step(vmf, Step(*weighted_sums(z, gamma, f), *given_))
    for name in ("beta", "kappa", "kl"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=2e-3, atol=2e-4, err_msg=name)
    if found.scores.values is None:  # a mean near zero
        return
    np.testing.assert_allclose(found.mu(), wanted.mu, atol=1e-4)
    values = f @ wanted.scores.prototypes.T + wanted.scores.offset
    np.testing.assert_allclose(found.scores.values, values, rtol=2e-4, atol=2e-3)


def test_a_mean_near_zero_is_left_to_vectors() -> None:
    f = np.asarray([[1.0, 0.0], [-1.0, 0.0]], np.float32)
    one = np.ones(2, np.float32)
    rows = loops.Rows(MOON(), f, f[:1], 100.0, in_memory=True)
    vmf = VMF(MOON(), Anchors(f[:1], one[:1], one[:1], 1e-9 * one[:1]), 100.0)
    rows.cosine, rows.z = f @ f[:1].T, one[:, None]
    found = loops.m_step(vmf, loops.LoopStep(None, None, 2 * one[:1], one, one, 0, 0.0, np.asarray([0]), rows))
    assert found.scores.values is None
    assert found.scores.prototypes is not None
    assert np.isfinite(found.kappa).all()


# The loops one by one


def test_exp_is_that_of_numpy() -> None:
    @numba.njit
    def of(x: Any) -> Any:
        out = np.empty_like(x)
        for i in range(x.shape[0]):
            out[i] = _numba.exp(x[i])
        return out

    x = np.linspace(-86, 87, 100_001).astype(np.float32)
    np.testing.assert_allclose(of(x), np.exp(x.astype(float)), rtol=3e-7)
    assert of(np.asarray([-np.inf, -1e4, -88, 0], np.float32)).tolist() == [0, 0, 0, 1]


@given(st.floats(0.0, 0.999), st.floats(1e-6, 1e5), st.floats(0.0, 100.0), st.floats(0.1, 100.0))
def test_formulas_are_the_same_compiled(r: float, kappa: float, n: float, alpha: float) -> None:
    given_: dict[str, tuple[float, ...]] = {
        "shrinkage": (n, alpha), "entropy_weight": (r, alpha), "banerjee": (512, r),
        "log_c": (512, kappa, math.log(kappa)), "anchor_kl": (n, alpha, r, kappa, kappa / 2, r),
    }  # fmt: skip
    for name, values in given_.items():
        assert getattr(_numba, name)(*values) == pytest.approx(getattr(formulas, name)(*values), rel=1e-12, abs=1e-9)


@settings(max_examples=40)
@given(seeds, st.integers(2, 20), st.integers(1, 6))
def test_the_nearest_by_all_products(seed: int, n: int, m: int) -> None:
    f = unit_rows(np.random.default_rng(seed).integers(-2, 3, size=(n, 3)).astype(np.float32) + np.float32(0.5))
    gram = f @ f.T  # with many equals
    found, weights = _numba.nearest(gram, min(m, n - 1))
    np.fill_diagonal(gram, -np.inf)
    wanted = np.argsort(-gram, axis=1, kind="stable")[:, : min(m, n - 1)]
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(weights, np.take_along_axis(gram, wanted, axis=1))


@settings(max_examples=40)
@given(seeds, st.integers(1, 9), sizes)
def test_zero_shot_and_its_sums(seed: int, n: int, k: int) -> None:
    cosine = np.random.default_rng(seed).normal(0.2, 0.05, size=(n, k)).astype(np.float32)
    y = np.empty_like(cosine)
    labels, (log_sum, sure, unlike) = np.empty(n, np.int64), np.empty((3, n), np.float32)
    given = cosine, np.float32(100), y, labels, log_sum, sure, unlike
    total, along, most, own = _numba.zero_shot(0, n, *given)
    exact = np.exp(100 * cosine.astype(float))
    wanted = exact / exact.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(y, wanted, atol=3e-6)
    np.testing.assert_array_equal(labels, cosine.argmax(axis=1))
    np.testing.assert_allclose(log_sum, np.log(exact.sum(axis=1)), rtol=1e-6)
    np.testing.assert_allclose(sure, wanted.max(axis=1), rtol=1e-4)
    np.testing.assert_allclose(unlike, 1 - (cosine.max(axis=1) - cosine.mean(axis=1)), atol=1e-5)
    np.testing.assert_allclose(own, (wanted**2).sum(), rtol=1e-4)
    for found, value in (
        (total, wanted.sum(axis=0)),
        (most, wanted.max(axis=0)),
        (along, (wanted * cosine).sum(axis=0)),
    ):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)


# Which is chosen, and where it runs


def test_backends_are_chosen_by_the_arrays() -> None:
    assert backends.choose(np.zeros((2, 2), np.float32), 3) is loops
    for other in (np.zeros((2, 2)), np.zeros((2, 2), np.float32).T[:1].T):
        assert backends.choose(other, 3) is plain
    torch = pytest.importorskip("torch")
    assert backends.choose(torch.zeros(2, 2), 3) is plain


def test_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = simulate(60, 300, effective_classes=5, seed=0)
    alone = method("moon").fit_predict(data.features, data.text)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "LEAST", 1)
    assert len(threads.row_blocks(60, 60 * 300)) == 3
    np.testing.assert_array_equal(method("moon").fit_predict(data.features, data.text).probs, alone.probs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_streams_may_be_stepped_by_several_threads_at_once(device: str) -> None:
    """Captured graphs and the precision of products belong to the process: a guard keeps threads apart."""
    data = [simulate(64, 50, effective_classes=5, seed=seed) for seed in range(2)]
    if device == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        given_ = [(torch.tensor(x.features).cuda(), torch.tensor(x.text).cuda()) for x in data]
    else:
        given_ = [(x.features, x.text) for x in data]
    precisions = ["full", "full"] if device == "cpu" else ["full", "half"]
    methods = [MOON(precision=precisions[0]), MOON(precision=precisions[1]), TIDE(), TIDE()]

    def labels_of(i: int) -> list[int]:
        """Step a stream along its samples, 8 at a time, in steps that a GPU captures and then replays."""
        features, text = given_[i % 2]
        stream = Stream(methods[i], text)
        return [int(k) for start in range(0, 64, 8) for k in stream.push(features[start : start + 8]).labels]

    alone = [labels_of(i) for i in range(len(methods))]
    with ThreadPoolExecutor(len(methods)) as pool:
        for _ in range(3):
            assert list(pool.map(labels_of, range(len(methods)))) == alone


def test_loops_can_be_switched_off_and_are_not_loaded_before_they_are_used() -> None:
    program = """
import sys, numpy as np
import moontide
from moontide.core.backends import compiled
assert "numba" not in sys.modules
assert compiled(np.zeros((1, 1), np.float32)) is None
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "NUMBA_DISABLE_JIT": "1"})


def test_compiling_is_shown_once(tmp_path: Path) -> None:
    program = """
import numpy as np
from moontide.core.backends import compiled
from moontide.progress import reporting
shown, gram = [], np.eye(3, dtype=np.float32)
with reporting(lambda *given: shown.append(given)):
    for _ in range(2):
        compiled(gram).nearest(gram, 1)
print(shown)
"""
    command, env = [sys.executable, "-c", program], {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    first, second = (
        subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert re.fullmatch(r"\[\('compiling, once', 0, \d+\)\]\n", first)
    assert second == "[]\n"  # from the cache


def test_where_numba_cannot_be_used_numpy_is_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs another NumPy')")
    program = (
        "import numpy as np, moontide; print(moontide.MOON().fit_predict(np.eye(3, dtype='f4'), np.eye(3)).labels)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout == "[0 1 2]\n"
    assert "Numba cannot be used, so that numpy does its work, slower: Numba needs another NumPy" in done.stderr


def test_where_nothing_can_be_cached_they_are_compiled_all_the_same() -> None:
    scope: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x", scope)  # a function without a file
    assert _numba.loops(scope["double"])(2) == 4
