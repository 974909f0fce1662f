"""The state of a server in numbers: as text for Prometheus (/metrics), and as JSON for `aflock status` (/v1/status)."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...coordination.tally import HISTOGRAM
from ...system.memory import resident
from ..federation.client_record import ClientRecord
from ..federation.federation import Federation
from ..storage.data_folder import DataFolder
from . import capacity
from .waiting_pulls import LONG

LATENCIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Upper ends of the buckets in the histogram of the journal's latency, in seconds."""

WINDOW = 60.0
"""Seconds over which the rate of updates is measured."""


@dataclass
class ServerCounters:
    """What the server counts while it runs; it is not saved, and begins at zero with every start."""

    seen: dict[str, float] = field(default_factory=dict)
    """When each client sent its last request."""
    begun: float = field(default_factory=time.monotonic)
    """When the server started."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests, by code."""
    latency: list[int] = field(default_factory=lambda: [0] * (len(LATENCIES) + 1))
    """Writes of the journal, by the buckets of LATENCIES; the last one is for all that took longer."""
    latency_sum: float = 0.0
    """Seconds of all writes together."""
    records: int = 0
    """Records written."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """The last evaluation: version, accuracy and loss."""
    _marks: deque[tuple[float, int]] = field(default_factory=deque)
    """How many updates there were at which time, over the last WINDOW seconds, at most two per second."""

    def batch(self, seconds: float, count: int, updates: int) -> None:
        """Counts one write of the journal, of `count` records; `updates` is how many updates there are by now."""
        # The index of the first bucket whose upper end is not below `seconds`.
        self.latency[sum(seconds > end for end in LATENCIES)] += 1
        self.latency_sum += seconds
        self.records += count
        now = time.monotonic()
        if not self._marks or now - self._marks[-1][0] > 0.5:
            self._marks.append((now, updates))
            while now - self._marks[0][0] > WINDOW:
                self._marks.popleft()

    def rate(self, updates: int) -> float:
        """Updates per second over the last minute; `updates` is how many there are by now."""
        now = time.monotonic()
        then, count = next(((t, c) for t, c in self._marks if now - t <= WINDOW), (now, updates))
        return (updates - count) / (now - then) if now - then > 0.5 else 0.0


def status(store: DataFolder, counters: ServerCounters, waits: Mapping[str, float]) -> dict[str, Any]:
    """The federation in numbers, for /v1/status.

    `waits`: for how many seconds each client that waits for a job has waited.
    """
    federation, counts = store.federation, store.federation.counts
    return {
        "federation": federation.id,
        "state": federation.state,
        "ended": federation.ended,
        "strategy": federation.strategy.name,
        "weights": federation.length,
        "version": federation.version,
        "updates": counts.updates,
        "applied": counts.applied,
        "buffered": counts.buffered,
        "rejected": counts.rejected,
        "dropped": counts.dropped,
        "lost": federation.lost,
        "undone": counts.undone,
        "diverged": federation.diverged,
        "longest_vectors": federation.guard.longest_vectors,
        "refused": dict(counters.refused),
        "updates_per_s": round(counters.rate(counts.updates), 2),
        "staleness_mean": round(counts.staleness_mean, 3),
        "staleness_max": counts.staleness_max,
        "pending": federation.strategy.pending,
        "open_jobs": _open_jobs(federation),
        "clients_waiting": len(waits),
        "longest_wait": round(max(waits.values(), default=0.0), 1),
        "seconds": round(store.now(), 1),
        "up": round(time.monotonic() - counters.begun, 1),
        "evaluation": dict(counters.evaluation),
        "memory": resident(),
        "waiting_for": max(0, federation.p.clients - len(federation.gathered)) if not federation.begun else 0,
        "clients": [
            _client(federation, client, counters, waits.get(client.name)) for client in federation.clients.values()
        ],
    }


def _open_jobs(federation: Federation) -> int:
    return federation.coordinator.open_jobs


def _client(
    federation: Federation, client: ClientRecord, counters: ServerCounters, waits: float | None
) -> dict[str, Any]:
    """One client in numbers; `waits`: seconds it has waited for a job; None: it does not wait."""
    working = federation.coordinator.works(client.number)
    seen, updates = counters.seen.get(client.name), federation.counts.updates
    return {
        "name": client.name,
        "number": client.number,
        "state": _state(client, working=working, waits=waits is not None),
        "waiting": None if waits is None else round(waits, 1),
        "version": federation.coordinator.ticket(client.number).version if working else None,
        "jobs": client.jobs,
        "updates": client.uploads,
        "share": round(client.uploads / updates, 4) if updates else 0.0,
        "staleness_mean": round(client.staleness_sum / client.uploads, 3) if client.uploads else 0.0,
        "seen": None if seen is None else round(time.monotonic() - seen, 1),
    }


def _state(client: ClientRecord, *, working: bool, waits: bool) -> str:
    return "suspended" if client.suspended else "working" if working else "waiting" if waits else "idle"


def text(store: DataFolder, counters: ServerCounters, waits: Mapping[str, float], full_disk: bool) -> str:
    """The federation in numbers, in the text format of Prometheus, for /metrics; `waits` as in `status`."""
    federation, counts = store.federation, store.federation.counts
    lines: list[str] = []

    def add(name: str, kind: str, help_text: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.extend((f"# HELP aflock_{name} {help_text}", f"# TYPE aflock_{name} {kind}"))
        lines.extend(f"aflock_{name}{labels} {_shown(value)}" for labels, value in samples)

    outcomes = ((f'{{outcome="{o}"}}', getattr(counts, o)) for o in ("applied", "buffered", "rejected"))
    add("version", "gauge", "Version of the model.", [("", federation.version)])
    add("updates_total", "counter", "Updates taken, by outcome.", outcomes)
    refused = ((f'{{code="{code}"}}', count) for code, count in sorted(counters.refused.items()))
    add("refused_total", "counter", "Requests refused since the start, by code.", refused)
    add("jobs_total", "counter", "Jobs handed out.", [("", counts.pulls)])
    add("dropped_total", "counter", "Jobs dropped: declined, or their lease ran out.", [("", counts.dropped)])
    add("lost_updates_total", "counter", "Acknowledged updates the journal has lost.", [("", federation.lost)])
    add("undone_total", "counter", "Server steps undone: they left the model not finite.", [("", counts.undone)])
    add("diverged", "gauge", "1 while the model has diverged.", [("", federation.diverged)])
    add("open_jobs", "gauge", "Open jobs.", [("", _open_jobs(federation))])
    add("clients", "gauge", "Clients that have joined.", [("", len(federation.clients) + len(federation.gathered))])
    add("clients_waiting", "gauge", "Clients that wait for a job.", [("", len(waits))])
    long = sum(seconds > LONG for seconds in waits.values())
    add("clients_waiting_long", "gauge", "Clients that have waited for over a minute.", [("", long)])
    longest = max(waits.values(), default=0.0)
    add("longest_wait_seconds", "gauge", "Longest time a client that waits now has waited.", [("", longest)])
    lines.extend(_histogram("staleness", "Staleness of updates, in versions.", HISTOGRAM, counts.staleness,
                            counts.staleness_sum))  # fmt: skip
    add("buffer_fill", "gauge", "Updates held for the next server step.", [("", federation.strategy.pending)])
    add("state_bytes", "gauge", "Memory of the rule: model, buffers, rows.", [("", _nbytes(federation))])
    add("row_cache_bytes", "gauge", "The rows in state_bytes: one vector per client.", [("", _row_bytes(federation))])
    lines.extend(_histogram("journal_seconds", "Time of a write to the journal, sync included.", LATENCIES,
                            counters.latency, counters.latency_sum))  # fmt: skip
    add("journal_bytes", "gauge", "Size of the journal.", [("", store.journal.size)])
    add("journal_records_total", "counter", "Records written since the start.", [("", counters.records)])
    add("disk_full", "gauge", "1 while the disk is full.", [("", full_disk)])
    clients, total = federation.clients.values(), max(1, counts.updates)
    # Labels need no escaping: the names of members consist of a-z, 0-9, _ and -.
    each = ((f'{{client="{client.name}"}}', client.uploads) for client in clients)
    add("client_updates_total", "counter", "Updates of each client.", each)
    shares = ((f'{{client="{client.name}"}}', client.uploads / total) for client in clients)
    add("client_share", "gauge", "The part of all updates that came from each client.", shares)
    for name, value in counters.evaluation.items():
        add(f"evaluation_{name}", "gauge", "The model on the test set.", [("", value)])
    add("resident_bytes", "gauge", "Memory of the process.", [("", resident())])
    return "\n".join(lines) + "\n"


def _nbytes(federation: Federation) -> int:
    return federation.strategy.nbytes if federation.begun else 0


def _row_bytes(federation: Federation) -> int:
    return sum(rows.nbytes for rows in capacity.rows_of(federation.strategy)) if federation.begun else 0


def _shown(value: float) -> str:
    """A number with all its digits: a large counter that was rounded would seem to stand still."""
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def _histogram(name: str, help_text: str, ends: Iterable[float], counts: list[int], total: float) -> Iterator[str]:
    """The lines of a histogram; Prometheus wants each bucket to count all smaller values, too."""
    yield f"# HELP aflock_{name} {help_text}"
    yield f"# TYPE aflock_{name} histogram"
    below = 0
    for end, count in zip(ends, counts, strict=False):
        below += count
        yield f'aflock_{name}_bucket{{le="{end:g}"}} {below}'
    yield f'aflock_{name}_bucket{{le="+Inf"}} {sum(counts)}'
    yield f"aflock_{name}_sum {_shown(total)}"
    yield f"aflock_{name}_count {sum(counts)}"
