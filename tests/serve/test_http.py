"""The whole of the interface over HTTP, with SQLite and with PostgreSQL."""

import asyncio
import json
import os
import re
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

import moontide
from moontide.protocols import as_online
from moontide.serve import push_log, pushes
from moontide.serve.encoding import encode_in_pieces
from moontide.serve.metrics import HELP
from moontide.serve.service import Limits, sample_set
from moontide.serve.stream_store import EVERY, seal
from moontide.streams import load_state
from moontide.types import Task


def make(client, text, name="a", **options):
    body = {"name": name, "prototypes": text.tolist(), "method": "moon", "max_wait_ms": 0, **options}
    response = client.post("/streams", json=body)
    assert response.status_code == 201, response.text
    return response.json()


def arrays(client):
    """Return the bytes of every array of the state."""
    return {name: value.tobytes() for name, value in load(client.get("/streams/a/state").content).items()}


def test_from_creation_to_deletion(app, data, text, samples, push):
    client = app(data)
    made = make(client, text, method="tda", options={"positive_capacity": 5}, classes=list("vwxyz"), window=6)
    assert made["options"]["positive_capacity"] == 5
    assert made["class_names"] == list("vwxyz")
    assert (made["seen"], made["source"], made["dim"]) == (0, "prototypes", 8)
    x, tda = samples(8), as_online(moontide.method("tda", positive_capacity=5))
    state = tda.start(Task(text, text))
    state, one = tda.step(state, x[:5])
    state, two = tda.step(state, x[5:])
    raw = push(client, "a", x[:5])
    named = client.post("/streams/a/embeddings", json={"embeddings": x[5:].tolist()})
    assert raw.status_code == named.status_code == 200
    answer = raw.json()
    assert (answer["first"], answer["size"]) == (0, 5)
    assert answer["labels"] == one.labels.tolist()
    assert answer["zero_shot_labels"] == one.zero_shot_labels.tolist()
    assert answer["class_names"] == [list("vwxyz")[k] for k in one.labels]
    np.testing.assert_allclose(answer["confidence"], one.confidence, atol=1e-6)
    np.testing.assert_allclose(answer["zero_shot_confidence"], one.zero_shot.max(axis=1), atol=1e-6)
    assert named.json()["labels"] == two.labels.tolist()
    kept = client.get("/streams/a/predictions", params={"first": 3, "size": 4}).json()
    assert kept["first"] == 3
    assert kept["labels"] == [*one.labels[3:].tolist(), *two.labels[:2].tolist()]
    answered = client.get("/streams/a").json()
    assert (answered["seen"], answered["total"], answered["kept"], answered["batches"]) == (8, 8, 6, 2)
    labels = [*one.labels.tolist(), *two.labels.tolist()]
    assert answered["counts"] == np.bincount(labels, minlength=5).tolist()
    assert answered["changed"] == sum(map(int, [*one.changed, *two.changed]))
    revised = client.post("/streams/a/revise").json()
    assert (revised["first"], revised["size"], revised["seen"]) == (2, 6, 8)
    assert revised["labels"] == tda.step(state, x[2:])[1].labels.tolist()
    places = client.get("/streams/a/map").json()
    assert places["labels"] == labels[2:]
    assert len(places["x"]) == len(places["y"]) == 6
    assert [each["name"] for each in client.get("/streams").json()] == ["a"]
    assert client.delete("/streams/a").status_code == 204
    assert client.get("/streams/a").status_code == 404
    assert client.get("/streams").json() == []
    make(client, text)


def test_snapshots_restore_reset_and_download(app, data, text, samples, push, tmp_path):
    client = app(data)
    make(client, text, method="tda")
    push(client, "a", samples(6))
    first = client.post("/streams/a/snapshots").json()
    assert (first["number"], first["seen"]) == (1, 6)
    push(client, "a", samples(6))
    now, then = (client.get("/streams/a/state", params=p) for p in ({}, {"snapshot": 1}))
    for name, response, seen in (("now", now, 12), ("then", then, 6)):
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(response.content)
        method, state = load_state(path)  # what `moontide stream --resume` reads
        assert (method.name, state.seen) == ("tda", seen)
    restored = client.post("/streams/a/restore", json={"snapshot": 1}).json()
    assert (restored["seen"], restored["total"], restored["kept"]) == (6, 12, 0)
    assert arrays(client) == {name: value.tobytes() for name, value in load(then.content).items()}
    assert client.post("/streams/a/reset").json()["seen"] == 0
    assert [each["number"] for each in client.get("/streams/a/snapshots").json()] == [0, 1]
    assert client.delete("/streams/a/snapshots/1").status_code == 204
    assert client.delete("/streams/a/snapshots/1").status_code == 404
    assert client.delete("/streams/a/snapshots/0").status_code == 422
    assert client.post("/streams/a/restore", json={"snapshot": 1}).status_code == 404
    assert client.get("/streams/a/state", params={"snapshot": 7}).status_code == 404


