"""The executor `processes`: clients are trained by worker processes while the event order stays the clock's.

A job's start model is known the moment it is handed out, so workers run ahead of its arrival, earliest arrival first.
How far ahead is bounded by the number of desks (`desk.py`), whatever the number of jobs in flight. A result depends on
its job alone, so who computes it, and when, changes nothing. A worker that dies is replaced; its jobs are done again.
"""

from __future__ import annotations

import heapq
import multiprocessing
import shutil
import signal
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from ..errors import AflockError
from ..local import Trained
from ..system import threads
from .client_training import Workshop
from .executors import Executor, Order
from .experiment import Experiment
from .shared_vectors import Desk, Full, folder
from .worker import Done, Failed, Ready, WorkerTask, main

AHEAD = 2
"""Jobs a worker is given at a time: one to do, one to go on with."""

TRIES = 3
"""How often a job may take its worker down before the run gives up."""


class WorkerDied(AflockError):
    """Workers die again and again on the same job, or cannot start at all."""


@dataclass(eq=False)
class _Ticket:
    """An order, where it lies and how far it is."""

    order: Order
    desk: int | None = None
    task: WorkerTask | None = None
    done: Done | None = None
    error: Exception | None = None
    tries: int = 0
    wanted: bool = True


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    jobs: deque[_Ticket] = field(default_factory=deque)


