"""Request bodies: read straight into one buffer each, a bounded number of bytes at a time, and not for ever.

A body takes its place before its first byte is read; what has none waits in the network's own buffers. Whoever is
slower than LEAST bytes per second, after GRACE seconds, loses the place (408): a slow client cannot block the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from .refusals import Refused, busy

Receive = Callable[[], Awaitable[Any]]

LEAST = 64 * 1024
GRACE = 10.0
PATIENCE = 30.0
"""Seconds a body may wait for its place."""


class Gone(Exception):
    """The other side has hung up."""


class Bodies:
    """Room for so many bytes of bodies at a time; who waits is served in turn."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, length: int) -> None:
        """A place for a body; it is to be given back."""
        if self.room >= length and not self._waiting:
            self.room -= length
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((length, turn))
        try:
            async with asyncio.timeout(PATIENCE):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give_back(length)  # it came in the same moment
            else:
                self._waiting.remove((length, turn))
            if isinstance(error, TimeoutError):
                raise busy("busy", "too many updates are on their way; try again") from None
            raise

    def give_back(self, length: int) -> None:
        """The body has been dealt with."""
        self.room += length
        while self._waiting and self.room >= self._waiting[0][0]:
            needed, turn = self._waiting.popleft()
            if not turn.done():
                self.room -= needed
                turn.set_result(None)


async def read(receive: Receive, length: int, message: Any) -> bytearray:
    """A body of exactly that many bytes, from its first message on."""
    body, filled = bytearray(length), 0
    try:
        async with asyncio.timeout(None) as limit:
            begun = asyncio.get_running_loop().time()
            while True:
                if message["type"] == "http.disconnect":
                    raise Gone
                chunk = message.get("body", b"")
                if filled + len(chunk) > length:
                    raise Refused(400, "malformed", "the body is longer than Content-Length says")
                body[filled : filled + len(chunk)] = chunk
                filled += len(chunk)
                if not message.get("more_body", False):
                    break
                limit.reschedule(begun + GRACE + filled / LEAST)
                message = await receive()
    except TimeoutError:
        raise Refused(408, "slow", f"{filled} of {length} bytes came; send at least {LEAST} bytes per second") from None
    if filled != length:
        raise Refused(400, "malformed", f"the body has {filled} bytes; Content-Length says {length}")
    return body


async def skip(receive: Receive, length: int) -> None:
    """Reads a body and forgets it; who sends it too slowly is not waited for."""
    try:
        async with asyncio.timeout(GRACE + length / LEAST):
            while (message := await receive()).get("more_body"):
                if message["type"] == "http.disconnect":
                    raise Gone
    except TimeoutError:
        raise Refused(408, "slow", f"send at least {LEAST} bytes per second") from None
