"""Replay: what would another rule have done with these very arrivals.

A trace says who pulled, reported, dropped out, came and went, and when. Replaying it asks the clock nothing: the same
rule ends with the same model, bit for bit; another one meets the same clients in the same order at the same times.
Where that rule makes a client wait (a cohort that is full, an opening that is not over), the client's pull and its
report are passed over and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
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
                yield {"kind": line["kind"], "time": float(line["time"]), "client": line.get("client")}
            except (ValueError, KeyError, TypeError):
                raise InputError(f"{file} is not a trace: line {number} is not an event") from None


def replay(simulation: Simulation, lines: Iterable[Line]) -> int:
    """Drives a fresh simulation by a trace; returns how many pulls had to be passed over."""
    skipped, engine, coordinator = 0, simulation.engine, simulation.coordinator
    simulation.start(planned=False)
    for line in lines:
        kind, client = line["kind"], line["client"]
        engine.clock.now = line["time"]
        if kind == "pull":
            job = coordinator.pull(client, line["time"]) if client in coordinator.clients else None
            skipped += job is None
            if job is not None:
                engine.send(job)
        elif kind == "arrival" and coordinator.works(client):
            engine.deliver(engine.orders[client])
        elif kind in ("drop", "reset") and coordinator.works(client):
            engine.withdraw(client)
            coordinator.drop(client, line["time"])
        elif kind == "leave" and client in coordinator.clients:
            engine.withdraw(client)
            coordinator.leave(client, line["time"])
        elif kind == "join" and client not in coordinator.clients:
            coordinator.join(client, line["time"])
    simulation.finish()
    return skipped
