"""The trainer: K local steps of a client's rule on batches it is given. The simulator and the network client use it.

    trainer = Trainer(model, rule, needs=strategy.needs, changes=strategy.changes)
    task = trainer.task(batch, batches=12)              # batch(k) -> (x, y) of local step k
    done = trainer.train(job, task, steps, memory, delay)

The vectors in `done` lie in the trainer's own memory and are valid until its next job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..local import LocalRule, Memory, Task, Trained
from ..models.base import Model
from ..types import Job, Vector

Batch = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""The examples of one local step, and their labels."""


class Trainer:
    """One model and one local rule, for any number of clients, one job at a time."""

    def __init__(
        self, model: Model, rule: LocalRule, *, needs: tuple[str, ...], changes: tuple[str, ...], trusted: bool = True
    ) -> None:
        """`needs` and `changes` are the strategy's; batches that are not `trusted` are checked before they are used."""
        self.model, self.rule, self.needs, self.changes = model, rule, needs, changes
        self._gradient = model.trusted_gradient if trusted else model.gradient
        # `descend` trusts its batches. A model that holds its weights (a torch module) checks them in any case.
        self._descends = trusted or model.weights is not None
        self._scratch: Vector = np.empty(model.length, np.float32)
        # Where x is during a job. The parameters of a torch module are views of `model.weights`: with x there, a step
        # changes the parameters directly, and the model is copied once per job, not once per step.
        self._x: Vector = np.empty_like(self._scratch) if model.weights is None else model.weights
        self._delta: Vector = np.empty_like(self._scratch)
        self._buffers = model.get_buffers()  # those to begin with, for a client that has no memory of its own yet

    def task(
        self, batch: Callable[[int], Batch], batches: int, validation: Callable[[Vector], float] | None = None
    ) -> Task:
        """A client's problem: `batch(k)` gives the examples of local step k, `batches` of them make an epoch."""
        gradient_of, descend_on, scratch = self._gradient, self.model.descend, self._scratch

        def gradient(x: Vector, k: int) -> Vector:
            inputs, targets = batch(k)
            gradient_of(x, inputs, targets, scratch)
            return scratch

        def descend(x: Vector, k: int, rate: float) -> None:
            inputs, targets = batch(k)
            descend_on(x, inputs, targets, rate, scratch)

        return Task(gradient, batches, validation, descend if self._descends else None, self._x, self._delta)

    def train(self, job: Job, task: Task, steps: int, memory: Memory, delay: float) -> Trained:
        """Works on a job; reads the client's memory and changes nothing in it."""
        model = self.model
        if model.buffers:
            model.set_buffers(memory.get("buffers", self._buffers))
        done = self.rule.train(job, task, steps, needs=self.needs, changes=self.changes, memory=memory, delay=delay)
        if model.buffers:
            done.memory["buffers"] = model.get_buffers()
        return done


def check_rate(model: Model, rule: LocalRule) -> float | None:
    """The step size that the model's travelling buffers were made for, if the rule makes other steps; else None.

    Buffers that travel as gradients (batch norm's, with buffers="average") arrive as they are only by plain steps of
    the length they were made for.
    """
    rate: float | None = getattr(model, "rate", None)
    return None if rate is None or (rule.follows and rule.eta_l == rate) else rate
