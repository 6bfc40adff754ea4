"""The Triton kernels, run in Triton's interpreter, against plain torch."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)"),
]

PROGRAM = """
import sys
import numpy as np, torch
from moontide import MOON, Graph
from moontide.core import kernels, ple
from moontide.core.graph import nearest_neighbours
from moontide.simulate import simulate

assert kernels.usable(torch.zeros(1))
rng = np.random.default_rng(0)
for n, d, m in ((1, 8, 3), (2, 8, 3), (40, 24, 3), (150, 40, 5)):
    f = rng.normal(size=(n, d)).astype(np.float32)
    if n > 2:
        f[1] = f[0]  # duplicate rows: a sample is never its own neighbour
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    plain, fused = nearest_neighbours(f, m), nearest_neighbours(torch.from_numpy(f), m)
    assert np.allclose(plain.weights, fused.weights.numpy(), atol=1e-5)
    assert not (fused.neighbours == torch.arange(n)[:, None]).any()
    differ = (plain.neighbours != fused.neighbours.numpy()).sum()
    assert differ <= 0.03 * fused.neighbours.numel()  # ties in the last bit
    k = 5
    logits, z = rng.normal(size=(n, k)).astype(np.float32), rng.dirichlet(np.ones(k), size=n).astype(np.float32)
    expected = ple.e_step(logits.copy(), z, plain.operator(True))
    torched = Graph(torch.from_numpy(plain.neighbours), torch.from_numpy(plain.weights)).operator(True)
    for half in (False, True):
        given = torch.from_numpy(z).half() if half else torch.from_numpy(z)
        got = ple.e_step(torch.from_numpy(logits.copy()), given, torched)
        for name, a, b in zip(expected._fields, expected, got):
            assert np.allclose(a, b.float().numpy(), atol=5e-3 if half else 1e-5), name
data = simulate(60, 20, dim=32, effective_classes=4, seed=1)
plain = MOON().fit_predict(data.features, data.text)
fused = MOON().fit_predict(torch.from_numpy(data.features), torch.from_numpy(data.text))
assert np.abs(plain.probs - fused.probs.numpy()).max() < 1e-4
assert np.allclose(plain.objective, fused.objective, rtol=1e-4)
print("ok")
"""


def test_kernels_in_the_interpreter_equal_plain_arrays() -> None:
    # a process of its own: Triton reads the variable when it is imported
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"TRITON_INTERPRET": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "ok"
