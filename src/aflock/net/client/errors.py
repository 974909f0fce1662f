"""The errors of a client's requests, and how answers and broken connections become such errors.

    Unavailable      no answer, or an answer that asks to try later: the session sends the request again
    Untrusted        the TLS handshake failed: the server or this client could not prove its identity
    ProtocolError    the answer does not follow docs/protocol.md
    Refused          the server understood the request and refused it (`protocol/refusals.py`)

`session.py` and `status.py` raise them. Text that came from the server goes through `printable` first, because it may
hold control characters.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp

from ...errors import AflockError
from ..protocol import wire
from ..protocol.refusals import Refused

_LONGEST_SENTENCE = 300
_LONGEST_RETRY = 3600.0
_RETRY_STATUSES = (408, 429)
_VOID_STATUSES = (409, 422)
_ENDED_STATUS = 410
_PERMANENT_TLS_REASONS = ("CERTIFICATE", "ALERT", "VERSION", "HTTP_REQUEST")
"""Words in the reason of a TLS error that would occur again at every attempt."""


class Unavailable(AflockError):
    """The server did not answer, or asked the client to try later; `after` is how many seconds it asks to wait."""

    def __init__(self, text: str, after: float | None = None) -> None:
        super().__init__(text)
        self.after = after


class Untrusted(AflockError):
    """The server's certificate is not trusted, or the server does not accept this client's certificate."""


class ProtocolError(AflockError):
    """The server's answer does not follow the protocol."""


def protocol_error(what: str) -> ProtocolError:
    """The error for an answer that does not follow the protocol; `what` is a clause that says how."""
    return ProtocolError(
        f"the server does not follow protocol {wire.PROTOCOL}: {what}; check the URL and the server's version"
    )


# --- what a refusal means --------------------------------------------------------------------------------------------


def is_void(error: Refused) -> bool:
    """Whether the client has lost the job (it must pull another one), but may go on."""
    return error.status in _VOID_STATUSES


def has_ended(error: Refused) -> bool:
    """Whether the federation has ended."""
    return error.status == _ENDED_STATUS


def is_unknown_client(error: Refused) -> bool:
    """Whether the federation does not know the client, or does not know it any more: the client must say hello."""
    return error.code == "not-a-member"


# --- answers and broken connections as errors ------------------------------------------------------------------------


def error_of_status(status: int, document: Mapping[str, Any], retry_after: str | None) -> AflockError:
    """The error for an HTTP status, the JSON object of its body and its Retry-After header."""
    sentence = printable(document.get("error")) or f"the server answers with HTTP {status}"
    if status in _RETRY_STATUSES or status >= 500:
        return Unavailable(sentence, _retry_after(retry_after))
    return Refused(status, printable(document.get("code")), sentence)


def connection_error(error: Exception, base: str) -> AflockError:
    """`Unavailable` if another attempt may succeed, `Untrusted` if it would fail in the same way."""
    if isinstance(error, TimeoutError):
        return Unavailable(f"{base} does not answer in time")
    reason = getattr(getattr(error, "os_error", error), "reason", None)
    permanent = isinstance(reason, str) and any(word in reason.upper() for word in _PERMANENT_TLS_REASONS)
    if isinstance(error, ssl.SSLCertVerificationError) or (isinstance(error, ssl.SSLError) and permanent):
        return Untrusted(
            f"the TLS connection to {base} failed ({error}); check the URL, the ca and this client's certificate"
        )
    return Unavailable(f"no answer from {base}: {_reason(error)}")


def first_connection_error(error: Exception, base: str) -> AflockError:
    """`connection_error`, for a client that has had no answer yet.

    A server that expects TLS closes a connection on which it gets plain HTTP, so the error then asks for https://.
    """
    found = connection_error(error, base)
    closed = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError)
    if closed and base.startswith("http://") and isinstance(found, Unavailable):
        return Unavailable(f"{found}; if the server uses TLS, write https:// in the URL")
    return found


def printable(text: object) -> str:
    """Text from the server, shortened, without control characters; empty if it is no text."""
    if not isinstance(text, str):
        return ""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST_SENTENCE])


def _retry_after(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return min(seconds, _LONGEST_RETRY) if seconds >= 0 else None


def _reason(error: Exception) -> str:
    if isinstance(getattr(error, "os_error", error), ConnectionRefusedError):
        return "the connection was refused; is the server running?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "the connection could not be made"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the answer was cut off"
    if isinstance(error, aiohttp.ClientConnectionError | ConnectionError):
        return "the connection broke"
    return printable(str(error)) or type(error).__name__
