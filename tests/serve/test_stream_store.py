"""The store by itself, SQLite and PostgreSQL alike: what is written is there, what is torn is not, bad data show."""

import contextlib
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from moontide.errors import FileError, MoontideError, OptionError
from moontide.serve import backup, databases, push_log, stream_store
from moontide.serve.auth import Token
from moontide.serve.databases import LOG, open_store
from moontide.serve.stream_store import CHECKPOINT, EVERY, NO_TOKEN, Answered, DamagedError, Record, Saved, StoreError

SAVED = Saved(0, 0, 0, 0, b"state", b"tally")


def fill(store, n=5, stream="a"):
    store.create(stream, '{"k": 1}', b"state", b"tally")
    for i in range(n):
        row = Answered(2 * i, 2, f"answer{i}".encode())
        store.append(stream, Record(i + 1, 2 * i, 2, f"x{i}".encode()), [row])


def edit(store, sql, *values):
    with store._transaction(pushes=EVERY):
        store._run(sql, values)


def test_a_stream_comes_back_as_it_was_written(store, data):
    fill(store)
    store.close()
    store = open_store(data)
    assert store.streams() == {"a": '{"k": 1}'}
    saved, inside, after, answered = store.load("a")
    assert (saved, inside) == (SAVED, [])
    assert after == [Record(i + 1, 2 * i, 2, f"x{i}".encode()) for i in range(5)]
    assert answered == store.answers("a", 0, 10)
    assert [(row.first, row.data) for row in store.answers("a", 3, 7)] == [
        (2, b"answer1"), (4, b"answer2"), (6, b"answer3")
    ]  # fmt: skip
    store.close()


def test_a_checkpoint_drops_what_is_no_longer_needed(store):
    fill(store)
    store.checkpoint("a", Saved(4, 8, 8, 4, b"later", b"tally"), x_from=5, answers_from=3)
    saved, inside, after, answered = store.load("a", keep=5)
    assert (saved.state, saved.seq) == (b"later", 4)
    assert [record.seq for record in inside] == [3, 4]  # sample 5 is in record 3
    assert [record.seq for record in after] == [5]
    assert [row.first for row in answered] == [2, 4, 6, 8]
    with pytest.raises(DamagedError, match="The answers of a lack a part"):
        store.load("a", keep=7)


def test_a_correction_changes_answers_in_its_own_transaction(store):
    fill(store)
    changed = Answered(2, 2, b"changed")
    store.append("a", Record(6, 10, 0, b"labels"), [changed])
    *_, after, answered = store.load("a")
    assert after[-1] == Record(6, 10, 0, b"labels")
    assert answered[1] == changed
    assert len(answered) == 5


def test_snapshots_and_deletion(store):
    fill(store)
    fill(store, 1, "b")
    store.put_state("a", 1, Saved(5, 10, 10, 0, b"kept", b"tally"))
    assert [(each.number, each.seen) for each in store.snapshots("a")] == [(0, 0), (1, 10)]
    assert store.state("a", 1).state == b"kept"
    assert store.state("a", 2) is None
    store.delete_state("a", 1)
    assert store.state("a", 1) is None
    store.delete("a")
    assert list(store.streams()) == ["b"]
    assert store.answers("a", 0, 100) == []
    fill(store)  # the name is free again


def test_a_transaction_that_fails_leaves_nothing(store, monkeypatch):
    fill(store)
    before, run = store.answers("a", 0, 10), store._run

    def fail(sql, values=()):
        if sql.startswith("INSERT INTO answers"):  # after the record of a correction went in, and an answer out
            raise store.failures[0]("no")
        return run(sql, values)

    monkeypatch.setattr(store, "_run", fail)
    with pytest.raises(StoreError):
        store.append("a", Record(6, 10, 0, b"x"), [Answered(8, 2, b"answer")])
    monkeypatch.undo()
    assert len(store.load("a")[2]) == 5
    assert store.answers("a", 0, 10) == before
    store.append("a", Record(6, 10, 2, b"x"), [Answered(10, 2, b"answer")])


