"""Clients for the server of `moontide serve`: `Client` and, for asyncio, `AsyncClient`.

    with Client("http://127.0.0.1:8000", token="...") as client:
        client.create("birds", prototypes=text_features, classes=names)
        answers = client.push("birds", image_features)
        answers.labels, answers.class_names, answers.confidence
        client.correct("birds", {answers.first: "owl"})

A request is retried if the connection fails or the server is too busy. A push carries a key, so that the server counts
it once: if it was answered before the connection broke, the retry gets the same answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import numpy as np

from moontide.core.arrays import to_numpy
from moontide.errors import MoontideError, missing_extra, shorten

try:
    import httpx
except ImportError:
    raise missing_extra("httpx", "client", "moontide.client") from None

BUSY = (408, 425, 429, 500, 502, 503, 504)  # statuses after which a request may succeed
REFUSED = (429, 503)  # those of them after which nothing was done
RETRIES, PAUSE, LONGEST = 5, 0.2, 10.0  # times, and seconds: doubled each time, up to the longest
TIMEOUT = 60.0


class ServerError(MoontideError):
    """The server refused a request or could not be reached; `status` is the HTTP status, or 0 without an answer.

    >>> ServerError("There is no stream 'birds'.", 404).status
    404
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Predictions:
    """Answers for consecutive samples, starting with number `first`; lists have one entry per sample.

    >>> Predictions.of({"first": 7, "size": 1, "labels": [2], "class_names": ["owl"], "confidence": [0.9]}).labels
    [2]
    """

    first: int
    labels: list[int]
    class_names: list[str]
    confidence: list[float]
    zero_shot_labels: list[int] = field(default_factory=list)
    zero_shot_class_names: list[str] = field(default_factory=list)
    zero_shot_confidence: list[float] = field(default_factory=list)
    known: list[int | None] = field(default_factory=list)

    @classmethod
    def of(cls, held: Mapping[str, Any]) -> Predictions:
        """Create an object of this class from a response of the server."""
        return cls(**_own(cls, held))


@dataclass(frozen=True)
class StreamInfo:
    """A stream and its counts.

    >>> StreamInfo.of({"name": "a", "method": "tide", "class_names": ["owl"], "dim": 8, "seen": 3, "total": 3}).seen
    3
    """

    name: str
    method: str
    class_names: list[str]
    dim: int
    seen: int
    total: int
    options: dict[str, Any] = field(default_factory=dict)
    waiting: int = 0
    changed: int = 0
    counts: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, held: Mapping[str, Any]) -> StreamInfo:
        """Create an object of this class from a response of the server."""
        return cls(**_own(cls, held))


def _own(cls: Any, held: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: held[one.name] for one in fields(cls) if one.name in held}


@dataclass(frozen=True)
class Call:
    """A request; `again`: whether it can be repeated."""

    verb: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    files: Sequence[tuple[str, tuple[str, bytes]]] | None = None
    again: bool = True


def path_of(stream: str, tail: str = "") -> str:
    """Return the path of a stream, whatever its name.

    >>> path_of("../a b", "/known")
    '/streams/..%2Fa%20b/known'
    """
    return f"/streams/{quote(stream, safe='')}{tail}"


def create_call(name: str, prototypes: Any, classes: Sequence[str] | None, settings: Mapping[str, Any]) -> Call:
    """Return the request that creates a stream.

    >>> create_call("birds", None, ["owl"], {}).path
    '/streams'
    """
    body: dict[str, Any] = {"name": name, **settings}
    if prototypes is not None:
        body["prototypes"] = np.asarray(to_numpy(prototypes), dtype=np.float64).tolist()
    if classes is not None:
        body["classes"] = list(classes)
    return _json("POST", "/streams", body, again=False)


