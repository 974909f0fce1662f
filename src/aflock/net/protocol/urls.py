"""Checks of what a user types: a server's URL, and the certificate of the authority to trust.

`client/` uses them; the server uses `is_loopback` for the address it listens on.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from ...errors import ParameterError


def address(url: str, *, insecure: bool = False, secret: bool = True) -> SplitResult:
    """Parses a server's URL; refuses http:// to another machine if a `secret` is to be sent and `insecure` is false."""
    try:
        found = urlsplit(url)
        port = found.port
    except (ValueError, AttributeError, TypeError):
        found, port = SplitResult("", "", "", "", ""), 0
    if found.scheme not in ("http", "https") or not found.hostname or port == 0:
        raise ParameterError(f"the URL {url!r} is not valid; expected one like https://host:8443")
    if found.username or found.password or found.query or found.fragment:
        raise ParameterError("the URL has a user, a query or a fragment; expected one like https://host:8443")
    if secret and found.scheme == "http" and not insecure and not is_loopback(found.hostname):
        raise ParameterError(
            f"{url} would send the token unencrypted; use https://, or allow it with insecure=True (--insecure)"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether a host (a name, or an address with or without the brackets of a URL) is this machine."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return bare.lower() == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def pem_text(ca: str | Path | None) -> str | None:
    """The certificate of an authority as PEM text, from PEM text or from the path of a file that holds it."""
    if ca is None or (isinstance(ca, str) and "-----BEGIN" in ca):
        return ca
    try:
        text = Path(ca).read_text()
    except (OSError, ValueError) as error:
        raise ParameterError(f"the certificate {ca} cannot be read ({error}); expected PEM text or its path") from None
    if "-----BEGIN" not in text:
        raise ParameterError(f"{ca} holds no certificate; expected PEM text")
    return text
