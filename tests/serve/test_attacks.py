"""What brought servers down or made them lie, one by one: options, bodies, maps, memory, disks, connections."""

import asyncio
import contextlib
import errno
import io
import json
import math
import os
import signal
import socket
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load

from moontide import memory
from moontide.registry import method_type
from moontide.serve import batching, parsing, push_log, pushes, routes, server, service
from moontide.serve.service import TICK, usable_methods
from moontide.serve.state import ServedStream
from moontide.serve.steppers import cores

VALUES = [0, 1, -1, 2, 1e-320, 1e-30, 1e-6, 1e6, 1e9, 1e30, 1e308, "inf", math.inf, -math.inf, math.nan, 2**31, 2**62,
          2**64, 10**30, 10**400, True, "", "x", 0.5, 1000, 1001]  # fmt: skip


ODD = np.asarray([[-1.0] + [0.0] * 7], np.float32)  # a sample at which the method of plugin/odd.py has a bad day


def make(client, text, name="a", **body):
    answer = client.post("/streams", json={"name": name, "prototypes": text.tolist(), "max_wait_ms": 0, **body})
    assert answer.status_code == 201, answer.text
    return answer.json()


def whole(client, name="a"):
    """Return all that a stream is."""
    state = load(client.get(f"/streams/{name}/state").content)
    return client.get(f"/streams/{name}").json(), {key: value.tobytes() for key, value in state.items()}


# Options


@pytest.mark.parametrize("method", usable_methods())
def test_no_option_value_breaks_the_server_or_hangs(shared_app, method, text, samples, push, quick):
    """Every number option, every strange value: 201 or 422, and a push is answered or refused and not counted."""
    client, x = shared_app, samples(4)
    for option, spec in method_type(method).specs().items():
        for value in VALUES if spec.low is not None else VALUES[-4:]:
            options = {**quick(method, option), option: value}
            body = {"name": "o", "method": method, "prototypes": text.tolist(), "options": options}
            content = json.dumps(body)  # with Infinity and NaN, which are not JSON and are sent all the same
            start = time.process_time()  # the server is in this process, and the machine may be busy
            made = client.post("/streams", content=content, headers={"Content-Type": "application/json"})
            assert made.status_code in (201, 422), (option, value, made.text)
            if made.status_code == 201:
                pushed = push(client, "o", x)
                assert pushed.status_code in (200, 422), (option, value, pushed.text)
                counted = client.get("/streams/o").json()["total"]
                assert counted == (len(x) if pushed.status_code == 200 else 0)
                assert client.get("/streams/o/predictions").status_code == 200
                assert client.delete("/streams/o").status_code == 204
            else:
                assert client.get("/streams/o").status_code == 404
            assert time.process_time() - start < 5


@pytest.mark.parametrize("option", ["name", "self", "cls", "options", "method_name", ""])
def test_options_with_the_names_of_other_things_are_unknown(shared_app, text, option):
    answer = shared_app.post("/streams", json={"name": "o", "prototypes": text.tolist(), "options": {option: 1}})
    assert (answer.status_code, "no option" in answer.json()["detail"]) == (422, True)
    assert shared_app.get("/streams/o").status_code == 404


def test_a_push_without_a_finite_answer_fails_alone_and_is_not_counted(
    app, sqlite, learner, text, samples, push, monkeypatch
):
    client = app(sqlite)
    make(client, text, method="odd")
    push(client, "a", samples(3))
    before = whole(client)
    bad = np.concatenate([samples(1), ODD])
    answer = push(client, "a", bad, "key")
    assert (answer.status_code, "no finite answer" in answer.json()["detail"]) == (422, True)
    assert whole(client) == before
    # in one micro-batch with a good one
    stream, free = client.service.queues["a"].stream, threading.Event()
    advance, answers = stream.advance, {}
    monkeypatch.setattr(stream, "advance", lambda *given: [free.wait(10), advance(*given)][1])
    threads = [
        threading.Thread(target=lambda name=name, x=x: answers.update({name: push(client, "a", x)}))
        for name, x in (("first", samples(1)), ("good", samples(1)), ("bad", bad), ("well", samples(1)))
    ]
    for i, thread in enumerate(threads):
        thread.start()
        while client.get("/streams/a").json()["waiting"] < i + 1:
            time.sleep(0.01)
    free.set()
    for thread in threads:
        thread.join()
    assert {name: answer.status_code for name, answer in answers.items()} == {
        "first": 200, "good": 200, "bad": 422, "well": 200
    }  # fmt: skip
    assert client.get("/streams/a").json()["total"] == 6


