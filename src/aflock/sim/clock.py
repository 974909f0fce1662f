"""The event queue: a heap ordered by (time, sequence).

Equal times are first in, first out. Items are never compared: the sequence number decides before they would be.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")


class Clock(Generic[T]):
    """The events to come, each with its time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.heap: list[tuple[float, int, T]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self.heap)

    def at(self, time: float, item: T) -> None:
        """Schedules an item at that time, behind all items of the same time."""
        heapq.heappush(self.heap, (time, self._sequence, item))
        self._sequence += 1

    def next(self) -> T:
        """Takes out the earliest item and moves the clock to its time."""
        self.now, _, item = heapq.heappop(self.heap)
        return item

    @property
    def upcoming(self) -> float:
        """When the earliest item is due."""
        return self.heap[0][0]

    def entries(self) -> list[tuple[float, int, T]]:
        """All scheduled items, in order; for saving."""
        return sorted(self.heap, key=lambda entry: entry[:2])

    def restore(self, now: float, sequence: int, entries: list[tuple[float, int, T]]) -> None:
        """Restores what `entries` returned; `sequence` is the number the next item gets."""
        self.now, self._sequence = now, sequence
        self.heap = list(entries)
        heapq.heapify(self.heap)

    @property
    def sequence(self) -> int:
        """The number the next item gets."""
        return self._sequence
