"""What goes wrong between a client and its server, as errors.

    Unavailable    no answer, or "not now": worth another attempt
    Untrusted      the server, or this client, is not who it should be
    Nonsense       what the server says is not of the protocol
    Refused        it is, and the answer is no (`refusals.py`)

The server's own words go through `printable` before they become part of one.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any

import aiohttp

from ..errors import AflockError
from . import wire
from .refusals import Refused

_LONGEST_SENTENCE = 300
_LONGEST_RETRY = 3600.0
_LATER = (408, 429)
_VOID = (409, 422)
_ENDED = 410
_HOPELESS = ("CERTIFICATE", "ALERT", "VERSION", "HTTP_REQUEST")
"""What the reason of a TLS error holds if it would be the same the next time."""


class Unavailable(AflockError):
    """No answer, or "not now"; `after` is how many seconds the server asks to wait."""

    def __init__(self, text: str, after: float | None = None) -> None:
        super().__init__(text)
        self.after = after


class Untrusted(AflockError):
    """The server cannot show that it is the one it should be, or does not take this client's certificate."""


class Nonsense(AflockError):
    """The server says something that is not of the protocol."""


def nonsense(what: str) -> Nonsense:
    """The error for an answer that is not of the protocol."""
    return Nonsense(f"the server does not follow protocol {wire.PROTOCOL}: {what}; check the URL and its version")


# --- what a refusal means --------------------------------------------------------------------------------------------


def is_void(error: Refused) -> bool:
    """Whether a refusal means that the job is lost, and nothing worse."""
    return error.status in _VOID


def is_end(error: Refused) -> bool:
    """Whether a refusal means that the federation has ended."""
    return error.status == _ENDED


def is_stranger(error: Refused) -> bool:
    """Whether a refusal means that the federation does not know the client (any more)."""
    return error.code == "not-a-member"


# --- what an answer, or none, means ----------------------------------------------------------------------------------


def complaint(status: int, said: Mapping[str, Any], retry_after: str | None) -> AflockError:
    """The error for a status and the JSON that came with it."""
    sentence = printable(said.get("error")) or f"the server answers with HTTP {status}"
    if status in _LATER or status >= 500:
        return Unavailable(sentence, _retry_after(retry_after))
    return Refused(status, printable(said.get("code")), sentence)


def failure(error: Exception, base: str) -> AflockError:
    """What a failed connection means: the same again in a while, or not."""
    if isinstance(error, TimeoutError):
        return Unavailable(f"{base} does not answer in time")
    reason = getattr(getattr(error, "os_error", error), "reason", None)
    final = isinstance(reason, str) and any(word in reason.upper() for word in _HOPELESS)
    if isinstance(error, ssl.SSLCertVerificationError) or (isinstance(error, ssl.SSLError) and final):
        return Untrusted(
            f"no trust between this client and {base} ({error}); check the URL, the ca and the certificate"
        )
    return Unavailable(f"no answer from {base}: {_reason(error)}")


def first_failure(error: Exception, base: str) -> AflockError:
    """`failure`, before there was any answer: whoever expects TLS hangs up on plain HTTP."""
    trouble = failure(error, base)
    hung_up = isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError)
    if hung_up and base.startswith("http://") and isinstance(trouble, Unavailable):
        return Unavailable(f"{trouble}; is it https://?")
    return trouble


def printable(text: object) -> str:
    """What a stranger says, fit for a terminal."""
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
        return "nobody listens there; is the server running?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "the connection could not be made"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it was cut off"
    if isinstance(error, aiohttp.ClientConnectionError | ConnectionError):
        return "the connection broke"
    return printable(str(error)) or type(error).__name__
