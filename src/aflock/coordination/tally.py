"""What a run or a federation has counted so far."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..types import Receipt

HISTOGRAM = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Upper ends of the classes that staleness is counted in, powers of two; one more class is open above."""

_OPEN_CLASS, _LARGEST = len(HISTOGRAM), HISTOGRAM[-1]
_CLASS = tuple(bisect_left(HISTOGRAM, staleness) for staleness in range(_LARGEST + 1))
"""The class of every staleness below the open class: a table, because every update of a simulation looks it up."""


@dataclass(slots=True)
class Tally:
    """Updates by outcome and staleness, jobs, and the work and traffic behind them."""

    updates: int = 0
    applied: int = 0
    buffered: int = 0
    rejected: int = 0
    pulls: int = 0
    """Jobs handed out."""
    dropped: int = 0
    """Jobs given up."""
    undone: int = 0
    """Steps that were undone because they left the model with numbers that are not finite."""
    gradients: int = 0
    """Local steps made."""
    bytes_up: int = 0
    bytes_down: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    staleness: list[int] = field(default_factory=lambda: [0] * (len(HISTOGRAM) + 1))

    def add(self, receipt: Receipt, steps: int = 0, size: int = 0) -> None:
        """Counts one more update, of so many local steps and bytes."""
        outcome, staleness = receipt.outcome, receipt.staleness
        self.updates += 1
        if outcome == "applied":
            self.applied += 1
        elif outcome == "buffered":
            self.buffered += 1
        else:
            self.rejected += 1
        self.gradients += steps
        self.bytes_up += size
        self.staleness_sum += staleness
        if staleness > self.staleness_max:
            self.staleness_max = staleness
        self.staleness[_CLASS[staleness] if staleness <= _LARGEST else _OPEN_CLASS] += 1

    @property
    def staleness_mean(self) -> float:
        """The mean staleness of all updates."""
        return self.staleness_sum / self.updates if self.updates else 0.0

    def state_dict(self) -> dict[str, Any]:
        """All counts, as JSON values."""
        return {name: getattr(self, name) for name in Tally.__dataclass_fields__}

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> Tally:
        """From what `state_dict` returned; earlier versions counted less, and called the updates uploads."""
        known = {name: value for name, value in saved.items() if name != "uploads"}
        outcomes = sum(saved.get(name, 0) for name in ("applied", "buffered", "rejected"))
        return cls(**{"updates": saved.get("uploads", outcomes), **known})
