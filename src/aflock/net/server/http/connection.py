"""One connection of the server. Every request arrives through this class.

The bytes of a connection are a head, then a body of as many bytes as the head says, then the next head, and so on.
`get_buffer` tells the event loop where the next bytes go:

- While a head is expected, they go into a buffer that all connections share, and `buffer_updated` parses them at once.
- Once the application has said where the body goes (`Request.receive`), they go straight into that memory. Only the
  beginning of the body that arrived together with the head is copied.

Bytes that belong to a body the application has not asked for yet are kept (`_pending`), one buffer at most. Meanwhile
the connection stops reading, and the rest waits in the network.

Pipelining: a client may send the next request before it has the response to the last. The connection passes requests
to the application one at a time and sends the responses in the order of the requests. While one request waits for its
response, the connection parses the heads of the next ones, and takes over those of their bodies that have arrived
whole. So it can limit the number of requests that wait (limits.PIPELINED).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol, cast

from ...protocol.refusals import Refused, busy
from ...protocol.wire import BytesLike
from ..logs import fields, log
from .head import Head, malformed
from .limits import BODY_GRACE, CLOSE_TIMEOUT, LINGER, MIN_RATE, PIPELINED, UNREAD_BYTES, ConnectionLimits
from .outgoing import Outgoing
from .request import Callback, Request
from .response import Response, refusal
from .uptime import Deadline, Uptime

_INCOMING = memoryview(bytearray(64 * 1024))
"""The buffer into which the event loop reads heads, of all connections.

One is enough: the loop fills it and calls `buffer_updated` of the same connection before it reads for another one, and
`_process` copies what is left over before it returns. A buffer per connection would cost 64 kB for each idle client.
"""


class Application(Protocol):
    """What a connection calls. `App` is the server's; tests have small ones of their own."""

    def begin(self, request: Request) -> None:
        """Takes over a request: its head is here, its body has not been read, all earlier ones are answered.

        It must raise nothing: a request that fails is answered with a refusal.
        """

    def refused(self, code: str) -> None:
        """Counts a request that the connection has refused: a bad head, or a body that arrived too slowly."""


