"""Memory for the bodies of updates: a bounded number of bytes, reserved in the order in which uploads ask for it.

An upload (upload.py) reserves the bytes of its body before the first of them is read; until it has them, the body
waits in the buffers of the network. A model that is still being sent to clients although a newer version has replaced
it takes bytes of the same memory, too. But one body can always be received, however many bytes such models or the body
itself take: without that rule a client that reads slowly could stop the federation.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from contextlib import suppress
from mmap import mmap

import numpy as np

from ..protocol.refusals import busy

LARGE = 1 << 20
"""Bytes from which on a body gets a memory mapping of its own."""
MOST_KEPT = 2
"""Mappings of large bodies that are kept for the next: the system takes longer to find and clear the pages of a new one
than the network to fill it."""


class Bodies:
    """Reserves bytes for bodies, lets uploads wait for bytes, first come, first served, and makes the buffers."""

    def __init__(self, memory: int) -> None:
        """`memory` is the number of bytes that may be reserved at a time."""
        self.free, self.in_use = memory, 0
        """Bytes that are not reserved (below zero while one body or old models exceed the memory); bodies that have
        reserved theirs."""
        self.reserved = 0
        """How many reservations there have been so far: uploads that wait compare it to see whether others move."""
        self._spare: deque[mmap] = deque(maxlen=MOST_KEPT)
        """Mappings of large bodies to which nothing refers any more."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Bytes, and the future that is done when they are reserved; first come, first served."""

    @property
    def waiting(self) -> int:
        """How many uploads wait for memory."""
        return len(self._waiting)

    def reserve(self, length: int) -> asyncio.Future[None] | None:
        """Reserves memory for a body: at once (None), or when the returned future is done."""
        # Not while others wait: a small body that fits must not overtake the large one that waits for more.
        if not self._waiting and (self.free >= length or not self.in_use):
            self._take(length)
            return None
        reservation: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((length, reservation))
        return reservation

    def cancel(self, length: int, reservation: asyncio.Future[None]) -> None:
        """Withdraws a reservation whose upload has ended while it waited."""
        if reservation.done() and not reservation.cancelled():
            self.release(length)  # it was granted in the same moment, and the upload has not learnt of it
        else:
            with suppress(ValueError):  # `_serve` has passed over it already
                self._waiting.remove((length, reservation))
            self._serve()  # a shorter body behind it may fit

    def allocate(self, length: int) -> memoryview:
        """Makes the buffer of a body whose memory is reserved; a large one may reuse the mapping of an earlier body."""
        try:
            return np.empty(length, np.uint8).data if length < LARGE else self._allocate_large(length)
        except (MemoryError, OSError):
            raise busy("busy", "the server has no memory for another update now; try again", 5.0) from None

    def _allocate_large(self, length: int) -> memoryview:
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = mmap(-1, length)  # not from the heap, which would not shrink again
        if len(memory) != length:
            memory = mmap(-1, length)
        # The journal's thread, the rule and arrays made from the body may keep views of it for any length of time. Each
        # view keeps the array `body` alive, so the finalizer runs when the last view is gone, and only then can the
        # mapping be used again. It may run in any thread: `append` and `pop` of a deque are atomic.
        body = np.frombuffer(memory, np.uint8)
        weakref.finalize(body, self._spare.append, memory).atexit = False
        return body.data

    def release(self, length: int) -> None:
        """Ends the reservation of a body that is not needed any more."""
        self.in_use -= 1
        self.free += length
        if self._waiting:
            self._serve()

    def count_old_model(self, model: memoryview) -> None:
        """Counts a model that a newer version has replaced as reserved bytes, until no response refers to it."""
        self.free -= model.nbytes
        weakref.finalize(model.obj, self._release_model, model.nbytes)

    def _release_model(self, length: int) -> None:
        self.free += length
        self._serve()

    def _take(self, length: int) -> None:
        self.free -= length
        self.in_use += 1
        self.reserved += 1

    def _serve(self) -> None:
        """Reserves memory for the uploads that wait, in their order, as long as there is some."""
        # It stops at the first that does not fit, though one behind it may: else large bodies would starve.
        while self._waiting and (self.free >= self._waiting[0][0] or not self.in_use):
            length, reservation = self._waiting.popleft()
            if not reservation.done():
                self._take(length)
                reservation.set_result(None)
