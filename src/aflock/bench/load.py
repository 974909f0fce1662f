"""Load for a server: many clients in one process, each a plain socket that sends ready-made requests.

An HTTP library would take longer for a request than the server for its answer. This one writes bytes it made before
and reads from the answer what it needs: the status, the length of the body and the number of the next job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import cast

Headers = dict[bytes, bytes]

Following = Callable[[int, Headers], "list[bytes | memoryview] | None"]
"""From the status and headers of an answer to the next request, in pieces; None: the end."""


@dataclass
class LoadTally:
    """The answers that were received."""

    answers: int = 0
    refused: int = 0
    bytes_up: int = 0
    statuses: dict[int, int] = field(default_factory=dict)


class Caller(asyncio.Protocol):
    """One connection: sends a request, waits for the whole answer, and asks what to send next."""

    def __init__(self, following: Following, tally: LoadTally) -> None:
        self._following, self._tally = following, tally
        self._head = b""
        self._missing = -1
        self._status, self._headers = 0, {}  # type: int, Headers
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: sends the first request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is one, but not a subclass
        self._next()

    def data_received(self, data: bytes) -> None:
        """asyncio: a part of an answer has arrived."""
        if self._missing < 0:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            self._parse(self._head[:end])
            data, self._head = self._head[end + 4 :], b""
        self._missing -= len(data)
        if self._missing == 0:
            self._missing = -1
            self._count()
            self._next()

    def _parse(self, head: bytes) -> None:
        first, *lines = head.split(b"\r\n")
        self._status = int(first[9:12])
        pairs = (line.split(b":", 1) for line in lines)
        self._headers = {name.lower(): value.strip() for name, value in pairs}
        self._missing = int(self._headers.get(b"content-length", b"0"))

    def _count(self) -> None:
        tally = self._tally
        tally.answers += 1
        tally.refused += self._status >= 400
        tally.statuses[self._status] = tally.statuses.get(self._status, 0) + 1

    def _next(self) -> None:
        pieces = self._following(self._status, self._headers)
        if pieces is None:
            self._transport.close()
            return
        for piece in pieces:
            self._tally.bytes_up += len(piece)
            self._transport.write(piece)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: the connection has ended."""
        if not self.done.done():
            self.done.set_result(None)


async def call(port: int, callers: list[Following]) -> LoadTally:
    """Runs all callers at once until each has ended."""
    tally, loop, made = LoadTally(), asyncio.get_running_loop(), []
    for following in callers:
        _, protocol = await loop.create_connection(partial(Caller, following, tally), "127.0.0.1", port)
        made.append(protocol)
    await asyncio.gather(*(protocol.done for protocol in made))
    return tally
