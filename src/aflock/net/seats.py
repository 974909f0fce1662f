"""What a server remembers of its clients, what it has counted, and when it is over."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..types import Receipt

HISTOGRAM = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the classes staleness is counted in."""


class Terms(NamedTuple):
    """When a federation ends: at the first of these; never, if there is none."""

    uploads: int | None = None
    versions: int | None = None
    target: float | None = None
    """Accuracy; whoever measures it says so."""

    def spent(self, uploads: int, versions: int) -> str:
        """Why a federation of so many updates and server steps is over; nothing if it is not."""
        if self.versions is not None and versions >= self.versions:
            return f"{self.versions} server steps are done"
        if self.uploads is not None and uploads >= self.uploads:
            return f"{self.uploads} updates have come"
        return ""


@dataclass(slots=True)
class Seat:
    """What the server knows of a client."""

    name: str
    number: int
    generation: int
    jobs: int = 0
    """How many it was given."""
    uploads: int = 0
    staleness_sum: int = 0
    staleness: int = 0
    """Of its last update."""
    suspended: bool = False
    answered: int = -1
    """The last job it answered, and what it was told: the same again if it asks again."""
    receipt: Receipt = field(default_factory=lambda: Receipt("rejected", 0))
    version: int = 0

    def note(self, job: int, receipt: Receipt, version: int) -> None:
        """It has answered a job, and was told that."""
        staleness = receipt.staleness
        self.uploads += 1
        self.staleness, self.staleness_sum = staleness, self.staleness_sum + staleness
        self.answered, self.receipt, self.version = job, receipt, version

    def saved(self) -> list[Any]:
        """All of it, as JSON values."""
        receipt = [self.receipt.outcome, self.receipt.staleness, self.receipt.reason]
        return [*(getattr(self, name) for name in _plain()), receipt]

    @classmethod
    def loaded(cls, values: list[Any]) -> Seat:
        """From what `saved` returned."""
        *plain, receipt = values
        return cls(**dict(zip(_plain(), plain, strict=True)), receipt=Receipt(*receipt))


def _plain() -> list[str]:
    return [name for name in Seat.__dataclass_fields__ if name != "receipt"]


@dataclass
class Counts:
    """What a federation has seen."""

    applied: int = 0
    buffered: int = 0
    rejected: int = 0
    pulls: int = 0
    dropped: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    staleness: list[int] = field(default_factory=lambda: [0] * (len(HISTOGRAM) + 1))

    @property
    def updates(self) -> int:
        """All that were taken."""
        return self.applied + self.buffered + self.rejected

    def add(self, receipt: Receipt) -> None:
        """One more update."""
        outcome, staleness = receipt.outcome, receipt.staleness
        if outcome == "applied":
            self.applied += 1
        elif outcome == "buffered":
            self.buffered += 1
        else:
            self.rejected += 1
        self.staleness_sum += staleness
        if staleness > self.staleness_max:
            self.staleness_max = staleness
        self.staleness[bisect_left(HISTOGRAM, staleness)] += 1
