"""A deadline that is moved far more often than it passes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from .uptime import Uptime


class Deadline:
    """Calls `on_passed` when the deadline has passed, by the server's uptime.

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
