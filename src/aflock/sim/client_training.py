"""What a client does with a job, as a pure function: the same job, number and memory give the same bits anywhere.

A client's examples are shuffled once and kept in one block. A job starts at a random offset in it and takes its batches
one after the other, around the end: within a job no example comes twice before all have come, every example is as
likely as any other, and a batch is a slice, not a copy. The offset depends on the seed, the client and the number of
the job alone.
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
from ..training import Batch, Trainer
from ..types import Job, Vector


@dataclass(slots=True)
class Shelf:
    """One client's examples, shuffled, with the first batch again at the end so that no slice needs to wrap."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    size: int
    length: int
    """Of a batch."""
    offset: int = 0
    """Where the current job begins."""

    def batch(self, k: int) -> Batch:
        """The examples of local step k: a slice of the block, not a copy."""
        begin = (self.offset + k * self.length) % self.size
        end = begin + self.length
        return self.x[begin:end], self.y[begin:end]


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
    _shelves: dict[int, tuple[Shelf, Task]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._key = rng.counter_key(self.seed, "batches")
        self._steps_key = rng.counter_key(self.seed, "steps")
        self._trainer = Trainer(self.model, self.rule, needs=self.needs, changes=self.changes)
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
        client = job.client
        shelf, task = self._shelves.get(client) or self._shelf(client)
        shelf.offset = int(rng.fraction(self._key, client, number) * shelf.size)
        return self._trainer.train(job, task, steps, memory, delay)

    def _shelf(self, client: int) -> tuple[Shelf, Task]:
        rows = np.array(self.partition.indices[client])
        rng.stream(self.seed, "shelf", client).shuffle(rows)
        kept, rows = np.split(rows, [self._kept(len(rows))])
        size, batch = len(rows), min(self.batch, len(rows))
        rows = np.concatenate([rows, rows[:batch]])
        shelf = Shelf(self.dataset.take(rows), self.dataset.train_y[rows], size, batch)
        task = self._trainer.task(shelf.batch, -(-size // batch), self._validator(kept))
        self._shelves[client] = shelf, task
        return shelf, task

    def _validator(self, rows: npt.NDArray[np.int64]) -> Callable[[Vector], float] | None:
        """The loss on the examples a client keeps for validation."""
        if not len(rows):
            return None
        x, y = self.dataset.take(rows), self.dataset.train_y[rows]
        return lambda w: self.model.evaluate(w, x, y).loss
