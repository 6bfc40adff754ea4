"""Reports on streams, known labels and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

import moontide
from grid_parts.cells import StreamCell
from grid_parts.tables import gain, mean, table
from grid_parts.variants import name_of
from grid_parts.work import Results
from moontide.core.arrays import to_numpy
from moontide.simulate import simulate

SHAPES = [(64, 100, 25), (64, 1000, 25), (1000, 100, 25), (1000, 1000, 25), (1000, 1000, 1000)]
LARGE_SHAPES = [(10_000, 1000, 1000), (50_000, 1000, 1000)]  # for a GPU


def report_streams(results: Results, titles: Sequence[str]) -> str:
    """Return means per batch size, and the same per pack and per order."""
    cells: list[StreamCell] = results.cells("stream")
    parts = [_stream_table(results, titles, cells, "", lambda cell: "")]
    parts.append(_stream_table(results, titles, cells, "pack", lambda cell: cell.pack))
    parts.append(_stream_table(results, titles, cells, "order", lambda cell: cell.order))
    return "\n\n".join(parts)


def _stream_table(
    results: Results, titles: Sequence[str], cells: list[StreamCell], by: str, word: Callable[[StreamCell], str]
) -> str:
    rows = []
    for label, size in dict.fromkeys((word(cell), cell.size) for cell in cells):
        group = [cell for cell in cells if (word(cell), cell.size) == (label, size)]
        runs = {title: [results.runs("stream", cell, title) for cell in group] for title in titles}
        spent = [np.median([results.runs("stream", cell, title, "ms") for cell in group]) for title in titles]
        numbers = [mean(np.mean(values) for values in runs[title]) for title in titles]
        gains = [gain(runs["tide"], runs[other]) for other in ("moon", "TIDE per batch")]
        rows.append([*([label] if by else []), size, *numbers, *gains, " / ".join(f"{x:.1f}" for x in spent)])
    ahead = ["TIDE above MOON (95 %)", "TIDE above TIDE per batch (95 %)", "ms per batch, in this order"]
    return table([*([by] if by else []), "batch", *(stream_name(title) for title in titles), *ahead], rows)


def stream_name(title: str) -> str:
    return "TIDE with memory" if title == "tide" else name_of(title)


def report_known(results: Results, titles: Sequence[str]) -> str:
    """Return the accuracy on samples that are not labelled, per pack and number of labels, and the means."""
    cells = sorted(results.cells("known"), key=lambda cell: cell.shots)
    rows = []
    for shots in dict.fromkeys(cell.shots for cell in cells):
        group = [cell for cell in cells if cell.shots == shots]
        for words, part in [*((cell.pack, [cell]) for cell in group), ("mean", group)]:
            runs = {title: [results.runs("known", cell, title) for cell in part] for title in titles}
            numbers = [mean(np.mean(values) for values in runs[title]) for title in titles]
            rows.append([words, shots, *numbers, gain(runs["TIDE with labels"], runs["tide"])])
    names = ["TIDE without" if title == "tide" else name_of(title) for title in titles]
    return table(["pack", "labels per class", *names, "labels add (95 %)"], rows)


def report_cost(device: str, shapes: Sequence[tuple[int, int, int]] | None = None) -> str:
    """Return the least time of TIDE and of MOON on simulated features: CPU time on a CPU, as others may be at work."""
    rows, clock = [], time.process_time if device == "cpu" else time.perf_counter
    for n, k, there in shapes or [*SHAPES, *(LARGE_SHAPES if device == "cuda" else [])]:
        data = simulate(n, k, effective_classes=there, seed=0)
        features, text = data.features.astype(np.float32), data.text.astype(np.float32)
        if device == "cuda":
            import torch

            features, text = torch.asarray(features, device=device), torch.asarray(text, device=device)
        best = dict.fromkeys(("moon", "tide"), np.inf)
        for repeat in range(20 if n <= 10_000 else 6):
            for name in best:
                start = clock()
                labels = moontide.method(name).fit_predict(features, text, logit_scale=data.logit_scale).labels
                to_numpy(labels)  # waits for the GPU
                if repeat > 2:  # the first calls of a shape compile and capture
                    best[name] = min(best[name], 1e3 * (clock() - start))
        times = [f"{best['moon']:.2f}", f"{best['tide']:.2f}", f"{best['tide'] / best['moon']:.2f}"]
        rows.append([n, k, "all" if there == k else there, *times])
    return table(["N", "K", "classes there", "MOON ms", "TIDE ms", "ratio"], rows)


def report_stream_cost() -> str:
    """Return the time of a step of a stream with one sample, by wall clock and in CPU time, after 300 samples."""
    rows = []
    for k in (100, 1000):
        data = simulate(900, k, effective_classes=25, seed=0)
        streams = {name: moontide.Stream(name, data.text) for name in ("moon", "tide")}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in streams}
        for stream in streams.values():
            stream.push(data.features[:300])
        for i in range(300, 900):
            for name, stream in streams.items():
                start, own = time.perf_counter(), time.thread_time()
                stream.push(data.features[i : i + 1])
                found[name].append((time.perf_counter() - start, time.thread_time() - own))
        for name, times in found.items():
            (least, own), (median, cpu) = 1e3 * np.min(times, axis=0), 1e3 * np.median(times, axis=0)
            rows.append([name_of(name), k, *(f"{x:.2f}" for x in (least, median, own, cpu))])
    return table(["stream", "K", "least ms", "median ms", "least ms of CPU time", "median ms of CPU time"], rows)
