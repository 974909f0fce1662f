"""Executors decide where and when a job is computed; the clock decides the order of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from ..local import Memory, Trained
from ..types import Job
from .client_training import ClientTraining


class Order(NamedTuple):
    """A job to compute, with everything that its result depends on."""

    job: Job
    number: int
    steps: int
    memory: Memory
    delay: float
    due: float = 0.0
    """The time at which the engine will ask for the result, if it is known: executors compute earlier ones first."""

    @property
    def kind(self) -> str:
        """The kind of event it is on the clock."""
        return "job"

    @property
    def client(self) -> int:
        """The client whose job it is."""
        return self.job.client


class Executor(ABC):
    """The engine submits an order when it gives a job, and asks for the result when the job arrives."""

    @abstractmethod
    def submit(self, order: Order) -> None:
        """Takes an order; it may be computed from now on."""

    @abstractmethod
    def result(self, order: Order) -> Trained:
        """The result of a submitted order; the engine asks for it once."""

    @abstractmethod
    def cancel(self, order: Order) -> None:
        """The engine will not ask for the result of that order."""

    def close(self) -> None:
        """Ends the processes that the executor started."""


class Inline(Executor):
    """Computes every order in this process, when its result is asked for."""

    def __init__(self, training: ClientTraining) -> None:
        self._training = training

    def submit(self, order: Order) -> None:
        """Does nothing: `result` gets the order again."""

    def result(self, order: Order) -> Trained:
        """Computes the order."""
        return self._training.train(order.job, order.number, order.steps, order.memory, order.delay)

    def cancel(self, order: Order) -> None:
        """Does nothing: the order was not begun."""