def test_a_step_that_takes_too_long_makes_only_its_stream_busy(app, sqlite, text, samples, push, monkeypatch):
    monkeypatch.setattr(batching, "STEP_SECONDS", 0.3)
    monkeypatch.setattr(pushes, "HOLD_SECONDS", 60)  # which is for a full queue
    client = app(sqlite)
    make(client, text, method="tda")
    make(client, text, "b")
    stream, free = client.service.queues["a"].stream, threading.Event()
    step = stream.online.step
    monkeypatch.setattr(stream, "step", lambda *given: [free.wait(20), type(stream).step(stream, *given)][1])
    answer = push(client, "a", samples(1), "key")
    assert (answer.status_code, "takes longer than 0.3 s" in answer.json()["detail"]) == (429, True)
    assert push(client, "a", samples(1)).status_code == 429
    assert client.delete("/streams/a").status_code == 429
    assert push(client, "b", samples(1)).status_code == 200
    ready = client.get("/readyz")
    assert (ready.status_code, "busy with one step" in ready.json()["problems"]["stream a"]) == (200, True)
    assert 'moontide_busy{stream="a"} 1.0' in client.get("/metrics").text
    free.set()
    while client.get("/readyz").json()["problems"]:
        time.sleep(0.01)
    assert client.get("/streams/a").json()["total"] == 1  # what was begun is counted, under its key
    assert step is not None


def test_a_stop_does_not_wait_for_a_step_that_takes_too_long(serve, learner, sqlite, text, samples, push):
    server, answers = serve(sqlite), []

    def ask():
        with httpx.Client(base_url=server.url, timeout=60) as own:
            answers.append(push(own, "a", ODD))

    with httpx.Client(base_url=server.url, timeout=60) as client:
        make(client, text, method="odd", options={"does": "wait", "seconds": 90})
        make(client, text, "b", method="tda")
        thread = threading.Thread(target=ask)
        thread.start()
        while not client.get("/streams/a").json()["waiting"]:
            time.sleep(0.01)
        assert push(client, "b", samples(2)).status_code == 200
    status, errors = server.stop()  # which does not wait for 90 s
    thread.join()
    assert (status, answers[0].status_code, "Traceback" in errors) == (0, 429, False)
    with httpx.Client(base_url=serve(sqlite).url) as client:
        assert [client.get(f"/streams/{name}").json()["total"] for name in "ab"] == [0, 2]


def test_a_stop_with_many_pushes_takes_the_steps_under_way_and_no_more(
    serving, sqlite, text, samples, push, monkeypatch, caplog
):
    monkeypatch.setattr(server, "CLOSE_SECONDS", 1)
    answers = []

    def ask(url, x):
        with httpx.Client(base_url=url, timeout=60) as own:
            answers.append(push(own, "a", x))

    with serving(sqlite) as client:
        make(client, text, method="tda", max_batch=1)
        stream = client.service.queues["a"].stream
        monkeypatch.setattr(stream, "step", lambda *given: [time.sleep(0.5), type(stream).step(stream, *given)][1])
        threads = [threading.Thread(target=ask, args=(client.base_url, samples(8))) for _ in range(20)]
        for thread in threads:
            thread.start()
        while client.get("/streams/a").json()["waiting"] < 8 * 18:
            time.sleep(0.01)
        start = time.monotonic()
    assert time.monotonic() - start < 5  # and not 20 steps
    for thread in threads:
        thread.join()
    good = [answer for answer in answers if answer.status_code == 200]
    refused = {(answer.status_code, answer.json()["detail"]) for answer in answers if answer not in good}
    assert (len(answers), refused) == (20, {(503, "The server is shutting down; try again.")})
    assert not any(record.exc_info for record in caplog.records)
    with serving(sqlite) as client:  # what was answered is there, and what was begun may be
        assert 8 * len(good) <= client.get("/streams/a").json()["total"] <= 8 * (len(good) + 2)


