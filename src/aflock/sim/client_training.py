"""Trains simulated clients. A job is a pure function: the same job, number and memory give the same bits anywhere.

A client's examples are shuffled once and kept in one block. A job starts at a random offset in it and takes its batches
one after the other, around the end: within a job no example is used twice before all were used, every example is as
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
class ClientData:
    """One client's examples, shuffled, with the first batch again at the end so that no slice needs to wrap."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    size: int
    length: int
    """Examples of a batch."""
    offset: int = 0
    """Index of the first example of the current job."""

    def batch(self, k: int) -> Batch:
        """The examples of local step k: a slice of the block, not a copy."""
        begin = (self.offset + k * self.length) % self.size
        end = begin + self.length
        return self.x[begin:end], self.y[begin:end]


@dataclass
class ClientTraining:
    """The data of all clients, and the one model and local rule that they train with."""

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
    """The share of its examples that every client validates on and does not train on."""
    _clients: dict[int, tuple[ClientData, Task]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._key = rng.counter_key(self.seed, "batches")
        self._steps_key = rng.counter_key(self.seed, "steps")
        self._trainer = Trainer(self.model, self.rule, needs=self.needs, changes=self.changes)
        self._sizes = [len(rows) - self._kept(len(rows)) for rows in self.partition.indices]

    def _kept(self, count: int) -> int:
        """How many of a client's examples are for validation; one at least is left to train on."""
        return min(round(self.validation * count), count - 1)

    @property
    def delay_unit(self) -> str:
        """What the local rule's delay counts: versions or time."""
        return self.rule.delay_unit

    def clear(self) -> None:
        """Frees the memory of the clients' examples; a client's next job gathers them again."""
        self._clients.clear()

    def examples(self, client: int) -> int:
        """How many examples the client trains on."""
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
        data, task = self._clients.get(client) or self._gather(client)
        data.offset = int(rng.fraction(self._key, client, number) * data.size)
        return self._trainer.train(job, task, steps, memory, delay)

    def _gather(self, client: int) -> tuple[ClientData, Task]:
        rows = np.array(self.partition.indices[client])
        rng.stream(self.seed, "shelf", client).shuffle(rows)  # the name seeds the stream: another one, other results
        kept, rows = np.split(rows, [self._kept(len(rows))])
        size, batch = len(rows), min(self.batch, len(rows))
        # A batch begins at one of the first `size` rows and may end up to a batch behind them: with the first batch
        # again at the end, every batch is one slice, which costs no copy.
        rows = np.concatenate([rows, rows[:batch]])
        data = ClientData(self.dataset.take(rows), self.dataset.train_y[rows], size, batch)
        task = self._trainer.task(data.batch, -(-size // batch), self._validator(kept))
        self._clients[client] = data, task
        return data, task

    def _validator(self, rows: npt.NDArray[np.int64]) -> Callable[[Vector], float] | None:
        """The loss on the examples a client keeps for validation."""
        if not len(rows):
            return None
        x, y = self.dataset.take(rows), self.dataset.train_y[rows]
        return lambda w: self.model.evaluate(w, x, y).loss
