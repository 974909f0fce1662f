"""What every client rule is: K local steps from the job's model, and the vectors the server asked for.

    x_0 = w^s,   x_{k+1} = x_k - eta_l * direction_k,   k = 0 .. K-1

    gradient  = (1/K) sum_k grad F_i(x_k; batch_k)      the mean of the raw stochastic gradients
    delta     = x_K - w^s        model = x_K        direction = (w^s - x_K) / (eta_l*K)

eta_l*K is the sum of the rates of the steps up to the x_K that is sent. The answer to a first job is the gradient at
w^s, without moving; where the server takes directions instead of gradients, it is the direction of K steps.

A rule writes `_directions`: what direction_k is. What a client must remember between its jobs lives in a dictionary the
caller owns (`memory`, one per client), so that a rule object serves any number of clients and a client can keep its
memory on disk. `train` only reads it; what is new in it comes back with the result and is kept once the server has
taken the update:

    done = rule.train(job, task, steps=5, needs=s.needs, changes=s.changes, memory=memory)
    receipt = s.receive(Update(job.client, job.version, done.vectors, done.steps))
    done.keep(memory, receipt)

so that the client never believes something the server has not seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .. import kernels
from ..errors import CountError, MissingVector, VectorError
from ..params import Params
from ..types import Accumulator, Job, Receipt, Vector

Memory = MutableMapping[str, npt.NDArray[Any]]
Known = Mapping[str, npt.NDArray[Any]]
Direction = Callable[[Vector, Vector, int], Vector]
"""(gradient at x_k, x_k, k) -> direction_k; it may return its first argument."""

Walk = tuple[Vector, Accumulator | None, int, float]
"""x_K, the sum of the gradients on the way (where it is wanted), the steps made, and the sum of the rates up to x_K."""

ALL = ("gradient", "delta", "model", "direction")


def first_vector(needs: tuple[str, ...]) -> str:
    """The vector that answers a first job, for a strategy that needs these of the others."""
    return "direction" if "direction" in needs and "gradient" not in needs else "gradient"


@dataclass(slots=True)
class Task:
    """A client's own problem: its stochastic gradient, how many batches make an epoch, its own validation loss."""

    gradient: Callable[[Vector, int], Vector]
    """(x, k) -> stochastic gradient of F_i at x for local step k, counted from 0; x must not be changed."""
    batches: int = 1
    validation: Callable[[Vector], float] | None = None
    descend: Callable[[Vector, int, float], None] | None = None
    """(x, k, rate): x <- x - rate*gradient(x, k) in place, where the task has a faster way to do it."""
    room: Vector | None = None
    """Where the task wants x to be worked on; None: in fresh memory. A `model` that is sent lies there, too."""
    delta: Vector | None = None
    """Where a delta is to be laid; None: in fresh memory. What lies in either is valid until the next job."""


@dataclass(slots=True)
class Trained:
    """What a job came to: the vectors to send, the number of steps made, and what to remember of it."""

    vectors: dict[str, Vector]
    steps: int
    memory: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def keep(self, memory: Memory, receipt: Receipt) -> None:
        """Remembers, unless the server has rejected the update."""
        if not receipt.rejected:
            memory.update(self.memory)


