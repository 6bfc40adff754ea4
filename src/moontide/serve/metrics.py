"""Counters of the server in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from typing import TypeAlias

Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]  # a name and its labels

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
HELP = {
    "moontide_http_requests_total": "counter Requests answered, by method and status.",
    "moontide_pushes_total": "counter Pushes answered, repeated ones included.",
    "moontide_samples_total": "counter Samples that entered the state.",
    "moontide_batches_total": "counter Micro-batches.",
    "moontide_batch_seconds": "histogram Time of a micro-batch: step, journal and sync.",
    "moontide_phase_seconds": "histogram Time of a push in the queue, of a step, and of the journal with its sync.",
    "moontide_waiting_samples": "gauge Samples in the queue.",
    "moontide_seen_samples": "gauge Samples in the state.",
    "moontide_listeners": "gauge Open event streams.",
    "moontide_busy": "gauge Whether a step takes longer than its budget.",
}


class Metrics:
    """Counts while the process runs.

    >>> metrics = Metrics()
    >>> metrics.request("GET", 200)
    >>> print(metrics.text({}).splitlines()[2])
    moontide_http_requests_total{method="GET",status="200"} 1.0
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.values: defaultdict[Series, float] = defaultdict(float)
        self.buckets: defaultdict[Series, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS) + 1))

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add to a counter."""
        self.values[name, tuple(labels.items())] += value

    def request(self, method: str, status: int) -> None:
        """Count a request."""
        self.add("moontide_http_requests_total", 1, method=method, status=str(status))

    def batch(self, stream: str, pushes: int, samples: int, seconds: float) -> None:
        """Count a micro-batch."""
        self.add("moontide_pushes_total", pushes, stream=stream)
        self.add("moontide_samples_total", samples, stream=stream)
        self.add("moontide_batches_total", 1, stream=stream)
        self.observe("moontide_batch_seconds", seconds, stream=stream)

    def phase(self, stream: str, phase: str, seconds: float) -> None:
        """Count the time of a part of the work."""
        self.observe("moontide_phase_seconds", seconds, stream=stream, phase=phase)

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Add to a histogram."""
        self.add(f"{name}_sum", seconds, **labels)
        self.buckets[name, tuple(labels.items())][bisect_left(BUCKETS, seconds)] += 1

    def forget(self, stream: str) -> None:
        """Drop the counters of a stream that was deleted."""
        for table in (self.values, self.buckets):
            for key in [key for key in table if ("stream", stream) in key[1]]:
                del table[key]

    def text(self, gauges: Mapping[str, Mapping[str, float]]) -> str:
        """Return everything as text; `gauges` holds values by name and stream."""
        rows = dict(self.values)
        for (name, labels), counts in self.buckets.items():
            for bound, count in zip([*BUCKETS, "+Inf"], accumulate(counts), strict=True):
                rows[f"{name}_bucket", (*labels, ("le", str(bound)))] = count
            rows[f"{name}_count", labels] = sum(counts)
        for name, streams in gauges.items():
            rows |= {(name, (("stream", stream),)): value for stream, value in streams.items()}
        lines = []
        for name, text in HELP.items():
            kind, _, words = text.partition(" ")
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
            parts = (f"{name}_bucket", f"{name}_sum", f"{name}_count") if kind == "histogram" else (name,)
            lines += [_line(key, value) for part in parts for key, value in rows.items() if key[0] == part]
        return "\n".join(lines) + "\n"


def _line(series: Series, value: float) -> str:
    name, labels = series
    inside = ",".join(f'{key}="{text}"' for key, text in labels)
    return f"{name}{{{inside}}} {value!r}"
