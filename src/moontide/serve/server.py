"""The listener: one process, one event loop, limits per connection, and a shutdown without loss."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moontide.errors import OptionError
from moontide.serve.app import create_app
from moontide.serve.auth import check_exposure, problem
from moontide.serve.service import Service

HEADER_SECONDS, MAX_HEADER_BYTES = 10.0, 2**16  # of the headers of a request
WRITE_SECONDS, MAX_UNREAD = 20.0, 2**26  # for a client to read its answer; bytes of all answers that are not read
CLOSE_SECONDS = 10  # for open requests to be answered when the server is stopped
MAX_CONNECTIONS = 1000
SWITCH_SECONDS = 0.0005  # so that a step does not keep the event loop waiting for the interpreter


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 by uvicorn, with limits on the time and size of each connection.

    uvicorn has no such limits of its own, so this builds on how its protocol works inside (`cycle`, `flow`): versions
    that are known to work that way are named in pyproject.toml, and tests/serve/test_attacks.py and test_security.py
    try every limit. What comes of a body after the answer is dropped, and has the time that headers have.

    Where there are too many connections, one that does not read its answer makes room, or one without a request.
    """

    connections: set[Any]
    cycle: Any
    timer: asyncio.TimerHandle | None = None  # on headers that come in
    writing: asyncio.TimerHandle | None = None  # on an answer that is not read
    header_bytes = unread = 0
    deaf = False  # whether what comes is not read
    in_body = False  # whether the body of a request is still coming
    since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock, and make room."""
        super().connection_made(transport)
        self.since = self.loop.time()
        self.timer = self.loop.call_later(HEADER_SECONDS, self.too_slow)
        if len(self.connections) > MAX_CONNECTIONS:
            others = [each for each in self.connections if each is not self]
            stuck = [each for each in others if each.unread]
            idle = [each for each in others if each.cycle is None or each.cycle.response_complete]
            if stuck or idle:
                min(stuck or idle, key=lambda each: each.since).drop()
            else:
                self.refuse(503, f"The server has {MAX_CONNECTIONS} connections, which is the limit; try again.")

    def data_received(self, data: bytes) -> None:
        """Start the clock for a further request, and stop it when the headers are in."""
        if self.deaf:
            return
        before, in_body = self.cycle, self.in_body
        behind = before is not None and not before.more_body  # a further request, while this one is answered
        if self.timer is None and (before is None or before.response_complete):
            self.timer = self.loop.call_later(HEADER_SECONDS, self.too_slow)
        super().data_received(data)
        if self.cycle is not before:  # uvicorn has begun with the request
            self.stop_clock()
        elif not in_body and (self.timer is not None or behind):
            self.header_bytes += len(data)
            if self.header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                if self.timer is None:  # an answer is under way
                    self.drop()
                else:
                    self.refuse(431, f"The headers of a request may have at most {MAX_HEADER_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """Begin with a request; one that does not wait for the answer to the one before it is not read.

        Where a request offers another protocol, its parser reads nothing more: neither a body nor a further request.
        """
        self.in_body = True
        if self.cycle is None or self.cycle.response_complete:
            if not self.parser.should_upgrade():
                return super().on_headers_complete()
            sizes = [value for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
            if sizes not in ([], [b"0"]):
                return self.refuse(400, "This server is HTTP/1.1 only; send bodies without the header 'Upgrade'.")
            super().on_headers_complete()
            self.cycle.keep_alive, self.deaf = False, True
            return
        self.cycle.keep_alive, self.deaf = False, True  # the connection ends with this answer
        self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """Note that a request is whole; the clock runs on only for one that has begun since."""
        self.in_body = False
        if self.cycle is None:  # the request was refused
            return
        if self.cycle.response_complete:
            self.stop_clock()
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Wait for the client to read, for some time, and not for too many bytes of all."""
        super().pause_writing()
        self.unread = self.transport.get_write_buffer_size()
        self.writing = self.loop.call_later(WRITE_SECONDS, self.drop)
        waiting = sorted((each for each in self.connections if each.unread), key=lambda each: each.since)
        excess = sum(each.unread for each in waiting) - MAX_UNREAD
        for each in waiting:
            if excess <= 0:
                break
            excess -= each.unread
            each.drop()

    def resume_writing(self) -> None:
        """Stop waiting."""
        super().resume_writing()
        self.stop_waiting()

    def drop(self) -> None:
        """End the connection at once; nothing more is written to it."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self.stop_clock()
        self.stop_waiting()
        super().connection_lost(exc)

    def stop_clock(self) -> None:
        """Stop the clock on headers."""
        self.header_bytes = 0
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def stop_waiting(self) -> None:
        """Stop the clock on an answer."""
        self.unread = 0
        if self.writing is not None:
            self.writing.cancel()
            self.writing = None

    def too_slow(self) -> None:
        """End a connection whose headers do not come in."""
        self.refuse(408, f"The headers of a request must arrive within {HEADER_SECONDS:g} s.")

    def send_400_response(self, _: str) -> None:
        """Refuse what the parser cannot read."""
        self.refuse(400, "This is not a valid HTTP/1.1 request.")

    def refuse(self, status: int, sentence: str) -> None:
        """Send the reason, and close the connection."""
        body = problem(sentence)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        head += "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """The server of a service: uvicorn's, which ends event streams when it is asked to stop."""

    def __init__(self, service: Service) -> None:
        """Set uvicorn up."""
        self.service = service
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=Protocol,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals as a request to stop, from now on and for good: a stop is no failure."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; at once while streams are still being opened or made, as nothing has been answered then."""
        if not self.started:
            os._exit(0)
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End event streams, wait for open requests, and close the service."""
        self.service.close_events()
        await super().shutdown(sockets)


class JSONLines(logging.Formatter):
    """A line of the log as a JSON object.

    >>> line = JSONLines().format(logging.makeLogRecord({"msg": "a %s", "args": ("b",), "levelname": "INFO"}))
    >>> json.loads(line)["message"]
    'a b'
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {"time": f"{stamp}.{int(record.msecs):03d}Z", "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def run(service: Service, host: str = "127.0.0.1", port: int = 8000, log_format: str = "text") -> None:
    """Serve until a signal arrives; then answer open requests, write checkpoints and exit."""
    check_port(port)
    check_exposure(host, service.gate.tokens)
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
    handler.setFormatter(JSONLines() if log_format == "json" else text)
    logging.basicConfig(handlers=[handler])
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # a line for each invalid request would fill the disk
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(service)
    with listen(host, port) as listening, server.capture_signals():
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        safe = "bearer tokens" if service.gate.tokens else "no tokens, this machine only"
        print(f"Moontide at {url} ({safe}; data in {service.store.location})", flush=True)
        server.run(sockets=[listening])
    logging.shutdown()
    os._exit(0)  # at once: the interpreter would wait for threads that are at work on what was not answered


def check_port(port: int) -> None:
    """Refuse an invalid port number.

    >>> check_port(70000)
    Traceback (most recent call last):
        ...
    moontide.errors.OptionError: '--port' must be a number from 0 to 65535. Got 70000 instead.
    """
    if not 0 <= port <= 65535:
        raise OptionError(f"'--port' must be a number from 0 to 65535. Got {port} instead.")


def listen(host: str, port: int) -> socket.socket:
    """Open the socket to listen on; port 0 picks a free one.

    >>> with listen("127.0.0.1", 0) as listening:
    ...     listening.getsockname()[0]
    '127.0.0.1'
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise OptionError(f"'--host' {host} and '--port' {port} cannot be listened on: {error}.") from error
    return listening
