"""Backups of a server at work, what is restored from them, and what a look for damage finds."""

import shutil
import sqlite3
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest

from moontide.cli import main
from moontide.serve import backup
from moontide.serve.databases import FILE, LOG, open_store
from moontide.serve.stream_store import DamagedError


def make(client, text):
    body = {"name": "a", "prototypes": text.tolist(), "method": "tda"}
    assert client.post("/streams", json=body).status_code == 201


def test_a_backup_of_a_server_at_work_is_whole_and_can_be_restored(serve, sqlite, text, samples, push, tmp_path, capfd):
    server, stop = serve(sqlite), threading.Event()
    with httpx.Client(base_url=server.url) as client:
        make(client, text)
        push(client, "a", samples(5), "first")

    def work():
        with httpx.Client(base_url=server.url) as own:
            while not stop.is_set():
                push(own, "a", samples(3))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert main(["serve", "--data", sqlite, "--backup", str(tmp_path / "copy")]) == 0
    finally:
        stop.set()
        thread.join()
    assert main(["serve", "--verify", str(tmp_path / "copy")]) == 0
    assert "no damage in 1 stream" in capfd.readouterr().err
    restored = str(tmp_path / "restored")
    assert main(["serve", "--data", restored, "--restore", str(tmp_path / "copy")]) == 0
    again = serve(restored)
    with httpx.Client(base_url=again.url) as client:
        total = client.get("/streams/a").json()["total"]
        assert total >= 5
        assert push(client, "a", samples(1)).json()["first"] == total
    for option, place in (("--backup", sqlite), ("--restore", sqlite)):
        arguments = ["serve", "--data", restored, option, place]
        assert main(arguments) == 2
        assert "must be a new or empty folder" in capfd.readouterr().err
    assert main(["serve", "--verify", sqlite]) == 2
    assert "in use by a server" in capfd.readouterr().err


@pytest.fixture(scope="module")
def left(tmp_path_factory, server_of, push):
    """Data as a killed server leaves them."""
    data, rng = str(tmp_path_factory.mktemp("killed") / "data"), np.random.default_rng(0)
    server = server_of(data)
    with httpx.Client(base_url=server.url) as client:
        make(client, rng.normal(size=(5, 8)))
        for _ in range(8):
            push(client, "a", rng.normal(size=(3, 8)))
    server.kill()
    return data


@pytest.fixture
def killed(left, sqlite):
    """A copy of them."""
    shutil.copytree(left, sqlite)
    return sqlite


def test_a_look_for_damage_changes_nothing_and_finds_nothing_where_there_is_none(killed, capfd):
    data = killed
    before = {path.name: path.read_bytes() for path in Path(data).iterdir() if path.name in backup.FILES}
    assert main(["serve", "--verify", data]) == 0
    assert "no damage in 1 stream" in capfd.readouterr().err
    assert {name: Path(data, name).read_bytes() for name in before} == before


def test_a_damaged_log_is_named_refused_and_what_is_left_can_be_taken(killed, serve, tmp_path, capfd):
    data = killed
    log = Path(data, LOG)
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    for _ in range(2):  # the first look takes nothing away from the second
        assert main(["serve", "--verify", data]) == 1
        assert "the log of the database is damaged" in capfd.readouterr().out
    for _ in range(2):
        assert main(["serve", "--data", data, "--port", "0"]) == 2
        error = capfd.readouterr().err
        assert "lack the last" in error
        assert "docs/serve.md" in error
    left = str(tmp_path / "left")
    assert main(["serve", "--data", left, "--restore", data]) == 0
    server = serve(left)
    with httpx.Client(base_url=server.url) as client:
        assert 0 < client.get("/streams/a").json()["total"] < 24


@pytest.mark.parametrize("harm", ["delete", "garbage"])
def test_a_mark_that_is_missing_is_named_in_its_own_folder_and_the_rest_is_looked_at(killed, tmp_path, capfd, harm):
    mark = Path(killed, "mark")
    mark.unlink() if harm == "delete" else mark.write_bytes(bytes(100))
    with sqlite3.connect(Path(killed, FILE)) as connection:
        connection.execute("UPDATE states SET total = 3")
    connection.close()
    assert main(["serve", "--verify", killed]) == 1
    printed = capfd.readouterr()
    assert f"The data in {killed} lack their mark" in printed.out
    assert "The stream 'a': The stored a" in printed.out
    assert "2 damages in 1 stream" in printed.err
    assert "/moontide" not in (printed.out + printed.err).replace(killed, "")


@pytest.mark.parametrize("harm", ["cut", "garbage", "delete"])
def test_a_database_that_sqlite_cannot_read_is_damage_and_named_in_its_own_folder(killed, tmp_path, capfd, harm):
    open_store(killed).close()
    path = Path(killed, FILE)
    content = path.read_bytes()
    if harm == "delete":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if harm == "cut" else b"garbage" * 1000)
    assert main(["serve", "--verify", killed]) == 1
    printed = capfd.readouterr()
    assert printed.out.startswith(f"The data in {killed} ")
    assert "see 'Backups and damage' in docs/serve.md" in printed.out
    for arguments in (["--data", str(tmp_path / "new"), "--restore", killed], ["--data", killed, "--port", "0"]):
        assert main(["serve", *arguments]) == 2
        error = capfd.readouterr().err
        assert killed in error
        assert "/moontide" not in error.replace(killed, "")
    assert not (tmp_path / "new").exists()


