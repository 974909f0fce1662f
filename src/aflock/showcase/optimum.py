"""Which rules reach the optimum: every rule on one federation whose fast and slow clients have different optima.

Half of the clients is eight times as fast as the other half, so the model moves towards their optimum. A rule that
corrects for that reaches the optimum of all clients; one that does not ends nearer to that of the fast ones. The
clients are quadratics, so the optimum is known. All rules get the same clients, speeds and durations. Time is virtual:
an event queue ordered by (time, sequence).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import local, rng, strategies
from ..coordination.coordinator import Coordinator
from ..models.quadratic import Quadratics
from ..types import Job, Update, Vector

CLIENTS, LENGTH, SLOWDOWN, ARRIVALS = 12, 20, 8.0, 10_000
STEP = 0.05
REACHED = 0.02
"""A final distance below this part of the initial one counts as the optimum; rules that miss it end far above."""

_MOMENTUM: dict[str, Any] = {"buffer": 3, "beta": 0.3}

SETTINGS: dict[str, dict[str, Any]] = {
    "ace": {"lr": STEP},
    "aced": {"lr": STEP, "tau_algo": 2},
    "adamasfl": _MOMENTUM | {"gamma": 0.006},
    "afa-cd": {"lr": STEP, "buffer": 3},
    "afa-cs": {"lr": STEP, "buffer": 3},
    "afl": {"buffer": CLIENTS, "buffer_min": CLIENTS // 2},
    "asgd": {"lr": STEP},
    "ca2fl": {"buffer": 3},
    "delay-adaptive": {"lr": STEP},
    "fadas": {"lr": 0.01, "buffer": 3},
    "fedasync": {"alpha": 0.3},
    "fedbuff": {"buffer": 3},
    "masfl": _MOMENTUM | {"gamma": STEP},
    "mr-asyncfl": {"gamma": 0.8},
    "twafl": {"decay": 0.1},
}
"""Hyper-parameters, per rule; a rule that is not listed runs with its defaults."""

_LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "masfl": ("masfl", {"beta": _MOMENTUM["beta"], "eta_l": STEP}),
    "adamasfl": ("adamasfl", {"beta": _MOMENTUM["beta"], "eta_l": 0.006}),
}


@dataclass
class RuleRun:
    """One rule's run: its distance from the optimum, as a part of the initial one, after each 1/100 of the arrivals."""

    name: str
    settings: dict[str, Any]
    arrivals: int
    distance: list[float] = field(default_factory=list)
    versions: int = 0
    time: float = 0.0
    staleness: float = 0.0
    fast_share: float = 0.0

    @property
    def final(self) -> float:
        """The mean distance over the last tenth of the run."""
        tail = self.distance[-max(1, len(self.distance) // 10) :]
        return sum(tail) / len(tail)

    @property
    def reached(self) -> bool:
        """Whether the rule ended at the optimum."""
        return self.final < REACHED


def run(name: str, *, arrivals: int = ARRIVALS, seed: int = 0, **changes: Any) -> RuleRun:
    """Drives one rule through the federation; `changes` override its settings."""
    problem = Quadratics.random(CLIENTS, LENGTH, seed)
    settings = SETTINGS.get(name, {}) | changes
    strategy = strategies.create(name, clients=CLIENTS, seed=seed, **settings)
    coordinator = Coordinator(strategy, seed=seed)
    rule, options = _LOCAL.get(name, ("sgd", {"eta_l": STEP}))
    client_rule = local.create(rule, **options)
    w0 = np.full(LENGTH, 3.0, np.float32)
    start = float(np.linalg.norm(w0 - problem.optimum))
    result, stalenesses, fast = RuleRun(name, settings, arrivals), 0, 0
    memories: list[local.Memory] = [{} for _ in range(CLIENTS)]
    coordinator.start(w0)
    for count, (now, job) in enumerate(_arrivals(coordinator, arrivals, seed)):
        task = local.Task(partial(_gradient, problem, job.client))
        done = client_rule.train(job, task, needs=strategy.needs, changes=strategy.changes, memory=memories[job.client])
        receipt = coordinator.push(Update(job.client, job.version, done.vectors, job=job.id), now)
        done.keep(memories[job.client], receipt)
        stalenesses += receipt.staleness
        fast += job.client < CLIENTS / 2
        if (count + 1) % max(1, arrivals // 100) == 0:
            result.distance.append(float(np.linalg.norm(strategy.model - problem.optimum)) / start)
        result.time = now
    result.versions, result.staleness, result.fast_share = strategy.version, stalenesses / arrivals, fast / arrivals
    return result


def _gradient(problem: Quadratics, client: int, x: Vector, step: int) -> Vector:
    return problem.gradient(client, x)


def _arrivals(coordinator: Coordinator, count: int, seed: int) -> Iterator[tuple[float, Job]]:
    """The jobs in the order they come back; the caller pushes each before asking for the next."""
    queue: list[tuple[float, int, Job]] = []
    now, sequence, jobs_of = 0.0, 0, [0] * CLIENTS
    for _ in range(count):
        for job in coordinator.dispatch(now):
            jobs_of[job.client] += 1
            noise = rng.stream(seed, "client", job.client, "job", jobs_of[job.client]).uniform(0.5, 1.5)
            mean = 1.0 if job.client < CLIENTS / 2 else SLOWDOWN
            heapq.heappush(queue, (now + mean * noise, sequence, job))
            sequence += 1
        now, _, job = heapq.heappop(queue)
        yield now, job


def describe(item: RuleRun) -> dict[str, Any]:
    """JSON values of a run."""
    return asdict(item) | {"final": item.final, "reached": item.reached, "threshold": REACHED}


def table(runs: list[RuleRun]) -> str:
    """The result as text, nearest to the optimum first."""
    lines = [
        f"{CLIENTS} clients, half of them {SLOWDOWN:g}x slower and with other data; {runs[0].arrivals} reports each.",
        "distance    from the optimum of all clients, as a part of the distance at the start, over the last tenth;",
        f"            below {REACHED:g} the optimum counts as reached",
        "time        virtual: a fast client's job takes 1 on average    staleness   mean, in versions",
        "fast        part of the reports that came from the fast half of the clients",
        "",
        f"{'rule':<16}{'distance':>9}  {'':<13}{'versions':>9}{'time':>8}{'staleness':>11}{'fast':>6}  settings",
    ]
    for item in sorted(runs, key=lambda item: item.final):
        verdict = "optimum" if item.reached else "not reached"
        settings = " ".join(f"{name}={value}" for name, value in item.settings.items())
        lines.append(
            f"{item.name:<16}{item.final:>9.4f}  {verdict:<13}{item.versions:>9}{item.time:>8.0f}"
            f"{item.staleness:>11.2f}{item.fast_share:>6.0%}  {settings}".rstrip()
        )
    return "\n".join(lines)
