"""Access and limits: bearer tokens, and limits that apply while a request is still arriving.

A token is 256 random bits. The store keeps only its SHA-256 and what it allows: a scope, optionally one stream, and an
optional expiry. Without tokens the server answers only on a loopback address, and only to its own pages: a request with
another `Host` or `Origin`, or one that a browser marks as cross-site, is refused, so that no other site in the user's
browser can reach it. A server that has had tokens stays closed when the last one is revoked.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moontide.errors import OptionError
from moontide.serve.metrics import Metrics

SCRIPTS = ("app", "feed", "kept", "draw", "known", "docs")
PAGES = frozenset({"/", "/docs", "/style.css", "/icon.svg", *(f"/{name}.js" for name in SCRIPTS)})
PUBLIC = PAGES | {"/openapi.json", "/healthz", "/readyz"}
SCOPES = ("read", "push", "admin")  # each opens what the ones before it do, and more
PUSHES = frozenset({"embeddings", "images", "known"})  # what else than GET does not need the scope "admin"
LARGE = re.compile(r"/streams(/[^/]+/(embeddings|images))?")  # requests that may be larger than `SMALL_BODY`
SMALL_BODY = 2**18
PIECE = 2**20  # bytes of an answer that wait for the client to read them
BUSY = 429, "The server is busy with other requests; try again."
CLOSING = 503, "The server is shutting down; try again."
WRONG_SECONDS, LOG_SECONDS = 0.2, 10.0  # cost of a wrong token, and interval between log lines about them
METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})
HEADERS = [
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
     b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
]  # fmt: skip


log = logging.getLogger("moontide.serve")


class Token(NamedTuple):
    """The stored form of a token.

    >>> Token.read(Token("ab", "push", "camera").write())
    Token(digest='ab', scope='push', stream='camera', expires=None)
    """

    digest: str
    scope: str = "admin"
    stream: str | None = None  # None: all
    expires: float | None = None  # seconds since 1970; None: never

    def write(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def read(cls, data: bytes) -> Token:
        """Read it from JSON."""
        return cls(**json.loads(data))

    def opens(self, verb: str, path: str) -> bool:
        """Tell whether the token allows a request.

        >>> Token("", "push", "a").opens("POST", "/streams/a/known"), Token("", "push", "a").opens("GET", "/streams/b")
        (True, False)
        """
        _, *parts = path.split("/")
        of_stream = parts[0] == "streams" and len(parts) > 1
        if self.stream is not None and (parts[1] != self.stream if of_stream else verb not in ("GET", "HEAD")):
            return False
        if self.stream is not None and parts[0] == "metrics":  # which names the other streams
            return False
        if verb in ("GET", "HEAD", "OPTIONS") or (of_stream and parts[2:] == ["revise"]):
            return True
        if of_stream and parts[2:3] and parts[2] in PUSHES:
            return self.scope in ("push", "admin")
        return self.scope == "admin"


def new_token(scope: str = "admin", stream: str | None = None, expires: float | None = None) -> tuple[str, Token]:
    """Create a random token; return it and its stored form.

    >>> token, kept = new_token()
    >>> digest_of(token) == kept.digest
    True
    """
    token = f"moontide_{secrets.token_urlsafe(32)}"
    return token, Token(digest_of(token), scope, stream, expires)


def seconds_of(duration: str) -> float:
    """Read a duration such as 30d, 12h, 15m or 90s.

    >>> seconds_of("30d")
    2592000.0
    """
    found = re.fullmatch(r"(\d{1,6})([dhms])", duration)
    if found is None or not int(found[1]):
        raise OptionError(f"'--expires' must be a duration such as 30d, 12h or 15m. Got {duration!r} instead.")
    return float(found[1]) * {"d": 86400, "h": 3600, "m": 60, "s": 1}[found[2]]


def digest_of(token: str) -> str:
    """Return the digest of a token; tokens are random enough to need no salt.

    >>> digest_of("a")[:8]
    'ca978112'
    """
    return hashlib.sha256(token.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is a loopback one.

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
    """Return the name or address in a `Host` header, or an empty string if it is malformed.

    >>> name_of("LocalHost:8000"), name_of("[::1]:8000"), name_of("["), name_of("evil@localhost"), name_of("a#b")
    ('localhost', '::1', '', '', '')
    """
    found = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::\d{1,5})?", host.lower())
    return "" if found is None else found[1] or found[2]


def check_exposure(host: str, tokens: Mapping[str, Token]) -> None:
    """Refuse to listen on the network without tokens.

    >>> check_exposure("127.0.0.1", {})
    """
    if not tokens and not is_loopback(host):
        raise OptionError(
            f"'--host' {host} is reachable from other machines, and there is no token; "
            "create one with 'moontide serve --new-token NAME', or leave '--host' at 127.0.0.1."
        )


@dataclass
class Gate:
    """Decides which requests are allowed: `tokens` by name; without any token ever, all local requests are allowed."""

    tokens: Mapping[str, Token] = field(default_factory=dict)
    max_body: int = 2**25  # bytes of a request
    max_bodies: int = 2**28  # bytes of all requests that are being read or answered
    body_seconds: float = 30.0  # for a request to come in
    max_answers: int = 2**29  # bytes of all answers above `PIECE` that are being sent, or one that is larger
    bodies: int = 0
    answers: int = 0
    closed: bool = False  # whether there ever was a token
    closing: bool = False  # whether the server is going down

    def __post_init__(self) -> None:
        """Record whether there are tokens."""
        self._coming: set[_Body] = set()
        self._logged, self._unlogged = -LOG_SECONDS, 0
        self.set_tokens(self.tokens)

    def set_tokens(self, tokens: Mapping[str, Token]) -> None:
        """Replace the tokens; a gate that had tokens stays closed without them."""
        self.tokens, self.closed = tokens, self.closed or bool(tokens)

    def close(self) -> None:
        """Abort requests that are still arriving, because the server is shutting down."""
        self.closing = True
        for body in list(self._coming):
            body.give_up()

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and message for a request that is refused, or None."""
        headers, path = Headers(scope=scope), scope["path"]
        if self.closed:
            if path in PUBLIC:
                return None
            token = self.find(headers.get("authorization", ""))
            if token is None:
                return 401, "This server needs a token: send the header 'Authorization: Bearer TOKEN'."
            if not token.opens(scope["method"], path):
                of = "" if token.stream is None else f" of the stream {token.stream!r}"
                return 403, f"The token is for the scope '{token.scope}'{of} only; use another."
            scope["moontide.stream"] = token.stream
            return None
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not is_loopback(name_of(host)):
            return 403, f"Without tokens this server only accepts loopback host names. Got the host {host[:100]!r}."
        own = (f"http://{host.lower()}", f"https://{host.lower()}")
        if any(origin.lower() not in own for origin in headers.getlist("origin")):
            return 403, "Without tokens this server only accepts its own pages. Got another origin."
        others = [site for site in headers.getlist("sec-fetch-site") if site not in ("none", "same-origin")]
        if others and not (path in PAGES and scope["method"] in ("GET", "HEAD")):
            return 403, f"Without tokens this server only accepts its own pages. Got a {others[0][:20]!r} request."
        return None

    def find(self, authorization: str) -> Token | None:
        """Return the token in a header if it is valid, in constant time."""
        kind, _, token = authorization.partition(" ")
        digest = digest_of(token.strip())
        found = [known for known in self.tokens.values() if hmac.compare_digest(digest, known.digest)]
        if kind.lower() != "bearer" or not found:
            return None
        return found[0] if found[0].expires is None or found[0].expires > time.time() else None

    def note_refused(self, client: str) -> None:
        """Log refused tokens, at most once in a while."""
        now = time.monotonic()
        if now < self._logged + LOG_SECONDS:
            self._unlogged += 1
            return
        more = f", and {self._unlogged} more before" if self._unlogged else ""
        self._logged, self._unlogged = now, 0
        log.warning("a request from %s without a good token was refused%s", client, more)


