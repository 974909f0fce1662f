"""The short way of an update: from the network into its own buffer, no parser, no task, and one write back.

It is for an update as clients send it: a plain head that has come whole, and nothing before it that waits for an
answer. All else goes through the parser (http.py) and the application (service.py), which give the same answers: what
is not understood here is never refused here.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from . import bodies
from .arrival import Arrival
from .bodies import GRACE, LEAST, PATIENCE, PIECE
from .deadline import Deadline
from .http import FIRST_LINES, HEADERS, Connection, Limits
from .intake import SHORT
from .refusals import Refused, stopping
from .replies import Reply
from .wire import Buffer, Headers

_FIRST_LINE = re.compile(rb"POST /v1/jobs/([0-9]{1,18})/update(?:\?next=([01]))? HTTP/1\.1")
_HEADER = re.compile(rb"([A-Za-z0-9-]++): *+([ -~]*+)(?<! )")
"""It takes less than HTTP does, in linear time."""
_FRAMING = frozenset(("transfer-encoding", "upgrade", "expect", "trailer"))
"""Headers that say that a request is not as long as it looks, or is to be answered otherwise."""
_LONGEST = 256
"""Bytes of a header that may be remembered: strangers send them, too."""
_HEAD_BYTES = 2048

_INCOMING = memoryview(bytearray(SHORT))
"""What has come and is dealt with at once, of whatever connection."""


Head = tuple[int, bool, dict[str, str], int]
"""Of a request that may take the short way: the job, whether the next one is asked for, the headers, where it ends."""

Begin = Callable[[int, bool, Headers, "str | None"], "Arrival | None"]
"""From the head of an update, and whom the other side's certificate names; None: it is to take the ordinary way."""


def read_head(data: Buffer, length: int) -> Head | None:
    """The head of an update that stands whole at the beginning of the data."""
    text = bytes(data[: min(length, _HEAD_BYTES)])
    end = text.find(b"\r\n\r\n")
    first, *lines = text[: max(0, end)].split(b"\r\n")
    found = _FIRST_LINE.fullmatch(first)
    if found is None or not 1 <= len(lines) <= HEADERS:
        return None
    try:
        headers = dict(map(_header, lines))
    except ValueError:
        return None
    if len(headers) < len(lines):  # one is there twice
        return None
    return int(found[1]), found[2] == b"1", headers, end + 4


@lru_cache(4096)  # most headers are those of another update before
def _header(line: bytes) -> tuple[str, str]:
    """A header, its name in lower case; ValueError if it is not plain, or changes what the request is."""
    found = _HEADER.fullmatch(line) if len(line) <= _LONGEST else None
    if found is None:
        raise ValueError(line)
    name, value = found[1].decode().lower(), found[2].decode()
    if name in _FRAMING or (name == "connection" and value != "keep-alive"):
        raise ValueError(line)
    return name, value


class _Turn:
    """A request on the short way, as far as uvicorn looks at one."""

    message_event = asyncio.Event()  # nobody waits for it

    def __init__(self) -> None:
        self.keep_alive, self.response_complete, self.disconnected = True, True, False


