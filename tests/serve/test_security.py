"""Tokens, who is let in without them, what may come from a browser, and clients that take their time."""

import hmac
import socket
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from moontide.cli import main
from moontide.serve import auth, server
from moontide.serve.auth import Gate, Token, digest_of, new_token
from moontide.serve.databases import open_store
from moontide.serve.service import TICK

TOKEN, KEPT = new_token()
OTHER, OTHER_KEPT = new_token()
PROTECTED = [
    ("GET", "/server"), ("GET", "/streams"), ("POST", "/streams"), ("GET", "/streams/a"), ("DELETE", "/streams/a"),
    ("POST", "/streams/a/embeddings"), ("POST", "/streams/a/images"), ("GET", "/streams/a/predictions"),
    ("POST", "/streams/a/revise"), ("GET", "/streams/a/map"), ("GET", "/streams/a/events"), ("GET", "/streams/a/state"),
    ("GET", "/streams/a/snapshots"), ("POST", "/streams/a/snapshots"), ("DELETE", "/streams/a/snapshots/1"),
    ("POST", "/streams/a/restore"), ("POST", "/streams/a/reset"), ("GET", "/metrics"), ("GET", "/samples/simulated"),
    ("GET", "/samples/images/0"), ("GET", "/nowhere"), ("OPTIONS", "/streams"),
]  # fmt: skip


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, serving):
    with serving(str(tmp_path_factory.mktemp("data")), tokens={"camera": KEPT, "crawler": OTHER_KEPT}) as client:
        yield client


@pytest.mark.parametrize(("verb", "path"), PROTECTED)
def test_nothing_is_answered_without_a_token(guarded, verb, path):
    answer = guarded.request(verb, path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert "Authorization" in answer.json()["detail"]


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Bearer {KEPT.digest}", TOKEN],
    ids=["nothing", "no token", "other scheme", "longer", "shorter", "digest", "no scheme"],
)
def test_only_the_token_itself_opens(guarded, header):
    assert guarded.get("/streams", headers={"Authorization": header}).status_code == 401


def test_each_token_opens(guarded):
    assert guarded.get("/streams", headers=bearer(TOKEN)).status_code == 200
    assert guarded.get("/streams", headers=bearer(OTHER)).status_code == 200
    assert guarded.get("/streams", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200


@pytest.mark.parametrize("path", sorted(auth.PUBLIC))
def test_the_page_and_the_health_are_public(guarded, path):
    assert guarded.get(path).status_code == 200


def test_tokens_are_compared_in_constant_time(guarded, monkeypatch):
    """Every known digest is compared, whichever matches, by the function made for it."""
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: [compared.append(b), compare(a, b)][1])
    for token in (TOKEN, OTHER, "wrong"):
        compared.clear()
        guarded.get("/streams", headers=bearer(token))
        assert sorted(compared) == sorted([KEPT.digest, OTHER_KEPT.digest])


def test_no_other_site_is_let_in(guarded, shared_app):
    """CORS is closed: no answer allows another origin, and without tokens such requests are refused outright."""
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}):
        answer = guarded.get("/streams", headers={**headers, **bearer(TOKEN)})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        refused = shared_app.post("/streams", json={"sample": "simulated"}, headers=headers)
        assert (refused.status_code, "another origin" in refused.json()["detail"]) == (403, True)
    assert shared_app.get("/streams", headers={"Host": "evil.example"}).status_code == 403  # DNS rebinding
    for host in (
        "evil.example:8000", "", "[", "localhost.evil.example", "127.0.0.1@evil.example", "evil@localhost",
        "localhost#evil", "localhost/evil", "localhost?evil", "localhost:80:80", "local\thost",
    ):  # fmt: skip
        assert shared_app.get("/streams", headers={"Host": host}).status_code == 403, host
    for name, good, bad in (
        (b"host", b"localhost", b"evil.example"),
        (b"origin", b"http://localhost", b"https://evil.example"),
        (b"sec-fetch-site", b"same-origin", b"cross-site"),
    ):
        for values in ((good, bad), (bad, good)):  # which httpx does not send
            twice = [(b"host", b"localhost"), *((name, value) for value in values)]
            twice = twice[name == b"host" :]
            status, _ = Gate().refusal({"type": "http", "method": "POST", "path": "/streams", "headers": twice})
            assert status == 403, twice
    for site in ("cross-site", "same-site", "whatever"):
        refused = shared_app.post("/streams", json={"sample": "simulated"}, headers={"Sec-Fetch-Site": site})
        assert (refused.status_code, "own pages" in refused.json()["detail"]) == (403, True)
    assert shared_app.get("/", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200  # a link to the page
    own = str(shared_app.base_url).rstrip("/")
    for headers in ({"Origin": own}, {"Origin": own, "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"}):
        assert shared_app.get("/streams", headers=headers).status_code == 200
    named = {"Host": "LOCALHOST:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"}
    assert shared_app.get("/streams", headers=named).status_code == 200
    assert shared_app.get("/streams", headers={"Host": "localhost:1"}).status_code == 200
    assert shared_app.get("/streams").json() == []


def test_no_network_without_tokens(capfd, sqlite):
    assert main(["serve", "--host", "0.0.0.0", "--data", sqlite]) == 2
    error = capfd.readouterr().err
    assert "there is no token" in error
    assert "--new-token" in error


def test_a_first_token_closes_a_server_that_was_open(sqlite, app):
    client = app(sqlite)
    assert client.get("/streams").status_code == 200
    assert main(["serve", "--new-token", "camera", "--data", sqlite]) == 0
    deadline = time.monotonic() + 10 * TICK
    while client.get("/streams").status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["", " ", "camera"])