def test_a_revision_that_takes_too_long_keeps_only_others_of_its_stream_waiting(
    app, sqlite, learner, text, samples, push, monkeypatch
):
    client = app(sqlite)
    make(client, text, method="odd", options={"does": "wait", "seconds": 2})
    make(client, text, "b", method="tda")
    assert push(client, "a", ODD).status_code == 200
    assert push(client, "b", samples(2)).status_code == 200
    monkeypatch.setattr(batching, "STEP_SECONDS", 0.3)
    late = client.post("/streams/a/revise")
    assert (late.status_code, "longer than 0.3 s" in late.json()["detail"]) == (429, True)
    for _ in range(2 * (os.cpu_count() or 1) + 4):  # more than there are threads for all
        again = client.post("/streams/a/revise")
        assert (again.status_code, "is under way" in again.json()["detail"]) == (429, True)
    start = time.monotonic()
    assert client.post("/streams/b/revise").status_code == 200
    assert client.get("/streams/a/predictions").status_code == 200
    assert time.monotonic() - start < 1.5
    monkeypatch.undo()
    deadline = time.monotonic() + 20
    while client.post("/streams/a/revise").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert push(client, "a", samples(1)).json()["first"] == 1


def test_a_creation_that_takes_too_long_is_refused_and_leaves_nothing(app, sqlite, text, monkeypatch):
    monkeypatch.setattr(batching, "STEP_SECONDS", 0.2)
    client = app(sqlite)
    free, online = threading.Event(), method_type("tda")
    step = online.step
    monkeypatch.setattr(online, "step", lambda *given: [free.wait(20), step(*given)][1])
    body = {"name": "a", "prototypes": text.tolist(), "method": "tda"}
    answer = client.post("/streams", json=body)
    assert (answer.status_code, "takes longer than 0.2 s" in answer.json()["detail"]) == (413, True)
    assert client.get("/streams/a").status_code == 404
    make(client, text, "b")  # others are made meanwhile
    free.set()
    monkeypatch.setattr(online, "step", step)
    deadline = time.monotonic() + 10
    while client.post("/streams", json=body).status_code != 201:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_is_ready_when_its_default_method_is_compiled_and_works_before(
    app, sqlite, text, samples, push, monkeypatch
):
    free, warm_up = threading.Event(), service.warm_up
    monkeypatch.setattr(service, "warm_up", lambda device: [free.wait(20), warm_up(device)])
    client = app(sqlite)
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "loading")
    assert "compiled the first time" in ready.json()["problems"]["methods"]
    assert client.get("/healthz").status_code == 200
    make(client, text, method="tda")
    assert push(client, "a", samples(2)).status_code == 200
    free.set()
    deadline = time.monotonic() + 20
    while client.get("/readyz").json() != {"status": "ready", "failed": {}, "problems": {}}:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_state_that_is_too_large_to_keep_is_refused_beforehand(app, sqlite):
    client = app(sqlite)
    body = {"prototypes": np.eye(64).tolist(), "method": "ecalp", "options": {"memory": 1_000_000}}
    answer = client.post("/streams", json=body)
    assert (answer.status_code, "the limit is 256 MiB" in answer.json()["detail"]) == (413, True), answer.text
    assert client.get("/streams").json() == []


