"""One cell of a recipe: its runs over the seeds, read off at equal server steps, uploads and time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from typing import Any

from ..events import Event
from ..sim.engine import Diverged
from ..sim.experiment import Experiment
from ..sim.simulation import Measurement, Simulation
from . import rounds

TUNING_SEED = 1000
"""The seed on which learning rates are chosen; no result is taken from it."""

POINTS = 40
"""Measurements of a curve that are stored."""


def run(document: Mapping[str, Any], limits: Mapping[str, float], by_round: bool = False) -> dict[str, Any]:
    """One run, and the last measurement within each of the limits; a run that does not get there has none.

    A run that diverges is a result, too: it is stored with what it had measured, and says so.
    """
    diverged: dict[str, Any] = {}
    events: list[Event] = []
    with Simulation(Experiment.build(document), on_event=events.append if by_round else None) as simulation:
        try:
            simulation.run()
        except Diverged as error:
            diverged = {"diverged": str(error)}
        result, curve = simulation.result(), simulation.measurements
    del simulation
    gc.collect()  # its parts refer to each other, and the next run needs the room
    return (
        diverged
        | {
            "at": {axis: None if diverged else _within(curve, axis, limit) for axis, limit in limits.items()},
            "result": asdict(result),
            "curve": [_point(measured) for measured in _thinned(curve)],
        }
        | ({"rounds": rounds.saved(rounds.record(events))} if by_round else {})
    )


def _within(curve: Sequence[Measurement], axis: str, limit: float) -> dict[str, float] | None:
    if axis == "ticks":  # the run ends there; its last partial buffer, used after that, does not count
        last = next(measured for measured in curve if measured.time == curve[-1].time)
        return {"accuracy": last.accuracy, "loss": last.loss}
    if axis == "accuracy":  # the first time it is reached
        reached = next((measured for measured in curve if measured.accuracy >= limit), None)
        return None if reached is None else {"time": reached.time, "versions": reached.versions}
    inside = [measured for measured in curve if getattr(measured, axis) <= limit * (1 + 1e-9)]
    if not inside or getattr(curve[-1], axis) < limit * (1 - 0.02):  # it ended earlier: nothing was measured there
        return None
    return {"accuracy": inside[-1].accuracy, "loss": inside[-1].loss}


def _thinned(curve: Sequence[Measurement]) -> list[Measurement]:
    stride = max(1, -(-len(curve) // POINTS))
    return [*curve[:-1:stride], curve[-1]]


def _point(measured: Measurement) -> list[float]:
    """Uploads, versions, time, accuracy, loss."""
    return [
        measured.uploads,
        measured.versions,
        round(measured.time, 3),
        round(measured.accuracy, 4),
        round(measured.loss, 4),
    ]


def end_with_parent() -> None:
    """Lets this worker process end as soon as the process that started it has ended, also if that was killed.

    A worker of a pool waits for its next run at a pipe that its siblings hold open, too: it would never see the end.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(process: BaseProcess) -> None:
    process.join()
    os._exit(1)  # not `sys.exit`, which would end this thread only
