"""Replaces the TLS certificate of a running server when it is about to expire or its file has changed.

A server runs for months, longer than a certificate is valid. New connections get the new certificate; open ones keep
theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ...errors import AflockError
from ..identity import pki, tls
from .logs import fields, log

EVERY = 3600.0
"""Seconds between two checks."""


class Encryption:
    """The TLS context of the server, and the certificates in it."""

    def __init__(self, find: Callable[[], tls.Certificates], client_ca: Path | None = None) -> None:
        """`find` returns the certificates to use at the time of the call, and makes new ones if it has to.

        `client_ca`: clients must show a certificate of this authority.
        """
        self._find = find
        self.certificates = find()
        self.context = tls.server_context(self.certificates, client_ca)
        self._in_use = _fingerprint(self.certificates)

    async def renew(self, every: float = EVERY) -> None:
        """Replaces the certificates when `find` returns others; if that fails, logs why and keeps those in use."""
        while True:
            await asyncio.sleep(every)
            try:
                self._replace_if_changed()
            except (AflockError, OSError) as error:
                log.error("the server keeps its old certificate: %s", error)

    def _replace_if_changed(self) -> None:
        found = self._find()
        newest = _fingerprint(found)
        if newest != self._in_use:
            # Changes the context itself: the event loop uses the same one for every new connection.
            tls.show(self.context, found.certificate, found.key)
            self._in_use = newest
            log.info("new certificate in use, sha256: %s", newest, extra=fields(event="certificate", sha256=newest))


def _fingerprint(certificates: tls.Certificates) -> str:
    return tls.fingerprint(pki.read(certificates.certificate))
