"""Request and response bodies: sent from the memory they are in, read into memory allocated once, bounded in length.

`session.py` uses these functions for every request.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import numpy as np

from ...errors import AflockError
from ..protocol.wire import BytesLike
from .errors import ProtocolError, error_of_status, protocol_error

CHUNK = 1 << 18
"""Bytes passed to the socket at a time; asyncio would copy the unsent rest of a larger piece."""
LONGEST_JSON = 1 << 20
"""The most bytes of a JSON document that the client reads."""
LONGEST_STATUS = 1 << 26
"""The same for a status, which has a few hundred bytes per client."""


async def chunks(body: Iterable[BytesLike]) -> AsyncIterator[memoryview]:
    """A body to send, as views of the memory it is in."""
    for vector in body:
        view = memoryview(vector).cast("B")
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


async def read_body(response: aiohttp.ClientResponse, size: int) -> memoryview:
    """A body of exactly `size` bytes, read into memory that is allocated once."""
    announced = response.content_length
    if announced is not None and announced != size:
        raise protocol_error(f"the body has {announced} bytes instead of {size}")
    view, at = np.empty(size, np.uint8).data, 0
    async for chunk in response.content.iter_any():
        end = at + len(chunk)
        if end > size:
            raise protocol_error(f"the body has more than {size} bytes")
        view[at:end] = chunk
        at = end
    if at < size:
        raise protocol_error(f"the body has {at} bytes instead of {size}")
    return view


async def read_json(response: aiohttp.ClientResponse, most: int = LONGEST_JSON) -> Any:
    """A JSON document of at most `most` bytes."""
    raw = bytearray()
    async for chunk in response.content.iter_any():
        raw += chunk
        if len(raw) > most:
            raise protocol_error(f"the answer is longer than {most} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise protocol_error("the answer is not valid JSON") from None


async def read_json_object(response: aiohttp.ClientResponse, most: int = LONGEST_JSON) -> dict[str, Any]:
    """A JSON object of at most `most` bytes."""
    found = await read_json(response, most)
    if not isinstance(found, dict):
        raise protocol_error("the answer is not a JSON object")
    return found


async def error_of_response(response: aiohttp.ClientResponse) -> AflockError:
    """The error for an answer that is not a success."""
    if response.status < 400:
        return protocol_error(f"the answer is HTTP {response.status}")
    try:
        document = await read_json_object(response)
    except ProtocolError:  # a proxy between client and server answers without JSON
        document = {}
    return error_of_status(response.status, document, response.headers.get("Retry-After"))
