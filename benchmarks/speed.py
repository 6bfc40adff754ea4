"""Speed of MOON, compared with a dense implementation of its equations and with the products that any version needs.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 scripts/bench speed            # this machine's CPU
    scripts/bench speed --sizes 500000 1000000 --classes 1000               # many samples: from a memory-mapped file
    scripts/bench speed --device cuda                                       # a GPU, all three precisions
    scripts/bench speed --against REV                                       # this tree and a commit, in turn
    scripts/bench speed --against FOLDER                                    # or another tree, where there is no git
    scripts/bench speed --alternatives                                      # and what users might take instead

One run compares everything: the reference, MOON and the floors are timed in turn, interleaved, each in its second call
in a row (on a GPU, the sixth), and the median is taken.

Products: the zero-shot product (N x d x K), the similarity product (N x N x d, half of it on the CPU, where it is
symmetric) and, for each of the ten iterations, the two products of the classes that have samples in it. Floor: on a GPU
the same; on the CPU the zero-shot and similarity products, and the active part, ten E- and M-steps as if the classes
with samples were all there are.

The table is printed as it stands in docs/performance.md; --json writes the rows for its plot. Above 100,000 samples,
the features are simulated and written to a file first, and MOON reads them in a process of its own, so that its peak
memory can be measured; there is no reference and no floor at that size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from reference import reference

from moontide import MOON
from moontide.core.backends import choose
from moontide.core.graph import EXACT_ROWS, nearest_neighbours
from moontide.core.mixture import VMF, Anchors
from moontide.simulate import simulate

DENSE = 20_000  # rows up to which the N x N reference is run
ONCE = 2000  # rows above which a CPU has enough to do in one call
ITERATIONS = 10


def machine(device: str) -> str:
    """Name the machine that the figures belong to."""
    if device == "cuda":
        import torch

        return str(torch.cuda.get_device_name())
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def finish(device: str) -> None:
    """Wait until the device has finished its work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def timed(work: list[Callable[[], Any]], device: str, repeat: int, cold: bool = False) -> list[float]:
    """Time several functions in turn, `repeat` times, and return the median seconds of each.

    Each is called twice in a row and the second call counts: the first pays for what the function before it left in
    the caches and in the allocator. On a GPU it is the sixth call: long products draw so much power that the clock of
    the GPU is lower for some calls after them. With `cold` there is only the first one.
    """
    calls = 1 if cold else 6 if device == "cuda" else 2
    seconds = np.zeros((repeat, len(work)))
    for round_ in range(-1 if repeat > 1 else 0, repeat):  # one round to warm up
        for i, function in enumerate(work):
            for _ in range(calls):
                start = time.perf_counter()
                function()
                finish(device)
                took = time.perf_counter() - start
            if round_ >= 0:
                seconds[round_, i] = took
    return [float(s) for s in np.median(seconds, axis=0)]


