"""What a federation knows about one of its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...types import Receipt


@dataclass(slots=True)
class ClientRecord:
    """A client by name, its number in the strategy, and the answer to its last update."""

    name: str
    number: int
    """The strategy's number for the client."""
    generation: int
    """Which of the member's tokens it joined with: the first, the one of a second invitation, and so on."""
    jobs: int = 0
    """How many jobs the client was given."""
    uploads: int = 0
    """How many of its updates got a receipt."""
    staleness_sum: int = 0
    """The staleness of all of them together."""
    staleness: int = 0
    """The staleness of its last update."""
    suspended: bool = False
    answered: int = -1
    """The job of its last update; `receipt` and `version` are the answer, which the same update gets if sent again."""
    receipt: Receipt = field(default_factory=lambda: Receipt("rejected", 0))
    version: int = 0

    def note(self, job: int, receipt: Receipt, version: int) -> None:
        """Keeps the answer to the client's update for a job."""
        staleness = receipt.staleness
        self.uploads += 1
        self.staleness, self.staleness_sum = staleness, self.staleness_sum + staleness
        self.answered, self.receipt, self.version = job, receipt, version

    def saved(self) -> list[Any]:
        """All fields as JSON values, in the order of the class."""
        receipt = [self.receipt.outcome, self.receipt.staleness, self.receipt.reason]
        return [*(getattr(self, name) for name in _plain()), receipt]

    @classmethod
    def loaded(cls, values: list[Any]) -> ClientRecord:
        """Makes a record from what `saved` returned."""
        *plain, receipt = values
        return cls(**dict(zip(_plain(), plain, strict=True)), receipt=Receipt(*receipt))


def _plain() -> list[str]:
    return [name for name in ClientRecord.__dataclass_fields__ if name != "receipt"]
