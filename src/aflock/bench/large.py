"""Measurements that need a process of their own, for the peak of its memory or for its workers; prints JSON.

python -m aflock.bench.large start CLIENTS
python -m aflock.bench.large workers UPDATES ROUNDS
python -m aflock.bench.large rows CACHE CLIENTS HIDDEN UPDATES
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ..coordination.budget import Budget
from ..sim.experiment import Experiment
from ..sim.simulation import Simulation
from ..system import threads
from .turns import Contestant, ratio, take_turns


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _mapped_gb() -> float:
    """How much of the present memory is pages of files, which the system takes back when it needs them."""
    status = Path("/proc/self/status")
    for line in status.read_text(encoding="ascii").splitlines() if status.is_file() else []:
        if line.startswith("RssFile:"):
            return int(line.split()[1]) / 2**20
    return 0.0


def start(clients: int) -> dict[str, Any]:
    """The time up to the first arrival: data, split, fleet, coordinator, 1,000 open jobs."""
    document = {
        "data": {"name": "synthetic", "examples": clients + max(20, clients // 100), "features": 4, "classes": 2},
        "partition": {"name": "iid", "clients": clients},
        "strategy": {"name": "fedbuff"},
        "clock": {"concurrency": min(1000, clients)},
        "budget": {"uploads": 1},
    }
    document["data"]["test_fraction"] = 0.005  # type: ignore[index]
    begin = time.perf_counter()
    Simulation(Experiment.build(document)).run()
    what = "data, split, fleet and coordinator, up to the first arrival of 1,000 jobs in flight"
    return {"clients": clients, "seconds": time.perf_counter() - begin, "peak_gb": _peak_gb(), "what": what}


class _Run(Contestant):
    """One more upload; wall time, since workers have clocks of their own."""

    def __init__(self, simulation: Simulation, updates: int) -> None:
        super().__init__()
        self._simulation, self._updates = simulation, updates

    def _work(self, prepared: Any) -> None:
        engine = self._simulation.engine
        engine.budget = Budget(uploads=engine.tally.updates + self._updates)
        engine.run()


def workers(updates: int, rounds: int) -> dict[str, Any]:
    """The CNN on one and on two worker processes."""
    document = {
        "data": {"name": "synthetic", "examples": 6000, "features": 784},
        "partition": {"name": "iid", "clients": 100},
        "model": {"name": "cnn"},
        "strategy": {"name": "fedbuff"},
        "training": {"batch": 50, "steps": 5},
        "clock": {"concurrency": 20},
        "budget": {"uploads": 10**9},
        "evaluation": {"every": 10**9},
    }
    experiment = Experiment.build(document)
    with Simulation(experiment, workers=1) as one, Simulation(experiment, workers=2) as two:
        one.start()
        two.start()
        contestants = {"one": _Run(one, updates), "two": _Run(two, updates)}
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
        take_turns(contestants, rounds, {"*": 1})
    first, second = contestants["one"].timing, contestants["two"].timing
    rates = {"one_per_s": updates / first.median, "two_per_s": updates / second.median}
    return {"updates": updates, "load": load, "speedup": ratio(first, second)} | rates


def rows(cache: str, clients: int, hidden: int, updates: int) -> dict[str, Any]:
    """A caching rule with one row per client."""
    with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
        rule: dict[str, Any] = {"name": "ace", "cache": cache, "lr": 0.01}
        document = {
            "data": {"name": "synthetic", "examples": clients * 12, "features": 784},
            "partition": {"name": "iid", "clients": clients},
            "model": {"name": "mlp", "hidden": hidden},
            "strategy": rule | ({"cache_dir": folder} if cache == "disk" else {}),
            "training": {"batch": 8},
            "budget": {"uploads": clients},
            "evaluation": {"every": 10**9},
        }
        simulation = Simulation(Experiment.build(document))
        simulation.run()  # every client's first gradient
        simulation.engine.budget = Budget(uploads=clients + updates)
        begin = time.perf_counter()
        with threads.one_thread():
            simulation.engine.run()
        spent = time.perf_counter() - begin
        return {
            "clients": clients,
            "weights": simulation.model.length,
            "updates_per_s": updates / spent,
            "peak_gb": _peak_gb(),
            "mapped_gb": _mapped_gb(),
        }


def main(arguments: list[str]) -> None:
    """One measurement, by name."""
    threads.ask_for_one()
    what, *rest = arguments
    if what == "start":
        found = start(int(rest[0]))
    elif what == "workers":
        found = workers(int(rest[0]), int(rest[1]))
    else:
        found = rows(rest[0], int(rest[1]), int(rest[2]), int(rest[3]))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
