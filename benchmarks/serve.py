"""Latency and throughput of `moontide serve`, against the method alone in the same run: scripts/bench serve.

One client pushes raw float32 embeddings, one request after the other, to a server in a process of its own on loopback.
Between blocks of pushes the same samples go through the method in this process (`step`, and the labels), so that both
meet the same load of the machine. The overhead is the difference of the medians: HTTP, checks, micro-batching, journal,
sync, and the way there and back. With `--fsync always` the table also has the time that this disk takes to sync as many
bytes.

`--clients 1 8 32` measures throughput instead: so many clients push at once, each again when it is answered, in turns
in one run; `--impatient 400` adds clients that come again after 50 ms when they are refused; `--streams 2` shares the
clients among streams; `--kills 5 --pushes 10000` kills the server under 8 clients and looks whether anything is lost,
doubled or another answer than one process gives (`--url`: in PostgreSQL instead of SQLite); `--threads 0` lets the
server compute on all cores, as it does by itself, where a micro-batch is large enough; `--soak 1800` watches the memory
and the latency of a server over so many seconds. Other programs on the machine change times by wall clock, so the
tables also have what does not depend on them: the CPU time of the server for a push, and in a soak the time of a
request that does nothing, asked for all the while.

Throughput comes with its control: the samples per second of the method alone, without a server, in steps of one push
and of the largest micro-batch, in one process and in two at once. No server can gain more from several clients than
larger steps do, nor more from several streams than a second process does: two cores of a virtual machine are often two
threads of one.
"""

import argparse
import contextlib
import heapq
import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
for variable in THREADS:
    os.environ[variable] = "1"  # here, and in the server but for --threads: those of one would slow the other down

import numpy as np  # noqa: E402
from safetensors.numpy import load as load_arrays  # noqa: E402

from moontide.protocols import as_online  # noqa: E402
from moontide.registry import method  # noqa: E402
from moontide.serve.batching import GROWTH, MAX_BATCH  # noqa: E402
from moontide.serve.databases import open_store  # noqa: E402
from moontide.serve.records import Config, answers_of  # noqa: E402
from moontide.simulate import simulate  # noqa: E402
from moontide.store.states import state_bytes  # noqa: E402
from moontide.types import Task  # noqa: E402

