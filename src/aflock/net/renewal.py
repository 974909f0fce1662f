"""Certificates run out while a server runs for months, or are replaced by others: new connections get the new ones."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

from ..errors import AflockError
from . import pki, tls
from .logs import fields, log

EVERY = 3600.0
"""Seconds between two looks."""


async def renew(context: ssl.SSLContext, find: Callable[[], tls.Certificates], every: float = EVERY) -> None:
    """Looks now and then for what `find` returns, and shows it; what cannot be used is told of, and the old stays."""
    shown = _fingerprint(find())
    while True:
        await asyncio.sleep(every)
        try:
            found = find()
            newest = _fingerprint(found)
            if newest != shown:
                tls.show(context, found.certificate, found.key)
                shown = newest
                log.info("a new certificate, sha256: %s", newest, extra=fields(event="certificate", sha256=newest))
        except (AflockError, OSError) as error:
            log.error("the certificate in use stays: %s", error)


def _fingerprint(certificates: tls.Certificates) -> str:
    return tls.fingerprint(pki.read(certificates.certificate))
