"""What is measured of a batch: accuracy and calibration, the score for the unknown, streams, and known labels."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from grid_parts.cells import Cell, KnownCell, StreamCell, draw, draw_known, draw_stream, text_of
from grid_parts.packs import PHOTOGRAPHS, Pack
from grid_parts.variants import applied, method_of
from moontide import Stream
from moontide.core.arrays import to_numpy, unit_rows
from moontide.core.simplex import zero_shot
from moontide.protocols import PerBatch
from moontide.samplers import rng_for
from moontide.types import Result

BINS = 15  # of the calibration error, as in moontide.metrics
NEGATIVES = 100  # class names of other packs that serve as negatives
SAME = 0.9  # cosine above which a name of another pack is taken for one of this pack's own
PROTOTYPE = 20.0  # nats of a cosine of 1 between a sample and the mean of its class's labelled samples

Packs = Mapping[str, Pack]
Numbers = dict[str, Any]


def accuracy(packs: Packs, cell: Cell, run: int, titles: Sequence[str]) -> Iterator[tuple[str, Numbers]]:
    """Measure the accuracy, and what the calibration error of a whole cell is made of."""
    pack = packs[cell.pack]
    rows, text = draw(cell, pack.labels, run), text_of(pack, cell, run)
    for title in titles:
        result = _fit(title, pack, rows, text)
        hit = to_numpy(result.labels) == pack.labels[rows]
        gaps = calibration_gaps(to_numpy(result.confidence), hit)
        yield title, {"accuracy": 100 * float(hit.mean()), "n": len(rows), "gaps": gaps.round(6).tolist()}


def _fit(title: str, pack: Pack, rows: Any, text: Any, **inputs: Any) -> Result:
    with applied(title) as method:
        return method.fit_predict(pack.features[rows], text, logit_scale=pack.logit_scale, **inputs)


def calibration_gaps(confidence: Any, hit: Any) -> Any:
    """Return hits less confidences, summed in bins of confidence, (BINS,): they add up over batches."""
    where = np.searchsorted(np.arange(1, BINS) / BINS, confidence)
    return np.bincount(where, hit - confidence.astype(np.float64), minlength=BINS)


def unknown(packs: Packs, cell: Cell, run: int, titles: Sequence[str]) -> Iterator[tuple[str, Numbers]]:
    """Leave a quarter of the present classes out of the text, and measure how well a score finds their samples.

    The AUROC is None if a batch has only one class, or if nothing is left.
    """
    pack = packs[cell.pack]
    rows = draw(cell, pack.labels, run)
    rng = rng_for("grid", cell.pack, f"{cell} unknown", run)
    there = np.unique(pack.labels[rows])
    out = rng.choice(there, max(1, len(there) // 4), replace=False)
    text, positive = np.delete(pack.text, out, axis=0), np.isin(pack.labels[rows], out)
    possible = len(text) > 1 and not positive.all()
    others = negatives_for(pack, packs)
    drawn = rng.permutation(len(others))[:NEGATIVES]
    for title in titles:
        if not possible or (title == "TIDE with negatives" and not len(drawn)):
            yield title, {"auroc": None}
            continue
        if title == "MCM":
            score = 1 - zero_shot(pack.features[rows], text, 1.0).max(axis=1)
        else:
            inputs = {"negatives": others[drawn]} if title == "TIDE with negatives" else {}
            result = _fit(title, pack, rows, text, **inputs)
            tells = method_of(title) == "tide"
            score = to_numpy(result.unknown) if tells else 1 - to_numpy(result.confidence)
        yield title, {"auroc": 100 * auroc(score, positive)}


def negatives_for(pack: Pack, packs: Packs) -> Any:
    """Return the texts of all other packs of the same model, less those that are a class of this pack, (M, d)."""
    others = [packs[name] for name in packs if name not in (pack.name, PHOTOGRAPHS)]
    texts = [other.text for other in others if other.model == pack.model]
    found = np.concatenate([pack.text[:0], *texts])
    return found[(found @ pack.text.T).max(axis=1) <= SAME]


def auroc(score: Any, positive: Any) -> float:
    """Return the probability that a positive scores higher than a negative; a tie counts half.

    >>> auroc(np.asarray([1.0, 1.0, 0.0]), np.asarray([True, False, False]))
    0.75
    """
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1, the mean one among ties
    ones, zeros = int(positive.sum()), int((~positive).sum())
    return float((rank[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def stream(packs: Packs, cell: StreamCell, run: int, titles: Sequence[str]) -> Iterator[tuple[str, Numbers]]:
    """Measure the accuracy along a stream, and milliseconds per batch."""
    pack = packs[cell.pack]
    batches = draw_stream(cell, pack.labels, run)
    labels = pack.labels[np.concatenate(batches)]
    for title in titles:
        with applied(title) as method:
            chosen = PerBatch(method) if title == "TIDE per batch" else method
            flow = Stream(chosen, pack.text, logit_scale=pack.logit_scale)
            start = time.perf_counter()
            found = np.concatenate([to_numpy(flow.push(pack.features[batch]).labels) for batch in batches])
            spent = 1e3 * (time.perf_counter() - start) / len(batches)
        yield title, {"accuracy": 100 * float((found == labels).mean()), "ms": spent}


def known(packs: Packs, cell: KnownCell, run: int, titles: Sequence[str]) -> Iterator[tuple[str, Numbers]]:
    """Measure the accuracy on the samples that are not labelled, with and without the labels of the others."""
    pack = packs[cell.pack]
    given = draw_known(cell, pack.labels, run)
    scored = given < 0
    for title in titles:
        if title == "prototypes":
            found = by_prototypes(pack, given)
        else:
            inputs = {"known": given} if title == "TIDE with labels" else {}
            found = to_numpy(_fit(title, pack, slice(None), pack.text, **inputs).labels)
        yield title, {"accuracy": 100 * float((found == pack.labels)[scored].mean())}


def by_prototypes(pack: Pack, given: Any) -> Any:
    """Return labels by log-softmax of zero-shot + s cos(f_i, mean of the labelled samples of the class).

    A class without a labelled sample has the mean of all labelled ones.
    """
    k = len(pack.text)
    means = np.stack([pack.features[given == c if (given == c).any() else given >= 0].mean(axis=0) for c in range(k)])
    prior = np.log(zero_shot(pack.features, pack.text, pack.logit_scale) + 1e-30)
    return (prior + PROTOTYPE * pack.features @ unit_rows(means).T).argmax(axis=1)


MEASURES: dict[str, Any] = {"accuracy": accuracy, "unknown": unknown, "stream": stream, "known": known}
