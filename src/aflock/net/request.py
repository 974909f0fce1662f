"""One request that came the ordinary way, and how it is answered."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

from . import bodies, wire
from .bodies import Receive
from .logs import fields, log
from .refusals import Refused
from .wire import Buffer

Send = Callable[[dict[str, Any]], Awaitable[None]]

_SHORT = 1 << 16
"""Most bytes of a body that is no update; an unread one of that size does not end the connection."""
_BARE = (204, 304)
"""Answers that have no body, and may not describe one."""


class Request:
    """One request, and the way to answer it."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1").strip(" \t") for name, value in scope["headers"]
        }
        self.receive, self._send = receive, send
        self.peer: str | None = scope["state"].get("peer")
        self.client, self.what = "", "?"
        """Which member asks for what, as far as the server knows them; nothing a stranger made up gets into the log."""
        self.unread = True
        self.torn = False
        """Whether a part of the body was read, and the rest did not come."""
        self.answered = False
        self.code = ""
        """Of its refusal."""

    @property
    def length(self) -> int:
        """Of the body; one in pieces of unknown length has not come as far as this."""
        return wire.number(self.headers, "content-length", 0)

    def unread_within(self, most: int) -> bool:
        """Whether a body is still to come, and all of it, of at most so many bytes."""
        text = self.headers.get("content-length", "0")
        if not self.unread or "expect" in self.headers or not text.isdecimal() or len(text) > 18:
            return False
        return 0 < int(text) <= most

    def option(self, name: str) -> str:
        """A part of the query."""
        if not self.query:
            return ""
        try:
            return dict(parse_qsl(self.query.decode("ascii"), max_num_fields=8)).get(name, "")
        except ValueError:
            raise Refused(400, "malformed", "the query cannot be read") from None

    async def read(self, body: memoryview) -> None:
        """All of it."""
        self.unread, self.torn = False, True
        await bodies.read(self.receive, body)
        self.torn = False

    async def skip(self, length: int) -> None:
        """Reads it to its end, for nobody: whoever is still sending would not see an answer."""
        self.unread, self.torn = False, True
        await bodies.skip(self.receive, length)
        self.torn = False

    async def short(self) -> None:
        """Reads a body that means nothing."""
        if self.length > _SHORT:
            raise Refused(413, "too-large", f"the body of this request has at most {_SHORT} bytes")
        await self.skip(self.length)

    async def gone(self) -> None:
        """Returns when the other side has hung up."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, parts: Sequence[Buffer], kind: str, lines: str = "") -> None:
        """Sends an answer whose body is made of these parts; with more headers, as they travel."""
        self.answered = True
        sent: list[tuple[bytes, bytes]] = []
        if status not in _BARE:
            sent = [(b"content-type", kind.encode()), (b"content-length", str(sum(map(len, parts))).encode())]
        unread = self.unread and self.headers.get("content-length", "0") != "0"
        if self.torn or (unread and not self.unread_within(_SHORT)):
            sent.append((b"connection", b"close"))
        if log.isEnabledFor(logging.DEBUG):
            self._log(status)
        sent += [(name.encode(), value.encode("latin-1", "replace")) for name, value in wire.pairs(lines)]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})
        *most, last = bodies.pieces(parts) or [b""]
        for piece in most:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": last})

    async def json(self, status: int, value: Any) -> None:
        """Sends JSON."""
        await self.answer(status, [json.dumps(value).encode()], "application/json")

    def _log(self, status: int) -> None:
        about = {"client": self.client, "method": self.method, "what": self.what, "status": status, "code": self.code}
        text = "%s %s of %s: %d %s" if self.code else "%s %s of %s: %d%s"
        log.debug(text, self.method, self.what, self.client or "?", status, self.code, extra=fields(**about))