def test_a_new_token_has_a_name_of_its_own(name, capfd, sqlite):
    assert main(["serve", "--new-token", "camera", "--data", sqlite]) == 0
    first = capfd.readouterr().out
    assert main(["serve", "--new-token", name, "--data", sqlite]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "--new-token" in err
    with closing(open_store(sqlite)) as store:
        assert list(store.tokens()) == ["camera"]
        assert Token.read(store.tokens()["camera"]) == Token(digest_of(first.strip()))


def test_tokens_are_made_shown_once_hashed_and_revoked(capfd, sqlite, app):
    assert main(["serve", "--new-token", "camera", "--data", sqlite]) == 0
    token = capfd.readouterr().out.strip()
    with sqlite3.connect(Path(sqlite, "moontide.sqlite3")) as connection:
        ((name, kept),) = connection.execute("SELECT name, token FROM tokens").fetchall()
        assert (name, Token.read(kept[:-4])) == ("camera", Token(digest_of(token)))
    connection.close()
    for path in Path(sqlite).iterdir():
        assert token.encode() not in path.read_bytes()
    assert len(token) > 40
    assert main(["serve", "--new-token", "second", "--data", sqlite]) == 0
    second = capfd.readouterr().out.strip()
    client = app(sqlite, tokens={"camera": Token(digest_of(token)), "second": Token(digest_of(second))})
    assert client.get("/streams", headers=bearer(token)).status_code == 200
    assert main(["serve", "--revoke-token", "camera", "--data", sqlite]) == 0  # while the server runs
    deadline = time.monotonic() + 10 * TICK
    while client.get("/streams", headers=bearer(token)).status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.get("/streams", headers=bearer(second)).status_code == 200
    assert main(["serve", "--revoke-token", "camera", "--data", sqlite]) == 2
    assert "no token 'camera'" in capfd.readouterr().err


def test_a_token_opens_its_scope_and_its_stream_until_it_ends(app, sqlite, text, push, samples):
    tokens = {
        scope + (stream or ""): new_token(scope, stream)
        for scope in ("read", "push", "admin")
        for stream in (None, "b")
    }
    tokens["old"] = new_token("admin", None, time.time() - 1)
    client = app(sqlite, tokens={name: kept for name, (_, kept) in tokens.items()})
    for name in ("a", "b"):
        body = {"name": name, "prototypes": text.tolist()}
        assert client.post("/streams", json=body, headers=bearer(tokens["admin"][0])).status_code == 201
    asked = {
        "read": lambda stream, who: client.get(f"/streams/{stream}", headers=who),
        "push": lambda stream, who: push(client, stream, samples(1), **who),
        "admin": lambda stream, who: client.post(f"/streams/{stream}/reset", headers=who),
    }
    opens = {"read": {"read"}, "push": {"read", "push"}, "admin": {"read", "push", "admin"}}
    for name, (token, kept) in tokens.items():
        for what, ask in asked.items():
            for stream in ("a", "b"):
                allowed = what in opens[kept.scope] and kept.stream in (None, stream)
                status = 401 if name == "old" else 200 if allowed else 403
                assert ask(stream, bearer(token)).status_code == status, (name, what, stream)
    assert [each["name"] for each in client.get("/streams", headers=bearer(tokens["readb"][0])).json()] == ["b"]
    metrics = {name: client.get("/metrics", headers=bearer(tokens[name][0])).status_code for name in ("read", "adminb")}
    assert metrics == {"read": 200, "adminb": 403}  # they name every stream
    refused = client.post("/streams", json={"sample": "simulated"}, headers=bearer(tokens["adminb"][0]))
    assert (refused.status_code, "of the stream 'b' only" in refused.json()["detail"]) == (403, True)


def test_scopes_and_ends_on_the_command_line(capfd, sqlite):
    arguments = ["--scope", "push", "--stream", "camera", "--expires", "2h"]
    assert main(["serve", "--data", sqlite, "--new-token", "camera", *arguments]) == 0
    store = open_store(sqlite)
    kept = Token.read(store.tokens()["camera"])
    store.close()
    assert (kept.scope, kept.stream) == ("push", "camera")
    assert 7100 < kept.expires - time.time() <= 7200
    for arguments, words in (
        (["--new-token", "camera"], "must be a new name"),
        (["--new-token", " "], "must not be empty"),
        (["--new-token", "b", "--expires", "soon"], "such as 30d"),
        (["--scope", "read"], "are for '--new-token'"),
    ):
        assert main(["serve", "--data", sqlite, *arguments]) == 2
        assert words in capfd.readouterr().err


def test_revoking_the_last_token_closes_a_running_server(app, sqlite):
    client = app(sqlite, tokens={"camera": KEPT})
    assert client.get("/streams", headers=bearer(TOKEN)).status_code == 200
    assert main(["serve", "--revoke-token", "camera", "--data", sqlite]) == 0
    deadline = time.monotonic() + 10 * TICK
    while client.get("/streams", headers=bearer(TOKEN)).status_code != 401:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert client.get("/streams").status_code == 401


@pytest.mark.parametrize("had", [{}, {"camera": KEPT}], ids=["first token", "revoked token"])
def test_whoever_is_not_let_in_any_more_hears_no_more_events(app, sqlite, text, samples, push, had):
    client = app(sqlite, tokens=had)
    client.headers = bearer(TOKEN) if had else {}
    assert client.post("/streams", json={"name": "a", "prototypes": text.tolist()}).status_code == 201
    with client.stream("GET", "/streams/a/events") as events:
        lines = events.iter_lines()
        assert next(lines) == ": welcome"
        assert push(client, "a", samples(1)).status_code == 200
        assert "event: batch" in [next(lines) for _ in range(4)]
        client.service.store.put_token("camera", OTHER_KEPT.write())
        while client.get("/streams", headers=bearer(OTHER)).status_code != 200 or client.get("/streams").is_success:
            time.sleep(0.01)
        assert push(client, "a", samples(1), **bearer(OTHER)).status_code == 200
        assert not any(line.startswith("data") for line in list(lines)[1:])  # it ends


def test_wrong_tokens_cost_time_and_are_logged_now_and_then(guarded, caplog, monkeypatch):
    monkeypatch.setattr(guarded.service.gate, "_logged", -1e9)
    start = time.monotonic()
    for _ in range(3):
        assert guarded.get("/streams", headers=bearer("wrong")).status_code == 401
    assert time.monotonic() - start >= 3 * auth.WRONG_SECONDS
    lines = [record.getMessage() for record in caplog.records if "without a good token" in record.getMessage()]
    assert len(lines) == 1
    assert "wrong" not in lines[0]


# Clients that take their time


WAIT = object()  # for an answer
POST = b"POST /streams/a/embeddings HTTP/1.1\r\nHost: localhost\r\n"


def dribble(client, *parts, wait=10.0):
    """Send the parts of a request on a bare connection, and return what comes back until it is closed."""
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=wait) as connection:
        received = b""
        for part in parts:
            if part is WAIT:
                received += connection.recv(65536)
            else:
                connection.sendall(part)
        while some := connection.recv(65536):
            received += some
        return received


