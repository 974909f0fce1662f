"""What a run is asked for, what it tells on the way, and how it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from ..errors import CountError
from ..local import Memory, Trained
from ..types import Job, Outcome, Vector
from .answers import Hello

Train = Callable[[Job, int, Memory, float], Trained]
"""(job, how many the client had before, what it remembers, staleness of its last update) -> what came of it."""

Prepare = Callable[[Hello, threading.Event], Train]
"""Training for the federation that has said hello; once the event is set, nobody waits for what comes of it."""

Why = Literal["ended", "jobs", "stopped"]


class Cancelled(Exception):
    """Training has ended because nobody waits for what comes of it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One more job is done: what became of it, and how long it took from pull to receipt."""

    jobs: int
    job: int
    version: int
    server: int
    staleness: int
    outcome: Outcome
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: the federation has `ended`, the `jobs` asked for are done, or it was `stopped`."""

    why: Why
    jobs: int
    version: int
    model: Vector | None = field(repr=False)
    """The last model that was pulled."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run is asked for."""

    examples: int
    jobs: int | None
    progress: Callable[[Progress], None] | None

    @classmethod
    def checked(cls, examples: int, jobs: int | None, progress: Callable[[Progress], None] | None) -> Self:
        """Those that make sense."""
        if isinstance(examples, bool) or not isinstance(examples, int | np.integer) or examples < 1:
            raise CountError(f"examples is {examples!r}; expected an integer of at least 1")
        if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0):
            raise CountError(f"jobs is {jobs!r}; expected an integer of at least 0, or None")
        return cls(int(examples), jobs, progress)

    def reached(self, jobs: int) -> bool:
        """Whether so many jobs are enough."""
        return self.jobs is not None and jobs >= self.jobs
