"""ECALP: label propagation over a graph of the texts and all images of a stream so far, repeated for each new image.

ECALP, ICLR 2025, after what its program (Yushu-Li/ECALP) computes.

Symbols:  f -> features   w -> context   s(a, b) -> similarity   k_text, k_image -> text_neighbours, neighbours
          gamma -> gamma   alpha -> alpha   Y0 -> labels   A -> edges among images, and `to_text`   D -> degree

    w_j = variance of column j of the text (dividing by K - 1), to unit length
    s(a, b) = (w f_a) . f_b / |w f_a|, a the older image of the two
    edges: image to its k_image nearest images, s^gamma, and to its k_text nearest texts, cosine^gamma;  W = A + A'
    Y <- alpha D^-1/2 W D^-1/2 Y + (1 - alpha) Y0, texts held at the identity, three times from Y0
    Y0 of the next image: of each image so far its largest entry, divided by 5

The scores of an image are its row of Y; earlier answers are not revised. `probs` are scores divided by the sum of their
row. Where the published program differs from the paper, this follows the program: the newest image is in the graph
twice, and the row of the copy is read; an image is its own neighbour; a negative similarity becomes a positive edge
(gamma = 10); and the lists of neighbours are slightly too short between the 9th and the 11th image. If an image and its
copy are equally near and only one of them fits, `ties="copy"` does what that program does, `ties="list"` takes the
earlier one.

The published program keeps every image, so that each further image takes longer. Here a stream keeps the latest
`memory` images, and a batch keeps all of its images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from moontide.core.arrays import Array, device, namespace, unit_rows
from moontide.core.graph import Affinity, Graph, largest_entries
from moontide.core.simplex import one_hot, zero_shot
from moontide.options import option
from moontide.protocols import OnlineMethod, State, per_class
from moontide.types import Result, Task

LARGEST = 10**6  # images of a graph
SPARE = 2  # entries of a list beyond the neighbours that are used: what the newest image and its copy may push out


@dataclass(frozen=True)
class ECALPState(State):
    """The latest M images, image i in row i mod M, and the neighbours of each, nearest first, -1 for none."""

    features: Array  # (M, d)
    near: Array  # (M, k_image + 2) rows of images
    similarity: Array  # (M, k_image + 2), -inf for none
    labels: Array = field(metadata=per_class(1))  # (M, K) at most one entry per row


@dataclass(frozen=True)
class ECALP(OnlineMethod):
    """Labels spread from class names over a graph that grows by one image at a time.

    >>> import numpy as np
    >>> ECALP().fit_predict(np.asarray([[1.0, 0.1], [0.9, 0.2], [0.1, 1.0]]), np.eye(2)).labels
    array([0, 0, 1])
    """

    citation: ClassVar[str] = "ECALP, ICLR 2025"
    state_type: ClassVar[type[State]] = ECALPState
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"stable": {"ties": "list"}}

    neighbours: int = option(8, "k_image, nearest images of an image, including itself", low=1)
    text_neighbours: int = option(3, "k_text, nearest texts of an image", low=1)
    gamma: float = option(10.0, "power of the absolute similarities", above=0)
    alpha: float = option(1.0, "weight of the neighbours; the labels so far have 1 - alpha", above=0, high=1)
    iterations: int = option(3, "rounds of propagation per image", low=1)
    carry: float = option(
        0.2, "share of the score of its label with which an image starts the next propagation", low=0, high=1
    )
    ties: str = option("copy", "whether the newest image or its copy comes first in a list of neighbours",
                       choices=("copy", "list"))  # fmt: skip
    memory: int = option(2048, "latest images that a stream keeps; a batch keeps its own", low=1, high=LARGEST)

    def peak_bytes(self, n: int, k: int, d: int, itemsize: int) -> int:
        """Estimate the memory: the default, plus the images of the graph with their labels and lists, and copies."""
        row = itemsize * (4 * d + 6 * k) + 8 * 12 * (self.neighbours + SPARE)
        return super().peak_bytes(n, k, d, itemsize) + row * max(self.memory, n)

    def start(self, task: Task) -> ECALPState:
        """Make an empty graph."""
        xp, m, width = namespace(task.text), self.memory, self.neighbours + SPARE
        kind = {"dtype": task.text.dtype, "device": device(task.text)}
        return ECALPState(
            text=task.text,
            logit_scale=task.logit_scale,
            seen=0,
            features=xp.zeros((m, task.d), **kind),
            near=xp.full((m, width), -1, dtype=xp.int64, device=device(task.text)),
            similarity=xp.full((m, width), -xp.inf, **kind),
            labels=xp.zeros((m, task.k), **kind),
        )

    def _fit(self, task: Task) -> Result:
        return super(ECALP, replace(self, memory=min(max(self.memory, task.n), LARGEST)))._fit(task)

    def _step(self, state: ECALPState, x: Array) -> tuple[ECALPState, Result]:  # type: ignore[override]
        xp = namespace(x)
        after = state.fork()  # the copy that this step writes to
        w = context(state.text)  # (d,)
        size = min(state.seen + x.shape[0], self.memory)  # images in the graph at the end of the step
        weighted = unit_rows(after.features[:size] * w)  # (size, d) zero where there is no image yet
        texts, cosines = self.nearest_texts(after.features[:size], state.text)  # (size, k_text), (size, k_text)
        new_texts, new_cosines = self.nearest_texts(x, state.text)  # (n, k_text), (n, k_text)
        new_weighted = unit_rows(x * w)  # (n, d)
        rows = []
        for i in range(x.shape[0]):
            newest, a = (state.seen + i) % self.memory, min(state.seen + i + 1, self.memory)
            after.features[newest], weighted[newest] = x[i], new_weighted[i]
            texts[newest], cosines[newest] = new_texts[i], new_cosines[i]
            after.labels[newest] = 0
            edges = self.join(after, weighted[:a] @ x[i], newest)
            to_text = self.text_edges(texts[:a], cosines[:a], newest, state.text.shape[0])  # (a + 1, K)
            y = self.propagate(edges, to_text, after.labels[:a])  # (a + 1, K)
            rows.append(y[a])
            top = xp.max(y[:a], axis=1, keepdims=True)  # (a, 1)
            after.labels[:a] = self.carry * top * one_hot(xp.argmax(y[:a], axis=1), y.shape[1], y)
        scores, plain = xp.stack(rows), zero_shot(x, state.text, state.logit_scale)  # (n, K), (n, K)
        scores = xp.where(xp.max(scores, axis=1, keepdims=True) > 0, scores, plain)  # no edge has a weight: zero-shot
        return after, Result(scores / xp.sum(scores, axis=1, keepdims=True), plain, scores)

    def nearest_texts(self, f: Array, text: Array) -> tuple[Array, Array]:
        """Return classes and cosines of the nearest texts of each image, (n, k_text) both."""
        return largest_entries(f @ text.T, min(self.text_neighbours, text.shape[0]))

    def join(self, graph: ECALPState, s: Array, newest: int) -> Graph:
        """Enter the newest image into the lists of neighbours, in place; return the edges among images and its copy.

        `s` (a,) are the similarities of all images to the newest; its copy is node a.
        """
        xp, a = namespace(s), s.shape[0]
        k = min(self.neighbours, a + 1)
        kept = k + min(max(a - 1 - k, 0), SPARE)  # the lists grow by 2 once there are more images than neighbours
        pair = [a, newest] if self.ties == "copy" else [newest, a]
        pair = xp.asarray(pair, device=device(s)) + xp.zeros((a, 1), dtype=xp.int64, device=device(s))  # (a, 2)
        gone = graph.near[:a] == newest  # whose row the newest image took
        nodes = xp.concat([graph.near[:a], pair], axis=1)  # (a, k_image + 4)
        similarity = xp.where(gone, -xp.inf, graph.similarity[:a])
        similarity = xp.concat([similarity, s[:, None], s[:, None]], axis=1)  # (a, k_image + 4)
        order = xp.argsort(-similarity, axis=1, stable=True)[:, :kept]
        nodes, similarity = (xp.take_along_axis(v, order, axis=1) for v in (nodes, similarity))  # (a, kept)
        own, own_similarity = self.nearest_images(s, newest, kept)
        nodes[newest], similarity[newest] = own, own_similarity
        graph.near[:a], graph.similarity[:a] = -1, -xp.inf
        copy = nodes == a  # which leaves the lists after this image
        graph.near[:a, :kept] = xp.where(copy, -1, nodes)
        graph.similarity[:a, :kept] = xp.where(copy, -xp.inf, similarity)
        to = xp.concat([nodes, own[None, :]])[:, :k]  # (a + 1, k)
        found = xp.concat([similarity, own_similarity[None, :]])[:, :k]  # (a + 1, k)
        there = found > -xp.inf
        return Graph(xp.where(there, to, 0), xp.where(there, xp.abs(xp.where(there, found, 0)) ** self.gamma, 0))

    def nearest_images(self, s: Array, newest: int, count: int) -> tuple[Array, Array]:
        """Return the nodes nearest to the newest image and their similarities, (count,) both, its copy, node a, too."""
        xp, a = namespace(s), s.shape[0]
        nodes = xp.arange(a, device=device(s))
        copy = nodes[-1:] + 1
        nodes = xp.concat([copy, nodes] if self.ties == "copy" else [nodes, copy])  # (a + 1,)
        similarity = s[xp.where(nodes == a, newest, nodes)]  # (a + 1,)
        order = xp.argsort(-similarity, stable=True)[:count]
        return nodes[order], similarity[order]

    def text_edges(self, texts: Array, cosines: Array, newest: int, k: int) -> Array:
        """Return the weights of the edges of all images and of the copy of the newest to the texts, (a + 1, K)."""
        xp, a = namespace(cosines), cosines.shape[0]
        out = xp.zeros((a + 1, k), dtype=cosines.dtype, device=device(cosines))
        out[xp.arange(a, device=device(cosines))[:, None], texts] = xp.abs(cosines) ** self.gamma
        out[a] = out[newest]
        return out

    def propagate(self, edges: Graph, to_text: Array, labels: Array) -> Array:
        """Y <- alpha D^-1/2 W D^-1/2 Y + (1 - alpha) Y0, texts held at the identity, from Y0 on, (a + 1, K)."""
        xp = namespace(labels)
        among = edges.operator(symmetric=True)
        degree = among(xp.ones_like(to_text[:, :1]))[:, 0] + xp.sum(to_text, axis=1)  # (a + 1,)
        d, d_text = inverse_root(degree), inverse_root(xp.sum(to_text, axis=0))  # (a + 1,), (K,)
        row = xp.repeat(xp.arange(len(d), device=device(d)), xp.diff(among.pointer))  # (E,)
        among = Affinity(among.pointer, among.neighbour, among.weight * d[row] * d[among.neighbour])
        from_text = d[:, None] * to_text * d_text  # (a + 1, K)
        y = start = xp.concat([labels, 0 * labels[:1]])  # (a + 1, K)
        for _ in range(self.iterations):
            y = self.alpha * (among(y) + from_text) + (1 - self.alpha) * start
        return y


def context(text: Array) -> Array:
    """w: the variance of each column of the text, to unit length, (d,); all equal where classes do not differ.

    >>> import numpy as np
    >>> context(np.asarray([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])).round(3)
    array([0.707, 0.707, 0.   ])
    """
    xp = namespace(text)
    if text.shape[0] > 1:
        variance = xp.var(text, axis=0, correction=1)  # (d,)
        if float(xp.max(variance)) > 0:
            return unit_rows(variance)
    return xp.ones_like(text[0]) / text.shape[1] ** 0.5


def inverse_root(degree: Array) -> Array:
    """D^-1/2 as 1 / (sqrt(D) + 1e-6).

    >>> import numpy as np
    >>> inverse_root(np.asarray([4.0])).round(3)
    array([0.5])
    """
    xp = namespace(degree)
    return 1 / (xp.sqrt(degree) + 1e-6)
