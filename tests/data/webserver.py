"""A real HTTP server on loopback that can be slow, cut off, wrong or without what is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Page:
    """One file and how it is served."""

    body: bytes
    cut_after: list[int] = field(default_factory=list)
    """The next answers end after so many bytes, whatever length they promised."""
    pause: float = 0.0
    """Seconds before every 10 kB."""
    ranges: bool = True
    """Whether a part can be asked for."""


@dataclass
class Site:
    """A running server; `asked` is the path and the range of every request."""

    address: str
    pages: dict[str, Page] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, path: str, body: bytes, **how: Any) -> str:
        """Serves the body; its URL."""
        self.pages[path] = Page(body, **how)
        return self.address + path


@contextmanager
def serving() -> Iterator[Site]:
    """A server for the length of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            site.asked.append((self.path, wanted))
            page = site.pages.get(self.path)
            if page is None:
                return self.send_error(404)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and page.ranges else 0
            if start and start >= len(page.body):
                return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(page.body) - start))
            self.end_headers()
            self._send(page, page.body[start:])
            return None

        def _send(self, page: Page, rest: bytes) -> None:
            rest = rest[: page.cut_after.pop(0)] if page.cut_after else rest
            try:
                for begin in range(0, len(rest), 10_000):
                    time.sleep(page.pause)
                    self.wfile.write(rest[begin : begin + 10_000])
            except OSError:
                pass  # the client is gone

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    site = Site(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
