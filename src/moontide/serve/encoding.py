"""Incremental JSON encoding: lists over all classes are long, and must not block the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

PIECE = 4096  # entries of a list that are written at once, which takes about a millisecond


def encode(value: Any) -> str:
    """Return plain values as JSON.

    >>> encode({"a": [1, None]})
    '{"a":[1,null]}'
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


async def encode_in_pieces(value: Mapping[str, Any]) -> bytes:
    """Return an object of plain values as JSON, and let others go first between the pieces of long lists.

    >>> asyncio.run(encode_in_pieces({"a": list(range(3)), "b": None}))
    b'{"a":[0,1,2],"b":null}'
    """
    parts = []
    for key, item in value.items():
        if isinstance(item, list) and len(item) > PIECE:
            pieces = []
            for start in range(0, len(item), PIECE):
                pieces.append(encode(item[start : start + PIECE])[1:-1])
                await asyncio.sleep(0)
            parts.append(f"{encode(key)}:[{','.join(pieces)}]")
        else:
            parts.append(f"{encode(key)}:{encode(item)}")
    return f"{{{','.join(parts)}}}".encode()
