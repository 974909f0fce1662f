"""Who is let in: the right token, not too often, and not after one useless update too many."""

from __future__ import annotations

import time

from .members import BadToken, Member, Members, Revoked
from .refusals import Refused, bad_token, revoked
from .wire import Headers


class Door:
    """Authentication, rates and strikes."""

    def __init__(self, members: Members, *, rate: float, strikes: int) -> None:
        self._members, self._rate, self._strikes = members, rate, strikes
        self._buckets: dict[str, tuple[float, float]] = {}
        self._struck: dict[str, int] = {}

    def enter(self, headers: Headers, peer: str | None = None) -> Member:
        """The member who asks, or a refusal, if it asks too often, too."""
        member = self.known(headers, peer)
        self.count(member.name)
        return member

    def known(self, headers: Headers, peer: str | None) -> Member:
        """The member who asks; `peer` is the name in the certificate it has shown, if it has."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise Refused(401, "token", "send your token: Authorization: Bearer aflock1...")
        try:
            member = self._authenticate(token.strip())
        except BadToken:
            raise bad_token() from None
        except Revoked:
            raise revoked() from None
        if peer is not None and peer != member.name:
            raise Refused(401, "token", "your certificate is made out to another name than your token")
        return member

    def _authenticate(self, token: str) -> Member:
        try:
            return self._members.authenticate(token)
        except (BadToken, Revoked):
            if not self._members.refresh():  # else it may have been invited a moment ago
                raise
            return self._members.authenticate(token)

    def count(self, name: str) -> None:
        """One more request: from a bucket that fills with `rate` requests per second and holds two seconds' worth."""
        now = time.monotonic()
        left, then = self._buckets.get(name, (2 * self._rate, now))
        left = min(2 * self._rate, left + (now - then) * self._rate)
        if left < 1:
            self._buckets[name] = (left, now)
            wait = (1 - left) / self._rate
            raise Refused(429, "too-fast", f"at most {self._rate:g} requests per second", max(0.01, round(wait, 3)))
        self._buckets[name] = (left - 1, now)

    def strike(self, name: str) -> bool:
        """One more useless update in a row; whether that is one too many."""
        self._struck[name] = self._struck.get(name, 0) + 1
        return self._struck[name] >= self._strikes

    def forgive(self, name: str) -> None:
        """The count begins anew."""
        if self._struck:
            self._struck.pop(name, None)
