"""Shows the progress of runs: a bar on a terminal, a line every few seconds elsewhere, nothing if `quiet`."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import Any, Self

from ..sim.experiment import Experiment
from ..sim.simulation import Simulation

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_UPDATES = 0.1


class ProgressBar:
    """Counts uploads (or versions, or time: whatever the budget limits) over one run or several."""

    def __init__(self, experiment: Experiment, *, quiet: bool, runs: int = 1) -> None:
        budget = experiment.section("budget")
        limits: dict[str, float | None] = {"uploads": budget.uploads, "versions": budget.versions, "time": budget.time}
        given = ((unit, limit) for unit, limit in limits.items() if limit is not None)
        self._unit, self._limit = next(given, ("uploads", math.inf))  # the engine refuses a run without any
        self._runs = runs
        self._done = 0
        self._current: tuple[str, int] | None = None
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if not self._quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
            self._task = self._bar.add_task("", total=self._limit * self._runs, detail="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update_named(self, name: str, seed: int, simulation: Simulation) -> None:
        """Like `update`, for one of several runs."""
        if self._current is not None and self._current != (name, seed):
            self._done += 1
        self._current = (name, seed)
        self.update(simulation)

    def update(self, simulation: Simulation) -> None:
        """Shows the run's state; most calls return at once, so that progress costs next to nothing."""
        now = time.monotonic()
        pause = _SECONDS_BETWEEN_UPDATES if self._bar is not None else _SECONDS_BETWEEN_LINES
        if self._quiet or now - self._printed < pause:
            return
        self._printed = now
        tally, last = simulation.engine.tally, simulation.measurements[-1]
        spent = {"uploads": tally.updates, "versions": simulation.strategy.version, "time": simulation.engine.clock.now}
        rate = tally.updates / max(simulation.seconds, 1e-9)
        detail = (
            f"{simulation.strategy.name}  {rate:.0f} uploads/s  version {simulation.strategy.version}  "
            f"accuracy {last.accuracy:.3f}  staleness {tally.staleness_mean:.1f}"
        )
        total = self._done * self._limit + spent[self._unit]
        if self._bar is not None:
            self._bar.update(self._task, completed=total, detail=detail)
        else:
            share = total / (self._limit * self._runs)
            print(f"{share:4.0%}  {spent['uploads']} uploads  {detail}", file=sys.stderr, flush=True)  # noqa: T201


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Rich

    columns = (
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    return Rich(*columns, console=Console(stderr=True), transient=True)
