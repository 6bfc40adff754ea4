"""A map of embeddings, for reports and for the server: t-SNE of a sample of them, the others near their neighbours.

L. van der Maaten and G. Hinton, "Visualizing Data using t-SNE", JMLR 2008. Exact, on at most `LANDMARKS` samples. It
starts from the two directions in which these vary most, so the same features give the same map.

Symbols:  p_ij -> p[i, j]   q_ij -> q[i, j]   y_i -> y[i]   Perp -> perplexity   beta_i = 1 / (2 sigma_i^2) -> beta
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moontide.core.arrays import unit_rows
from moontide.memory import require_memory

Floats = npt.NDArray[np.float32]

LANDMARKS = 1000  # exact t-SNE takes time and memory with their square
PERPLEXITY = 30.0
ITERATIONS, EXAGGERATED, EXAGGERATION = 300, 100, 12.0
NEAREST = 3  # landmarks that determine the position of another sample
BLOCK = 8192  # samples placed at once, which bounds memory


def flat_map(features: Floats, seed: int = 0) -> Floats:
    """Return a position between 0 and 1 in both directions for each row of the features (N, d), as (N, 2).

    >>> rows = np.repeat(np.eye(4, dtype=np.float32)[:2], 5, axis=0)  # two groups of equal samples
    >>> xy = flat_map(rows)
    >>> xy.shape, bool(abs(xy[0] - xy[5]).max() > abs(xy[:5] - xy[0]).max())
    ((10, 2), True)
    """
    n, d = features.shape
    size = min(n, LANDMARKS)
    require_memory(4 * (8 * size * size + 3 * min(n, BLOCK) * (d + size)), f"The map of {n} samples", features)
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(n)[:LANDMARKS])  # (L,)
    found = Map.of(features[chosen])
    xy = np.empty((n, 2), dtype=np.float32)
    if n > len(chosen):
        for start in range(0, n, BLOCK):
            xy[start : start + BLOCK] = found.positions(features[start : start + BLOCK])
        # without noise, many samples would lie on the lines between landmarks
        xy += rng.normal(scale=typical_gap(found.y), size=xy.shape).astype(np.float32)
    xy[chosen] = found.y
    xy -= xy.min(axis=0)
    return xy / max(float(xy.max()), 1e-12)


class Map(NamedTuple):
    """Landmarks and their positions, by which other samples can be placed on the same map, now and later."""

    landmarks: Floats  # (L, d) unit rows
    y: Floats  # (L, 2)

    @classmethod
    def of(cls, landmarks: Floats) -> Map:
        """Make the map of some samples, (L, d)."""
        unit = unit_floats(landmarks)
        return cls(unit, tsne(unit))

    def positions(self, features: Floats) -> Floats:
        """Return positions (B, 2) of samples (B, d); that of a landmark is its own.

        >>> Map(np.eye(3), np.asarray([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])).positions(np.eye(3)[:1]).round(3).tolist()
        [[1.0, 0.0]]
        """
        cosine = unit_floats(features) @ self.landmarks.T  # (B, L)
        count = min(NEAREST, cosine.shape[1])
        near = np.argpartition(-cosine, count - 1, axis=1)[:, :count]  # (B, m)
        weight = 1 / np.clip(2 - 2 * np.take_along_axis(cosine, near, axis=1), 1e-6, None)  # (B, m) by 1 / d^2
        weight /= weight.sum(axis=1, keepdims=True)
        return np.asarray((weight[:, :, None] * self.y[near]).sum(axis=1), dtype=np.float32)


def unit_floats(x: npt.NDArray[np.floating]) -> Floats:
    """Return rows in single precision at unit length.

    >>> unit_floats(np.asarray([[3.0, 4.0]]))
    array([[0.6, 0.8]], dtype=float32)
    """
    return np.asarray(unit_rows(x), dtype=np.float32)


def tsne(x: Floats) -> Floats:
    """Return the t-SNE positions (L, 2) of unit rows x (L, d).

    >>> tsne(np.eye(5, dtype=np.float32)).shape
    (5, 2)
    """
    n = len(x)
    cosine = x @ x.T  # (L, L)
    y = widest(cosine)  # (L, 2)
    if n < 4:  # too few for a perplexity
        return y
    p = affinities(np.clip(2 - 2 * cosine, 0, None), min(PERPLEXITY, (n - 1) / 3))  # (L, L)
    y = y / max(float(y[:, 0].std()), 1e-12) * np.float32(1e-4)
    velocity, gains = np.zeros_like(y), np.ones_like(y)
    rate = max(n / EXAGGERATION / 4, 10.0)
    for step in range(ITERATIONS):
        early = step < EXAGGERATED
        gradient = descent(y, p * np.float32(EXAGGERATION) if early else p)  # (L, 2)
        gains = np.clip(np.where(gradient * velocity < 0, gains + 0.2, gains * 0.8), 0.01, None).astype(np.float32)
        velocity = (0.5 if early else 0.8) * velocity - np.float32(rate) * gains * gradient
        y = y + velocity
    return y


def widest(products: Floats) -> Floats:
    """Return the coordinates (L, 2) in the two directions in which rows vary most, from their products (L, L).

    The largest coordinate of a direction is positive, so that its sign does not depend on the machine.

    >>> rows = np.asarray([[1, 0], [1, 0], [0.6, 0.8]], np.float32)
    >>> widest(rows @ rows.T)[:, 0].round(2)
    array([-0.3, -0.3,  0.6], dtype=float32)
    """
    from scipy.linalg import eigh

    n = len(products)
    mean = products.mean(axis=0)
    centred = products - mean - mean[:, None] + mean.mean()  # (L, L) products of the rows less their mean
    values, vectors = eigh(centred, subset_by_index=[max(n - 2, 0), n - 1])  # the largest is the last
    y = vectors[:, ::-1] * np.sqrt(np.maximum(values[::-1], 0))
    y = np.pad(y, ((0, 0), (0, 2 - y.shape[1])))  # a single row has one direction
    largest = y[np.abs(y).argmax(axis=0), [0, 1]]
    return np.asarray(np.where(largest < 0, -y, y), dtype=np.float32)


def affinities(squared: Floats, perplexity: float) -> Floats:
    """Return the symmetric p_ij (L, L) whose conditional rows p_j|i ~ exp(-beta_i d_ij^2) have the perplexity.

    >>> affinities(1 - np.eye(5), 2.0)[0]  # of equally distant samples
    array([0.  , 0.05, 0.05, 0.05, 0.05], dtype=float32)
    """
    n = len(squared)
    low, high, beta = np.zeros(n), np.full(n, np.inf), np.ones(n)
    np.fill_diagonal(squared, np.inf)
    apart = squared - squared.min(axis=1)[:, None]  # (L, L), a shift of d^2 cancels
    for _ in range(40):
        p = np.exp(-beta[:, None].astype(np.float32) * apart)  # (L, L)
        total = p.sum(axis=1)  # (L,)
        entropy = np.log(total) + beta * (p * np.where(p > 0, apart, 0)).sum(axis=1) / total  # (L,)
        flat = entropy > np.log(perplexity)  # beta too small
        low, high = np.where(flat, beta, low), np.where(flat, high, beta)
        beta = np.minimum(np.where(np.isinf(high), 2 * low, (low + high) / 2), 1e6)  # equal samples have none
    p /= total[:, None]
    return np.asarray((p + p.T) / (2 * n), dtype=np.float32)


def descent(y: Floats, p: Floats) -> Floats:
    """Return the gradient 4 sum_j (p_ij - q_ij) (y_i - y_j) / (1 + |y_i - y_j|^2), (L, 2).

    >>> bool((descent(np.asarray([[1.0, 0.0], [-1.0, 0.0]]), np.asarray([[0.0, 0.5], [0.5, 0.0]])) == 0).all())  # p = q
    True
    """
    norm = np.sum(y * y, axis=1)  # (L,)
    kernel = np.maximum(norm[:, None] + (norm - 2 * (y @ y.T)), 0) + 1  # (L, L)
    kernel = np.reciprocal(kernel, out=kernel)
    np.fill_diagonal(kernel, 0)
    pull = p - kernel / kernel.sum()  # (L, L)
    pull *= kernel
    return np.asarray(4 * (pull.sum(axis=1)[:, None] * y - pull @ y), dtype=np.float32)


def typical_gap(y: Floats) -> float:
    """Return the median distance of a landmark to the nearest other one.

    >>> typical_gap(np.asarray([[0.0, 0.0], [0.0, 1.0], [0.0, 3.0]]))
    1.0
    """
    squared = ((y[:, None, :] - y[None, :, :]) ** 2).sum(axis=2)  # (L, L)
    np.fill_diagonal(squared, np.inf)
    return float(np.sqrt(np.median(squared.min(axis=1))))