def peak_bytes(function: Callable[[], Any], device: str) -> int:
    """Return the memory that a run holds at most beyond its inputs."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return int(torch.cuda.max_memory_allocated() - before)
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def products(f: Any, t: Any, live: list[int], device: str) -> Callable[[], Any]:
    """Return the products that any exact version needs; `live` classes have samples in each iteration."""

    def work() -> None:
        z = two_products(f, t, device)
        for count in live:
            f @ t[:count].T
            (z[:, :count] if device == "cpu" else z).T @ f

    return work


def two_products(f: Any, t: Any, device: str) -> Any:
    """Make the zero-shot and the similarity product."""
    n = f.shape[0]
    step = min(n, 1000 if device == "cpu" else 8192)
    for i in range(0, n, step):
        for j in range(i if device == "cpu" else 0, n, step):
            f[i : i + step] @ f[j : j + step].T
    return f @ t.T


def floor(f: Any, t: Any, present: list[int]) -> Callable[[], Any]:
    """Return the zero-shot and similarity products and the iterations of the `present` classes alone."""
    method, one = MOON(), np.ones(t.shape[0], t.dtype)
    graph, backend = nearest_neighbours(f, method.neighbours), choose(f, t.shape[0])
    rows, mixtures, steps = {}, {}, {}
    for count in set(present):
        rows[count] = backend.Rows(method, f, t[:count], 100.0, graph, in_memory=True)
        rows[count].first()
        anchors = Anchors(t[:count], 100 * one[:count], one[:count] / 4, one[:count])
        mixtures[count] = VMF(method, anchors, 100.0)
        steps[count] = rows[count].step(mixtures[count].begin().scores)

    def work() -> None:
        two_products(f, t, "cpu")
        for count in present:
            steps[count] = rows[count].step(backend.m_step(mixtures[count], steps[count]).scores)

    return work


def live_classes(f: Any, t: Any) -> list[int]:
    """Count the classes that have samples in each iteration."""
    graph = nearest_neighbours(f, MOON().neighbours)
    rounds = (MOON(iterations=i + 1).fit_predict(f, t, graph=graph) for i in range(ITERATIONS))
    return [int((result.beta > 0).sum()) for result in rounds]


@cache
def float64_labels(n: int, k: int, effective: int | None) -> Any:
    """Return the labels in double precision on the CPU."""
    data = simulate(n, k, effective_classes=effective, seed=0)
    return MOON().fit_predict(data.features.astype(np.float64), data.text.astype(np.float64)).labels


def measure(
    n: int,
    k: int,
    effective: int | None,
    device: str,
    precision: str,
    repeat: int,
    check: int,
    cold: bool,
) -> dict[str, Any]:
    """Time one size."""
    data = simulate(n, k, effective_classes=effective, seed=0)
    f, t = data.features, data.text
    if device == "cuda":
        import torch

        f, t = torch.from_numpy(f).cuda(), torch.from_numpy(t).cuda()
        torch.backends.cuda.matmul.allow_tf32 = precision != "full"  # the same for reference and floor
    method = MOON(precision=precision)
    result = method.fit_predict(f, t)
    live = [int((result.beta > 0).sum())] * ITERATIONS if device == "cuda" else live_classes(f, t)
    true_labels = float64_labels(n, k, effective) if n <= check else None
    work: list[Callable[[], Any]] = [lambda: method.fit_predict(f, t), products(f, t, live, device)]
    if device == "cpu":
        work.append(floor(f, t, live))
    if n <= DENSE:
        work.append(lambda: reference(f, t))
    once = n > ONCE and device == "cpu"
    seconds = timed(work, device, 1 if once else repeat if n <= 10_000 else min(repeat, 3), cold)
    flops = 2 * n * k * 512 + (1 if device == "cpu" else 2) * n * n * 512 + 4 * n * sum(live) * 512
    labels = np.asarray(result.labels.cpu() if device == "cuda" else result.labels)
    return {
        "machine": machine(device), "precision": precision, "N": n, "K": k, "live": live[-1], "seconds": seconds[0],
        "products": seconds[1], "floor": seconds[2 if device == "cpu" else 1],
        "reference": seconds[-1] if n <= DENSE else None, "gflops": flops / seconds[0] / 1e9,
        "peak": peak_bytes(work[0], device),
        "agreement": None if true_labels is None else float((labels == true_labels).mean()),
    }  # fmt: skip


def measure_large(n: int, k: int, effective: int | None) -> dict[str, Any]:
    """Time one size in a process of its own, which reads its features from a memory-mapped file."""
    with tempfile.TemporaryDirectory(prefix="moontide-speed-") as folder:
        data = simulate(n, k, effective_classes=effective, seed=0)
        for name in ("features", "text"):
            np.save(Path(folder, name), getattr(data, name))
        del data
        child = [sys.executable, __file__, "--from", folder]
        out = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"machine": machine("cpu"), "precision": "full", "N": n, "K": k, "reference": None, **json.loads(out)}


def solve_files(folder: Path) -> dict[str, Any]:
    """Time MOON on the files of a folder; the peak is that of the whole process."""
    f, t = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("features", "text"))
    start = time.perf_counter()
    result = MOON().fit_predict(f, t)
    return {
        "seconds": time.perf_counter() - start, "live": int((result.beta > 0).sum()), "n_iter": result.n_iter,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "recall": result.details["graph"].recall,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Write the rows as a Markdown table, with the growth exponent from the size before."""
    if "recall" in rows[0]:
        return large_table(rows)
    on_cpu = rows[0]["products"] != rows[0]["floor"]
    head = ["precision", "N", "K", "classes with samples", "ms", "reference ms", "times faster"]
    head += ["products ms", "share of the products"] * on_cpu
    head += ["share of the floor", "GFLOP/s", "peak MB", "growth exponent", "labels as float64"]
    lines = [head]
    for row, before in with_previous(rows):
        slow, seconds = row["reference"], row["seconds"]
        share = [f"{1e3 * row['products']:.2f}", f"{100 * row['products'] / seconds:.0f} %"] * on_cpu
        lines.append([
            row["precision"], f"{row['N']:,}", f"{row['K']:,}", f"{row['live']:,}", f"{1e3 * seconds:.2f}",
            f"{1e3 * slow:.1f}" if slow else "", f"{slow / seconds:.1f}" if slow else "", *share,
            f"{100 * row['floor'] / seconds:.0f} %", f"{row['gflops']:.0f}", f"{row['peak'] / 2**20:.0f}",
            growth(row, before), "" if row["agreement"] is None else f"{100 * row['agreement']:.2f} %",
        ])  # fmt: skip
    return markdown(lines)