class LocalRule(ABC):
    """One client rule."""

    name: ClassVar[str]
    remembers: ClassVar[tuple[str, ...]] = ()
    """The names of what a client must keep between jobs."""
    extras: ClassVar[tuple[str, ...]] = ()
    """The extra vectors a job must carry."""
    gives: ClassVar[tuple[str, ...]] = ALL
    """The vectors it can send."""
    averages: ClassVar[bool] = False
    """Whether the rule itself uses the mean of a job's gradients."""

    @property
    def delay_unit(self) -> str:
        """What the `delay` of `train` counts: the "versions" of the client's last staleness, or the "time" it took."""
        return "versions"

    follows: bool = False
    """Whether direction_k is the gradient itself, nothing added, and nothing is remembered of it."""

    def __init__(self, params: Params) -> None:
        self.p = params

    @property
    @abstractmethod
    def eta_l(self) -> float:
        """The local step size."""

    def train(
        self,
        job: Job,
        task: Task,
        steps: int = 1,
        *,
        needs: tuple[str, ...] = ALL,
        changes: tuple[str, ...] = (),
        memory: Memory | None = None,
        delay: float = 0.0,
    ) -> Trained:
        """Works on a job.

        `needs` and `changes` are the strategy's; `memory` is this client's; `delay` is the staleness the client saw
        last, or the time its last job took (`delay_unit`), for rules that adapt to it.
        """
        if not (type(steps) is int and steps > 0):
            steps = _count(steps)
        if memory is None and (self.remembers or changes):
            raise MissingVector(
                f"{self.name} remembers vectors between jobs; pass memory=, a dictionary that stays with the client"
            )
        known: Known = memory or {}
        if job.first:
            return self._first(job, task, steps, first_vector(needs), changes, known, delay)
        for name in self.extras:
            if name not in job.extras:
                raise MissingVector(f"the local rule {self.name} needs the job's extra vector {name!r}")
        if self.follows and steps == 1:
            return self._one_step(job, task, needs, changes, known)
        x, total, made, length = self._run(job, task, steps, known, delay, self.averages or "gradient" in needs)
        gradient = None if total is None else _mean(total, made)
        vectors = self._vectors(job.model, x, gradient, length, needs, task.delta)
        kept = {} if gradient is None else self._remember(gradient)
        self._finish(job, x, made, known, vectors, kept)
        if changes:
            _send_changes(vectors, changes, known, kept)
        return Trained(vectors, made, kept)

    def _first(
        self, job: Job, task: Task, steps: int, name: str, changes: tuple[str, ...], known: Known, delay: float
    ) -> Trained:
        """The opening job of a rule that needs every client's gradient, or the direction of its steps, at w^s."""
        if name == "direction":
            vector, steps = self._first_direction(job, task, steps, known, delay)
            kept = {}
        else:
            vector = self._gradient_at_start(job, task, steps)
            kept = self._remember(vector)
        told = {f"told {name}": vector.astype(np.float64)} if name in changes else {}
        return Trained({name: vector}, steps, kept | told)

    def _gradient_at_start(self, job: Job, task: Task, steps: int) -> Vector:
        """The mean of K samples at w^s, without moving."""
        total = np.zeros(job.model.size)
        for k in range(steps):
            total += sound(task.gradient(job.model, k), job.model)
        return _mean(total, steps)

    def _first_direction(self, job: Job, task: Task, steps: int, known: Known, delay: float) -> tuple[Vector, int]:
        """The direction of K steps from w^s, and K."""
        if self.follows and steps == 1:
            return self._one_step(job, task, ("direction",), (), known).vectors["direction"], 1
        x, _, made, length = self._run(job, task, steps, known, delay, False)
        return self._vectors(job.model, x, None, length, ("direction",), None)["direction"], made

    def _one_step(
        self, job: Job, task: Task, needs: tuple[str, ...], changes: tuple[str, ...], known: Known
    ) -> Trained:
        """K = 1 along the gradient g: x_1 - w^s = -eta_l*g, without the detour over x_1 and its rounding."""
        gradient, rate = sound(task.gradient(job.model, 0), job.model), np.float32(self.eta_l)
        vectors: dict[str, Vector] = {}
        for name in needs:
            if name in ("gradient", "direction"):
                vectors[name] = gradient.copy()
            elif name == "delta":
                vectors[name] = np.multiply(gradient, -rate, out=task.delta)
            elif name == "model":
                vectors[name] = job.model - rate * gradient
        kept: dict[str, npt.NDArray[Any]] = {}
        if changes:
            _send_changes(vectors, changes, known, kept)
        return Trained(vectors, 1, kept)

    def _run(self, job: Job, task: Task, steps: int, memory: Known, delay: float, mean: bool) -> Walk:
        """x_K, the sum of the raw gradients if the `mean` is wanted, and the number of steps made."""
        x, rate = start(job, task), np.float32(self.eta_l)
        if self.follows and task.descend is not None and not mean:
            for k in range(steps):
                task.descend(x, k, self.eta_l)
            return x, None, steps, self.eta_l * steps
        total = np.zeros(x.size) if mean else None
        direction = self._directions(job, memory)
        for k in range(steps):
            gradient = sound(task.gradient(x, k), x)
            if total is not None and self.follows:
                kernels.descend_and_sum(x, rate, gradient, total)
                continue
            if total is not None:
                kernels.add(total, 1.0, gradient)
            kernels.descend(x, rate, direction(gradient, x, k))
        return x, total, steps, self.eta_l * steps

    def _vectors(
        self,
        start: Vector,
        x: Vector,
        gradient: Vector | None,
        length: float,
        needs: tuple[str, ...],
        place: Vector | None,
    ) -> dict[str, Vector]:
        vectors: dict[str, Vector] = {}
        for name in needs:
            if name == "gradient" and gradient is not None:
                vectors[name] = gradient
            elif name == "delta":
                vectors[name] = np.subtract(x, start, out=place)
            elif name == "model":
                vectors[name] = x
            elif name == "direction":
                vectors[name] = (start - x) / np.float32(length or 1.0)  # rates of 0 have not moved x
        return vectors

    @abstractmethod
    def _directions(self, job: Job, memory: Known) -> Direction:
        """direction_k for this job."""

    def _remember(self, gradient: Vector) -> dict[str, npt.NDArray[Any]]:
        """What a rule keeps of the mean gradient of a job."""
        return {}

    def _finish(
        self, job: Job, x: Vector, steps: int, memory: Known, vectors: dict[str, Vector], kept: dict[str, Any]
    ) -> None:
        """After the last step: adds what else there is to send and to keep."""


def _count(steps: Any) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 1:
        raise CountError(f"steps is {steps!r}; expected an integer of at least 1")
    return int(steps)


def start(job: Job, task: Task) -> Vector:
    """x_0 = w^s, in the task's room if it has one."""
    if task.room is None:
        return job.model.copy()
    np.copyto(task.room, job.model)
    return task.room


def _mean(total: npt.NDArray[np.float64], steps: int) -> Vector:
    mean: Vector = (total / steps).astype(np.float32)
    return mean


def sound(gradient: Vector, x: Vector) -> Vector:
    """The gradient a task returned, if it has the model's shape."""
    if getattr(gradient, "shape", None) != x.shape:
        raise VectorError(
            f"the task's gradient has shape {getattr(gradient, 'shape', type(gradient).__name__)}; expected {x.shape}"
        )
    return gradient


def _send_changes(vectors: dict[str, Vector], changes: tuple[str, ...], memory: Known, kept: dict[str, Any]) -> None:
    """Replaces a vector by its change since the last report.

    What is remembered is the sum of what was sent, not the vector: the rounding of one change is made good by the next,
    and the server's copy never drifts from the client's.
    """
    for name in changes:
        told = memory.get(f"told {name}")
        if told is None:
            raise MissingVector(f"the client has no earlier {name} to send the change of; it must answer a first job")
        change = (vectors[name] - told).astype(np.float32)
        kept[f"told {name}"] = told + change
        vectors[name] = change
