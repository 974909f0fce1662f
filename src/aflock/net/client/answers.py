"""The server's answers as checked objects: a hello, a job, the answer to an update.

`session.py` makes them. Every value of a hello's JSON is checked here, because the client allocates memory, names
folders and chooses a rule by it; `protocol/wire.py` checks the values that come in headers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from ...types import Job, Receipt, Vector
from ..protocol import wire
from .errors import ProtocolError, printable, protocol_error
from .state import EncodedUpdate

_FEDERATION = re.compile(r"[A-Za-z0-9_-]{1,64}")  # the client names a folder after it


@dataclass(frozen=True, slots=True)
class Hello:
    """The federation and what it asks of a client; `number` is None until enough clients have joined."""

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
    """The order of the weights: "torch", that of a torch module's parameters, or "own", that of the server's model."""

    @property
    def terms(self) -> tuple[object, ...]:
        """What training depends on: if it changes, the client must prepare its training again."""
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
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """From the JSON object of the answer to POST /v1/hello."""
        if document.get("protocol") != wire.PROTOCOL:
            protocol = printable(str(document.get("protocol")))
            raise ProtocolError(
                f"the server uses protocol {protocol}, this client {wire.PROTOCOL}; install the server's version"
            )
        federation, local = _text(document, "federation"), document.get("local")
        if not _FEDERATION.fullmatch(federation):
            raise protocol_error("`federation` is not a valid name")
        if not isinstance(local, dict) or not isinstance(local.get("name"), str):
            raise protocol_error("`local` does not name a local rule")
        needs, changes = _names(document, "needs"), _names(document, "changes")
        if not needs or not set(changes) <= set(needs):
            raise protocol_error("`needs` is empty, or `changes` names a vector that is not in `needs`")
        if document.get("encoding") not in wire.ENCODINGS:
            raise protocol_error(f"`encoding` is none of {', '.join(wire.ENCODINGS)}")
        return cls(
            federation,
            _text(document, "name"),
            None if document.get("number") is None else _count(document, "number", 0),
            _text(document, "state"),
            _text(document, "strategy"),
            needs,
            changes,
            _count(document, "length", 1),
            document["encoding"],
            _count(document, "version", 0),
            local,
            _count(document, "steps", 1),
            _count(document, "batch", 1),
            seconds(document, "lease"),
            _text(document, "model") if "model" in document else "vector",
            _text(document, "order") if "order" in document else "torch",
        )


@dataclass(frozen=True, slots=True)
class Pulled:
    """A job as it was pulled.

    number    how many jobs the client had before this one
    delay     the staleness of the client's last update
    encoding  how the server wants the update's vectors encoded
    """

    job: Job
    id: int
    number: int
    delay: int
    encoding: str

    @classmethod
    def of(cls, head: wire.JobHead, vectors: Mapping[str, Vector], client: int) -> Self:
        """A job for the client with that number, from its headers and its vectors."""
        if "model" not in vectors:
            raise protocol_error("the job has no model")
        extras = {} if head.first else {name: vector for name, vector in vectors.items() if name != "model"}
        job = Job(client, head.version, vectors["model"], extras, head.first, head.job)
        return cls(job, head.job, head.number, head.staleness, head.encoding)

    def pack(self, vectors: Mapping[str, Vector], steps: int, examples: int) -> EncodedUpdate:
        """The update for this job, encoded; with float32 its bytes are the vectors' own memory, not a copy."""
        encoded: dict[str, wire.BytesLike] = {
            name: wire.encode(vector, self.encoding) for name, vector in vectors.items()
        }
        return EncodedUpdate(self.id, self.job.version, steps, examples, self.encoding, encoded)


@dataclass(frozen=True, slots=True)
class Answer:
    """The receipt of an update, the server's version when it made it, and the next job if it sent one along."""

    receipt: Receipt
    version: int
    next: Pulled | None = None


# --- one value of a JSON object --------------------------------------------------------------------------------------


def seconds(document: Mapping[str, Any], name: str) -> float:
    """A positive, finite number of seconds."""
    value: Any = document.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise protocol_error(f"`{name}` is not a positive number")
    return float(value)


def _text(document: Mapping[str, Any], name: str) -> str:
    if not isinstance(document.get(name), str):
        raise protocol_error(f"`{name}` is not a string")
    return printable(document[name])


def _count(document: Mapping[str, Any], name: str, least: int) -> int:
    value = document.get(name)
    if type(value) is not int or not least <= value < 2**53:
        raise protocol_error(f"`{name}` is not an integer of at least {least}")
    return value


def _names(document: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = document.get(name)
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise protocol_error(f"`{name}` is not a list of names")
    try:
        return wire.names({wire.VECTORS: ",".join(value)})
    except wire.WireError:
        raise protocol_error(f"`{name}` is not a list of names") from None
