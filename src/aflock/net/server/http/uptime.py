"""The server's time: a clock that does not count the time in which the server itself stood still, and deadlines by it.

While the process is stopped (SIGSTOP, a suspended machine) or its event loop is blocked, the server reads nothing,
however fast its clients send. Deadlines and leases that went by wall time would all be over the moment the server runs
again, and the clients would pay for a pause they did not cause. So this clock reads the system's clock at least every
`CHECK_INTERVAL` seconds, by a timer of the event loop. If two readings are more than `GAP` seconds apart, the loop did
not run in between, and the clock leaves that time out.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

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


class Deadline:
    """Calls `on_passed` when the deadline has passed, by the server's uptime; it moves far more often than it passes.

    A connection moves its deadline with every request. Cancelling a timer of the event loop and making a new one each
    time would be expensive, so a deadline that moves to a later time leaves its timer as it is: when the timer fires
    too early, it is set again for the rest of the time.
    """

    __slots__ = ("_clock", "_due", "_fires", "_on_passed", "_timer")

    def __init__(self, clock: Uptime, on_passed: Callable[[], None]) -> None:
        self._clock, self._on_passed = clock, on_passed
        self._due = self._fires = math.inf
        """When the deadline passes; when the timer fires. Infinity: there is no deadline, or no timer."""
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Moves the deadline to so many seconds from now."""
        now = self._clock.now()
        self._due = due = now + seconds
        if due < self._fires:
            self._start_timer(due, now)

    def clear(self) -> None:
        """Removes the deadline until it is set again; the timer stays, and finds nothing to do when it fires."""
        self._due = math.inf

    def stop(self) -> None:
        """Removes the deadline and cancels the timer, which would keep the owner of the deadline alive."""
        self._due = self._fires = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, due: float, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires, self._timer = due, self._clock.loop.call_later(due - now, self._fired)

    def _fired(self) -> None:
        due, now = self._due, self._clock.now()
        self._fires, self._timer = math.inf, None
        if due <= now:
            self._due = math.inf
            self._on_passed()
        elif due < math.inf:  # the deadline was moved, or the server stood still meanwhile
            self._start_timer(due, now)