def test_a_repeated_push_says_so(app, data, text, samples, push):
    client = app(data)
    make(client, text)
    x = samples(3)
    first, second = push(client, "a", x, "key"), push(client, "a", x, "key")
    assert first.content == second.content
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert client.get("/streams/a").json()["total"] == 3
    other = push(client, "a", x + 1, "key")
    assert other.status_code == 422
    assert "another push" in other.json()["detail"]
    assert push(client, "a", x, "key2").json()["first"] == 3


def test_a_server_that_comes_back_goes_on(app, data, text, samples, push):
    client = app(data)
    make(client, text, method="tda")
    x = samples(4)
    first = push(client, "a", x, "key")
    before = client.get("/streams/a").json(), arrays(client)
    client.server.should_exit = True
    while client.service.store._connection is not None:
        time.sleep(0.01)
    client = app(data)
    while client.get("/readyz").status_code != 200:
        time.sleep(0.01)
    assert (client.get("/streams/a").json(), arrays(client)) == before
    assert push(client, "a", x, "key").content == first.content
    assert push(client, "a", x).json()["first"] == 4


def test_many_clients_at_once_are_counted_once_each(app, data, text, samples, push):
    client = app(data)
    make(client, text, max_batch=16, max_wait_ms=2)
    answers = []

    def work():
        for n in (1, 2, 3, 4):
            answers.append(push(client, "a", samples(n)).json())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted((answer["first"], answer["first"] + answer["size"]) for answer in answers)
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == client.get("/streams/a").json()["total"] == 80


