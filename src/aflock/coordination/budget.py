"""When a run or a federation ends."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """It ends at the first of these that is reached; infinity: no such limit."""

    uploads: float = math.inf
    versions: float = math.inf
    time: float = math.inf
    """Seconds of the simulation's own time."""
    ticks: float = math.inf
    """Of a simulation in ticks, since its rule has started."""
    target: float = math.inf
    """Accuracy; whoever evaluates the model says when it is reached."""

    def spent(self, uploads: int, versions: int) -> str:
        """Why a federation of so many updates and server steps is over; "" if it is not."""
        if versions >= self.versions:
            return f"{self.versions} server steps are done"
        if uploads >= self.uploads:
            return f"{self.uploads} updates have come"
        return ""
