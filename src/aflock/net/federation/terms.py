"""The terms of a federation: when it ends, and which norms it accepts until then. The journal holds them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...coordination.budget import Budget


class Terms(NamedTuple):
    """The terms may change while a federation runs; a record of the journal says from when on the new ones hold."""

    budget: Budget = Budget()
    norm_factor: float | None = None
    """How many times the largest norm so far a vector may have; None: any, as in journals of earlier versions."""

    def record(self) -> list[float | None]:
        """The terms as a journal record and a snapshot hold them; None stands for infinity: JSON has none."""
        budget = self.budget
        limits = (budget.uploads, budget.versions, budget.target)
        return [*(None if math.isinf(limit) else limit for limit in limits), self.norm_factor]

    @classmethod
    def of(cls, record: list[Any]) -> Terms:
        """Makes terms from what `record` returned; journals of earlier versions have no norm factor."""
        uploads, versions, target, *rest = record
        limits = {"uploads": uploads, "versions": versions, "target": target}
        budget = Budget(**{name: limit for name, limit in limits.items() if limit is not None})
        return cls(budget, rest[0] if rest else None)
