"""Who is let in: the right token, not too often, and not after one useless update too many."""

from __future__ import annotations

import time

from .members import BadToken, Member, Members, Revoked
from .refusals import Refused, bad_token, revoked
from .wire import Headers

_MOST_FAMILIAR, _LONGEST_FAMILIAR = 10_000, 256
_AHEAD = 2.0
"""Seconds a client may be ahead of its rate."""


class Door:
    """Authentication, rates and strikes."""

    def __init__(self, members: Members, *, rate: float, strikes: int) -> None:
        self._members, self._rate, self._strikes = members, rate, strikes
        self._gap = 1 / rate
        self._ahead = max(_AHEAD, self._gap) + 1e-9  # however small the rate is, there is a first request
        self._due: dict[str, float] = {}
        """When each client's requests would all have been due, had it sent them evenly."""
        self._struck: dict[str, int] = {}
        self._familiar: dict[str, Member] = {}
        """Who has shown which token, as far as it was the right one; as long as nothing changes among the members."""
        self._then = members.known

    def enter(self, headers: Headers, peer: str | None = None) -> Member:
        """The member who asks, or a refusal, if it asks too often, too."""
        member = self.known(headers, peer)
        self.count(member.name)
        return member

    def known(self, headers: Headers, peer: str | None) -> Member:
        """The member who asks; `peer` is the name in the certificate it has shown, if it has."""
        shown = headers.get("authorization", "")
        if self._then is not self._members.known or len(self._familiar) > _MOST_FAMILIAR:
            self._then, self._familiar = self._members.known, {}
        member = self._familiar.get(shown)  # by a keyed hash: the time it takes says nothing about a wrong one
        if member is None:
            member = self._judge(shown)
            if len(shown) <= _LONGEST_FAMILIAR:  # one may be written with any number of spaces
                self._familiar[shown] = member
        if peer is not None and peer != member.name:
            raise Refused(401, "token", "your certificate is made out to another name than your token")
        return member

    def _judge(self, shown: str) -> Member:
        scheme, _, token = shown.partition(" ")
        if scheme.lower() != "bearer":
            raise Refused(401, "token", "send your token: Authorization: Bearer aflock1...")
        try:
            return self._authenticate(token.strip())
        except BadToken:
            raise bad_token() from None
        except Revoked:
            raise revoked() from None

    def _authenticate(self, token: str) -> Member:
        try:
            return self._members.authenticate(token)
        except (BadToken, Revoked):
            if not self._members.refresh():  # else it may have been invited a moment ago
                raise
            return self._members.authenticate(token)

    def count(self, name: str) -> float:
        """One more request: at most `rate` per second, up to two seconds' worth of them at a time; returns the time."""
        now = time.monotonic()
        due = self._due.get(name, 0.0)
        due = (due if due > now else now) + self._gap
        if due > now + self._ahead:
            wait = max(0.01, round(due - now - self._ahead, 3))
            raise Refused(429, "too-fast", f"at most {self._rate:g} requests per second", wait)
        self._due[name] = due
        return now

    def strike(self, name: str) -> bool:
        """One more useless update in a row; whether that is one too many."""
        self._struck[name] = self._struck.get(name, 0) + 1
        return self._struck[name] >= self._strikes

    def forgive(self, name: str) -> None:
        """The count begins anew."""
        if self._struck:
            self._struck.pop(name, None)
