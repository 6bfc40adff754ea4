"""A stream and its store, without threads or HTTP: replay to the last bit, keys, windows, snapshots, failures."""

import asyncio
import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moontide
from moontide.errors import InputError, MissingInputError, OptionError
from moontide.protocols import as_online
from moontide.serve import state as module
from moontide.serve.batching import PushQueue
from moontide.serve.databases import open_store
from moontide.serve.metrics import Metrics
from moontide.serve.records import Config, Item, digest_of, key_of
from moontide.serve.service import usable_methods
from moontide.serve.state import GoneError, ServedStream
from moontide.serve.steppers import Steppers
from moontide.serve.stream_store import StoreError
from moontide.types import Task

D = 8  # of the fixtures


def make(store, text, name="a", method="moon", keep=1000, window=20, **options):
    chosen = moontide.method(method, **options)
    values = {key: getattr(chosen, key) for key in chosen.specs()}
    names = tuple(f"class {k}" for k in range(len(text)))
    config = Config(method, values, names, D, 100.0, window=window)
    return ServedStream.create(name, config, text, store, chosen, "cpu", keep)


def again(stream):
    """Return the same stream as a new process would find it."""
    found = ServedStream(stream.name, stream.config, stream.store, stream.method, "cpu", stream.keep)
    found.load()
    return found


def item(x, key=None):
    return Item(x, key, digest_of(x))


def same(a, b):
    """Tell whether two moments are the same to the last bit."""
    for field in dataclasses.fields(a.state):
        one, other = getattr(a.state, field.name), getattr(b.state, field.name)
        assert type(one) is type(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), field.name
    assert (a.seq, a.total, a.tally.changed) == (b.seq, b.total, b.tally.changed)
    np.testing.assert_array_equal(a.tally.counts, b.tally.counts)
    assert (a.tally.beta is None) == (b.tally.beta is None)
    if a.tally.beta is not None:
        np.testing.assert_array_equal(a.tally.beta, b.tally.beta)
    return True


@pytest.mark.parametrize("method", usable_methods())
def test_replay_gives_every_method_the_same_state(sqlite, text, samples, method, quick, monkeypatch):
    monkeypatch.setattr(module, "CHECKPOINT_RECORDS", 3)
    store = open_store(sqlite, "never")
    stream = make(store, text, method=method, **quick(method))
    for n in (1, 7, 2, 16, 5):
        (answer,) = stream.process([item(samples(n))])
        replayed = again(stream)
        assert same(replayed.moment, stream.moment)
        assert replayed.saved(replayed.moment).state == stream.saved(stream.moment).state  # as a file, too
        first, rows = replayed.predictions(answer.first, n)
        assert first == answer.first
        assert rows.tobytes() == answer.rows.tobytes()
        if stream.due:
            stream.checkpoint()
            assert same(again(stream).moment, stream.moment)
    assert stream.moment.seq == 5
    store.close()


def test_a_stream_is_the_method_run_along_it(store, text, samples):
    stream, tda = make(store, text, method="tda"), as_online(moontide.method("tda"))
    state = tda.start(Task(text, text))
    for _ in range(3):
        x, y = samples(4), samples(3)
        first, second = stream.process([item(x), item(y)])  # one micro-batch
        state, result = tda.step(state, np.concatenate([x, y]))
        np.testing.assert_array_equal(np.concatenate([first.rows["label"], second.rows["label"]]), result.labels)
        np.testing.assert_array_equal(first.rows["zero_shot_label"], result.zero_shot_labels[:4])
    np.testing.assert_array_equal(stream.moment.state.positive_keys, state.positive_keys)
    assert stream.moment.tally.counts.sum() == 2 * 21


