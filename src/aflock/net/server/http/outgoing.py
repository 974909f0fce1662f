"""Writes the responses of a connection as fast as its client reads; cuts off a client that reads too slowly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from http import HTTPStatus

from ...protocol.wire import BytesLike
from ..logs import log
from .limits import MIN_RATE, PIECE
from .response import Response
from .uptime import Deadline, Uptime

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_WITHOUT_BODY = (204, 304)
"""Statuses whose responses have no body, and must not have headers that describe one."""


class Outgoing:
    """Writes to the transport of one connection.

    A small response is written at once. Of a large one the transport gets a piece at a time, and the next when the
    client has read most of the last: so a slow client costs one piece of memory, not an encrypted copy of a model.

    Time for reading: a client may read more slowly than MIN_RATE for `idle` seconds in all. Every second in which the
    transport's buffer is full costs one of them, and every piece the client reads earns as many back as the piece takes
    at MIN_RATE, up to `idle`. A client that has none left is cut off.
    """

    def __init__(self, transport: asyncio.Transport, clock: Uptime, idle: float) -> None:
        self._transport, self._clock, self._idle = transport, clock, idle
        self.paused = False
        """Whether the transport's buffer is full."""
        self._read_deadline = Deadline(clock, transport.abort)
        """When the client must have read some of the transport's buffer."""
        self._seconds_left = idle
        """Seconds for which the client may still be too slow."""
        self._paused_since = 0.0
        self._unwritten: deque[BytesLike] = deque()
        """The pieces of the current response that the transport has not got yet."""
        self._on_written: Callable[[], None] = lambda: None
        self._stream: asyncio.Task[None] | None = None
        """The task that writes a streamed response."""
        self._resumed: asyncio.Future[None] | None = None
        """What that task waits for while the transport's buffer is full."""

    def send(self, response: Response, last: bool, head_only: bool, on_written: Callable[[], None]) -> bool:
        """Writes a response, or its head only; `last`: the connection ends with this response.

        Returns true if the transport has got all of it. If not, `on_written` is called when the transport has.
        """
        _, _, parts, _, stream = response
        size = sum(map(len, parts))
        head = _head(response, size, last)
        if head_only:
            parts = ()
        if stream is not None and not head_only:
            self._stream = self._clock.loop.create_task(self._send_stream(head, stream, not last, on_written))
        elif self.paused or size > PIECE:  # paused: the client has not read enough of the responses before this one
            self._unwritten, self._on_written = deque([head, *_pieces(parts)]), on_written
            self._write_pieces()
        else:
            # In one call, so that head and body leave in one packet if they fit: the socket has no Nagle algorithm.
            self._transport.writelines([head, *parts])
            return True
        return False

    def _write_pieces(self) -> None:
        """Writes pieces until the transport's buffer is full; `resume` goes on."""
        while self._unwritten and not self.paused:
            self._transport.write(self._unwritten.popleft())
        if not self._unwritten:
            on_written, self._on_written = self._on_written, lambda: None
            on_written()

    async def _send_stream(
        self, head: bytes, parts: AsyncIterator[BytesLike], chunked: bool, on_written: Callable[[], None]
    ) -> None:
        try:
            await self._write(head)
            async for part in parts:
                if part:  # an empty chunk would mean the end of the body
                    await self._write(b"%x\r\n%b\r\n" % (len(part), bytes(part)) if chunked else bytes(part))
        except Exception:
            log.exception("sending a streamed response failed")
            self._transport.abort()  # not closed: the client would take what it has got for the whole response
            return
        finally:
            if hasattr(parts, "aclose"):  # a generator that has not ended must run its `finally` blocks now
                await parts.aclose()
        if chunked:
            self._transport.write(b"0\r\n\r\n")
        on_written()

    async def _write(self, data: bytes) -> None:
        self._transport.write(data)
        if self.paused:
            self._resumed = self._clock.loop.create_future()
            await self._resumed

    # -- called by the connection -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """The transport's buffer is full: the client has to read some of it in time."""
        self.paused, self._paused_since = True, self._clock.now()
        self._read_deadline.set(self._seconds_left)

    def resume(self) -> None:
        """The client has read about a piece: goes on with the response."""
        self.paused = False
        self._read_deadline.clear()
        spent = self._clock.now() - self._paused_since
        self._seconds_left = min(self._idle, self._seconds_left - spent + PIECE / MIN_RATE)
        if self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)
        if self._unwritten:
            self._write_pieces()

    def stop(self) -> None:
        """The connection is lost: drops what is not written, and cancels a streamed response."""
        self._read_deadline.stop()
        self._unwritten.clear()
        self._on_written = lambda: None
        if self._stream is not None:
            self._stream.cancel()


def _head(response: Response, size: int, last: bool) -> bytes:
    """The first line and the headers of a response whose body has `size` bytes.

    A stream is sent in chunks. If it is the last response, it is sent as it is, and its end is the end of the
    connection.
    """
    status, kind, _, lines, stream = response
    if stream is not None:
        lines = f"content-type: {kind}\r\n{lines}" + ("" if last else "transfer-encoding: chunked\r\n")
    elif status not in _WITHOUT_BODY:
        lines = f"content-type: {kind}\r\ncontent-length: {size}\r\n{lines}"
    end = "connection: close\r\n" if last else ""
    # Headers are Latin-1; the reason of a receipt may hold other characters: it may quote an error of a rule.
    return f"{_STATUS_LINES[status]}{lines}{end}\r\n".encode("latin-1", "replace")


def _pieces(parts: Iterable[BytesLike]) -> list[BytesLike]:
    """The parts of a body, cut into pieces of at most PIECE bytes; slices of the same memory, not copies."""
    return [part[begin : begin + PIECE] for part in parts for begin in range(0, len(part), PIECE)]
