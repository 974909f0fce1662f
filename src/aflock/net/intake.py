"""Updates on their way in: their bodies, their checks, and who else waits for the same receipt.

Most updates are alike, and take the short way: no task, no messages, one buffer that the network fills (short.py). What
is out of the ordinary (a retry, a crowd, a refusal, a body that waits to be asked for) takes the way of all other
requests. Both end in `_put`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any

from . import replies, wire
from .arrival import Arrival
from .bodies import Bodies
from .commits import Commits, Done
from .door import Door
from .federation import Answer, Federation
from .leases import Leases
from .logs import fields, log
from .members import Member
from .metrics import Meter
from .refusals import Refused, busy, unknown_job
from .replies import Replies, Reply
from .request import Request
from .seats import Seat
from .store import update_record
from .wire import Buffer, Headers, UpdateHead, WireError

SHORT = 64 * 1024
"""Most bytes that are read at a time."""


class Intake:
    """All updates of a federation."""

    def __init__(
        self,
        federation: Federation,
        commits: Commits,
        leases: Leases,
        door: Door,
        *,
        room: int,
        largest: int,
        meter: Meter,
    ) -> None:
        """`room` bytes of bodies at a time."""
        self._federation, self._commits, self._leases, self._door = federation, commits, leases, door
        self.largest, self._meter = largest, meter
        self.closed = False
        """Whether the server stops: whoever comes now takes the ordinary way, and hears so."""
        self.bodies = Bodies(room)
        self.replies = Replies(federation, leases, self.bodies)
        self._arriving: dict[tuple[str, int], list[asyncio.Future[Answer]]] = {}
        """Those that are being written, and who has sent the same again."""
        self._coming: dict[str, int] = {}
        """How many bodies of each client are on their way."""
        self._tasks: set[asyncio.Task[None]] = set()

    def is_arriving(self, name: str, job: int) -> bool:
        """Whether the update for the job is being written."""
        return (name, job) in self._arriving

    # -- the ordinary way -------------------------------------------------------------------------------------------

    async def update(self, request: Request, member: Member, job: int) -> Reply:
        """Takes what a request brings."""
        if "content-length" not in request.headers:
            raise Refused(411, "length", "send a Content-Length")
        length = request.length
        if length > self.largest:
            raise Refused(413, "too-large", f"an update has at most {self.largest} bytes")
        answer = await self._same_again(member.name, job)
        if answer is None:
            seat, head = self._federation.seat(member.name), UpdateHead.parse(request.headers)
            answer = await self._judged(member, self._read(request, seat, job, head, length))
        elif request.unread_within(length):
            await request.skip(length)
        return self.replies.update(member.name, answer, request.headers.get(wire.HAVE))

    async def _same_again(self, name: str, job: int) -> Answer | None:
        """The answer to the same update, if it was taken before or is on its way already."""
        known = self._federation.known(name, job)
        if known is not None or (waiting := self._arriving.get((name, job))) is None:
            return known
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting.append(future)
        return await future

    async def _read(self, request: Request, seat: Seat, job: int, head: UpdateHead, length: int) -> Answer:
        self._federation.check_head(seat, job, head, length)
        if self._is_crowding(seat.name):
            raise busy("busy", "you are sending this update already, twice")
        self.came(seat.name)
        try:
            await self.bodies.take(length)
            try:
                body = self.bodies.blank(length)
                await request.read(body)
                return await self._taken(seat, job, head, body, request.option("next") == "1")
            finally:
                self.bodies.give_back(length)
        finally:
            self.left(seat.name)

    def _is_crowding(self, name: str) -> bool:
        """Nobody takes all places: one body of a client may come, and another if the line of the first is dead."""
        return self._coming.get(name, 0) >= 2

    def came(self, name: str) -> None:
        """A body of that client is on its way."""
        self._coming[name] = self._coming.get(name, 0) + 1

    def left(self, name: str) -> None:
        """It is not any more."""
        others = self._coming.pop(name) - 1
        if others:
            self._coming[name] = others

    async def _taken(self, seat: Seat, job: int, head: UpdateHead, body: Buffer, more: bool) -> Answer:
        """What came of an update that is here."""
        self._federation.check_vectors(head, body)
        again = await self._same_again(seat.name, job)
        if again is not None:  # it came twice at the same time
            return again
        if not self._federation.holds(seat, job):
            raise unknown_job()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._put(seat, job, head, body, more, lambda answer, refusal: _settle(future, answer, refusal))
        return await future

    async def _judged(self, member: Member, work: Awaitable[Answer]) -> Answer:
        """Whoever keeps sending what nobody can use is shut out."""
        try:
            answer = await work
        except Refused as refusal:
            if refusal.code == "unusable" and self._door.strike(member.name):
                await self._suspend(member, str(refusal))
            raise
        self._door.forgive(member.name)
        return answer

    async def _suspend(self, member: Member, why: str) -> None:
        log.warning("%s is suspended: %s", member.name, why, extra=fields(event="suspend", client=member.name, why=why))
        await self._commits.submit("suspend", name=member.name, gen=member.generation)
        self._leases.end(member.name)
        self._door.forgive(member.name)  # invited again, it begins anew

    # -- the short way ----------------------------------------------------------------------------------------------

    def begin(self, job: int, more: bool, headers: Headers, peer: str | None) -> Arrival | None:
        """An update whose body may come now; None: whatever it is, it takes the ordinary way."""
        if self.closed:
            return None
        try:
            member = self._door.known(headers, peer)
            name = member.name
            seat = self._federation.seat(name)
            head, length = UpdateHead.parse(headers), wire.number(headers, "content-length")
            self._federation.check_head(seat, job, head, length)
            room = self.bodies.has_room(length)
            if self._is_crowding(name) or (length <= SHORT and not room):
                return None  # all of it may be here already: there is nothing to hold back
            self._meter.seen[name] = self._door.count(name)
            return Arrival(self, member, seat, job, head, length, more, headers.get(wire.HAVE), room)
        except (Refused, WireError):  # it is refused again, in the way that can say so
            return None
        except Exception:  # the parser would take it for bad HTTP
            log.exception("an update could not be begun")
            return None

    def take(self, a: Arrival) -> None:
        """An update is here."""
        try:
            self._federation.check_vectors(a.head, a.body)
        except Exception:  # it is looked at again, where it can be answered
            usual = False
        else:
            usual = self._federation.holds(a.seat, a.job) and (a.seat.name, a.job) not in self._arriving
        if usual:
            self._put(a.seat, a.job, a.head, a.body, a.more, a.answered)
        else:
            task = asyncio.get_running_loop().create_task(self._take_otherwise(a))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _take_otherwise(self, a: Arrival) -> None:
        """It came twice, or too late, or is of no use."""
        try:
            answer = await self._judged(a.member, self._taken(a.seat, a.job, a.head, a.body, a.more))
        except Refused as refusal:
            a.answered(None, refusal)
        except Exception:
            log.exception("the update for job %d of %s failed", a.job, a.member.name)
            a.answered(None, Refused(500, "internal", "the server made a mistake"))
        else:
            a.answered(answer, None)

    def reply(self, a: Arrival, answer: Answer | None, refused: Refused | None) -> Reply:
        """What an update is answered with."""
        if answer is not None:
            self._door.forgive(a.seat.name)
            reply = self.replies.update(a.seat.name, answer, a.have)
        else:
            assert refused is not None
            self._meter.refused[refused.code] += 1
            reply = replies.refusal(refused)
        if log.isEnabledFor(logging.DEBUG):
            self._log(a, reply.status, answer, refused)
        return reply

    def _log(self, a: Arrival, status: int, answer: Answer | None, refused: Refused | None) -> None:
        what = f"/v1/jobs/{a.job}/update"
        about: dict[str, Any] = {
            "client": a.member.name,
            "method": "POST",
            "what": what,
            "status": status,
            "job": a.job,
        }
        if answer is not None:
            receipt = answer.receipt
            about |= {"outcome": receipt.outcome, "staleness": receipt.staleness, "version": answer.version}
        elif refused is not None:
            about |= {"code": refused.code}
        came = about.get("outcome") or about.get("code")
        log.debug("POST %s of %s: %d %s", what, a.member.name, status, came, extra=fields(**about))

    # -- both -------------------------------------------------------------------------------------------------------

    def _put(self, seat: Seat, job: int, head: UpdateHead, body: Buffer, more: bool, done: Done) -> None:
        """Hands a checked update to the journal."""
        waiting: list[asyncio.Future[Answer]] = []
        name = seat.name
        self._arriving[name, job] = waiting
        self._leases.end(name)

        def settled(answer: Answer | None, refusal: Refused | None) -> None:
            del self._arriving[name, job]
            if refusal is not None and self._federation.holds(seat, job):
                self._leases.begin(name, job)
            for future in waiting:
                _settle(future, answer and Answer(answer.receipt, answer.version), refusal)
            done(answer, refusal)

        try:
            self._commits.put(*update_record(self._commits.now(), name, job, head, more), body, settled)
        except Refused as refusal:
            settled(None, refusal)
        except Exception:
            log.exception("the update for job %d of %s could not be handed in", job, name)
            settled(None, Refused(500, "internal", "the server made a mistake"))


def _settle(future: asyncio.Future[Answer], answer: Answer | None, refusal: Refused | None) -> None:
    if future.done():  # whoever waited has been given up
        return
    if refusal is not None:
        future.set_exception(refusal)
    elif answer is not None:
        future.set_result(answer)
