"""Request bodies: read straight into one buffer each, a bounded number of bytes at a time, and not for ever.

A body takes its place before its first byte is read; what has none waits in the network's own buffers. Whoever is
slower than LEAST bytes per second, after GRACE seconds, loses the place (408): a slow client cannot block the others.
A model that is being sent and has become an old one takes a place, too; but there is always one for a body.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from mmap import mmap
from typing import Any

import numpy as np

from .refusals import Refused, busy
from .wire import Buffer

Receive = Callable[[], Awaitable[Any]]

LEAST = 64 * 1024
GRACE = 10.0
PIECE = 128 * 1024
"""Bytes of an answer that are handed to the network at a time: what TLS is given, it keeps encrypted in memory."""
LARGE = 1 << 20
MOST_KEPT = 2
"""Large bodies whose memory is used again: the system takes longer to find some than the network to fill it."""
PATIENCE = 30.0
"""Seconds a body may wait for its place."""


class Gone(Exception):
    """The other side has hung up."""


class Bodies:
    """Room for so many bytes at a time; who waits is served in turn."""

    def __init__(self, room: int) -> None:
        self.room, self._placed = room, 0
        self._spare: deque[mmap] = deque(maxlen=MOST_KEPT)
        """Memory of large bodies which nobody sees any more."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, length: int) -> None:
        """A place for a body; it is to be given back."""
        turn = self.ask(length)
        if turn is None:
            return
        try:
            async with asyncio.timeout(PATIENCE):
                await turn
        except BaseException as error:
            self.withdraw(length, turn)
            if isinstance(error, TimeoutError):
                raise crowded() from None
            raise

    def has_room(self, length: int) -> bool:
        """Whether there is a place now."""
        return not self._waiting and (self.room >= length or not self._placed)

    def ask(self, length: int) -> asyncio.Future[None] | None:
        """A place for a body, now or when that is done."""
        if self.has_room(length):
            self.place(length)
            return None
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((length, turn))
        return turn

    def withdraw(self, length: int, turn: asyncio.Future[None]) -> None:
        """The place is not needed any more."""
        if turn.done() and not turn.cancelled():
            self.give_back(length)  # it came in the same moment
        else:
            with suppress(ValueError):  # passed over already
                self._waiting.remove((length, turn))
            self._serve()  # those behind it may fit

    def blank(self, length: int) -> memoryview:
        """The memory for a body; a large one has that of an earlier one, which nobody sees any more."""
        try:
            return self._blank(length)
        except (MemoryError, OSError):
            raise busy("busy", "the server has no memory for another update now; try again", 5.0) from None

    def _blank(self, length: int) -> memoryview:
        if length < LARGE:
            return np.empty(length, np.uint8).data
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = mmap(-1, length)  # apart from the heap, which would not shrink again
        if len(memory) != length:
            memory = mmap(-1, length)
        body = np.frombuffer(memory, np.uint8)
        weakref.finalize(body, self._spare.append, memory).atexit = False  # from whatever thread: both are one step
        return body.data

    def give_back(self, length: int) -> None:
        """The body has been dealt with."""
        self._placed -= 1
        self.room += length
        if self._waiting:
            self._serve()

    def lend(self, model: memoryview) -> None:
        """A place for an old model, until nobody sends it any more."""
        self.room -= model.nbytes
        weakref.finalize(model.obj, self._free, model.nbytes)

    def place(self, length: int) -> None:
        """A place for a body for which there is room; it is to be given back."""
        self.room -= length
        self._placed += 1

    def _free(self, length: int) -> None:
        self.room += length
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (self.room >= self._waiting[0][0] or not self._placed):
            length, turn = self._waiting.popleft()
            if not turn.done():
                self.place(length)
                turn.set_result(None)


def crowded() -> Refused:
    """To somebody whose body found no place in time."""
    return busy("busy", "too many updates are on their way; try again")


def too_slow(filled: int, length: int) -> Refused:
    """To somebody whose body did not come in time."""
    return Refused(408, "slow", f"{filled} of {length} bytes came; send at least {LEAST} bytes per second")


def pieces(parts: Iterable[Buffer]) -> list[Buffer]:
    """The body of an answer, as it is handed to the network."""
    return [part[begin : begin + PIECE] for part in parts for begin in range(0, len(part), PIECE)]


async def read(receive: Receive, body: memoryview) -> None:
    """A body of exactly as many bytes as there is room for."""

    def take(filled: int, chunk: bytes) -> None:
        body[filled : filled + len(chunk)] = chunk

    await _read(receive, len(body), take)


async def skip(receive: Receive, length: int) -> None:
    """A body of exactly that many bytes, for nobody."""
    await _read(receive, length, lambda filled, chunk: None)


async def _read(receive: Receive, length: int, take: Callable[[int, bytes], None]) -> None:
    filled, more = 0, length > 0
    try:
        async with asyncio.timeout(GRACE) as limit:
            begun = asyncio.get_running_loop().time()
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                chunk, more = message.get("body", b""), message.get("more_body", False)
                if filled + len(chunk) > length:
                    raise Refused(400, "malformed", "the body is longer than Content-Length says")
                take(filled, chunk)
                filled += len(chunk)
                if more:
                    limit.reschedule(begun + GRACE + filled / LEAST)
    except TimeoutError:
        raise too_slow(filled, length) from None
    if filled != length:
        raise Refused(400, "malformed", f"the body has {filled} bytes; Content-Length says {length}")