@pytest.mark.parametrize(
    "change",
    [
        "journal SET data = ? || SUBSTR(data, 2) WHERE seq = 2", "journal SET first = first + 1 WHERE seq = 2",
        "journal SET size = 3 WHERE seq = 2", "states SET state = ? || SUBSTR(state, 2) WHERE number = -1",
        "states SET tally = ? || SUBSTR(tally, 2) WHERE number = -1", "states SET seq = seq + 1 WHERE number = -1",
        "states SET total = total + 1 WHERE number = -1", "states SET seen = seen + 1 WHERE number = -1",
        "states SET kept = kept + 1 WHERE number = -1", "answers SET data = ? || SUBSTR(data, 2) WHERE first = 4",
        "answers SET size = 1 WHERE first = 4", "answers SET first = 100 WHERE first = 4",
    ],
)  # fmt: skip
def test_whatever_is_edited_is_seen(store, change):
    fill(store)
    edit(store, f"UPDATE {change}", *[b"?"] * change.count("?"))
    with pytest.raises(DamagedError, match="restore a backup"):
        store.load("a")


def test_an_edited_configuration_fails_alone(store):
    fill(store)
    fill(store, 1, "b")
    edit(store, "UPDATE streams SET config = ? || SUBSTR(config, 2) WHERE stream = 'a'", b"?")
    found = store.streams()
    assert "configuration does not match" in str(found["a"])
    assert found["b"] == '{"k": 1}'


def test_an_edited_token_opens_nothing(store):
    store.put_token("camera", b"digest")
    edit(store, "UPDATE tokens SET token = ? || SUBSTR(token, 2)", b"?")
    assert store.tokens() == {"camera": NO_TOKEN}
    assert Token.read(NO_TOKEN).digest == ""


@pytest.mark.parametrize("change", ["seen = seen + 1", "created = 7", "number = 2"])
def test_an_edited_snapshot_is_not_listed(store, change):
    fill(store)
    store.put_state("a", 1, Saved(5, 10, 10, 0, b"kept", b"tally"))
    edit(store, f"UPDATE states SET {change} WHERE number = 1")
    with pytest.raises(DamagedError, match="restore a backup"):
        store.snapshots("a")


@pytest.mark.parametrize("table", ["journal SET data", "states SET state", "states SET tally", "answers SET data"])
def test_a_value_of_another_type_is_damage(sqlite, table):
    store = open_store(sqlite, "never")
    fill(store)
    edit(store, f"UPDATE {table} = ?", 2**62)  # so many bytes are not there
    with pytest.raises(DamagedError, match="does not match its checksum"):
        store.load("a")
    store.close()


def test_answers_that_are_gone_while_a_server_runs_are_missed(store):
    fill(store)
    edit(store, "DELETE FROM answers WHERE first = 4")
    with pytest.raises(DamagedError, match="answers of a lack a part"):
        store.answers("a", 0, 10)


def everything(store):
    """Return all that a server would serve."""
    found = {"tokens": store.tokens()}
    for name, config in store.streams().items():
        found[name] = config, store.load(name), store.snapshots(name), [store.state(name, k) for k in range(4)]
    return found


