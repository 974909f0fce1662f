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
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .bodies import GRACE, LEAST, PIECE

HEADER_BYTES = 16 * 1024
HEADERS = 64
URL_BYTES = 2048
PIPELINED = 16
"""Requests of one connection that may wait for their answers."""
LINGER = 5.0
"""Seconds the rest of a body is heard that nobody wants."""
HANDSHAKE = 15.0
"""Seconds the beginning of TLS may take."""
FAREWELL = 3.0
"""Seconds the other side has to say that it has heard the end of TLS, and to hear that there is no place for it."""


class _Unheard(Exception):
    """Raised in the parser's callbacks: nothing more of what has come is of interest."""


class _Gently:
    """A transport as a request sees it: whoever closes it lets the other side finish its sentence."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


def limited(idle: float, connections: int, refused: Callable[[str], None]) -> type[HttpToolsProtocol]:
    """A protocol that gives up on connections that say nothing for so long, or too much before saying what for.

    `refused` is told the code of every request that was refused here.
    """

    class Limited(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        """Runs while the other side has something to say: a request's headers, the rest of a refused body."""
        _stall: asyncio.TimerHandle | None = None
        """Runs while the other side has something to read."""
        _patience = idle
        """Seconds it may still be slower at reading than it would have to be at sending."""
        _paused = 0.0
        _in_body = False
        _ended = False
        _head_bytes = 0
        _deaf = False
        """Nothing more is heard; the connection ends when what is due has been answered."""
        _closing = False
        """The connection ends when all of the last answer is on its way: TLS cuts it off otherwise."""
        _stopping = False
        _peer: str | None = None
        """The name in the certificate the other side has shown."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._due: deque[RequestResponseCycle] = deque()
            self._gently = cast(asyncio.Transport, _Gently(transport, self._end))
            self._peer = _common_name(transport.get_extra_info("peercert"))
            if len(self.connections) > 2 * connections:
                transport.abort()
            elif len(self.connections) > connections:
                self._give_up(503, "busy", "too many connections; try again", b"retry-after: 5\r\n")
                self._watch(FAREWELL)
            else:
                self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            self._stop_stall()
            self._unset_keepalive_if_required()
            for cycle in self._due:  # uvicorn tells the last one only
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(exc)

        # -- what comes ---------------------------------------------------------------------------------------------

        def data_received(self, data: bytes) -> None:
            if self._deaf or self.transport.is_closing():
                return
            self._ended = False
            super().data_received(data)
            if not (self._in_body or self._ended or self._deaf):  # nothing but headers
                self._head_bytes += len(data)
                if self._head_bytes > HEADER_BYTES:
                    self._too_much()
                elif self._timer is None:  # an empty line: uvicorn has stopped its own timer for it
                    self._watch()

        def on_message_begin(self) -> None:
            self._check()
            super().on_message_begin()
            if self._peer is not None:
                self.scope["state"]["peer"] = self._peer
            self._head_bytes, self._field_bytes = 1, 0  # something has come
            self._watch()

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            if len(self.url) > URL_BYTES:
                self._too_much()
                self._check()

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._field_bytes += len(name) + len(value)
            if len(self.headers) > HEADERS or self._field_bytes > HEADER_BYTES:
                self._too_much()
                self._check()

        def on_headers_complete(self) -> None:
            self._unwatch()
            if any(name == b"transfer-encoding" for name, _ in self.headers):  # trailers would have no limit
                self._give_up(411, "length", "send a Content-Length, not a chunked body")
            elif len(self._due) >= PIPELINED:
                self._give_up(503, "busy", "too many requests at once", b"retry-after: 1\r\n")
            self._check()
            self._in_body = True
            super().on_headers_complete()
            self.cycle.transport = self._gently
            self._due.append(self.cycle)

        def on_message_complete(self) -> None:
            self._in_body, self._ended, self._head_bytes = False, True, 0
            super().on_message_complete()
            if self.cycle.response_complete:  # it was answered before its end
                self._watch()

        def send_400_response(self, msg: str) -> None:
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

        # -- what goes ----------------------------------------------------------------------------------------------

        def on_response_complete(self) -> None:
            self._due.popleft()
            super().on_response_complete()
            if self._in_body and self.cycle.response_complete and not self._deaf:  # what is left of it is not wanted
                self._unset_keepalive_if_required()
                self._watch(LINGER)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stop_stall()
            self._paused = self.loop.time()
            self._stall = self.loop.call_later(self._patience, self.transport.abort)

        def resume_writing(self) -> None:
            """About a piece has been read."""
            super().resume_writing()
            self._stop_stall()
            self._patience = min(idle, self._patience + self._paused - self.loop.time() + PIECE / LEAST)
            if self._closing:
                self.transport.close()

        def _stop_stall(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        # -- the end ------------------------------------------------------------------------------------------------

        def _watch(self, seconds: float = idle) -> None:
            self._unwatch()
            self._timer = self.loop.call_later(seconds, self._silence)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _silence(self) -> None:
            if not self._deaf and (self._due or (self._head_bytes and not self._in_body)):
                self._give_up(408, "slow", "the request's headers did not come in time")
            else:
                self._close()

        def _too_much(self) -> None:
            self._give_up(431, "headers", "the headers are too long or too many")

        def _give_up(self, status: int, code: str, text: str, more: bytes = b"") -> None:
            """No more requests; the last answer says why, unless others are due: it would be taken for theirs."""
            if self._deaf or self.transport.is_closing():
                return
            self._deaf = True
            self._unwatch()
            if self._due:
                self._due[-1].keep_alive = False
            else:
                self._answer(status, code, text, more)
                self._end()

        def _answer(self, status: int, code: str, text: str, more: bytes) -> None:
            body = json.dumps({"error": text, "code": code}).encode()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/json\r\n" % (status, PHRASES[status])
                + b"%bcontent-length: %d\r\n\r\n%b" % (more, len(body), body)
            )
            refused(code)

        def _end(self) -> None:
            """Closes the connection: at once where all that was announced has come, else after a moment."""
            if self.transport.is_closing() or not (self._in_body or self._deaf):
                self._close()
                return
            self._deaf = True
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._watch(0.0 if self._stopping else LINGER)

        def _close(self) -> None:
            if self.flow.write_paused:
                self._deaf = self._closing = True
            else:
                self.transport.close()

        def timeout_keep_alive_handler(self) -> None:
            self._close()

        def shutdown(self) -> None:
            self._stopping = True
            if self._due:
                super().shutdown()
            else:
                self._close()

    return Limited


PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    411: b"Length Required",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def _common_name(certificate: Any) -> str | None:
    """Whom a certificate is made out to."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None


class Server(uvicorn.Server):
    """uvicorn's, on sockets that listen already, with a limit on handshakes."""

    async def startup(self, sockets: Any = None) -> None:
        """Begins to accept connections."""
        config, loop = self.config, asyncio.get_running_loop()

        def made() -> asyncio.Protocol:
            protocol = cast(type[HttpToolsProtocol], config.http_protocol_class)
            return protocol(config=config, server_state=self.server_state, app_state={}, _loop=loop)

        times: dict[str, Any] = {}
        if config.ssl:
            times = {"ssl_handshake_timeout": HANDSHAKE, "ssl_shutdown_timeout": FAREWELL}
        self.servers = [
            await loop.create_server(made, sock=each, ssl=config.ssl, backlog=config.backlog, **times)
            for each in sockets
        ]
        self.started = True


def configured(app: Any, protocol: type[HttpToolsProtocol], idle: float, **more: Any) -> uvicorn.Config:
    """uvicorn's settings: no access log, no lifespan, no web sockets, no headers that say who serves."""
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=cast(int, idle),
        timeout_graceful_shutdown=int(GRACE) + 2,  # a body that does not come is given up a moment before
        backlog=1024,
        **more,
    )
