"""Who may ask, and how much: bearer tokens, and limits that hold while a request is still coming in.

A token is 256 random bits; the store has only its SHA-256. Without tokens the server answers only on a loopback
address, and there only to pages of its own: a request whose `Host` or `Origin` is another name is refused, so that no
site in the user's browser can reach it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moontide.errors import OptionError
from moontide.serve.metrics import Metrics

PAGES = frozenset({"/", "/docs", "/app.js", "/docs.js", "/style.css", "/icon.svg"})
PUBLIC = PAGES | {"/openapi.json", "/healthz", "/readyz"}
METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
HEADERS = [
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
     b"img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]  # fmt: skip


def new_token() -> tuple[str, str]:
    """Draw a token; returns it and its digest.

    >>> token, digest = new_token()
    >>> digest_of(token) == digest
    True
    """
    token = f"moontide_{secrets.token_urlsafe(32)}"
    return token, digest_of(token)


def digest_of(token: str) -> str:
    """Return what is kept of a token; it is random enough to need no salt.

    >>> digest_of("a")[:8]
    'ca978112'
    """
    return hashlib.sha256(token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's own.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def name_of(host: str) -> str:
    """Return the name or address in a `Host` header.

    >>> name_of("localhost:8000"), name_of("[::1]:8000"), name_of("[")
    ('localhost', '::1', '')
    """
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def check_exposure(host: str, tokens: Mapping[str, str]) -> None:
    """Refuse to listen to the network without tokens.

    >>> check_exposure("127.0.0.1", {})
    """
    if not tokens and not is_loopback(host):
        raise OptionError(
            f"'--host' {host} can be reached from other machines, and there is no token; "
            "make one with 'moontide serve --new-token NAME', or leave '--host' at 127.0.0.1."
        )


@dataclass
class Gate:
    """What is let in: `tokens` are digests by name, none means that everybody on this machine may ask."""

    tokens: Mapping[str, str] = field(default_factory=dict)
    max_body: int = 2**25  # bytes of a request
    max_bodies: int = 2**28  # bytes of all requests that are being read or answered
    body_seconds: float = 30.0  # for a request to come in
    bodies: int = 0

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the sentence for a request that is not let in, or None."""
        headers = Headers(scope=scope)
        if self.tokens:
            if scope["path"] in PUBLIC or self.knows(headers.get("authorization", "")):
                return None
            return 401, "This server needs a token: send the header 'Authorization: Bearer TOKEN'."
        host = headers.get("host", "")
        if not is_loopback(name_of(host)):
            return 403, f"Without tokens this server answers to loopback names only. Got the host {host[:100]!r}."
        if headers.get("origin", f"http://{host}") != f"http://{host}":
            return 403, "Without tokens this server answers to its own pages only. Got another origin."
        return None

    def knows(self, authorization: str) -> bool:
        """Tell whether a header holds one of the tokens; takes the same time whichever it is."""
        kind, _, token = authorization.partition(" ")
        digest = digest_of(token.strip())
        found = [hmac.compare_digest(digest, known) for known in self.tokens.values()]
        return kind.lower() == "bearer" and any(found)


class Guard:
    """The outermost layer of the application: lets in, limits, counts, and sets the security headers."""

    def __init__(self, app: ASGIApp, gate: Gate, metrics: Metrics) -> None:
        """Wrap an application."""
        self.app, self.gate, self.metrics = app, gate, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        body = _Body(self.gate, receive)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in METHODS else "other"
                self.metrics.request(method, message["status"])
                close = [] if body.complete else [(b"connection", b"close")]  # what is still to come is not waited for
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS, *close]}
            await send(message)

        try:
            refusal = self.gate.refusal(scope) or body.refusal(scope)
            if refusal is not None:
                await _refuse(answer, *refusal)
            else:
                await self.app(scope, body.receive, answer)
        finally:
            self.gate.bodies -= body.size


class _Body:
    """The body of a request: counted as it comes in, against its own limit and that of all, and against the clock."""

    def __init__(self, gate: Gate, receive: Receive) -> None:
        self.gate, self.next = gate, receive
        self.size = 0
        self.complete = False
        self.deadline = asyncio.get_running_loop().time() + gate.body_seconds

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        length = Headers(scope=scope).get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            return 400, "'Content-Length' must be a number of at most 18 digits."
        self.complete = length == "0" and "transfer-encoding" not in Headers(scope=scope)
        return self.too_large(int(length))

    def too_large(self, size: int) -> tuple[int, str] | None:
        if size > self.gate.max_body:
            return 413, f"A request may have {self.gate.max_body} bytes. Got {size} or more; send less at once."
        if self.gate.bodies + size - self.size > self.gate.max_bodies:
            return 429, "The server is busy with other requests; come again."
        return None

    async def receive(self) -> Message:
        message = await (self.next() if self.complete else self.in_time())
        size = len(message.get("body", b""))
        refusal = self.too_large(self.size + size)
        if refusal is not None:
            raise HTTPException(*refusal, headers={"retry-after": "1"} if refusal[0] == 429 else None)
        self.size += size
        self.gate.bodies += size
        self.complete = not message.get("more_body", False)
        return message

    async def in_time(self) -> Message:
        """Return what comes next, or give up; a timer and not `wait_for`, which would start a task for each part."""
        task, loop, late = asyncio.current_task(), asyncio.get_running_loop(), False

        def give_up() -> None:
            nonlocal late
            late = True
            if task is not None:
                task.cancel()

        timer = loop.call_at(self.deadline, give_up)
        try:
            return await self.next()
        except asyncio.CancelledError:
            if not late:
                raise
            if task is not None and hasattr(task, "uncancel"):  # from Python 3.11 on
                task.uncancel()
            raise HTTPException(408, f"A request must come in within {self.gate.body_seconds:g} s.") from None
        finally:
            timer.cancel()


async def _refuse(send: Send, status: int, sentence: str) -> None:
    headers = {"content-type": "application/json"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 429:
        headers["retry-after"] = "1"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": problem(sentence)})


def problem(sentence: str) -> bytes:
    """Return the body of an error.

    >>> problem("No.")
    b'{"detail": "No."}'
    """
    return json.dumps({"detail": sentence}).encode()
