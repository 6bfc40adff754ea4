"""Latency and throughput of `moontide serve`, against the method alone in the same run: scripts/bench serve.

One client pushes raw float32 embeddings, one request after the other, to a server in a process of its own on loopback.
Between blocks of pushes the same samples go through the method in this process (`step`, and the labels), so that both
meet the same load of the machine. The overhead is the difference of the medians: HTTP, checks, micro-batching, journal,
sync, and the way there and back. With `--fsync always` the table also has the time that this disk takes to sync as many
bytes.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # here and in the server: the threads of one would slow the other down

import numpy as np  # noqa: E402

from moontide.protocols import as_online  # noqa: E402
from moontide.registry import method  # noqa: E402
from moontide.simulate import simulate  # noqa: E402
from moontide.types import Task  # noqa: E402

SERVER = "import sys; from moontide.cli import main; sys.exit(main())"
DIM, SETS = 512, 16
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
    arguments = parser.parse_args()
    print(f"{arguments.method}, {DIM}-d, {arguments.pushes} pushes a row, one client, times in ms\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for fsync in arguments.fsync:
        with tempfile.TemporaryDirectory(dir=arguments.data) as folder:
            command = [sys.executable, "-c", SERVER, "serve", "--port", "0", "--data", folder, "--fsync", fsync]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            port = int(server.stdout.readline().split()[2].rpartition(":")[2])
            try:
                for k in arguments.classes:
                    for batch in arguments.batch:
                        cells = row(arguments.method, k, batch, arguments.pushes, port, fsync, Path(folder))
                        print(f"| {fsync} | {k} | {batch} | {' | '.join(cells)} |", flush=True)
            finally:
                server.terminate()
                server.wait()


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


class Client:
    """A connection that writes and reads bytes and does little else, so that its own time hardly counts."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def ask(self, verb, path, body=b"", headers=""):
        head = f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
        self.socket.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.socket.recv(1 << 20)
        head, _, content = received.partition(b"\r\n\r\n")
        told = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        length = int(told.get(b"content-length", 0))
        while len(content) < length:
            content += self.socket.recv(1 << 20)
        if not head.split(b" ", 2)[1].startswith(b"2"):
            sys.exit(f"{verb} {path}: {received.decode()}")
        return json.loads(content) if content else None


if __name__ == "__main__":
    main()