def test_a_bit_that_flips_in_the_structure_of_the_database_is_found(sqlite, tmp_path):
    """Headers, cell pointers and the schema have no checksum of ours; a lost token would open the server to all."""
    store = open_store(sqlite, "never")
    for name in "ab":
        fill(store, 3, name)
        store.put_state(name, 1, Saved(3, 6, 6, 0, b"kept", b"tally"))
        store.put_token(name, Token("digest" * 8, "read").write())
    expected = everything(store)
    store.close()
    whole, rng = Path(sqlite, "moontide.sqlite3").read_bytes(), random.Random(0)
    size = databases.PAGE_BYTES
    places = [at + rng.randrange(16) for at in range(size, len(whole), size) for _ in range(6)]
    places += [place for place in range(size, len(whole), 11) if b"CREATE" in whole[place - 400 : place + 400]]
    seen = set()
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << rng.randrange(8)
        folder = folder_of({"moontide.sqlite3": bytes(flipped), "mark": Path(sqlite, "mark").read_bytes()},
                           tmp_path / f"{len(seen)}")  # fmt: skip
        damage, _ = backup.verify(folder)
        found = None
        with contextlib.suppress(DamagedError), contextlib.closing(open_store(folder, "never")) as opened:
            found = everything(opened)
        assert found == expected or (found is None and damage), place
        seen.add("damaged" if found is None else "same")
        shutil.rmtree(folder)
    assert seen == {"same", "damaged"}


def test_a_large_state_is_written_in_pieces_between_which_others_can_write(store, monkeypatch):
    monkeypatch.setattr(stream_store, "PIECE_BYTES", 10)
    state, commits, run = bytes(range(95)), [], store._run
    monkeypatch.setattr(store, "_run", lambda sql, *values: [commits.append(sql), run(sql, *values)][1])
    store.create("a", "{}", state, b"tally")
    monkeypatch.setattr(store, "_run", run)
    marks = {"COMMIT": "|", "INSERT INTO pieces": "p", "INSERT INTO states": "s"}
    steps = "".join(marks.get(sql.partition(" VALUES")[0], "") for sql in commits)
    assert steps == "p|" * 10 + "ss||"  # the last one looks for pieces without a row
    assert [store.state("a", number).state for number in (0, CHECKPOINT)] == [state, state]
    count = "SELECT stream, created FROM pieces"
    assert len(store._select(count)) == 10  # both rows have the same
    store.checkpoint("a", Saved(0, 0, 0, 0, state[::-1], b"tally"), x_from=0, answers_from=0)
    assert (store.load("a")[0].state, len(store._select(count))) == (state[::-1], 20)
    store.checkpoint("a", Saved(0, 0, 0, 0, b"small", b"tally"), x_from=0, answers_from=0)
    assert (store.state("a", 0).state, len(store._select(count))) == (state, 10)
    edit(store, "DELETE FROM pieces WHERE part = 3")
    with pytest.raises(DamagedError, match="state 0 does not match"):
        store.state("a", 0)
    store.delete("a")
    assert store._select(count) == []


