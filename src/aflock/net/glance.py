"""A federation in numbers, for whoever asks: one request, with a token where the server wants one."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from . import tls
from .streams import LONGEST_STATUS
from .trouble import Untrusted, complaint, first_failure, nonsense
from .urls import address, pem_text


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
    """The federation in numbers; a server with `[server] status = "token"` wants a member's `token`.

    `verified` says whether the server has proved who it is: by an authority (`ca`, or one the system trusts), or by the
    `fingerprint` of its certificate. Without any of them it is asked all the same, unless there is a token to lose.
    In what comes back, `certificate` is the SHA-256 of the one it showed; `aflock serve` prints the same. To a server
    that asks for one (mTLS), show `certificate` and its `key`. `insecure` says that a token may go to another machine
    over plain http.
    """
    where = address(url, insecure=insecure, secret=token is not None)
    look = partial(_look, where, token, timeout)
    own = {name: Path(file) for name, file in (("certificate", certificate), ("key", key)) if file is not None}
    if where.scheme == "http":
        return {**look(None), "verified": False}
    if ca is None and fingerprint is not None:
        return {**look(_trusting(own), fingerprint), "verified": True}
    try:
        return {**look(tls.client_context(pem_text(ca), **own), fingerprint), "verified": True}
    except ssl.SSLCertVerificationError as error:
        if ca is not None:
            raise Untrusted(f"the certificate of {where.netloc} is not of that authority ({error.reason})") from None
        if token is not None:
            raise Untrusted(f"{where.netloc} gets no token: its certificate is not verified; give its ca") from None
    return {**look(_trusting(own)), "verified": False}


def _trusting(own: dict[str, Any]) -> ssl.SSLContext:
    """Takes any certificate: for looking at it."""
    context = tls.client_context(None, **own)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _look(
    where: SplitResult,
    token: str | None,
    timeout: float,
    context: ssl.SSLContext | None,
    fingerprint: str | None = None,
) -> dict[str, Any]:
    """What the server says, and the certificate it has shown."""
    line = _line(where, context, timeout)
    try:
        line.connect()
        shown = _shown(line)
        if fingerprint is not None and _plain(shown) != _plain(fingerprint):
            raise Untrusted(f"{where.netloc} shows the certificate {shown}; expected {fingerprint}")
        sent = {} if token is None else {"Authorization": f"Bearer {token}"}
        line.request("GET", f"{where.path.rstrip('/')}/v1/status", headers=sent)
        answer = line.getresponse()
        raw = answer.read(LONGEST_STATUS + 1)
    except ssl.SSLCertVerificationError:  # `status` knows what that means
        raise
    except (OSError, http.client.HTTPException) as error:
        raise first_failure(error, f"{where.scheme}://{where.netloc}") from None
    finally:
        line.close()
    found = _loaded(raw)
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
    if len(raw) > LONGEST_STATUS:
        raise nonsense("a status comes without end")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise nonsense("what should be a JSON object is none")
    return found
