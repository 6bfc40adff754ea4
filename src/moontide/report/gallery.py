"""The report on labelled images: one HTML page that needs no other file and makes no request.

The page is `gallery.html` with `gallery.css` and the `SCRIPTS` inside it. The data of the images is one JSON text, with
numbers packed as little-endian integers in base64. The script writes names into the page as text, never as markup, and
the page's own policy lets no other script run, so names of files and classes cannot become code.

A person can correct labels in the page. The browser keeps them under the page's `identity`, and the page exports them,
together with those that the method was given, as a table of known labels.

The size of the page is bounded: it has at most `THUMBNAILS` pictures, changed images and their neighbours first. The
script draws one page of them at a time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import moontide
from moontide.answers import TOP, Answers, answer, leading
from moontide.core.arrays import to_numpy
from moontide.core.graph import Graph, nearest_neighbours
from moontide.errors import without_credentials
from moontide.evaluate import scored_rows
from moontide.metrics import IntArray, expected_calibration_error, reliability
from moontide.projection import flat_map
from moontide.store.disk import replacing
from moontide.types import Result, Task

AnyArray = npt.NDArray[Any]
Thumbnail = Callable[[int, int], bytes | None]  # (which image, its longest side) to a JPEG, None: it cannot be had

THUMBNAILS = 1500  # pictures on a page
EXPLAINED = 400  # changed images whose neighbours come before further changed images
LARGE, SMALL = 256, 128  # longest side of a picture in pixels, where there are few and where there are THUMBNAILS
NEIGHBOURS = 3
SKIPPED = 1000  # skipped files that are named
SCRIPTS = (
    "gallery.js",
    "gallery_map.js",
    "gallery_scores.js",
    "gallery_fix.js",
    "gallery_start.js",
)  # one after another
BINS = 15  # of confidence, in the diagram of accuracy against it
SHARE = 10_000  # shares and cosines are whole numbers of this part


def write_gallery(
    path: str | Path,
    task: Task,
    result: Result,
    names: Sequence[str],
    thumbnail: Thumbnail,
    *,
    truth: IntArray | None = None,
    skipped: Sequence[tuple[str, str]] = (),
    parts: Sequence[IntArray] | None = None,
    about: Mapping[str, str] | None = None,
    answers: Answers | None = None,
) -> None:
    """Write the page of a result to `path`.

    names: how the samples are called, mostly their paths. thumbnail: makes the picture of one; called from threads.
    truth: their class numbers where these are known. skipped: files that are not in the task, and why.
    parts: which rows were labelled together, None where all were. about: further facts on the run, by name.
    answers: the answers to the samples, where these are not just their classes.

    >>> import tempfile
    >>> task = Task(np.eye(3), np.eye(3), class_names=("cat", "dog", "fox"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_gallery(Path(folder) / "a.html", task, moontide.MOON().fit_predict(task), "abc", lambda i, side: None)
    ...     (Path(folder) / "a.html").read_text().count("</html>")
    1
    """
    data = gallery_data(task, result, names, truth, parts, answers)
    chosen = pictured(np.flatnonzero(to_numpy(result.changed)), data.pop("graph").neighbours)
    side = min(LARGE, int(SMALL * (THUMBNAILS / len(chosen)) ** 0.5))
    with ThreadPoolExecutor() as pool:
        pictures = zip(chosen.tolist(), pool.map(lambda i: thumbnail(i, side), chosen.tolist()), strict=True)
        data["pictures"] = {i: base64.b64encode(jpeg).decode() for i, jpeg in pictures if jpeg is not None}
    data["skipped"] = [[without_credentials(name), why] for name, why in skipped[:SKIPPED]]
    data["skipped_count"] = len(skipped)
    data["about"] = {"Moontide": moontide.__version__, **(about or {})}
    with replacing(path) as handle:
        handle.write(page(data).encode())


def gallery_data(
    task: Task,
    result: Result,
    names: Sequence[str],
    truth: IntArray | None = None,
    parts: Sequence[IntArray] | None = None,
    answers: Answers | None = None,
) -> dict[str, Any]:
    """Return the data of the page (without pictures), ready for JSON except for `graph`.

    >>> task = Task(np.eye(3), np.eye(3)[:2], class_names=("cat", "dog"))
    >>> data = gallery_data(task, moontide.MOON().fit_predict(task), ["in/a.jpg", "in/b.jpg", "in/c.jpg"])
    >>> data["prefix"], data["names"], data["classes"]
    ('in/', ['a.jpg', 'b.jpg', 'c.jpg'], ('cat', 'dog'))
    """
    probs, before = to_numpy(result.probs), to_numpy(result.zero_shot)
    class_names = task.class_names or tuple(f"class {k}" for k in range(task.k))
    answers = answers or answer(result, class_names)
    labels, first = answers.labels, to_numpy(result.zero_shot_labels)
    beta = None if result.beta is None else [round(float(b), 4) for b in to_numpy(result.beta)]
    top = leading(to_numpy(result.scores), TOP)  # (N, m)
    graph = neighbours(task, result, parts)
    xy = flat_map(to_numpy(task.features))
    shared = os.path.commonprefix(list(names))  # noqa: RUF071 - cut at a slash, below
    prefix = shared[: shared.rfind("/") + 1]
    return {
        "n": task.n,
        "k": task.k,  # of the classes are those of the task; then none of these, then levels of a tree
        "classes": answers.names,
        "choices": answers.choices,  # the classes that a person can set; those behind are levels of a tree
        "prefix": prefix,
        "names": [name[len(prefix) :] for name in names],
        "label": pack(labels),
        "confidence": pack(shares(answers.confidence)),
        "before": pack(first),
        "before_share": pack(shares(np.take_along_axis(before, first[:, None], axis=1))),
        "top": pack(top),
        "top_now": pack(shares(np.take_along_axis(probs, top, axis=1))),
        "top_before": pack(shares(np.take_along_axis(before, top, axis=1))),
        "neighbours": pack(graph.neighbours),
        "cosines": pack(shares(graph.weights)),
        "x": pack(xy[:, 0] * 65535),
        "y": pack(xy[:, 1] * 65535),
        "beta": beta and beta + [0.0] * (len(answers.names) - task.k),
        "truth": None if truth is None else pack(truth),
        "known": None if task.known is None else pack(to_numpy(task.known) + 1),  # 0: not known
        "unknown": None if result.unknown is None else pack(np.argsort(np.argsort(to_numpy(result.unknown)))),  # ranks
        "calibration": None if truth is None else calibration(truth, result, scored_rows(task)),
        "report": identity(names, task.class_names, labels),
        "graph": graph,
    }


def calibration(truth: IntArray, result: Result, rows: IntArray) -> dict[str, Any] | None:
    """Return accuracy against confidence in some rows, for zero-shot and the method, with the calibration errors.

    >>> result = Result(probs=np.asarray([[0.9, 0.1], [0.2, 0.8]]), zero_shot=np.asarray([[0.6, 0.4], [0.6, 0.4]]))
    >>> found = calibration(np.asarray([0, 1]), result, np.arange(2))
    >>> found["before"], found["now"], found["ece"]
    ([[0.6, 0.5, 2]], [[0.8, 1.0, 1], [0.9, 1.0, 1]], [0.1, 0.15])
    """
    if not rows.size:
        return None
    found: dict[str, Any] = {"samples": int(rows.size), "bins": BINS, "ece": []}
    before = to_numpy(result.zero_shot).max(axis=1)
    for name, labels, confidence in (
        ("before", to_numpy(result.zero_shot_labels), before),
        ("now", to_numpy(result.labels), to_numpy(result.confidence)),
    ):
        given = (truth[rows], labels[rows], confidence[rows])
        found[name] = [[round(x, 4), round(y, 4), int(n)] for x, y, n in reliability(*given, BINS).tolist() if n]
        found["ece"].append(round(expected_calibration_error(*given, BINS), 4))
    return found


def identity(names: Sequence[str], class_names: Sequence[str] | None, labels: AnyArray) -> str:
    """Return the identity of a report, under which a browser keeps the corrections that are made in it.

    >>> identity(["a.jpg"], ["cat"], np.asarray([0])) == identity(["a.jpg"], ["cat"], np.asarray([0]))
    True
    """
    content = json.dumps([list(names), list(class_names or ()), labels.tolist()])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def page(data: Mapping[str, Any]) -> str:
    """Return the HTML of some data.

    >>> "</script><b>" in page({"names": ["</script><b>"]})
    False
    """
    here = files("moontide.report")
    html, css = ((here / f"gallery.{kind}").read_text(encoding="utf-8") for kind in ("html", "css"))
    js = "".join((here / script).read_text(encoding="utf-8") for script in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()
    text = json.dumps(data, separators=(",", ":"))  # ASCII
    for character in "<>&":  # nothing in it can end the script element or begin a comment
        text = text.replace(character, f"\\u{ord(character):04x}")
    for slot, content in (("@digest@", digest), ("/*css*/", css), ("/*js*/", js), ("@data@", text)):
        html = html.replace(slot, content)
    return html


def pack(array: npt.ArrayLike) -> dict[str, Any]:
    """Return whole numbers of at least 0 as base64 of the smallest type that holds them, and the length of a row.

    >>> pack([[1, 2], [3, 256]])
    {'type': 'u2', 'width': 2, 'data': 'AQACAAMAAAE='}
    """
    values: AnyArray = np.asarray(array)
    largest = int(values.max(initial=0))
    kind = next(kind for kind in ("u1", "u2", "u4") if largest <= np.iinfo(kind).max)
    data = base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()
    return {"type": kind, "width": values.shape[1] if values.ndim == 2 else 1, "data": data}


def shares(values: AnyArray) -> AnyArray:
    """Return numbers between 0 and 1 as whole ten-thousandths.

    >>> shares(np.asarray([0.25, -1e-9, 1.0]))
    array([ 2500,     0, 10000])
    """
    return np.rint(np.clip(np.asarray(values, dtype=np.float64), 0, 1) * SHARE).astype(np.int64)


def neighbours(task: Task, result: Result, parts: Sequence[IntArray] | None = None) -> Graph:
    """Return the nearest neighbours of each sample in its part, as numpy arrays: those the method used, or new ones.

    >>> task = Task(np.eye(4), np.eye(4))
    >>> parts = [np.asarray([0, 2]), np.asarray([1, 3])]
    >>> neighbours(task, moontide.MOON().fit_predict(task), parts).neighbours.tolist()
    [[2], [3], [0], [1]]
    """
    if parts is None and isinstance(result.details.get("graph"), Graph):
        graph = result.details["graph"]
        return Graph(to_numpy(graph.neighbours)[:, :NEIGHBOURS], to_numpy(graph.weights)[:, :NEIGHBOURS])
    parts = [np.arange(task.n)] if parts is None else parts
    width = max(0, min(NEIGHBOURS, max(map(len, parts)) - 1))
    found = np.arange(task.n)[:, None].repeat(width, axis=1)  # (N, m), itself where a small part has no more
    weights = np.zeros((task.n, width))
    for rows in parts:
        graph = nearest_neighbours(task.features[rows], width)
        found[rows, : graph.m] = rows[to_numpy(graph.neighbours)]
        weights[rows, : graph.m] = to_numpy(graph.weights)
    return Graph(found, weights)


def pictured(changed: AnyArray, near: AnyArray, limit: int = THUMBNAILS, seed: int = 0) -> AnyArray:
    """Choose the images with a picture on the page: changed ones, the neighbours that explain them, then random ones.

    >>> pictured(np.asarray([2]), np.asarray([[1], [0], [1]]), limit=2).tolist()
    [1, 2]
    """
    rng = np.random.default_rng(seed)
    changed = rng.permutation(changed)
    explained = near[changed[:EXPLAINED]].ravel()
    order = np.concatenate([changed[:EXPLAINED], explained, changed[EXPLAINED:], rng.permutation(len(near))])
    _, where = np.unique(order, return_index=True)  # where each image comes first
    return np.sort(order[np.sort(where)[:limit]])
