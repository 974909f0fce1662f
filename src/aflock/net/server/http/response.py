"""One response of the server."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from ...protocol.refusals import Refused
from ...protocol.wire import BytesLike


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


def json_response(status: int, value: Any) -> Response:
    """A response whose body is a value in JSON."""
    return Response(status, "application/json", [json.dumps(value).encode()])


def refusal(refused: Refused) -> Response:
    """The response to a refused request: the sentence, the code, and when to try again."""
    wait = refused.retry_after
    lines = "" if wait is None else f"retry-after: {math.ceil(wait)}\r\n"  # HTTP has whole seconds only
    return json_response(refused.status, {"error": str(refused), "code": refused.code})._replace(lines=lines)
