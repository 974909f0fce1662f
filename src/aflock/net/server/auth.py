"""Authentication of clients by their tokens, the limit on their requests per second, and their strikes."""

from __future__ import annotations

import time

from ..identity.members import BadToken, Member, Members, Revoked
from ..protocol.refusals import Refused, bad_token, revoked
from ..protocol.wire import Headers

_MAX_CACHED_TOKENS, _MAX_CACHED_BYTES = 10_000, 256
"""Most `Authorization` headers in the cache, and most characters of one."""
_BURST = 2.0
"""Seconds' worth of requests that a client may send at once."""


class Auth:
    """Says which member sends a request, and whether it may.

    `App` calls it for every request of a member, `Updates` counts strikes. Nothing is saved: after a restart every
    client has its full rate and no strikes.
    """

    def __init__(self, members: Members, *, rate: float, strikes: int) -> None:
        """`rate`: requests per second of one client; `strikes`: unusable updates in a row that suspend a client."""
        self._members, self._rate, self._strikes = members, rate, strikes
        self._gap = 1 / rate
        # Seconds by which a client may be ahead of its rate: at least one request, however small the rate is. The 1e-9
        # makes up for the rounding of sums of gaps; without it, the last request of a burst could be refused.
        self._ahead = max(_BURST, self._gap) + 1e-9
        self._due: dict[str, float] = {}
        """For each client, when its last request would have been due had it sent all of them evenly, at its rate."""
        self._struck: dict[str, int] = {}
        """Unusable updates of each client since its last usable one."""
        self._cache: dict[str, Member] = {}
        """Members by `Authorization` header, if its token is valid: saves hashing the token of every request."""
        self._cached_for = members.known
        """The members for which the cache was filled. `Members` makes a new object whenever its file changes, so
        comparing identities tells whether the cache is still valid."""

    def admit(self, headers: Headers, certificate_name: str | None = None) -> Member:
        """Returns the member that sends a request; refuses an invalid token, and a client that exceeds its rate."""
        member = self.authenticate(headers, certificate_name)
        self.count_request(member.name)
        return member

    def authenticate(self, headers: Headers, certificate_name: str | None) -> Member:
        """Returns the member whose token a request carries.

        `certificate_name` is the name in the client's TLS certificate; None if it has shown none.
        """
        shown = headers.get("authorization", "")
        if self._cached_for is not self._members.known or len(self._cache) > _MAX_CACHED_TOKENS:
            self._cached_for, self._cache = self._members.known, {}
        # A dictionary finds a string by a keyed hash, so the time of this lookup tells nothing about valid tokens.
        member = self._cache.get(shown)
        if member is None:
            member = self._check_header(shown)
            if len(shown) <= _MAX_CACHED_BYTES:  # a client may write any number of spaces before its token
                self._cache[shown] = member
        if certificate_name is not None and certificate_name != member.name:
            raise Refused(401, "token", "the name in your certificate is not the name in your token")
        return member

    def _check_header(self, shown: str) -> Member:
        scheme, _, token = shown.partition(" ")
        if scheme.lower() != "bearer":
            raise Refused(401, "token", "send your token: Authorization: Bearer aflock1...")
        try:
            return self._check_token(token.strip())
        except BadToken:
            raise bad_token() from None
        except Revoked:
            raise revoked() from None

    def _check_token(self, token: str) -> Member:
        try:
            return self._members.authenticate(token)
        except (BadToken, Revoked):
            if not self._members.refresh():  # if the file has changed, the client may have been invited a moment ago
                raise
            return self._members.authenticate(token)

    def count_request(self, name: str) -> None:
        """Counts one more request of a client, and refuses it if the client exceeds its rate.

        A client may send `rate` requests per second, and up to two seconds' worth of them at once.
        """
        # The generic cell rate algorithm (a leaky bucket): one number per client says all about its past requests.
        now = time.monotonic()
        due = self._due.get(name, 0.0)
        due = (due if due > now else now) + self._gap
        if due > now + self._ahead:
            wait = max(0.01, round(due - now - self._ahead, 3))
            raise Refused(429, "too-fast", f"a client may send at most {self._rate:g} requests per second", wait)
        self._due[name] = due

    def strike(self, name: str) -> bool:
        """Counts one more unusable update of a client; returns whether the client is to be suspended."""
        self._struck[name] = self._struck.get(name, 0) + 1
        return self._struck[name] >= self._strikes

    def clear_strikes(self, *names: str) -> None:
        """Forgets the strikes of these clients."""
        if self._struck:
            for name in names:
                self._struck.pop(name, None)