class Guard:
    """The outermost layer of the application: access, limits, counters and security headers."""

    def __init__(self, app: ASGIApp, gate: Gate, metrics: Metrics) -> None:
        """Wrap an application."""
        self.app, self.gate, self.metrics = app, gate, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        body, begun = _Body(self.gate, receive), False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                method = scope["method"] if scope["method"] in METHODS else "other"
                self.metrics.request(method, message["status"])
                kept = body.complete or "moontide.unread" in scope
                close = [] if kept else [(b"connection", b"close")]  # what is still to come is not waited for
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS, *close]}
            await send(message)

        large = _Large(self.gate, answer)
        try:
            refusal = self.gate.refusal(scope) or body.refusal(scope)
            if refusal is not None:
                if refusal[0] == 401:
                    self.gate.note_refused((scope.get("client") or ("somebody",))[0])
                    if Headers(scope=scope).get("authorization"):
                        await asyncio.sleep(WRONG_SECONDS)  # wrong tokens cost time
                await _refuse(answer, *refusal)
            else:
                await self.app(scope, body.receive, large.send)
        except asyncio.CancelledError:  # the server, which is going down, waits no longer
            if not self.gate.closing:
                raise
            if not begun:
                await _refuse(answer, *CLOSING)
        finally:
            body.end()
            large.end()


