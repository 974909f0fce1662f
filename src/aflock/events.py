"""The events that the coordinator reports: one for everything that happens, in order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

Kind = Literal[
    "start", "join", "leave", "pull", "arrival", "drop", "reset", "wait", "away", "back", "refuse", "flush", "loss",
    "undo", "step",
]  # fmt: skip


# Cached, because an update and the job that its answer brings have the same time. `typed`, because 1 and 1.0 are equal,
# so that an untyped cache would write one as the other, and a trace must not depend on what was written before.
moment = lru_cache(1024, typed=True)(repr)
"""A time as a trace writes it."""


class Event(NamedTuple):
    """One thing that happened, in the order it happened."""

    kind: Kind
    time: float
    server: int
    """The server's version after the event."""
    client: int | None = None
    version: int | None = None
    """The version of the client's job."""
    job: int | None = None
    steps: int | None = None
    examples: int | None = None
    staleness: int | None = None
    outcome: str = ""
    reason: str = ""
    first: bool = False

    def text(self) -> str:
        """The line of a trace as text; the frequent ones several times as fast as through `json`."""
        kind, time, server, client, version, job, steps, examples, staleness, outcome, reason, first = self
        if kind == "pull" and not first:
            return (
                f'{{"kind": "pull", "time": {moment(time)}, "server": {server}, "client": {client}, '
                f'"version": {version}, "job": {job}}}\n'
            )
        if kind == "arrival" and not first and not reason:
            return (
                f'{{"kind": "arrival", "time": {moment(time)}, "server": {server}, "client": {client}, '
                f'"version": {version}, "job": {job}, "steps": {steps}, "examples": {examples}, '
                f'"staleness": {staleness}, "outcome": "{outcome}"}}\n'
            )
        return json.dumps(self.line()) + "\n"

    def line(self) -> dict[str, Any]:
        """The event as JSON values; fields that are not set are left out."""
        named = zip(self._fields, self, strict=True)
        return {name: value for name, value in named if value is not None and value is not False and value != ""}


def trace_text(events: Iterable[Event]) -> str:
    """The lines of a trace for these events."""
    return "".join([event.text() for event in events])


class Ticket(NamedTuple):
    """An open job: what the coordinator gave to a client, and when."""

    job: int
    version: int
    first: bool
    time: float
