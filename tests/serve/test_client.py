"""The client against a real server: pushes, corrections, refusals, and a connection that breaks after the answer."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from moontide.client import AsyncClient, Client, ServerError
from moontide.serve.auth import new_token

RNG = np.random.default_rng(0)
TEXT, X = RNG.normal(size=(3, 8)), RNG.normal(size=(6, 8))
NAMES = ["ant", "bee", "cat"]


@pytest.fixture
def url(app, sqlite) -> str:
    return str(app(sqlite).base_url)


class Breaking:
    """A proxy on loopback that lets requests through and breaks the connection before the first answers."""

    def __init__(self, port: int, breaks: int) -> None:
        self.port, self.breaks, self.requests = port, breaks, 0
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                here, _ = self.listening.accept()
            except OSError:
                return
            self.one(here)

    def one(self, here: socket.socket) -> None:
        with here, socket.create_connection(("127.0.0.1", self.port)) as there:
            asked = here.recv(1 << 20)
            while b"\r\n\r\n" not in asked:
                asked += here.recv(1 << 20)
            head, _, body = asked.partition(b"\r\n\r\n")
            size = next(
                (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")), 0
            )
            while len(body) < size:
                body += here.recv(1 << 20)
            there.sendall(head + b"\r\nConnection: close\r\n\r\n" + body)
            answer = b""
            while part := there.recv(1 << 20):
                answer += part
            self.requests += 1
            if self.requests > self.breaks:
                here.sendall(answer)


@pytest.fixture
def breaking(url: str) -> Iterator[Breaking]:
    proxy = Breaking(int(url.rsplit(":", 1)[1].strip("/")), breaks=2)
    yield proxy
    proxy.listening.close()


def test_a_stream_is_made_pushed_to_corrected_and_deleted(url: str) -> None:
    with Client(url) as client:
        made = client.create("birds", prototypes=TEXT, classes=NAMES, method="tide", max_batch=4)
        assert (made.name, made.class_names, made.dim) == ("birds", NAMES, 8)
        answers = client.push("birds", X)
        assert len(answers.labels) == 6
        assert answers.class_names == [NAMES[k] for k in answers.labels]
        assert client.push("birds", X[:2], known=["cat", None]).known == [2, None]
        client.correct("birds", {answers.first: "bee"})
        assert client.describe("birds").seen == 8
        assert client.streams() == ["birds"]
        client.delete("birds")
        assert client.streams() == []


def test_a_push_whose_answer_was_lost_is_counted_once(url: str, breaking: Breaking) -> None:
    with Client(url) as direct:
        direct.create("birds", prototypes=TEXT, classes=NAMES)
        with Client(breaking.url) as client:
            answers = client.push("birds", X)
        assert breaking.requests == 3  # it was sent three times
        assert direct.describe("birds").total == 6
        assert answers.first == 0


def test_what_the_server_refuses_is_not_tried_again(url: str) -> None:
    with Client(url) as client:
        with pytest.raises(ServerError) as caught:
            client.push("none", X)
        assert caught.value.status == 404
        client.create("birds", prototypes=TEXT, classes=NAMES)
        with pytest.raises(ServerError, match="dimension") as caught:
            client.push("birds", X[:, :4])
        assert caught.value.status in (400, 422)
        with pytest.raises(ServerError) as caught:
            client.create("birds", prototypes=TEXT, classes=NAMES)
        assert caught.value.status == 409


def test_a_token_opens_the_server_and_none_does_not(app, sqlite) -> None:
    token, kept = new_token("admin", None, None)
    url = str(app(sqlite, tokens={"me": kept}).base_url)
    with Client(url, token=token) as client:
        assert client.streams() == []
    with Client(url) as client, pytest.raises(ServerError) as caught:
        client.streams()
    assert caught.value.status == 401


def test_images_are_pushed_where_the_server_has_an_encoder(app, sqlite, colour) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "PNG")
    with Client(str(app(sqlite, encoder=colour).base_url)) as client:
        client.create("colours", classes=["red", "blue"])
        assert client.push_images("colours", [buffer.getvalue()]).class_names == ["red"]


def test_no_server_is_one_sentence() -> None:
    with Client("http://127.0.0.1:9", retries=1) as client, pytest.raises(ServerError, match="cannot be reached"):
        client.streams()


def test_the_client_for_asyncio_does_the_same(url: str, breaking: Breaking) -> None:
    async def work() -> tuple[int, list[str]]:
        async with AsyncClient(url) as direct, AsyncClient(breaking.url) as client:
            await direct.create("birds", prototypes=TEXT, classes=NAMES)
            first = await client.push("birds", X)
            rest = await asyncio.gather(*(direct.push("birds", X[i : i + 1]) for i in range(6)))
            await direct.correct("birds", {first.first: "bee"})
            names = [name for one in rest for name in one.class_names]
            total = (await direct.describe("birds")).total
            await direct.delete("birds")
            assert await direct.streams() == []
            return total, names

    total, names = asyncio.run(work())
    assert total == 12
    assert len(names) == 6