def test_a_stream_of_torch_arrays_comes_back_too(store, text, samples, monkeypatch):
    """What runs on a GPU, on torch's CPU."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(module, "to_device", lambda x, *_: torch.tensor(x))
    tda = moontide.method("tda")
    config = Config("tda", {}, tuple("abcde"), D, 100.0)
    stream = ServedStream.create("a", config, text, store, tda, "cuda", 100)
    plain = make(store, text, name="b", method="tda")
    for n in (3, 4):
        x = samples(n)
        (answer,), (expected,) = stream.process([item(x)]), plain.process([item(x)])
        np.testing.assert_array_equal(answer.rows["label"], expected.rows["label"])
    found = ServedStream("a", config, store, tda, "cuda", 100).load()
    assert isinstance(found.state.positive_keys, torch.Tensor)
    assert same(found, stream.moment)


def test_a_repeated_push_is_answered_as_before_and_not_counted(store, text, samples):
    stream = make(store, text)
    x, y = samples(3), samples(2)
    (first,) = stream.process([item(x, "one")])
    before = stream.moment
    (repeat,) = stream.process([item(x, "one")])
    assert repeat.repeated
    assert (repeat.first, repeat.rows.tobytes()) == (first.first, first.rows.tobytes())
    assert stream.moment is before
    # in one batch with others, twice, and after a restart
    stream = again(stream)
    answers = stream.process([item(x, "one"), item(y, "two"), item(y, "two"), item(y)])
    assert [answer.repeated for answer in answers] == [True, False, True, False]
    assert [answer.first for answer in answers] == [0, 3, 3, 5]
    assert answers[1].rows.tobytes() == answers[2].rows.tobytes()
    assert stream.moment.total == 7
    (other,) = stream.process([item(y, "one")])
    assert isinstance(other, InputError)
    assert "another push" in str(other)
    assert stream.moment.total == 7


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=12), st.integers(1, 4))
def test_whatever_is_repeated_every_push_counts_once(sqlite_never, pushes, batch):
    """Pushes by (key, size) in batches of any size, with a restart after each batch."""
    text = np.eye(5, D, dtype=np.float32)
    stream = make(sqlite_never, text, name=f"s{next(NAMES)}")
    stored, answers = {}, {}
    for start in range(0, len(pushes), batch):
        items = [item(np.full((n, D), key + 1, np.float32), str(key)) for key, n in pushes[start : start + batch]]
        for one, answer in zip(items, stream.process(items), strict=True):
            size = stored.setdefault(one.key, len(one.x))
            if size == len(one.x):
                assert answers.setdefault(one.key, answer.first) == answer.first
            else:
                assert isinstance(answer, InputError)
        stream = again(stream)
    assert stream.moment.total == stream.moment.state.seen == sum(stored.values())


NAMES = iter(range(10**6))


@pytest.fixture(scope="module")
def sqlite_never(tmp_path_factory):
    store = open_store(str(tmp_path_factory.mktemp("store")), "never")
    yield store
    store.close()


def test_the_journal_and_the_answers_stay_bounded(store, text, samples, monkeypatch):
    monkeypatch.setattr(module, "CHECKPOINT_RECORDS", 8)
    stream = make(store, text, window=20, keep=50)
    sizes = []
    for i in range(60):
        stream.process([item(samples(3), f"key{i}")])
        if stream.due:
            stream.checkpoint()
        sizes.append(
            [store._select(f"SELECT COUNT(*) FROM {table}")[0][0] for table in ("journal", "answers")]
            + [len(stream.keys)]
        )
    assert max(row[0] for row in sizes) <= 8 + 20 // 3 + 1
    assert max(row[1] for row in sizes) <= 8 + 50 // 3 + 1
    assert max(row[2] for row in sizes) <= 8 + 50 // 3 + 1
    first, rows = stream.predictions(0, 1000)
    assert first >= 180 - 50 - 24
    assert first + len(rows) == 180
    for found in (stream.keys, again(stream).keys):
        assert key_of("key0") not in found  # forgotten, as documented
        assert {key_of("key50"), key_of("key59")} <= set(found)


def test_the_window_is_the_last_samples_and_survives(store, text, samples):
    stream, pushed = make(store, text, window=10), []
    for n in (4, 1, 5, 3, 25, 2):
        x = samples(n)
        pushed.append(x)
        stream.process([item(x)])
        expected = np.concatenate(pushed)[-10:]
        np.testing.assert_array_equal(stream.window_of(stream.moment), expected)
        stream.checkpoint()
        np.testing.assert_array_equal(again(stream).window_of(again(stream).moment), expected)


def test_revising_predicts_the_window_now_and_changes_nothing(store, text, samples):
    stream, tda = make(store, text, method="tda", window=8), moontide.method("tda")
    for _ in range(4):
        stream.process([item(samples(5))])
    before = stream.moment
    first, rows, beta = stream.revise(stream.moment)
    assert (first, len(rows), beta) == (12, 8, None)
    result = tda.step(before.state, stream.window_of(before))[1]  # the definition
    np.testing.assert_array_equal(rows["label"], result.labels)
    assert stream.moment is before
    assert same(again(stream).moment, before)
    batch = make(store, text, name="b", window=8)
    batch.process([item(samples(3))])
    batch.process([item(samples(6))])
    x = batch.window_of(batch.moment)
    _, rows, beta = batch.revise(batch.moment)
    together = moontide.method("moon").fit_predict(x, text)  # a batch method: the window as one batch
    np.testing.assert_array_equal(rows["label"], together.labels)
    np.testing.assert_array_equal(beta, together.beta)
    with pytest.raises(InputError, match="window is empty"):
        make(store, text, name="c").revise(make(store, text, name="d").moment)


def test_snapshots_are_gone_back_to(store, text, samples):
    stream = make(store, text, method="tda")
    stream.process([item(samples(6))])
    number, seen, _ = stream.take_snapshot()
    kept = stream.moment
    assert (number, seen) == (1, 6)
    stream.process([item(samples(6), "later")])
    stream.restore(1)
    for now in (stream.moment, again(stream).moment):
        assert same(now._replace(seq=0, total=0), kept._replace(seq=0, total=0))
        assert (now.total, now.window) == (12, ())  # numbers go on, so no two samples share one
    (answer,) = stream.process([item(samples(1))])
    assert answer.first == 12
    stream.restore(0)
    assert (stream.moment.state.seen, stream.moment.tally.counts.sum()) == (0, 0)
    assert np.isinf(stream.moment.state.positive_entropy).all()
    assert [each.number for each in store.snapshots("a")] == [0, 1]
    stream.delete_snapshot(1)
    with pytest.raises(GoneError, match="no snapshot 1"):
        stream.restore(1)
    with pytest.raises(GoneError):
        stream.snapshot(-1)  # the checkpoint is no snapshot
    assert same(again(stream).moment, stream.moment)


def test_what_cannot_be_written_down_has_not_happened(store, text, samples, monkeypatch):
    stream = make(store, text, method="tda")
    x = samples(4)
    stream.process([item(x, "one")])
    before = stream.moment
    append = store.append

    def fail(*arguments):
        raise StoreError("disk full")

    monkeypatch.setattr(store, "append", fail)
    with pytest.raises(StoreError, match="disk full"):
        stream.process([item(samples(3), "two")])
    assert stream.moment is None  # it is read again
    monkeypatch.setattr(store, "append", append)
    assert same(stream.load(), before)
    (answer,) = stream.process([item(samples(3), "two")])
    assert (answer.first, answer.repeated) == (4, False)
    # the commit went through, but the word of it was lost
    monkeypatch.setattr(store, "append", lambda *arguments: [append(*arguments), fail()])
    with pytest.raises(StoreError):
        stream.process([item(x, "three")])
    monkeypatch.setattr(store, "append", append)
    (answer,) = stream.process([item(x, "three")])
    assert (answer.first, answer.repeated) == (7, True)
    assert stream.moment.total == 11


def test_what_a_step_would_refuse_is_refused_at_the_start(store, text):
    with pytest.raises(MissingInputError, match="views"):
        make(store, text, method="mta")
    with pytest.raises(OptionError, match="precision"):
        make(store, text, precision="tf32")
    assert store.streams() == {}


@pytest.fixture
def slow(store, text, monkeypatch):
    """A stream behind its queue, whose store waits to write, and fails once where it is told to."""
    stream, free, failing = make(store, text, method="tda"), threading.Event(), threading.Event()
    append = type(store).append

    def wait(self, *given):
        assert free.wait(10)
        if failing.is_set():
            failing.clear()
            raise StoreError("The disk is full.")
        return append(self, *given)

    monkeypatch.setattr(type(store), "append", wait)
    return stream, free, failing


async def until(condition):
    deadline = asyncio.get_running_loop().time() + 10
    while not condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_made_while_the_one_before_is_written_and_forgotten_where_that_fails(slow, samples, fails):
    stream, free, failing = slow
    x, y, z = samples(3), samples(2), samples(4)
    steps = []
    step = stream.step
    stream.step = lambda state, *given: [steps.append(state.seen), step(state, *given)][1]

    async def main():
        queue = PushQueue(stream, Metrics(), 100)
        pushed = [queue.push(item(x, "x"))]
        await until(lambda: len(steps) == 1)
        pushed.append(queue.push(item(y, "y")))
        await until(lambda: len(steps) == 2)  # the second step, while nothing is written
        pushed += [queue.push(item(x, "x")), queue.push(item(z))]  # the first again, whose answer is not there yet
        await asyncio.sleep(0.05)
        assert (steps, stream.moment.total) == ([0, 3], 0)
        if fails:
            failing.set()
        free.set()
        answers = await asyncio.gather(*pushed, return_exceptions=True)
        await queue.end(lambda: None)
        return queue, answers

    queue, answers = asyncio.run(main())
    assert queue.samples == 0
    if fails:
        assert isinstance(answers[0], StoreError)
        assert [(answer.first, answer.repeated) for answer in answers[1:]] == [(0, False), (2, False), (5, False)]
    else:
        assert [(answer.first, answer.repeated) for answer in answers] == [
            (0, False),
            (3, False),
            (0, True),
            (5, False),
        ]
    kept = [answer for answer in answers if not isinstance(answer, Exception) and not answer.repeated]
    assert stream.moment.total == sum(len(answer.rows) for answer in kept)
    assert same(again(stream).moment, stream.moment)


@pytest.fixture
def held(store, text, monkeypatch):
    """Streams that are behind a queue with the processes of a server, and steps that wait until they are let go."""
    free, steppers = threading.Event(), Steppers()
    step = module.ServedStream.step

    def wait(self, *given):
        assert free.wait(10)
        return step(self, *given)

    monkeypatch.setattr(module.ServedStream, "step", wait)
    monkeypatch.setattr(steppers, "cores", 3)
    steppers.count = 0  # no process is started

    def begin(method, name="a"):
        stream = make(store, text, name, method)
        stream.steppers = steppers
        return stream

    yield begin, free
    steppers.close()


async def push_in_turn(queue, pushes):
    """Push, each as soon as the one before is under way."""
    done = []
    for i, each in enumerate(pushes):
        done.append(queue.push(each))
        await until(lambda i=i: len(queue._under_way) == min(i + 1, 3))
    return done


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", ["moon", "tide"])
def test_steps_are_taken_at_the_same_time_and_written_in_order(held, samples, method, fails, monkeypatch):
    begin, free = held
    stream = begin(method)
    pushes = [item(samples(64), "a"), item(samples(70)), item(samples(64), "b"), item(samples(3))]
    if fails:  # the second, whatever it is pushed with
        answers_of = module.answers_of

        def refuse(result, known=None):
            if len(result.labels) == 70:
                raise InputError("The method has no finite answer.")
            return answers_of(result, known)

        monkeypatch.setattr(module, "answers_of", refuse)

    async def main():
        queue = PushQueue(stream, Metrics(), 1000)
        done = await push_in_turn(queue, pushes[:3])
        done.append(queue.push(pushes[3]))
        await asyncio.sleep(0.05)
        assert len(queue._under_way) == 3  # which is the most
        free.set()
        answers = await asyncio.gather(*done, return_exceptions=True)
        await queue.end(lambda: None)
        assert (queue.samples, queue.queued, stream.steppers.streams, stream.steppers.under_way) == (0, 0, 0, 0)
        return answers

    answers = asyncio.run(main())
    if fails:
        assert isinstance(answers[1], InputError)
        assert [answer.first for answer in (answers[0], *answers[2:])] == [0, 64, 128]
    else:
        assert [answer.first for answer in answers] == [0, 64, 134, 198]
    alone = make(stream.store, stream.moment.state.text, "alone", method)
    for each in pushes if not fails else (pushes[0], *pushes[2:]):
        alone.process([each])
    assert same(alone.moment, stream.moment)
    assert same(again(stream).moment, stream.moment)


def test_a_stream_whose_state_depends_on_its_answers_takes_one_step_at_a_time(held, samples):
    begin, free = held
    stream = begin("tda")

    async def main():
        queue = PushQueue(stream, Metrics(), 1000)
        done = [queue.push(item(samples(64))) for _ in range(2)]
        await until(lambda: len(queue._under_way) == 1)
        await asyncio.sleep(0.05)
        assert len(queue._under_way) == 1
        free.set()
        await asyncio.gather(*done)
        await queue.end(lambda: None)

    asyncio.run(main())
    assert same(again(stream).moment, stream.moment)


def test_streams_share_the_cores(held, samples):
    begin, free = held
    one, two = begin("moon"), begin("moon", "b")

    async def main():
        queues = [PushQueue(stream, Metrics(), 1000) for stream in (one, two)]
        done = [queue.push(item(samples(64))) for queue in queues]
        await until(lambda: one.steppers.streams == 2)
        assert [queue.steps for queue in queues] == [1, 1]  # of 3 cores
        free.set()
        await asyncio.gather(*done)
        assert queues[0].steps == 3
        for queue in queues:
            await queue.end(lambda: None)

    asyncio.run(main())


def test_new_samples_are_placed_on_the_map_there_is_until_half_of_the_window_is_new(store, text, samples):
    stream = make(store, text, window=20)
    stream.process([item(samples(20))])
    first, before, _ = stream.flat_map(stream.moment)
    assert (first, before.shape) == (0, (20, 2))
    stream.process([item(samples(4))])
    first, after, rows = stream.flat_map(stream.moment)
    assert (first, len(after), len(rows)) == (4, 20, 20)
    np.testing.assert_allclose(after[:16], before[4:], atol=1e-4 * np.ptp(before))  # 16 samples are where they were
    made = stream.map
    stream.process([item(samples(8))])
    stream.flat_map(stream.moment)
    assert stream.map[0] == 32
    assert stream.map[2] is not made[2]