def test_events_tell_every_batch(app, data, text, samples, push):
    client = app(data)
    make(client, text)
    events, ready = [], threading.Event()

    def listen():
        with client.stream("GET", "/streams/a/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                ready.set()
                if line.startswith("data: "):
                    events.append(json.loads(line[6:]))

    thread = threading.Thread(target=listen)
    thread.start()
    assert ready.wait(10)
    answers = [push(client, "a", samples(n)).json() for n in (2, 3)]
    assert 'moontide_listeners{stream="a"} 1' in client.get("/metrics").text
    client.delete("/streams/a")  # which ends the events
    thread.join(10)
    assert not thread.is_alive()
    assert [event["labels"] for event in events] == [answer["labels"] for answer in answers]
    assert [event["total"] for event in events] == [2, 5]
    assert len(events[0]["beta"]) == 5


def hold(client, monkeypatch, name="a"):
    """Keep the steps of a stream from ending; returns what lets them go."""
    free, stream = threading.Event(), client.service.queues[name].stream
    advance = stream.advance
    monkeypatch.setattr(stream, "advance", lambda *given: [free.wait(20), advance(*given)][1])
    return free


def test_a_full_line_is_429_with_a_time_to_wait(app, data, text, samples, push, monkeypatch):
    monkeypatch.setattr(pushes, "HOLD_SECONDS", 0.2)
    client = app(data, limits=Limits(max_waiting=8))
    make(client, text, max_batch=4)
    free, waiting = hold(client, monkeypatch), []
    thread = threading.Thread(target=lambda: waiting.append(push(client, "a", samples(3))))
    thread.start()
    while client.get("/streams/a").json()["waiting"] < 3:
        time.sleep(0.01)
    start = time.monotonic()
    full = push(client, "a", samples(6))
    assert full.status_code == 429
    assert time.monotonic() - start > 0.19  # it was held back, so that who comes again at once costs little
    assert int(full.headers["retry-after"]) >= 1
    assert "connection" not in full.headers  # which can be used again
    free.set()
    thread.join()
    assert waiting[0].status_code == 200
    assert push(client, "a", samples(1)).json()["first"] == 3


def test_as_many_streams_and_snapshots_as_may_be(app, data, text):
    client = app(data, limits=Limits(max_streams=2, max_snapshots=1))
    make(client, text)
    make(client, text, name="b")
    more = client.post("/streams", json={"prototypes": text.tolist()})
    assert (more.status_code, "delete one" in more.json()["detail"]) == (429, True)
    assert client.post("/streams/a/snapshots").status_code == 201
    assert client.post("/streams/a/snapshots").status_code == 429
    taken = client.post("/streams", json={"name": "a", "prototypes": text.tolist()})
    assert taken.status_code in (409, 429)
    client.delete("/streams/b")
    assert client.post("/streams", json={"name": "a", "prototypes": text.tolist()}).status_code == 409


def test_metrics_are_in_prometheus_format(app, data, text, samples, push):
    client = app(data)
    make(client, text)
    push(client, "a", samples(3))
    push(client, "a", samples(4))
    lines = client.get("/metrics").text.splitlines()
    for line in lines:
        assert re.fullmatch(r'# (HELP|TYPE) \w+ .+|\w+(\{(\w+="[^"]*",?)*\})? [0-9.e+-]+', line), line
    assert 'moontide_samples_total{stream="a"} 7.0' in lines
    assert 'moontide_batch_seconds_bucket{stream="a",le="+Inf"} 2' in lines
    assert 'moontide_batch_seconds_count{stream="a"} 2' in lines
    assert 'moontide_seen_samples{stream="a"} 7' in lines
    assert any(line.startswith('moontide_http_requests_total{method="POST",status="201"}') for line in lines)
    for phase, count in (("queue", 2), ("step", 2), ("journal", 2)):
        assert f'moontide_phase_seconds_count{{stream="a",phase="{phase}"}} {count}' in lines
        assert f'moontide_phase_seconds_bucket{{stream="a",phase="{phase}",le="+Inf"}} {count}' in lines
    client.delete("/streams/a")
    assert 'stream="a"' not in client.get("/metrics").text


def test_the_dashboard_asks_for_what_there_is():
    board = json.loads(Path(__file__).parents[2].joinpath("docs", "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"moontide_\w+", query)}
    parts = {
        name: ("_bucket", "_sum", "_count") if words.startswith("histogram") else ("",) for name, words in HELP.items()
    }
    there = {name + part for name in parts for part in parts[name]}
    assert asked <= there
    assert {re.sub("_bucket$", "", name) for name in asked} == set(HELP)  # and for all of it
    phases = {phase for query in queries for phase in re.findall(r'phase="(\w+)"', query)}
    assert phases == {"queue", "step", "journal"}


def test_a_path_that_is_not_there_is_a_sentence(app, sqlite):
    answer = app(sqlite).get("/stream/a")
    assert (answer.status_code, "no path '/stream/a'" in answer.json()["detail"]) == (404, True)


def test_lines_of_the_log_may_be_json(serve, sqlite, text):
    server = serve(sqlite, "--log-format", "json")
    with httpx.Client(base_url=server.url, timeout=60) as client:
        make(client, text, method="tda")
    server.kill()
    with sqlite3.connect(Path(sqlite, "moontide.sqlite3")) as connection:
        connection.execute("UPDATE states SET total = 3")
    connection.close()
    server = serve(sqlite, "--log-format", "json")
    status, errors = server.stop()
    (line,) = errors.splitlines()
    answered = json.loads(line)
    assert (status, answered["level"], answered["logger"]) == (0, "error", "moontide.serve")
    assert "stream a" in answered["message"]
    assert "checksum" in answered["message"]


def test_health_and_a_stream_that_cannot_be_read(app, data, text, samples, push):
    client = app(data)
    make(client, text)
    make(client, text, name="b")
    push(client, "a", samples(3))
    with client.service.store._transaction(pushes=EVERY):
        client.service.store._run("UPDATE journal SET data = ?", (b"rubbish",))
    client.server.should_exit = True
    queue = client.service.queues["a"]
    queue.stream.since = [0, 0]  # no checkpoint at the end: as if it was killed
    while client.service.store._connection is not None:
        time.sleep(0.01)
    client = app(data)
    while (ready := client.get("/readyz")).status_code != 200:
        time.sleep(0.01)
    assert client.get("/healthz").json() == {"status": "ok"}
    assert "checksum" in ready.json()["failed"]["a"]
    damaged = push(client, "a", samples(1))
    assert (damaged.status_code, "checksum" in damaged.json()["detail"]) == (503, True)
    assert push(client, "b", samples(1)).status_code == 200  # the others go on
    assert client.delete("/streams/a").status_code == 204
    assert client.get("/readyz").json()["failed"] == {}


def test_a_full_disk_is_503_and_nothing_is_counted(app, sqlite, text, samples, push, monkeypatch):
    client = app(sqlite)
    make(client, text, method="tda")
    x = samples(4000)
    push(client, "a", x[:10])
    before = client.get("/streams/a").json(), arrays(client)
    store, write = client.service.store, os.pwritev
    monkeypatch.setattr(push_log.os, "pwritev", lambda file, parts, at: write(file, parts[:2], at))  # a part of it fits
    answer = push(client, "a", x, "key")
    assert (answer.status_code, "No space left" in answer.json()["detail"]) == (503, True)
    assert int(answer.headers["retry-after"]) > 0
    monkeypatch.undo()
    assert (client.get("/streams/a").json(), arrays(client)) == before
    store._select(f"PRAGMA max_page_count = {store._select('PRAGMA page_count')[0][0]}")  # nor do the tables grow
    answer = client.post("/streams", json={"name": "b", "prototypes": np.eye(40).tolist()})
    assert (answer.status_code, "full" in answer.json()["detail"]) == (503, True)
    store._select("PRAGMA max_page_count = 1000000")
    again = push(client, "a", x, "key")
    assert (again.status_code, again.json()["first"]) == (200, 10)
    assert "idempotency-replayed" not in again.headers


def test_a_stream_of_a_method_that_is_gone_does_not_stop_the_others(app, data, text, samples, push):
    client = app(data)
    make(client, text)
    make(client, text, name="b")
    store = client.service.store
    config = seal(store.streams()["a"].replace('"moon"', '"moan"').encode(), "a", "configuration")
    with store._transaction():
        store._run("UPDATE streams SET config = ? WHERE stream = 'a'", (config,))
    client.server.should_exit = True
    while client.service.store._connection is not None:
        time.sleep(0.01)
    client = app(data)
    answer = push(client, "a", samples(1))
    assert (answer.status_code, "no method 'moan'" in answer.json()["detail"]) == (503, True)
    assert push(client, "b", samples(1)).status_code == 200
    assert client.post("/streams", json={"name": "a", "prototypes": text.tolist()}).status_code == 409
    assert client.delete("/streams/a").status_code == 204
    make(client, text)


def test_the_simulated_sample_set(app, sqlite, push):
    client = app(sqlite)
    made = client.post("/streams", json={"sample": "simulated", "method": "moon", "max_wait_ms": 0}).json()
    assert (made["source"], len(made["class_names"])) == ("simulated", 100)
    response = client.get("/samples/simulated")
    shape = tuple(map(int, response.headers["x-shape"].split(",")))
    x = np.frombuffer(response.content, "<f4").reshape(shape)
    labels = np.asarray(response.headers["x-labels"].split(","), int)
    np.testing.assert_array_equal(labels, sample_set().labels)
    right = {"labels": 0, "zero_shot_labels": 0}
    for start in range(0, 256, 64):
        answer = push(client, made["name"], x[start : start + 64]).json()
        for key in right:
            right[key] += int((np.asarray(answer[key]) == labels[start : start + 64]).sum())
    assert right["labels"] > right["zero_shot_labels"] > 0
    beta = client.get(f"/streams/{made['name']}").json()["beta"]
    assert 0 < sum(value > 0 for value in beta) < 100


def test_what_the_server_says_of_itself(app, sqlite):
    answered = app(sqlite).get("/server").json()
    assert (answered["version"], answered["encoder"], answered["sample_images"]) == (moontide.__version__, None, 0)
    assert "moon" in answered["methods"]
    assert "mta" not in answered["methods"]


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/docs", "/docs.js", "/openapi.json"])
def test_pages_load_nothing_from_elsewhere(app, sqlite, path):
    response = app(sqlite).get(path)
    assert response.status_code == 200
    assert not re.findall(r"https?://(?!127\.0\.0\.1|localhost|www\.w3\.org/2000/svg)[\w.]+", response.text)
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_description_of_many_classes_is_written_in_pieces():
    answered = {
        "name": "a",
        "class_names": [f"é{i}" for i in range(30_000)],
        "beta": [0.5] * 9000,
        "few": [],
        "none": None,
    }
    turns = []

    async def both():
        async def other():
            while True:
                turns.append(None)
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        content = await encode_in_pieces(answered)
        beside.cancel()
        return content

    assert json.loads(asyncio.run(both())) == answered
    assert len(turns) > 8
