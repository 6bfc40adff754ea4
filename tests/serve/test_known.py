"""True labels that come after the answers: over HTTP, in the journal, after a kill, and where they cannot be used."""

import json
import threading

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

import moontide
from moontide.protocols import as_online
from moontide.serve.databases import open_store
from moontide.types import Task

NAMES = list("vwxyz")


@pytest.fixture
def client(app, data, learner):
    return app(data)


def make(client, text, name="a", method="learner", **options):
    body = {"name": name, "prototypes": text.tolist(), "classes": NAMES, "method": method, **options}
    answer = client.post("/streams", json=body)
    assert answer.status_code == 201, answer.text


def correct(client, samples, labels, key=None, name="a"):
    headers = {} if key is None else {"Idempotency-Key": key}
    return client.post(f"/streams/{name}/known", json={"samples": samples, "labels": labels}, headers=headers)


def arrays(client, name="a"):
    return {key: value.tobytes() for key, value in load(client.get(f"/streams/{name}/state").content).items()}


def test_a_correction_counts_from_the_next_micro_batch_on(client, text, samples, push):
    make(client, text)
    x, y = samples(6), samples(4)
    method = as_online(moontide.method("learner"))
    state, one = method.step(method.start(Task(text, text)), x)
    first = push(client, "a", x).json()
    assert first["labels"] == one.labels.tolist()
    assert first["known"] == [None] * 6
    done = correct(client, [5, 1], ["y", 0]).json()
    assert done == {"samples": [5, 1], "known": [3, 0], "class_names": ["y", "v"]}
    state = method.correct(state, x[[5, 1]], np.asarray([3, 0]))
    state, two = method.step(state, y)
    second = push(client, "a", y).json()
    assert second["labels"] == two.labels.tolist()
    np.testing.assert_allclose(second["confidence"], two.confidence, atol=1e-6)
    told = client.get("/streams/a/predictions").json()
    assert told["known"] == [None, 0, None, None, None, 3, None, None, None, None]
    assert told["labels"] == [*first["labels"], *second["labels"]]  # what was answered stays
    assert client.get("/streams/a").json()["total"] == 10
    assert arrays(client)["sums"] == np.asarray(state.sums).tobytes()
    assert correct(client, [1], [None]).json()["known"] == [None]  # taken back
    assert client.get("/streams/a/predictions").json()["known"][1] is None


def test_labels_may_be_known_when_samples_come(client, text, samples):
    make(client, text)
    x, method = samples(3), as_online(moontide.method("learner"))
    body = {"embeddings": x.tolist(), "known": ["w", None, 4]}
    answer = client.post("/streams/a/embeddings", json=body).json()
    assert answer["known"] == [1, None, 4]
    state, _ = method.step(method.start(Task(text, text)), x, np.asarray([1, -1, 4]))
    assert arrays(client)["sums"] == np.asarray(state.sums).tobytes()
    for known, words in (
        ([1, 2], "one entry for each of 3"), ([9, 1, 1], "from 0 to 4"), (["q", 1, 1], "no class 'q'"),
        ("w", "must be a list"), ([True, 1, 1], "must be a list"), ([1.5, 1, 1], "must be a list"),
    ):  # fmt: skip
        wrong = client.post("/streams/a/embeddings", json={**body, "known": known})
        assert (wrong.status_code, words in wrong.json()["detail"]) == (422, True), wrong.text
    assert client.get("/streams/a").json()["total"] == 3


def test_a_repeated_correction_is_not_counted_again(client, text, samples, push):
    make(client, text)
    push(client, "a", samples(3), "push")
    first = correct(client, [0, 2], [1, 1], "key")
    after = arrays(client)
    again = correct(client, [0, 2], [1, 1], "key")
    assert again.content == first.content
    assert (first.headers.get("idempotency-replayed"), again.headers["idempotency-replayed"]) == (None, "true")
    assert arrays(client) == after
    for samples_, labels, key in (([0, 2], [1, 2], "key"), ([0], [1], "push")):
        other = correct(client, samples_, labels, key)
        assert (other.status_code, "was used before" in other.json()["detail"]) == (422, True)
    assert push(client, "a", samples(1), "key").status_code == 422


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"samples": [3], "labels": ["v"]}, "must be in the window of the stream, which has samples 4 to 9. Got 3"),
        ({"samples": [10], "labels": ["v"]}, "Got 10"),
        ({"samples": [9], "labels": ["q"]}, "no class 'q'"),
        ({"samples": [9], "labels": [5]}, "from 0 to 4. Got 5"),
        ({"samples": [9], "labels": [-1]}, "from 0 to 4. Got -1"),
        ({"samples": [9, 8], "labels": [1]}, "one entry for each of 2"),
        ({"samples": [9, 9], "labels": [1, 2]}, "distinct numbers"),
        ({"samples": [], "labels": []}, "'samples', a list"),
        ({"samples": [-1], "labels": [1]}, "'samples', a list"),
        ({"samples": [True], "labels": [1]}, "'samples', a list"),
        ({"samples": [9], "labels": [1.5]}, "must be a list"),
        ({"samples": [9]}, "'labels'"),
        ({"samples": [9], "labels": [1], "colour": 1}, "'colour': Extra inputs"),
    ],
)
def test_what_cannot_be_corrected_is_refused_in_a_sentence(app, sqlite, learner, text, samples, push, body, words):
    client = app(sqlite)
    make(client, text, window=5)
    for n in (4, 4, 2):
        push(client, "a", samples(n))
    before = arrays(client)
    answer = client.post("/streams/a/known", json=body)
    assert (answer.status_code, words in answer.json()["detail"]) == (422, True), answer.text
    assert arrays(client) == before


