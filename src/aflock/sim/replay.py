"""Replay: what would another rule have done with these very arrivals.

A trace says who pulled, reported, dropped out, came and went, and when. Replaying it asks the clock nothing: the same
rule ends with the same model, bit for bit; another one meets the same clients in the same order at the same times.
Where that rule makes a client wait (a cohort that is full, an opening that is not over), the client's pull and its
report are passed over and counted.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..system.threads import one_thread
from ..types import Job
from .sampled import Sampled
from .simulation import Simulation

Line = Mapping[str, Any]


def read(file: Path) -> Iterator[Line]:
    """The lines of a trace; a last one that was cut off by a crash is left out."""
    if not file.is_file():
        raise InputError(f"{file} does not exist; expected the trace.jsonl of a run")
    with open(file, encoding="utf-8") as lines:
        for number, text in enumerate(lines, 1):
            if not text.endswith("\n"):
                return
            try:
                line = json.loads(text)
                yield _event(line)
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{file} is not a trace: line {number} is not an event") from None


def _event(line: Line) -> Line:
    client = line.get("client")
    if client is not None:
        client = operator.index(client)
    stale = line["server"] - line["version"] if line["kind"] == "pull" and "version" in line else 0
    first = bool(line.get("first", False))
    return {"kind": line["kind"], "time": float(line["time"]), "client": client, "stale": stale, "first": first}


def replay(simulation: Simulation, lines: Iterable[Line]) -> int:
    """Drives a fresh simulation by a trace; returns how many pulls had to be passed over."""
    with one_thread():
        simulation.start(planned=False)
        simulation.engine.replaying = True
        skipped = sum(_passed_over(simulation, line) for line in lines)
        if simulation.engine.step_per_tick and not simulation.strategy.version:
            raise InputError(
                "the trace has no lines of server steps: it was recorded with one step per arrival; replay it with "
                "--set clock.step=arrival"
            )
        simulation.finish()
    return skipped


def _passed_over(simulation: Simulation, line: Line) -> bool:
    """Lets one line happen; whether it is a pull that has to wait here."""
    engine, coordinator = simulation.engine, simulation.coordinator
    kind, client = line["kind"], line["client"]
    engine.clock.now = line["time"]
    known = client is not None and coordinator.knows(client)
    if kind == "pull":
        job = _job(simulation, line) if known else None
        if job is not None:
            engine.send(job, on_clock=False)
        return job is None
    if kind == "step":
        if engine.step_per_tick:
            engine.end_tick()
        return False
    order = engine.order(client)
    if kind == "arrival" and order is not None:
        engine.deliver(order)
    elif kind in ("drop", "reset") and order is not None:
        engine.withdraw(client)
        coordinator.drop(client, line["time"])
    elif kind == "leave" and known:
        engine.withdraw(client)
        coordinator.leave(client, line["time"])
    elif kind == "join" and not known:
        coordinator.join(client, line["time"])
    return False


def _job(simulation: Simulation, line: Line) -> Job | None:
    """What the client gets now; in the protocol `sampled`, from as many versions ago as it did then."""
    engine, coordinator, client = simulation.engine, simulation.coordinator, line["client"]
    if not isinstance(engine, Sampled) or line.get("first"):
        return coordinator.pull(client, line["time"])
    if not coordinator.is_idle(client):
        return None
    return coordinator.assign(engine.past(client, line.get("stale", 0)), line["time"])