def test_a_body_that_does_not_come_is_408(app, sqlite, text, push, samples):
    client = app(sqlite)
    assert client.post("/streams", json={"name": "a", "prototypes": text.tolist()}).status_code == 201
    client.service.gate.body_seconds = 0.3
    head = b"POST /streams/a/embeddings HTTP/1.1\r\nHost: localhost\r\nX-Shape: 1,8\r\n"
    head += b"Content-Type: application/octet-stream\r\n"
    for rest in (b"Content-Length: 32\r\n\r\n1234", b"Transfer-Encoding: chunked\r\n\r\n4\r\n1234\r\n"):
        answer = dribble(client, head + rest)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"must arrive within 0.3 s" in answer
    client.service.gate.body_seconds = 30.0  # a busy machine keeps whole requests waiting, too
    assert client.get("/streams/a").json()["total"] == 0
    assert push(client, "a", samples(1)).status_code == 200


def test_headers_that_do_not_come_are_408(app, sqlite, monkeypatch):
    monkeypatch.setattr(server, "HEADER_SECONDS", 0.3)
    client = app(sqlite)
    assert dribble(client).startswith(b"HTTP/1.1 408")  # nothing at all
    answer = dribble(client, b"GET /healthz HTTP/1.1\r\nHost: local")
    assert answer.startswith(b"HTTP/1.1 408")
    first = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = dribble(client, first, WAIT, b"GET /healthz HT")  # on a connection that was used before
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in answer