def push_call(stream: str, embeddings: Any, known: Sequence[int | str | None] | None, key: str | None) -> Call:
    """Return the request that pushes embeddings, as raw numbers, or as JSON if there are known labels.

    >>> push_call("birds", [[1.0, 0.0]], None, "k").headers["X-Shape"]
    '1,2'
    """
    x: Any = np.ascontiguousarray(to_numpy(embeddings), dtype="<f4")
    if x.ndim != 2:
        raise ServerError(f"'embeddings' must be a 2-D array. Got shape {x.shape} instead.")
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    path = path_of(stream, "/embeddings")
    if known is not None:
        return _json("POST", path, {"embeddings": x.tolist(), "known": list(known)}, headers)
    kind = {"Content-Type": "application/octet-stream", "X-Shape": f"{x.shape[0]},{x.shape[1]}"}
    return Call("POST", path, {**headers, **kind}, x.tobytes())


def images_call(stream: str, images: Sequence[str | Path | bytes], key: str | None) -> Call:
    """Return the request that pushes images, each a file or the bytes of one."""
    held = [one if isinstance(one, bytes) else Path(one).read_bytes() for one in images]
    files = [("images", (str(i), one)) for i, one in enumerate(held)]
    return Call("POST", path_of(stream, "/images"), {"Idempotency-Key": key or uuid.uuid4().hex}, files=files)


def correct_call(stream: str, labels: Mapping[int, int | str | None], key: str | None) -> Call:
    """Return the request that sets true labels by sample number.

    >>> correct_call("birds", {3: "owl"}, "k").content
    b'{"samples": [3], "labels": ["owl"]}'
    """
    body = {"samples": list(labels), "labels": list(labels.values())}
    return _json("POST", path_of(stream, "/known"), body, {"Idempotency-Key": key or uuid.uuid4().hex})


def _json(verb: str, path: str, body: Any, headers: Mapping[str, str] | None = None, again: bool = True) -> Call:
    kind = {"Content-Type": "application/json", **(headers or {})}
    return Call(verb, path, kind, json.dumps(body).encode(), again=again)


def pause(attempt: int, response: httpx.Response | None) -> float:
    """Return the seconds to wait before the next attempt: the server's value, or exponential backoff.

    >>> 0.05 <= pause(0, None) <= 0.3
    True
    """
    asked = "" if response is None else response.headers.get("Retry-After", "")
    if asked.replace(".", "", 1).isdigit():
        return min(float(asked), LONGEST)
    return float(min(PAUSE * 2**attempt, LONGEST) * random.uniform(0.5, 1))


def read(response: httpx.Response) -> Any:
    """Return the contents of a response, or raise the error that the server reports."""
    if response.is_success:
        return response.json() if response.content else None
    try:
        detail = str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        detail = f"The server answered {response.status_code} {response.reason_phrase}."
    raise ServerError(shorten(detail), response.status_code)


