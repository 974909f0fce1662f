"""What a server has to tell: numbers for Prometheus, and the same and more as JSON for `aflock status`."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..memory import resident
from . import room
from .federation import Federation
from .seats import HISTOGRAM, Seat
from .store import Store

LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper ends of the classes the journal's latency is counted in, in seconds."""

WINDOW = 60.0
"""Seconds a rate is taken over."""


@dataclass
class Meter:
    """What is counted while a server runs; it begins anew with every start."""

    seen: dict[str, float] = field(default_factory=dict)
    """When each client asked last."""
    begun: float = field(default_factory=time.monotonic)
    refused: Counter[str] = field(default_factory=Counter)
    latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCIES) + 1))
    latency_sum: float = 0.0
    records: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    _marks: deque[tuple[float, int]] = field(default_factory=deque)

    def batch(self, seconds: float, count: int, updates: int) -> None:
        """One write of the journal; `updates` is how many there are by now."""
        self.latency[sum(seconds > end for end in LATENCIES)] += 1
        self.latency_sum += seconds
        self.records += count
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] > 0.5:
            self._marks.append((now, updates))
            while now - self._marks[0][0] > WINDOW:
                self._marks.popleft()

    def rate(self, updates: int) -> float:
        """Updates per second, over the last minute."""
        now = time.monotonic()
        then, count = next(((t, c) for t, c in self._marks if now - t <= WINDOW), (now, updates))
        return (updates - count) / (now - then) if now - then > 0.5 else 0.0


def status(store: Store, meter: Meter, *, full: bool) -> dict[str, Any]:
    """The federation in numbers."""
    federation, counts = store.federation, store.federation.counts
    found: dict[str, Any] = {
        "federation": federation.id,
        "state": federation.state,
        "ended": federation.ended,
        "strategy": federation.settings.section("strategy").name,
        "weights": federation.length,
        "version": federation.version,
        "updates": counts.updates,
        "applied": counts.applied,
        "buffered": counts.buffered,
        "rejected": counts.rejected,
        "dropped": counts.dropped,
        "refused": dict(meter.refused),
        "updates_per_s": round(meter.rate(counts.updates), 2),
        "staleness_mean": round(counts.staleness_sum / counts.updates, 3) if counts.updates else 0.0,
        "staleness_max": counts.staleness_max,
        "pending": federation.strategy.pending,
        "open_jobs": _open_jobs(federation),
        "seconds": round(store.now(), 1),
        "up": round(time.monotonic() - meter.begun, 1),
        "evaluation": dict(meter.evaluation),
        "memory": resident(),
        "waiting_for": max(0, federation.p.clients - len(federation.gathered)) if not federation.begun else 0,
    }
    if full:
        found["clients"] = [_client(federation, seat, meter) for seat in federation.seats.values()]
    return found


def _open_jobs(federation: Federation) -> int:
    return federation.coordinator.open_jobs


def _client(federation: Federation, seat: Seat, meter: Meter) -> dict[str, Any]:
    working = federation.coordinator.works(seat.number)
    seen, updates = meter.seen.get(seat.name), federation.counts.updates
    return {
        "name": seat.name,
        "number": seat.number,
        "state": "suspended" if seat.suspended else "working" if working else "idle",
        "version": federation.coordinator.ticket(seat.number).version if working else None,
        "jobs": seat.jobs,
        "updates": seat.uploads,
        "share": round(seat.uploads / updates, 4) if updates else 0.0,
        "staleness_mean": round(seat.staleness_sum / seat.uploads, 3) if seat.uploads else 0.0,
        "seen": None if seen is None else round(time.monotonic() - seen, 1),
    }


def text(store: Store, meter: Meter, full_disk: bool) -> str:
    """For Prometheus."""
    federation, counts = store.federation, store.federation.counts
    lines: list[str] = []

    def add(name: str, kind: str, helped: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.extend((f"# HELP aflock_{name} {helped}", f"# TYPE aflock_{name} {kind}"))
        lines.extend(f"aflock_{name}{labels} {_shown(value)}" for labels, value in samples)

    outcomes = ((f'{{outcome="{o}"}}', getattr(counts, o)) for o in ("applied", "buffered", "rejected"))
    add("version", "gauge", "Version of the model.", [("", federation.version)])
    add("updates_total", "counter", "Updates taken, by outcome.", outcomes)
    refused = ((f'{{code="{code}"}}', count) for code, count in sorted(meter.refused.items()))
    add("refused_total", "counter", "Requests refused since the start, by code.", refused)
    add("jobs_total", "counter", "Jobs handed out.", [("", counts.pulls)])
    add("dropped_total", "counter", "Jobs given up.", [("", counts.dropped)])
    add("open_jobs", "gauge", "Jobs in flight.", [("", _open_jobs(federation))])
    add("clients", "gauge", "Members.", [("", len(federation.seats) + len(federation.gathered))])
    lines.extend(_histogram("staleness", "Staleness of updates, in versions.", HISTOGRAM, counts.staleness,
                            counts.staleness_sum))  # fmt: skip
    add("buffer_fill", "gauge", "Updates held for the next server step.", [("", federation.strategy.pending)])
    add("state_bytes", "gauge", "What the rule keeps: model, buffers, rows.", [("", _nbytes(federation))])
    add("row_cache_bytes", "gauge", "Of these, one row per client.", [("", _row_bytes(federation))])
    lines.extend(_histogram("journal_seconds", "Time of a write to the journal, sync included.", LATENCIES,
                            meter.latency, meter.latency_sum))  # fmt: skip
    add("journal_bytes", "gauge", "Size of the journal.", [("", store.journal.size)])
    add("journal_records_total", "counter", "Records written since the start.", [("", meter.records)])
    add("disk_full", "gauge", "1 while the disk is full.", [("", full_disk)])
    seats, total = federation.seats.values(), max(1, counts.updates)
    each = ((f'{{client="{seat.name}"}}', seat.uploads) for seat in seats)
    add("client_updates_total", "counter", "Updates of each client.", each)
    shares = ((f'{{client="{seat.name}"}}', seat.uploads / total) for seat in seats)
    add("client_share", "gauge", "The part of all updates that came from each client.", shares)
    for name, value in meter.evaluation.items():
        add(f"evaluation_{name}", "gauge", "The model on the test set.", [("", value)])
    add("resident_bytes", "gauge", "Memory of the process.", [("", resident())])
    return "\n".join(lines) + "\n"


def _nbytes(federation: Federation) -> int:
    return federation.strategy.nbytes if federation.begun else 0


def _row_bytes(federation: Federation) -> int:
    return sum(rows.nbytes for rows in room.of(federation.strategy)) if federation.begun else 0


def _shown(value: float) -> str:
    """All digits: a counter that is rounded stands still."""
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _histogram(name: str, helped: str, ends: Iterable[float], counts: list[int], total: float) -> Iterator[str]:
    yield f"# HELP aflock_{name} {helped}"
    yield f"# TYPE aflock_{name} histogram"
    below = 0
    for end, count in zip(ends, counts, strict=False):
        below += count
        yield f'aflock_{name}_bucket{{le="{end:g}"}} {below}'
    yield f'aflock_{name}_bucket{{le="+Inf"}} {sum(counts)}'
    yield f"aflock_{name}_sum {_shown(total)}"
    yield f"aflock_{name}_count {sum(counts)}"
