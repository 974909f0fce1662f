"""An experiment put together: data, clients, rule and clock; what it measured; and how it is saved and resumed.

simulation = Simulation(experiment)
simulation.run()
simulation.result()
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .. import data, local, models, rng, strategies
from ..coordinator import Coordinator
from ..data import partition
from ..errors import ParameterError, StateError
from ..events import Event
from ..types import Job, Receipt, State
from . import delays
from .engine import Budget, Engine, Item, Tally
from .executors import Inline, Order
from .experiment import Experiment, Named
from .fleet import Fleet
from .sampled import Sampled
from .workshop import Workshop


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
    ) -> None:
        self.experiment = experiment
        self.measurements: list[Measurement] = []
        self._on_measurement = on_measurement
        self._on_upload = on_upload
        self._wall = 0.0
        self._build(on_event)

    def _build(self, on_event: Callable[[Event], None] | None) -> None:
        section, seeds = self.experiment.section, self.experiment.section("seeds")
        self.dataset = data.load(section("data").name, seed=seeds.data, **section("data").params)
        split: Named = section("partition")
        self.partition = partition.create(
            split.name, self.dataset, self.experiment.clients, seed=seeds.data, **split.params
        )
        n = len(self.partition.indices)
        self.fleet = self._fleet(n)
        rule: Named = section("strategy")
        self.strategy = strategies.create(rule.name, len(self.fleet.initial()), seed=seeds.training, **rule.params)
        self.model = models.create(section("model").name, self.dataset, **section("model").params)
        self.workshop = self._workshop()
        clock = section("clock")
        if clock.concurrency is not None and clock.concurrency > n:
            raise ParameterError(f"[clock] concurrency = {clock.concurrency} exceeds the {n} clients; lower it")
        self.coordinator = Coordinator(
            self.strategy,
            concurrency=clock.concurrency,
            selection=None if clock.selection == "auto" else clock.selection,
            max_staleness=clock.max_staleness,
            seed=seeds.schedule,
            on_event=on_event,
        )
        limits = {name: math.inf if value is None else value for name, value in asdict(section("budget")).items()}
        if all(math.isinf(value) for value in limits.values()):
            raise ParameterError("[budget] is empty; set uploads, versions or time")
        self.executor = Inline(self.workshop)
        kind = Sampled if clock.protocol == "sampled" else Engine
        self.engine: Engine = kind(
            self.coordinator,
            self.fleet,
            self.workshop,
            self.executor,
            budget=Budget(**limits),
            ticks=clock.protocol == "ticks",
            on_upload=self._after_upload,
        )
        if isinstance(self.engine, Sampled):
            self.engine.configure(clock.window, clock.history, seeds.schedule)

    def _fleet(self, n: int) -> Fleet:
        params, seeds = self.experiment.section("fleet"), self.experiment.section("seeds")
        delay: Named = self.experiment.section("delays")
        labels = self.dataset.train_y
        rankings = {
            "none": None,
            "class": [float(labels[rows].mean()) for rows in self.partition.indices],
            "size": [float(len(rows)) for rows in self.partition.indices],
        }
        made = delays.create(delay.name, **delay.params)
        return Fleet(n, made, params, seed=seeds.schedule, ranking=rankings[params.correlate])

    def _workshop(self) -> Workshop:
        section, seeds = self.experiment.section, self.experiment.section("seeds")
        training = section("training")
        kinds: dict[str, Callable[[int], local.Steps]] = {
            "fixed": local.Fixed,
            "dynamic": local.Dynamic,
            "epochs": local.Epochs,
        }
        return Workshop(
            self.dataset,
            self.partition,
            self.model,
            self._local_rule(),
            kinds[training.kind](training.steps),
            training.batch,
            seeds.training,
            self.strategy.needs,
            self.strategy.changes,
        )

    def _local_rule(self) -> local.LocalRule:
        section: Named = self.experiment.section("local")
        if section.name != "auto":
            return local.create(section.name, **section.params)
        name, shared = self.strategy.client_half
        return local.create(name, **section.params, **shared)

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
        begin = time.perf_counter()
        if not self.measurements:
            self.start()
        try:
            ended = self.engine.run(stop)
        finally:
            self._wall += time.perf_counter() - begin
        if ended:
            self.finish()
        return ended

    def finish(self) -> None:
        """Lets the rule use its last partial buffer, and measures the final model."""
        self.coordinator.finish(self.engine.clock.now)
        self._measure()

    def _after_upload(self, engine: Engine, receipt: Receipt) -> None:
        if engine.tally.uploads % self.experiment.section("evaluation").every == 0:
            self._measure()
        if self._on_upload is not None:
            self._on_upload(self)

    def _measure(self) -> None:
        tally, found = (
            self.engine.tally,
            self.model.evaluate(self.strategy.model, self.dataset.test_x, self.dataset.test_y),
        )
        measurement = Measurement(
            tally.uploads,
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

    def result(self) -> Result:
        """The last measurement and the whole cost."""
        last, tally = self.measurements[-1], self.engine.tally
        return Result(
            strategy=self.experiment.section("strategy").name,
            seed=self.experiment.section("seeds").training,
            accuracy=last.accuracy,
            loss=last.loss,
            versions=self.strategy.version,
            uploads=tally.uploads,
            virtual_time=self.engine.clock.now,
            wall_time=self._wall,
            staleness_mean=tally.staleness_mean,
            staleness_max=tally.staleness_max,
            gradient_evaluations=tally.gradients,
            bytes_up=tally.bytes_up,
            bytes_down=tally.bytes_down,
            largest_share=tally.largest_share,
            rejected=tally.rejected,
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
                "sequence": engine.clock.sequence,
                "entries": [
                    [due, seq, item.kind, item.client, item.number] for due, seq, item in engine.clock.entries()
                ],
            },
            "tally": asdict(engine.tally) | {"by_client": sorted(engine.tally.by_client.items())},
            "numbers": sorted(engine.numbers.items()),
            "delays": sorted(engine.delays.items()),
            "memories": {str(client): dict(memory) for client, memory in engine.memories.items()},
            "orders": {str(c): _saved_order(order) for c, order in engine.orders.items()},
            "measurements": [asdict(measurement) for measurement in self.measurements],
            "sampled": _saved_sampling(engine),
            "wall": self._wall,
        }

    def load_state_dict(self, state: State) -> None:
        """Takes over a saved state of the same experiment."""
        if state["experiment"] != self.experiment.resolved():
            raise StateError("the state belongs to another experiment; resume with the file it was started with")
        engine = self.engine
        self.coordinator.load_state_dict(state["coordinator"])
        clock = state["clock"]
        entries = [(due, seq, Item(kind, client, number)) for due, seq, kind, client, number in clock["entries"]]
        engine.clock.restore(clock["now"], clock["sequence"], entries)
        engine.tally = Tally(**{**state["tally"], "by_client": dict(state["tally"]["by_client"])})
        engine.numbers = dict(state["numbers"])
        engine.delays = dict(state["delays"])
        engine.memories = {int(c): dict(memory) for c, memory in state["memories"].items()}
        for client, saved in state["orders"].items():
            order = engine.orders[int(client)] = _loaded_order(int(client), saved, engine)
            self.executor.submit(order)
        if isinstance(engine, Sampled):
            _load_sampling(engine, state["sampled"])
        self.measurements = [Measurement(**measurement) for measurement in state["measurements"]]
        self._wall = state["wall"]


def _saved_job(job: Job) -> dict[str, Any]:
    extras = {name: np.array(vector) for name, vector in job.extras.items()}
    return {"version": job.version, "model": np.array(job.model), "extras": extras}


def _saved_order(order: Order) -> dict[str, Any]:
    head = [order.job.first, order.job.id, order.number, order.steps, order.delay]
    return {"head": head, **_saved_job(order.job)}


def _loaded_order(client: int, saved: dict[str, Any], engine: Engine) -> Order:
    first, number_of_job, number, steps, delay = saved["head"]
    job = Job(client, saved["version"], saved["model"], saved["extras"], first, number_of_job)
    return Order(job, number, steps, engine.memories.setdefault(client, {}), delay)


def _saved_sampling(engine: Engine) -> dict[str, Any]:
    if not isinstance(engine, Sampled):
        return {}
    history = {str(k): _saved_job(job) for k, job in enumerate(engine.history)}
    return {"draws": engine.draws, "heard": list(engine.heard), "history": history}


def _load_sampling(engine: Sampled, saved: dict[str, Any]) -> None:
    engine.draws, engine.heard = saved["draws"], dict.fromkeys(saved["heard"])
    engine.history.clear()
    for part in saved["history"].values():
        engine.history.append(Job(0, part["version"], part["model"], part["extras"]))
