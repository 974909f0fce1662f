"""A process that trains: builds its workshop from the experiment, takes jobs from desks, lays results beside them."""

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
from .client_training import Workshop
from .experiment import Experiment
from .parts import assemble
from .shared_vectors import Desk, Full, Slot


class WorkerTask(NamedTuple):
    """A job on its way to a worker: numbers, and where its vectors lie."""

    desk: int
    path: str
    size: int
    client: int
    version: int
    first: bool
    id: int | None
    number: int
    steps: int
    delay: float
    model: Slot
    extras: list[Slot]
    memory: list[Slot]
    free: int
    """Where on the desk the result may begin."""


class Done(NamedTuple):
    """What a job came to, and where its vectors lie."""

    steps: int
    vectors: list[Slot]
    memory: list[Slot]


class Failed(NamedTuple):
    """Why there is no result: the error, or how large a desk must be for it."""

    error: Exception | None
    needed: int = 0


class Ready(NamedTuple):
    """The worker's first word: it can work, or why not."""

    error: str = ""


def main(pipe: Connection, document: dict[str, Any], folder: str) -> None:
    """Works until the pipe is closed; if the other side is gone for good, cleans up behind it."""
    try:
        _serve(pipe, document)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        shutil.rmtree(folder, ignore_errors=True)


def _serve(pipe: Connection, document: dict[str, Any]) -> None:
    try:
        workshop = assemble(Experiment.build(document)).workshop
    except (AflockError, OSError) as error:
        pipe.send(Ready(str(error)))
        return
    pipe.send(Ready())
    desks: dict[int, Desk] = {}
    with threads.one_thread(), np.errstate(over="ignore", invalid="ignore"):
        while (task := pipe.recv()) is not None:
            pipe.send(work(workshop, desks, task))


def work(workshop: Workshop, desks: dict[int, Desk], task: WorkerTask) -> Done | Failed:
    """Trains one client and lays the result on its desk; what goes wrong is an answer, too."""
    try:
        desk = _open(desks, task)
        done = _train(workshop, desk, task)
        vectors, free = desk.write(done.vectors, task.free)
        return Done(done.steps, vectors, desk.write(done.memory, free)[0])
    except Full as full:
        return Failed(None, full.needed)
    except AflockError as error:
        return Failed(error)
    except Exception as error:  # whatever a custom rule or model raises must reach the user, not kill the worker
        return Failed(AflockError(f"{type(error).__name__} while client {task.client} was trained: {error}"))


def _open(desks: dict[int, Desk], task: WorkerTask) -> Desk:
    desk = desks.get(task.desk)
    if desk is None or str(desk.path) != task.path:
        desk = desks[task.desk] = Desk(Path(task.path), task.size)
    return desk


def _train(workshop: Workshop, desk: Desk, task: WorkerTask) -> Trained:
    extras = {slot.name: desk.view(slot) for slot in task.extras}
    memory: Memory = {slot.name: desk.view(slot) for slot in task.memory}
    job = Job(task.client, task.version, desk.view(task.model), extras, task.first, task.id)
    return workshop.train(job, task.number, task.steps, memory, task.delay)
