"""uvicorn's HTTP, with the limits a server among strangers needs: on headers, on silence and on connections.

A request that cannot be one is answered once, with the error's JSON, and the connection ends. Before it does, what the
other side is still sending is heard out for a moment: a connection that is closed while bytes wait to be read is reset,
and the answer with it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .bodies import LEAST, PIECE
from .deadline import Deadline
from .logs import fields, log
from .wire import Buffer

HEADER_BYTES = 16 * 1024
HEADERS = 64
URL_BYTES = 2048
PIPELINED = 16
"""Requests of one connection that may wait for their answers."""
LINGER = 5.0
"""Seconds the rest of a body is heard that nobody wants."""
FAREWELL = 3.0
"""Seconds the other side has to say that it has heard the end of TLS, and to hear that there is no place for it."""

FIRST_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class Limits(NamedTuple):
    """What a server puts up with."""

    idle: float
    """Seconds a connection may say nothing, or too slowly hear what it is told."""
    connections: int
    refused: Callable[[str], None]
    """Told the code of every request that is refused before anybody has looked at it."""


class _Unheard(Exception):
    """Raised in the parser's callbacks: nothing more of what has come is of interest."""


class _Gently:
    """A transport as a request sees it: whoever closes it lets the other side finish its sentence."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


class Connection(HttpToolsProtocol):
    """Gives up on the other side if it says nothing for too long, or too much before saying what for."""

    _in_body = False
    """Between the headers of a request and its end."""
    _head_bytes = 0
    """Of a request whose headers are coming."""
    _ended = False
    """Whether a request's end was in what has just come."""
    _deaf = False
    """Nothing more is heard; the connection ends when what is due has been answered."""
    _closing = False
    """The connection ends when all of the last answer is on its way: TLS cuts it off otherwise."""
    _stopping = False
    _paused = 0.0
    peer: str | None = None
    """The name in the certificate the other side has shown."""

    def __init__(self, config: uvicorn.Config, state: ServerState, limits: Limits) -> None:
        super().__init__(config=config, server_state=state, app_state={}, _loop=asyncio.get_running_loop())
        self._limits, self._idle = limits, limits.idle
        self._due: deque[RequestResponseCycle] = deque()
        """Requests that wait for their answers."""
        self._patience = limits.idle
        """Seconds the other side may still be slower at reading than it would have to be at sending."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody is there; whoever is too many is told so."""
        super().connection_made(transport)
        self._gently = cast(asyncio.Transport, _Gently(transport, self._end))
        self._speak = Deadline(self.loop, self._silence)
        """When the other side must have said what it has to say: a request's headers, the rest of a refused body."""
        self._hear = Deadline(self.loop, transport.abort)
        """When it must have read something, if there is something to read."""
        self.peer = _common_name(transport.get_extra_info("peercert"))
        if len(self.connections) > 2 * self._limits.connections:
            transport.abort()
        elif len(self.connections) > self._limits.connections:
            self._give_up(503, "busy", "too many connections; try again", "retry-after: 5\r\n")
            self._speak.set(FAREWELL)
        else:
            self._speak.set(self._idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is there any more."""
        self._speak.stop()
        self._hear.stop()
        for cycle in self._due:  # uvicorn tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    # -- what comes -------------------------------------------------------------------------------------------------

    def data_received(self, data: Buffer) -> None:
        """Bytes of one request or of several."""
        if self._deaf or self.transport.is_closing():
            return
        self._ended = False
        super().data_received(data)  # type: ignore[arg-type]  # the parser takes any buffer
        if not (self._in_body or self._ended or self._deaf):  # nothing but headers
            self._head_bytes += len(data)
            if self._head_bytes > HEADER_BYTES:
                self._too_much()

    def on_message_begin(self) -> None:
        """The parser: a request begins."""
        self._check()
        super().on_message_begin()
        self._chunked = False
        if self.peer is not None:
            self.scope["state"]["peer"] = self.peer
        self._head_bytes, self._field_bytes = 1, 0  # something has come
        self._speak.set(self._idle)

    def on_url(self, url: bytes) -> None:
        """The parser: some more of what is asked for."""
        self.url += url
        if len(self.url) > URL_BYTES:
            self._too_much()
            self._check()

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser: one more header."""
        super().on_header(name, value)
        self._chunked |= self.headers[-1][0] == b"transfer-encoding"
        self._field_bytes += len(name) + len(value)
        if len(self.headers) > HEADERS or self._field_bytes > HEADER_BYTES:
            self._too_much()
            self._check()

    def on_headers_complete(self) -> None:
        """The parser: that was the head of the request."""
        self._speak.clear()
        if self._chunked:  # trailers would have no limit
            self._give_up(411, "length", "send a Content-Length, not a chunked body")
        elif len(self._due) >= PIPELINED:
            self._give_up(503, "busy", "too many requests at once", "retry-after: 1\r\n")
        self._check()
        self._in_body = True
        super().on_headers_complete()
        self.cycle.transport = self._gently
        self._due.append(self.cycle)

    def on_message_complete(self) -> None:
        """The parser: that was all of it."""
        self._in_body, self._ended, self._head_bytes = False, True, 0
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered before its end
            self._speak.set(self._idle)

    def send_400_response(self, msg: str) -> None:
        """The parser cannot make sense of it."""
        self._give_up(400, "malformed", "this is not HTTP")

    def _unsupported_upgrade_warning(self) -> None:
        """Another protocol was offered: the request is answered in this one, and the parser is of no more use."""
        self._deaf = True
        self.cycle.keep_alive = False
        if self.cycle.response_complete:
            self._end()

    def _check(self) -> None:
        if self._deaf:
            raise _Unheard

    # -- what goes --------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """A request has been answered; the next one's turn."""
        self._due.popleft()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._deaf:
            self._speak.set(LINGER if self._in_body else self._idle)  # what is left of a body is not wanted

    def pause_writing(self) -> None:
        """The other side does not read as fast as it is written to."""
        super().pause_writing()
        self._paused = self.loop.time()
        self._hear.set(self._patience)

    def resume_writing(self) -> None:
        """About a piece has been read."""
        super().resume_writing()
        self._hear.clear()
        self._patience = min(self._idle, self._patience + self._paused - self.loop.time() + PIECE / LEAST)
        if self._closing and not self.flow.write_paused:
            self.transport.close()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _silence(self) -> None:
        if not self._deaf and (self._due or (self._head_bytes and not self._in_body)):
            self._give_up(408, "slow", "the request's headers did not come in time")
        else:
            self._close()

    def _too_much(self) -> None:
        self._give_up(431, "headers", "the headers are too long or too many")

    def _give_up(self, status: int, code: str, text: str, lines: str = "") -> None:
        """No more requests; the last answer says why, unless others are due: it would be taken for theirs."""
        if self._deaf or self.transport.is_closing():
            return
        self._deaf = True
        self._speak.clear()
        if self._due:
            self._due[-1].keep_alive = False
        else:
            self._answer(status, code, text, lines)
            self._end()

    def _answer(self, status: int, code: str, text: str, lines: str) -> None:
        body = json.dumps({"error": text, "code": code})
        lines = f"connection: close\r\ncontent-type: application/json\r\n{lines}content-length: {len(body)}\r\n"
        self.transport.write(f"{FIRST_LINES[status]}{lines}\r\n{body}".encode())
        self._limits.refused(code)
        log.debug("a request was refused: %d %s", status, code, extra=fields(status=status, code=code))

    def _end(self) -> None:
        """Closes the connection: at once where all that was announced has come, else after a moment."""
        if self.transport.is_closing() or not (self._in_body or self._deaf):
            self._close()
            return
        self._deaf = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._speak.set(0.0 if self._stopping else LINGER)

    def _close(self) -> None:
        if self.flow.write_paused:
            self._deaf = self._closing = True
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops: what is due is still answered."""
        self._stopping = True
        if self._due:
            super().shutdown()
        else:
            self._close()


def _common_name(certificate: Any) -> str | None:
    """Whom a certificate is made out to."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None
