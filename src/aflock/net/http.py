"""uvicorn's HTTP, with the limits a server among strangers needs: on headers, on silence and on connections.

A request that cannot be one is answered once, with the error's JSON, and the connection ends. Before it does, what the
other side is still sending is heard out for a moment: a connection that is closed while bytes wait to be read is reset,
and the answer with it.

An update takes a short way (intake.py): its body is read from the network straight into its own buffer, past the
parser, and its answer is written without a task of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from . import bodies
from .bodies import GRACE, LEAST, PATIENCE, PIECE
from .intake import SHORT, Arrival
from .logs import fields, log
from .refusals import Refused, stopping
from .replies import Reply
from .wire import Buffer

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


Begin = Callable[[bytes, Sequence[tuple[bytes, bytes]], "str | None"], "Arrival | None"]
"""From the target and the headers of a request, and whom the other side's certificate names."""

_INCOMING = memoryview(bytearray(SHORT))
"""What has come and is dealt with at once, of whatever connection."""


class _Unheard(Exception):
    """Raised in the parser's callbacks: nothing more of what has come is of interest."""


class _Gently:
    """A transport as a request sees it: whoever closes it lets the other side finish its sentence."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write, self.is_closing, self.close = transport.write, transport.is_closing, close


class _Line(asyncio.BufferedProtocol):
    """A connection as the loop sees it: asked where bytes are to go. uvicorn's own protocol cannot be that as well."""

    def __init__(self, inner: Any) -> None:
        for name in ("connection_made", "connection_lost", "get_buffer", "buffer_updated", "eof_received"):
            setattr(self, name, getattr(inner, name))
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]


class _Turn:
    """A request on the short way, as far as uvicorn looks at one."""

    message_event = asyncio.Event()  # nobody waits for it

    def __init__(self) -> None:
        self.keep_alive, self.response_complete, self.disconnected = True, False, False


