"""Where jobs are worked on: an executor decides when and where the sums are done; the order is the clock's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from ..local import Memory, Trained
from ..types import Job
from .client_training import Workshop


class Order(NamedTuple):
    """A job on its way: everything that decides its result."""

    job: Job
    number: int
    steps: int
    memory: Memory
    delay: float
    due: float = 0.0
    """When the result will be asked for, as far as is known: earlier ones are worked on first."""

    @property
    def kind(self) -> str:
        """What it is on the clock: the return of a job."""
        return "job"

    @property
    def client(self) -> int:
        """Whose it is."""
        return self.job.client


class Executor(ABC):
    """Takes orders when jobs are handed out, gives results when they arrive."""

    @abstractmethod
    def submit(self, order: Order) -> None:
        """A job has been handed out; it may be worked on from now on."""

    @abstractmethod
    def result(self, order: Order) -> Trained:
        """The result of a submitted order; asked for once."""

    @abstractmethod
    def cancel(self, order: Order) -> None:
        """Nobody waits for that order any more."""

    def close(self) -> None:
        """Ends what the executor started."""


class Inline(Executor):
    """In this process, when the result is asked for."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    def submit(self, order: Order) -> None:
        """Waits."""

    def result(self, order: Order) -> Trained:
        """Works now."""
        return self._workshop.train(order.job, order.number, order.steps, order.memory, order.delay)

    def cancel(self, order: Order) -> None:
        """There is nothing to stop."""
