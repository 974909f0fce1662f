"""What members are answered with: receipts, refusals, and jobs, whose vectors are encoded once per version."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..types import Job
from . import wire
from .bodies import Bodies
from .federation import Answer, Federation, Given
from .leases import Leases
from .refusals import Refused
from .wire import Buffer

_VECTORS = "application/octet-stream"


class Reply(NamedTuple):
    """An answer: its body is made of parts."""

    status: int
    kind: str
    parts: Sequence[Buffer]
    lines: str = ""
    """Headers beside those that describe the body, as they travel."""


def refusal(refused: Refused) -> Reply:
    """Why nothing was done, and when to try again."""
    wait = refused.retry_after
    lines = "" if wait is None else f"retry-after: {math.ceil(wait)}\r\n"  # HTTP knows whole seconds only
    body = json.dumps({"error": str(refused), "code": refused.code}).encode()
    return Reply(refused.status, "application/json", [body], lines)


class Replies:
    """Jobs and receipts; the lease of a job begins when its answer is made."""

    def __init__(self, federation: Federation, leases: Leases, bodies: Bodies) -> None:
        self._federation, self._leases, self._bodies = federation, leases, bodies
        self._encoding: str = federation.p.encoding
        self._made: tuple[int, object, str, list[memoryview]] = (-1, None, "", [])

    def job(self, name: str, given: Given, have: str | None) -> Reply:
        """A job; without its body if the client has that version of the model (`have`) and there is nothing else."""
        lines, parts = self._job(name, given, have)
        return Reply(200, _VECTORS, parts, lines)

    def _job(self, name: str, given: Given, have: str | None) -> tuple[str, Sequence[Buffer]]:
        id, job, number, staleness = given
        self._leases.begin(name, id)
        has_it = have is not None and have == str(job.version) and not job.first and not job.extras
        common, parts = (self._common(job, ()), ()) if has_it else self._vectors(job)
        return wire.job_lines(id, number, staleness) + common, parts

    def _common(self, job: Job, names: Sequence[str]) -> str:
        return wire.version_lines(job.version, job.first, names, self._encoding)

    def _vectors(self, job: Job) -> tuple[str, Sequence[Buffer]]:
        """What all jobs of a version have in common, made once."""
        version, extras, lines, parts = self._made
        if extras is job.extras and version == job.version and not job.first:
            return lines, parts
        vectors, encoding = {"model": job.model, **job.extras}, self._encoding
        lines = self._common(job, tuple(vectors))
        encoded = [wire.encode(wire.bounded(vector, encoding), encoding) for vector in vectors.values()]
        if not job.first:
            for old in parts:
                self._bodies.lend(old)
            self._made = (job.version, job.extras, lines, encoded)
        return lines, encoded

    def update(self, name: str, answer: Answer, have: str | None) -> Reply:
        """A receipt, and the next job with it where one was given."""
        receipt, version, given = answer
        lines = wire.receipt_lines(receipt, version)
        if given is not None:
            more, parts = self._job(name, given, have)
            return Reply(200, _VECTORS, parts, more + lines)
        body = {
            "outcome": receipt.outcome,
            "staleness": receipt.staleness,
            "reason": receipt.reason,
            "version": version,
        }
        return Reply(200, "application/json", [json.dumps(body).encode()], lines)
