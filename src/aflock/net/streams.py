"""Bodies between a client and its server, piece by piece: none is held twice, and none is longer than it may be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiohttp
import numpy as np

from ..errors import AflockError
from .trouble import Nonsense, complaint, nonsense
from .wire import Buffer

PIECE = 1 << 18
"""Bytes handed to the socket at a time: more would be copied."""
LONGEST_JSON = 1 << 20
"""Bytes of a JSON document that are read at most."""
LONGEST_STATUS = 1 << 26
"""Bytes of a status: it has a few hundred for every client."""


async def pieces(body: Iterable[Buffer]) -> AsyncIterator[memoryview]:
    """A body to send, from the memory it lies in."""
    for vector in body:
        view = memoryview(vector).cast("B")
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


async def fill(response: aiohttp.ClientResponse, size: int) -> memoryview:
    """A body of exactly that length, in memory that was asked for once."""
    announced = response.content_length
    if announced is not None and announced != size:
        raise nonsense(f"a body of {announced} bytes comes where {size} are due")
    view, at = np.empty(size, np.uint8).data, 0
    async for piece in response.content.iter_any():
        end = at + len(piece)
        if end > size:
            raise nonsense(f"a body comes with more than the {size} bytes that are due")
        view[at:end] = piece
        at = end
    if at < size:
        raise nonsense(f"a body of {at} bytes comes where {size} are due")
    return view


async def loaded(response: aiohttp.ClientResponse, most: int = LONGEST_JSON) -> Any:
    """A body that is JSON."""
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > most:
            raise nonsense("a JSON document comes without end")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise nonsense("what should be JSON is none") from None


async def document(response: aiohttp.ClientResponse, most: int = LONGEST_JSON) -> dict[str, Any]:
    """A body that is a JSON object."""
    found = await loaded(response, most)
    if not isinstance(found, dict):
        raise nonsense("what should be a JSON object is none")
    return found


async def objection(response: aiohttp.ClientResponse) -> AflockError:
    """The error that an answer other than success is."""
    if response.status < 400:
        return nonsense(f"the answer is HTTP {response.status}")
    try:
        said = await document(response)
    except Nonsense:  # somebody between us and the server
        said = {}
    return complaint(response.status, said, response.headers.get("Retry-After"))
