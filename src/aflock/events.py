"""What the coordinator says happened: one event for everything, in order."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

Kind = Literal["start", "join", "leave", "pull", "arrival", "drop", "reset", "wait", "away", "back", "refuse", "flush"]


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
        if self.kind == "pull" and not self.first:
            return (
                f'{{"kind": "pull", "time": {self.time!r}, "server": {self.server}, "client": {self.client}, '
                f'"version": {self.version}, "job": {self.job}}}\n'
            )
        if self.kind == "arrival" and not self.first and not self.reason:
            return (
                f'{{"kind": "arrival", "time": {self.time!r}, "server": {self.server}, "client": {self.client}, '
                f'"version": {self.version}, "job": {self.job}, "steps": {self.steps}, "examples": {self.examples}, '
                f'"staleness": {self.staleness}, "outcome": "{self.outcome}"}}\n'
            )
        return json.dumps(self.line()) + "\n"

    def line(self) -> dict[str, Any]:
        """What a trace says of it: all that is known, as JSON values."""
        named = zip(self._fields, self, strict=True)
        return {name: value for name, value in named if value is not None and value is not False and value != ""}


class Ticket(NamedTuple):
    """An open job: what was handed to a client and when."""

    job: int
    version: int
    first: bool
    time: float
