"""What a client does with a job, as a pure function: the same job, number and memory give the same bits anywhere.

A client's examples are shuffled once and kept in one block. A job starts at a random place in it and takes its batches
one after the other, around the end: within a job no example comes twice before all have come, every example is as
likely as any other, and a batch is a slice, not a copy. The place depends on the seed, the client and the number of the
job alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import rng
from ..data import Dataset, Partition
from ..local import Fixed, LocalRule, Memory, Steps, Task, Trained
from ..models.base import Model
from ..types import Job, Vector


@dataclass(frozen=True)
class Shelf:
    """One client's examples, shuffled, with the first batch again at the end so that no slice needs to wrap."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    size: int
    batch: int
    task: Task


@dataclass
class Workshop:
    """All clients' data and the one model and rule they train with."""

    dataset: Dataset
    partition: Partition
    model: Model
    rule: LocalRule
    steps: Steps
    batch: int
    seed: int
    needs: tuple[str, ...]
    changes: tuple[str, ...] = ()
    validation: float = 0.0
    """The share of every client's examples that it does not train on."""
    _shelves: dict[int, Shelf] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._key = rng.counter_key(self.seed, "batches")
        self._steps_key = rng.counter_key(self.seed, "steps")
        self._scratch: Vector = np.empty(self.model.length, np.float32)
        self._room: Vector = np.empty_like(self._scratch) if self.model.weights is None else self.model.weights
        self._delta: Vector = np.empty_like(self._scratch)
        self._buffers = self.model.get_buffers()
        self._sizes = [len(rows) - self._kept(len(rows)) for rows in self.partition.indices]

    def _kept(self, count: int) -> int:
        """How many of a client's examples are for validation; one at least is left to train on."""
        return min(round(self.validation * count), count - 1)

    def clear(self) -> None:
        """Forgets the clients' blocks; they are made again when needed."""
        self._shelves.clear()

    def examples(self, client: int) -> int:
        """How many examples the client has."""
        return self._sizes[client]

    def steps_of(self, client: int, number: int) -> int:
        """K of the client's job of that number."""
        if isinstance(self.steps, Fixed):
            return self.steps.steps
        batches = -(-self._sizes[client] // self.batch)
        return self.steps.draw(rng.fraction(self._steps_key, client, number), batches)

    def train(self, job: Job, number: int, steps: int, memory: Memory, delay: float) -> Trained:
        """Works on the client's job of that number; reads the memory, changes nothing.

        The vectors that come back are valid until the next job.
        """
        client, model = job.client, self.model
        shelf = self._at = self._shelves.get(client) or self._shelf(client)
        self._place = int(rng.fraction(self._key, client, number) * shelf.size)
        if model.buffers:
            model.set_buffers(memory.get("buffers", self._buffers))
        done = self.rule.train(
            job, shelf.task, steps, needs=self.needs, changes=self.changes, memory=memory, delay=delay
        )
        if model.buffers:
            done.memory["buffers"] = model.get_buffers()
        return done

    def _gradient(self, x: Vector, k: int) -> Vector:
        shelf = self._at
        begin = (self._place + k * shelf.batch) % shelf.size
        end = begin + shelf.batch
        self.model.trusted_gradient(x, shelf.x[begin:end], shelf.y[begin:end], self._scratch)
        return self._scratch

    def _descend(self, x: Vector, k: int, rate: float) -> None:
        shelf = self._at
        begin = (self._place + k * shelf.batch) % shelf.size
        end = begin + shelf.batch
        self.model.descend(x, shelf.x[begin:end], shelf.y[begin:end], rate, self._scratch)

    def _shelf(self, client: int) -> Shelf:
        rows = np.array(self.partition.indices[client])
        rng.stream(self.seed, "shelf", client).shuffle(rows)
        kept, rows = np.split(rows, [self._kept(len(rows))])
        size, batch = len(rows), min(self.batch, len(rows))
        rows = np.concatenate([rows, rows[:batch]])
        task = Task(self._gradient, -(-size // batch), self._validator(kept), self._descend, self._room, self._delta)
        shelf = Shelf(self.dataset.take(rows), self.dataset.train_y[rows], size, batch, task)
        self._shelves[client] = shelf
        return shelf

    def _validator(self, rows: npt.NDArray[np.int64]) -> Callable[[Vector], float] | None:
        """The loss on the examples a client keeps for validation."""
        if not len(rows):
            return None
        x, y = self.dataset.take(rows), self.dataset.train_y[rows]
        return lambda w: self.model.evaluate(w, x, y).loss
