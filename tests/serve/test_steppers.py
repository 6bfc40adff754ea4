"""The processes that take steps: the same answers to the last bit, and nothing lost where one ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import moontide
from moontide.protocols import as_online
from moontide.serve.batching import PushQueue
from moontide.serve.databases import open_store
from moontide.serve.metrics import Metrics
from moontide.serve.records import Config, Item, answers_of
from moontide.serve.state import ServedStream
from moontide.serve.steppers import Job, Steppers, fit
from moontide.simulate import simulate
from moontide.types import Task

DATA = simulate(256, 40, dim=16, effective_classes=5, seed=0)
X, TEXT = DATA.features.astype(np.float32), DATA.text.astype(np.float32)


@pytest.fixture
def steppers():
    made = Steppers()
    made.count = 2  # also on a machine with one core
    yield made
    made.close()


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ready(steppers, job):
    """Wait until a process knows the stream of a job."""
    until(lambda: steppers.step(job) is not None)


def start(name):
    method = moontide.method(name)
    online = as_online(method)
    return method, online, online.start(Task(TEXT[:1], TEXT, 100.0))


@pytest.mark.parametrize(
    ("name", "n", "k"), [("moon", 48, 40), ("tide", 48, 40), ("stata", 48, 40), ("tide", 140, 1000)]
)
def test_a_process_answers_what_the_server_would_to_the_last_bit(steppers, monkeypatch, name, n, k):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # the last one is large enough for two blocks
    data = simulate(5 * n, k, dim=16, effective_classes=5, seed=0)
    method, online = moontide.method(name), as_online(moontide.method(name))
    state = online.start(Task(X[:1], data.text.astype(np.float32), 100.0))
    ready(steppers, Job(7, method, state, X[:1], None))
    accepts, features = "known" in method.accepts and k == 40, data.features.astype(np.float32)
    for i in range(0, 5 * n, n):
        x, known = features[i : i + n], None
        if accepts and i > n:
            known = np.where(np.arange(n) % 5 == 0, data.labels[i : i + n], -1)
        rows, beta = steppers.step(Job(7, method, state, x, known))
        state, result = online.step(state, x, known)
        assert rows.tobytes() == answers_of(result, known).tobytes()
        assert (beta is None) == (result.beta is None)
        assert beta is None or beta.tobytes() == result.beta.tobytes()


STEPS = """
import hashlib, sys
from moontide.protocols import as_online
from moontide.registry import method
from moontide.serve.records import answers_of
from moontide.simulate import simulate
from moontide.types import Task

data = simulate(300, 300, dim=16, effective_classes=5, seed=0)
x, text, digest = data.features.astype("f4"), data.text.astype("f4"), hashlib.sha256()
for name in sys.argv[1:]:
    online = as_online(method(name))
    state = online.start(Task(text[:1], text, 100.0))
    for i in range(0, 300, 60):
        state, result = online.step(state, x[i : i + 60])
        digest.update(answers_of(result).tobytes())