def large_table(rows: list[dict[str, Any]]) -> str:
    """Write the rows of large sizes as a Markdown table."""
    lines = [["N", "K", "classes with samples", "seconds", "times the size before", "growth exponent", "peak GB"]]
    lines[0].append("neighbours found")
    for row, before in with_previous(rows):
        lines.append([
            f"{row['N']:,}", f"{row['K']:,}", f"{row['live']:,}", f"{row['seconds']:.0f}",
            f"{row['seconds'] / before['seconds']:.2f}" if before else "", growth(row, before),
            f"{row['peak'] / 1e9:.1f}", f"{100 * row['recall']:.1f} %",
        ])  # fmt: skip
    return markdown(lines)


def with_previous(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Pair each row with the smaller size of the same kind."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    pairs = []
    for row in rows:
        pairs.append((row, last.get((row["precision"], row["K"]))))
        last[row["precision"], row["K"]] = row
    return pairs


def growth(row: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Return the e for which the time grew as N^e."""
    if before is None:
        return ""
    return f"{math.log(row['seconds'] / before['seconds']) / math.log(row['N'] / before['N']):.2f}"


def markdown(lines: list[list[str]]) -> str:
    """Write lines as a Markdown table; the first line is its header."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


@contextmanager
def source_of(revision: str) -> Iterator[Path]:
    """Yield the folder of the package's sources at a commit, or in another tree."""
    given, root = Path(revision), Path(__file__).parents[1]
    if given.is_dir():
        found = next((folder for folder in (given / "src", given) if (folder / "moontide").is_dir()), None)
        if found is None:
            raise SystemExit(f"{given} has no src/moontide; give the folder of a tree, or a commit.")
        yield found.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="moontide-against-") as folder:
        archive = subprocess.run(["git", "archive", revision, "src"], cwd=root, capture_output=True)
        if archive.returncode:
            why = archive.stderr.decode().strip().partition("\n")[0]
            raise SystemExit(f"{revision} is no folder, and no commit of {root} ({why}).")
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder, "src")


def against(revision: str, device: str, repeat: int, methods: list[str]) -> str:
    """Time this tree and another in turn, each in a process of its own; compare least times, memory and answers."""
    root = Path(__file__).parents[1]
    with source_of(revision) as other, tempfile.TemporaryDirectory(prefix="moontide-answers-") as folder:
        sources, answers = (other, root / "src"), (Path(folder, "old"), Path(folder, "new"))
        found: list[dict[str, dict[str, float]]] = [{}, {}]
        for path in answers:
            path.mkdir()
        for round_ in range(repeat):
            for which in (0, 1) if round_ % 2 == 0 else (1, 0):  # who is first changes
                child = [sys.executable, str(root / "benchmarks/timing.py"), "--device", device, "--streams"]
                child += ["--save", str(answers[which]), "--methods", *methods]
                env = {**os.environ, "PYTHONPATH": str(sources[which])}
                done = subprocess.run(child, stdout=subprocess.PIPE, text=True, env=env)
                if done.returncode:
                    raise SystemExit(f"benchmarks/timing.py failed with the sources of {sources[which]}.")
                for key, row in json.loads(done.stdout).items():
                    held = found[which].setdefault(key, row)
                    found[which][key] = {name: min(value, held[name]) for name, value in row.items()}
            print(f"round {round_ + 1} of {repeat}", file=sys.stderr, flush=True)
        lines = [["task", f"{Path(revision).name} ms", "this tree ms", "ratio", "memory", "same labels", "confidence"]]
        for key, row in found[0].items():
            new = found[1][key]
            memory = f"{new['mb'] / max(row['mb'], 1e-3):.2f}" if "mb" in row else ""
            lines.append([
                key, f"{row['ms']:.2f}", f"{new['ms']:.2f}", f"{new['ms'] / row['ms']:.2f}", memory,
                *compared(*(path / f"{key}.npz" for path in answers)),
            ])  # fmt: skip
    return markdown(lines)