class _Body:
    """The body of a request, limited in size (itself and all together) and time while it arrives."""

    def __init__(self, gate: Gate, receive: Receive) -> None:
        self.gate, self.next = gate, receive
        self.size, self.most = 0, gate.max_body
        self.complete = self.late = False
        self.task: asyncio.Task[None] | None = None  # that waits for more
        self.deadline = asyncio.get_running_loop().time() + gate.body_seconds

    def end(self) -> None:
        """Give back what it took."""
        self.gate.bodies -= self.size

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        for name, plain in (("content-encoding", "identity"), ("transfer-encoding", "chunked")):
            if any(value.lower() not in ("", plain) for value in headers.getlist(name)):
                return 415, f"Bodies must not be compressed. Got '{name.title()}: {headers[name][:50]}'; leave it out."
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            return 400, "'Content-Length' must be a number of at most 18 digits."
        self.complete = length == "0" and "transfer-encoding" not in headers
        if LARGE.fullmatch(scope["path"]) is None:
            self.most = min(self.most, SMALL_BODY)
        return self.too_large(int(length))

    def too_large(self, size: int) -> tuple[int, str] | None:
        if size > self.most:
            return 413, f"A request may have at most {self.most} bytes. Got {size} or more; send less at once."
        if self.gate.bodies + size - self.size > self.gate.max_bodies:
            return BUSY
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
        """Return the next part, or give up; uses a timer, since `wait_for` would start a task for each part."""
        self.task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        timer = loop.call_soon(self.give_up) if self.gate.closing else loop.call_at(self.deadline, self.give_up)
        self.gate._coming.add(self)
        try:
            return await self.next()  # at once, where it is there
        except asyncio.CancelledError:
            if not self.late:
                raise
            if self.task is not None and hasattr(self.task, "uncancel"):  # from Python 3.11 on
                self.task.uncancel()
            if self.gate.closing:
                raise HTTPException(*CLOSING, {"retry-after": "5"}) from None
            raise HTTPException(408, f"A request must arrive within {self.gate.body_seconds:g} s.") from None
        finally:
            timer.cancel()
            self.gate._coming.discard(self)

    def give_up(self) -> None:
        """Wait no longer."""
        self.late = True
        if self.task is not None:
            self.task.cancel()


class _Large:
    """An answer that may be large: it is sent in pieces, each when the one before it is read; limited in all."""

    def __init__(self, gate: Gate, send: Send) -> None:
        self.gate, self.next = gate, send
        self.size, self.refused = 0, False

    def end(self) -> None:
        """Give back what it took."""
        self.gate.answers -= self.size

    async def send(self, message: Message) -> None:
        if self.refused:
            return
        if message["type"] == "http.response.start":
            size = int(Headers(raw=message["headers"]).get("content-length", "0"))
            size = size if size > PIECE else 0
            if size and self.gate.answers and self.gate.answers + size > self.gate.max_answers:
                self.refused = True
                return await _refuse(self.next, *BUSY)
            self.gate.answers += size
            self.size = size
        body = memoryview(message.get("body", b""))
        for start in range(0, len(body) - PIECE, PIECE):
            await self.next({**message, "body": bytes(body[start : start + PIECE]), "more_body": True})
            message = {**message, "body": bytes(body[start + PIECE :][:PIECE])}
        await self.next(message)


async def _refuse(send: Send, status: int, sentence: str) -> None:
    headers = {"content-type": "application/json"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (429, 503):
        headers["retry-after"] = "1" if status == 429 else "5"
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": problem(sentence)})


def problem(sentence: str) -> bytes:
    """Return the body of an error.

    >>> problem("No.")
    b'{"detail": "No."}'
    """
    return json.dumps({"detail": sentence}).encode()
