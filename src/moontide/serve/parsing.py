"""JSON request bodies: small ones are parsed here, large ones in a separate process.

Python's JSON reader does not release the interpreter, so threads do not help: 30 MiB would keep all other clients
waiting for seconds. A body above `INLINE` bytes with more rows or words than any request may have is refused unread.
Other large bodies are parsed by `python -m moontide.serve.parsing`, which has limits on memory and time and a lower
priority, and returns raw float32 and the other fields.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
from typing import Any

import numpy as np

from moontide.core.arrays import as_real, unit_rows
from moontide.errors import InputError, MoontideError, ResourceError

INLINE = 2**18  # bytes that are read in a few milliseconds
PARSE_SECONDS, PARSE_BYTES, NICE = 10, 2**31, 10  # of the other process; by its own clock
PATIENCE = 3  # times as long by the clock on the wall, where the machine is busy
OTHER_BYTES, OTHER_LISTS = 2**22, 10_000  # of what is not numbers, which is read again here
MAX_CLASSES = 100_000  # of a stream
MOST = {b"[": 2 * MAX_CLASSES, b'"': 8 * MAX_CLASSES}  # rows and words: names, synonyms and their quotes
PIECE = 2**20  # bytes that are searched at once
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")  # a half of a character above U+FFFF, escaped or not
Parsed = tuple[dict[str, Any], Any]  # the other fields, and rows of float32 or None


class JSONError(MoontideError):
    """A body that is not JSON."""


def parse(body: bytes, field: str, others: tuple[str, ...]) -> Parsed:
    """Read a JSON object whose `field` is rows of numbers, with no fields but the `others`; takes its time.

    >>> parse(b'{"embeddings": [[1, 2]]}', "embeddings", ())
    ({}, array([[1., 2.]], dtype=float32))
    """
    if len(body) <= INLINE:
        return parse_here(body, field, others)
    for mark, most in MOST.items():
        if sum(body.count(mark, start, start + PIECE) for start in range(0, len(body), PIECE)) > most:
            raise ResourceError(
                f"The body has over {most} {mark.decode()}, more rows or words than a request may have."
            )
    command = [sys.executable, "-m", "moontide.serve.parsing", field, *others]
    try:
        wait = PATIENCE * PARSE_SECONDS
        done = subprocess.run(command, input=body, capture_output=True, timeout=wait, check=False)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"The body takes over {PARSE_SECONDS} s to parse; send less, or raw float32.") from None
    if done.returncode == -getattr(signal, "SIGXCPU", 0):
        raise ResourceError(f"The body takes over {PARSE_SECONDS} s to parse; send less, or raw float32.")
    if len(done.stdout) < 12:
        raise ResourceError("The body takes too much memory to parse; send less, or raw float32.")
    size, n, d = struct.unpack("<III", done.stdout[:12])
    head = json.loads(done.stdout[12 : 12 + size])
    if "error" in head:
        raise {"json": JSONError, "input": InputError}[head["kind"]](head["error"])
    x = np.frombuffer(done.stdout, "<f4", n * d, 12 + size).reshape(n, d).copy() if n else None
    return head["others"], x


def parse_here(body: bytes, field: str, others: tuple[str, ...]) -> Parsed:
    """Read a JSON object in this process.

    >>> parse_here(b'{"colour": 1}', "embeddings", ("known",))
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'colour': Extra inputs are not permitted; known are embeddings, known.
    """
    try:
        value = json.loads(body)
        if SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()  # as an answer would repeat it
    except UnicodeEncodeError:
        raise InputError("The texts of the body must be Unicode. Got half of a surrogate pair.") from None
    except (ValueError, RecursionError):
        raise JSONError("The body is not JSON.") from None
    known = ", ".join([field, *others])
    if not isinstance(value, dict):
        raise InputError(f"The body must be a JSON object with some of the fields {known}.")
    for name in value:
        if name != field and name not in others:
            raise InputError(f"'{name[:50]}': Extra inputs are not permitted; known are {known}.")
    rows = value.pop(field, None)
    seen = (b"true" in body or b"false" in body) and isinstance(rows, list)  # else there is nothing to look for
    if seen and any(isinstance(number, bool) for row in rows if isinstance(row, list) for number in row):
        raise InputError(f"'{field}' must hold real numbers. Got true or false among them.")
    return value, None if rows is None else check_rows(rows, field)


def check_rows(values: Any, name: str) -> Any:
    """Validate embeddings (n, d) and convert them to float32.

    >>> check_rows([[1, 2], [3, float("nan")]], "embeddings")
    Traceback (most recent call last):
        ...
    moontide.errors.InputError: 'embeddings' must be finite. Got NaN or infinity in row 1; remove or recompute them.
    """
    rows = as_real(values, name)
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(rows, dtype=np.float32)
    squares = np.einsum("nd,nd->n", x, x)
    if not 1e-24 < squares.min() <= squares.max() < 1e24:  # or NaN
        unit_rows(x, name)  # says what is not finite, and which rows are zero
    return x


def main(field: str, *others: str) -> None:
    """Read a body from the standard input, and write what it holds to the standard output."""
    if hasattr(os, "nice"):
        os.nice(NICE)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (PARSE_BYTES, PARSE_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (PARSE_SECONDS, 2 * PARSE_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):  # a system without such limits
        pass
    shape, numbers = (0, 0), b""
    try:
        found, x = parse_here(sys.stdin.buffer.read(), field, others)
        head: dict[str, Any] = {"others": found}
        if x is not None:
            shape, numbers = x.shape, x.astype("<f4").tobytes()
        words = json.dumps(found)
        if len(words) > OTHER_BYTES:
            raise InputError(f"What is not {field} may have {OTHER_BYTES} bytes, and has more.")
        if words.count("[") > OTHER_LISTS:
            raise InputError(f"What is not {field} may have {OTHER_LISTS} lists, such as synonyms, and has more.")
    except (JSONError, InputError) as error:
        shape, numbers = (0, 0), b""
        head = {"error": str(error), "kind": "json" if isinstance(error, JSONError) else "input"}
    first = json.dumps(head).encode()
    sys.stdout.buffer.write(struct.pack("<III", len(first), *shape) + first + numbers)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MemoryError:
        sys.exit(1)
