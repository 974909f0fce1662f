"""The responses that carry jobs and receipts.

All jobs of a version have the same vectors. They are encoded once, and all responses refer to the same memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...types import Job
from ..federation.federation import Federation, Given, UpdateAnswer
from ..protocol import wire
from ..protocol.wire import BytesLike
from .bodies import Bodies
from .http.response import Response
from .leases import Leases

_VECTORS = "application/octet-stream"


class Responses:
    """Makes the responses to pulls and updates; the lease of a job begins when its response is made."""

    def __init__(self, federation: Federation, leases: Leases, bodies: Bodies) -> None:
        self._federation, self._leases, self._bodies = federation, leases, bodies
        self._encoding: str = federation.p.encoding
        self._encoded: tuple[int, object, str, list[memoryview]] = (-1, None, "", [])
        """The newest job's version, extras, header lines and encoded vectors."""

    def to_pull(self, name: str, given: Given, have: str | None) -> Response:
        """The response to a pull: a job.

        It has no body if the client holds the model of that version (`have`) and the job has no other vectors.
        """
        lines, parts = self._job(name, given, have)
        return Response(200, _VECTORS, parts, lines)

    def _job(self, name: str, given: Given, have: str | None) -> tuple[str, Sequence[BytesLike]]:
        id, job, number, staleness = given
        self._leases.begin(name, id)
        has_it = have is not None and have == str(job.version) and not job.first and not job.extras
        common, parts = (self._version_lines(job, ()), ()) if has_it else self._vectors(job)
        return wire.job_lines(id, number, staleness) + common, parts

    def _version_lines(self, job: Job, names: Sequence[str]) -> str:
        """The header lines that all jobs of a version have in common; `names` are the vectors in the body."""
        return wire.version_lines(job.version, job.first, names, self._encoding)

    def _vectors(self, job: Job) -> tuple[str, Sequence[BytesLike]]:
        """The header lines and the encoded vectors of a job; those of the newest version are kept.

        Those of a first job are made anew each time: its header lines differ from those of other jobs of its version.
        """
        version, extras, lines, parts = self._encoded
        # `is`: a strategy returns the same object until its extras change.
        if extras is job.extras and version == job.version and not job.first:
            return lines, parts
        vectors, encoding = {"model": job.model, **job.extras}, self._encoding
        lines = self._version_lines(job, tuple(vectors))
        encoded = [wire.encode(wire.bounded(vector, encoding), encoding) for vector in vectors.values()]
        if not job.first:
            for old in parts:  # responses that are still being sent may refer to it
                self._bodies.count_old_model(old)
            self._encoded = (job.version, job.extras, lines, encoded)
        return lines, encoded

    def to_update(self, name: str, answer: UpdateAnswer, have: str | None) -> Response:
        """The response to an update: its receipt, and the next job if the client was given one."""
        receipt, version, given = answer
        lines = wire.receipt_lines(receipt, version)
        if given is not None:
            more, parts = self._job(name, given, have)
            return Response(200, _VECTORS, parts, more + lines)
        body = {
            "outcome": receipt.outcome,
            "staleness": receipt.staleness,
            "reason": receipt.reason,
            "version": version,
        }
        return Response(200, "application/json", [json.dumps(body).encode()], lines)
