"""Times things in turns, so that other load on the machine slows all of them alike.

Nothing here is compared with a number measured elsewhere: ratios are between things timed in the same run.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Progress = Callable[[str], None]


@dataclass
class Timing:
    """Seconds per call, one sample per round."""

    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The middle sample."""
        return float(np.median(self.samples))

    def describe(self) -> dict[str, float]:
        """Median and quartiles in microseconds."""
        low, high = np.quantile(self.samples, [0.25, 0.75])
        return {"us": self.median * 1e6, "us_q25": float(low) * 1e6, "us_q75": float(high) * 1e6}


class Contestant(ABC):
    """Something that is timed: `_prepare` runs outside the clock, `_work` inside."""

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.timing = Timing()

    def round(self, calls: int) -> None:
        """One sample: the mean time of that many calls."""
        spent = 0.0
        for _ in range(calls):
            prepared = self._prepare()
            begin = self.clock()
            self._work(prepared)
            spent += self.clock() - begin
        self.timing.samples.append(spent / calls)

    def _prepare(self) -> Any:
        return None

    @abstractmethod
    def _work(self, prepared: Any) -> None: ...


class Streak(Contestant):
    """Something that is timed over many calls at once, in CPU time."""

    clock = staticmethod(time.process_time)

    def round(self, calls: int) -> None:
        """One sample: the mean CPU time of that many calls in a row."""
        begin = self.clock()
        self._work(calls)
        self.timing.samples.append((self.clock() - begin) / calls)


def take_turns(contestants: Mapping[str, Contestant], rounds: int, calls: Mapping[str, int]) -> None:
    """Times every contestant `rounds` times, one after the other, after a warm-up of each that is not counted.

    `calls` says how many calls one sample has, by name, "*" for all others. Garbage collection is off meanwhile: it
    would slow contestants at random.
    """
    for name, contestant in contestants.items():
        contestant.round(min(3, calls.get(name, calls["*"])))
        contestant.timing.samples.clear()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, contestant in contestants.items():
                contestant.round(calls.get(name, calls["*"]))
    finally:
        gc.enable()


def ratio(over: Timing, under: Timing) -> dict[str, float]:
    """The quotient of two contestants that took turns: its median over the rounds, the least and the most."""
    quotients = [a / b for a, b in zip(over.samples, under.samples, strict=True)]
    return {"ratio": float(np.median(quotients)), "least": min(quotients), "most": max(quotients)}


def machine() -> dict[str, Any]:
    """The machine of the measurement and its load."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": load}


def quick_note(report: Mapping[str, Any]) -> str:
    """What the first line of a table says of a `--quick` measurement; "" for a full one."""
    return "; QUICK: fewer repeats, not precise enough to compare" if report["quick"] else ""


def judged(rows: list[tuple[str, float, str, float]]) -> list[dict[str, Any]]:
    """Aims (what, found, ">=" or "<=", aimed at) with whether they were met."""
    return [
        {
            "what": what,
            "value": value,
            "target": f"{sign} {aim:g}",
            "met": value >= aim if sign == ">=" else value <= aim,
        }
        for what, value, sign, aim in rows
    ]


def aims(rows: list[dict[str, Any]], width: int = 44) -> list[str]:
    """The judged aims as lines of a table."""
    lines = [f"{'aim':<{width}}{'found':>11}  {'target':<10}"]
    for row in rows:
        found = f"{row['value']:>11.2f}" if row["value"] < 1000 else f"{row['value']:>11,.0f}"
        lines.append(f"{row['what']:<{width}}{found}  {row['target']:<10}{'met' if row['met'] else 'MISSED'}")
    return lines
