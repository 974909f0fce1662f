"""What a client does with a job, as a pure function: the same job, number and memory give the same bits anywhere.

A client's examples are shuffled once and kept in one block. A job starts at a random place in it and takes its batches
one after the other, around the end: within a job no example comes twice before all have come, every example is as
likely as any other, and a batch is a slice, not a copy. The place depends on the seed, the client and the number of the
job alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import rng
from ..data import Dataset, Partition
from ..local import Fixed, LocalRule, Memory, Steps, Task, Trained
from ..models.base import Batch, Labels, Model
from ..types import Job, Vector


@dataclass(frozen=True)
class Shelf:
    """One client's examples, shuffled, with the first batch again at the end so that no slice needs to wrap."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    size: int
    batch: int

    @property
    def batches(self) -> int:
        """Steps that make an epoch."""
        return -(-self.size // self.batch)


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
    _shelves: dict[int, Shelf] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._key = rng.counter_key(self.seed, "batches")
        self._steps_key = rng.counter_key(self.seed, "steps")
        self._gradient: Vector = np.empty(self.model.length, np.float32)
        self._room: Vector = np.empty_like(self._gradient) if self.model.weights is None else self.model.weights
        self._buffers = self.model.get_buffers()
        self._sizes = [len(rows) for rows in self.partition.indices]

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
        """Works on the client's job of that number; reads the memory, changes nothing."""
        shelf = self._shelf(job.client)
        place = int(rng.fraction(self._key, job.client, number) * shelf.size)
        model, scratch = self.model, self._gradient

        def batch(k: int) -> tuple[Batch, Labels]:
            begin = (place + k * shelf.batch) % shelf.size
            end = begin + shelf.batch
            return shelf.x[begin:end], shelf.y[begin:end]

        def gradient(x: Vector, k: int) -> Vector:
            model.gradient(x, *batch(k), scratch)
            return scratch

        def descend(x: Vector, k: int, rate: float) -> None:
            model.descend(x, *batch(k), rate, scratch)

        task = Task(gradient, shelf.batches, None, descend, self._room)
        if model.buffers:
            model.set_buffers(memory.get("buffers", self._buffers))
        done = self.rule.train(job, task, steps, needs=self.needs, changes=self.changes, memory=memory, delay=delay)
        if model.buffers:
            done.memory["buffers"] = model.get_buffers()
        return done

    def _shelf(self, client: int) -> Shelf:
        if client not in self._shelves:
            rows = np.array(self.partition.indices[client])
            rng.stream(self.seed, "shelf", client).shuffle(rows)
            batch = min(self.batch, len(rows))
            rows = np.concatenate([rows, rows[:batch]])
            x, y = self.dataset.train_x[rows], self.dataset.train_y[rows]
            self._shelves[client] = Shelf(x, y, len(rows) - batch, batch)
        return self._shelves[client]
