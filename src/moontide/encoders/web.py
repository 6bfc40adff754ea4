"""Images of public http and https addresses, with limits: no private networks, a size, and a time.

The name of a host is looked up once, the address that is found must be a public one, and the connection goes to that
very address, so that no second look-up can lead elsewhere; each redirection is checked in the same way.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import urljoin, urlsplit

from moontide.errors import ImageError

MAX_BYTES = 2**26  # of a download
SECONDS = 20.0  # that one may take
REDIRECTIONS = 5
PIECE = 2**16


def is_url(line: str) -> bool:
    """Return whether a line of a list is an address and no path.

    >>> is_url("https://example.org/a.jpg"), is_url("photos/a.jpg")
    (True, False)
    """
    return line.lower().startswith(("http://", "https://"))


def fetch(url: str) -> bytes:
    """Download what is at a public address.

    >>> fetch("http://127.0.0.1/a.jpg")
    Traceback (most recent call last):
        ...
    moontide.errors.ImageError: its address 127.0.0.1 is not public
    """
    end = time.monotonic() + SECONDS
    for _ in range(REDIRECTIONS):
        try:
            found = _get(url, end)
        except (OSError, http.client.HTTPException, UnicodeError, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            late = isinstance(error, TimeoutError) or time.monotonic() > end
            why = f"it took more than {SECONDS:.0f} s" if late else str(error) or type(error).__name__
            raise ImageError(f"it cannot be downloaded ({why})") from error
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise ImageError(f"it cannot be downloaded (more than {REDIRECTIONS} redirections)")


def public_address(host: str, port: int) -> str:
    """Return the address of a host, which must be a public one.

    >>> public_address("10.0.0.1", 80)
    Traceback (most recent call last):
        ...
    moontide.errors.ImageError: its address 10.0.0.1 is not public
    """
    found = {entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    for one in sorted(map(str, found)):
        address = ipaddress.ip_address(one.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None) or address
        if not mapped.is_global or mapped.is_multicast:
            raise ImageError(f"its address {one} is not public")
    return str(sorted(map(str, found))[0])


def _get(url: str, end: float) -> bytes | str:
    """Return what is at an address, or where it leads to."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.password:
        raise ImageError("it is not a plain http or https address")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    address = public_address(parts.hostname, port)
    raw = socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic()))
    try:
        if parts.scheme == "https":
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=parts.hostname)
        connection = http.client.HTTPConnection(parts.hostname, port)
        connection.sock = raw
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"User-Agent": "moontide", "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return answer.getheader("Location") or ""
        if answer.status != 200:
            raise ImageError(f"it cannot be downloaded (status {answer.status})")
        return _body(answer, raw, end)
    finally:
        raw.close()


def _body(answer: http.client.HTTPResponse, raw: socket.socket, end: float) -> bytes:
    data = bytearray()
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        raw.settimeout(left)
        piece = answer.read1(PIECE)
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > MAX_BYTES:
            raise ImageError(f"it has more than the {MAX_BYTES // 2**20} MiB that are allowed for a download")
