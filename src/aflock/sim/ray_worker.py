"""What runs in a Ray actor: it builds the experiment once, with data from the object store, and trains batches."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from ..data import Dataset, Partition
from ..errors import AflockError
from ..local import Memory
from ..system import threads
from ..types import Job, Vector
from .client_training import ClientTraining
from .executors import training_error
from .experiment import Experiment
from .parts import assemble

Start = tuple[Vector, Mapping[str, Vector]]
"""The model and the extra vectors that a job starts from; all jobs of a version share them."""


class RayJob(NamedTuple):
    """A job as it travels: all but its start, which is one of the batch's starts."""

    client: int
    version: int
    start: int
    first: bool
    id: int | None
    number: int
    steps: int
    memory: Memory
    delay: float


class RayDone(NamedTuple):
    """The result of a job."""

    vectors: dict[str, Vector]
    steps: int
    memory: Memory


class RayWorker:
    """The actor; `ready` says where it runs, or why it cannot work."""

    def __init__(self, document: dict[str, Any], loaded: tuple[Dataset, Partition]) -> None:
        """`loaded`: Ray shares its arrays among all actors of a node; they are read, never written."""
        self._training: ClientTraining | None = None
        self._problem = ""
        try:
            self._training = assemble(Experiment.build(document), loaded).client_training
        except (AflockError, OSError, ImportError) as error:
            self._problem = str(error)
        # For the whole life of the actor: to set the number of threads anew for every batch would take longer than
        # some batches do.
        self._settings = ExitStack()
        self._settings.enter_context(threads.one_thread())
        self._settings.enter_context(np.errstate(over="ignore", invalid="ignore"))

    def ready(self) -> tuple[str, int, str]:
        """The node's id, the process, and what keeps the actor from working ("": nothing)."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid(), self._problem

    def train(self, jobs: Sequence[RayJob], *starts: Start) -> tuple[list[RayDone | AflockError], float]:
        """Trains the clients of a batch, one after the other; returns results or errors, and the seconds it took."""
        begun = time.perf_counter()
        return [self._train(job, *starts[job.start]) for job in jobs], time.perf_counter() - begun

    def _train(self, job: RayJob, model: Vector, extras: Mapping[str, Vector]) -> RayDone | AflockError:
        assert self._training is not None
        try:
            given = Job(job.client, job.version, model, extras, job.first, job.id)
            done = self._training.train(given, job.number, job.steps, job.memory, job.delay)
        except Exception as error:  # whatever a custom rule or model raises must reach the user, not end the actor
            return training_error(error, job.client)
        # Copies: the vectors of a result are valid until the next job only.
        return RayDone({k: np.array(v) for k, v in done.vectors.items()}, done.steps, dict(done.memory))
