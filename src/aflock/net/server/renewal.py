"""Certificates run out while a server runs for months, or are replaced by others: new connections get the new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ..errors import AflockError
from . import pki, tls
from .logs import fields, log

EVERY = 3600.0
"""Seconds between two looks."""


class Encryption:
    """How a server speaks TLS, with the certificates that `find` returns, whenever it is asked."""

    def __init__(self, find: Callable[[], tls.Certificates], client_ca: Path | None = None) -> None:
        self._find = find
        self.certificates = find()
        self.context = tls.server_context(self.certificates, client_ca)
        self._shown = _fingerprint(self.certificates)

    async def renew(self, every: float = EVERY) -> None:
        """Looks for other certificates now and then; what cannot be used is told of, and those in use stay."""
        while True:
            await asyncio.sleep(every)
            try:
                self._look()
            except (AflockError, OSError) as error:
                log.error("the certificate in use stays: %s", error)

    def _look(self) -> None:
        found = self._find()
        newest = _fingerprint(found)
        if newest != self._shown:
            tls.show(self.context, found.certificate, found.key)
            self._shown = newest
            log.info("a new certificate, sha256: %s", newest, extra=fields(event="certificate", sha256=newest))


def _fingerprint(certificates: tls.Certificates) -> str:
    return tls.fingerprint(pki.read(certificates.certificate))
