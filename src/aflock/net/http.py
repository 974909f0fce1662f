"""uvicorn's HTTP, with the limits a server among strangers needs: on headers, on silence and on connections."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_BYTES = 16 * 1024
HEADERS = 64
URL_BYTES = 2048


def limited(idle: float, connections: int) -> type[HttpToolsProtocol]:
    """A protocol that gives up on connections that say nothing for so long, or too much before saying what for."""

    class Limited(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None
        _in_head = True
        _head_bytes = 0
        _ended = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > connections:
                self._give_up(b"503 Service Unavailable", b"too many connections; try again", b"retry-after: 5\r\n")
            else:
                self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            self._ended = False
            super().data_received(data)
            if self._in_head and not self._ended:  # nothing but headers, so far
                self._head_bytes += len(data)
                if self._head_bytes > HEADER_BYTES and not self.transport.is_closing():
                    self._too_much()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head_bytes = True, 0
            self._watch()

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            if len(self.headers) > HEADERS or len(name) + len(value) > HEADER_BYTES:
                self._too_much()

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            if len(self.url) > URL_BYTES:
                self._too_much()

        def on_headers_complete(self) -> None:
            self._in_head = False
            self._unwatch()
            if not self.transport.is_closing():
                super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._in_head, self._head_bytes, self._ended = True, 0, True
            if not self.transport.is_closing():
                super().on_message_complete()

        def _watch(self) -> None:
            self._unwatch()
            self._timer = self.loop.call_later(idle, self._silence)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _silence(self) -> None:
            self._give_up(b"408 Request Timeout", b"the request did not come", b"")

        def _too_much(self) -> None:
            self._give_up(b"431 Request Header Fields Too Large", b"the headers are too long", b"")

        def _give_up(self, status: bytes, text: bytes, more: bytes) -> None:
            if not self.transport.is_closing():
                length = str(len(text)).encode()
                self.transport.write(
                    b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-type: text/plain\r\n" + more
                    + b"content-length: " + length + b"\r\n\r\n" + text
                )  # fmt: skip
                self.transport.close()

    return Limited


def configured(app: Any, protocol: type[HttpToolsProtocol], idle: float, **more: Any) -> Any:
    """uvicorn's settings: no access log, no lifespan, no web sockets, no headers that say who serves."""
    import uvicorn

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
        timeout_keep_alive=int(idle),
        timeout_graceful_shutdown=10,
        backlog=1024,
        **more,
    )
