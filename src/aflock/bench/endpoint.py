"""The yardstick of `aflock bench net`: uvicorn with an application that reads the body and says ok."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn

_HEADERS = [(b"content-length", b"2"), (b"content-type", b"text/plain")]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads to the end."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    await send({"type": "http.response.body", "body": b"ok"})


def main(file: Path) -> None:
    """Serves on any free port and writes it down."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    file.write_text(json.dumps({"url": f"http://127.0.0.1:{listening.getsockname()[1]}"}))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    uvicorn.Server(config).run(sockets=[listening])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
