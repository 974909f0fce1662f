"""Where jobs are worked on: an executor decides when and where the sums are done; the order is the clock's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..local import Memory, Trained
from ..types import Job
from .workshop import Workshop


@dataclass(frozen=True)
class Order:
    """A job on its way: everything that decides its result."""

    job: Job
    number: int
    steps: int
    memory: Memory
    delay: float


class Executor(ABC):
    """Takes orders when jobs are handed out, gives results when they arrive."""

    @abstractmethod
    def submit(self, order: Order) -> None:
        """A job has been handed out; it may be worked on from now on."""

    @abstractmethod
    def result(self, client: int) -> Trained:
        """The result of the client's open order."""

    @abstractmethod
    def cancel(self, client: int) -> None:
        """Nobody waits for the client's open order any more."""

    @abstractmethod
    def orders(self) -> dict[int, Order]:
        """The open orders by client; for saving."""

    def close(self) -> None:
        """Ends what the executor started."""


class Inline(Executor):
    """In this process, when the result is asked for."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._orders: dict[int, Order] = {}

    def submit(self, order: Order) -> None:
        """Waits."""
        self._orders[order.job.client] = order

    def result(self, client: int) -> Trained:
        """Works now."""
        order = self._orders.pop(client)
        return self._workshop.train(order.job, order.number, order.steps, order.memory, order.delay)

    def cancel(self, client: int) -> None:
        """Forgets."""
        self._orders.pop(client, None)

    def orders(self) -> dict[int, Order]:
        """What is open."""
        return dict(self._orders)
