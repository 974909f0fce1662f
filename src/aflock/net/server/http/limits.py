"""The limits of the HTTP server.

docs/protocol.md has the same numbers, but for those that no client need know: PIECE, LINGER and CLOSE_TIMEOUT.
"""

from __future__ import annotations

from typing import NamedTuple

HEADER_BYTES = 16 * 1024
"""Most bytes of the headers of a request, together."""
HEADERS = 64
"""Most headers of a request."""
URL_BYTES = 2048
"""Most bytes of the URL in a request's first line."""
PIPELINED = 16
"""Most requests of one connection that may wait for their responses."""
UNREAD_BYTES = 64 * 1024
"""A response that is sent before the whole body has arrived leaves the connection open if at most so many bytes are
missing: the server reads and discards them. It closes the connection if more are."""
MIN_RATE = 64 * 1024
"""Least bytes per second at which a client must send a body and read a response, after a time of grace."""
BODY_GRACE = 10.0
"""Seconds at the beginning of a body in which it may arrive at any rate."""
PIECE = 128 * 1024
"""Most bytes of a response that the transport is given at a time: TLS keeps an encrypted copy of what it is given."""
LINGER = 5.0
"""Seconds for which the server reads and discards what a client still sends after its last response. Without that the
system would answer those bytes with a reset, and the client could lose the response to it."""
CLOSE_TIMEOUT = 3.0
"""Seconds a client has to confirm the end of TLS, or to close a connection that is one too many."""
HANDSHAKE_TIMEOUT = 15.0
"""Seconds the TLS handshake may take."""


class ConnectionLimits(NamedTuple):
    """The limits that the operator sets in the section [server]."""

    idle: float
    """Seconds within which a head must arrive; also the seconds a client may be slower than MIN_RATE at reading."""
    connections: int
    """Most open connections."""