class Processes(Executor):
    """Single-threaded workers around shared desks."""

    def __init__(self, experiment: Experiment, workshop: Workshop, workers: int) -> None:
        self._document = experiment.resolved()
        self.desk_bytes = _room(workshop)
        """Of a desk that is made from now on: more as soon as something does not fit."""
        desks = workers * (AHEAD + 2)
        self.folder = folder(self.desk_bytes * (desks + 1))
        """Where the desks are, until `close`."""
        self._desks: dict[int, Desk] = {}
        self._free = list(range(desks, -1, -1))  # one more than may be taken ahead: for a result that is asked for now
        self._made = 0
        self._tickets: dict[int, _Ticket] = {}
        self._waiting: list[tuple[float, int, _Ticket]] = []
        self._sequence = 0
        self._given: int | None = None
        self._workers: list[_Worker] = []
        try:
            for _ in range(workers):
                self._workers.append(self._hire())
        except BaseException:  # Ctrl-C in the middle of it, say: nothing may stay behind
            self.close()
            raise

    # -- the executor -------------------------------------------------------------------------------------------------

    def submit(self, order: Order) -> None:
        """Queues it, and hands out what workers can take."""
        ticket = self._tickets[order.job.client] = _Ticket(order)
        heapq.heappush(self._waiting, (order.due, self._sequence, ticket))
        self._sequence += 1
        self._hear(0)
        self._feed()

    def result(self, order: Order) -> Trained:
        """Waits for it; its vectors are valid until the next result is asked for."""
        if self._given is not None:
            self._free.append(self._given)
            self._given = None
        ticket = self._tickets.pop(order.job.client)
        if ticket.task is None:
            self._put_first(ticket)
        self._feed()
        while ticket.done is None:
            if ticket.error is not None:
                raise ticket.error
            self._hear(None)
            self._feed()
        assert ticket.desk is not None
        self._given, desk = ticket.desk, self._desks[ticket.desk]
        vectors = {slot.name: desk.view(slot) for slot in ticket.done.vectors}
        memory = {slot.name: desk.view(slot).copy() for slot in ticket.done.memory}
        return Trained(vectors, ticket.done.steps, memory)

    def cancel(self, order: Order) -> None:
        """What is not begun never will be; what is under way will be thrown away."""
        ticket = self._tickets.pop(order.job.client, None)
        if ticket is not None:
            ticket.wanted = False
            if ticket.done is not None:
                self._release(ticket)

    def close(self) -> None:
        """Sends the workers home and removes the desks."""
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.process.join(0.2)
            worker.process.kill()  # it has nothing to lose
            worker.process.join()
            worker.process.close()
        self._workers.clear()
        self._desks.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- handing out --------------------------------------------------------------------------------------------------

    def _put_first(self, ticket: _Ticket) -> None:
        heapq.heappush(self._waiting, (float("-inf"), self._sequence, ticket))
        self._sequence += 1

    def _feed(self) -> None:
        """Gives waiting orders to workers with time for them, as far as there are desks."""
        while self._waiting:
            due, _, ticket = self._waiting[0]
            if not ticket.wanted or ticket.task is not None:
                heapq.heappop(self._waiting)
                continue
            worker = min(self._workers, key=lambda worker: len(worker.jobs))
            urgent = due == float("-inf")
            if len(self._free) < (1 if urgent else 2) or (len(worker.jobs) >= AHEAD and not urgent):
                return
            heapq.heappop(self._waiting)
            self._lay(ticket)
            self._send(worker, ticket)

    def _lay(self, ticket: _Ticket) -> None:
        """Puts what the job needs on a free desk."""
        order, number = ticket.order, self._free.pop()
        job, memory = order.job, dict(order.memory)
        arrays = {"model": job.model}
        arrays |= {f"extra {name}": vector for name, vector in job.extras.items()}
        arrays |= {f"memory {name}": vector for name, vector in memory.items()}
        desk = self._desk(number, self.desk_bytes)
        try:
            slots, free = desk.write(arrays)
        except Full as full:
            self.desk_bytes += full.needed
            desk = self._desk(number, self.desk_bytes)
            slots, free = desk.write(arrays)
        named = [slot._replace(name=slot.name.partition(" ")[2]) for slot in slots[1:]]
        extras, kept = named[: len(job.extras)], named[len(job.extras) :]
        ticket.desk = number
        ticket.task = WorkerTask(
            number,
            str(desk.path),
            desk.size,
            job.client,
            job.version,
            job.first,
            job.id,
            order.number,
            order.steps,
            order.delay,
            slots[0],
            extras,
            kept,
            free,
        )

    def _desk(self, number: int, size: int) -> Desk:
        """The desk of that number, at least that large."""
        desk = self._desks.get(number)
        if desk is None or desk.size < size:
            if desk is not None:
                desk.path.unlink()
            self._made += 1
            desk = self._desks[number] = Desk(self.folder / f"desk-{number}-{self._made}", size, create=True)
        return desk

    def _release(self, ticket: _Ticket) -> None:
        assert ticket.desk is not None
        self._free.append(ticket.desk)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _hire(self) -> _Worker:
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=main, args=(there, self._document, str(self.folder)), daemon=True, name="aflock worker"
        )
        with _uninterrupted(), threads.one_thread_for_children():
            process.start()
        there.close()
        return _Worker(process, here)

    def _send(self, worker: _Worker, ticket: _Ticket) -> None:
        worker.jobs.append(ticket)
        try:
            worker.pipe.send(ticket.task)
        except (BrokenPipeError, ConnectionResetError):
            self._replace(worker)

    def _hear(self, timeout: float | None) -> None:
        """Takes in what workers have to say; waits for the first word if there is no timeout."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe), timeout):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                self._take(worker, worker.pipe.recv())
            except (EOFError, ConnectionResetError):
                self._replace(worker)

    def _take(self, worker: _Worker, word: Ready | Done | Failed) -> None:
        if isinstance(word, Ready):
            worker.ready = True
            if word.error:
                raise WorkerDied(f"a worker cannot build the experiment: {word.error}")
            return
        ticket = worker.jobs.popleft()
        if isinstance(word, Failed) and word.error is None:
            self.desk_bytes = max(self.desk_bytes, 2 * word.needed)
            self._release(ticket)
            self._lay(ticket)
            self._send(worker, ticket)
        elif not ticket.wanted:
            self._release(ticket)
        elif isinstance(word, Failed):
            ticket.error = word.error
        else:
            ticket.done = word

    def _replace(self, dead: _Worker) -> None:
        """A worker is gone: another takes its place and its jobs."""
        dead.process.join()
        code = dead.process.exitcode
        if not dead.ready and (code is None or code >= 0):
            raise WorkerDied(
                f"a worker ended before it could work (exit code {code}); a script that uses workers must do its work "
                "under `if __name__ == '__main__':`"
            )
        dead.pipe.close()
        worker = self._workers[self._workers.index(dead)] = self._hire()
        for k, ticket in enumerate(dead.jobs):
            ticket.tries += k == 0
            if ticket.tries >= TRIES:
                raise WorkerDied(
                    f"the job of client {ticket.order.job.client} has ended {TRIES} workers (last exit code {code}); "
                    "is there enough memory?"
                )
            self._send(worker, ticket)


def _room(workshop: Workshop) -> int:
    """Bytes of a desk: a guess that is right for most rules; a job that needs more gets more."""
    rule, length = workshop.rule, workshop.model.length
    vectors = 2 + len(rule.extras) + len(workshop.needs)
    kept = 2 * (len(rule.remembers) + len(workshop.changes))
    return 4 * length * vectors + 8 * length * kept + 16 * workshop.model.buffers + 4096


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is for the run, which ends its workers in order: they start, and stay, deaf to it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
