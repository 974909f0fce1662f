"""What a run is given (a training function, limits) and what it reports (progress, a summary).

`client.py` makes the limits, `run.py` the reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from ...errors import CountError
from ...local import Memory, Trained
from ...types import Job, Outcome, Vector
from .answers import Hello

Train = Callable[[Job, int, Memory, float], Trained]
"""(job, number of jobs the client had before, its memory, staleness of its last update) -> vectors and new memory."""

Prepare = Callable[[Hello, threading.Event], Train]
"""Makes the training function for the federation of a hello; when the event is set, training may stop early."""

Why = Literal["ended", "jobs", "stopped"]


class Cancelled(Exception):
    """Raised by training that stopped early because the run had cancelled it."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """One job that is done, as `progress` gets it.

    jobs       how many jobs the run has done so far
    job        the number of this job
    version    the version it began with
    server     the server's version when it took the update
    seconds    from pull to receipt
    """

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
    """How a run ended: the federation has "ended", the "jobs" asked for are done, or the run was "stopped"."""

    why: Why
    jobs: int
    version: int
    model: Vector | None = field(repr=False)
    """The model of the last job that was pulled."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many examples the client has, after how many jobs the run ends, and what to call after each."""

    examples: int
    jobs: int | None
    progress: Callable[[JobReport], None] | None

    @classmethod
    def checked(cls, examples: int, jobs: int | None, progress: Callable[[JobReport], None] | None) -> Self:
        """Checks the values a user gave."""
        if isinstance(examples, bool) or not isinstance(examples, int | np.integer) or examples < 1:
            raise CountError(f"examples is {examples!r}; expected an integer of at least 1")
        if jobs is not None and (isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 0):
            raise CountError(f"jobs is {jobs!r}; expected an integer of at least 0, or None")
        return cls(int(examples), jobs, progress)

    def reached(self, jobs: int) -> bool:
        """Whether the run ends after so many jobs."""
        return self.jobs is not None and jobs >= self.jobs
