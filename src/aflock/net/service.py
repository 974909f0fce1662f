"""The server as an ASGI application: what docs/protocol.md says, and nothing else.

A request goes through the door (token, rate), is checked against the federation as it stands, becomes a record, and is
answered when the record is on disk and has happened (commits.py). What waits for a job waits here.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..files import to_json
from . import metrics, pen, replies, room, wire
from .bodies import Gone, Receive
from .commits import Commits
from .door import Door
from .intake import Intake
from .leases import Leases
from .logs import fields, log
from .members import Member, Members
from .metrics import Meter
from .refusals import Refused, bad_token, busy, revoked, stopping, suspended, unknown_job
from .replies import Reply
from .request import Request, Send
from .store import Store
from .turns import Turns

Handler = Callable[["Request"], Awaitable[None]]

_JOB_PATH = re.compile(r"/v1/jobs/([0-9]{1,18})/(update|heartbeat|decline)", re.ASCII)
_LONGEST_WAIT = 60.0
_ROOM = 8 << 20
"""Bytes of bodies that may be in memory where updates are small; else two of them, and an old model being sent."""
_PROBE = 1 << 20
"""Bytes that must fit on a disk that was full before it counts as having room again."""


class Service:
    """One federation, served."""

    def __init__(self, store: Store, members: Members) -> None:
        self.store, self.members = store, members
        self.federation = store.federation
        server, federation = store.settings.section("server"), store.settings.section("federation")
        self._door = Door(members, rate=server.rate, strikes=federation.strikes)
        self.meter = Meter()
        self._open_status = server.status == "open"
        largest = 4 * self.federation.length * max(1, len(self.federation.strategy.needs)) + 64
        bytes_at_a_time = max(2 * largest, min(_ROOM, 1024 * largest))
        self._commits = Commits(store, on_write=self._after_write, on_settled=self._after_some, pen=pen.pen())
        self.leases = Leases(self._expire, server.lease)
        self.intake = Intake(
            self.federation, self._commits, self.leases, self._door,
            room=bytes_at_a_time, largest=largest, meter=self.meter,
        )  # fmt: skip
        for seat in self.federation.seats.values():
            if self.federation.coordinator.works(seat.number):
                self.leases.begin(seat.name, self.federation.coordinator.ticket(seat.number).job)
        self._advice = store.settings.advice()
        self._turns = Turns(self.federation)
        self._problem: str | None = None
        self._has_ended = bool(self.federation.ended)
        self._sending = 0
        """Bytes of models on their way to whoever only looks."""
        self.stopping = False
        self.on_version: Callable[[int], None] = lambda version: None
        self._seen_version = self.federation.version
        self._routes: dict[tuple[str, str], Handler] = {
            ("GET", "/healthz"): self._health,
            ("GET", "/readyz"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/status"): self._status,
            ("POST", "/v1/hello"): self._hello,
            ("GET", "/v1/job"): self._pull,
            ("GET", "/v1/model"): self._model,
            ("POST", "/v1/leave"): self._leave,
        }

    @property
    def failed(self) -> Exception | None:
        """Why the server must stop, if it must."""
        return self._commits.failed

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """ASGI."""
        request = Request(scope, receive, send)
        try:
            await self._route(request)
        except Refused as refusal:
            await self._refuse(request, refusal)
        except wire.WireError as error:
            await self._refuse(request, Refused(400, "malformed", str(error)))
        except Gone:
            pass
        except asyncio.CancelledError:  # the server stops, and this has taken too long
            if request.answered:
                raise
            await self._refuse(request, stopping())
        except Exception:
            log.exception("%s %s failed", request.method, request.what)
            if not request.answered:
                await request.json(500, {"error": "the server made a mistake", "code": "internal"})

    async def _route(self, request: Request) -> None:
        found = _JOB_PATH.fullmatch(request.path)
        if found:
            if request.method != "POST":
                raise Refused(405, "method", "use POST")
            job, what, request.what = int(found[1]), found[2], request.path
            member = self._enter(request)
            if what == "update":
                await self._send(request, await self.intake.update(request, member, job))
            elif what == "heartbeat":
                await self._heartbeat(request, member, job)
            else:
                await self._decline(request, member, job)
            return
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            if any(path == request.path for _, path in self._routes):
                raise Refused(405, "method", "there is another method for this path")
            raise Refused(404, "path", "there is no such path; see docs/protocol.md")
        request.what = request.path
        await handler(request)

    def _enter(self, request: Request, *, hello: bool = False) -> Member:
        member = self._known(request)
        self.meter.seen[member.name] = time.monotonic()
        if self.stopping:
            raise stopping()
        seat = self.federation.seats.get(member.name)
        if seat is not None and seat.suspended and not (hello and member.generation != seat.generation):
            raise suspended()
        return member

    def _known(self, request: Request) -> Member:
        member = self._door.enter(request.headers, request.peer)
        request.client = member.name
        return member

    async def _refuse(self, request: Request, refusal: Refused) -> None:
        self.refused(refusal.code)
        request.code = refusal.code
        if request.client and request.unread_within(self.intake.largest):
            with suppress(Refused, Gone):
                await request.skip(request.length)
        if not request.answered:
            await self._send(request, replies.refusal(refusal))

    async def _send(self, request: Request, reply: Reply) -> None:
        await request.answer(reply.status, reply.parts, reply.kind, reply.lines)

    def refused(self, code: str) -> None:
        """One more request that was not granted."""
        self.meter.refused[code] += 1

    # -- anybody ----------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> None:
        await request.answer(200, [b"ok\n"], "text/plain")

    async def _ready(self, request: Request) -> None:
        why = "stopping" if self.stopping or self.failed else "the disk is full" if self._commits.full else ""
        again = "retry-after: 2\r\n" if why else ""
        await request.answer(503 if why else 200, [(why or "ready").encode() + b"\n"], "text/plain", again)

    async def _metrics(self, request: Request) -> None:
        self._may_look(request)
        text = metrics.text(self.store, self.meter, self._commits.full)
        await request.answer(200, [text.encode()], "text/plain; version=0.0.4")

    async def _status(self, request: Request) -> None:
        self._may_look(request)
        text = to_json(metrics.status(self.store, self.meter, full=True))
        await request.answer(200, [text.encode()], "application/json")

    def _may_look(self, request: Request) -> None:
        if not self._open_status:
            self._known(request)

    # -- members ----------------------------------------------------------------------------------------------------

    async def _hello(self, request: Request) -> None:
        member = self._enter(request, hello=True)
        await request.short()
        federation, p = self.federation, self.federation.p
        if not federation.ended and not federation.is_member(member.name, member.generation):
            if federation.begun and member.name not in federation.seats:
                room.for_one_more(federation.strategy)
            await self._commits.submit("hello", name=member.name, gen=member.generation)
            log.info("%s has come", member.name, extra=fields(event="hello", client=member.name))
        seat = federation.seats.get(member.name)
        await request.json(
            200,
            {
                "protocol": wire.PROTOCOL,
                "federation": federation.id,
                "name": member.name,
                "number": None if seat is None else seat.number,
                "state": federation.state,
                "strategy": federation.settings.section("strategy").name,
                "needs": list(federation.strategy.needs),
                "changes": list(federation.strategy.changes),
                "length": federation.length,
                "model": federation.settings.section("model").name,
                "order": "torch" if self.store.judge is None or self.store.judge[0].torch_order else "own",
                "encoding": p.encoding,
                "version": federation.version,
                "local": self._advice,
                "steps": p.steps,
                "batch": p.batch,
                "lease": self.leases.seconds,
            },
        )

    async def _pull(self, request: Request) -> None:
        member = self._enter(request)
        wait = min(_LONGEST_WAIT, float(wire.number({"wait": request.option("wait") or "0"}, "wait")))
        until = time.monotonic() + wait
        while True:
            if self.federation.ended or member.name not in self.federation.gathered:
                self.federation.seat(member.name)
            if self.federation.can_pull(member.name):
                given = await self._commits.submit("pull", name=member.name)
                if given is not None:
                    have = request.headers.get(wire.HAVE)
                    await self._send(request, self.intake.replies.job(member.name, given, have))
                    return
            if not await self._turns.wait(request, member.name, until - time.monotonic()):
                await request.answer(204, [], "")
                return
            self._enter_again(member)

    def _enter_again(self, member: Member) -> None:
        """Much may have happened while somebody waited."""
        if self.stopping:
            raise stopping()
        if member.name in self.members.revoked:
            raise revoked()
        if self.members.generations.get(member.name) != member.generation:
            raise bad_token()

    async def _heartbeat(self, request: Request, member: Member, job: int) -> None:
        await request.short()
        seat = self.federation.seat(member.name)
        if not self.federation.holds(seat, job):
            raise unknown_job()
        if not self.intake.is_arriving(member.name, job):
            self.leases.begin(member.name, job)
        await request.json(200, {"lease": self.leases.seconds})

    async def _decline(self, request: Request, member: Member, job: int) -> None:
        await request.short()
        seat = self.federation.seat(member.name)
        if not self.federation.holds(seat, job) or self.intake.is_arriving(member.name, job):
            raise unknown_job()
        await self._commits.submit("drop", name=member.name, j=job, why="the client gave it back")
        self.leases.end(member.name)
        await request.json(200, {})

    async def _leave(self, request: Request) -> None:
        member = self._enter(request)
        await request.short()
        if member.name in self.federation.seats or member.name in self.federation.gathered:
            await self.remove(member.name)
        await request.json(200, {})

    async def remove(self, name: str) -> None:
        """A client goes for good."""
        await self._commits.submit("leave", name=name)
        self.leases.end(name)
        self._turns.wake(name)
        how = "was revoked" if name in self.members.revoked else "has left"
        log.info("%s %s", name, how, extra=fields(event="leave", client=name))

    async def _model(self, request: Request) -> None:
        self._enter(request)
        version = str(self.federation.version)
        lines = (
            f'etag: "{version}"\r\n{wire.VERSION}: {version}\r\n{wire.ENCODING}: float32\r\n{wire.VECTORS}: model\r\n'
        )
        if request.headers.get("if-none-match") == f'"{version}"':
            await request.answer(304, [], "", lines)
        else:
            part = wire.encode(self.federation.model, "float32")
            if self._sending and self._sending + part.nbytes > 4 * max(part.nbytes, _ROOM):
                raise busy("busy", "too many are reading the model; try again", 5.0)  # each may hold an old one
            self._sending += part.nbytes
            try:
                await request.answer(200, [part], "application/octet-stream", lines)
            finally:
                self._sending -= part.nbytes

    # -- what happens by itself -------------------------------------------------------------------------------------

    def _after_write(self, seconds: float, count: int) -> None:
        self.meter.batch(seconds, count, self.federation.counts.updates)

    def _after_some(self) -> None:
        self._turns.wake_some()
        if self.federation.version != self._seen_version:
            self._seen_version = self.federation.version
            self.on_version(self._seen_version)
        if self.federation.ended and not self._has_ended:
            self._has_ended, version = True, self.federation.version
            why = self.federation.ended
            log.info("the federation has ended: %s", why, extra=fields(event="end", version=version, why=why))

    async def _expire(self, name: str, job: int) -> None:
        """A lease has run out."""
        seat = self.federation.seats.get(name)
        if seat is None or self.intake.is_arriving(name, job) or not self.federation.holds(seat, job):
            return
        log.info("the lease of %s on job %d ran out", name, job, extra=fields(event="lease", client=name, job=job))
        try:
            await self._commits.submit("drop", name=name, j=job, why="lease ran out")
        except Refused:
            self.leases.begin(name, job)

    async def end(self, why: str, accuracy: float) -> None:
        """The federation is over: its model is that accurate."""
        await self._commits.submit("end", why=why, accuracy=accuracy)

    async def look_after(self) -> None:
        """Once a second: who was revoked, whose lease ran out, whether there is room again."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self._look_at_members()
                await self._remove_revoked()
                await self.leases.check()
                if self._commits.full and _has_room(self.store.folder):
                    self._commits.full = False
                    log.info("the disk has room again", extra=fields(event="room"))
            except Exception:  # without a next round no lease would ever run out
                log.exception("looking after members and leases failed")

    def _look_at_members(self) -> None:
        self.members.refresh()
        problem, self._problem = self._problem, self.members.problem
        if self._problem and self._problem != problem:
            log.error("%s; until then those known stay", self._problem)
        elif problem and not self._problem:
            log.info("the members' file can be used again")

    async def _remove_revoked(self) -> None:
        for name in [*self.federation.seats, *self.federation.gathered]:
            if name in self.members.revoked and not self.federation.ended:
                try:
                    await self.remove(name)
                except Refused:
                    return

    def stop(self) -> None:
        """Takes no more requests: those that wait are told to come again."""
        self.stopping = self.intake.closed = True
        self._turns.wake_all()

    async def close(self) -> None:
        """Finishes what was begun, and saves everything."""
        self.stop()
        await self._commits.close()
        self.store.close()


def _has_room(folder: Path) -> bool:
    """Whether a file can be written: nobody need send an update for the server to find out."""
    file = folder / ".room"
    try:
        file.write_bytes(bytes(_PROBE))
    except OSError:
        return False
    finally:
        file.unlink(missing_ok=True)
    return True
