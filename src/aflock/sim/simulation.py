"""An experiment put together: data, clients, rule and clock; what it measured; and how it is saved and resumed.

simulation = Simulation(experiment)
simulation.run()
simulation.result()
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from .. import rng
from ..coordination.budget import Budget
from ..coordination.coordinator import Coordinator
from ..coordination.tally import Tally
from ..errors import ParameterError, StateError
from ..events import Event
from ..strategies.base import Strategy
from ..system.threads import one_thread
from ..types import Job, Receipt, State
from .engine import Engine, Item, SimulatedClient
from .executors import Executor, Inline, Order, Placement
from .experiment import Experiment
from .fleet import FleetParams
from .parts import Parts, assemble
from .processes import Processes
from .sampled import Sampled


@dataclass(frozen=True)
class Measurement:
    """The model on the test set, and what it had cost to get there."""

    uploads: int
    versions: int
    time: float
    gradients: int
    bytes_up: int
    bytes_down: int
    loss: float
    accuracy: float
    staleness_mean: float
    staleness_max: int


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    strategy: str
    seed: int
    accuracy: float
    loss: float
    versions: int
    uploads: int
    virtual_time: float
    wall_time: float
    staleness_mean: float
    staleness_max: int
    gradient_evaluations: int
    bytes_up: int
    bytes_down: int
    largest_share: float
    rejected: int
    server_bytes: int
    """What the rule keeps at the end."""
    client_bytes: int
    """What all clients together must remember between jobs."""
    model_sha256: str


class Simulation:
    """One experiment, from its first job to the end of its budget."""

    def __init__(
        self,
        experiment: Experiment,
        *,
        on_event: Callable[[Event], None] | None = None,
        on_measurement: Callable[[Measurement], None] | None = None,
        on_upload: Callable[[Simulation], None] | None = None,
        workers: int = 0,
        placement: Placement | None = None,
    ) -> None:
        """`workers` processes train the clients; 0: this one does. `placement` says more about where they do.

        What comes out is the same to the last bit.
        """
        self.experiment = experiment
        evaluation = experiment.section("evaluation")
        self._evaluate_every, self._by_ticks = evaluation.every, evaluation.unit == "ticks"
        self._measured_at = 0
        """How many times `every` uploads, or ticks, had passed at the last measurement."""
        self.measurements: list[Measurement] = []
        self._on_measurement = on_measurement
        self._on_upload = on_upload
        self._wall = 0.0
        self._begun: float | None = None
        self._build(on_event, placement or Placement(workers))

    def _build(self, on_event: Callable[[Event], None] | None, placement: Placement) -> None:
        section, seeds = self.experiment.section, self.experiment.section("seeds")
        parts = assemble(self.experiment)
        self.dataset, self.partition, self.fleet = parts.dataset, parts.partition, parts.fleet
        self.strategy, self.model, self.client_training = parts.strategy, parts.model, parts.client_training
        clock, n = section("clock"), len(self.partition.indices)
        if clock.concurrency is not None and clock.concurrency > n:
            raise ParameterError(f"[clock] concurrency = {clock.concurrency} exceeds the {n} clients; lower it")
        _check_clock(self.experiment, self.strategy)
        likely = _likely(clock.probabilities, n, self.strategy.largest_cohort)
        if clock.protocol == "sampled":
            _check_sampled(section("fleet"))
        self.coordinator = Coordinator(
            self.strategy,
            concurrency=clock.concurrency,
            selection=None if clock.selection == "auto" else clock.selection,
            probabilities=None if clock.protocol == "sampled" else likely,
            max_staleness=clock.max_staleness,
            refill=clock.refill,
            seed=seeds.schedule,
            on_event=on_event,
        )
        limits = {name: math.inf if value is None else value for name, value in asdict(section("budget")).items()}
        if all(math.isinf(value) for value in limits.values()):
            raise ParameterError("[budget] is empty; set uploads, versions, time or ticks")
        self.executor = executor(self.experiment, parts, placement)
        kind = Sampled if clock.protocol == "sampled" else Engine
        self.engine: Engine = kind(
            self.coordinator,
            self.fleet,
            self.client_training,
            self.executor,
            budget=Budget(**limits),
            ticks=clock.protocol == "ticks",
            step_per_tick=clock.step == "tick",
            on_upload=self._after_upload,
            on_tick=self._after_tick,
        )
        if isinstance(self.engine, Sampled):
            self.engine.configure(clock.window, clock.history, seeds.schedule, likely)

    # -- running ----------------------------------------------------------------------------------------------------

    def start(self, *, planned: bool = True) -> None:
        """The initial model; everyone idle; on the clock what is `planned` beforehand."""
        draws = rng.stream(self.experiment.section("seeds").training, "model")
        self.coordinator.start(self.model.init(draws), now=0.0)
        if planned:
            self.engine.plan()
        self._measure()

    def run(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """From the start, or from where a state was loaded, to the end of the budget; false if `stop` came first."""
        self._begun = time.perf_counter()
        try:
            with one_thread(), np.errstate(over="ignore", invalid="ignore"):
                if not self.measurements:
                    self.start()
                ended = self.engine.run(stop)
                if ended:
                    self.finish()
        finally:
            self._wall, self._begun = self.seconds, None
        return ended

    def close(self) -> None:
        """Ends the processes it started and lets go of the clients' data; what was measured stays."""
        self.executor.close()
        self.client_training.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def seconds(self) -> float:
        """How long it has been running, earlier sittings included."""
        return self._wall + (time.perf_counter() - self._begun if self._begun is not None else 0.0)

    def finish(self) -> None:
        """Lets the rule use its last partial buffer, and measures the final model."""
        if self.engine.step_per_tick and self.strategy.pending:
            self._measure()  # a budget of ticks may end far from a step: the last partial buffer is not part of it
        self.coordinator.finish(self.engine.clock.now)
        self._measure()

    def _after_upload(self, engine: Engine, receipt: Receipt) -> None:
        # Where a tick ends with the server's step, the model of its arrivals is there only then.
        if not (self._by_ticks or engine.step_per_tick) and engine.tally.updates % self._evaluate_every == 0:
            self._measure()
        if self._on_upload is not None:
            self._on_upload(self)

    def _after_tick(self, engine: Engine) -> None:
        if self._by_ticks or engine.step_per_tick:
            counted = engine.ticks_done if self._by_ticks else engine.tally.updates
            passed = int(counted // self._evaluate_every)
            if passed > self._measured_at:
                self._measured_at = passed
                self._measure()

    def _measure(self) -> None:
        if self.model.buffers:
            self._set_mean_buffers()
        tally = self.engine.tally
        found = self.model.evaluate(self.strategy.model, self.dataset.test_inputs, self.dataset.test_y)
        measurement = Measurement(
            tally.updates,
            self.strategy.version,
            self.engine.clock.now,
            tally.gradients,
            tally.bytes_up,
            tally.bytes_down,
            found.loss,
            found.accuracy,
            tally.staleness_mean,
            tally.staleness_max,
        )
        self.measurements.append(measurement)
        if self._on_measurement is not None:
            self._on_measurement(measurement)

    def _set_mean_buffers(self) -> None:
        """Buffers that stay with the clients: the test set sees their mean. They are never sent back."""
        known = [record.memory["buffers"] for record in self.engine.records.values() if "buffers" in record.memory]
        if known:
            self.model.set_buffers(np.mean(known, axis=0))

    def result(self) -> Result:
        """The last measurement and the whole cost."""
        last, tally = self.measurements[-1], self.engine.tally
        return Result(
            strategy=self.experiment.section("strategy").name,
            seed=self.experiment.section("seeds").training,
            accuracy=last.accuracy,
            loss=last.loss,
            versions=self.strategy.version,
            uploads=tally.updates,
            virtual_time=self.engine.clock.now,
            wall_time=self._wall,
            staleness_mean=tally.staleness_mean,
            staleness_max=tally.staleness_max,
            gradient_evaluations=tally.gradients,
            bytes_up=tally.bytes_up,
            bytes_down=tally.bytes_down,
            largest_share=self.engine.largest_share,
            rejected=tally.rejected,
            server_bytes=self.strategy.nbytes,
            client_bytes=sum(part.nbytes for record in self.engine.records.values() for part in record.memory.values()),
            model_sha256=hashlib.sha256(self.strategy.model.tobytes()).hexdigest(),
        )

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """Everything needed to end with the same bits: coordinator, clock, clients' memories, open orders."""
        engine = self.engine
        return {
            "experiment": self.experiment.resolved(),
            "coordinator": self.coordinator.state_dict(),
            "clock": {
                "now": engine.clock.now,
                "opened": engine.opened_at,
                "measured": self._measured_at,
                "sequence": engine.clock.sequence,
                "entries": [
                    [due, seq, item.kind, item.client, item.number] for due, seq, item in engine.clock.entries()
                ],  # a job's own number says whether it is still the client's open one
            },
            "tally": engine.tally.state_dict(),
            "seats": [
                [client, record.number, record.delay, record.uploads, record.since]
                for client, record in engine.records.items()
            ],  # the name is part of the format
            "memories": {
                str(client): dict(record.memory) for client, record in engine.records.items() if record.memory
            },
            "orders": {str(c): _saved_order(record.order) for c, record in engine.records.items() if record.order},
            "measurements": [asdict(measurement) for measurement in self.measurements],
            "sampled": engine.sampling() if isinstance(engine, Sampled) else {},
            "wall": self._wall,
        }

    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state of the same experiment."""
        # Built anew: an earlier version wrote keys without effect, and lacks those that came since.
        if Experiment.build(state["experiment"]).resolved() != self.experiment.resolved():
            raise StateError("the state belongs to another experiment; resume with the file it was started with")
        engine = self.engine
        self.coordinator.load_state_dict(state["coordinator"])
        clock = state["clock"]
        self._measured_at = clock.get("measured", 0)
        if clock.get("opened") is not None:
            engine.open_at(clock["opened"])
        engine.tally = Tally.loaded(state["tally"])
        for client, number, delay, uploads, *since in state["seats"]:  # earlier versions saved no time
            memory = dict(state["memories"].get(str(client), {}))
            engine.records[client] = SimulatedClient(memory, number, delay, since[0] if since else 0.0, uploads=uploads)
        for client, saved in state["orders"].items():
            record = engine.records[int(client)]
            record.order = _loaded_order(int(client), saved, record)
            self.executor.submit(record.order)
        entries = [(due, seq, _loaded_item(Item(*item), engine)) for due, seq, *item in clock["entries"]]
        engine.clock.restore(clock["now"], clock["sequence"], entries)
        if isinstance(engine, Sampled):
            engine.load_sampling(state["sampled"])
        self.measurements = [Measurement(**measurement) for measurement in state["measurements"]]
        self._wall = state["wall"]


def _loaded_item(item: Item, engine: Engine) -> Item | Order:
    """What was on the clock: for a job that is still open, its order."""
    order = engine.order(item.client)
    return order if item.kind == "job" and order is not None and order.number == item.number else item


def _likely(weights: Sequence[float] | None, clients: int, cohort: int | None) -> dict[int, float] | None:
    if weights is None:
        return None
    if len(weights) != clients:
        raise ParameterError(f"[clock] probabilities has {len(weights)} numbers for {clients} clients; give one each")
    able = sum(weight > 0 for weight in weights)
    if cohort is not None and able < cohort:
        raise ParameterError(f"[clock] probabilities lets {able} clients come, but a round takes {cohort}")
    return dict(enumerate(weights))


def _check_sampled(fleet: FleetParams) -> None:
    for name, idle in (("on", None), ("silent_share", 0.0), ("loss", 0.0), ("lease", None)):
        if getattr(fleet, name) != idle:
            raise ParameterError(
                f"[fleet] {name} = {getattr(fleet, name)} needs a clock, and the protocol 'sampled' has none; "
                "leave it out or choose 'events' or 'ticks'"
            )


def _check_clock(experiment: Experiment, strategy: Strategy) -> None:
    """Refuses what only one of the three protocols has."""
    clock, budget, evaluation = (experiment.section(name) for name in ("clock", "budget", "evaluation"))
    if clock.protocol != "ticks":
        ticking = {
            '[clock] step = "tick"': clock.step == "tick",
            f"[budget] ticks = {budget.ticks}": budget.ticks is not None,
            '[evaluation] unit = "ticks"': evaluation.unit == "ticks",
        }
        for what in (what for what, given in ticking.items() if given):
            raise ParameterError(f'{what} needs [clock] protocol = "ticks"; it is "{clock.protocol}"')
    if clock.protocol == "sampled" and clock.refill == "step":
        raise ParameterError('[clock] refill = "step" needs a clock, and the protocol "sampled" has none; leave it out')
    if clock.protocol == "sampled" and getattr(strategy.p, "reset", "") == "silent":
        raise ParameterError(
            '[strategy] reset = "silent" needs jobs that are under way, and the protocol "sampled" has none; use '
            '"arrival"'
        )
    if clock.protocol == "sampled" and experiment.section("local").params.get("delay") == "time":
        raise ParameterError(
            '[local] delay = "time" needs a clock, and the protocol "sampled" has none; use "versions"'
        )
    if clock.step == "tick" and not strategy.can_take:
        raise ParameterError(
            f'[clock] step = "tick" does not go with {strategy.name}, which aggregates one arrival at a time; use '
            'step = "arrival"'
        )


def executor(experiment: Experiment, parts: Parts, placement: Placement) -> Executor:
    """Where clients are trained: here, in other processes, or on a Ray cluster."""
    if placement.executor == "ray":
        from .ray_executor import RayExecutor

        return RayExecutor(experiment, parts.client_training, (parts.dataset, parts.partition), placement)
    if placement.workers:
        return Processes(experiment, parts.client_training, placement.workers)
    return Inline(parts.client_training)


def _saved_job(job: Job) -> dict[str, Any]:
    extras = {name: np.array(vector) for name, vector in job.extras.items()}
    return {"version": job.version, "model": np.array(job.model), "extras": extras}


def _saved_order(order: Order) -> dict[str, Any]:
    due = None if math.isinf(order.due) else order.due  # a job that never returns; JSON has no word for infinity
    head = [order.job.first, order.job.id, order.number, order.steps, order.delay, due]
    return {"head": head, **_saved_job(order.job)}


def _loaded_order(client: int, saved: dict[str, Any], record: SimulatedClient) -> Order:
    first, number_of_job, number, steps, delay, due = saved["head"]
    job = Job(client, saved["version"], saved["model"], saved["extras"], first, number_of_job)
    return Order(job, number, steps, record.memory, delay, math.inf if due is None else due)
