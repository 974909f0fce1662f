"""A deadline that is moved far more often than it is reached."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Deadline:
    """Calls `late` when it is reached. One timer looks now and then, so that moving it back costs next to nothing."""

    __slots__ = ("_due", "_late", "_looks", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, late: Callable[[], None]) -> None:
        self._loop, self._late = loop, late
        self._due = self._looks = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """So long from now."""
        self._due = due = self._loop.time() + seconds
        if due < self._looks:
            self._look_at(due)

    def clear(self) -> None:
        """None, until it is set again."""
        self._due = math.inf

    def stop(self) -> None:
        """The same, and nothing here is kept alive by it."""
        self._due = self._looks = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_at(self, time: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._looks, self._timer = time, self._loop.call_at(time, self._look)

    def _look(self) -> None:
        due = self._due
        self._looks, self._timer = math.inf, None
        if due <= self._loop.time():
            self._due = math.inf
            self._late()
        elif due < math.inf:
            self._look_at(due)