def place_of_count(path, name):
    """Return where the number of rows in the first page of a table or index is."""
    with sqlite3.connect(path) as connection:
        size = connection.execute("PRAGMA page_size").fetchone()[0]
        page = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0]
    connection.close()
    return (page - 1) * size + 4


@pytest.mark.parametrize("table", ["tokens", "sqlite_autoindex_states_1"])
def test_rows_that_a_flipped_bit_hides_are_missed_and_the_rest_can_be_restored(killed, serve, tmp_path, capfd, table):
    """One bit of the number of rows in a page: the only token, or a state, would be as if it had never been."""
    assert main(["serve", "--data", killed, "--new-token", "camera"]) == 0
    token = capfd.readouterr().out.split()[-1]
    open_store(killed).close()
    path = Path(killed, FILE)
    content = bytearray(path.read_bytes())
    content[place_of_count(path, table)] ^= 1
    path.write_bytes(content)
    assert main(["serve", "--verify", killed]) == 1
    with pytest.raises(DamagedError, match=r"are damaged.* see 'Backups and damage' in docs/serve\.md"):
        open_store(killed)
    left = str(tmp_path / "left")
    assert main(["serve", "--data", left, "--restore", killed]) == 0
    assert main(["serve", "--verify", left]) == (table == "tokens")  # one that opens nothing is left
    server = serve(left)
    assert httpx.get(f"{server.url}/streams").status_code == 401  # closed, whatever was lost
    if table != "tokens":
        answer = httpx.get(f"{server.url}/streams/a", headers={"Authorization": f"Bearer {token}"})
        assert answer.json()["total"] == 24


@pytest.mark.parametrize("lost", ["streams", "answers", "journal"])
def test_rows_that_are_gone_are_missed_wherever_they_were(killed, serve, capfd, lost):
    open_store(killed).close()
    with sqlite3.connect(Path(killed, FILE)) as connection:
        first = "" if lost == "streams" else " AND first = 0"
        assert connection.execute(f"DELETE FROM {lost} WHERE stream = 'a'{first}").rowcount == 1
    connection.close()
    assert main(["serve", "--verify", killed]) == 1
    assert "The stream 'a': The " in capfd.readouterr().out
    server = serve(killed)
    assert httpx.get(f"{server.url}/streams/a").status_code == 503
    assert "a" in httpx.get(f"{server.url}/readyz").json()["failed"]


def test_a_damaged_token_is_named_and_does_not_open_the_server_to_all(killed, serve, capfd):
    assert main(["serve", "--data", killed, "--new-token", "camera"]) == 0
    with sqlite3.connect(Path(killed, FILE)) as connection:
        connection.execute("UPDATE tokens SET token = 'x'")
    connection.close()
    capfd.readouterr()
    assert main(["serve", "--verify", killed]) == 1
    assert "The token 'camera' does not match its checksum" in capfd.readouterr().out
    server = serve(killed)
    assert httpx.get(f"{server.url}/streams").status_code == 401
    assert httpx.get(f"{server.url}/streams", headers={"Authorization": "Bearer x"}).status_code == 401


def test_a_folder_of_a_billion_transactions_can_be_restored(killed, tmp_path):
    open_store(killed).close()
    with sqlite3.connect(Path(killed, FILE)) as connection:
        connection.execute(f"PRAGMA user_version = {2**30 + 7}")
    connection.close()
    assert main(["serve", "--data", str(tmp_path / "new"), "--restore", killed]) == 0


@pytest.mark.parametrize("change", ["answers SET size = 2", "journal SET first = 1", "states SET total = 3"])
def test_edits_are_named(killed, capfd, change):
    data = killed
    open_store(data).close()  # brings the pushes into the tables
    with sqlite3.connect(Path(data, FILE)) as connection:
        connection.execute(f"UPDATE {change}")
    connection.close()
    assert main(["serve", "--verify", data]) == 1
    printed = capfd.readouterr()
    assert "The stream 'a': The stored a" in printed.out
    assert "1 damage in 1 stream" in printed.err


def test_postgresql_is_looked_at_too_and_copied_by_its_own_tools(postgres, text, capfd):
    data = postgres()
    store = open_store(data)
    store.create("a", "{}", b"state", b"tally")
    store.close()
    assert main(["serve", "--verify", data]) == 0
    with_own = (["--data", data, "--backup", "copy"], ["--data", data, "--restore", "copy"])
    for arguments in with_own:
        assert main(["serve", *arguments]) == 2
        assert "PostgreSQL" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--verify", "--restore"])
def test_a_folder_without_data_is_named(tmp_path, capfd, option):
    assert main(["serve", "--data", str(tmp_path / "new"), option, str(tmp_path)]) == 2
    assert "There is no data in" in capfd.readouterr().err
