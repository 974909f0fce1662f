"""The executor `processes`: worker processes train the clients; the clock alone decides the order of events.

A job's start model is known the moment the job is given, so workers compute it before its arrival is due, earliest
arrival first. The number of shared buffers (`shared_vectors.py`) bounds how far they run ahead, whatever the number of
open jobs. A result depends on its job alone, so it does not matter which worker computes it, or when. If a worker dies,
another one is started and does its jobs again.
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
from typing import Any

from ..local import Trained
from ..system import threads
from .client_training import ClientTraining
from .executors import Executor, Order, WorkerDied
from .experiment import Experiment
from .shared_vectors import BufferTooSmall, SharedBuffer, make_folder
from .worker import Done, Failed, Ready, WorkerTask, main

AHEAD = 2
"""Jobs a worker holds at a time: one that it computes, and the next one, so that it never waits for the run."""

TRIES = 3
"""How many workers may die while they compute the same job before the run gives up."""


@dataclass(eq=False)
class _Pending:
    """A submitted order: the shared buffer it uses, the task sent to a worker, and the result or error so far."""

    order: Order
    buffer: int | None = None
    task: WorkerTask | None = None
    done: Done | None = None
    error: Exception | None = None
    tries: int = 0
    wanted: bool = True
    """False after `cancel`: nobody will ask for the result."""


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection
    ready: bool = False
    jobs: deque[_Pending] = field(default_factory=deque)


class Processes(Executor):
    """Single-threaded worker processes that exchange vectors with the run through shared buffers."""

    def __init__(self, experiment: Experiment, training: ClientTraining, workers: int) -> None:
        self._document = experiment.resolved()
        self.buffer_bytes = _estimated_bytes(training)
        """The size of the next shared buffer that is made; it grows when vectors do not fit."""
        ahead = workers * (AHEAD + 2)
        self.folder = make_folder(self.buffer_bytes * (ahead + 1))
        """Holds the shared buffers, until `close` removes it."""
        self._buffers: dict[int, SharedBuffer] = {}
        # One buffer more than jobs computed ahead may take, for the order whose result the run waits for: if all held
        # results that are due later, no worker could get that order, and the run would wait for ever.
        self._free = list(range(ahead, -1, -1))
        self._made = 0
        self._pending: dict[int, _Pending] = {}
        self._waiting: list[tuple[float, int, _Pending]] = []
        self._sequence = 0
        self._lent: int | None = None  # the buffer whose vectors the last `result` returned; free at the next call
        self._workers: list[_Worker] = []
        self._count, self._lost = workers, 0
        try:
            for _ in range(workers):
                self._workers.append(self._start_worker())
        except BaseException:  # Ctrl-C, for example: no worker and no shared buffer may be left behind
            self.close()
            raise

    # -- the executor -------------------------------------------------------------------------------------------------

    def submit(self, order: Order) -> None:
        """Queues the order, and sends waiting orders to workers that can take one."""
        pending = self._pending[order.job.client] = _Pending(order)
        heapq.heappush(self._waiting, (order.due, self._sequence, pending))
        self._sequence += 1
        self._receive(0)
        self._send_waiting()

    def result(self, order: Order) -> Trained:
        """Waits until a worker has computed the order; the vectors are valid until the next call."""
        if self._lent is not None:
            self._free.append(self._lent)
            self._lent = None
        pending = self._pending.pop(order.job.client)
        if pending.task is None:
            self._put_first(pending)
        self._send_waiting()
        while pending.done is None:
            if pending.error is not None:
                raise pending.error
            self._receive(None)
            self._send_waiting()
        assert pending.buffer is not None
        self._lent, buffer = pending.buffer, self._buffers[pending.buffer]
        vectors = {location.name: buffer.view(location) for location in pending.done.vectors}
        memory = {location.name: buffer.view(location).copy() for location in pending.done.memory}
        return Trained(vectors, pending.done.steps, memory)

    def cancel(self, order: Order) -> None:
        """An order that no worker has is never computed; the result of one that a worker has is discarded."""
        pending = self._pending.pop(order.job.client, None)
        if pending is not None:
            pending.wanted = False
            if pending.done is not None:
                self._release(pending)

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return {"executor": "processes", "workers": self._count, "workers_lost": self._lost}

    def close(self) -> None:
        """Ends the workers and removes the shared buffers."""
        for worker in self._workers:
            worker.pipe.close()  # a worker that waits for a task ends by itself now
        for worker in self._workers:
            worker.process.join(0.2)
            worker.process.kill()  # one in the middle of a job: nobody needs its result
            worker.process.join()
            worker.process.close()
        self._workers.clear()
        self._buffers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- orders to workers ---------------------------------------------------------------------------------------------

    def _put_first(self, pending: _Pending) -> None:
        heapq.heappush(self._waiting, (float("-inf"), self._sequence, pending))
        self._sequence += 1

    def _send_waiting(self) -> None:
        """Sends waiting orders to workers, earliest due first, while a worker and a shared buffer are free."""
        while self._waiting:
            due, _, pending = self._waiting[0]
            if not pending.wanted or pending.task is not None:
                heapq.heappop(self._waiting)
                continue
            worker = min(self._workers, key=lambda worker: len(worker.jobs))
            # An order from `_put_first` is one that the run waits for. It may take the last free buffer, which is kept
            # for it (all others may hold results that are due later), and a worker that holds AHEAD jobs already.
            urgent = due == float("-inf")
            if len(self._free) < (1 if urgent else 2) or (len(worker.jobs) >= AHEAD and not urgent):
                return
            heapq.heappop(self._waiting)
            self._write_task(pending)
            self._send(worker, pending)

    def _write_task(self, pending: _Pending) -> None:
        """Copies the vectors the job needs into a free shared buffer, and describes them in `pending.task`."""
        order, number = pending.order, self._free.pop()
        job, memory = order.job, dict(order.memory)
        arrays = {"model": job.model}
        arrays |= {f"extra {name}": vector for name, vector in job.extras.items()}
        arrays |= {f"memory {name}": vector for name, vector in memory.items()}
        buffer = self._buffer(number, self.buffer_bytes)
        try:
            locations, free = buffer.write(arrays)
        except BufferTooSmall as error:
            self.buffer_bytes += error.needed
            buffer = self._buffer(number, self.buffer_bytes)
            locations, free = buffer.write(arrays)
        named = [location._replace(name=location.name.partition(" ")[2]) for location in locations[1:]]
        extras, kept = named[: len(job.extras)], named[len(job.extras) :]
        pending.buffer = number
        pending.task = WorkerTask(
            number,
            str(buffer.path),
            buffer.size,
            job.client,
            job.version,
            job.first,
            job.id,
            order.number,
            order.steps,
            order.delay,
            locations[0],
            extras,
            kept,
            free,
        )

    def _buffer(self, number: int, size: int) -> SharedBuffer:
        """The shared buffer of that number, of at least that size."""
        buffer = self._buffers.get(number)
        if buffer is None or buffer.size < size:
            if buffer is not None:
                buffer.path.unlink()
            self._made += 1  # in the name: a worker that has mapped the smaller file sees that it must open another one
            buffer = self._buffers[number] = SharedBuffer(
                self.folder / f"buffer-{number}-{self._made}", size, create=True
            )
        return buffer

    def _release(self, pending: _Pending) -> None:
        assert pending.buffer is not None
        self._free.append(pending.buffer)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start_worker(self) -> _Worker:
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=main, args=(there, self._document, str(self.folder)), daemon=True, name="aflock worker"
        )
        with _uninterrupted(), threads.one_thread_for_children():
            process.start()
        there.close()
        return _Worker(process, here)

    def _send(self, worker: _Worker, pending: _Pending) -> None:
        worker.jobs.append(pending)
        try:
            worker.pipe.send(pending.task)
        except (BrokenPipeError, ConnectionResetError):
            self._replace(worker)

    def _receive(self, timeout: float | None) -> None:
        """Handles the messages that workers have sent; without a timeout, waits until there is at least one."""
        by_pipe = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe), timeout):
            worker = by_pipe[pipe]  # type: ignore[index]
            try:
                self._handle(worker, worker.pipe.recv())
            except (EOFError, ConnectionResetError):
                self._replace(worker)

    def _handle(self, worker: _Worker, message: Ready | Done | Failed) -> None:
        if isinstance(message, Ready):
            worker.ready = True
            if message.error:
                raise WorkerDied(f"a worker cannot build the experiment: {message.error}")
            return
        pending = worker.jobs.popleft()
        if isinstance(message, Failed) and message.error is None:
            self.buffer_bytes = max(self.buffer_bytes, 2 * message.needed)
            self._release(pending)
            self._write_task(pending)
            self._send(worker, pending)
        elif not pending.wanted:
            self._release(pending)
        elif isinstance(message, Failed):
            pending.error = message.error
        else:
            pending.done = message

    def _replace(self, dead: _Worker) -> None:
        """A worker has died: starts another one and sends it the jobs of the dead one."""
        dead.process.join()
        code = dead.process.exitcode
        # A worker that was killed (a negative code) before it was ready may be started again. One that ended by itself
        # would do so every time: mostly, a script without the guard runs itself in every worker.
        if not dead.ready and (code is None or code >= 0):
            raise WorkerDied(
                f"a worker ended before it could work (exit code {code}); a script that uses workers must do its work "
                "under `if __name__ == '__main__':`"
            )
        dead.pipe.close()
        self._lost += 1
        worker = self._workers[self._workers.index(dead)] = self._start_worker()
        for k, pending in enumerate(dead.jobs):
            pending.tries += k == 0  # it worked on the first; the others only waited, and cannot be what killed it
            if pending.tries >= TRIES:
                raise WorkerDied(
                    f"the job of client {pending.order.job.client} has ended {TRIES} workers (last exit code {code}); "
                    "is there enough memory?"
                )
            self._send(worker, pending)


def _estimated_bytes(training: ClientTraining) -> int:
    """Bytes of a shared buffer: an estimate that is enough for most rules; a job that needs more gets a larger one."""
    rule, length = training.rule, training.model.length
    vectors = 2 + len(rule.extras) + len(training.needs)
    kept = 2 * (len(rule.remembers) + len(training.changes))
    return 4 * length * vectors + 8 * length * kept + 16 * training.model.buffers + 4096


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Blocks SIGINT in this thread, so that a process started inside inherits the blocked signal and never gets Ctrl-C.

    A terminal sends Ctrl-C to the run and to all workers; the run alone handles it, and ends its workers in order.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