def limited(idle: float, connections: int, begin: Begin, refused: Callable[[str], None]) -> type[HttpToolsProtocol]:
    """A protocol that gives up on connections that say nothing for so long, or too much before saying what for.

    `begin` is offered every request first; `refused` is told the code of every request that was refused here.
    """

    class Limited(HttpToolsProtocol):
        _until = math.inf
        """When the other side must have said what it has to say: a request's headers, the rest of a refused body."""
        _timer: asyncio.TimerHandle | None = None
        _arrival: Arrival | None = None
        """What is being received on the short way."""
        _pace: asyncio.TimerHandle | None = None
        """Runs while more of it is to come."""
        _begun = 0.0
        _going: deque[Buffer] | None = None
        """What is left of an answer on the short way."""
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
            self._until = math.inf
            self._stop_timers()
            self._going = None
            if self._arrival is not None:
                self._arrival.abandon()
                self._arrival = None
            for cycle in self._due:  # uvicorn tells the last one only
                cycle.disconnected = True
                cycle.message_event.set()
            super().connection_lost(exc)

        # -- what comes ---------------------------------------------------------------------------------------------

        def get_buffer(self, sizehint: int) -> memoryview:
            if self._arrival is None or self._arrival.turn is not None:
                return _INCOMING
            return self._arrival.space()

        def buffer_updated(self, nbytes: int) -> None:
            arrival = self._arrival
            if arrival is None:
                self.data_received(_INCOMING[:nbytes])
                return
            if arrival.turn is not None:  # reading has been stopped; this was on its way
                arrival.feed(_INCOMING[:nbytes])
                return
            arrival.filled += nbytes
            if arrival.filled == arrival.length:
                self._arrived(arrival)

        def data_received(self, data: Buffer) -> None:
            if self._deaf or self.transport.is_closing():
                return
            self._ended = False
            super().data_received(data)  # type: ignore[arg-type]  # the parser takes any buffer
            if self._arrival is not None:
                self._go_past_the_parser()
            elif not (self._in_body or self._ended or self._deaf):  # nothing but headers
                self._head_bytes += len(data)
                if self._head_bytes > HEADER_BYTES:
                    self._too_much()

        def on_message_begin(self) -> None:
            self._check()
            super().on_message_begin()
            self._chunked = False
            if self._peer is not None:
                self.scope["state"]["peer"] = self._peer
            self._head_bytes, self._field_bytes = 1, 0  # something has come
            self._watch()

        def on_url(self, url: bytes) -> None:
            self.url += url
            if len(self.url) > URL_BYTES:
                self._too_much()
                self._check()

        def on_header(self, name: bytes, value: bytes) -> None:
            name = name.lower()
            if name == b"transfer-encoding":
                self._chunked = True
            elif name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))
            self._field_bytes += len(name) + len(value)
            if len(self.headers) > HEADERS or self._field_bytes > HEADER_BYTES:
                self._too_much()
                self._check()

        def on_headers_complete(self) -> None:
            self._until = math.inf
            if self._chunked:  # trailers would have no limit
                self._give_up(411, "length", "send a Content-Length, not a chunked body")
            elif len(self._due) >= PIPELINED:
                self._give_up(503, "busy", "too many requests at once", b"retry-after: 1\r\n")
            self._check()
            self._in_body = True
            if not self._due and self._is_plain():
                self._arrival = begin(self.url, self.headers, self._peer)
            if self._arrival is None:
                super().on_headers_complete()
                self.cycle.transport = self._gently
            else:
                self.cycle = cast(RequestResponseCycle, _Turn())
            self._due.append(self.cycle)

        def _is_plain(self) -> bool:
            """Whether the body follows, and another request may follow it: no other protocol, no end is asked for."""
            parser = self.parser
            usual = parser.get_method() == b"POST" and parser.get_http_version() == "1.1"
            return usual and parser.should_keep_alive() and not parser.should_upgrade()

        def on_body(self, body: bytes) -> None:
            if self._arrival is None:
                super().on_body(body)
            else:
                self._arrival.feed(body)

        def on_message_complete(self) -> None:
            if self._arrival is not None:
                if self._arrival.filled == self._arrival.length:
                    self._arrived(self._arrival)
                else:  # the parser has seen an end where there is none
                    self._lose(Refused(400, "malformed", "the body is shorter than Content-Length says"))
                return
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

        # -- the short way ------------------------------------------------------------------------------------------

        def _go_past_the_parser(self) -> None:
            """The rest of the body is received where it belongs; what follows it is for a new parser."""
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            assert self._arrival is not None
            if self._arrival.turn is None:
                self._keep_pace()
            else:
                self.flow.pause_reading()
                self._arrival.turn.add_done_callback(self._placed)
                self._pace = self.loop.call_later(PATIENCE, self._wait_no_longer)

        def _placed(self, turn: asyncio.Future[None]) -> None:
            if self._arrival is not None and self._arrival.turn is turn:
                self._stop_pace()
                rest = self._arrival.place()
                self.flow.resume_reading()
                if self._arrival.filled < self._arrival.length:
                    self._keep_pace()
                else:
                    self._arrived(self._arrival)
                    self.data_received(rest)

        def _wait_no_longer(self) -> None:
            self._lose(bodies.crowded(), b"retry-after: 1\r\n")

        def _keep_pace(self) -> None:
            self._begun = self.loop.time()
            self._pace = self.loop.call_later(GRACE, self._check_pace)

        def _check_pace(self) -> None:
            arrival = self._arrival
            assert arrival is not None
            due = self._begun + GRACE + arrival.filled / LEAST
            if due > self.loop.time():
                self._pace = self.loop.call_at(due, self._check_pace)
                return
            self._lose(bodies.too_slow(arrival.filled, arrival.length))

        def _lose(self, why: Refused, more: bytes = b"") -> None:
            arrival, self._arrival, self._pace = self._arrival, None, None
            assert arrival is not None
            arrival.abandon()
            self._due.clear()
            self._give_up(why.status, why.code, str(why), more)

        def _arrived(self, arrival: Arrival) -> None:
            self._in_body, self._ended, self._head_bytes = False, True, 0
            self._arrival = None
            self._stop_pace()
            arrival.finish(partial(self._reply, self.cycle))

        def _stop_pace(self) -> None:
            if self._pace is not None:
                self._pace.cancel()
                self._pace = None

        def _reply(self, turn: RequestResponseCycle, reply: Reply) -> None:
            if turn.disconnected or self.transport.is_closing():
                return
            head = _head(reply, turn.keep_alive)
            if self.flow.write_paused or sum(map(len, reply.parts)) > PIECE:
                self._going = deque([head, *bodies.pieces(reply.parts)])
                self._go_on()
            else:
                self.transport.writelines([head, *reply.parts])
                self._replied()

        def _go_on(self) -> None:
            """Writes as much of an answer as the other side is ready to read."""
            while self._going and not self.flow.write_paused:
                self.transport.write(self._going.popleft())
            if not self._going:
                self._going = None
                self._replied()

        def _replied(self) -> None:
            turn = self._due[0]
            turn.response_complete = True
            if not turn.keep_alive:
                self._end()
            self.on_response_complete()

        # -- what goes ----------------------------------------------------------------------------------------------

        def on_response_complete(self) -> None:
            self._due.popleft()
            self.server_state.total_requests += 1
            if self.transport.is_closing():
                return
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
            elif self._in_body and not self._deaf:  # what is left of it is not wanted
                self._watch(LINGER)
            elif not self._deaf:
                self._watch()

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
            if self._going is not None:
                self._go_on()
            if self._closing and not self.flow.write_paused:
                self.transport.close()

        def _stop_stall(self) -> None:
            if self._stall is not None:
                self._stall.cancel()
                self._stall = None

        # -- the end ------------------------------------------------------------------------------------------------

        def _watch(self, seconds: float = idle) -> None:
            """The other side has so long; one timer looks now and then, since most requests are done long before."""
            self._until = self.loop.time() + seconds
            if self._timer is None or seconds < idle:
                self._look_in(seconds)

        def _look_in(self, seconds: float) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(seconds, self._look)

        def _look(self) -> None:
            left = self._until - self.loop.time()
            if left > 0:
                self._look_in(min(left, idle))
            else:
                self._until, self._timer = math.inf, None
                self._silence()

        def _stop_timers(self) -> None:
            self._stop_stall()
            self._stop_pace()
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
            self._until = math.inf
            if self._due:
                self._due[-1].keep_alive = False
            else:
                self._answer(status, code, text, more)
                self._end()

        def _answer(self, status: int, code: str, text: str, more: bytes) -> None:
            body = json.dumps({"error": text, "code": code}).encode()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\nconnection: close\r\n" % (status, PHRASES[status].encode())
                + b"content-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (more, len(body), body)
            )
            refused(code)
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
            self._watch(0.0 if self._stopping else LINGER)

        def _close(self) -> None:
            if self.flow.write_paused:
                self._deaf = self._closing = True
            else:
                self.transport.close()

        def shutdown(self) -> None:
            self._stopping = True
            if self._arrival is not None and self._arrival.turn is not None:
                self._stop_pace()
                self._lose(stopping(), b"retry-after: 2\r\n")
            elif self._due:
                super().shutdown()
            else:
                self._close()

    return Limited


PHRASES = {status.value: status.phrase for status in HTTPStatus}


def _head(reply: Reply, keep_alive: bool) -> bytes:
    """The first line and the headers of an answer."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in reply.headers.items()])
    end = "" if keep_alive else "connection: close\r\n"
    first = f"HTTP/1.1 {reply.status} {PHRASES[reply.status]}\r\ncontent-type: {reply.kind}\r\n"
    return f"{first}content-length: {sum(map(len, reply.parts))}\r\n{lines}{end}\r\n".encode("latin-1", "replace")


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

        def made() -> asyncio.BaseProtocol:
            protocol = cast(type[HttpToolsProtocol], config.http_protocol_class)
            return _Line(protocol(config=config, server_state=self.server_state, app_state={}, _loop=loop))

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