class Connection(asyncio.BufferedProtocol):
    """Reads the requests of one client and writes the responses.

    It refuses a client that sends too slowly or too much, and a connection that is one too many.
    """

    certificate_name: str | None = None
    """The common name in the client's TLS certificate, if it has shown one."""

    def __init__(self, app: Application, limits: ConnectionLimits, clock: Uptime, connections: set[Connection]) -> None:
        """`connections` are the server's open connections; this one adds and removes itself."""
        self._app, self._limits, self._clock, self._connections = app, limits, clock, connections
        self._head = Head()
        """The head that is arriving, or will arrive next."""
        self._current: Request | None = None
        """The request that the application is working on."""
        self._queue: deque[tuple[Request, bytes]] = deque()
        """Pipelined requests behind the current one, each with its body if that has arrived whole."""
        self._blocked = False
        """Whether the body of the last request in the queue has not arrived whole: then nothing behind it is parsed."""
        self._pending: BytesLike = b""
        """Bytes that have arrived and were neither parsed nor given to the application yet."""
        self._missing = 0
        """Bytes of a body that have not arrived yet: of the current request, or of one that is answered already."""
        self._sink: memoryview | None = None
        """The part of the application's memory that the missing bytes go to; None: it has not asked for them."""
        self._discarding = False
        """Whether the missing bytes are read and discarded."""
        self._on_body = self._on_lost = _nothing
        """What the application wants to be called when the whole body is there; if the rest of it will not arrive."""
        self._body_since = 0.0
        """When the client's time for sending the body began; 0.0: it has not begun."""
        self._processing = False
        """Whether `_process` is running."""
        self._request_ended = False
        """Whether the bytes that have just arrived held the end of a request (see `_parse_head`)."""
        self._ignores_input = False
        """Whether the connection parses nothing any more; it closes after the responses that are still to be sent."""
        self._stopping = self._close_pending = self._reading_paused = False
        """Whether the server stops; whether `_close` waits for the last response to be written; whether `pause_reading`
        was called."""

    # -- called by the transport ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected; if it is one too many, it is refused.

        Up to twice the limit, a refused client gets a response that says so. Beyond that even the responses would cost
        too much, and the connection is cut.
        """
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from asyncio's
        self._out = Outgoing(self._transport, self._clock, self._limits.idle)
        self._deadline = Deadline(self._clock, self._deadline_passed)
        """When the client must have sent what it has to send next: a head, more of a body, or the end of the stream."""
        self._connections.add(self)
        self.certificate_name = _common_name(transport.get_extra_info("peercert"))
        if len(self._connections) > 2 * self._limits.connections:
            self._transport.abort()
        elif len(self._connections) > self._limits.connections:
            self._refuse_input(busy("busy", "the server has too many open connections; try again later", 5.0))
            self._deadline.set(CLOSE_TIMEOUT)
        else:
            self._deadline.set(self._limits.idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended: requests that wait for a body or a response learn of it."""
        self._connections.discard(self)
        self._deadline.stop()
        self._out.stop()
        self._ignores_input, self._sink, self._pending = True, None, b""
        unanswered = [self._current] if self._current is not None else []
        unanswered += [request for request, _ in self._queue]
        self._current = None
        self._queue.clear()
        self._lose_body()
        for request in unanswered:
            request.done = True
            if request.watched:
                request.finish()

    def pause_writing(self) -> None:
        """The transport's buffer is full: the client reads more slowly than the server writes."""
        self._out.pause()

    def resume_writing(self) -> None:
        """The client has read most of the transport's buffer."""
        self._out.resume()
        if self._close_pending and not self._out.paused:
            self._transport.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Says where the event loop shall put the next bytes."""
        return _INCOMING if self._sink is None else self._sink

    def buffer_updated(self, nbytes: int) -> None:
        """The event loop has put so many bytes there."""
        if self._sink is not None:
            self._missing -= nbytes
            self._sink = self._sink[nbytes:]
            if not self._missing:
                self._body_complete()
        elif not self._ignores_input and not self._transport.is_closing():  # else the bytes are discarded
            self._request_ended = False
            arrived = _INCOMING[:nbytes]
            self._pending = b"".join((self._pending, arrived)) if self._pending else arrived
            self._process()

    # -- reading ----------------------------------------------------------------------------------------------------

    def _process(self) -> None:
        """Parses as much of the pending bytes as possible, and starts or stops reading from the network accordingly.

        It is not called while it runs: if the application calls `receive` or `send` from within `begin`, the loop
        further up the stack goes on with the new state. Recursion could grow as deep as the client has sent requests.
        """
        self._processing = True
        try:
            while self._pending or self._queue:
                if self._missing:
                    if not self._pending or not self._consume_body():
                        break
                elif self._queue and self._current is None:
                    self._begin_queued()
                elif not self._pending or self._ignores_input or self._blocked or not self._parse_head():
                    break
        finally:
            self._processing = False
        if self._pending:
            self._pending = bytes(self._pending)  # a copy: the bytes are in the shared buffer, which others need next
        # Reading is paused exactly while bytes are pending: the application is busy with a request, and more bytes
        # would have to be copied and kept. Input that is ignored needs no memory and is always read.
        if self._reading_paused is not bool(self._pending and not self._ignores_input):
            self._set_reading(self._reading_paused)
        # The client's time for a body begins when what had arrived of it is used up, not while the server was busy.
        if (self._sink is not None or self._discarding) and not self._body_since:
            self._body_since = self._clock.now()
            self._deadline.set(BODY_GRACE)

    def _begin_queued(self) -> None:
        """Begins the first request in the queue.

        The body that was taken over with it goes back in front of the pending bytes. So `_consume_body` treats it like
        one that arrives now.
        """
        request, body = self._queue.popleft()
        self._pending = b"".join((body, self._pending))
        self._blocked = self._blocked and bool(self._queue)  # only the last request in the queue can block parsing
        self._begin(request)

    def _set_reading(self, on: bool) -> None:
        """Resumes or pauses the reading from the network, unless that is so already."""
        if self._reading_paused is on and not self._transport.is_closing():
            self._reading_paused = not on
            if on:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def _consume_body(self) -> bool:
        """Copies pending bytes of a body to where they belong; false if the application has not asked for them yet."""
        sink, data, missing = self._sink, self._pending, self._missing
        if sink is None and not self._discarding:
            return False
        count = min(len(data), missing)
        if sink is not None:
            sink[:count] = data[:count]
            self._sink = sink[count:]
        self._pending, self._missing = data[count:], missing - count
        if count == missing:
            self._body_complete()
        return True

    def _parse_head(self) -> bool:
        """Parses pending bytes of a head; false if nothing more can be parsed now."""
        head = self._head
        if self._current is not None and not cast(Request, self._last).keep_alive:
            self._pending = b""  # the connection ends with that request: what follows it is no request
            return False
        if (
            self._request_ended
            and not head.size
            and len(self._pending) <= 4
            and not bytes(self._pending).strip(b"\r\n")
        ):
            # Some clients send an empty line after a body. It must not count as the beginning of the next head: at its
            # deadline the idle connection would be refused with 408 instead of being closed.
            self._pending = b""
            return False
        begun = head.begun
        try:
            used, request = head.feed(self._pending)
        except Refused as refused:
            self._refuse_input(refused)
            return False
        self._pending = self._pending[used:]
        if request is not None:
            self._head, self._request_ended = Head(), True
            self._head_complete(request)
        elif self._current is None and head.begun and not begun:
            self._deadline.set(self._limits.idle)
        return True

    @property
    def _last(self) -> Request | None:
        """The last of the requests that wait for their responses."""
        return self._queue[-1][0] if self._queue else self._current

    def _head_complete(self, request: Request) -> None:
        """Begins a request whose head has been parsed, or queues it behind the current one."""
        if "transfer-encoding" in request.headers:
            self._refuse_input(Refused(411, "length", "send a Content-Length, not a chunked body"))
            return
        request.connection, request.certificate_name = self, self.certificate_name
        if self._current is None and not self._queue:
            self._begin(request)
        elif not self._enqueue(request):
            return
        if request.upgrades:  # the bytes that follow belong to another protocol, which the server does not speak
            self._ignores_input, self._pending = True, b""

    def _enqueue(self, request: Request) -> bool:
        """Queues a request behind the current one; refuses it, and returns false, if too many wait already."""
        if len(self._queue) + (self._current is not None) >= PIPELINED:
            text = f"more than {PIPELINED} requests of this connection wait for their responses"
            self._refuse_input(busy("busy", text))
            return False
        # A body that has arrived whole is taken over, so that the heads behind it can be parsed and counted. One that
        # has not would have to be kept piece by piece, so it stays where it is and blocks the parsing.
        whole = len(self._pending) >= request.length
        body = bytes(self._pending[: request.length]) if whole else b""
        self._pending, self._blocked = self._pending[len(body) :], not whole
        self._queue.append((request, body))
        return True

    def _begin(self, request: Request) -> None:
        """Passes a request to the application; its body stays unread until the application asks for it."""
        self._current, self._missing = request, 0 if request.upgrades else request.length
        self._body_since = 0.0  # now the server has to answer, and takes as long as it takes
        self._app.begin(request)

    def receive(self, request: Request, body: memoryview | None, on_body: Callback, on_lost: Callback) -> None:
        """Reads the body of the current request into `body`, or discards it (None); see `Request.receive`."""
        if request is not self._current:  # the connection was lost meanwhile
            on_lost()
            return
        if request.upgrades and request.length:  # nothing tells where its body ends and the other protocol begins
            on_lost()
            self._refuse_and_close(request, malformed())
            return
        if "expect" in request.headers and request.headers["expect"].lower() == "100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._on_body, self._on_lost = on_body, on_lost
        if not self._missing:
            self._body_complete()
            return
        self._sink, self._discarding, self._body_since = body, body is None, 0.0
        if not self._processing:
            self._process()

    def on_lost(self, request: Request, on_lost: Callback) -> None:
        """Calls `on_lost` if the connection ends before the current request is answered; see `Request.on_lost`."""
        if request is self._current:
            self._on_lost = on_lost

    def received(self, request: Request) -> int:
        """Bytes of the request's body that have arrived."""
        return request.length - self._missing if request is self._current else 0

    def _body_complete(self) -> None:
        """All bytes of a body have arrived."""
        self._sink, self._discarding, self._request_ended = None, False, True
        on_body, self._on_body, self._on_lost = self._on_body, _nothing, _nothing
        if self._current is None:  # the request was answered before, and the rest of its body was discarded
            self._deadline.set(self._limits.idle)
        on_body()

    def _lose_body(self) -> None:
        """Tells the application, if it waits for a body, that the rest will not arrive."""
        on_lost, self._on_lost = self._on_lost, _nothing
        on_lost()

    # -- writing ----------------------------------------------------------------------------------------------------

    def send(self, request: Request, response: Response) -> None:
        """Sends the response to the current request; see `Request.send`."""
        if request is not self._current or request.done:
            return
        request.done = True
        self._on_lost = _nothing  # the application has decided: it need not know whether the body is lost
        if self._missing:
            self._discard_rest_of_body(request)
        if self._out.send(response, not request.keep_alive, request.method == "HEAD", self._response_written):
            self._response_written()

    def _discard_rest_of_body(self, request: Request) -> None:
        """Discards the rest of a body that has not arrived before its response; a long rest ends the connection.

        The connection ends too if the application has begun to read the body (it has given the request up), and if the
        client waits for "100 Continue": whether it sends the body after this response is not known.
        """
        self._deadline.clear()
        reading = self._sink is not None or self._discarding
        self._sink, self._on_body = None, _nothing
        if reading or request.expects or self._missing > UNREAD_BYTES:
            request.keep_alive = False
        # Not 0.0, so that `_process` does not set the deadline of a body: `_response_written` sets the one that counts.
        self._discarding, self._body_since = request.keep_alive, 1.0

    def _response_written(self) -> None:
        """The transport has all of the response: goes on to the next request, or closes the connection."""
        request, self._current = self._current, None
        if request is None:  # the connection was lost meanwhile
            return
        if request.watched:
            request.finish()
        if not request.keep_alive:
            self._finish()
            return
        if self._missing:
            self._deadline.set(LINGER)
        elif not self._queue:
            self._deadline.set(self._limits.idle)
        if (self._pending or self._queue) and not self._processing:
            self._process()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _deadline_passed(self) -> None:
        """The client has not sent in time what it has to send: refuses its request, or closes the connection.

        The deadline stays set while the application works on a request, and means nothing then: to move it for every
        request would cost more than to look here what it was for.
        """
        request = self._current
        if request is not None:
            if not self._missing or not self._body_since:
                return
            # The deadline of a body moves with its progress, but only here: so the bytes of a body that arrives in time
            # move no deadline.
            arrived = request.length - self._missing
            left = self._body_since + BODY_GRACE + arrived / MIN_RATE - self._clock.now()
            if left > 0:
                self._deadline.set(left)
                return
            text = (
                f"only {arrived} of {request.length} bytes of the body have arrived; "
                f"send at least {MIN_RATE} bytes per second"
            )
            self._lose_body()
            self._refuse_and_close(request, Refused(408, "slow", text))
        # Not while `_missing`: what is late is the rest of a body whose request is answered. Not while
        # `_ignores_input`: the connection is ending, and has sent its last response.
        elif not self._ignores_input and self._head.size and not self._missing:
            self._refuse_input(Refused(408, "slow", "the request's headers did not arrive in time"))
        else:  # an idle connection, or one whose client has not sent or closed in time what was to be discarded
            self._close()

    def _refuse_and_close(self, request: Request, refused: Refused) -> None:
        """Refuses the current request, which the application has begun, and ends the connection after that."""
        self._count_refusal(refused)
        request.keep_alive = False
        self.send(request, refusal(refused))

    def _refuse_input(self, refused: Refused) -> None:
        """Ignores all further input, and closes the connection after the responses that are still to be sent.

        The client gets the refusal if no request waits for its response. Otherwise it would take the refusal for the
        response to one of those, so the last of them ends the connection instead.
        """
        if self._ignores_input or self._transport.is_closing():
            return
        self._ignores_input, self._pending = True, b""
        if self._last is not None:
            self._last.keep_alive = False
        else:
            self._count_refusal(refused)
            if self._out.send(refusal(refused), True, False, self._finish):
                self._finish()

    def _count_refusal(self, refused: Refused) -> None:
        self._app.refused(refused.code)
        log.debug("a request was refused: %d %s", refused.status, refused.code,
                  extra=fields(status=refused.status, code=refused.code))  # fmt: skip

    def _finish(self) -> None:
        """Closes the connection after its last response: at once if all that was announced has arrived, else later.

        The later way is a *lingering close*. If a socket is closed while bytes wait to be read, or if more of them
        arrive afterwards, the system resets the connection, and the client may lose a response it has not read yet. So
        the server only closes its own direction (`write_eof`), and reads and discards what the client still sends, for
        LINGER seconds at most.
        """
        if self._transport.is_closing() or not (self._missing or self._ignores_input):
            self._close()
            return
        self._ignores_input, self._pending, self._discarding = True, b"", True
        self._set_reading(True)
        if self._transport.can_write_eof():  # TLS cannot close one direction
            self._transport.write_eof()
        # When the server stops, it closes at once: it waits for its connections, and LINGER would delay every stop.
        self._deadline.set(0.0 if self._stopping else LINGER)

    def _close(self) -> None:
        """Closes the connection as soon as the client has read most of what was written.

        A transport of TLS that is closed gives the client CLOSE_TIMEOUT seconds to read the rest, then drops it. So a
        response that the client is still reading is waited for (`resume_writing` closes the connection).
        """
        if self._out.paused:
            self._ignores_input = self._close_pending = True
        else:
            self._transport.close()

    def stop(self) -> None:
        """The server stops: requests that are here are answered, then the connection ends."""
        self._stopping = True
        if self._last is None:
            self._close()
        else:
            self._last.keep_alive = False  # `_response_written` closes the connection after that response

    def abort(self) -> None:
        """Ends the connection at once, without sending what is not sent yet."""
        self._transport.abort()


def _nothing() -> None:
    """The callback of a body for which no application waits."""


def _common_name(certificate: Any) -> str | None:
    """The common name in a certificate, as the `ssl` module describes it."""
    for part in (certificate or {}).get("subject", ()):
        for key, value in part:
            if key == "commonName":
                return str(value)
    return None
