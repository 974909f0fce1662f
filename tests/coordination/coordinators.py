"""A coordinator with a record of its events, and answers to its jobs."""

from __future__ import annotations

from typing import Any

import numpy as np

from aflock import Job, Update, strategies
from aflock.coordination.coordinator import Coordinator
from aflock.events import Event

ONE = np.ones(2, np.float32)


def made(
    name: str, clients: int, *, options: dict[str, Any] | None = None, **params: Any
) -> tuple[Coordinator, list[Event]]:
    events: list[Event] = []
    strategy = strategies.create(name, clients=clients, **params)
    coordinator = Coordinator(strategy, on_event=events.append, **(options or {}))
    coordinator.start(0 * ONE)
    return coordinator, events


def answer(job: Job | None, *names: str, value: float = 1.0, **fields: Any) -> Update:
    assert job is not None
    vectors = dict.fromkeys(names or ("gradient", "delta", "model", "direction"), value * ONE)
    return Update(job.client, job.version, vectors, job=job.id, **fields)
