"""What simulation costs: against plain loops that make the same steps, and the engine alone.

One thread, CPU time per update, five rounds in turns; a ratio is the median of the five quotients, with the least and
the most beside it. Above 1 the simulator is faster than the yardstick.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import models, rng, strategies
from ..coordination.budget import Budget
from ..coordination.coordinator import Coordinator
from ..data import Dataset, partition
from ..local import Fixed, Trained, create
from ..sim import delays
from ..sim.client_training import ClientTraining
from ..sim.engine import Engine
from ..sim.executors import Executor, Inline, Order
from ..sim.fleet import Fleet
from ..system import threads
from .turns import Contestant, Progress, Streak, aims, judged, machine, quick_note, ratio, take_turns

CLIENTS, FLIGHT, BUFFER, BATCH, EACH, ROUNDS = 100, 20, 10, 50, 120, 5


@dataclass(frozen=True)
class Problem:
    """A model, its local steps, the shape a plain loop sees, how many updates make a round, and the aim."""

    model: str
    steps: int
    shape: tuple[int, ...]
    updates: int
    aim: float
    features: int = 784
    classes: int = 10
    params: tuple[tuple[str, Any], ...] = ()


PROBLEMS = (
    Problem("logistic", 1, (784,), 2000, 2.5),
    Problem("mlp", 5, (784,), 200, 1.8, params=(("hidden", 128),)),
    Problem("cnn", 5, (1, 28, 28), 6, 1.2),
    Problem("lstm", 5, (), 6, 0.97, 80, 80),
    Problem("resnet18", 5, (3, 32, 32), 1, 0.97, 3072),
)


class Simulated(Streak):
    """A federation that trains: FedBuff with a buffer of 10, 20 open jobs for 100 clients, exponential durations."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine

    def _work(self, prepared: int) -> None:
        self._engine.budget = Budget(uploads=self._engine.tally.updates + prepared)
        self._engine.run()


class Idle(Executor):
    """No training at all: every job comes back with the same ready-made vector."""

    def __init__(self, length: int) -> None:
        self._done = Trained({"delta": np.full(length, 1e-6, np.float32)}, 1)

    def submit(self, order: Order) -> None:
        """Does nothing."""

    def result(self, order: Order) -> Trained:
        """Returns the ready-made vector."""
        return self._done

    def cancel(self, order: Order) -> None:
        """Does nothing."""


# --- parts -----------------------------------------------------------------------------------------------------------


def _dataset(problem: Problem, clients: int = CLIENTS, each: int = EACH) -> Dataset:
    draws, count = rng.stream(0, "bench", problem.model), clients * each
    y = np.arange(count) % problem.classes
    if problem.shape == ():
        x = draws.integers(problem.classes, size=(count, problem.features)).astype(np.float32)
    else:
        x = draws.standard_normal((count, problem.features), np.float32)
    return Dataset("bench", x, y, x[:10], y[:10], problem.classes)


def _training(problem: Problem, dataset: Dataset, needs: tuple[str, ...]) -> ClientTraining:
    shares = partition.create("iid", dataset, CLIENTS)
    model = models.create(problem.model, dataset, **dict(problem.params))
    return ClientTraining(dataset, shares, model, create("sgd", eta_l=0.01), Fixed(problem.steps), BATCH, 0, needs)


def _engine(training: Any, executor: Executor, clients: int, w0: Any) -> Engine:
    """A started federation whose clients `training` trains."""
    strategy = strategies.create("fedbuff", clients=clients, buffer=BUFFER)
    coordinator = Coordinator(strategy, concurrency=FLIGHT)
    fleet = Fleet(clients, delays.create("exponential"))
    engine = Engine(coordinator, fleet, training, executor, budget=Budget(uploads=0))
    coordinator.start(w0)
    engine.plan()
    return engine


# --- against plain loops ---------------------------------------------------------------------------------------------


def _compare(problem: Problem, updates: int, rounds: int) -> dict[str, Any]:
    from . import bare

    dataset = _dataset(problem)
    training = _training(problem, dataset, ("delta",))
    module = bare.NETWORKS[problem.model]()
    clients = [(dataset.take(rows), dataset.train_y[rows]) for rows in training.partition.indices]
    assert sum(p.numel() for p in module.parameters()) == training.model.length
    ours = Simulated(_engine(training, Inline(training), CLIENTS, training.model.init(rng.stream(0, "w"))))
    plain = bare.TorchLoop(module, clients, problem.shape, problem.steps, BATCH)
    contestants: dict[str, Contestant] = {"aflock": ours, "bare": plain}
    if problem.model == "logistic":
        contestants["numpy"] = bare.NumpyLoop(clients, problem.classes, problem.steps, BATCH)
    take_turns(contestants, rounds, {"*": updates})
    found: dict[str, Any] = {"weights": training.model.length, "steps": problem.steps, "updates": updates}
    found |= {name: contestant.timing.describe() for name, contestant in contestants.items()}
    for name in ("bare", "numpy"):
        if name in contestants:
            found[f"of_{name}"] = ratio(contestants[name].timing, ours.timing)
    return found


# --- the engine alone ------------------------------------------------------------------------------------------------


@dataclass
class _NoTraining:
    """Clients without data."""

    needs: tuple[str, ...] = ("delta",)
    delay_unit = "versions"

    def examples(self, client: int) -> int:
        """Any number."""
        return 1

    def steps_of(self, client: int, number: int) -> int:
        """One step."""
        return 1


