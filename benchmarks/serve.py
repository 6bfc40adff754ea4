"""Latency and throughput of `moontide serve`, against the method alone in the same run: scripts/bench serve.

One client pushes raw float32 embeddings one request after the other to a server of its own process on loopback. Before
each push the same samples go through the method in this process, so both meet the same load of the machine. The
overhead is the median of the differences: HTTP, checks, micro-batching, journal and sync.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"  # here and in the server: waiting threads of one would slow the other down

import numpy as np

from moontide.protocols import as_online
from moontide.registry import method
from moontide.simulate import simulate
from moontide.types import Task

SERVER = "import sys; from moontide.cli import main; sys.exit(main())"
WARM_UP = 5


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--method", default="moon")
    parser.add_argument("--pushes", type=int, default=200, help="timed pushes of each row of the table")
    parser.add_argument("--classes", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--fsync", nargs="+", default=["interval", "always"], choices=["always", "interval", "never"])
    parser.add_argument("--data", type=Path, help="where to keep the journal; the disk matters for --fsync always")
    arguments = parser.parse_args()
    print(f"{arguments.method}, 512-d, {arguments.pushes} pushes a row, one client, times in ms\n")
    print("| fsync | K | batch | method p50 | push p50 | push p99 | overhead p50 | pushes/s | samples/s | sync alone p50 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for fsync in arguments.fsync:
        with tempfile.TemporaryDirectory(dir=arguments.data) as folder:
            command = [sys.executable, "-c", SERVER, "serve", "--port", "0", "--data", folder, "--fsync", fsync]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            port = int(server.stdout.readline().split()[2].rpartition(":")[2])
            try:
                for k in arguments.classes:
                    for batch in arguments.batch:
                        row(arguments.method, k, batch, arguments.pushes, port, fsync, folder)
            finally:
                server.terminate()
                server.wait()


def row(name, k, batch, pushes, port, fsync, folder):
    data = simulate(batch * 16, k, effective_classes=min(10, k), seed=0)
    online = as_online(method(name))
    state = online.start(Task(data.features, data.text, data.logit_scale))
    client = http.client.HTTPConnection("127.0.0.1", port)
    stream = {"prototypes": data.text.tolist(), "method": name, "max_batch": batch, "max_wait_ms": 0, "window": batch}
    made = ask(client, "POST", "/streams", json.dumps(stream).encode(), {"Content-Type": "application/json"})
    path = f"/streams/{made['name']}"
    headers = {"Content-Type": "application/octet-stream", "X-Shape": f"{batch},512"}
    alone, pushed, synced = [], [], []
    with open(Path(folder) / "sync", "wb") as handle:
        for i in range(WARM_UP + pushes):
            x = data.features[batch * (i % 16) :][:batch]
            body = x.tobytes()
            start = time.perf_counter()
            state, _ = online.step(state, x)
            middle = time.perf_counter()
            ask(client, "POST", f"{path}/embeddings", body, headers)
            end = time.perf_counter()
            alone.append(1000 * (middle - start))
            pushed.append(1000 * (end - middle))
            if i % 10 == 0 and fsync == "always":
                start = time.perf_counter()
                handle.write(body)
                handle.flush()
                os.fdatasync(handle.fileno())
                synced.append(1000 * (time.perf_counter() - start))
    ask(client, "DELETE", path)
    alone, pushed = np.asarray(alone[WARM_UP:]), np.asarray(pushed[WARM_UP:])
    rate = 1000 / pushed.mean()
    print(
        f"| {fsync} | {k} | {batch} | {np.median(alone):.2f} | {np.median(pushed):.2f} "
        f"| {np.quantile(pushed, 0.99):.2f} | {np.median(pushed - alone):.2f} | {rate:.0f} | {rate * batch:.0f} "
        f"| {statistics.median(synced) if synced else 0:.2f} |",
        flush=True,
    )


def ask(client, verb, path, body=None, headers=None):
    client.request(verb, path, body, headers or {})
    response = client.getresponse()
    content = response.read()
    if response.status >= 300:
        sys.exit(f"{verb} {path}: {response.status} {content.decode()}")
    return json.loads(content) if content else None


if __name__ == "__main__":
    main()