def compared(old: Path, new: Path) -> list[str]:
    """Return the share of labels that two runs have in common, and how far their confidences differ at most."""
    with np.load(old) as a, np.load(new) as b:
        same = a["labels"] == b["labels"]
        return [f"{100 * same.mean():.2f} %", f"{np.abs(a['confidence'] - b['confidence'])[same].max():.0e}"]


def k_means(f: Any, t: Any, rounds: int = ITERATIONS) -> Any:
    """Return the clusters of k-means in torch, from the class embeddings as first centres."""
    import torch

    x, centres = torch.asarray(f), torch.asarray(t)
    labels = (x @ centres.T).argmax(1)
    for _ in range(rounds):
        sums = torch.zeros_like(centres).index_add_(0, labels, x)
        count = torch.bincount(labels, minlength=len(centres))[:, None]
        centres = torch.where(count > 0, sums / count.clamp(min=1), centres)
        labels = ((centres**2).sum(1) / 2 - x @ centres.T).argmin(1)
    return labels


def gaussian_mixture(f: Any, t: Any, rounds: int = ITERATIONS) -> Any:
    """Return the clusters of scikit-learn's mixture with diagonal covariances, from the class embeddings as means."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    k, d = t.shape
    start = {"weights_init": np.full(k, 1 / k), "means_init": t, "precisions_init": np.full((k, d), float(d))}
    mixture = GaussianMixture(k, covariance_type="diag", max_iter=rounds, tol=0, reg_covar=1e-6, **start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return mixture.fit_predict(f)


def alternatives(sizes: list[int], classes: list[int], effective: int | None, repeat: int) -> str:
    """Time MOON and its alternatives on the same data in the same run, relative to MOON."""
    lines = [["N", "K", "MOON ms", "the equations, dense", "k-means in torch", "GaussianMixture of scikit-learn"]]
    for k in classes:
        for n in (size for size in sizes if size >= k):  # scikit-learn wants as many samples as components
            data = simulate(n, k, effective_classes=effective and min(effective, k), seed=0)
            f, t = data.features, data.text
            work = [partial(each, f, t) for each in (MOON().fit_predict, reference, k_means, gaussian_mixture)]
            seconds = timed(work, "cpu", repeat)
            times = [f"{one / seconds[0]:.1f}" for one in seconds[1:]]
            lines.append([f"{n:,}", f"{k:,}", f"{1e3 * seconds[0]:.1f}", *times])
            print(f"N={n:,} K={k:,}", file=sys.stderr, flush=True)
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 1000])
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--effective", type=int, default=25, help="classes present; 0: all")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--check", type=int, default=10_000, help="largest N whose labels are compared with float64")
    parser.add_argument("--against", metavar="REV", help="compare with a commit, or a tree; --repeat is in rounds")
    parser.add_argument("--alternatives", action="store_true", help="compare with what one would take instead")
    parser.add_argument("--methods", nargs="+", default=["moon", "stata", "tide"], help="for --against")
    parser.add_argument("--cold", action="store_true", help="time first calls, each after another function's")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--from", dest="folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(solve_files(args.folder)))
        return
    if args.against:
        print(against(args.against, args.device, args.repeat, args.methods))
        return
    rows: list[dict[str, Any]] = []
    effective = args.effective or None
    if args.alternatives:
        print(f"{machine('cpu')}\n\n{alternatives(args.sizes, args.classes, effective, args.repeat)}")
        return
    for precision in ("full", "tf32", "half") if args.device == "cuda" else ("full",):
        for k in args.classes:
            for n in args.sizes:
                if args.device == "cpu" and n > EXACT_ROWS:
                    rows.append(measure_large(n, k, effective))
                else:
                    given = (args.device, precision, args.repeat, args.check, args.cold)
                    rows.append(measure(n, k, effective, *given))
                print(f"{precision} N={n:,} K={k:,}: {1e3 * rows[-1]['seconds']:.2f} ms", flush=True)
    print(f"\n{rows[0]['machine']}")
    for kind in (False, True):  # large sizes in a table of their own
        some = [row for row in rows if ("recall" in row) is kind]
        if some:
            print(f"\n{table(some)}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