def test_the_pieces_of_a_state_that_was_not_finished_are_dropped(store, data, monkeypatch):
    fill(store)
    monkeypatch.setattr(stream_store, "PIECE_BYTES", 10)

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # killed between the pieces and the row
        patch.setattr(store, "_put_state", fail)
        patch.setattr(store, "_sweep", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            store.put_state("a", 1, Saved(5, 10, 10, 0, bytes(95), b"tally"))
    assert len(store._select("SELECT part FROM pieces")) == 10
    store.close()
    again = open_store(data)
    assert again._select("SELECT part FROM pieces") == []
    assert len(again.load("a")[2]) == 5
    again.close()


@pytest.mark.parametrize("seq", [1, 3, 5])
def test_a_missing_or_swapped_record_is_seen(store, seq):
    fill(store)
    store.checkpoint("a", Saved(2, 4, 4, 4, b"later", b"tally"), x_from=0, answers_from=0)
    edit(store, "DELETE FROM journal WHERE seq = ?", seq)
    with pytest.raises(DamagedError, match="lack"):
        store.load("a")
    edit(store, "UPDATE journal SET seq = ? WHERE seq = 4", seq)
    with pytest.raises(DamagedError, match=rf"record {seq} does not match"):
        store.load("a")


@pytest.mark.parametrize("first", [4, 8])
def test_missing_answers_are_seen(store, first):
    fill(store)
    edit(store, "DELETE FROM answers WHERE first = ?", first)
    with pytest.raises(DamagedError, match="answers of a lack a part"):
        store.load("a")


WAL = "moontide.sqlite3-wal"


def folder_of(whole, place, **changed):
    """Write the files of a store that was killed, some of them changed."""
    place.mkdir()
    for name, content in whole.items():
        (place / name).write_bytes(changed.get(name, content))
    return str(place)


@pytest.fixture(params=[LOG, WAL])
def killed(sqlite, request):
    """Return the files of a store as a killed process leaves them, after each of five pushes, or of corrections."""
    store, name = open_store(sqlite, "never"), request.param
    marks, records = [], []
    store.create("a", '{"k": 1}', b"state", b"tally")
    for i in range(5):
        if name == WAL and i == 0:
            store.append("a", Record(1, 0, 2, b"x0"), [Answered(0, 2, b"answer")])
            records.append(Record(1, 0, 2, b"x0"))
        elif name == WAL:
            records.append(Record(i + 1, 2, 0, f"x{i}".encode()))
            store.append("a", records[-1], [Answered(0, 2, f"answer{i}".encode())])
        else:
            records.append(Record(i + 1, 2 * i, 2, f"x{i}".encode()))
            store.append("a", records[-1], [Answered(2 * i, 2, f"answer{i}".encode())])
        end = Path(sqlite, WAL).stat().st_size if name == WAL else store._log.size
        marks.append((end, Path(sqlite, "mark").read_bytes()))
    whole = {path.name: path.read_bytes() for path in Path(sqlite).iterdir()}
    whole = {name: content for name, content in whole.items() if not name.endswith("shm") and name != "lock"}
    store.close()
    return name, whole, marks, records


def test_a_torn_tail_is_dropped(killed, tmp_path):
    """What a crash in the middle of a write leaves: the log ends anywhere in a transaction that was not answered."""
    name, whole, marks, records = killed
    for done in range(2 if name == WAL else 1, 5):
        (start, mark), (stop, _) = marks[done - 1 : done + 1]
        for cut in range(start, stop, 700 if name == WAL else 7):
            changed = {name: whole[name][:cut], "mark": mark}
            store = open_store(folder_of(whole, tmp_path / f"{done}-{cut}", **changed), "never")
            assert store.load("a")[2] == records[:done]
            store.close()


def test_a_damaged_log_is_found_at_the_start(killed, tmp_path):
    """A bit that flips, or a cut, before the last transaction: what is before it would be served."""
    name, whole, marks, _ = killed
    first = 40 if name == WAL else 0
    for place in range(first, marks[-1][0] - first, 1501 if name == WAL else 23):
        flipped = bytearray(whole[name][: marks[-1][0]])
        flipped[place] ^= 4
        for kind, changed in (("flip", bytes(flipped)), ("cut", whole[name][:place])):
            folder = folder_of(whole, tmp_path / f"{kind}{place}", **{name: changed})
            with pytest.raises(DamagedError, match=r"lack (the last \d transactions|their mark)|not match") as caught:
                open_store(folder, "never").load("a")
            assert "docs/serve.md" in str(caught.value)
    open_store(folder_of(whole, tmp_path / "whole"), "never").close()


def test_after_a_power_cut_only_what_was_synced_must_be_there(killed, tmp_path, monkeypatch):
    name, whole, marks, _ = killed
    monkeypatch.setattr(databases, "boot_id", lambda: b"another start...")
    store = open_store(folder_of(whole, tmp_path / "cut", **{name: whole[name][: marks[2][0]]}), "never")
    assert len(store.load("a")[2]) == 3
    store.close()
    synced = open_store(str(tmp_path / "synced"), "interval")
    fill(synced)
    synced.sync()
    synced.close()
    count = synced._count + synced._pushed
    mark = databases.Mark(tmp_path / "synced" / "mark")
    assert mark.read().synced == count
    mark.write(count + 1, count + 1)  # as if one more had been synced
    mark.close()
    monkeypatch.setattr(databases, "boot_id", lambda: b"a third start...")
    with pytest.raises(DamagedError, match="the last 1 transactions"):
        open_store(str(tmp_path / "synced"))


def test_pushes_of_a_killed_server_are_read_once(sqlite, tmp_path):
    """They go into the tables at the start; what the log still holds is not taken for new."""
    store = open_store(sqlite, "never")
    fill(store)
    copied = tmp_path / "copied"
    shutil.copytree(sqlite, copied)
    store.close()
    for _ in range(2):
        again = open_store(str(copied), "never")
        assert [record.seq for record in again.load("a")[2]] == [1, 2, 3, 4, 5]
        kept = (copied / LOG).read_bytes()
        again.close()
        (copied / LOG).write_bytes(kept)
    again = open_store(str(copied), "never")
    again.append("a", Record(6, 10, 2, b"x"), [Answered(10, 2, b"answer")])  # over the old ones
    killed = tmp_path / "killed"
    shutil.copytree(copied, killed)
    again.close()
    last = open_store(str(killed), "never")
    assert [record.seq for record in last.load("a")[2]] == [1, 2, 3, 4, 5, 6]
    last.close()


def test_a_checkpoint_leaves_the_pushes_of_other_streams_in_the_log(sqlite, tmp_path):
    """A killed server finds each push once: in the tables or in the log, also where a name was used before."""

    def reopened(name):
        shutil.copytree(sqlite, tmp_path / name)
        return open_store(str(tmp_path / name), "never")

    def push(stream, seq):
        record = Record(seq, 2 * seq - 2, 2, f"{stream}{seq}".encode())
        store.append(stream, record, [Answered(record.first, 2, b"answer")])

    def rows_of(there, stream):
        saved, inside, after, answered = there.load(stream)
        assert [row.first for row in answered] == list(range(0, saved.total + 2 * len(after), 2))
        return [record.data for record in inside], [record.data for record in after]

    store = open_store(sqlite, "never")
    for stream in "ab":
        store.create(stream, "{}", b"state", b"tally")
    for seq in (1, 2, 3):
        push("a", seq)
        push("b", seq)
    before = Path(sqlite, LOG).read_bytes()
    store.checkpoint("a", Saved(3, 6, 6, 2, b"state", b"tally"), x_from=4, answers_from=0)
    push("a", 4)
    tables = sqlite3.connect(Path(sqlite, "moontide.sqlite3"))
    assert tables.execute("SELECT stream, seq FROM journal").fetchall() == [("a", 3)]
    assert Path(sqlite, LOG).read_bytes().startswith(before)  # nothing was begun again
    for name in ("killed", "killed again"):
        there = reopened(name)
        assert rows_of(there, "a") == ([b"a3"], [b"a4"])
        assert rows_of(there, "b") == ([], [b"b1", b"b2", b"b3"])
        there.close()
    assert rows_of(store, "b") == ([], [b"b1", b"b2", b"b3"])  # with what is still in the log
    push("a", 5)
    store.delete("a")
    store.create("a", "{}", b"state", b"tally")
    there = reopened("deleted")
    assert rows_of(there, "a") == ([], [])
    there.close()
    push("b", 4)
    assert Path(sqlite, LOG).read_bytes()[: len(before)] != before  # all was in the tables: over the old ones
    there = reopened("over the old ones")
    assert rows_of(there, "b") == ([], [b"b1", b"b2", b"b3", b"b4"])
    there.close()
    tables.close()
    store.close()


def test_a_push_that_cannot_be_written_or_synced_is_not_there(sqlite, monkeypatch, tmp_path):
    store = open_store(sqlite, "always")
    fill(store)

    def fail(*_):
        raise OSError(28, "No space left on device")

    for name in ("flush", "pwritev"):
        monkeypatch.setattr(*((push_log, "flush") if name == "flush" else (push_log.os, "pwritev")), fail)
        with pytest.raises(StoreError, match="No space left"):
            store.append("a", Record(6, 10, 2, b"x"), [Answered(10, 2, b"answer")])
        monkeypatch.undo()
        copied = tmp_path / name  # as if it was killed now
        shutil.copytree(sqlite, copied)
        again = open_store(str(copied), "never")
        assert len(again.load("a")[2]) == 5
        again.close()
    store.append("a", Record(6, 10, 2, b"x"), [Answered(10, 2, b"answer")])
    assert len(store.load("a")[2]) == 6
    store.close()


def test_a_log_of_pushes_that_is_long_goes_into_the_tables(sqlite, monkeypatch):
    monkeypatch.setattr(databases, "LOG_BYTES", 1000)
    store = open_store(sqlite, "never")
    store.create("a", "{}", b"state", b"tally")
    for i in range(20):
        store.append("a", Record(i + 1, i, 1, bytes(300)), [Answered(i, 1, bytes(20))])
        assert store._log.size <= 1000
    assert len(store.load("a")[2]) == 20
    store.close()


def test_a_mark_that_is_gone_or_torn(sqlite):
    store = open_store(sqlite, "never")
    fill(store)
    store.close()
    mark = Path(sqlite, "mark")
    content = mark.read_bytes()
    torn = bytearray(content)
    torn[store_slot(content)] ^= 1  # the later of the two: the one before it is still good
    mark.write_bytes(torn)
    open_store(sqlite).close()
    mark.unlink()
    with pytest.raises(DamagedError, match="lack their mark"):
        open_store(sqlite)


def store_slot(content):
    turns = [int.from_bytes(content[place : place + 8], "little") for place in (0, databases.Mark.slot)]
    return databases.Mark.slot * turns.index(max(turns))


def test_data_of_an_earlier_layout_are_refused(sqlite):
    Path(sqlite).mkdir()
    with sqlite3.connect(Path(sqlite, "moontide.sqlite3")) as connection:
        connection.execute("CREATE TABLE keys (stream TEXT)")
    connection.close()
    with pytest.raises(FileError, match="earlier version"):
        open_store(sqlite)


@pytest.mark.parametrize("gone", ["moontide.sqlite3", "moontide.sqlite3-wal", LOG, "mark", "lock", "all"])
def test_data_that_are_deleted_or_replaced_under_the_server_are_noticed(sqlite, gone, tmp_path):
    store = open_store(sqlite, "never")
    fill(store)
    if gone == "all":
        Path(sqlite).rename(tmp_path / "away")
    else:
        Path(sqlite, gone).rename(tmp_path / "away")
        Path(sqlite, gone).write_bytes((tmp_path / "away").read_bytes())
    for work in (lambda: store.load("a"), lambda: store.delete("a")):
        with pytest.raises(StoreError, match="deleted, moved or replaced"):
            work()
    (tmp_path / "away").rename(Path(sqlite) if gone == "all" else Path(sqlite, gone))
    assert len(store.load("a")[2]) == 5
    store.close()


def test_a_log_that_is_cut_off_under_the_server_takes_no_more_pushes(sqlite):
    store = open_store(sqlite, "never")
    fill(store)
    with Path(sqlite, LOG).open("r+b") as file:
        file.truncate(50)
    for work in (lambda: store.append("a", Record(6, 10, 2, b"x"), []), lambda: store.load("a")):
        with pytest.raises(StoreError, match="was cut off"):
            work()
    with contextlib.suppress(StoreError):
        store.close()


def test_one_push_of_one_sample_writes_little(sqlite):
    """Less than 12 KiB for a sample of 512 dimensions, with all that is kept of it, checkpoints included."""
    store, n = open_store(sqlite, "always"), 300
    store.create("a", "{}", b"state", b"tally")
    before = written()
    for i in range(n):
        store.append("a", Record(i + 1, i, 1, bytes(2048)), [Answered(i, 1, bytes(80))])
        if i % 100 == 99:
            store.checkpoint("a", Saved(i + 1, i + 1, i + 1, 1, b"state", b"tally"), x_from=i, answers_from=0)
    spent = written() - before
    store.close()
    if not spent:
        pytest.skip("this file system does not count what is written")
    assert spent / n < 12 * 1024


def written():
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def test_only_one_server_uses_the_data(store, data, monkeypatch):
    monkeypatch.setattr(databases, "LOCK_WAIT", 0.2)
    with pytest.raises(FileError, match="another server"):
        open_store(data)
    beside = open_store(data, lock=False)  # tokens are made so
    beside.put_token("camera", b"digest")
    beside.close()
    assert store.tokens() == {"camera": b"digest"}
    store.put_token("camera", None)
    assert store.tokens() == {}


@pytest.mark.parametrize(("fsync", "level"), [("always", 2), ("interval", 2), ("never", 0)])
def test_the_policy_reaches_sqlite(sqlite, fsync, level):
    store = open_store(sqlite, fsync)
    assert store._select("PRAGMA synchronous") == [(level,)]
    fill(store)
    store.sync()
    store.close()
    with sqlite3.connect(Path(sqlite, "moontide.sqlite3")) as connection:
        assert connection.execute("SELECT COUNT(*) FROM journal").fetchone() == (5,)
    connection.close()


@pytest.mark.parametrize(("fsync", "level"), [("always", "on"), ("interval", "off"), ("never", "off")])
def test_the_policy_reaches_postgresql(postgres, fsync, level):
    store = open_store(postgres(), fsync)
    assert store._select("SHOW synchronous_commit") == [(level,)]
    store.sync()
    store.close()


def test_a_lost_connection_is_made_anew(postgres):
    store = open_store(postgres())
    fill(store)
    other = open_store(store.data, lock=False)
    other._select("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    with pytest.raises(StoreError, match="cannot be used"):
        store.streams()
    assert list(store.streams()) == ["a"]
    other.close()
    store.close()


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("postgresql://moontide:secret@127.0.0.1:1/streams", "database streams on 127.0.0.1"),
        ("{folder}/file/below", "file/below"),
    ],
)
def test_data_that_cannot_be_opened_are_named(tmp_path, place, words):
    pytest.importorskip("psycopg")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be opened") as caught:
        open_store(place.format(folder=tmp_path))
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "place",
    [
        "postgresql://127.0.0.1:secret",
        "postgresql://moontide:secret%zz@127.0.0.1/streams",
        "postgresql://moontide:a/secret@127.0.0.1/streams",
        "postgresql://moontide:1/secret@127.0.0.1/streams",
        "postgresql://127.0.0.1/streams?secret=1",
        "Postgresql://moontide:secret@127.0.0.1/streams",
        "mysql://moontide:secret@127.0.0.1/streams",
        "postgresql:moontide:secret@127.0.0.1",
    ],
)
def test_a_place_that_cannot_be_read_is_not_repeated(tmp_path, monkeypatch, place):
    """The driver would quote the part of a URL that it stumbles over, such as a password."""
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="must be a folder, or a URL such as postgresql://host/database") as caught:
        open_store(place)
    assert "secret" not in str(caught.value)
    for check in (backup.verify, lambda data: backup.backup(data, tmp_path / "copy")):
        with pytest.raises(MoontideError) as caught:
            check(place)
        assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_files_are_for_their_owner_only(sqlite):
    store = open_store(sqlite)
    assert Path(sqlite).stat().st_mode & 0o777 == 0o700
    assert Path(sqlite, "moontide.sqlite3").stat().st_mode & 0o777 == 0o600
    store.close()
