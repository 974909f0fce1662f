"""Executors decide where and when a job is computed; the clock decides the order of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import AflockError, ParameterError
from ..local import Memory, Trained
from ..types import Job
from .client_training import ClientTraining

EXECUTORS = ("auto", "inline", "processes", "ray")


@dataclass(frozen=True)
class Placement:
    """Where the clients of a run are trained; what comes out is the same to the last bit."""

    workers: int = 0
    """How many processes train; 0: as many as the executor thinks best."""
    executor: str = "auto"
    """inline (in this process), processes, ray; auto: processes if there are to be workers, else inline."""
    address: str | None = None
    """Of the Ray cluster; None: one on this machine, for this run."""

    def __post_init__(self) -> None:
        workers, executor = self.workers, self.executor
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
            raise ParameterError(f"workers={workers!r} is not valid; expected an integer of at least 0")
        if executor not in EXECUTORS:
            raise ParameterError(f"executor={executor!r} is not valid; expected one of {', '.join(EXECUTORS)}")
        if self.address is not None and executor != "ray":
            raise ParameterError(f"address={self.address!r} needs executor='ray'; it is {executor!r}")
        if workers and executor == "inline":
            raise ParameterError("the executor inline has no workers; leave them out, or choose processes or ray")
        if executor == "processes" and not workers:
            raise ParameterError("the executor processes needs to know how many workers; give at least 1")


class WorkerDied(AflockError):
    """Workers died again and again on the same job, or cannot start at all."""


def training_error(error: Exception, client: int) -> AflockError:
    """What a worker reports when a client's training raises: an error that can travel, and names the client."""
    if isinstance(error, AflockError):
        return error
    return AflockError(f"{type(error).__name__} while client {client} was trained: {error}")


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

    def describe(self) -> dict[str, Any]:
        """For the record: which executor it was, with how many workers, and what happened to them; JSON values."""
        return {"executor": "inline"}

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