class _Settings:
    """Common part of both clients: the address of the server, and retries."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        token: str | None = None,
        retries: int = RETRIES,
        timeout: float = TIMEOUT,
    ) -> None:
        self.retries = retries
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._options: dict[str, Any] = {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}

    def _request(self, call: Call) -> dict[str, Any]:
        held = {"method": call.verb, "url": call.path, "headers": dict(call.headers)}
        return held | ({"files": call.files} if call.files is not None else {"content": call.content})

    def _again(self, call: Call, attempt: int, response: httpx.Response | None, error: Exception | None) -> bool:
        if attempt >= self.retries:
            return False
        if error is not None:
            return call.again or isinstance(error, httpx.ConnectError)
        status = 0 if response is None else response.status_code
        return status in (BUSY if call.again else REFUSED)

    def _lost(self, error: Exception) -> ServerError:
        where = self._options["base_url"]
        return ServerError(shorten(f"The server at {where} cannot be reached: {error or type(error).__name__}."))


class Client(_Settings):
    """A synchronous client.

    url: the address of the server. token: as printed by `moontide serve --new-token`. retries: how often a request is
    repeated. timeout: seconds per request.

    >>> Client("http://127.0.0.1:1", retries=0).streams()
    Traceback (most recent call last):
        ...
    moontide.client.ServerError: The server at http://127.0.0.1:1 cannot be reached: [Errno 111] Connection refused.
    """

    @cached_property
    def _http(self) -> httpx.Client:
        return httpx.Client(**self._options)

    def __enter__(self) -> Client:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, call: Call) -> Any:
        attempt = 0
        while True:
            response, error = None, None
            try:
                response = self._http.request(**self._request(call))
            except httpx.TransportError as lost:
                error = lost
            if not self._again(call, attempt, response, error):
                if response is None:
                    raise self._lost(error or OSError()) from error
                return read(response)
            time.sleep(pause(attempt, response))
            attempt += 1

    def streams(self) -> list[str]:
        """Return the names of the streams."""
        return [one["name"] for one in self._send(Call("GET", "/streams"))]

    def create(
        self, name: str, *, prototypes: Any = None, classes: Sequence[str] | None = None, **settings: Any
    ) -> StreamInfo:
        """Create a stream from class embeddings (K, d), or from class names that the server embeds.

        settings: further fields of the request, such as synonyms, method, options, logit_scale, max_batch
        or window.
        """
        return StreamInfo.of(self._send(create_call(name, prototypes, classes, settings)))

    def describe(self, stream: str) -> StreamInfo:
        """Return the description of a stream."""
        return StreamInfo.of(self._send(Call("GET", path_of(stream))))

    def push(
        self, stream: str, embeddings: Any, known: Sequence[int | str | None] | None = None, key: str | None = None
    ) -> Predictions:
        """Push embeddings (n, d), optionally with known labels, and return their predictions.

        key: identifies the push, so that the server counts it once; None creates a new key.
        """
        return Predictions.of(self._send(push_call(stream, embeddings, known, key)))

    def push_images(self, stream: str, images: Sequence[str | Path | bytes], key: str | None = None) -> Predictions:
        """Push image files, or their bytes, and return their predictions."""
        return Predictions.of(self._send(images_call(stream, images, key)))

    def correct(self, stream: str, labels: Mapping[int, int | str | None], key: str | None = None) -> None:
        """Set the true labels of samples by their numbers in the stream; None withdraws a label."""
        self._send(correct_call(stream, labels, key))

    def delete(self, stream: str) -> None:
        """Delete a stream."""
        self._send(Call("DELETE", path_of(stream), again=False))


class AsyncClient(_Settings):
    """A client for asyncio, with the methods of `Client`.

    >>> AsyncClient("http://127.0.0.1:8000").retries
    5
    """

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._options)

    async def __aenter__(self) -> AsyncClient:
        """Return itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connections."""
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, call: Call) -> Any:
        attempt = 0
        while True:
            response, error = None, None
            try:
                response = await self._http.request(**self._request(call))
            except httpx.TransportError as lost:
                error = lost
            if not self._again(call, attempt, response, error):
                if response is None:
                    raise self._lost(error or OSError()) from error
                return read(response)
            await asyncio.sleep(pause(attempt, response))
            attempt += 1

    async def streams(self) -> list[str]:
        """Return the names of the streams."""
        return [one["name"] for one in await self._send(Call("GET", "/streams"))]

    async def create(
        self, name: str, *, prototypes: Any = None, classes: Sequence[str] | None = None, **settings: Any
    ) -> StreamInfo:
        """Create a stream, as in `Client.create`."""
        return StreamInfo.of(await self._send(create_call(name, prototypes, classes, settings)))

    async def describe(self, stream: str) -> StreamInfo:
        """Return the description of a stream."""
        return StreamInfo.of(await self._send(Call("GET", path_of(stream))))

    async def push(
        self, stream: str, embeddings: Any, known: Sequence[int | str | None] | None = None, key: str | None = None
    ) -> Predictions:
        """Push embeddings, as in `Client.push`."""
        return Predictions.of(await self._send(push_call(stream, embeddings, known, key)))

    async def push_images(
        self, stream: str, images: Sequence[str | Path | bytes], key: str | None = None
    ) -> Predictions:
        """Push images, as in `Client.push_images`."""
        return Predictions.of(await self._send(images_call(stream, images, key)))

    async def correct(self, stream: str, labels: Mapping[int, int | str | None], key: str | None = None) -> None:
        """Set true labels, as in `Client.correct`."""
        await self._send(correct_call(stream, labels, key))

    async def delete(self, stream: str) -> None:
        """Delete a stream."""
        await self._send(Call("DELETE", path_of(stream), again=False))
