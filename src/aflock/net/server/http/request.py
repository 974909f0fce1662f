"""One request, as the application sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from ...protocol.refusals import Refused
from .limits import UNREAD_BYTES
from .response import Response

if TYPE_CHECKING:
    from .connection import Connection

Callback = Callable[[], None]


class Disconnected(Exception):
    """The connection has ended, or the client has sent its body too slowly: no response can be sent any more."""


class Request:
    """A parsed head, and what the application needs to read the body and to send the response.

    A connection makes one per head, and sets `connection` and `certificate_name`; the application uses the rest.
    """

    certificate_name: str | None = None
    """The common name in the client's TLS certificate, if it has shown one."""
    done = False
    """Whether a response was sent, or none can be sent any more because the connection has ended."""
    client, what, code = "", "?", ""
    """For the log: which member asks, for which path, and the code of the refusal. The application sets them to values
    it knows, never to what an unknown client has sent."""
    about: Any = None
    """For the log: what else the application knows about the request."""
    connection: Connection
    """Over which the request has arrived."""
    watched = False
    """Whether someone has asked to be told of the end: the connection then calls `finish`."""
    _on_finished: Callback | None = None
    _disconnected: asyncio.Future[None] | None = None

    def __init__(
        self,
        method: str,
        path: str,
        query: bytes,
        headers: dict[str, str],
        length: int,
        *,
        keep_alive: bool,
        upgrades: bool,
    ) -> None:
        """`length`: bytes of the body; `keep_alive`: another request may follow on the connection.

        `upgrades`: the client asks to change to another protocol, and what follows the head belongs to that.
        """
        self.method, self.path, self.query, self.headers = method, path, query, headers
        self.length, self.keep_alive, self.upgrades = length, keep_alive, upgrades

    @property
    def expects(self) -> bool:
        """Whether the client has sent an `Expect` header: it waits for "100 Continue" before it sends the body."""
        return "expect" in self.headers

    def option(self, name: str) -> str:
        """The value of a parameter of the query; "" if it is not there."""
        return _options(self.query).get(name, "") if self.query else ""

    # -- the body ---------------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        """Bytes of the body that have arrived so far."""
        return self.connection.received(self)

    def receive(self, body: memoryview, on_body: Callback, on_lost: Callback) -> None:
        """Reads the body into that memory; calls `on_body` when all of it is there, `on_lost` if it will not be."""
        self.connection.receive(self, body, on_body, on_lost)

    def skip(self, on_body: Callback, on_lost: Callback = lambda: None) -> None:
        """Reads the body and discards it, for a client that looks at the response only after it has sent the body."""
        self.connection.receive(self, None, on_body, on_lost)

    def on_lost(self, on_lost: Callback) -> None:
        """Calls `on_lost` if the connection ends before the request is answered."""
        self.connection.on_lost(self, on_lost)

    async def read_nothing(self) -> None:
        """Reads and discards the body of a request that needs none; a long one is refused."""
        if self.length > UNREAD_BYTES:
            raise Refused(413, "too-large", f"the body of this request may have at most {UNREAD_BYTES} bytes")
        if self.length:
            read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.skip(lambda: _settle(read), lambda: _settle(read, Disconnected()))
            await read

    async def wait_for_disconnect(self) -> None:
        """Returns when the connection has ended, or a response was sent."""
        if self.done:
            return
        self.watched, self._disconnected = True, asyncio.get_running_loop().create_future()
        if 0 < self.length <= UNREAD_BYTES and not self.expects:
            # While a body is unread the connection does not read from the network, and would not see its end.
            self.skip(lambda: None)
        await self._disconnected

    # -- the response -----------------------------------------------------------------------------------------------

    def send(self, response: Response) -> None:
        """Sends the response, once; does nothing if a response was sent or the connection has ended."""
        self.connection.send(self, response)

    def on_finished(self, on_finished: Callback) -> None:
        """Calls `on_finished` when the transport has got all of the response, or the connection has ended."""
        if self.done:
            on_finished()
        else:
            self.watched, self._on_finished = True, on_finished

    def finish(self) -> None:
        """The connection calls it when the transport has got all of the response, or the connection has ended."""
        if self._on_finished is not None:
            on_finished, self._on_finished = self._on_finished, None
            on_finished()
        if self._disconnected is not None:
            _settle(self._disconnected)


@lru_cache(256)  # the queries of nearly all requests are the same few
def _options(query: bytes) -> dict[str, str]:
    try:
        return dict(parse_qsl(query.decode("ascii"), max_num_fields=8))
    except ValueError:
        raise Refused(400, "malformed", "the query of the URL is not valid") from None


def _settle(future: asyncio.Future[None], error: Exception | None = None) -> None:
    """Ends the waiting for a future, unless that has ended already."""
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
