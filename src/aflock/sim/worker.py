"""A worker process: builds data and model from the experiment, reads jobs from shared buffers, writes results there."""

from __future__ import annotations

import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import AflockError
from ..local import Memory, Trained
from ..system import threads
from ..types import Job
from .client_training import ClientTraining
from .executors import training_error
from .experiment import Experiment
from .parts import assemble
from .shared_vectors import BufferTooSmall, Location, SharedBuffer


class WorkerTask(NamedTuple):
    """What the run sends to a worker: a job, and where in which shared buffer its vectors are."""

    buffer: int
    path: str
    size: int
    client: int
    version: int
    first: bool
    id: int | None
    number: int
    steps: int
    delay: float
    model: Location
    extras: list[Location]
    memory: list[Location]
    free: int
    """The offset in the shared buffer from which the worker may write the result."""


class Done(NamedTuple):
    """What a worker sends back: the steps it made, and where the vectors of the result are."""

    steps: int
    vectors: list[Location]
    memory: list[Location]


class Failed(NamedTuple):
    """Why a worker has no result: an error, or, without one, the size in bytes that the shared buffer must have."""

    error: Exception | None
    needed: int = 0


class Ready(NamedTuple):
    """A worker's first message: it is ready, or the error that keeps it from being so."""

    error: str = ""


def main(pipe: Connection, document: dict[str, Any], folder: str) -> None:
    """Computes tasks until the pipe closes, then removes the folder of the shared buffers.

    The run removes the folder itself when it ends in order; after a SIGKILL of the run only its workers can.
    """
    try:
        _serve(pipe, document)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        shutil.rmtree(folder, ignore_errors=True)


def _serve(pipe: Connection, document: dict[str, Any]) -> None:
    try:
        training = assemble(Experiment.build(document)).client_training
    except (AflockError, OSError) as error:
        pipe.send(Ready(str(error)))
        return
    pipe.send(Ready())
    buffers: dict[int, SharedBuffer] = {}
    with threads.one_thread(), np.errstate(over="ignore", invalid="ignore"):
        while (task := pipe.recv()) is not None:
            pipe.send(work(training, buffers, task))


def work(training: ClientTraining, buffers: dict[int, SharedBuffer], task: WorkerTask) -> Done | Failed:
    """Trains one client and writes the result into the task's shared buffer; an error becomes a `Failed`."""
    try:
        buffer = _open(buffers, task)
        done = _train(training, buffer, task)
        vectors, free = buffer.write(done.vectors, task.free)
        return Done(done.steps, vectors, buffer.write(done.memory, free)[0])
    except BufferTooSmall as error:
        return Failed(None, error.needed)
    except Exception as error:  # whatever a custom rule or model raises must reach the user, not kill the worker
        return Failed(training_error(error, task.client))


def _open(buffers: dict[int, SharedBuffer], task: WorkerTask) -> SharedBuffer:
    buffer = buffers.get(task.buffer)
    if buffer is None or str(buffer.path) != task.path:
        buffer = buffers[task.buffer] = SharedBuffer(Path(task.path), task.size)
    return buffer


def _train(training: ClientTraining, buffer: SharedBuffer, task: WorkerTask) -> Trained:
    extras = {location.name: buffer.view(location) for location in task.extras}
    memory: Memory = {location.name: buffer.view(location) for location in task.memory}
    job = Job(task.client, task.version, buffer.view(task.model), extras, task.first, task.id)
    return training.train(job, task.number, task.steps, memory, task.delay)
