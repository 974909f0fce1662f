"""The status of a federation by one synchronous request: `aflock status` and `aflock.net.client.client.status` use it.

It needs no hello and no member's state; only a server with `[server] status = "token"` asks for a token.
"""

from __future__ import annotations

import http.client
import json
import ssl
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from ..identity import tls
from ..protocol.urls import address, pem_text
from .errors import Untrusted, error_of_status, first_connection_error, protocol_error
from .streams import LONGEST_STATUS


def status(
    url: str,
    *,
    token: str | None = None,
    ca: str | Path | None = None,
    fingerprint: str | None = None,
    certificate: str | Path | None = None,
    key: str | Path | None = None,
    insecure: bool = False,
    timeout: float = 10.0,
) -> dict[str, Any]:
    """GET /v1/status as a dictionary; a server with `[server] status = "token"` asks for a member's `token`.

    ca               the authority to trust: PEM text or its path; None: the system's authorities
    fingerprint      the SHA-256 that the server's certificate must have
    certificate, key this client's own, for servers that ask for one (mTLS): paths
    insecure         whether a token may be sent to another machine over plain http

    Two keys are added. `certificate` is the SHA-256 of the server's certificate (`aflock serve` prints the same), None
    over http. `verified` says whether `ca`, the system's authorities or `fingerprint` confirmed it. Over https, a
    server that is not verified is asked all the same, but never with a token.
    """
    where = address(url, insecure=insecure, secret=token is not None)
    request = partial(_request, where, token, timeout)
    own = {name: Path(file) for name, file in (("certificate", certificate), ("key", key)) if file is not None}
    if where.scheme == "http":
        return {**request(None), "verified": False}
    if ca is None and fingerprint is not None:
        return {**request(_unverified_context(own), fingerprint), "verified": True}
    try:
        return {**request(tls.client_context(pem_text(ca), **own), fingerprint), "verified": True}
    except ssl.SSLCertVerificationError as error:
        if ca is not None:
            raise Untrusted(
                f"the certificate of {where.netloc} is not signed by that authority ({error.reason}); check the ca"
            ) from None
        if token is not None:
            raise Untrusted(
                f"the token is not sent to {where.netloc}: its certificate cannot be verified; give its ca"
            ) from None
    return {**request(_unverified_context(own)), "verified": False}


def _unverified_context(own: dict[str, Any]) -> ssl.SSLContext:
    """A context that accepts any certificate, so that its fingerprint can be read."""
    context = tls.client_context(None, **own)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _request(
    where: SplitResult,
    token: str | None,
    timeout: float,
    context: ssl.SSLContext | None,
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """The status, and the server's fingerprint; the token is sent only if `fingerprint` matches."""
    connection = _connection(where, context, timeout)
    try:
        connection.connect()
        shown = _peer_fingerprint(connection)
        if fingerprint is not None and _hex_digits(shown) != _hex_digits(fingerprint):
            raise Untrusted(f"{where.netloc} shows the certificate {shown}; expected {fingerprint}")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request("GET", f"{where.path.rstrip('/')}/v1/status", headers=headers)
        answer = connection.getresponse()
        raw = answer.read(LONGEST_STATUS + 1)
    except ssl.SSLCertVerificationError:  # `status` handles it
        raise
    except (OSError, http.client.HTTPException) as error:
        raise first_connection_error(error, f"{where.scheme}://{where.netloc}") from None
    finally:
        connection.close()
    found = _parse(raw)
    if answer.status != 200:
        raise error_of_status(answer.status, found, answer.getheader("Retry-After"))
    return {**found, "certificate": shown}


def _connection(where: SplitResult, context: ssl.SSLContext | None, timeout: float) -> http.client.HTTPConnection:
    host = where.hostname or ""
    if context is None:
        return http.client.HTTPConnection(host, where.port, timeout=timeout)
    return http.client.HTTPSConnection(host, where.port, timeout=timeout, context=context)


def _peer_fingerprint(connection: http.client.HTTPConnection) -> str | None:
    """The SHA-256 of the server's certificate as openssl writes it; None over plain http."""
    if not isinstance(connection.sock, ssl.SSLSocket):
        return None
    return tls.der_fingerprint(connection.sock.getpeercert(binary_form=True) or b"")


def _hex_digits(fingerprint: str | None) -> str:
    return (fingerprint or "").replace(":", "").strip().lower()


def _parse(raw: bytes) -> dict[str, Any]:
    if len(raw) > LONGEST_STATUS:
        raise protocol_error(f"the status is longer than {LONGEST_STATUS} bytes")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise protocol_error("the answer is not a JSON object")
    return found
