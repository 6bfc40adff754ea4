"""Listening: one process, one event loop, a clock on headers that come in drop by drop, and an end without loss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from http import HTTPStatus

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from moontide.errors import OptionError
from moontide.serve.app import create_app
from moontide.serve.auth import check_exposure, problem
from moontide.serve.service import Service

HEADER_SECONDS, MAX_HEADER_BYTES = 10.0, 2**16  # of the headers of a request
CLOSE_SECONDS = 30  # for open requests to be answered when the server is stopped
MAX_CONNECTIONS = 1000
SWITCH_SECONDS = 0.0005  # so that a step does not keep the event loop waiting for the interpreter


class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP/1.1 by uvicorn, with limits on the time and the size that the headers of a request take."""

    timer: asyncio.TimerHandle | None = None
    header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self.timer = self.loop.call_later(HEADER_SECONDS, self.too_slow)

    def data_received(self, data: bytes) -> None:
        """Start the clock for a further request, and stop it when the headers are in."""
        before = self.cycle
        if self.timer is None and before.response_complete:
            self.timer = self.loop.call_later(HEADER_SECONDS, self.too_slow)
        super().data_received(data)
        if self.cycle is not before:  # uvicorn has begun with the request
            self.stop_clock()
        elif self.timer is not None:
            self.header_bytes += len(data)
            if self.header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.refuse(431, f"The headers of a request may have {MAX_HEADER_BYTES} bytes.")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self.stop_clock()
        super().connection_lost(exc)

    def stop_clock(self) -> None:
        """Stop the clock."""
        self.header_bytes = 0
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def too_slow(self) -> None:
        """End a connection whose headers do not come in."""
        self.refuse(408, f"The headers of a request must come in within {HEADER_SECONDS:g} s.")

    def refuse(self, status: int, sentence: str) -> None:
        """Say why, and close the connection."""
        body = problem(sentence)
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """The server of a service: uvicorn's, which ends event streams when it is told to stop."""

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
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End event streams, wait for open requests, and close the service."""
        self.service.hush()
        await super().shutdown(sockets)


def run(service: Service, host: str = "127.0.0.1", port: int = 8000) -> None:
    """Serve until a signal comes; then answer what is open, make checkpoints and end."""
    check_exposure(host, service.gate.tokens)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    sys.setswitchinterval(SWITCH_SECONDS)
    with listen(host, port) as listening:
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        safe = "bearer tokens" if service.gate.tokens else "no tokens, this machine only"
        print(f"Moontide at {url} ({safe}; data in {service.store.place})", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            Server(service).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """Open the socket to listen on; port 0 takes a free one.

    >>> with listen("127.0.0.1", 0) as listening:
    ...     listening.getsockname()[0]
    '127.0.0.1'
    """
    if not 0 <= port <= 65535:
        raise OptionError(f"'--port' must be a number from 0 to 65535. Got {port} instead.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise OptionError(f"'--host' {host} and '--port' {port} cannot be listened on: {error}.") from error
    return listening
