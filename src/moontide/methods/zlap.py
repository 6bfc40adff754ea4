"""ZLaP: label propagation from class names over a graph of texts and images.

V. Stojnic et al., CVPR 2024, after what their program (vladan-stojnic/ZLaP) computes.

Symbols:  k -> neighbours   gamma -> gamma   alpha -> alpha   W -> edges   D -> degree   L = I - alpha D^-1/2 W D^-1/2
          e_c -> the columns of `seeds`   x_c -> the columns of `x`

The nodes are the K texts and then the N images. An image is joined to its k nearest texts, with weight cosine^gamma,
and to its k nearest images, with weight cosine (k counts the image itself, so these are k - 1 others). The score of
image i for class c is x_c at its node, where L x_c = e_c. All classes are solved together by conjugate gradients, in
blocks of columns so that memory stays at N x K; each column stops where the published program stops. `probs` are the
scores divided by the sum of their row. An image that no text reaches (only negative cosines) has scores of 0 and keeps
its zero-shot prediction. If a task has a graph, this gives the edges between images.

`inductive` scores an image as if it were not in the graph: by the sum over its neighbours, texts and images, of edge
weight times propagated score, instead of at its own node. Here the batch itself is the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from moontide.core.arrays import Array, column_dots, device, namespace
from moontide.core.graph import Affinity, Graph, largest_entries, nearest_neighbours
from moontide.core.simplex import softmax
from moontide.options import option
from moontide.protocols import Method
from moontide.types import Result, Task

TOLERANCE = 1e-6  # |residual| / |right-hand side| at which a column is solved
MAX_STEPS = 50  # of conjugate gradients
BLOCK_ENTRIES = 2**22  # of the solution, made at once: 32 MB in float64


@dataclass(frozen=True)
class ZLaP(Method):
    """Label propagation from class names to nearby images, and from these to their neighbours.

    >>> import numpy as np
    >>> ZLaP().fit_predict(np.asarray([[1.0, 0.1], [0.9, 0.2], [0.1, 1.0]]), np.eye(2)).labels
    array([0, 0, 1])
    """

    citation: ClassVar[str] = "Stojnic et al., CVPR 2024"

    neighbours: int = option(5, "k, nearest texts of an image, and nearest images including the image itself", low=1)
    gamma: float = option(5.0, "power of the image-text similarities", above=0)
    alpha: float = option(0.3, "weight of the neighbours: how far labels spread", above=0, high=0.99)
    scale_similarities: bool = option(False, "stretch the image-text similarities of all edges to [0, 1] first")
    inductive: bool = option(False, "score an image by its neighbours, as if it were not in the graph")

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the edges and the blocks of conjugate gradients, in float64."""
        edges = 2 * 24 * (n + k) * (2 * self.neighbours - 1)
        return super().peak_bytes(n, k, d, itemsize) + edges + 8 * 8 * max(n + k, min(BLOCK_ENTRIES, (n + k) * k))

    def _fit(self, task: Task) -> Result:
        xp = namespace(task.features)
        n, k = task.n, task.k
        cosine = task.features @ task.text.T  # (N, K)
        images = task.graph or nearest_neighbours(task.features, self.neighbours - 1)
        texts = nearest_texts(cosine, self.neighbours)
        edges = node_graph(images, text_weights(texts, self.gamma, self.scale_similarities), k)
        laplacian = normalised_laplacian(edges, self.alpha)
        read: Callable[[Array], Array] = edges.operator(symmetric=False) if self.inductive else lambda x: x
        scores = xp.empty_like(cosine)  # (N, K)
        width = max(1, BLOCK_ENTRIES // (n + k))
        steps, solved = 0, True
        for start in range(0, k, width):
            c = min(width, k - start)
            seeds = xp.eye(n + k, c, k=-start, dtype=xp.float64, device=device(cosine))  # (K + N, c)
            x, used, done = conjugate_gradients(laplacian, seeds)
            scores[:, start : start + c] = xp.astype(read(x)[k:, :], cosine.dtype)
            steps, solved = max(steps, used), solved and done
        zero_shot = softmax(task.logit_scale * cosine)
        reached = xp.max(scores, axis=1, keepdims=True) > 0  # (N, 1)
        scores = xp.where(reached, scores, zero_shot)
        probs = xp.clip(scores, min=0)
        probs = probs / xp.sum(probs, axis=1, keepdims=True)
        return Result(probs, zero_shot, scores, n_iter=steps, converged=solved)


def nearest_texts(cosine: Array, k: int) -> Graph:
    """Return the classes of the k largest cosines of each row, (N, k), the lower class first among equals.

    >>> import numpy as np
    >>> nearest_texts(np.asarray([[0.1, 0.3, 0.2]]), 2).neighbours
    array([[1, 2]])
    """
    return Graph(*largest_entries(1 * cosine, min(k, cosine.shape[1])))


def text_weights(texts: Graph, gamma: float, stretch: bool) -> Graph:
    """w = max(s, 0)^gamma; with `stretch`, s <- (s - min s) / (max s - min s) over all edges first.

    >>> import numpy as np
    >>> text_weights(Graph(np.asarray([[0, 1]]), np.asarray([[0.3, 0.2]])), 2.0, True).weights
    array([[1., 0.]])
    """
    xp = namespace(texts.weights)
    s = texts.weights
    low, high = xp.min(s), xp.max(s)
    if stretch and bool(high > low):
        s = (s - low) / (high - low)
    return Graph(texts.neighbours, xp.clip(s, min=0) ** gamma)


def node_graph(images: Graph, texts: Graph, k: int) -> Graph:
    """Return the edges of K texts and N images, (K + N, m); edges start at images, those of texts have weight 0.

    >>> import numpy as np
    >>> none = Graph(np.zeros((1, 0), int), np.zeros((1, 0)))
    >>> node_graph(none, Graph(np.asarray([[1]]), np.asarray([[0.5]])), 2).weights
    array([[0. ],
           [0. ],
           [0.5]])
    """
    xp = namespace(texts.weights)
    nodes = xp.concat([texts.neighbours, images.neighbours + k], axis=1)  # (N, m)
    weights = xp.clip(xp.concat([texts.weights, images.weights], axis=1), min=0)  # (N, m)
    own = xp.arange(k, device=device(nodes))[:, None] + xp.zeros_like(nodes[:1, :])  # (K, m)
    none = xp.zeros(own.shape, dtype=xp.float64, device=device(nodes))
    return Graph(xp.concat([own, nodes]), xp.concat([none, xp.astype(weights, xp.float64)]))


def normalised_laplacian(edges: Graph, alpha: float) -> Callable[[Array], Array]:
    """Return the map x -> L x = x - alpha D^-1/2 (W + W') D^-1/2 x; D holds the row sums, 1 for a node without edges.

    >>> import numpy as np
    >>> normalised_laplacian(Graph(np.asarray([[1], [1]]), np.asarray([[2.0], [0.0]])), 0.5)(np.eye(2))
    array([[ 1. , -0.5],
           [-0.5,  1. ]])
    """
    xp = namespace(edges.weights)
    w = edges.operator(symmetric=True)
    degree = w(xp.ones_like(edges.weights[:, :1]))[:, 0]  # (K + N,)
    root = xp.sqrt(xp.where(degree > 0, degree, xp.ones_like(degree)))
    row = xp.repeat(xp.arange(len(root), device=device(root)), xp.diff(w.pointer))  # (E,)
    scaled = Affinity(w.pointer, w.neighbour, alpha * w.weight / (root[row] * root[w.neighbour]))
    return lambda x: x - scaled(x)


def conjugate_gradients(apply: Callable[[Array], Array], b: Array) -> tuple[Array, int, bool]:
    """Solve A x = b for a symmetric positive definite A; a column is solved once |b - A x| <= TOLERANCE |b|.

    Also returns the steps taken and whether every column was solved in at most MAX_STEPS.

    >>> import numpy as np
    >>> conjugate_gradients(lambda x: 2 * x, np.eye(2))
    (array([[0.5, 0. ],
           [0. , 0.5]]), 1, True)
    """
    xp = namespace(b)
    tiny = float(xp.finfo(b.dtype).smallest_normal)  # guards 0 / 0 in columns that are solved exactly
    x, r, p = xp.zeros_like(b), 1 * b, 1 * b  # (K + N, c) each
    square = column_dots(r, r)  # (c,)
    goal = TOLERANCE**2 * square
    for step in range(MAX_STEPS + 1):
        active = square > goal  # (c,)
        if step == MAX_STEPS or not bool(xp.any(active)):
            break
        q = apply(p)
        length = xp.where(active, square / xp.clip(column_dots(p, q), min=tiny), 0.0)  # (c,)
        x += length * p
        r -= length * q
        before, square = square, column_dots(r, r)
        p *= square / xp.clip(before, min=tiny)
        p += r
    return x, step, not bool(xp.any(active))