SERVER = "import sys; from moontide.cli import main; sys.exit(main())"
DIM, SETS = 512, 16
CREATIONS = (  # method, options, classes, dimensions
    ("tide", {}, 1000, 512),
    ("moon", {}, 1000, 512),
    ("tide", {}, 2900, 512),  # as many as fit into a request
    ("tide", {}, 100_000, 8),
    ("dmn", {}, 1000, 512),
    ("tda", {"negative_capacity": 1000}, 100, 512),
    ("dota", {}, 100, 512),
    ("ecalp", {"memory": 100_000}, 100, 512),
    ("ecalp", {"memory": 1_000_000}, 10, 16),
    ("stata", {"iterations": 1000}, 100, 512),
    ("em_dirichlet", {"iterations": 100}, 100, 512),
    ("inmap", {"iterations": 10_000}, 100, 512),
)
COLUMNS = (
    "fsync",
    "K",
    "batch",
    "method p50",
    "push p50",
    "push p99",
    "overhead p50",
    "pushes/s",
    "samples/s",
    "sync p50",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="moon")
    parser.add_argument("--classes", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--pushes", type=int, default=320, help="timed pushes of each row, in blocks of 16")
    parser.add_argument("--fsync", nargs="+", default=["interval", "always"], choices=["always", "interval", "never"])
    parser.add_argument("--data", type=Path, help="the folder for the journal, whose disk is measured")
    parser.add_argument("--clients", nargs="+", type=int, help="measure throughput with so many clients at once")
    parser.add_argument("--impatient", type=int, help="clients of a last row that come again after 50 ms")
    parser.add_argument("--streams", type=int, default=1, help="streams that the clients share")
    parser.add_argument("--seconds", type=float, default=5, help="of a row of throughput")
    parser.add_argument("--soak", type=float, help="seconds to watch memory and latency, with 4 clients")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two pushes of a client in a soak")
    parser.add_argument("--threads", type=int, default=1, help="of linear algebra in the server; 0: one a core")
    parser.add_argument("--pin", action="store_true", help="the server on the first core, the clients on the second")
    parser.add_argument("--kills", type=int, help="kill the server so many times under 8 clients, and see what is left")
    parser.add_argument("--creations", action="store_true", help="time the creation of streams, large ones among them")
    parser.add_argument("--alone", type=int, help="print the samples/s of the method alone in steps of so many samples")
    parser.add_argument("--url", help="a PostgreSQL database for --kills, which is empty; else a folder")
    arguments = parser.parse_args()
    if arguments.kills:
        return kills(arguments)
    if arguments.creations:
        return creations(arguments)
    if arguments.alone:
        return print(steps(arguments.method, arguments.classes[0], arguments.alone, arguments.seconds))
    if arguments.pin:
        os.sched_setaffinity(0, {1})
    if arguments.clients or arguments.soak:
        return throughput(arguments)
    print(f"{arguments.method}, {DIM}-d, {arguments.pushes} pushes a row, one client, times in ms\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for fsync in arguments.fsync:
        with (
            tempfile.TemporaryDirectory(dir=arguments.data) as folder,
            serving(folder, fsync, arguments.threads) as (port, _),
        ):
            for k in arguments.classes:
                for batch in arguments.batch:
                    cells = row(arguments.method, k, batch, arguments.pushes, port, fsync, Path(folder))
                    print(f"| {fsync} | {k} | {batch} | {' | '.join(cells)} |", flush=True)


def creations(arguments):
    """Print how long it takes to create streams of several sizes, the largest that are allowed among them."""
    print("| method | options | K | d | request, MiB | state, MiB | s | status |\n|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=arguments.data) as folder, serving(folder, "always", 1) as (port, _):
        for name, options, k, d in CREATIONS:
            text = np.random.default_rng(0).normal(size=(k, d)).astype("f4").round(6)
            body = json.dumps({"name": "a", "prototypes": text.tolist(), "method": name, "options": options}).encode()
            state = as_online(method(name, **options)).start(Task(text[:1], text, 100.0))
            size = sum(getattr(value, "nbytes", 0) for value in vars(state).values()) / 2**20
            with Client(port) as client:
                start = time.perf_counter()
                status, _ = client.answer("POST", "/streams", body, "Content-Type: application/json\r\n")
                took = time.perf_counter() - start
                if status == b"201":
                    client.ask("DELETE", "/streams/a")
            words = ", ".join(f"{key}={value}" for key, value in options.items())
            cells = (name, words, k, d, f"{len(body) / 2**20:.1f}", f"{size:.0f}", f"{took:.2f}", status.decode())
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


def kills(arguments):
    """Kill the server again and again under 8 clients; every push must be there once, and all to the last bit."""
    data = simulate(1000, arguments.classes[0], dim=DIM, effective_classes=10, seed=0)
    x, lock, answers = data.features.astype("<f4"), threading.Lock(), []
    rng, failures = np.random.default_rng(0), []
    pieces = [rng.integers(len(x), size=rng.integers(1, 7)) for _ in range(arguments.pushes)]  # rows of each push
    todo = iter(enumerate(pieces))
    port = free_port()

    def work(number):
        client = None
        while True:
            with lock:
                i, rows = next(todo, (None, None))
            if i is None:
                return
            headers = (
                f"Content-Type: application/octet-stream\r\nX-Shape: {len(rows)},{DIM}\r\nIdempotency-Key: {i}\r\n"
            )
            body, got = x[rows].tobytes(), None
            while got is None:
                try:
                    client = client or Client(port)
                    got = client.ask("POST", "/streams/a/embeddings", body, headers, refusals=True)
                except (OSError, IndexError):  # killed while we waited, or not back yet
                    failures.append(i)
                    client = None
                    time.sleep(0.02)
            with lock:
                answers.append((i, got))

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = arguments.url or folder
        _, server = stack.enter_context(serving(place, "always", 1, port))
        stream = {"name": "a", "prototypes": data.text.tolist(), "method": arguments.method}
        with Client(port) as client:
            client.ask("POST", "/streams", json.dumps(stream).encode(), "Content-Type: application/json\r\n")
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for kill in range(1, arguments.kills + 1):
            while len(answers) < arguments.pushes * kill // (arguments.kills + 1):
                time.sleep(0.005)
            _, *others = family(server.pid)
            server.kill()
            server.wait()
            _, server = stack.enter_context(serving(place, "always", 1, port))
            helped = f"{len(others)} step processes with {cpu_seconds(others):.1f} s of CPU"
            print(f"kill {kill} after {len(answers)} answers, {helped}", flush=True)
        for thread in threads:
            thread.join()
        with Client(port) as client:
            total = client.ask("GET", "/streams/a")["total"]
        server.terminate()
        server.wait()
        store = open_store(place)
        batches, state = store.answers("a", 0, 2**62), store.load("a")[0].state
        store.close()
    check_kept(arguments.method, answers, pieces, total, batches, state, data)
    place = "SQLite" if arguments.url is None else "PostgreSQL"
    summary = f"{arguments.method}, {place}: {len(answers)} pushes, {total} samples, {len(batches)} micro-batches"
    print(f"{summary}, {arguments.kills} kills, {len(failures)} requests cut off: nothing lost or doubled,")
    print("and the answers and the state are those of one process, to the last bit")


def check_kept(name, answers, pieces, total, batches, state, data):
    """Exit with an error unless each push is in the stream once, and all is what one process makes of all of them."""
    x, order = data.features.astype("<f4"), np.full(total, -1)
    for i, got in answers:
        span = order[got["first"] : got["first"] + got["size"]]
        if (span != -1).any() or len(span) != len(pieces[i]):
            sys.exit(f"The push {i} shares its place with another.")
        span[:] = pieces[i]
    if total != sum(map(len, pieces)) or (order < 0).any():
        sys.exit(f"{total} samples are in the stream, of {sum(map(len, pieces))} that were answered.")
    chosen = method(name)
    online = as_online(chosen)
    text = data.text.astype("<f4")
    replayed, labels = online.start(Task(text[:1], text, 100.0)), np.empty(total, np.int64)
    for first, size, kept in batches:
        replayed, result = online.step(replayed, x[order[first : first + size]])
        rows = answers_of(result)
        labels[first : first + size] = rows["label"]
        if rows.tobytes() != kept[: rows.nbytes]:
            sys.exit(f"The answers from sample {first} on are not those of one process over the same micro-batches.")
    if any(got["labels"] != labels[got["first"] :][: got["size"]].tolist() for _, got in answers):
        sys.exit("A client was answered something else than the stream has.")
    expected, found = (load_arrays(data) for data in (state_bytes(chosen, replayed), state))
    if any(expected[name].tobytes() != found[name].tobytes() for name in expected | found):
        sys.exit("The state is not that of one process over the same micro-batches.")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pin(process):
    """Keep all threads of a process on the first core."""
    for task in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(task), {0})


@contextlib.contextmanager
def serving(folder, fsync, threads, port=0):
    """Run a server; yields its port and its process."""
    command = [sys.executable, "-c", SERVER, "serve", "--port", str(port), "--data", folder, "--fsync", fsync]
    limits = {name: str(threads) for name in THREADS if threads}
    others = {name: value for name, value in os.environ.items() if name not in THREADS}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=others | limits)
    try:
        yield int(server.stdout.readline().split()[2].rpartition(":")[2]), server
    finally:
        server.terminate()
        server.wait()


def family(server):
    """Return the fields of /proc/*/stat from the third on, of a server and then of its processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if server in (int(path.name), int(fields[1])):
                found.append(fields)
    return sorted(found, key=lambda fields: int(fields[1]) == server)


def cpu_seconds(processes):
    """Return the CPU time that processes have taken."""
    return sum(int(x) for fields in processes for x in fields[11:13]) / os.sysconf("SC_CLK_TCK")


def steps(name, k, size, seconds):
    """Return the samples per second of a method that takes one step after the other, on one thread."""
    data = simulate(size, k, effective_classes=min(10, size), seed=0)
    online = as_online(method(name))
    x, text = data.features.astype("<f4"), data.text.astype("<f4")
    state, done = online.start(Task(x[:1], text, data.logit_scale)), 0
    for _ in range(3):  # loads or compiles the loops
        state, _ = online.step(state, x)
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        state, _ = online.step(state, x)
        done += size
    return done / (time.perf_counter() - begin)


def control(arguments, k, batch):
    """Print the samples per second of the method alone, in small and large steps, in one process and in two."""
    large = min(MAX_BATCH, GROWTH * Config.max_batch)
    given = ["--method", arguments.method, "--classes", str(k), "--seconds", str(arguments.seconds)]
    rates = []
    for size, processes in ((batch, 1), (large, 1), (large, 2)):
        command = [sys.executable, __file__, *given, "--alone", str(size)]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
        rates.append(sum(float(process.communicate()[0]) for process in running))
    single = (
        f"{rates[0]:.0f} samples/s in steps of {batch}, {rates[1]:.0f} ({rates[1] / rates[0]:.2f}x) in steps of {large}"
    )
    both = f"two processes at once {rates[2]:.0f} ({rates[2] / rates[1]:.2f}x one)"
    print(f"\n{arguments.method} alone, K={k}: {single}; {both}", flush=True)


def throughput(arguments):
    """Print a row for each number of clients, and one of impatient ones."""
    print(f"{arguments.method}, {DIM}-d, {arguments.streams} streams, {arguments.seconds:g} s a row, times in ms\n")
    columns = (
        "fsync",
        "K",
        "batch",
        "clients",
        "p50",
        "p99",
        "pushes/s",
        "samples/s",
        "refused/s",
        "KiB written per push",
        "CPU ms per push",
    )
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for fsync in arguments.fsync:
        for k in arguments.classes:
            for batch in arguments.batch:
                with (
                    tempfile.TemporaryDirectory(dir=arguments.data) as folder,
                    serving(folder, fsync, arguments.threads) as (port, server),
                ):
                    if arguments.pin:
                        pin(server.pid)
                    load = Load(arguments.method, k, batch, port, server.pid, arguments.streams)
                    load.run(4, 1, 4.0 if not arguments.soak else 20.0)  # warms up, and starts processes
                    if arguments.soak:
                        load.soak(arguments.soak, arguments.pace)
                        continue
                    for clients in arguments.clients:
                        cells = load.run(clients, 1.0, arguments.seconds)
                        print(f"| {fsync} | {k} | {batch} | {clients} | {' | '.join(cells)} |", flush=True)
                    if arguments.impatient:
                        cells = load.run(arguments.impatient, 0.05, arguments.seconds)
                        name = f"{arguments.impatient} impatient"
                        print(f"| {fsync} | {k} | {batch} | {name} | {' | '.join(cells)} |", flush=True)
    if arguments.clients:
        for k in arguments.classes:
            for batch in arguments.batch:
                control(arguments, k, batch)


class Load:
    """Clients that push to the streams of a server, each one push after the other."""

    def __init__(self, name, k, batch, port, process, streams):
        data = simulate(batch * SETS, k, effective_classes=min(10, batch * SETS), seed=0)
        self.port, self.process, self.batch = port, process, batch
        self.bodies, self.paths = [x.tobytes() for x in np.split(data.features.astype("<f4"), SETS)], []
        self.headers = f"Content-Type: application/octet-stream\r\nX-Shape: {batch},{DIM}\r\n"
        stream = json.dumps({"prototypes": data.text.tolist(), "method": name, "window": batch}).encode()
        with Client(port) as client:
            for _ in range(streams):
                made = client.ask("POST", "/streams", stream, "Content-Type: application/json\r\n")
                self.paths.append(f"/streams/{made['name']}/embeddings")

    def run(self, clients, patience, seconds, pace=0.0):
        """Push for some seconds; `patience`: when to come again after a refusal; `pace`: the least time of a push.

        Returns cells of the table.
        """
        head = "POST {} HTTP/1.1\r\nHost: localhost\r\n{}Content-Length: {}\r\n\r\n"
        requests = [
            head.format(self.paths[i % len(self.paths)], self.headers, len(body)).encode() + body
            for i, body in zip(range(clients), itertools.cycle(self.bodies), strict=False)
        ]
        swarm = [Pusher(self.port, request, patience, pace) for request in requests]
        written, spent_before = self.written(), cpu_seconds(family(self.process))
        begin = time.perf_counter()
        drive(swarm, begin + seconds)
        took = [each for pusher in swarm for each in pusher.took]
        refused = sum(pusher.refused for pusher in swarm)
        if not took:
            sys.exit("No push was answered; is the machine busy, or is the method being compiled?")
        rate = len(took) / seconds
        cells = [1000 * np.median(took), 1000 * np.quantile(took, 0.99), rate, rate * self.batch, refused / seconds]
        kept = (self.written() - written) / 1024 / len(took)
        cpu = 1000 * (cpu_seconds(family(self.process)) - spent_before) / len(took)
        return [*(f"{value:.1f}" for value in cells), f"{kept:.1f}", f"{cpu:.2f}"]

    def written(self):
        """Return the bytes that the server has written to files."""
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{self.process}/io").read_text().splitlines()
            return int(dict(line.split(": ") for line in lines)["write_bytes"])
        return 0

    def soak(self, seconds, pace, parts=6):
        """Print memory and latency of the parts of a long run, with the latency of a request that does nothing."""
        print("| s | MiB | push p50 | push p99 | idle p50 | idle p99 | ratio | pushes/s | CPU ms per push |")
        print("|---" * 9 + "|")
        for part in range(parts):
            stop, idle = threading.Event(), []
            thread = threading.Thread(target=self.do_nothing, args=(stop, idle))
            thread.start()
            cells = self.run(4, 1.0, seconds / parts, pace)
            stop.set()
            thread.join()
            pages = sum(int(fields[21]) for fields in family(self.process))
            p50, p99 = 1000 * np.quantile(idle, (0.5, 0.99))
            row = [f"{(part + 1) * seconds / parts:.0f}", f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f}"]
            row += [cells[0], cells[1], f"{p50:.1f}", f"{p99:.1f}", f"{float(cells[0]) / p50:.1f}", cells[2], cells[6]]
            print(f"| {' | '.join(row)} |", flush=True)

    def do_nothing(self, stop, took):
        """Ask for the health of the server now and then."""
        with Client(self.port) as client:
            while not stop.wait(0.05):
                start = time.perf_counter()
                client.ask("GET", "/healthz")
                took.append(time.perf_counter() - start)


def row(name, k, batch, pushes, port, fsync, folder):
    """Measure one row; returns its cells after the first three."""
    data = simulate(batch * SETS, k, effective_classes=min(10, batch * SETS), seed=0)
    online = as_online(method(name))
    state = online.start(Task(data.features, data.text, data.logit_scale))
    alone, pushed = np.empty((2, pushes // SETS + 1, SETS))  # the last block is the warm-up
    synced, expected = [], [None] * SETS
    with Client(port) as client, open(folder / "sync", "wb") as disk:
        stream = {
            "prototypes": data.text.tolist(),
            "method": name,
            "max_batch": batch,
            "max_wait_ms": 0,
            "window": batch,
        }
        made = client.ask("POST", "/streams", json.dumps(stream).encode(), "Content-Type: application/json\r\n")
        path = f"/streams/{made['name']}"
        headers = f"Content-Type: application/octet-stream\r\nX-Shape: {batch},{DIM}\r\n"
        samples = [data.features[batch * i :][:batch] for i in range(SETS)]
        for block in range(-1, pushes // SETS):  # the first one warms up
            for i, x in enumerate(samples):
                start = time.perf_counter()
                state, result = online.step(state, x)
                expected[i] = result.labels.tolist()
                alone[block, i] = time.perf_counter() - start
            for i, x in enumerate(samples):
                body = x.tobytes()
                start = time.perf_counter()
                answer = client.ask("POST", f"{path}/embeddings", body, headers)
                pushed[block, i] = time.perf_counter() - start
                if answer["labels"] != expected[i]:
                    sys.exit("The server and the method alone do not agree.")
            if fsync == "always":
                start = time.perf_counter()
                disk.write(body)
                disk.flush()
                os.fdatasync(disk.fileno())
                synced.append(1000 * (time.perf_counter() - start))
        client.ask("DELETE", path)
    alone, pushed = 1000 * alone[:-1], 1000 * pushed[:-1]
    rate = 1000 / pushed.mean()
    times = (np.median(alone), np.median(pushed), np.quantile(pushed, 0.99), np.median(pushed) - np.median(alone))
    sync = f"{np.median(synced):.2f}" if synced else "-"
    return [*(f"{value:.2f}" for value in times), f"{rate:.0f}", f"{rate * batch:.0f}", sync]


class Pusher:
    """A client of many in one thread: sends its push, reads the answer, and comes again, later where it is refused."""

    def __init__(self, port, request, patience, pace):
        self.port, self.request, self.patience, self.pace = port, memoryview(request), patience, pace
        self.took, self.refused, self.socket = [], 0, None

    def begin(self, selector):
        """Send the push, over a new connection where there is none."""
        self.start, self.sent, self.received = time.perf_counter(), 0, b""
        if self.socket is None:
            self.socket = socket.socket()
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.connect_ex(("127.0.0.1", self.port))
            selector.register(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)
        else:
            selector.modify(self.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, self)

    def go_on(self, events, selector):
        """Send and read what can be; returns when to come again, or None."""
        try:
            if events & selectors.EVENT_WRITE:
                self.sent += self.socket.send(self.request[self.sent :])
                if self.sent == len(self.request):
                    selector.modify(self.socket, selectors.EVENT_READ, self)
            if events & selectors.EVENT_READ:
                some = self.socket.recv(1 << 16)
                if not some:
                    raise ConnectionError("closed")
                self.received += some
        except BlockingIOError:
            return None
        except ConnectionError:  # closed: connect again
            self.close(selector)
            self.refused += 1
            return time.perf_counter() + self.patience
        head, end, body = self.received.partition(b"\r\n\r\n")
        if not end:
            return None
        head = head.lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if len(body) < length:
            return None
        status, now = head.split(b" ", 2)[1], time.perf_counter()
        if b"connection: close" in head or self.sent < len(self.request):
            self.close(selector)
        if status in (b"429", b"503"):
            self.refused += 1
            return now + self.patience
        if status != b"200":
            sys.exit(self.received.decode())
        self.took.append(now - self.start)
        return max(now, self.start + self.pace)

    def close(self, selector):
        if self.socket is not None:
            selector.unregister(self.socket)
            self.socket.close()
            self.socket = None


def drive(swarm, stop):
    """Let clients push until some time; what is then on its way does not count."""
    with selectors.DefaultSelector() as selector:
        later, number = [(0.0, i) for i in range(len(swarm))], {id(pusher): i for i, pusher in enumerate(swarm)}
        while (now := time.perf_counter()) < stop:
            while later and later[0][0] <= now:
                swarm[heapq.heappop(later)[1]].begin(selector)
            for key, events in selector.select(min(0.1, max(0.0, later[0][0] - now)) if later else 0.1):
                when = key.data.go_on(events, selector)
                if when is not None:
                    heapq.heappush(later, (when, number[id(key.data)]))
        for pusher in swarm:
            pusher.close(selector)


class Client:
    """A connection that writes and reads bytes and does little else, so that its own time hardly counts."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def ask(self, verb, path, body=b"", headers="", refusals=False):
        status, content = self.answer(verb, path, body, headers)
        if refusals and status in (b"429", b"503"):
            return None
        if not status.startswith(b"2"):
            sys.exit(f"{verb} {path}: {content.decode()}")
        return json.loads(content) if content else None

    def answer(self, verb, path, body=b"", headers=""):
        head = f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += (some := self.socket.recv(1 << 20))
            if not some:
                raise ConnectionError("closed")
        head, _, content = received.partition(b"\r\n\r\n")
        headers = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(headers.get(b"content-length", 0))
        while len(content) < length:
            content += (some := self.socket.recv(1 << 20))
            if not some:
                raise ConnectionError("closed")
        return head.split(b" ", 2)[1], content


if __name__ == "__main__":
    main()
