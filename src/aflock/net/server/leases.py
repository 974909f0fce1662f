"""How long a client may keep a job without a sign of life."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from .http.uptime import Uptime


class Leases:
    """The deadlines of all open jobs.

    They are not saved: after a restart every client has its whole lease again. `App` begins and ends leases as jobs are
    given and answered, and calls `check` once a second.
    """

    def __init__(
        self,
        expire: Callable[[str, int], Awaitable[None]],
        seconds: float,
        clock: Uptime,
        is_alive: Callable[[str, int], bool],
    ) -> None:
        """`expire` drops a job; `is_alive` says whether a client whose lease is over is uploading the job's update."""
        self._expire, self.seconds, self._clock, self._is_alive = expire, seconds, clock, is_alive
        self._until: dict[str, tuple[float, int]] = {}
        """When each client's lease is over, and its job; in the order of these times (see `begin`)."""

    def begin(self, name: str, job: int) -> None:
        """Begins the lease of a job, or begins it anew after a sign of life."""
        # All leases have the same length, so the lease that begins last ends last. The name is removed first, so that
        # it is inserted at the end of the dictionary: `check` then stops at the first lease that is not over.
        self._until.pop(name, None)
        self._until[name] = (self._clock.now() + self.seconds, job)

    def end(self, name: str) -> None:
        """Ends the lease of a client that has no job any more."""
        self._until.pop(name, None)

    async def check(self) -> None:
        """Drops the jobs whose leases are over; a client whose upload makes progress gets the whole lease again."""
        now, late = self._clock.now(), []
        for name, (until, job) in self._until.items():
            if until > now:
                break
            late.append((name, job))
        for name, job in late:
            self.end(name)
            if self._is_alive(name, job):
                self.begin(name, job)
        for name, job in late:
            if name not in self._until:  # a sign of life may have come while an earlier job was being dropped
                await self._expire(name, job)
