"""The types that packages pass to each other: jobs, updates, receipts, vectors.

A model is one flat float32 vector. A client pulls a `Job`, works, and reports an `Update`; the server answers with a
`Receipt`. Nothing here knows how any of them travels. Nobody changes one that was made; they are not frozen because a
frozen dataclass takes three times as long to make, and every arrival makes one of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
"""A flat float32 vector of length d: a model, a gradient, a delta ..."""

Accumulator = npt.NDArray[np.float64]
"""A flat float64 vector of length d: a running sum that must not drift."""

State = dict[str, Any]
"""What `state_dict` returns: nested dicts whose leaves are NumPy arrays or JSON values."""

Outcome = Literal["applied", "buffered", "rejected"]


@dataclass(slots=True)
class Job:
    """What a client receives: the model `w^s` of version s and the rule's extra vectors, all taken at s.

    `first` marks the opening job of a rule that needs every client's gradient before it starts: the client answers with
    the mean of K stochastic gradients *at* the model, without moving. `id` is the coordinator's number for the job.
    """

    client: int
    version: int
    model: Vector
    extras: Mapping[str, Vector] = field(default_factory=dict)
    first: bool = False
    id: int | None = None


@dataclass(slots=True)
class Update:
    """What a client reports: the version it started from, how far it went and the vectors the rule asked for."""

    client: int
    version: int
    vectors: Mapping[str, Vector]
    steps: int = 1
    examples: int = 1
    job: int | None = None


@dataclass(slots=True)
class Receipt:
    """What became of an update: applied (the version grew), buffered (held for the next step) or rejected (why)."""

    outcome: Outcome
    staleness: int
    reason: str = ""

    @property
    def applied(self) -> bool:
        """Whether this arrival made a new version of the model."""
        return self.outcome == "applied"

    @property
    def buffered(self) -> bool:
        """Whether the arrival is held until the rule's next step."""
        return self.outcome == "buffered"

    @property
    def rejected(self) -> bool:
        """Whether the arrival was discarded; `reason` says why."""
        return self.outcome == "rejected"
