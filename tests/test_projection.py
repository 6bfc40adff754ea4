"""The map of embeddings: groups stay apart, the steps are those of t-SNE, and its time and memory are bounded."""

import time

import numpy as np
import pytest

from moontide import memory, projection
from moontide.errors import ResourceError
from moontide.projection import affinities, descent, flat_map, widest


def test_groups_stay_apart_also_where_most_samples_are_placed_afterwards(monkeypatch):
    monkeypatch.setattr(projection, "LANDMARKS", 150)
    rng = np.random.default_rng(0)
    group = np.arange(600) % 3
    rows = (np.eye(3, 16)[group] + 0.1 * rng.normal(size=(600, 16))).astype(np.float32)
    xy = flat_map(rows)
    assert xy.min() == 0
    assert xy.max() == 1
    centres = np.stack([xy[group == g].mean(axis=0) for g in range(3)])
    nearest = ((xy[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == group).mean() > 0.98
    assert np.array_equal(xy, flat_map(rows))


def test_affinities_have_the_perplexity_asked_for():
    rng = np.random.default_rng(0)
    squared = ((rng.normal(size=(40, 1, 4)) - rng.normal(size=(1, 40, 4))) ** 2).sum(axis=2).astype(np.float32)
    squared = squared + squared.T
    p = affinities(squared, 10.0)
    assert p.sum() == pytest.approx(1, abs=1e-4)
    assert np.allclose(p, p.T)
    assert (np.diag(p) == 0).all()


def test_the_step_of_the_map_is_the_gradient_of_the_divergence():
    rng = np.random.default_rng(0)
    y = rng.normal(size=(6, 2))
    p = rng.random((6, 6))
    np.fill_diagonal(p, 0)
    p = (p + p.T) / (p + p.T).sum()

    def divergence(y):
        kernel = 1 / (1 + ((y[:, None] - y[None]) ** 2).sum(axis=2))
        np.fill_diagonal(kernel, 0)
        q = kernel / kernel.sum()
        off = ~np.eye(6, dtype=bool)
        return (p[off] * np.log(p[off] / q[off])).sum()

    numeric = np.zeros_like(y)
    for index in np.ndindex(y.shape):
        step = np.zeros_like(y)
        step[index] = 1e-5
        numeric[index] = (divergence(y + step) - divergence(y - step)) / 2e-5
    np.testing.assert_allclose(descent(y, p), numeric, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 4096), (100, 40_000), (600, 700), (4096, 512)])
def test_a_map_takes_seconds_at_most_and_is_the_same_every_time(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[: len(x) // 2, :3] += 30
    start = time.process_time()
    flat = flat_map(x)
    assert time.process_time() - start < 10
    assert flat.shape == (len(x), 2)
    assert np.isfinite(flat).all()
    np.testing.assert_array_equal(flat, flat_map(x))


def test_a_map_that_does_not_fit_into_memory_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "available_bytes", lambda: 50_000)
    with pytest.raises(ResourceError, match="The map of 1000 samples needs about"):
        flat_map(np.ones((1000, 8), np.float32))


@pytest.mark.parametrize(("n", "d"), [(5, 40), (40, 5), (1, 3), (3, 1)])
def test_a_map_starts_from_the_first_two_principal_components(n, d):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, d)).astype(np.float32) * np.linspace(3, 0.1, d).astype(np.float32)
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False)[:2]
    spread = np.linalg.norm(widest(x @ x.T), axis=0)
    np.testing.assert_allclose(spread[: len(values)], values, rtol=0.01, atol=2e-3)


def test_the_size_of_the_rows_does_not_matter():
    x = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    np.testing.assert_allclose(flat_map(2 * x), flat_map(x))