print(digest.hexdigest())
"""


def test_loops_from_the_cache_compute_what_the_process_that_compiled_them_did(tmp_path):
    """Otherwise a step process, or a server that is started again, answers in other bits than the first one."""
    pytest.importorskip("numba")
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", STEPS, "tide", "moon"]
    runs = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout


def test_a_process_that_ends_is_replaced_after_some_time(steppers, caplog, monkeypatch):
    method, _, state = start("moon")
    job, steppers.count = Job(steppers.number(), method, state, X[:8], None), 1
    ready(steppers, job)
    steppers.idle[0].process.kill()
    steppers.idle[0].process.wait()
    assert steppers.step(job) is None
    assert caplog.text.count("has ended") == 1
    assert steppers.step(job) is None
    until(lambda: not steppers._preparing)
    assert steppers.all == []
    monkeypatch.setattr(steppers, "_not_before", time.monotonic())
    ready(steppers, job)


def test_a_process_that_is_stopped_is_ended_and_replaced(steppers, caplog, monkeypatch):
    monkeypatch.setattr("moontide.serve.steppers.STEP_SECONDS", 0.2)
    method, _, state = start("moon")
    job, steppers.count = Job(steppers.number(), method, state, X[:8], None), 1
    ready(steppers, job)
    process = steppers.idle[0].process
    os.kill(process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    assert steppers.step(job) is None
    assert 0.2 <= time.monotonic() - begin < 5
    assert process.poll() == -signal.SIGKILL
    assert "has ended: it did not answer" in caplog.text
    monkeypatch.setattr(steppers, "_not_before", time.monotonic())
    ready(steppers, job)


def test_a_process_that_starts_slowly_is_waited_for(steppers, caplog, monkeypatch):
    """Its start, its modules and the compiler may take longer than a step."""
    monkeypatch.setattr("moontide.serve.steppers.STEP_SECONDS", 0.01)
    method, _, state = start("moon")
    job, steppers.count = Job(steppers.number(), method, state, X[:8], None), 1
    assert steppers.step(job) is None
    until(lambda: steppers.all)
    process = steppers.all[0].process
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGCONT)
    until(lambda: steppers.idle)
    assert steppers.all[0].process is process
    assert caplog.text == ""


def test_a_step_that_a_process_refuses_is_left_to_the_server(steppers):
    method, _, state = start("moon")
    job = Job(1, method, state, X[:8], None)
    ready(steppers, job)
    assert steppers.step(job._replace(x=X[:8] * np.nan)) is None
    assert steppers.step(job) is not None


def test_the_end_ends_the_processes_and_whoever_waits_for_one(steppers):
    method, _, state = start("moon")
    job = Job(1, method, state, X[:8], None)
    ready(steppers, job)
    process = steppers.all[0].process
    steppers.close()
    assert process.poll() is not None
    assert steppers.step(job) is None


def test_streams_that_were_not_used_for_long_are_forgotten(steppers, monkeypatch):
    monkeypatch.setattr("moontide.serve.steppers.KNOWN", 2)
    steppers.count = 1
    method, _, state = start("moon")
    for number in (1, 2, 3):
        ready(steppers, Job(number, method, state, X[:8], None))
    assert list(steppers.all[0].sent) == [2, 3]
    monkeypatch.setattr("moontide.serve.steppers.KNOWN_BYTES", 10)
    ready(steppers, Job(4, method, state, X[:8], None))
    assert list(steppers.all[0].sent) == [4]
    ready(steppers, Job(2, method, state, X[:8], None))


def test_a_state_that_is_large_or_not_of_arrays_stays_in_the_server(monkeypatch):
    _, _, state = start("moon")
    assert fit(state)
    monkeypatch.setattr("moontide.serve.steppers.MAX_SENT", 100)
    assert not fit(state)


@pytest.mark.parametrize("name", ["moon", "tide"])
def test_a_stream_under_load_is_what_its_journal_says(steppers, name, tmp_path):
    store = open_store(str(tmp_path / "data"), "never")
    method = moontide.method(name)
    values = {key: getattr(method, key) for key in method.specs()}
    names = tuple(f"class {k}" for k in range(len(TEXT)))
    config = Config(name, values, names, X.shape[1], 100.0, max_batch=8)
    stream = ServedStream.create("a", config, TEXT, store, method, "cpu", 1000)
    stream.steppers, steppers.cores = steppers, 2
    ready(steppers, Job(stream.number, method, stream.moment.state, X[:1], None))
    rng, taken = np.random.default_rng(0), []
    step = steppers.step
    steppers.step = lambda job: taken.append(step(job)) or taken[-1]

    async def push(queue, pushes):
        for x in pushes:
            answer = await queue.push(Item(x))
            assert len(answer.rows) == len(x)

    async def main():
        queue = PushQueue(stream, Metrics(), 10_000)
        many = [[X[rng.integers(len(X), size=rng.integers(1, 20))] for _ in range(15)] for _ in range(8)]
        await asyncio.gather(*(push(queue, pushes) for pushes in many))
        return sum(len(x) for pushes in many for x in pushes)

    assert asyncio.run(main()) == stream.moment.total
    assert any(each is not None for each in taken)
    found = ServedStream("a", config, store, method, "cpu", 1000).load()
    for field in ("text", *(["recent"] if name == "tide" else [])):
        assert getattr(found.state, field).tobytes() == getattr(stream.moment.state, field).tobytes()
    assert (found.seq, found.total) == (stream.moment.seq, stream.moment.total)
    np.testing.assert_array_equal(found.tally.counts, stream.moment.tally.counts)
    np.testing.assert_array_equal(found.tally.beta, stream.moment.tally.beta)
    store.close()
