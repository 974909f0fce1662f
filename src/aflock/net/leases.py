"""How long a client may keep a job without a sign of life."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable


class Leases:
    """Deadlines of the open jobs; not part of the saved state: after a restart everybody has the whole lease again."""

    def __init__(self, expire: Callable[[str, int], Awaitable[None]], seconds: float) -> None:
        self._expire, self.seconds = expire, seconds
        self._until: dict[str, tuple[float, int]] = {}

    def begin(self, name: str, job: int) -> None:
        """The client has got a job, or has shown itself."""
        self._until.pop(name, None)  # the order is that of the deadlines: the first to run out stands first
        self._until[name] = (time.monotonic() + self.seconds, job)

    def end(self, name: str) -> None:
        """The client has no job any more."""
        self._until.pop(name, None)

    async def check(self) -> None:
        """Lets go of the jobs whose time is over."""
        now, late = time.monotonic(), []
        for name, (until, job) in self._until.items():
            if until > now:
                break
            late.append((name, job))
        for name, _ in late:
            self.end(name)
        for name, job in late:
            if name not in self._until:  # else it has shown itself while others were let go
                await self._expire(name, job)
