"""The Triton kernels, run in Triton's interpreter, against plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)"),
]

PROGRAM = """
import runpy, sys
import numpy as np, torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction
from moontide import MOON, TIDE
from moontide.core import backends
from moontide.core.arrays import unit_rows
from moontide.core.backends import _triton, kernels, plain, tide_kernels
from moontide.core.graph import Graph, nearest_neighbours, neighbour_votes
from moontide.errors import InputError
from moontide.methods.moon import VMFMixture
from moontide.simulate import simulate

reference = runpy.run_path(sys.argv[1])["reference"]
assert backends.choose(torch.zeros(1, 1), 3) is kernels
rng = np.random.default_rng(0)
for n, d, m in ((1, 8, 3), (2, 8, 3), (40, 24, 3), (140, 70, 5)):
    f = rng.normal(size=(n, d)).astype(np.float32)
    if n > 2:
        f[1] = f[0]  # duplicate rows: a sample is never its own neighbour
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    graph, fused = nearest_neighbours(f, m), nearest_neighbours(torch.from_numpy(f), m)
    assert np.allclose(graph.weights, fused.weights.numpy(), atol=1e-5)
    assert not (fused.neighbours == torch.arange(n)[:, None]).any()
    differ = (graph.neighbours != fused.neighbours.numpy()).sum()
    assert differ <= 0.03 * fused.neighbours.numel()  # ties in the last bit
for which in (0, 1):  # rows are scaled without waiting, and refused after the run
    for value in (0.0, float("nan"), float("inf")):
        pair = [torch.randn(6, 8), torch.randn(5, 8)]
        assert MOON().fit_predict(*pair).probs.isfinite().all()
        pair[which][3] = value
        try:
            MOON().fit_predict(*pair)
            raise AssertionError(value)
        except InputError as error:
            assert ("text_features" if which else "image_features") in str(error) and "row 3" in str(error), error
small = [1e-30 * torch.randn(6, 8), torch.randn(5, 8)]  # fit to be scaled with care
assert torch.allclose(MOON().fit_predict(*small).probs, MOON().fit_predict(1e30 * small[0], small[1]).probs, atol=1e-4)
OPTIONS = ({}, {"votes": "gamma"}, {"gamma": "zero_shot"}, {"update": "exact"}, {"gamma_in_counts": True},
           {"beta": "soft"}, {"inverse": "newton"}, {"precision": "half"})
data = simulate(24, 12, dim=24, effective_classes=4, seed=1)
f, t = unit_rows(data.features), unit_rows(data.text)
wide = f.astype(float), t.astype(float)
graph = nearest_neighbours(wide[0], 3)
narrow = Graph(torch.tensor(graph.neighbours), torch.tensor(graph.weights, dtype=torch.float32))
for options in OPTIONS:
    half = "precision" in options
    kernels.HALF = 0 if half else 2**23
    method = MOON(**options)
    found = kernels.Rows(method, torch.tensor(f), torch.tensor(t), 100.0, narrow, in_memory=True)
    wanted = plain.Rows(method, *wide, 100.0, graph, in_memory=True)
    a, b = VMFMixture(method, torch.tensor(t), 100.0, kernels.m_step), VMFMixture(method, wide[1], 100.0)
    mine, other = a.begin(found.call), b.begin(wanted.call)
    for _ in range(3):
        one, two = found.step(mine.scores), wanted.step(other.scores)
        tolerance = 2e-2 if half else 2e-4
        assert np.allclose(found.unpack()[0].numpy(), wanted.z, atol=tolerance), options
        for name in ("free", "laplacian"):
            assert np.allclose(getattr(one, name).numpy(), getattr(two, name), rtol=tolerance, atol=tolerance), name
        mine, other = a.update(one), b.update(two)
        for x, y in zip(a.vmf.whole(mine), b.vmf.whole(other)):
            assert np.allclose(x.numpy(), y, rtol=2e-2 if half else 2e-3, atol=tolerance), options
    assert np.allclose(found.finish().value.numpy(), wanted.finish().value, rtol=tolerance, atol=tolerance), options
kernels.HALF = 2**23


class Waits(TorchDispatchMode):  # refuses what waits for a GPU, or copies to it from memory: neither can be captured
    NAMES = {
        "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "_coalesce", "lift_fresh", "equal"}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name.split("::")[1] not in self.NAMES, function
        return function(*args, **(kwargs or {}))


class Outside:  # a kernel that is not watched, since the interpreter itself copies
    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, *a, **b):
        return self.kernel(*a, **b)

    def __getitem__(self, grid):
        def launch(*a, **b):
            with _disable_current_modes():
                return self.kernel[grid](*a, **b)

        return launch


def watched(solve, f, text):
    given = {name: x for name, x in vars(_triton).items() if isinstance(x, InterpretedFunction)}
    assert len(given) > 10
    for name, kernel in given.items():
        setattr(_triton, name, Outside(kernel))
    reads = {name: getattr(torch.Tensor, name) for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__float__")}
    for name in reads:
        setattr(torch.Tensor, name, refused)
    try:
        with Waits():
            return solve(f, text)
    finally:
        for name, read in reads.items():
            setattr(torch.Tensor, name, read)
        for name, kernel in given.items():
            setattr(_triton, name, kernel)


def refused(*given):
    raise AssertionError("this waits for the GPU")


runs = kernels.run, tide_kernels.run
kernels.run = tide_kernels.run = lambda solve, f, text, *how: watched(solve, f, text)
for options in ({}, {"votes": "gamma"}):
    MOON(**options).fit_predict(torch.tensor(f), torch.tensor(t))
TIDE().fit_predict(torch.tensor(f), torch.tensor(t))
kernels.run, tide_kernels.run = runs
votes = neighbour_votes(nearest_neighbours(torch.tensor(f), 3), True, True, 1.0)
kernels.MANY, kernels.HUB = 4, 7  # samples with most votes go first
order, degree = kernels.Votes(*votes.edges).order, torch.diff(votes.pointer)
assert sorted(order.tolist()) == list(range(24)) and 0 < (degree > 7).sum() < 24
assert ((degree[order] > 7).int().diff() <= 0).all()
for n, k in ((1, 1), (2, 3), (30, 20)):
    data = simulate(n, k, dim=32, effective_classes=min(4, k, n), seed=1)
    fused = MOON().fit_predict(torch.from_numpy(data.features), torch.from_numpy(data.text))
    exact = [unit_rows(x.astype(float)) for x in (data.features, data.text)]
    assert np.abs(reference(*exact) - fused.probs.numpy()).max() < 1e-4
    fused, wanted = TIDE().fit_predict(*map(torch.from_numpy, (data.features, data.text))), TIDE().fit_predict(*exact)
    assert np.abs(fused.probs.numpy() - wanted.probs).max() < 1e-4
    assert np.abs(fused.beta.numpy() - wanted.beta).max() < 1e-5
    assert np.abs(fused.unknown.numpy() - wanted.unknown).max() < 1e-5
    shares = np.arange(1.0, k + 1) / np.arange(1.0, k + 1).sum()
    fused = TIDE().fit_predict(*map(torch.from_numpy, (data.features, data.text)), class_prior=shares)
    wanted = TIDE().fit_predict(*exact, class_prior=shares)
    assert np.abs(fused.probs.numpy() - wanted.probs).max() < 1e-4
print("ok")
"""


def test_kernels_in_the_interpreter_equal_plain_arrays() -> None:
    # a process of its own: Triton reads the variable when it is imported
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[2] / "benchmarks/reference.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "ok"
