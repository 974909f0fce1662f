"""What a server's answers say, checked: what the federation is, a job, what became of an update.

Every number and name in a greeting is looked at before it is believed; numbers in headers are checked in `wire.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ..types import Job, Receipt, Vector
from . import wire
from .keep import Parcel
from .trouble import Nonsense, nonsense, printable

_FEDERATION = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes the name of a folder


@dataclass(frozen=True, slots=True)
class Hello:
    """What the federation is and what it asks of a client; a `number` is given once enough clients have come."""

    federation: str
    name: str
    number: int | None
    state: str
    strategy: str
    needs: tuple[str, ...]
    changes: tuple[str, ...]
    length: int
    encoding: str
    version: int
    local: Mapping[str, Any]
    steps: int
    batch: int
    lease: float
    model: str = "vector"
    order: str = "torch"
    """Whether the weights stand as those of a torch module do, or in an order that is the server's model's own."""

    @property
    def terms(self) -> tuple[object, ...]:
        """What a client works by: with others it must prepare itself anew."""
        return (
            self.federation,
            self.strategy,
            self.needs,
            self.changes,
            self.length,
            self.encoding,
            self.local,
            self.steps,
            self.batch,
            self.model,
            self.order,
        )

    @classmethod
    def parse(cls, said: Mapping[str, Any]) -> Self:
        """From the JSON of a greeting."""
        if said.get("protocol") != wire.PROTOCOL:
            spoken = printable(str(said.get("protocol")))
            raise Nonsense(
                f"the server speaks protocol {spoken}, this client {wire.PROTOCOL}; install the same version"
            )
        federation, local = _text(said, "federation"), said.get("local")
        if not _FEDERATION.fullmatch(federation):
            raise nonsense("the name of the federation is none")
        if not isinstance(local, dict) or not isinstance(local.get("name"), str):
            raise nonsense("`local` names no rule")
        needs, changes = _names(said, "needs"), _names(said, "changes")
        if not needs or not set(changes) <= set(needs):
            raise nonsense("`needs` and `changes` do not fit together")
        if said.get("encoding") not in wire.ENCODINGS:
            raise nonsense(f"`encoding` is none of {', '.join(wire.ENCODINGS)}")
        return cls(
            federation,
            _text(said, "name"),
            None if said.get("number") is None else _count(said, "number", 0),
            _text(said, "state"),
            _text(said, "strategy"),
            needs,
            changes,
            _count(said, "length", 1),
            said["encoding"],
            _count(said, "version", 0),
            local,
            _count(said, "steps", 1),
            _count(said, "batch", 1),
            seconds(said, "lease"),
            _text(said, "model") if "model" in said else "vector",
            _text(said, "order") if "order" in said else "torch",
        )


@dataclass(frozen=True, slots=True)
class Pulled:
    """A job, how many the client had before it, and how stale its last update was."""

    job: Job
    id: int
    number: int
    delay: int
    encoding: str

    @classmethod
    def of(cls, head: wire.JobHead, vectors: Mapping[str, Vector], client: int) -> Self:
        """A job for that client, from what its headers said and the vectors it came with."""
        if "model" not in vectors:
            raise nonsense("a job comes without a model")
        extras = {} if head.first else {name: vector for name, vector in vectors.items() if name != "model"}
        job = Job(client, head.version, vectors["model"], extras, head.first, head.job)
        return cls(job, head.job, head.number, head.staleness, head.encoding)

    def pack(self, vectors: Mapping[str, Vector], steps: int, examples: int) -> Parcel:
        """The answer to it, ready to be pushed; where the encoding needs no other bytes, the vectors' own memory."""
        encoded: dict[str, wire.Buffer] = {name: wire.encode(vector, self.encoding) for name, vector in vectors.items()}
        return Parcel(self.id, self.job.version, steps, examples, self.encoding, encoded)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an update, the server's version then, and the next job if one was asked for and there is one."""

    receipt: Receipt
    version: int
    next: Pulled | None = None


# --- one value of a JSON object --------------------------------------------------------------------------------------


def seconds(said: Mapping[str, Any], name: str) -> float:
    """A time that is neither zero nor for ever."""
    value: Any = said.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise nonsense(f"`{name}` is not a positive number")
    return float(value)


def _text(said: Mapping[str, Any], name: str) -> str:
    if not isinstance(said.get(name), str):
        raise nonsense(f"`{name}` is not a text")
    return printable(said[name])


def _count(said: Mapping[str, Any], name: str, least: int) -> int:
    value = said.get(name)
    if type(value) is not int or not least <= value < 2**53:
        raise nonsense(f"`{name}` is not a whole number of at least {least}")
    return value


def _names(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = said.get(name)
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise nonsense(f"`{name}` is not a list of names")
    try:
        return wire.names({wire.VECTORS: ",".join(value)})
    except wire.WireError:
        raise nonsense(f"`{name}` is not a list of names") from None