def test_memory_that_runs_out_is_a_sentence_and_costs_the_stream_nothing(
    app, sqlite, text, samples, push, monkeypatch, caplog
):
    def no_memory(*_):
        raise MemoryError

    client = app(sqlite)
    make(client, text, method="tda")
    push(client, "a", samples(3))
    for name in ("saved", "revise", "flat_map", "write_checkpoint", "advance"):
        with monkeypatch.context() as patch:
            patch.setattr(ServedStream, name, no_memory)
            patch.setattr(ServedStream, "due", True)
            answers = [push(client, "a", samples(3))]
            answers += [client.post(f"/streams/a/{what}") for what in ("revise", "snapshots", "reset")]
            answers += [client.get(f"/streams/a/{what}") for what in ("map", "state")]
        assert 413 in {answer.status_code for answer in answers}
        assert {answer.status_code for answer in answers} <= {200, 201, 409, 413}
    total = client.get("/streams/a").json()["total"]
    assert push(client, "a", samples(3)).json()["first"] == total
    assert not [record for record in caplog.records if record.exc_info]


def test_a_client_that_leaves_in_the_middle_of_a_push_is_no_error(connected, app, sqlite, text, samples, push, caplog):
    client = app(sqlite)
    make(client, text)
    head = b"POST /streams/a/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3200\r\n"
    head += b"Content-Type: application/octet-stream\r\nX-Shape: 100,8\r\n\r\n"
    for _ in range(3):
        connected(client).sendall(head + bytes(100))
        connected(client).close()
    with connected(client) as leaving:
        leaving.sendall(head + bytes(100))
    assert push(client, "a", samples(1)).json()["first"] == 0
    time.sleep(0.2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Bodies


@contextlib.contextmanager
def pulse(client, process):
    """Ask for the health all the time; yields a list of the time that the server was at work before each answer.

    That is its own CPU time, which tells what it keeps others waiting for, however busy the machine is.
    """
    took, stop, clock = [], threading.Event(), (~process << 3) | 2  # clock_getcpuclockid

    def ask():
        with httpx.Client(base_url=client.base_url, timeout=30) as own:
            while not stop.is_set():
                start = time.clock_gettime(clock)
                own.get("/healthz")
                took.append(time.clock_gettime(clock) - start)
                time.sleep(0.005)

    thread = threading.Thread(target=ask)
    thread.start()
    yield took
    stop.set()
    thread.join()


NUMBERS = b"[" + b",".join([b"0.123456789"] * 512) + b"]"
LARGE = {
    "embeddings": ("/streams/a/embeddings", b'{"embeddings": [' + b",".join([NUMBERS] * 4000) + b"]}"),
    "prototypes": ("/streams", b'{"prototypes": [' + b",".join([b"[1,2]"] * 4_000_000) + b"]}"),
    "fields": ("/streams", b"{" + b",".join(b'"%d":1' % i for i in range(2_200_000)) + b"}"),
    "words": ("/streams", b'{"classes": [' + b",".join([b"1"] * 5_500_000) + b"]}"),
    "strings": ("/streams/a/embeddings", b'{"embeddings": [' + b",".join([b'"a"'] * 5_500_000) + b"]}"),
    "synonyms": ("/streams", b'{"synonyms": {' + b",".join(b'"%d":[1]' % i for i in range(190_000)) + b"}}"),
    "depth": ("/streams/a/embeddings", b"[" * 20_000_000),
}


@pytest.fixture(scope="module")
def lone(tmp_path_factory, server_of):
    """A server in a process of its own, with a stream."""
    server = server_of(str(tmp_path_factory.mktemp("large")))
    with httpx.Client(base_url=server.url, timeout=30) as client:
        make(client, np.eye(5, 8), method="tda")
    return server


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no clock for another process")
@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_keeps_nobody_waiting(lone, name):
    path, body = LARGE[name]
    with httpx.Client(base_url=lone.url, timeout=60) as client, pulse(client, lone.process.pid) as took:
        time.sleep(0.1)
        answer = client.post(path, content=body[: 2**25], headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413, 422), answer.text
    assert ("more rows or words than" in answer.json()["detail"]) == (answer.status_code == 413)
    assert max(took) < 0.1


def test_a_large_body_in_json_is_the_same_push_as_in_raw(app, sqlite, text, samples, push):
    client, x = app(sqlite), samples(4096)
    make(client, text, method="tda")
    make(client, text, "b", method="tda")
    body = json.dumps({"embeddings": x.tolist()})
    assert len(body) > parsing.INLINE
    one = client.post("/streams/a/embeddings", content=body, headers={"Content-Type": "application/json"})
    assert one.json()["labels"] == push(client, "b", x).json()["labels"]
    assert whole(client)[1] == whole(client, "b")[1]


def test_the_process_that_reads_a_body_has_a_bound_on_time_and_memory(monkeypatch):
    body = LARGE["embeddings"][1]
    run = parsing.subprocess.run
    endless = "SECONDS = 1; parsing.json.loads = lambda body: all(True for _ in iter(int, 1))"
    for limit, words in ((endless, "takes over 10 s"), ("BYTES = 2**20", "too much memory")):
        code = f"from moontide.serve import parsing; parsing.PARSE_{limit}; parsing.main('embeddings')"
        monkeypatch.setattr(parsing.subprocess, "run", lambda command, code=code, **options: run(
            [command[0], "-c", code], **options
        ))  # fmt: skip
        with pytest.raises(MemoryError, match=words):
            parsing.parse(body, "embeddings", ())
    monkeypatch.undo()
    monkeypatch.setattr(parsing, "PARSE_SECONDS", 0.01)
    with pytest.raises(MemoryError, match=r"over 0\.01 s"):
        parsing.parse(body, "embeddings", ())


def test_small_requests_have_a_small_limit(app, sqlite, text):
    client = app(sqlite)
    make(client, text)
    answer = client.post("/streams/a/restore", content=b"1" * 300_000, headers={"Content-Type": "application/json"})
    assert (answer.status_code, "262144 bytes" in answer.json()["detail"]) == (413, True)


@pytest.mark.parametrize("part", ["read", "prepared", "written"])
def test_the_parts_of_a_creation_share_its_time_and_a_late_one_leaves_nothing(
    app, sqlite, text, samples, push, monkeypatch, part
):
    client = app(sqlite)
    make(client, text, "b", method="tda")
    free, store = threading.Event(), client.service.store

    def slow(function):
        return lambda *given, **named: [free.wait(20), function(*given, **named)][1]

    with monkeypatch.context() as patch:
        patch.setattr(batching, "STEP_SECONDS", 0.6)
        if part == "read":
            parsed = routes.parsed

            async def late(*given):
                await asyncio.sleep(1)
                return await parsed(*given)

            patch.setattr(routes, "parsed", late)
            patch.setattr(ServedStream, "prepare", slow(ServedStream.prepare))
        elif part == "prepared":
            patch.setattr(ServedStream, "prepare", slow(ServedStream.prepare))
        else:
            patch.setattr(store, "create", slow(store.create))
        body = {"name": "a", "prototypes": text.tolist(), "method": "tda"}
        refused = client.post("/streams", json=body)
        assert (refused.status_code, "longer than 0.6 s; use fewer" in refused.json()["detail"]) == (413, True)
        assert client.post("/streams", json=body).status_code == 409  # the name is taken until the work has ended
        assert client.get("/streams/a").status_code == 404
        assert push(client, "b", samples(1)).status_code == 200
        free.set()
        while client.service.making:
            time.sleep(0.01)
    assert list(store.streams()) == ["b"]
    make(client, text, method="tda")
    assert push(client, "a", samples(1)).json()["first"] == 0


def test_classes_that_take_long_to_embed_are_refused_and_images_go_between(app, sqlite, colour, monkeypatch):
    monkeypatch.setattr(service, "EMBEDDED", 2)

    class Slow(type(colour)):
        def _text(self, prompts):
            time.sleep(0.1)
            return super()._text(prompts)

    client, buffer = app(sqlite, encoder=Slow()), io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(buffer, "PNG")
    assert client.post("/streams", json={"name": "a", "classes": list(colour.names)}).status_code == 201
    monkeypatch.setattr(service, "EMBED_SECONDS", 2)
    many = {"name": "b", "classes": [f"red {i}" for i in range(1000)]}
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(client.post, "/streams", json=many)
        while not client.service.making:
            time.sleep(0.001)
        pushed = client.post("/streams/a/images", files=[("images", ("a.png", buffer.getvalue(), "image/png"))])
        assert client.service.making
        refused = refused.result()
    assert pushed.json()["class_names"] == ["red"]
    assert (refused.status_code, "takes longer than 2 s; send fewer" in refused.json()["detail"]) == (413, True)
    assert client.get("/streams/b").status_code == 404
    assert not client.service.making


# Processes


def children(process):
    """Return the processes that a process has started."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stats.append((int(path.parent.name), path.read_text().rpartition(")")[2].split()))
    return [number for number, fields in stats if int(fields[1]) == process and fields[0] != "Z"]


@pytest.mark.skipif(not Path("/proc/self").exists() or cores() < 2, reason="there are no step processes to look for")
def test_a_stopped_step_process_is_replaced_and_none_outlives_the_server(serve, sqlite, text, samples, push):
    """Pushes are answered, or refused for the time of a step, and counted once."""
    server, x, over, seen = serve(sqlite), samples(48), threading.Event(), {"a": [], "b": []}

    def work(name, number):
        with httpx.Client(base_url=server.url, timeout=60) as own:
            while not over.is_set():
                key = f"{name}-{number}-{len(seen[name])}"
                while (answer := push(own, name, x, key)).status_code == 429:
                    seen[name].append(429)
                    time.sleep(0.1)
                seen[name].append(answer.status_code)

    with httpx.Client(base_url=server.url, timeout=60) as client:
        for name in seen:
            make(client, text, name, method="moon")
        threads = [threading.Thread(target=work, args=(name, i)) for name in "ab" for i in range(3)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while len(found := children(server.process.pid)) < 2:  # the second is started when the first is at work
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(min(found), signal.SIGSTOP)
        while min(found) in children(server.process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        over.set()
        for thread in threads:
            thread.join()
        for name, statuses in seen.items():
            assert set(statuses) <= {200, 429}
            assert client.get(f"/streams/{name}").json()["total"] == len(x) * statuses.count(200)
    rest = children(server.process.pid)
    for number in rest:
        os.kill(number, signal.SIGSTOP)
    server.kill()
    while any(Path(f"/proc/{number}/exe").exists() for number in rest):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# Memory


def test_a_push_that_does_not_fit_into_memory_is_refused_beforehand(app, sqlite, text, samples, push, monkeypatch):
    client = app(sqlite)
    make(client, text, method="tda", window=1, max_batch=1)
    before = whole(client)
    monkeypatch.setattr(memory, "SMALL", 0)
    monkeypatch.setattr(memory, "available_bytes", lambda: 50_000)
    answer = push(client, "a", samples(4000))
    assert (answer.status_code, "of memory" in answer.json()["detail"]) == (413, True)
    assert push(client, "a", samples(4)).status_code == 200
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    answer = client.post("/streams/a/revise")
    assert (answer.status_code, "of memory" in answer.json()["detail"]) == (413, True)
    monkeypatch.undo()
    assert client.get("/streams/a").json()["total"] == before[0]["total"] + 4


# Disks


def test_data_that_are_deleted_under_the_server_are_503_and_readyz_says_so(app, sqlite, text, samples, push, tmp_path):
    client = app(sqlite)
    make(client, text)
    assert push(client, "a", samples(2)).status_code == 200
    Path(sqlite).rename(tmp_path / "away")
    gone = push(client, "a", samples(2))
    assert (gone.status_code, "deleted, moved or replaced" in gone.json()["detail"]) == (503, True)
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["status"]) == (503, "failing")
    assert "deleted, moved" in ready.json()["problems"]["store"]
    (tmp_path / "away").rename(sqlite)
    deadline = time.monotonic() + 10 * TICK
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert push(client, "a", samples(2)).json()["first"] == 2


def test_a_full_disk_stops_no_background_work(app, sqlite, text, samples, push, monkeypatch, caplog):
    client = app(sqlite, fsync="interval")
    make(client, text)
    store = client.service.store
    run, full = store._run, threading.Event()

    def fail(sql, values=()):
        if full.is_set() and "COMMIT" in sql:
            raise sqlite3.OperationalError("database or disk is full")
        return run(sql, values)

    def fail_to_write(*given):
        if full.is_set():
            raise OSError(errno.ENOSPC, "the disk is full")
        return write(*given)

    write = push_log.os.pwritev
    monkeypatch.setattr(store, "_run", fail)
    monkeypatch.setattr(push_log.os, "pwritev", fail_to_write)
    full.set()
    assert push(client, "a", samples(1)).status_code == 503
    deadline = time.monotonic() + 10 * TICK
    while client.get("/readyz").json()["status"] != "failing":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "disk is full; make room there, and" in client.get("/readyz").json()["problems"]["store"]
    time.sleep(2 * TICK)  # the work goes on failing, and does not end
    assert len([record for record in caplog.records if "disk is full" in record.getMessage()]) == 1
    full.clear()
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert push(client, "a", samples(1)).json()["first"] == 0


def test_a_disk_with_room_for_little_is_failing_until_pushes_can_be_written(
    app, sqlite, text, samples, push, monkeypatch, caplog
):
    client = app(sqlite)
    make(client, text, method="tda", window=4096)
    for _ in range(3):
        assert push(client, "a", samples(1000)).status_code == 200
    store, write = client.service.store, push_log.os.pwritev

    def fail_to_write(*_):
        raise OSError(errno.ENOSPC, "the disk is full")

    store._run("PRAGMA max_page_count = 1")  # no page more than there are
    monkeypatch.setattr(push_log.os, "pwritev", fail_to_write)
    assert push(client, "a", samples(1)).status_code == 503
    monkeypatch.setattr(push_log.os, "pwritev", write)
    deadline = time.monotonic() + 2.5 * TICK
    while time.monotonic() < deadline:
        assert client.get("/readyz").json()["status"] == "failing"
        time.sleep(0.1)
    assert len([record for record in caplog.records if "full" in record.getMessage()]) == 1
    store._run("PRAGMA max_page_count = 1000000")
    while client.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline + 10 * TICK
        time.sleep(0.05)
    assert push(client, "a", samples(1)).json()["first"] == 3000


# Connections


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def connected():
    """Return a function that connects to a server, with room for few bytes; the connections end with the test."""
    with contextlib.ExitStack() as stack:

        def connect(client, room=2**20):
            made = stack.enter_context(socket.socket())
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
            made.connect((client.base_url.host, client.base_url.port))
            return made

        yield connect


def test_clients_that_never_read_make_room_for_others(connected, app, sqlite, text, samples, push, monkeypatch, caplog):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 40)
    monkeypatch.setattr(server, "MAX_UNREAD", 2**23)
    client = app(sqlite)
    make(client, text)
    client.get("/samples/simulated")
    before, held = resident(), []
    for _ in range(100):
        held.append(connected(client, 4096))
        held[-1].sendall(b"GET /samples/simulated HTTP/1.1\r\nHost: localhost\r\n\r\n")
    time.sleep(0.5)
    for _ in range(3):
        with httpx.Client(base_url=client.base_url, timeout=5) as other:
            assert other.get("/healthz").status_code == 200
            assert push(other, "a", samples(2)).status_code == 200
    assert resident() - before < 2**27
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_request_that_does_not_wait_for_the_answer_before_it_is_not_read(app, sqlite, connected):
    one = connected(app(sqlite))
    one.sendall(b"GET /samples/simulated HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
    received = b""
    while some := one.recv(2**20):
        received += some
    assert received.count(b"HTTP/1.1 200 OK") == 1


def test_an_answer_that_is_not_read_is_given_up(connected, app, sqlite, text, samples, push, monkeypatch):
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.3)
    client = app(sqlite)
    make(client, text)
    push(client, "a", samples(4096))
    push(client, "a", samples(4096))
    lazy = connected(client, 4096)
    lazy.sendall(b"GET /streams/a/predictions?size=10000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
    deadline = time.monotonic() + 10
    while len(client.server.server_state.connections) > 1:  # that of `client`
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_large_state_that_is_hardly_filled_takes_little_room(app, sqlite, text, samples, push):
    client = app(sqlite)
    make(client, text, method="ecalp", options={"memory": 400_000})
    assert sum(file.stat().st_size for file in Path(sqlite).iterdir()) < 2**23
    labels = push(client, "a", samples(4)).json()["labels"]
    state = whole(client)[1]
    assert sum(map(len, state.values())) > 2**26
    client.server.should_exit = True
    while client.service.store._connection is not None:
        time.sleep(0.01)
    again = app(sqlite)
    while again.get("/readyz").json()["status"] != "ready":
        time.sleep(0.01)
    assert whole(again)[1] == state
    assert again.get("/streams/a/predictions").json()["labels"] == labels


def test_a_large_answer_is_sent_in_pieces_and_held_in_bounds(connected, app, sqlite, monkeypatch):
    """More bytes than may be unread in all reach a client that reads, and others are told to wait meanwhile."""
    monkeypatch.setattr(server, "MAX_UNREAD", 2**22)
    client = app(sqlite)
    body = {"name": "a", "prototypes": np.eye(6, 16).tolist(), "method": "ecalp", "options": {"memory": 100_000}}
    assert client.post("/streams", json=body).status_code == 201
    assert sum(array.nbytes for array in load(client.get("/streams/a/state").content).values()) > 2**23
    client.service.gate.max_answers = 2**24
    with connected(client, 4096) as slow:
        slow.sendall(b"GET /streams/a/state HTTP/1.1\r\nHost: localhost\r\n\r\n")
        deadline = time.monotonic() + 60
        while not client.service.gate.answers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        answer = client.get("/streams/a/state")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert client.get("/streams/a").status_code == 200
    while client.get("/streams/a/state").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.service.gate.answers == 0


def test_an_endless_header_behind_an_open_event_stream_is_cut_off(connected, app, sqlite, text):
    client = app(sqlite)
    make(client, text)
    with connected(client) as greedy:
        greedy.sendall(b"GET /streams/a/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in greedy.recv(1000)
        sent = greedy.send(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            while sent < 2**26:
                sent += greedy.send(b"a" * 65536)
        assert sent < 2**24


def test_listeners_that_do_not_read_hold_little(connected, app, sqlite, text, samples, push):
    client = app(sqlite)
    make(client, text)
    held = []
    for _ in range(30):
        held.append(connected(client))
        held[-1].sendall(b"GET /streams/a/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while client.get("/metrics").text.count('moontide_listeners{stream="a"} 30') == 0:
        time.sleep(0.01)
    before = resident()
    for _ in range(40):
        assert push(client, "a", samples(1000)).status_code == 200
    assert resident() - before < 2**26


def test_a_stream_that_takes_long_to_read_is_loading_and_not_failed(app, sqlite, text, samples, push, monkeypatch):
    client = app(sqlite)
    make(client, text, method="tda")
    push(client, "a", samples(3))
    client.service.queues["a"].stream.since = [0, 0]  # no checkpoint at the end: as if it was killed
    client.server.should_exit = True
    while client.service.store._connection is not None:
        time.sleep(0.01)
    monkeypatch.setattr(batching, "STEP_SECONDS", 0.1)
    replay = ServedStream.replay
    monkeypatch.setattr(ServedStream, "replay", lambda *given: [time.sleep(0.5), replay(*given)][1])
    client = app(sqlite)
    seen = set()
    while "ready" not in seen:
        seen.add(client.get("/readyz").json()["status"])
        time.sleep(0.02)
    assert seen == {"loading", "ready"}
    assert client.get("/streams/a").json()["total"] == 3


def test_streams_take_their_steps_at_the_same_time(app, sqlite, text, samples, push, monkeypatch):
    """Each step waits for the others to be under way, so that they are answered only if all of them are."""
    meeting, step = threading.Barrier(3, timeout=10), ServedStream.step

    def together(self, *given):
        meeting.wait()
        return step(self, *given)

    client = app(sqlite)
    for name in "abc":
        make(client, text, name, method="tda")
    monkeypatch.setattr(ServedStream, "step", together)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda name: push(client, name, samples(4)), "abc"))
    assert [answer.status_code for answer in answers] == [200] * 3
