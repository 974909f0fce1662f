"""Listens on sockets, and stops gracefully: requests that are here are answered before the last connection ends."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

from ..logs import log
from .connection import Application, Connection
from .limits import BODY_GRACE, CLOSE_TIMEOUT, HANDSHAKE_TIMEOUT, ConnectionLimits
from .uptime import Uptime

_BACKLOG = 1024
_CHECK_INTERVAL = 0.05
"""Seconds between two checks, while the server stops, whether the last connection has ended."""


class Server:
    """Serves an application; main.py makes one."""

    def __init__(
        self, app: Application, limits: ConnectionLimits, clock: Uptime, tls: ssl.SSLContext | None = None
    ) -> None:
        self._app, self._limits, self._clock, self._tls = app, limits, clock, tls
        self._connections: set[Connection] = set()
        self._stop = asyncio.Event()
        self._forced = False
        """Whether `stop` was called twice."""

    def stop(self) -> None:
        """Makes `serve` return after the requests that are here are answered; a second call does not wait for those."""
        self._forced = self._stop.is_set()
        self._stop.set()

    async def serve(self, sockets: Sequence[socket.socket]) -> None:
        """Accepts connections until `stop` is called; returns when all of them have ended."""
        loop = asyncio.get_running_loop()
        # asyncio refuses these arguments for a server without TLS.
        handshake, shutdown = (None, None) if self._tls is None else (HANDSHAKE_TIMEOUT, CLOSE_TIMEOUT)

        def new_connection() -> Connection:
            return Connection(self._app, self._limits, self._clock, self._connections)

        servers = [
            await loop.create_server(
                new_connection,
                sock=each,
                ssl=self._tls,
                backlog=_BACKLOG,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=shutdown,
            )
            for each in sockets
        ]
        await self._stop.wait()
        for server in servers:
            server.close()
        for connection in list(self._connections):
            connection.stop()
        await self._wait_for_connections()

    async def _wait_for_connections(self) -> None:
        end = (
            self._clock.now() + BODY_GRACE + 2.0
        )  # longer than BODY_GRACE: a body that does not arrive is refused before
        while self._connections and not self._forced and self._clock.now() < end:
            await asyncio.sleep(_CHECK_INTERVAL)
        if self._connections:
            log.warning("the server stops and cuts %d connections that have not ended", len(self._connections))
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # lets the event loop call `connection_lost` of each
