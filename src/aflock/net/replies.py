"""What members are answered with: receipts, refusals, and jobs, whose vectors are encoded once per version."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from . import wire
from .bodies import Bodies
from .federation import Answer, Federation, Given
from .leases import Leases
from .refusals import Refused
from .wire import Buffer


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
        self._made: tuple[object, int, tuple[str, ...], list[memoryview]] = (None, -1, (), [])

    def job(self, name: str, given: Given, have: str | None) -> Reply:
        """A job; without its body if the client has that version of the model (`have`) and there is nothing else."""
        job = given.job
        self._leases.begin(name, given.id)
        if have is not None and have == str(job.version) and not job.first and not job.extras:
            return self._job(given, (), [])
        return self._job(given, *self._vectors(given))

    def _job(self, given: Given, names: tuple[str, ...], parts: Sequence[Buffer]) -> Reply:
        job = given.job
        head = wire.JobHead(given.id, job.version, given.number, job.first, names, self._encoding, given.staleness)
        return Reply(200, "application/octet-stream", parts, head.lines())

    def _vectors(self, given: Given) -> tuple[tuple[str, ...], Sequence[Buffer]]:
        job, encoding = given.job, self._encoding
        if self._made[0] is job.extras and self._made[1] == job.version and not job.first:
            return self._made[2], self._made[3]
        vectors = {"model": job.model, **job.extras}
        parts = [wire.encode(wire.bounded(vector, encoding), encoding) for vector in vectors.values()]
        if not job.first:
            for old in self._made[3]:
                self._bodies.lend(old)
            self._made = (job.extras, job.version, tuple(vectors), parts)
        return tuple(vectors), parts

    def update(self, name: str, answer: Answer, have: str | None) -> Reply:
        """A receipt, and the next job with it where one was given."""
        receipt, lines = answer.receipt, wire.receipt_lines(answer.receipt, answer.version)
        if answer.given is not None:
            status, kind, parts, more = self.job(name, answer.given, have)
            return Reply(status, kind, parts, more + lines)
        body = {
            "outcome": receipt.outcome,
            "staleness": receipt.staleness,
            "reason": receipt.reason,
            "version": answer.version,
        }
        return Reply(200, "application/json", [json.dumps(body).encode()], lines)