def test_headers_without_end_are_431(app, sqlite):
    client = app(sqlite)
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
    endless = (b"X-Filler: " + b"a" * 1000 + b"\r\n") * 100
    try:
        answer = dribble(client, head + endless)
    except ConnectionError:  # it was closed while we were still sending
        return
    assert answer[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400")


def test_what_is_no_http_is_400_and_a_sentence(app, sqlite):
    answer = dribble(app(sqlite), b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.endswith(b'{"detail": "This is not a valid HTTP/1.1 request."}')


def test_a_body_that_is_compressed_on_its_way_is_415(app, sqlite, text):
    client = app(sqlite)
    client.post("/streams", json={"name": "a", "prototypes": text.tolist()})
    head = POST + b"Content-Type: application/octet-stream\r\nX-Shape: 1,8\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
    answer = dribble(client, head + b"20\r\n" + b"12345678" * 4 + b"\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 415")
    assert client.get("/streams/a").json()["total"] == 0


def test_what_is_no_http_does_not_fill_the_log(serve, sqlite):
    started = serve(sqlite)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", started.port), timeout=10) as connection:
            connection.sendall(b"hello\r\n\r\n")
            assert b" 400 " in connection.recv(65536)
    assert started.stop() == (0, "")


@pytest.mark.parametrize(
    "first", [(), (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", WAIT)], ids=["new", "used"]
)
def test_an_offer_of_another_protocol_loses_no_body_and_leaves_nobody_waiting(app, sqlite, text, first):
    client = app(sqlite)
    client.post("/streams", json={"name": "a", "prototypes": text.tolist()})
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = POST + offer + b"Content-Type: application/json\r\n"
    body = b'{"embeddings": [[1, 2, 3, 4, 5, 6, 7, 8]]}'
    for rest in (b"Content-Length: %d\r\n\r\n" % len(body) + body, b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
        answer = dribble(client, *first, head + rest)
        assert b"HTTP/1.1 400" in answer
        assert b"send bodies without the header 'Upgrade'" in answer
    start = time.monotonic()
    answer = dribble(client, *first, b"GET /streams HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n")
    assert b'"name":"a"' in answer
    assert b"connection: close" in answer
    assert time.monotonic() - start < 3  # it was closed with the answer


def test_a_connection_is_closed_where_its_body_is_not_read(app, sqlite):
    client = app(sqlite, max_body=1000)
    answer = dribble(client, POST + b"Content-Type: application/json\r\nContent-Length: 999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()


def test_a_slow_client_does_not_hold_up_the_others(app, sqlite, text, samples, push):
    client = app(sqlite, body_seconds=5)
    client.post("/streams", json={"name": "a", "prototypes": text.tolist(), "max_wait_ms": 0})
    head = POST + b"Content-Length: 32\r\n\r\n12"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as slow:
        slow.sendall(head)
        for _ in range(3):
            assert push(client, "a", samples(2)).status_code == 200
    assert client.get("/streams/a").json()["total"] == 6
