"""A federation in numbers, for whoever asks: one request without a token."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from . import tls
from .streams import LONGEST_JSON
from .trouble import Untrusted, complaint, failure, nonsense
from .urls import address, pem_text


def status(
    url: str, *, ca: str | Path | None = None, fingerprint: str | None = None, timeout: float = 10.0
) -> dict[str, Any]:
    """The federation in numbers, without a token.

    `verified` says whether the server has proved who it is: by an authority (`ca`, or one the system trusts), or by the
    `fingerprint` of its certificate. Without any of them it is asked all the same: there is no secret to lose.
    `certificate` is the SHA-256 of the one it showed.
    """
    where = address(url, secret=False)
    if where.scheme == "http":
        return {**_look(where, None, None, timeout), "verified": False}
    if ca is None and fingerprint is not None:
        return {**_look(where, _trusting(), fingerprint, timeout), "verified": True}
    try:
        return {**_look(where, tls.client_context(pem_text(ca)), fingerprint, timeout), "verified": True}
    except ssl.SSLCertVerificationError as error:
        if ca is not None:
            raise Untrusted(f"the certificate of {where.netloc} is not of that authority ({error.reason})") from None
    return {**_look(where, _trusting(), None, timeout), "verified": False}


def _trusting() -> ssl.SSLContext:
    """Takes any certificate: for looking at it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _look(
    where: SplitResult, context: ssl.SSLContext | None, fingerprint: str | None, timeout: float
) -> dict[str, Any]:
    """What the server says, and the certificate it has shown."""
    line = _line(where, context, timeout)
    try:
        line.connect()
        shown = _shown(line)
        if fingerprint is not None and _plain(shown) != _plain(fingerprint):
            raise Untrusted(f"{where.netloc} shows the certificate {shown}; expected {fingerprint}")
        line.request("GET", f"{where.path.rstrip('/')}/v1/status")
        answer = line.getresponse()
        found = _loaded(answer.read(LONGEST_JSON))
    except ssl.SSLCertVerificationError:  # `status` knows what that means
        raise
    except (OSError, http.client.HTTPException) as error:
        raise failure(error, f"{where.scheme}://{where.netloc}") from None
    finally:
        line.close()
    if answer.status != 200:
        raise complaint(answer.status, found, answer.getheader("Retry-After"))
    return {**found, "certificate": shown}


def _line(where: SplitResult, context: ssl.SSLContext | None, timeout: float) -> http.client.HTTPConnection:
    host = where.hostname or ""
    if context is None:
        return http.client.HTTPConnection(host, where.port, timeout=timeout)
    return http.client.HTTPSConnection(host, where.port, timeout=timeout, context=context)


def _shown(line: http.client.HTTPConnection) -> str | None:
    """The fingerprint of the certificate the other side has shown, as openssl writes it."""
    if not isinstance(line.sock, ssl.SSLSocket):
        return None
    return hashlib.sha256(line.sock.getpeercert(binary_form=True) or b"").digest().hex(":").upper()


def _plain(fingerprint: str | None) -> str:
    return (fingerprint or "").replace(":", "").strip().lower()


def _loaded(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise nonsense("what should be a JSON object is none")
    return found
