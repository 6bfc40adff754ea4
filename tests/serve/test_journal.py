"""The store by itself, SQLite and PostgreSQL alike: what is written is there, what is torn is not, bad data show."""

import sqlite3
from pathlib import Path

import pytest

from moontide.errors import FileError
from moontide.serve import journal
from moontide.serve.journal import DamagedError, Push, Record, Saved, StoreError, open_store

SAVED = Saved(0, 0, 0, b"state", b"tally")


def fill(store, n=5, stream="a"):
    store.create(stream, '{"k": 1}', b"state", b"tally")
    for i in range(n):
        keys = [(f"key{i}", Push(2 * i, 2, i))]
        store.append(stream, Record(i + 1, 2 * i, 2, f"x{i}".encode()), f"answer{i}".encode(), keys)


def test_a_stream_comes_back_as_it_was_written(store, data):
    fill(store)
    store.close()
    store = open_store(data)
    assert store.streams() == {"a": '{"k": 1}'}
    saved, inside, after = store.load("a")
    assert (saved, inside) == (SAVED, [])
    assert after == [Record(i + 1, 2 * i, 2, f"x{i}".encode()) for i in range(5)]
    assert store.keyed("a", ["key1", "key4", "other"]) == {"key1": Push(2, 2, 1), "key4": Push(8, 2, 4)}
    assert store.answers("a", 3, 7) == [(2, b"answer1"), (4, b"answer2"), (6, b"answer3")]
    store.close()


def test_a_checkpoint_drops_what_is_no_longer_needed(store):
    fill(store)
    store.checkpoint("a", Saved(4, 8, 8, b"later", b"tally"), x_from=5, answers_from=3)
    saved, inside, after = store.load("a")
    assert (saved.state, saved.seq) == (b"later", 4)
    assert [record.seq for record in inside] == [3, 4]  # sample 5 is in record 3
    assert [record.seq for record in after] == [5]
    assert [first for first, _ in store.answers("a", 0, 100)] == [2, 4, 6, 8]
    assert set(store.keyed("a", [f"key{i}" for i in range(5)])) == {"key1", "key2", "key3", "key4"}


def test_snapshots_and_deletion(store):
    fill(store)
    fill(store, 1, "b")
    store.put_state("a", 1, Saved(5, 10, 10, b"kept", b"tally"))
    assert [(each.number, each.seen) for each in store.snapshots("a")] == [(0, 0), (1, 10)]
    assert store.state("a", 1).state == b"kept"
    assert store.state("a", 2) is None
    store.delete_state("a", 1)
    assert store.state("a", 1) is None
    store.delete("a")
    assert list(store.streams()) == ["b"]
    assert store.answers("a", 0, 100) == []
    fill(store)  # the name is free again


def test_a_transaction_that_fails_leaves_nothing(store):
    fill(store)
    with pytest.raises(StoreError):  # the key is taken, after record and answer went in
        store.append("a", Record(6, 10, 2, b"x"), b"answer", [("new", Push(10, 1, 0)), ("key0", Push(11, 1, 0))])
    assert len(store.load("a")[2]) == 5
    assert store.answers("a", 10, 12) == []
    assert store.keyed("a", ["new"]) == {}
    store.append("a", Record(6, 10, 2, b"x"), b"answer", [])


@pytest.mark.parametrize(
    ("table", "column", "read"),
    [
        ("journal", "x", lambda store: store.load("a")),
        ("states", "state", lambda store: store.load("a")),
        ("states", "tally", lambda store: store.state("a", 0)),
        ("answers", "answer", lambda store: store.answers("a", 0, 100)),
    ],
)
def test_a_flipped_byte_is_seen(store, table, column, read):
    fill(store)
    value = store._select(f"SELECT {column} FROM {table}")[-1][0]
    store._select(f"UPDATE {table} SET {column} = ? WHERE 1 = 1 RETURNING 1", bytes([value[0] ^ 1]) + value[1:])
    with pytest.raises(DamagedError, match="checksum"):
        read(store)


def test_a_missing_or_swapped_record_is_seen(store):
    fill(store)
    store._select("DELETE FROM journal WHERE seq = 3 RETURNING 1")
    with pytest.raises(DamagedError, match="lacks a record"):
        store.load("a")
    store._select("UPDATE journal SET seq = 3 WHERE seq = 5 RETURNING 1")
    with pytest.raises(DamagedError, match="record 3 does not match"):
        store.load("a")


def test_a_torn_tail_is_dropped(sqlite):
    """What a crash in the middle of a write leaves: SQLite's log cut at any place loses the last records, whole."""
    store = open_store(sqlite, "never")
    fill(store)
    wal = Path(sqlite, "moontide.sqlite3-wal")
    whole = {path.name: path.read_bytes() for path in Path(sqlite).iterdir()}
    store.close()
    ends = set()
    for cut in range(0, len(whole[wal.name]), 6000):
        torn = Path(sqlite).parent / f"torn{cut}"
        torn.mkdir()
        (torn / "moontide.sqlite3").write_bytes(whole["moontide.sqlite3"])
        (torn / wal.name).write_bytes(whole[wal.name][: len(whole[wal.name]) - cut])
        store = open_store(str(torn), "never")
        if store.streams():
            records = store.load("a")[2]
            assert records == [Record(i + 1, 2 * i, 2, f"x{i}".encode()) for i in range(len(records))]
            assert len(store.answers("a", 0, 100)) == len(records)
            ends.add(len(records))
        store.close()
    assert ends == {0, 1, 2, 3, 4, 5}


def test_only_one_server_uses_the_data(store, data, monkeypatch):
    monkeypatch.setattr(journal, "LOCK_WAIT", 0.2)
    with pytest.raises(FileError, match="another server"):
        open_store(data)
    beside = open_store(data, lock=False)  # tokens are made so
    beside.put_token("camera", "digest")
    beside.close()
    assert store.tokens() == {"camera": "digest"}
    store.put_token("camera", None)
    assert store.tokens() == {}


@pytest.mark.parametrize(("fsync", "level"), [("always", 2), ("interval", 1), ("never", 0)])
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
        ("postgresql://127.0.0.1:nonsense", "PostgreSQL"),
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


def test_the_files_are_for_their_owner_only(sqlite):
    store = open_store(sqlite)
    assert Path(sqlite).stat().st_mode & 0o777 == 0o700
    assert Path(sqlite, "moontide.sqlite3").stat().st_mode & 0o777 == 0o600
    store.close()
