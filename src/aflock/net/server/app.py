"""The server's application: the paths of docs/protocol.md, on top of the connections in http/.

For each request the app checks the token and the rate (auth.py), checks what the request asks for against the state of
the federation, submits a journal record, and answers when the record is durable and applied (storage/group_commit.py).
Updates take the same steps in updates.py. A pull that gets no job at once waits in waiting_pulls.py.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ...system.files import to_json
from ..federation.federation import Given
from ..identity.members import Member, Members
from ..protocol import wire
from ..protocol.refusals import Refused, bad_token, busy, revoked, stopping, suspended, unknown_job
from ..storage.data_folder import DataFolder
from ..storage.group_commit import GroupCommit
from . import capacity, metrics
from .auth import Auth
from .http.request import Disconnected, Request
from .http.response import Response, json_response, refusal
from .http.uptime import Uptime
from .leases import Leases
from .logs import fields, log
from .metrics import ServerCounters
from .next_client import NextClient
from .settings import Settings
from .updates import Updates, answer_request, as_refusal, send_after_body
from .waiting_pulls import WaitingPulls

Handler = Callable[[Request], Awaitable[Response]]

_JOB_PATH = re.compile(r"/v1/jobs/([0-9]{1,18})/(update|heartbeat|decline)", re.ASCII)
_LONGEST_WAIT = 60.0
_BODY_BYTES = 8 << 20
"""Bytes of bodies that may be in memory at a time if updates are small; with large updates, two bodies may be."""
_PROBE_BYTES = 1 << 20
"""Bytes that must fit on a disk that was full, before the server takes updates again."""


class App:
    """Serves one federation: `begin` takes up each request that a connection has read.

    `stop` refuses further requests; `close` then finishes those that have begun, and saves a snapshot.
    """

    def __init__(self, store: DataFolder, members: Members, settings: Settings) -> None:
        self.store, self.members, self._settings = store, members, settings
        self.federation = store.federation
        server, federation = settings.section("server"), settings.section("federation")
        self._auth = Auth(members, rate=server.rate, strikes=federation.strikes)
        self.counters = ServerCounters()
        self._open_status = server.status == "open"
        # An upper bound: float32 is the longest encoding, and 64 is more than the scales of int8 can add for a tiny
        # model. `Federation.check_head` compares the exact length later.
        largest = 4 * self.federation.length * max(1, len(self.federation.strategy.needs)) + 64
        # Two bodies at least, so that one arrives while the journal writes the other. Small ones share _BODY_BYTES, at
        # most 1024 of them: two batches of the group commit, one that is being written and one that collects.
        bytes_at_a_time = max(2 * largest, min(_BODY_BYTES, 1024 * largest))
        self._commits = GroupCommit(store, on_write=self._after_write, on_applied=self._after_records)
        self.clock = Uptime(asyncio.get_running_loop())
        self.leases = Leases(self._expire, server.lease, self.clock, self._is_uploading)
        next_client = NextClient(federation.selection, federation.seed, federation.probabilities)
        self._waiting = WaitingPulls(self.federation, next_client)
        self.updates = Updates(
            self.federation, self._commits, self.leases, self._auth, self.clock, self._waiting,
            memory=bytes_at_a_time, largest=largest, refuse=self._refuse,
        )  # fmt: skip
        for client in self.federation.clients.values():  # after a restart, every open job has its whole lease again
            if self.federation.coordinator.works(client.number):
                self.leases.begin(client.name, self.federation.coordinator.ticket(client.number).job)
        self._advice = settings.advice()
        self._members_problem: str | None = None
        """Why the file of members could not be read the last time; None: it could."""
        self._has_ended = bool(self.federation.ended)
        """Whether the log says that the federation has ended."""
        self._sending = 0
        """Bytes of models that are being sent in answer to GET /v1/model."""
        self.stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        """The tasks of all requests but updates; asyncio itself keeps no reference to a task."""
        self.on_version: Callable[[int], None] = lambda version: None
        """Called with the version after each server step; main.py sets it to the evaluation."""
        self._seen_version = self.federation.version
        self._seen_undone, self._diverged = self.federation.counts.undone, False
        """What `_after_records` saw the last time: the version, the steps undone, whether the model had diverged."""
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

    # -- every request ----------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Takes up a request: any request but an update becomes a task; updates.py has callbacks instead."""
        try:
            handler = self._route(request)
            if handler is not None:
                task = asyncio.get_running_loop().create_task(self._handle(request, handler))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception as error:
            self._refuse(request, as_refusal(error, f"{request.method} {request.what}"))

    def _route(self, request: Request) -> Handler | None:
        """The handler for a request; None if it was an update, which `Updates` has taken up."""
        found = _JOB_PATH.fullmatch(request.path)
        if found is None:
            return self._route_others(request)
        if request.method != "POST":
            raise Refused(405, "method", "use POST")
        (number, action), request.what = found.groups(), request.path
        job = int(number)
        member = self._authenticate(request)
        if action == "update":
            self.updates.begin(request, member, job)
            return None
        return partial(self._heartbeat if action == "heartbeat" else self._decline, member=member, job=job)

    def _route_others(self, request: Request) -> Handler:
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            if any(path == request.path for _, path in self._routes):
                raise Refused(405, "method", "this path does not have this method; see docs/protocol.md")
            raise Refused(404, "path", "there is no such path; see docs/protocol.md")
        request.what = request.path
        return handler

    async def _handle(self, request: Request, handler: Handler) -> None:
        try:
            response = await handler(request)
        except Disconnected:  # the client has closed the connection
            return
        except Exception as error:
            self._refuse(request, as_refusal(error, f"{request.method} {request.what}"))
        else:
            answer_request(request, response)

    def _authenticate(self, request: Request, *, hello: bool = False) -> Member:
        """The member that sends a request; refuses it if the server stops or the client is suspended.

        A suspended client may say hello with a token of a new invitation.
        """
        member = self._auth.admit(request.headers, request.certificate_name)
        request.client = name = member.name
        self.counters.seen[name] = time.monotonic()
        if self.stopping:
            raise stopping()
        client = self.federation.clients.get(name)
        if client is not None and client.suspended and not (hello and member.generation != client.generation):
            raise suspended()
        return member

    def _refuse(self, request: Request, refused: Refused) -> None:
        """Answers with a refusal.

        If the request has a member's body that is not too large, the body is read first: the connection can then be
        used for the next request.
        """
        self.refused(refused.code)
        request.code = refused.code
        answer = partial(answer_request, request, refusal(refused))
        if request.client and request.length <= self.updates.largest:
            send_after_body(request, answer)
        else:
            answer()

    def refused(self, code: str) -> None:
        """Counts a refused request."""
        self.counters.refused[code] += 1

    # -- requests without a token -----------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return Response(200, "text/plain", [b"ok\n"])

    async def _ready(self, request: Request) -> Response:
        why = "stopping" if self.stopping or self.failed else "the disk is full" if self._commits.full else ""
        retry = "retry-after: 2\r\n" if why else ""
        return Response(503 if why else 200, "text/plain", [(why or "ready").encode() + b"\n"], retry)

    async def _metrics(self, request: Request) -> Response:
        self._check_may_see(request)
        text = metrics.text(self.store, self.counters, self._waiting.seconds(), self._commits.full)
        return Response(200, "text/plain; version=0.0.4", [text.encode()])

    async def _status(self, request: Request) -> Response:
        self._check_may_see(request)
        text = to_json(metrics.status(self.store, self.counters, self._waiting.seconds()))
        return Response(200, "application/json", [text.encode()])

    def _check_may_see(self, request: Request) -> None:
        """Refuses a request for status or metrics without a token, unless [server] status is open."""
        if not self._open_status:
            request.client = self._auth.admit(request.headers, request.certificate_name).name

    # -- requests of members ----------------------------------------------------------------------------------------

    async def _hello(self, request: Request) -> Response:
        member = self._authenticate(request, hello=True)
        await request.read_nothing()
        federation, p = self.federation, self.federation.p
        if not federation.ended and not federation.has_joined(member.name, member.generation):
            if federation.begun and member.name not in federation.clients:
                capacity.check_one_more_client(federation.strategy)
            await self._commits.submit("hello", name=member.name, gen=member.generation)
            log.info("%s has joined", member.name, extra=fields(event="hello", client=member.name))
        client = federation.clients.get(member.name)
        return json_response(
            200,
            {
                "protocol": wire.PROTOCOL,
                "federation": federation.id,
                "name": member.name,
                "number": None if client is None else client.number,
                "state": federation.state,
                "strategy": federation.strategy.name,
                "needs": list(federation.strategy.needs),
                "changes": list(federation.strategy.changes),
                "length": federation.length,
                "model": self._settings.section("model").name,
                "order": "torch" if self.store.judge is None or self.store.judge[0].torch_order else "own",
                "encoding": p.encoding,
                "version": federation.version,
                "local": self._advice,
                "steps": p.steps,
                "batch": p.batch,
                "lease": self.leases.seconds,
            },
        )

    async def _pull(self, request: Request) -> Response:
        member = self._authenticate(request)
        wait = min(_LONGEST_WAIT, float(wire.query_number(request.option("wait") or "0", "wait")))
        until = time.monotonic() + wait
        while True:
            if self.federation.ended or member.name not in self.federation.gathered:
                self.federation.active_client(member.name)  # refuses, with the reason
            if await self._has_place(member.name):
                given = await self._submit_pull(member.name)
                if given is not None:
                    have = request.headers.get(wire.HAVE)
                    return self.updates.responses.to_pull(member.name, given, have)
            if not await self._waiting.wait(request, member.name, until - time.monotonic()):
                return Response(204)
            self._check_again(member)

    async def _has_place(self, name: str) -> bool:
        """Whether the client may be given a job now.

        A client that pulls while it has an open job has lost it, so the job is dropped. If the selection picks the same
        client for the place, its pull does that (`Coordinator.pull`); otherwise a drop does it here.
        """
        client = self.federation.clients.get(name)
        ticket = None if client is None else self.federation.coordinator.open.get(client.number)
        if ticket is None:
            return self._waiting.has_place(name)
        if self.updates.is_being_written(name, ticket.job):
            return False  # the journal writes the update for the job; after that the client's place is free
        if self._waiting.may_have_next_job(name):
            return True
        await self._commits.submit("drop", name=name, j=ticket.job, why="the client pulled again")
        self.leases.end(name)
        return False

    async def _submit_pull(self, name: str) -> Given | None:
        given: Given | None = None
        try:
            given = await self._commits.submit("pull", name=name)
        finally:
            self._waiting.pulled(name, given=given is not None)
        return given

    def _check_again(self, member: Member) -> None:
        """Refuses a pull whose member was revoked or invited again while it waited, or if the server stops."""
        if self.stopping:
            raise stopping()
        if member.name in self.members.revoked:
            raise revoked()
        if self.members.generations.get(member.name) != member.generation:
            raise bad_token()

    async def _heartbeat(self, request: Request, member: Member, job: int) -> Response:
        await request.read_nothing()
        client = self.federation.active_client(member.name)
        if not self.federation.holds(client, job):
            raise unknown_job()
        if not self.updates.is_being_written(member.name, job):
            self.leases.begin(member.name, job)
        return json_response(200, {"lease": self.leases.seconds})

    async def _decline(self, request: Request, member: Member, job: int) -> Response:
        await request.read_nothing()
        client = self.federation.active_client(member.name)
        if not self.federation.holds(client, job) or self.updates.is_being_written(member.name, job):
            raise unknown_job()
        await self._commits.submit("drop", name=member.name, j=job, why="the client gave it back")
        self.leases.end(member.name)
        return json_response(200, {})

    async def _leave(self, request: Request) -> Response:
        member = self._authenticate(request)
        await request.read_nothing()
        if member.name in self.federation.clients or member.name in self.federation.gathered:
            await self.remove(member.name)
        return json_response(200, {})

    async def remove(self, name: str) -> None:
        """Removes a client for good: it has left, or was revoked."""
        await self._commits.submit("leave", name=name)
        self.leases.end(name)
        self._waiting.forget(name)
        how = "was revoked" if name in self.members.revoked else "has left"
        log.info("%s %s", name, how, extra=fields(event="leave", client=name))

    async def _model(self, request: Request) -> Response:
        self._authenticate(request)
        version = str(self.federation.version)
        lines = (
            f'etag: "{version}"\r\n{wire.VERSION}: {version}\r\n{wire.ENCODING}: float32\r\n{wire.VECTORS}: model\r\n'
        )
        if request.headers.get("if-none-match") == f'"{version}"':
            return Response(304, lines=lines)
        part = wire.encode(self.federation.model, "float32")
        if self._sending and self._sending + part.nbytes > 4 * max(part.nbytes, _BODY_BYTES):
            # Each response keeps the model of its version in memory until it is sent.
            raise busy("busy", "too many clients are reading the model; try again", 5.0)
        self._sending += part.nbytes
        request.on_finished(partial(self._has_sent, part.nbytes))
        return Response(200, "application/octet-stream", [part], lines)

    def _has_sent(self, nbytes: int) -> None:
        self._sending -= nbytes

    # -- callbacks and the check once a second ----------------------------------------------------------------------

    def _after_write(self, seconds: float, count: int) -> None:
        """`GroupCommit` calls it after each write to the journal."""
        self.counters.batch(seconds, count, self.federation.counts.updates)

    def _after_records(self) -> None:
        """`GroupCommit` calls it after it has applied some records."""
        self._waiting.grant_places()
        if self.federation.version != self._seen_version:
            self._seen_version = self.federation.version
            self._log_undone_and_diverged(self._seen_version)
            self.on_version(self._seen_version)
        if self.federation.ended and not self._has_ended:
            self._has_ended, version = True, self.federation.version
            why = self.federation.ended
            log.info("the federation has ended: %s", why, extra=fields(event="end", version=version, why=why))

    def _log_undone_and_diverged(self, version: int) -> None:
        """Logs every step that was undone, and the first version at which the model has diverged."""
        undone, diverged = self.federation.counts.undone, self.federation.diverged
        if undone != self._seen_undone:
            log.error("%s", self.federation.guard.undone, extra=fields(event="undo", version=version))
        if diverged and not self._diverged:
            why = self.federation.guard.longest
            about = fields(event="diverged", version=version, why=why)
            log.error("the model has diverged at version %d; %s", version, why, extra=about)
        self._seen_undone, self._diverged = undone, diverged

    def _is_uploading(self, name: str, job: int) -> bool:
        return self.updates.is_alive(name, job)

    async def _drop_overdue(self) -> None:
        """Drops the jobs that have become too old, for a rule that resets silent clients (mr-asyncfl)."""
        for name, job in self.federation.overdue():
            if not self.updates.is_being_written(name, job) and not self._is_uploading(name, job):
                why = "the model of the job is too old"
                log.info(
                    "job %d of %s is dropped: %s", job, name, why, extra=fields(event="drop", client=name, job=job)
                )
                with suppress(Refused):  # the journal takes no record now: the next check tries again
                    await self._commits.submit("drop", name=name, j=job, why=why)
                    self.leases.end(name)

    async def _expire(self, name: str, job: int) -> None:
        """Drops a job whose lease has run out, unless its update has arrived."""
        client = self.federation.clients.get(name)
        if client is None or self.updates.is_being_written(name, job) or not self.federation.holds(client, job):
            return
        log.info("the lease of %s on job %d ran out", name, job, extra=fields(event="lease", client=name, job=job))
        try:
            await self._commits.submit("drop", name=name, j=job, why="lease ran out")
        except Refused:  # the journal takes no record, because its disk is full, say: the lease begins once more
            self.leases.begin(name, job)

    async def end(self, why: str, accuracy: float) -> None:
        """Ends the federation, because its model has reached the target accuracy."""
        await self._commits.submit("end", why=why, accuracy=accuracy)

    async def check_every_second(self) -> None:
        """Once a second: removes revoked members, drops late and old jobs, checks waits and a full disk."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self._reload_members()
                await self._remove_revoked()
                await self.leases.check()
                await self._drop_overdue()
                self._waiting.check()
                if self._commits.full and _has_free_space(self.store.folder):
                    self._commits.full = False
                    log.info("the disk has free space again", extra=fields(event="disk-free"))
            except Exception:  # if this task ended, no lease would ever run out
                log.exception("the check of members and leases failed; it is repeated in a second")

    def _reload_members(self) -> None:
        """Reads members.json if it has changed; logs once if it cannot be read, and once if it can again."""
        self.members.refresh()
        before, self._members_problem = self._members_problem, self.members.problem
        if self._members_problem and self._members_problem != before:
            log.error("%s; the server keeps the members it has read before", self._members_problem)
        elif before and not self._members_problem:
            log.info("members.json can be read again")

    async def _remove_revoked(self) -> None:
        for name in [*self.federation.clients, *self.federation.gathered]:
            if name in self.members.revoked and not self.federation.ended:
                try:
                    await self.remove(name)
                except Refused:  # the journal takes no record, its disk is full, say: the next check tries again
                    return

    def stop(self) -> None:
        """Takes no more requests; refuses the pulls and uploads that wait, so that their clients try again later."""
        self.stopping = True
        self.updates.stop()
        self._waiting.wake_all()

    async def close(self) -> None:
        """Finishes the requests that have begun, saves a snapshot, and closes the data folder."""
        self.stop()
        await self._commits.close()
        self.clock.stop()
        self.store.close()


def _has_free_space(folder: Path) -> bool:
    """Whether the disk takes `_PROBE_BYTES` more, so that the server is ready again before a client tries an update."""
    file = folder / ".free-space"
    try:
        # Not `write_whole`: nothing reads this file, so it need not be whole, and its syncs would block the event loop.
        file.write_bytes(bytes(_PROBE_BYTES))
    except OSError:
        return False
    finally:
        file.unlink(missing_ok=True)
    return True