class ShortWay(Connection):
    """A connection that asks the loop to put bodies where they belong."""

    _arrival: Arrival | None = None
    """What is being received."""
    _begun = 0.0
    _going: deque[Buffer] | None = None
    """What is left of an answer."""

    def __init__(self, config: uvicorn.Config, state: ServerState, limits: Limits, begin: Begin) -> None:
        super().__init__(config, state, limits)
        self._begin = begin
        self._turn = cast(RequestResponseCycle, _Turn())
        self._pace = Deadline(self.loop, self._check_pace)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more; what was coming is given up."""
        self._pace.stop()
        self._going = None
        if self._arrival is not None:
            self._arrival.abandon()
            self._arrival = None
        super().connection_lost(exc)

    # -- what comes -------------------------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes are to go."""
        arrival = self._arrival
        return _INCOMING if arrival is None or arrival.turn is not None else arrival.space()

    def buffer_updated(self, nbytes: int) -> None:
        """They have come."""
        arrival = self._arrival
        if arrival is None:
            busy = self._due or self._head_bytes or self._in_body or self._deaf
            if busy or not self._take_up(nbytes):
                self.data_received(_INCOMING[:nbytes])
        elif arrival.turn is not None:  # reading has been stopped; this was on its way
            arrival.feed(_INCOMING[:nbytes])
        else:
            arrival.filled += nbytes
            if arrival.filled == arrival.length:
                self._arrived(arrival)

    def _take_up(self, nbytes: int) -> bool:
        """Begins an update; false if nothing was done with what has come."""
        head = read_head(_INCOMING, nbytes)
        if head is None or self.transport.is_closing():
            return False
        job, more, headers, start = head
        arrival = self._begin(job, more, headers, self.peer)
        if arrival is None:
            return False
        turn = self._turn
        turn.response_complete, self.cycle = False, turn
        self._due.append(turn)
        self._speak.clear()
        end = start + arrival.length
        if arrival.turn is not None:
            self._wait(arrival, _INCOMING[start:nbytes])
        elif nbytes < end:
            self._arrival, self._in_body = arrival, True
            arrival.feed(_INCOMING[start:nbytes])
            self._keep_pace()
        else:
            arrival.feed(_INCOMING[start:end])
            arrival.finish(self._reply)
            if nbytes > end:
                self.data_received(_INCOMING[end:nbytes])
        return True

    def _wait(self, arrival: Arrival, early: memoryview) -> None:
        """There is no place for the body now."""
        assert arrival.turn is not None
        self._arrival, self._in_body = arrival, True
        arrival.feed(early)
        self.flow.pause_reading()
        arrival.turn.add_done_callback(self._placed)
        self._pace.set(PATIENCE)

    def _placed(self, turn: asyncio.Future[None]) -> None:
        arrival = self._arrival
        if arrival is None or arrival.turn is not turn:
            return
        rest = arrival.place()
        self.flow.resume_reading()
        if arrival.filled < arrival.length:
            self._keep_pace()
        else:
            self._arrived(arrival)
            self.data_received(rest)

    def _keep_pace(self) -> None:
        self._begun = self.loop.time()
        self._pace.set(GRACE)

    def _check_pace(self) -> None:
        arrival = self._arrival
        assert arrival is not None
        if arrival.turn is not None:
            self._lose(bodies.crowded(), "retry-after: 1\r\n")
            return
        left = self._begun + GRACE + arrival.filled / LEAST - self.loop.time()
        if left > 0:
            self._pace.set(left)
        else:
            self._lose(bodies.too_slow(arrival.filled, arrival.length))

    def _lose(self, why: Refused, lines: str = "") -> None:
        arrival, self._arrival = self._arrival, None
        assert arrival is not None
        self._pace.clear()
        arrival.abandon()
        self._due.clear()
        self._give_up(why.status, why.code, str(why), lines)

    def _arrived(self, arrival: Arrival) -> None:
        self._in_body, self._arrival = False, None
        self._pace.clear()
        arrival.finish(self._reply)

    # -- what goes --------------------------------------------------------------------------------------------------

    def _reply(self, reply: Reply) -> None:
        turn = self._turn
        if turn.disconnected or self.transport.is_closing():
            return
        status, kind, parts, lines = reply
        size = sum(map(len, parts))
        end = "" if turn.keep_alive else "connection: close\r\n"
        text = f"{FIRST_LINES[status]}content-type: {kind}\r\ncontent-length: {size}\r\n{lines}{end}\r\n"
        head = text.encode("latin-1", "replace")
        if size > PIECE or self.flow.write_paused:
            self._going = deque([head, *bodies.pieces(parts)])
            self._go_on()
        else:
            self.transport.writelines([head, *parts])
            self._replied()

    def _go_on(self) -> None:
        """Writes as much of an answer as the other side is ready to read."""
        while self._going and not self.flow.write_paused:
            self.transport.write(self._going.popleft())
        if not self._going:
            self._going = None
            self._replied()

    def _replied(self) -> None:
        self._turn.response_complete = True
        if not self._turn.keep_alive:
            self._end()
        self.on_response_complete()

    def resume_writing(self) -> None:
        """About a piece has been read; on with the answer."""
        super().resume_writing()
        if self._going is not None:
            self._go_on()

    def shutdown(self) -> None:
        """The server stops: a body that has no place yet would wait in vain."""
        if self._arrival is not None and self._arrival.turn is not None:
            self._stopping = True
            self._lose(stopping(), "retry-after: 2\r\n")
        else:
            super().shutdown()