def _alone(sizes: tuple[int, ...], updates: int, rounds: int) -> dict[str, Any]:
    length = 10
    contestants: dict[str, Contestant] = {
        str(n): Simulated(_engine(_NoTraining(), Idle(length), n, np.zeros(length, np.float32))) for n in sizes
    }
    take_turns(contestants, rounds, {"*": updates})
    found = {}
    for name, contestant in contestants.items():
        timing = contestant.timing
        found[name] = timing.describe() | {
            "events_per_s": 2 / timing.median,  # a job is two events: it is pulled, and it arrives
            "events_per_s_least": 2 / max(timing.samples),
            "events_per_s_most": 2 / min(timing.samples),
        }
    return found


# --- what needs a process of its own ---------------------------------------------------------------------------------


def _apart(*arguments: str) -> dict[str, Any]:
    """One measurement of `large.py`, in a process whose peak memory is its own."""
    command = [sys.executable, "-m", "aflock.bench.large", *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# --- the whole -------------------------------------------------------------------------------------------------------


def measure(*, quick: bool = False, progress: Progress = lambda text: None) -> dict[str, Any]:
    """The whole measurement; `quick` makes it smaller, and the report says so."""
    shrink, rounds = (10, 2) if quick else (1, ROUNDS)
    report: dict[str, Any] = {"quick": quick, "machine": machine(), "models": {}}
    with threads.one_thread():
        for problem in PROBLEMS[: 3 if quick else None]:
            progress(f"{problem.model} against plain loops")
            report["models"][problem.model] = _compare(problem, max(1, problem.updates // shrink), rounds)
        progress("the engine alone")
        sizes = (100, 1_000, 10_000) if quick else (100, 1_000, 10_000, 100_000, 1_000_000)
        report["engine"] = _alone(sizes, 20_000 // shrink, rounds)
    many = 10_000 if quick else 1_000_000
    progress(f"start of {many} clients")
    report["start"] = _apart("start", str(many))
    progress("two workers against one, on the CNN")
    report["workers"] = _apart("workers", str(max(2, 40 // shrink)), str(rounds))
    clients, hidden = (50, 100) if quick else (1_000, 1_509)
    for cache in ("int8", "disk"):
        progress(f"ace with {cache} rows of {clients} clients")
        report[f"rows {cache}"] = _apart("rows", cache, str(clients), str(hidden), str(max(20, 200 // shrink)))
    report["machine"]["load_after"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return report | {"targets": _targets(report)}


def _targets(report: dict[str, Any]) -> list[dict[str, Any]]:
    found, rows = report["models"], []
    for problem in PROBLEMS:
        if problem.model in found:
            times = found[problem.model]["of_bare"]["ratio"]
            rows.append((f"{problem.model}, times bare torch", times, ">=", problem.aim))
    rows.insert(1, ("logistic, times hand-written NumPy", found["logistic"]["of_numpy"]["ratio"], ">=", 0.8))
    sizes = list(report["engine"])
    first, last = report["engine"][sizes[0]], report["engine"][sizes[-1]]
    growth = np.log(int(sizes[-1])) / np.log(int(sizes[0]))
    rows += [
        ("engine alone, events/s", first["events_per_s"], ">=", 200_000),
        (f"cost per event, n={sizes[-1]} / n={sizes[0]}", last["us"] / first["us"], "<=", round(float(growth), 2)),
        (f"start of {report['start']['clients']} clients, s", report["start"]["seconds"], "<=", 10),
        ("their peak memory, GB", report["start"]["peak_gb"], "<=", 4),
        ("two workers / one, CNN", report["workers"]["speedup"]["ratio"], ">=", 1.6),
    ]
    return judged(rows)


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    now = report["machine"]
    lines = [
        f"one thread, CPU time per update; load {now['load']:.2f} before, {now['load_after']:.2f} after, on "
        f"{now['cores']} cores{quick_note(report)}",
        "",
        f"{'model':<12}{'weights':>12}{'K':>4}{'aflock, us':>14}{'bare, us':>14}   times bare (least - most)",
    ]
    for name, row in report["models"].items():
        of = row["of_bare"]
        lines.append(
            f"{name:<12}{row['weights']:>12,}{row['steps']:>4}{row['aflock']['us']:>14,.0f}{row['bare']['us']:>14,.0f}"
            f"   {of['ratio']:.2f} ({of['least']:.2f} - {of['most']:.2f})"
        )
    hand = report["models"]["logistic"]["of_numpy"]
    lines += [f"logistic, times hand-written NumPy: {hand['ratio']:.2f} ({hand['least']:.2f} - {hand['most']:.2f})", ""]
    lines.append(f"{'engine alone, clients':<24}{'us per job':>12}   events/s: pulls and arrivals (least - most)")
    for size, row in report["engine"].items():
        spread = f"({row['events_per_s_least']:,.0f} - {row['events_per_s_most']:,.0f})"
        lines.append(f"{int(size):<24,}{row['us']:>12.1f}   {row['events_per_s']:,.0f} {spread}")
    start, workers = report["start"], report["workers"]
    two = workers["speedup"]
    lines += [
        "",
        f"{start['clients']:,} clients: start {start['seconds']:.1f} s, peak {start['peak_gb']:.2f} GB "
        f"({start['what']})",
        f"two workers / one, CNN: {two['ratio']:.2f} ({two['least']:.2f} - {two['most']:.2f}) at load "
        f"{workers['load']:.2f}; updates/s {workers['one_per_s']:.1f} and {workers['two_per_s']:.1f}",
    ]
    for cache in ("int8", "disk"):
        row = report[f"rows {cache}"]
        lines.append(
            f"ace, {row['clients']:,} clients x {row['weights']:,} weights, {cache} rows: {row['updates_per_s']:.1f} "
            f"updates/s, peak {row['peak_gb']:.2f} GB, {row['mapped_gb']:.2f} of it file cache"
        )
    return "\n".join([*lines, "", *aims(report["targets"])])
