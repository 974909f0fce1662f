"""A clock that does not count the time in which the server itself stood still.

While the process is stopped (SIGSTOP, a suspended machine) or its event loop is blocked, the server reads nothing,
however fast its clients send. Deadlines and leases that went by wall time would all be over the moment the server runs
again, and the clients would pay for a pause they did not cause. So this clock reads the system's clock at least every
`CHECK_INTERVAL` seconds, by a timer of the event loop. If two readings are more than `GAP` seconds apart, the loop did
not run in between, and the clock leaves that time out.
"""

from __future__ import annotations

import asyncio
import time

CHECK_INTERVAL = 0.5
"""Seconds between two readings while the event loop runs and nothing else asks for the time."""
GAP = 1.0
"""If more seconds than this lie between two readings, the server has stood still. It is twice CHECK_INTERVAL: a timer
that fires late on a busy machine is no standstill."""


class Uptime:
    """Counts the seconds in which the event loop ran. Connections, deadlines and leases use it."""

    __slots__ = ("_last", "_lost", "_timer", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._last, self._lost = time.monotonic(), 0.0
        """The last reading of the system's clock; seconds left out so far."""
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def now(self) -> float:
        """Seconds since an arbitrary beginning."""
        now = time.monotonic()
        gap = now - self._last
        if gap > GAP:
            # CHECK_INTERVAL of the gap does count: so much time may have passed before the standstill began.
            self._lost += gap - CHECK_INTERVAL
        self._last = now
        return now - self._lost

    def stop(self) -> None:
        """Cancels the timer, which would keep the event loop and this clock alive."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self.now()
        self._timer = self.loop.call_later(CHECK_INTERVAL, self._check)
