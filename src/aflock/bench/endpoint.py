"""The yardsticks of `aflock bench net`: servers that read the body and answer "ok", and do nothing else.

    asgi       uvicorn with a bare application: what most Python servers are built on
    protocol   thirty lines of asyncio.BufferedProtocol with httptools for the head: the least that HTTP costs here

uvicorn is needed for the first one only: nothing of aflock itself uses it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any, cast

from ..system.files import write_whole

_HEADERS = [(b"content-length", b"2"), (b"content-type", b"text/plain")]
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: text/plain\r\n\r\nok"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body and answers "ok"."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": b"ok"})


class BareProtocol(asyncio.BufferedProtocol):
    """Finds the blank line, gives the head to the parser and reads the body into memory of its own."""

    _incoming = bytearray(64 * 1024)
    _missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: a client has connected."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """asyncio: the memory into which it is to read the next bytes."""
        return self._body[-self._missing :] if self._missing else memoryview(self._incoming)

    def buffer_updated(self, nbytes: int) -> None:
        """asyncio: it has read that many bytes. The load generator sends every head in one piece."""
        if self._missing:
            self._missing -= nbytes
        else:
            end = self._incoming.find(b"\r\n\r\n", 0, nbytes) + 4
            self._parse(bytes(self._incoming[:end]))
            self._body = memoryview(bytearray(self._missing))
            self._body[: nbytes - end] = self._incoming[end:nbytes]
            self._missing -= nbytes - end
        if not self._missing:
            self._transport.write(_ANSWER)

    def _parse(self, head: bytes) -> None:
        import httptools

        httptools.HttpRequestParser(self).feed_data(head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools: the parser has read a header."""
        if name.lower() == b"content-length":
            self._missing = int(value)


async def _serve_bare(listening: socket.socket) -> None:
    server = await asyncio.get_running_loop().create_server(BareProtocol, sock=listening, backlog=1024)
    await server.serve_forever()


def main(file: Path, kind: str) -> None:
    """Serves on a free port and writes its URL to the file."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    write_whole(file, json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}))
    if kind == "protocol":
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve_bare(listening))
        return
    import uvicorn

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
