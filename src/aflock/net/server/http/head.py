"""The head of a request: its first line and its headers, up to the empty line.

httptools (the parser of Node.js) parses the head, and decides what is valid HTTP. It gets the head only, never a body:
it would copy each body piece by piece into Python objects, while the connection reads a body straight into its memory.
So `Head` finds the empty line itself, and checks that the parser agrees about where the head ends. A client that could
make the two disagree could smuggle a second request into a body. The limits on a head's size are checked here, too.
"""

from __future__ import annotations

from urllib.parse import unquote

import httptools

from ...protocol.refusals import Refused
from ...protocol.wire import BytesLike
from .limits import HEADER_BYTES, HEADERS, URL_BYTES
from .request import Request

_END = b"\r\n\r\n"
_USUAL_BYTES = 1024
"""Nearly every head is shorter than this: the end is first searched in so many bytes, so that the beginning of a large
body that arrived with the head is not copied and searched."""
_MAX_LENGTH_DIGITS = 18
"""Most digits of a Content-Length."""
_MAX_CACHED_NAMES, _MAX_CACHED_NAME = 256, 64
"""Most header names in the cache `_NAMES`, and most bytes of one: clients choose the names."""


class Head:
    """Collects one head: the connection calls `feed` with the bytes that arrive until it returns a request."""

    size = _lines = 0
    """Bytes so far, including empty lines before the head (HTTP allows them); lines so far, without those."""
    begun = _upgrades = False
    """Whether more than empty lines has arrived; whether the client asks to change to another protocol."""
    _open = True
    """Whether the parser has not seen the end of the head."""
    _tail = b""
    """The last three bytes that were fed before: the empty line may arrive in two pieces."""

    def feed(self, data: BytesLike) -> tuple[int, Request | None]:
        """Returns how many of the bytes belong to the head, and the request if the head ends with them.

        It raises `Refused` if the head is not valid HTTP, or exceeds a limit.
        """
        tail, text = self._tail, bytes(data[:_USUAL_BYTES])
        end = (tail + text).find(_END)
        if end < 0 and len(data) > _USUAL_BYTES:
            text = bytes(data)
            end = (tail + text).find(_END)
        if end >= 0:
            text = text[: end + 4 - len(tail)]
        size, lines = self.size, text
        if not size:
            self._begin()
        if not self.begun:
            lines = text.lstrip(b"\r\n")
            self.begun = bool(lines)
        self.size = size = size + len(text)
        self._lines = count = self._lines + lines.count(b"\n")
        try:
            self._parser.feed_data(text)
        except httptools.HttpParserUpgrade:
            self._upgrades = True
        except httptools.HttpParserError:
            self._check_limits()  # 431 comes before 400: a client that exceeds a limit can change that
            raise malformed() from None
        if count > HEADERS or size > URL_BYTES:  # only such a head can exceed a limit: the rest is cheap
            self._check_limits()
        if self._open is (end >= 0 and self.begun):
            # Whichever line endings the parser accepts, it must see the end where we see it (module docstring).
            raise malformed()
        if not self._open:
            return len(text), self._request()
        self._tail = (tail + text)[-3:] if end < 0 else b""
        return len(text), None

    def _begin(self) -> None:
        """Makes a parser. It calls the `on_...` attributes of this object.

        Two of them are methods of a list and a dictionary: the parser, which is compiled, then stores each header
        without calling a Python function. Of two headers of the same name the last one counts.
        """
        self._url: list[bytes] = []
        self._headers: dict[bytes, bytes] = {}
        self.on_url, self.on_header = self._url.append, self._headers.__setitem__
        self._parser = httptools.HttpRequestParser(self)

    def on_headers_complete(self) -> None:
        """The parser has seen the empty line."""
        self._open = False

    def _check_limits(self) -> None:
        """Refuses a head that is too long, or has too many headers."""
        url = sum(map(len, self._url))
        no_headers = 0 if self._open else 2  # lines that are no headers: the first line, and the empty one
        if (
            url > URL_BYTES
            or self._lines - no_headers > HEADERS
            or self.size > HEADER_BYTES + (0 if self._open else url)
        ):
            raise Refused(431, "headers", "the headers are too long or too many")

    def _request(self) -> Request:
        # The parser and this object refer to each other. The server's garbage collector runs rarely (main.py), so the
        # cycle is broken here, and both are freed at once.
        parser = self._parser
        del self._parser
        headers = {_NAMES[name]: value.decode("latin-1").strip(" \t") for name, value in self._headers.items()}
        path, query = _path_and_query(b"".join(self._url))
        length = headers.get("content-length", "0")
        if len(length) > _MAX_LENGTH_DIGITS:
            raise malformed()
        keep_alive = parser.get_http_version() != "1.0" and not self._upgrades
        if "connection" in headers and _asks_to_close(headers["connection"]):
            keep_alive = False
        method = parser.get_method().decode("ascii")
        return Request(method, path, query, headers, int(length), keep_alive=keep_alive, upgrades=self._upgrades)


class _Names(dict[bytes, str]):
    """A cache of header names in lower case, by the bytes that were sent: nearly all requests have the same names."""

    def __missing__(self, name: bytes) -> str:
        lower = name.decode("latin-1").lower()
        if len(self) < _MAX_CACHED_NAMES and len(name) <= _MAX_CACHED_NAME:
            self[name] = lower
        return lower


_NAMES = _Names()


def _asks_to_close(options: str) -> bool:
    """Whether the client wants the connection to end with this request, by its `Connection` header.

    The parser's own answer (`should_keep_alive`) is of no use here: for a request without a body it is reset by the
    time the head is parsed.
    """
    return "close" in (option.strip() for option in options.lower().split(","))


def _path_and_query(url: bytes) -> tuple[str, bytes]:
    """The decoded path and the query of a request's URL."""
    try:
        parsed = httptools.parse_url(url)
        path = parsed.path.decode("ascii")
    except (httptools.HttpParserError, AttributeError, UnicodeDecodeError):  # the path of a URL without one is None
        raise malformed() from None
    return (unquote(path) if "%" in path else path), parsed.query or b""


def malformed() -> Refused:
    """The refusal of a request that the parser does not accept."""
    return Refused(400, "malformed", "the request is not valid HTTP")
