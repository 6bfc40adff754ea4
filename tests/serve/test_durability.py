"""Real servers on loopback: killed in the middle of work, stopped, refused; nothing that was answered is lost."""

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

import moontide
from moontide.cli import main
from moontide.protocols import as_online
from moontide.serve.databases import open_store
from moontide.serve.records import ANSWER
from moontide.types import Task

CLIENTS, SAMPLES, KILLS = 8, 1600, 2  # `scripts/bench serve --kills 5` has 10,000 pushes


class Client(threading.Thread):
    """Pushes its samples in small pieces, each until it is answered, and keeps the answers."""

    def __init__(self, number, x, port, push):
        super().__init__()
        self.number, self.x, self.port, self.push = number, x, port, push
        self.answers, self.done, self.failures = [], 0, 0
        self.refused = []

    def run(self):
        draw = random.Random(self.number)
        with httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=20) as client:
            while self.done < len(self.x):
                piece = self.x[self.done : self.done + draw.randint(1, 6)]
                key = f"{self.number}-{self.done}"
                answer = self.send(client, piece, key)
                if draw.random() < 0.05:  # a client that forgot that it was answered
                    assert self.send(client, piece, key) == answer
                self.answers.append((self.done, answer))
                self.done += len(piece)

    def send(self, client, piece, key):
        while True:
            try:
                response = self.push(client, "a", piece, key)
            except httpx.TransportError:  # killed while we waited, or not back yet
                self.failures += 1
            else:
                if response.status_code == 200:
                    return response.json()
                if response.status_code not in (429, 503):
                    self.refused.append(response.text)
                    raise SystemExit
            time.sleep(0.02)


def test_eight_clients_and_some_kills(serve, data, text, samples, push, free_port):
    port, method = free_port(), "tda"
    server = serve(data, port=port)
    body = {"name": "a", "prototypes": text.tolist(), "method": method, "max_wait_ms": 1}
    assert httpx.post(f"{server.url}/streams", json=body).status_code == 201
    x = samples(SAMPLES)
    workers = [Client(i, part, port, push) for i, part in enumerate(np.split(x, CLIENTS))]
    for worker in workers:
        worker.start()
    for kill in range(1, KILLS + 1):
        while sum(worker.done for worker in workers) < SAMPLES * kill // (KILLS + 1):
            assert any(worker.is_alive() for worker in workers)
            time.sleep(0.005)
        server.kill()  # SIGKILL
        server = serve(data, port=port)
    for worker in workers:
        worker.join(60)
    assert [worker.refused for worker in workers] == [[]] * CLIENTS
    assert sum(worker.failures for worker in workers) > 0  # the kills were felt

    # Every push is in the stream exactly once: the answers tile it without a gap or an overlap.
    order = np.full(SAMPLES, -1)
    for i, worker in enumerate(workers):
        for offset, answer in worker.answers:
            place = slice(answer["first"], answer["first"] + answer["size"])
            assert (order[place] == -1).all()
            order[place] = i * len(worker.x) + offset + np.arange(answer["size"])
    assert sorted(order) == list(range(SAMPLES))
    with httpx.Client(base_url=server.url) as client:
        summary = client.get("/streams/a").json()
        state = load(client.get("/streams/a/state").content)
    assert summary["seen"] == summary["total"] == SAMPLES

    # And nothing else: one process over the same samples in the same batches has the same state to the last bit.
    assert server.stop()[0] == 0
    store = open_store(data)
    batches = [(row.first, np.frombuffer(row.data, ANSWER, row.size)) for row in store.answers("a", 0, SAMPLES)]
    store.close()
    online = as_online(moontide.method(method))
    replayed, labels = online.start(Task(text, text)), []
    for first, rows in batches:
        assert first == len(labels)
        replayed, result = online.step(replayed, x[order[first : first + len(rows)]])
        np.testing.assert_array_equal(rows["label"], result.labels)
        labels += result.labels.tolist()
    for name, value in state.items():
        assert value.tobytes() == np.asarray(getattr(replayed, name)).tobytes(), name
    for worker in workers:
        for _, answer in worker.answers:
            assert answer["labels"] == labels[answer["first"] :][: answer["size"]]
    assert summary["counts"] == np.bincount(labels, minlength=len(text)).tolist()


def test_a_stop_answers_what_waits_and_makes_a_checkpoint(serve, data, text, samples, push):
    server = serve(data)
    answers = []

    def work():
        with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=server.url, timeout=30) as client:
            while (answer := push(client, "a", samples(3))).status_code == 200:
                answers.append(answer.json()["first"])

    with httpx.Client(base_url=server.url, timeout=30) as client:
        client.post("/streams", json={"name": "a", "prototypes": text.tolist()})
        pushes = [threading.Thread(target=work) for _ in range(4)]
        for thread in pushes:
            thread.start()
        deadline = time.monotonic() + 20
        while len(answers) < 20:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        half = b"POST /streams/a/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 32\r\n"
        half += b"Content-Type: application/octet-stream\r\nX-Shape: 1,8\r\n\r\n12"
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(half)  # neither a push that is half sent nor an open event stream holds it up
        with client.stream("GET", "/streams/a/events"):
            start = time.monotonic()
            status, errors = server.stop()
            assert time.monotonic() - start < 10
        assert slow.recv(1000).startswith(b"HTTP/1.1 503")
        slow.close()
        for thread in pushes:
            thread.join(20)
    assert (status, errors) == (0, "")
    store = open_store(data)
    saved, _, after, _ = store.load("a")
    store.close()
    assert (saved.total, after) == (3 * len(answers), [])


def test_a_stop_is_no_failure_whenever_it_comes(serve, sqlite):
    for wait in (0, 0.01, 0.05):
        server = serve(sqlite)
        time.sleep(wait)
        assert server.stop() == (0, "")


SLOW_START = """
import asyncio, sys
from moontide.serve.databases import open_store
from moontide.serve.server import run
from moontide.serve.service import Service

class Slow(Service):
    async def open(self):
        await super().open()
        await self.aside(lambda: __import__("time").sleep(60))  # as the class names of a large file take

run(Slow(open_store(sys.argv[1])), port=0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_does_not_wait_for_the_start(sqlite, number):
    command = [sys.executable, "-c", SLOW_START, sqlite]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().startswith("Moontide at ")
            time.sleep(0.5)
            process.send_signal(number)
            assert process.wait(10) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_an_interrupt_is_a_quiet_end(serve, sqlite):
    server = serve(sqlite, prefork=None)
    server.process.send_signal(signal.SIGINT)
    out, errors = server.process.communicate(timeout=40)
    assert (server.process.returncode, out, errors) == (0, "", "")


def test_bad_command_lines(capfd, sqlite, serve, free_port, tmp_path):
    port = free_port()
    serve(sqlite, port=port)
    other = str(tmp_path / "other")
    for arguments, words in (
        (["--port", str(port), "--data", other], "cannot be listened on"),
        (["--port", "99999", "--data", other], "from 0 to 65535"),
        (["--host", "nowhere.invalid", "--data", other], "is reachable from other machines"),
        (["--classes", "cat,dog", "--data", other], "'--classes' needs '--encoder'"),
        (["--samples", str(tmp_path), "--data", other], "'--samples' needs '--encoder'"),
        (["--host", "0.0.0.0", "--data", other], "no token"),
        (["--encoder", "hff:some/model", "--data", other], "no encoder 'hff'"),
        (["--data", "/dev/null/below"], "cannot be opened"),
        (["--revoke-token", "camera", "--data", other], "no token 'camera'"),
    ):
        assert main(["serve", *arguments]) == 2
        assert words in capfd.readouterr().err