def test_a_method_that_cannot_use_labels_says_which_can(client, text, samples, push):
    make(client, text, method="tda")
    push(client, "a", samples(3))
    for answer in (
        correct(client, [1], ["v"]),
        client.post("/streams/a/embeddings", json={"embeddings": [[1] * 8], "known": [1]}),
    ):
        assert (answer.status_code, "use tide" in answer.json()["detail"]) == (422, True)
    assert {"tide", "learner"} <= set(client.get("/server").json()["accept_known"])


def test_after_a_reset_the_window_is_empty(client, text, samples, push):
    make(client, text)
    push(client, "a", samples(3))
    client.post("/streams/a/reset")
    answer = correct(client, [1], ["v"])
    assert (answer.status_code, "which is empty" in answer.json()["detail"]) == (422, True)


def test_the_window_is_predicted_again_with_what_is_known(client, text, samples, push):
    make(client, text)
    x, method = samples(6), as_online(moontide.method("learner"))
    push(client, "a", x)
    correct(client, [2], [4])
    state, _ = method.step(method.start(Task(text, text)), x)
    state = method.correct(state, x[[2]], np.asarray([4]))
    expected = method.step(state, x, np.asarray([-1, -1, 4, -1, -1, -1]))[1]
    assert client.post("/streams/a/revise").json()["labels"] == expected.labels.tolist()


def test_listeners_hear_of_corrections(client, text, samples, push):
    make(client, text)
    heard, ready = [], threading.Event()

    def listen():
        with client.stream("GET", "/streams/a/events") as response:
            for line in response.iter_lines():
                ready.set()
                if line.startswith(("event: ", "data: ")):
                    heard.append(line)

    thread = threading.Thread(target=listen)
    thread.start()
    assert ready.wait(10)
    push(client, "a", samples(2))
    correct(client, [1], ["w"])
    client.delete("/streams/a")
    thread.join(10)
    assert [line for line in heard if line.startswith("event")] == ["event: batch", "event: known"]
    assert json.loads(heard[-1][6:]) == {"samples": [1], "known": [1]}


def test_a_kill_after_corrections_loses_nothing(serve, data, learner, text, samples, push):
    """Pushes and corrections in turns, kills among them: the state is that of one process, to the last bit."""
    name = "learner" if data.startswith("postgres") else "tide"
    method, sent, state = as_online(moontide.method(name)), [], None
    server = serve(data)
    for turn in range(6):
        with httpx.Client(base_url=server.url, timeout=20) as client:
            if turn == 0:
                make(client, text, method=name, window=8)
                state = method.start(Task(text, text))
            x = samples(5)
            sent.extend(x)
            assert push(client, "a", x, f"push{turn}").json()["first"] == 5 * turn
            state, _ = method.step(state, x)
            numbers, labels = [5 * turn + 3, max(0, 5 * turn - 1)], [turn % 5, (turn + 2) % 5]
            for _ in range(2):  # the second time it is known already
                assert correct(client, numbers, labels, f"known{turn}").status_code == 200
            state = method.correct(state, np.stack(sent)[numbers], np.asarray(labels))
            if turn in (2, 5):
                server.kill()
                server = serve(data)
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for key, value in arrays(client).items():
            assert value == np.asarray(getattr(state, key)).tobytes(), key
        known = client.get("/streams/a/predictions").json()["known"]
        assert correct(client, [28, 24], [0, 2], "known5").headers["idempotency-replayed"] == "true"
    expected = [None] * 30
    for turn in range(6):
        expected[5 * turn + 3], expected[max(0, 5 * turn - 1)] = turn % 5, (turn + 2) % 5
    assert known == expected
    server.kill()
    store = open_store(data)
    assert [record.size for record in store.load("a")[2]][-2:] == [5, 0]
    store.close()


def test_a_correction_reaches_the_samples_that_tide_remembers(client, text, samples, push):
    make(client, text, method="tide")
    for n in (1, 7, 30):
        push(client, "a", samples(n))
    correct(client, [0, 5, 37], [1, 2, 3])
    state = load(client.get("/streams/a/state").content)
    assert state["recent_known"][-38:][[0, 5, 37]].tolist() == [1, 2, 3]  # not as samples of the past
    assert (state["recent_known"] >= 0).sum() == 3
    assert not state["known_counts"].any()


@pytest.mark.parametrize("memory", [4, 64])
def test_every_sample_has_one_label_however_often_it_is_corrected(client, text, samples, push, memory):
    """The samples that TIDE no longer remembers (memory 4), and those that it does."""
    x = samples(12)
    for name in ("a", "b", "c"):
        make(client, text, name, method="tide", options={"memory": memory})
        push(client, name, x)
    correct(client, [0, 1, 5], [1, 2, 3], name="a")
    for labels in ([0, 2, 3], [0, 2, 3], [None, 4, 3], [1, 2, 3]):  # twice the same, taken back, and given again
        assert correct(client, [0, 1, 5], labels, name="b").status_code == 200
    one, two, none = (load(client.get(f"/streams/{name}/state").content) for name in "abc")
    for field in one:
        np.testing.assert_allclose(one[field], two[field], atol=1e-6, err_msg=field)
    correct(client, [0, 1, 5], [None, None, None], name="b")
    two = load(client.get("/streams/b/state").content)
    for field in none:
        np.testing.assert_allclose(none[field], two[field], atol=1e-6, err_msg=field)
