"""One response of the server."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from ...protocol.refusals import Refused
from ...protocol.wire import BytesLike

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_WITHOUT_BODY = (204, 304)
"""Statuses whose responses have no body, and must not have headers that describe one."""


class Response(NamedTuple):
    """A status, headers, and a body: either parts that are there, or a stream of parts."""

    status: int
    kind: str = ""
    """The media type of the body."""
    parts: Sequence[BytesLike] = ()
    """The body."""
    lines: str = ""
    """All headers but those that describe the body, as HTTP writes them: `name: value\\r\\n` each."""
    stream: AsyncIterator[BytesLike] | None = None
    """The body, if its parts are made one after the other; its length is not known in advance."""

    def head(self, size: int, *, last: bool) -> bytes:
        """The first line and the headers; the body has `size` bytes; `last`: the connection ends with this response.

        A stream is sent in chunks. If it is the last response, it is sent as it is, and its end is the end of the
        connection.
        """
        status, kind, _, lines, stream = self
        if stream is not None:
            lines = f"content-type: {kind}\r\n{lines}" + ("" if last else "transfer-encoding: chunked\r\n")
        elif status not in _WITHOUT_BODY:
            lines = f"content-type: {kind}\r\ncontent-length: {size}\r\n{lines}"
        end = "connection: close\r\n" if last else ""
        # Headers are Latin-1; the reason of a receipt may hold other characters: it may quote an error of a rule.
        return f"{_STATUS_LINES[status]}{lines}{end}\r\n".encode("latin-1", "replace")


def json_response(status: int, value: Any) -> Response:
    """A response whose body is a value in JSON."""
    return Response(status, "application/json", [json.dumps(value).encode()])


def refusal(refused: Refused) -> Response:
    """The response to a refused request: the sentence, the code, and when to try again."""
    wait = refused.retry_after
    lines = "" if wait is None else f"retry-after: {math.ceil(wait)}\r\n"  # HTTP has whole seconds only
    return json_response(refused.status, {"error": str(refused), "code": refused.code})._replace(lines=lines)
