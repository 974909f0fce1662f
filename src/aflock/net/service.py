"""The server as an ASGI application: what docs/protocol.md says, and nothing else.

A request goes through the door (token, rate), is checked against the federation as it stands, becomes a record, and is
answered when the record is on disk and has happened (commits.py). What waits for a job waits here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ..files import to_json
from . import bodies, metrics, room, wire
from .bodies import Bodies, Gone, Receive
from .commits import Commits
from .door import Door
from .federation import Answer, Given, Seat
from .leases import Leases
from .members import Member, Members
from .metrics import Meter
from .refusals import Refused, bad_token, busy, revoked, suspended, unknown_job
from .store import Store
from .wire import UpdateHead

Send = Callable[[dict[str, Any]], Awaitable[None]]
Handler = Callable[["Request"], Awaitable[None]]

log = logging.getLogger("aflock.server")

_JOB_PATH = re.compile(r"/v1/jobs/([0-9]{1,18})/(update|heartbeat|decline)", re.ASCII)
_SHORT = 1 << 16
"""Most bytes of a body that is no update; an unread one of that size does not end the connection."""
_LONGEST_WAIT = 60.0
_ROOM = 64 << 20
"""Bytes of bodies that may be in memory where an update is small; else three updates."""
_BARE = (204, 304)
"""Answers that have no body, and may not describe one."""
_PROBE = 1 << 20
"""Bytes that must fit on a disk that was full before it counts as having room again."""


class Request:
    """One request, and the way to answer it."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        self.headers = {
            name.decode("latin-1"): value.decode("latin-1").strip(" \t") for name, value in scope["headers"]
        }
        self.receive, self._send = receive, send
        self.peer: str | None = scope["state"].get("peer")
        self.client, self.what = "", "?"
        """Which member asks for what, as far as the server knows them; nothing a stranger made up gets into the log."""
        self.unread = True
        self.torn = False
        """Whether a part of the body was read, and the rest did not come."""
        self.answered = False

    @property
    def length(self) -> int:
        """Of the body; one in pieces of unknown length has not come as far as this."""
        return wire.number(self.headers, "content-length", 0)

    def unread_within(self, most: int) -> bool:
        """Whether a body is still to come, and all of it, of at most so many bytes."""
        text = self.headers.get("content-length", "0")
        if not self.unread or "expect" in self.headers or not text.isdecimal() or len(text) > 18:
            return False
        return 0 < int(text) <= most

    def option(self, name: str) -> str:
        """A part of the query."""
        if not self.query:
            return ""
        try:
            return dict(parse_qsl(self.query.decode("ascii"), max_num_fields=8)).get(name, "")
        except ValueError:
            raise Refused(400, "malformed", "the query cannot be read") from None

    async def body(self, length: int) -> bytearray:
        """All of it."""
        self.unread, self.torn = False, True
        body = await bodies.read(self.receive, length)
        self.torn = False
        return body

    async def skip(self, length: int) -> None:
        """Reads it to its end, for nobody: whoever is still sending would not see an answer."""
        self.unread, self.torn = False, True
        await bodies.skip(self.receive, length)
        self.torn = False

    async def short(self) -> None:
        """Reads a body that means nothing."""
        if self.length > _SHORT:
            raise Refused(413, "too-large", f"the body of this request has at most {_SHORT} bytes")
        await self.skip(self.length)

    async def gone(self) -> None:
        """Returns when the other side has hung up."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, status: int, parts: list[bytes | memoryview], kind: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends an answer whose body is made of these parts."""
        self.answered = True
        sent: list[tuple[bytes, bytes]] = []
        if status not in _BARE:
            sent = [(b"content-type", kind.encode()), (b"content-length", str(sum(map(len, parts))).encode())]
        unread = self.unread and self.headers.get("content-length", "0") != "0"
        if self.torn or (unread and not self.unread_within(_SHORT)):
            sent.append((b"connection", b"close"))
        if log.isEnabledFor(logging.DEBUG):
            self._log(status)
        if headers:
            sent += [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": sent})
        *most, last = bodies.pieces(parts) or [b""]
        for piece in most:
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": last})

    async def json(self, status: int, value: Any, headers: Mapping[str, str] | None = None) -> None:
        """Sends JSON."""
        await self.answer(status, [json.dumps(value).encode()], "application/json", headers)

    def _log(self, status: int) -> None:
        fields = {"client": self.client, "method": self.method, "what": self.what, "status": status}
        log.debug("%s %s of %s: %d", self.method, self.what, self.client or "?", status, extra={"fields": fields})


class Service:
    """One federation, served."""

    def __init__(self, store: Store, members: Members) -> None:
        self.store, self.members = store, members
        self.federation = store.federation
        server, federation = store.settings.section("server"), store.settings.section("federation")
        self.meter = Meter()
        self._door = Door(members, rate=server.rate, strikes=federation.strikes)
        self._open_status = server.status == "open"
        self._largest = 4 * store.start.w0.size * max(1, len(self.federation.strategy.needs)) + 64
        self._bodies = Bodies(max(3 * self._largest, min(_ROOM, 1024 * self._largest)))
        self._commits = Commits(store, waiting=self._bodies.room, on_batch=self._after_batch)
        self.leases = Leases(self._expire, server.lease)
        for seat in self.federation.seats.values():
            if self.federation.coordinator.works(seat.number):
                self.leases.begin(seat.name, self.federation.coordinator.ticket(seat.number).job)
        self._advice = store.settings.advice()
        self._waiters: dict[str, asyncio.Future[bool]] = {}
        self._arriving: dict[tuple[str, int], asyncio.Future[Answer]] = {}
        self._parts: tuple[object, int, tuple[str, ...], list[memoryview]] = (None, -1, (), [])
        self._problem: str | None = None
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
            await self._refuse(request, _stopping())
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
                await self._update(request, member, job)
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
            raise _stopping()
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
        wait = refusal.retry_after
        headers = {} if wait is None else {"retry-after": str(math.ceil(wait))}  # HTTP knows whole seconds only
        if request.client and request.unread_within(self._largest):
            with suppress(Refused, Gone):
                await request.skip(request.length)
        if not request.answered:
            await request.json(refusal.status, {"error": str(refusal), "code": refusal.code}, headers)

    def refused(self, code: str) -> None:
        """One more request that was not granted."""
        self.meter.refused[code] += 1

    # -- anybody ----------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> None:
        await request.answer(200, [b"ok\n"], "text/plain")

    async def _ready(self, request: Request) -> None:
        why = "stopping" if self.stopping or self.failed else "the disk is full" if self._commits.full else ""
        headers = {"retry-after": "2"} if why else {}
        await request.answer(503 if why else 200, [(why or "ready").encode() + b"\n"], "text/plain", headers)

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
            log.info("%s has come", member.name)
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
                "length": int(federation.w0.size),
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
                    await self._send_job(request, member.name, given, {})
                    return
            if not await self._turn(request, member.name, until - time.monotonic()):
                await request.answer(204, [], "")
                return
            self._enter_again(member)

    async def _turn(self, request: Request, name: str, seconds: float) -> bool:
        """Waits until there may be a job for the client; false if there was none in time."""
        if seconds <= 0:
            return False
        self._wake(name, again=False)  # an older request of the same client: it has been given up
        loop = asyncio.get_running_loop()
        turn = self._waiters[name] = loop.create_future()
        gone = loop.create_task(request.gone())
        try:
            await asyncio.wait({turn, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if self._waiters.get(name) is turn:
                del self._waiters[name]
            hung_up = gone.done()
            gone.cancel()
        if hung_up:
            self._wake_some()  # what it may have been woken for is another's
            raise Gone
        return turn.done() and turn.result()

    def _enter_again(self, member: Member) -> None:
        """Much may have happened while somebody waited."""
        if self.stopping:
            raise _stopping()
        if member.name in self.members.revoked:
            raise revoked()
        if self.members.generations.get(member.name) != member.generation:
            raise bad_token()

    def _wake(self, name: str, *, again: bool = True) -> None:
        """Whoever waits under that name looks again, or gives up."""
        turn = self._waiters.pop(name, None)
        if turn is not None and not turn.done():
            turn.set_result(again)

    async def _send_job(self, request: Request, name: str, given: Given, headers: dict[str, str]) -> None:
        job = given.job
        self.leases.begin(name, given.id)
        names, parts = self._vectors(given)
        if not job.first and not job.extras and request.headers.get(wire.HAVE) == str(job.version):
            names, parts = (), []
        head = wire.JobHead(
            given.id, job.version, given.number, job.first, names, self.federation.p.encoding, given.staleness
        )
        await request.answer(200, [*parts], "application/octet-stream", head.headers() | headers)

    def _vectors(self, given: Given) -> tuple[tuple[str, ...], list[memoryview]]:
        """The encoded vectors of a job; those of a version are made once."""
        job, encoding = given.job, self.federation.p.encoding
        if self._parts[0] is job.extras and self._parts[1] == job.version and not job.first:
            return self._parts[2], self._parts[3]
        vectors = {"model": job.model, **job.extras}
        parts = [wire.encode(wire.bounded(vector, encoding), encoding) for vector in vectors.values()]
        if not job.first:
            self._parts = (job.extras, job.version, tuple(vectors), parts)
        return tuple(vectors), parts

    async def _update(self, request: Request, member: Member, job: int) -> None:
        if "content-length" not in request.headers:
            raise Refused(411, "length", "send a Content-Length")
        length = request.length
        if length > self._largest:
            raise Refused(413, "too-large", f"an update has at most {self._largest} bytes")
        again = self.federation.known(member.name, job)
        if again is None:
            again = await self._same_again(member.name, job)
        if again is not None:
            if request.unread_within(length):
                await request.skip(length)
            await self._send_receipt(request, again)
            return
        seat, head = self.federation.seat(member.name), UpdateHead.parse(request.headers)
        answer = await self._take(request, member, seat, job, head, length)
        await self._send_answer(request, member.name, answer)

    async def _same_again(self, name: str, job: int) -> Answer | None:
        """The answer to the same update that is on its way already, if it is."""
        arriving = self._arriving.get((name, job))
        return None if arriving is None else await asyncio.shield(arriving)

    async def _take(
        self, request: Request, member: Member, seat: Seat, job: int, head: UpdateHead, length: int
    ) -> Answer:
        """Reads, checks and journals an update."""
        try:
            self.federation.check_head(seat, job, head, length)
            await self._bodies.take(length)
            try:
                body = await request.body(length)
                self.federation.check_vectors(head, body)
                answer = await self._journalled(request, seat, job, head, body)
            finally:
                self._bodies.give_back(length)
        except Refused as refusal:
            if refusal.code == "unusable" and self._door.strike(member.name):
                await self._suspend(member, str(refusal))
            raise
        self._door.forgive(member.name)
        return answer

    async def _suspend(self, member: Member, why: str) -> None:
        log.warning("%s is suspended: %s", member.name, why)
        await self._commits.submit("suspend", name=member.name, gen=member.generation)
        self.leases.end(member.name)
        self._door.forgive(member.name)  # invited again, it begins anew

    async def _journalled(self, request: Request, seat: Seat, job: int, head: UpdateHead, body: bytearray) -> Answer:
        again = self.federation.known(seat.name, job) or await self._same_again(seat.name, job)
        if again is not None:  # it came twice at the same time
            return again
        if not self.federation.holds(seat, job):
            raise unknown_job()
        arriving: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._arriving[seat.name, job] = arriving
        self.leases.end(seat.name)
        try:
            answer: Answer = await self._commits.submit(
                "update", body, name=seat.name, j=job, v=head.version, s=head.steps, e=head.examples,
                n=head.vectors, enc=head.encoding, next=int(request.option("next") == "1"),
            )  # fmt: skip
        except Refused as refusal:
            arriving.set_exception(refusal)
            arriving.exception()  # nobody need have waited for it
            if self.federation.holds(seat, job):
                self.leases.begin(seat.name, job)
            raise
        except BaseException:
            arriving.cancel()
            raise
        finally:
            del self._arriving[seat.name, job]
        arriving.set_result(Answer(answer.receipt, answer.version))
        return answer

    async def _send_answer(self, request: Request, name: str, answer: Answer) -> None:
        log.debug("update of %s: %s, staleness %d", name, answer.receipt.outcome, answer.receipt.staleness)
        if answer.given is None:
            await self._send_receipt(request, answer)
        else:
            headers = wire.receipt_headers(answer.receipt, answer.version)
            await self._send_job(request, name, answer.given, headers)

    async def _send_receipt(self, request: Request, answer: Answer) -> None:
        receipt, headers = answer.receipt, wire.receipt_headers(answer.receipt, answer.version)
        body = {
            "outcome": receipt.outcome,
            "staleness": receipt.staleness,
            "reason": receipt.reason,
            "version": answer.version,
        }
        await request.json(200, body, headers)

    async def _heartbeat(self, request: Request, member: Member, job: int) -> None:
        await request.short()
        seat = self.federation.seat(member.name)
        if not self.federation.holds(seat, job):
            raise unknown_job()
        if (member.name, job) not in self._arriving:
            self.leases.begin(member.name, job)
        await request.json(200, {"lease": self.leases.seconds})

    async def _decline(self, request: Request, member: Member, job: int) -> None:
        await request.short()
        seat = self.federation.seat(member.name)
        if not self.federation.holds(seat, job) or (member.name, job) in self._arriving:
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
        self._wake(name)
        log.info("%s has left", name)

    async def _model(self, request: Request) -> None:
        self._enter(request)
        version = str(self.federation.version)
        headers = {"etag": f'"{version}"', wire.VERSION: version, wire.ENCODING: "float32", wire.VECTORS: "model"}
        if request.headers.get("if-none-match") == f'"{version}"':
            await request.answer(304, [], "", headers)
        else:
            part = wire.encode(self.federation.model, "float32")
            await request.answer(200, [part], "application/octet-stream", headers)

    # -- what happens by itself -------------------------------------------------------------------------------------

    def _after_batch(self, seconds: float, count: int) -> None:
        self.meter.batch(seconds, count, self.federation.counts.updates)
        if self._waiters:
            self._wake_some()
        if self.federation.version != self._seen_version:
            self._seen_version = self.federation.version
            self.on_version(self._seen_version)

    def _wake_some(self) -> None:
        """Those who have waited longest and could get a job now."""
        if self.federation.ended:
            for name in list(self._waiters):
                self._wake(name)
            return
        free = self.federation.free_places
        for name in list(self._waiters):
            if free < 1:
                return
            if self.federation.can_pull(name):
                self._wake(name)
                free -= 1

    async def _expire(self, name: str, job: int) -> None:
        """A lease has run out."""
        seat = self.federation.seats.get(name)
        if seat is None or (name, job) in self._arriving or not self.federation.holds(seat, job):
            return
        log.info("the lease of %s on job %d ran out", name, job)
        try:
            await self._commits.submit("drop", name=name, j=job, why="lease ran out")
        except Refused:
            self.leases.begin(name, job)

    async def end(self, why: str) -> None:
        """The federation is over."""
        await self._commits.submit("end", why=why)

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
        self.stopping = True
        for name in list(self._waiters):
            self._wake(name)

    async def close(self) -> None:
        """Finishes what was begun, and saves everything."""
        self.stop()
        await self._commits.close()
        self.store.close()


def _stopping() -> Refused:
    return busy("stopping", "the server is stopping; try again", 2.0)


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
