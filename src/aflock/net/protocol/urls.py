"""Where a server is, and whom to trust there: what a client is given by hand."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from ..errors import ParameterError


def address(url: str, *, insecure: bool = False, secret: bool = True) -> SplitResult:
    """A server's URL; one over which a `secret` would travel unencrypted, to another machine, is refused."""
    try:
        found = urlsplit(url)
        port = found.port
    except (ValueError, AttributeError, TypeError):
        found, port = SplitResult("", "", "", "", ""), 0
    if found.scheme not in ("http", "https") or not found.hostname or port == 0:
        raise ParameterError(f"the URL {url!r} is not valid; expected one like https://host:8443")
    if found.username or found.password or found.query or found.fragment:
        raise ParameterError("the URL holds more than a server's address; expected one like https://host:8443")
    if secret and found.scheme == "http" and not insecure and not is_loopback(found.hostname):
        raise ParameterError(f"{url} would send the token unencrypted; use https://, or say insecure=True")
    return found


def is_loopback(host: str) -> bool:
    """Whether the host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def pem_text(ca: str | Path | None) -> str | None:
    """An authority's certificate, given as PEM text or as the path of a file with it."""
    if ca is None or (isinstance(ca, str) and "-----BEGIN" in ca):
        return ca
    try:
        text = Path(ca).read_text()
    except (OSError, ValueError) as error:
        raise ParameterError(f"the certificate {ca} cannot be read ({error}); expected PEM text or its path") from None
    if "-----BEGIN" not in text:
        raise ParameterError(f"{ca} holds no certificate; expected one in PEM form")
    return text
