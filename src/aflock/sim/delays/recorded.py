"""Durations that were recorded: of a run of aflock, or of a real fleet.

    trace.jsonl     of a run: a job took from its pull to its arrival
    *.csv           with the columns client and duration, one line per job, in the order they happened
    anything else   one number per line, of no client in particular

Client i's k-th job takes as long as client i's k-th job in the recording, which starts again after its last job. A
client that is not in the recording uses the durations of a recorded one: client number modulo the number of recorded
clients. If the recording names no clients, durations are drawn from all of it.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ParameterError
from ...params import Params, path
from .base import Delay, register


@dataclass(frozen=True)
class TraceParams(Params):
    """Parameters of recorded delays."""

    file: str = path("", "trace.jsonl of a run, a CSV with client and duration, or one number per line")


@register("trace", description="recorded durations, client by client and job by job", params=TraceParams)
class Trace(Delay):
    """F^-1 of all durations, and each client's own in their order."""

    p: TraceParams

    def __init__(self, params: TraceParams) -> None:
        super().__init__(params)
        found = _read(Path(self.p.file))
        self._all = sorted(duration for _, duration in found)
        by_client: dict[int, list[float]] = {}
        for client, duration in found:
            if client is not None:
                by_client.setdefault(client, []).append(duration)
        self._own = by_client
        self._stand_ins = [by_client[client] for client in sorted(by_client)]

    def quantile(self, u: float) -> float:
        """The u-quantile of the durations of all clients."""
        return self._all[min(len(self._all) - 1, int(u * len(self._all)))]

    def draw(self, client: int, job: int, u: float) -> float:
        """The recorded duration of the client's job."""
        if not self._own:
            return self.quantile(u)
        own = self._own.get(client) or self._stand_ins[client % len(self._stand_ins)]
        return own[job % len(own)]


def _read(file: Path) -> list[tuple[int | None, float]]:
    readers = {".jsonl": _run, ".csv": _table}
    try:
        with open(file, encoding="utf-8", newline="") as lines:
            found = list(readers.get(file.suffix, _numbers)(lines))
    except OSError as error:
        raise ParameterError(f"delay trace: {file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ParameterError(
            f"delay trace: {file} is not a recording ({error}); expected trace.jsonl of a run, a CSV with the columns "
            "client and duration, or one number per line"
        ) from None
    if not found or not all(math.isfinite(duration) and duration >= 0 for _, duration in found):
        raise ParameterError(f"delay trace: {file} must hold at least one duration, and none below 0")
    return found


def _run(lines: Iterator[str]) -> Iterator[tuple[int | None, float]]:
    pulled: dict[int, float] = {}
    event: dict[str, Any] = {"time": 0.0}
    for line in lines:
        event = json.loads(line)
        if event["kind"] == "pull":
            pulled[event["client"]] = event["time"]
        elif event["kind"] == "arrival":
            yield event["client"], event["time"] - pulled.pop(event["client"])
    for client, time in pulled.items():  # not back when the recording ended: it took at least until then
        yield client, event["time"] - time


def _table(lines: Iterator[str]) -> Iterator[tuple[int | None, float]]:
    for row in csv.DictReader(lines):
        yield int(row["client"]), float(row["duration"])


def _numbers(lines: Iterator[str]) -> Iterator[tuple[int | None, float]]:
    for line in lines:
        if line.strip():
            yield None, float(line)
