"""The executor `ray`: actors of a Ray cluster train the clients; the clock alone decides the order of events.

A call of an actor costs about half a millisecond, so jobs travel in batches: as many as take BATCH_SECONDS, by the
measured cost of a job. The first jobs are computed here, to measure that cost. If a job is cheaper than what Ray would
add to it, or if jobs are not known before they are due (the protocol `sampled`), all jobs are computed here.

The data travel once per node, through Ray's object store, and so do the model and the extra vectors of a version. A
result depends on its job alone, so it does not matter which actor computes it, or when. If an actor or its node is
lost, another actor is started and its jobs are computed again.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..data import Dataset, Partition
from ..errors import AflockError
from ..local import Trained
from ..system.optional import need
from ..system.ray_cluster import Cluster, ClusterError
from .client_training import ClientTraining
from .executors import Executor, Inline, Order, Placement, WorkerDied
from .experiment import Experiment
from .ray_worker import RayDone, RayJob, RayWorker, Start

AHEAD = 2
"""Batches an actor holds at a time: one that it computes, and the next one, so that it never waits for the run."""

BATCH_SECONDS = 0.1
"""What a batch should take: long against the cost of a call, short against a run."""

LEAST_JOB_SECONDS = 0.001
"""Cheaper jobs are computed here: the call, the copies and the waiting of Ray would cost more than they save."""

MEASURED = 3
"""Jobs that are computed here to measure the cost of one; the first of them, which compiles and loads, is left out."""

START_SECONDS = 60.0
"""How long the first actor may take to start."""

TRIES = 3
"""How many actors may die while they compute the same batch before the run gives up."""

INLINE_BYTES = 65_536
"""A start that is smaller travels with its batch; a larger one goes to the object store, once per node."""


@dataclass(eq=False)
class _Pending:
    """A submitted order, and its result or error so far."""

    order: Order
    batch: _Batch | None = None
    done: RayDone | None = None
    error: AflockError | None = None
    wanted: bool = True


@dataclass(eq=False)
class _Batch:
    """Orders that an actor has got in one call."""

    orders: list[_Pending]
    call: Any = None
    tries: int = 0


@dataclass(eq=False)
class _Actor:
    handle: Any
    starting: Any
    """The call of `ready`; None once it has answered."""
    node: str = ""
    batches: deque[_Batch] = field(default_factory=deque)


class RayExecutor(Executor):
    """Actors on the nodes of a Ray cluster."""

    def __init__(
        self, experiment: Experiment, training: ClientTraining, loaded: tuple[Dataset, Partition], placement: Placement
    ) -> None:
        need("ray", extra="ray", what="the executor ray")
        self._placement = placement
        self._cluster: Cluster | None = None
        self._ray: Any = None
        """The module, once it is needed."""
        if placement.address is not None:  # at once: a cluster that does not answer must not end a run that has begun
            self._connect()
        self._document, self._loaded = experiment.resolved(), loaded
        self._inline: Executor = Inline(training)
        self._costs: list[float] = []
        """Seconds of the jobs that were computed here, to decide where the others are."""
        self._where = "here" if experiment.section("clock").protocol == "sampled" else "undecided"
        """Where jobs are computed: here, by actors, or here until it is decided."""
        self._why = (
            "the jobs of the protocol sampled are not known before they are due" if self._where == "here" else ""
        )
        self._job_seconds = math.nan
        """The cost of a job, a mean that follows the newest batches."""
        self._actors: list[_Actor] = []
        self._orders: dict[int, _Pending] = {}
        self._waiting: list[tuple[float, int, _Pending]] = []
        self._sequence = 0
        self._starts: dict[tuple[int, int], tuple[Start, Any, set[int]]] = {}
        """The starts of orders, by identity: the vectors, where they are in the object store, and the clients."""
        self._jobs_by_node: Counter[str] = Counter()
        self._failed_starts = 0
        """Actors that have died while they started, one after the other."""
        self._lost: list[str] = []

    # -- the executor -------------------------------------------------------------------------------------------------

    def submit(self, order: Order) -> None:
        """Queues the order; a full batch goes to an actor at once."""
        if self._where == "here":
            return
        pending = self._orders[order.job.client] = _Pending(order)
        heapq.heappush(self._waiting, (order.due, self._sequence, pending))
        self._sequence += 1
        if self._where == "actors" and len(self._waiting) >= self._batch_size():
            self._send_waiting()

    def result(self, order: Order) -> Trained:
        """Waits until an actor has computed the order, or computes it here."""
        if self._where == "here":
            return self._inline.result(order)
        pending = self._orders.pop(order.job.client)
        if self._where == "undecided":
            pending.wanted = False  # it stays in the queue, where `_send_waiting` passes over it
            return self._measure(order)
        if pending.batch is None:
            heapq.heappush(self._waiting, (-math.inf, self._sequence, pending))
            self._sequence += 1
        self._send_waiting()
        while pending.done is None and pending.error is None:
            self._receive()
            self._send_waiting()
        self._forget_start(order)
        if pending.error is not None:
            raise pending.error
        assert pending.done is not None
        # Copies, because Ray's arrays are read-only, and kernels are compiled for arrays that may be written.
        vectors = {name: np.array(vector) for name, vector in pending.done.vectors.items()}
        return Trained(vectors, pending.done.steps, {k: np.array(v) for k, v in pending.done.memory.items()})

    def cancel(self, order: Order) -> None:
        """An order that no actor has is never computed; the result of one that an actor has is discarded."""
        pending = self._orders.pop(order.job.client, None)
        if pending is not None:
            pending.wanted = False
            self._forget_start(order)

    def describe(self) -> dict[str, Any]:
        """For the record: the nodes that worked, and what was lost."""
        cost = None if math.isnan(self._job_seconds) else self._job_seconds
        return {
            "executor": "ray",
            "computed": "by workers of the cluster" if self._where == "actors" else "by the run itself",
            "why": self._why,
            "workers": len(self._actors),
            "jobs_by_node": dict(self._jobs_by_node),
            "seconds_per_job": cost,
            "lost": self._lost,
        }

    def close(self) -> None:
        """Ends the actors and the connection to the cluster."""
        for actor in self._actors:
            self._ray.kill(actor.handle)
        self._actors.clear()
        self._starts.clear()
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    # -- here or there ------------------------------------------------------------------------------------------------

    def _measure(self, order: Order) -> Trained:
        """Computes an order here, and decides where the next ones are computed, once enough are measured."""
        begun = time.perf_counter()
        done = self._inline.result(order)
        self._costs.append(time.perf_counter() - begun)
        if len(self._costs) == MEASURED:
            self._decide()
        return done

    def _decide(self) -> None:
        self._job_seconds = min(self._costs[1:])
        if self._job_seconds >= LEAST_JOB_SECONDS:
            self._start_actors()
            self._where, self._why = "actors", f"a job took {1e3 * self._job_seconds:.3g} ms"
        else:
            self._where = "here"
            self._why = f"a job took {1e3 * self._job_seconds:.2g} ms, less than Ray would add to it"
            self._orders.clear()
            self._waiting.clear()

    def _connect(self) -> Cluster:
        """Connects to the cluster; one for this run alone is started only when actors are wanted."""
        if self._cluster is None:
            self._cluster = Cluster(self._placement.address, cpus=self._placement.workers or None)
            import ray

            self._ray = ray
        return self._cluster

    def _start_actors(self) -> None:
        cluster = self._connect()
        count = self._placement.workers or cluster.cores
        self._data = self._put(self._loaded)
        self._actors = [self._start_actor() for _ in range(count)]
        end = time.monotonic() + START_SECONDS
        while not self._working and time.monotonic() < end:
            self._receive(1.0)
        if not self._working:
            raise ClusterError(
                f"no worker has started within {START_SECONDS:g} seconds; `ray status` shows whether the cluster has "
                "free cores"
            )

    def _put(self, value: Any) -> Any:
        try:
            return self._ray.put(value)
        except self._ray.exceptions.ObjectStoreFullError:
            raise ClusterError(
                "the object store of the cluster is too small for the data or the model; start its nodes with a larger "
                "--object-store-memory"
            ) from None

    def _start_actor(self) -> _Actor:
        made: Any = self._ray.remote(num_cpus=1, scheduling_strategy="SPREAD")(RayWorker)
        handle = made.remote(self._document, self._data)
        return _Actor(handle, handle.ready.remote())

    @property
    def _working(self) -> list[_Actor]:
        """The actors that have started."""
        return [actor for actor in self._actors if actor.starting is None]

    # -- orders to actors ---------------------------------------------------------------------------------------------

    def _batch_size(self) -> int:
        return max(1, int(BATCH_SECONDS / max(self._job_seconds, 1e-6)))

    def _send_waiting(self) -> None:
        """Sends waiting orders in batches, earliest due first, to actors that hold less than AHEAD of them."""
        while self._waiting and (actors := self._working):
            due, _, pending = self._waiting[0]
            if not pending.wanted or pending.batch is not None:
                heapq.heappop(self._waiting)
                continue
            actor = min(actors, key=lambda actor: len(actor.batches))
            # The order that the run waits for goes out whatever the actors hold.
            if len(actor.batches) >= AHEAD and due > -math.inf:
                return
            # Not all of it to one actor while others have nothing to do.
            share = math.ceil(len(self._waiting) / len(actors))
            self._send(actor, _Batch(self._take(min(self._batch_size(), share))))

    def _take(self, count: int) -> list[_Pending]:
        taken: list[_Pending] = []
        while self._waiting and len(taken) < count:
            _, _, pending = heapq.heappop(self._waiting)
            if pending.wanted and pending.batch is None and pending not in taken:
                taken.append(pending)
        return taken

    def _send(self, actor: _Actor, batch: _Batch) -> None:
        starts: dict[tuple[int, int], int] = {}
        sent: list[Any] = []
        jobs = []
        for pending in batch.orders:
            pending.batch = batch
            job, order = pending.order.job, pending.order
            key = (id(job.model), id(job.extras))
            if key not in starts:
                starts[key] = len(sent)
                sent.append(self._start_of(key, order))
            jobs.append(
                RayJob(job.client, job.version, starts[key], job.first, job.id, order.number, order.steps,
                       dict(order.memory), order.delay)
            )  # fmt: skip
        batch.call = actor.handle.train.remote(jobs, *sent)
        actor.batches.append(batch)

    def _start_of(self, key: tuple[int, int], order: Order) -> Any:
        """What to send as the start of an order: the vectors, or where they are in the object store."""
        model, extras = order.job.model, order.job.extras
        if key not in self._starts:
            start: Start = (model, dict(extras))
            size = model.nbytes + sum(vector.nbytes for vector in extras.values())
            stored = self._put(start) if size > INLINE_BYTES else start
            # The entry also keeps the vectors alive, so that no others can get their identities.
            self._starts[key] = (model, extras), stored, set()
        _, stored, clients = self._starts[key]
        clients.add(order.job.client)
        return stored

    def _forget_start(self, order: Order) -> None:
        """Lets go of a start when the last order that refers to it is done."""
        key = (id(order.job.model), id(order.job.extras))
        if key in self._starts:
            clients = self._starts[key][2]
            clients.discard(order.job.client)
            if not clients:
                del self._starts[key]

    # -- answers of actors --------------------------------------------------------------------------------------------

    def _receive(self, seconds: float | None = None) -> None:
        """Waits until a batch has ended or an actor has started, for so long at most, and handles what has."""
        calls: dict[Any, Callable[[], None]] = {}
        for actor in self._actors:
            if actor.starting is not None:
                calls[actor.starting] = partial(self._started, actor)
            if actor.batches:
                calls[actor.batches[0].call] = partial(self._batch_ended, actor)
        if not self._working and seconds is None:  # all are lost, and none can be started any more
            seconds = START_SECONDS
        ended, _ = self._ray.wait(list(calls), num_returns=1, timeout=seconds)
        if not ended and not self._working and seconds == START_SECONDS:
            raise WorkerDied(f"all workers are lost, and none could be started within {START_SECONDS:g} seconds")
        for call in ended:
            calls[call]()

    def _started(self, actor: _Actor) -> None:
        try:
            actor.node, _, problem = self._ray.get(actor.starting)
        except self._ray.exceptions.RayError as error:  # its node was lost meanwhile, or it ends whenever it starts
            self._failed_starts += 1
            if self._failed_starts >= TRIES:
                raise WorkerDied(f"{TRIES} workers have died while they started: {_first_line(error)}") from None
            self._replace(actor, type(error).__name__)
            return
        if problem:
            raise WorkerDied(f"a worker on node {actor.node[:8]} cannot build the experiment: {problem}")
        actor.starting, self._failed_starts = None, 0

    def _batch_ended(self, actor: _Actor) -> None:
        batch = actor.batches[0]
        try:
            results, seconds = self._ray.get(batch.call)
        except self._ray.exceptions.OutOfMemoryError as error:
            self._replace(actor, _first_line(error))
            return
        except self._ray.exceptions.RayError as error:  # the actor, its node or its result is lost
            self._replace(actor, type(error).__name__)
            return
        actor.batches.popleft()
        self._jobs_by_node[actor.node] += len(results)
        self._job_seconds += 0.2 * (seconds / len(results) - self._job_seconds)
        for pending, found in zip(batch.orders, results, strict=True):
            if isinstance(found, AflockError):
                pending.error = found
            else:
                pending.done = found

    def _replace(self, dead: _Actor, why: str) -> None:
        """An actor is lost: starts another one, and queues the jobs of the lost one again, first of all."""
        where = f"on node {dead.node[:8]} with {len(dead.batches)} batches" if dead.node else "that was starting"
        self._lost.append(f"a worker {where}: {why}")
        self._ray.kill(dead.handle)  # where only a result was lost, the actor itself may still live
        self._actors[self._actors.index(dead)] = self._start_actor()
        for k, batch in enumerate(dead.batches):
            tries = batch.tries + (k == 0)  # it worked on the first; the others only waited
            if tries >= TRIES:
                client = batch.orders[0].order.job.client
                raise WorkerDied(
                    f"the job of client {client}, or one of the {len(batch.orders)} computed with it, has ended "
                    f"{TRIES} workers ({why}); is there enough memory on the nodes?"
                )
            self._queue_again(batch, tries)

    def _queue_again(self, batch: _Batch, tries: int) -> None:
        """Sends a lost batch to another actor, as it was, or queues its orders until there is one."""
        orders = [pending for pending in batch.orders if pending.wanted]
        if (actors := self._working) and orders:
            self._send(min(actors, key=lambda actor: len(actor.batches)), _Batch(orders, tries=tries))
            return
        for pending in orders:
            pending.batch = None
            heapq.heappush(self._waiting, (-math.inf, self._sequence, pending))
            self._sequence += 1


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
