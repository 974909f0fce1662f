"""uvicorn's server, on sockets that listen already and with connections of our own."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import uvicorn

from .bodies import GRACE
from .http import FAREWELL, Limits
from .short import Begin, ShortWay

HANDSHAKE = 15.0
"""Seconds the beginning of TLS may take."""


class _Line(asyncio.BufferedProtocol):
    """A connection as the loop sees it: asked where bytes are to go. uvicorn's own protocol cannot be that as well."""

    def __init__(self, inner: Any) -> None:
        for name in ("connection_made", "connection_lost", "get_buffer", "buffer_updated", "eof_received"):
            setattr(self, name, getattr(inner, name))
        self.pause_writing, self.resume_writing = inner.pause_writing, inner.resume_writing  # type: ignore[method-assign]


class Server(uvicorn.Server):
    """Serves an ASGI application; updates are offered to `begin` first."""

    def __init__(self, app: Any, limits: Limits, begin: Begin, tls: Any = None) -> None:
        super().__init__(_configured(app, limits.idle))
        self._limits, self._begin = limits, begin
        self.config.load()
        self.config.ssl = tls

    async def startup(self, sockets: Any = None) -> None:
        """Begins to accept connections."""
        config, loop = self.config, asyncio.get_running_loop()

        def made() -> asyncio.BaseProtocol:
            return _Line(ShortWay(config, self.server_state, self._limits, self._begin))

        times: dict[str, Any] = {}
        if config.ssl:
            times = {"ssl_handshake_timeout": HANDSHAKE, "ssl_shutdown_timeout": FAREWELL}
        self.servers = [
            await loop.create_server(made, sock=each, ssl=config.ssl, backlog=config.backlog, **times)
            for each in sockets
        ]
        self.started = True


def _configured(app: Any, idle: float) -> uvicorn.Config:
    """uvicorn's settings: no access log, no lifespan, no web sockets, no headers that say who serves."""
    return uvicorn.Config(
        app,
        http=ShortWay,
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
    )
