"""A server on loopback with a real coordinator, for tests of the client: it keeps nothing on disk and can make faults.

    with serving(strategies.create("asgd", clients=1), w0) as server:
        server.faults["update"] = ["drop after", Refusal(503, "busy", after=0.01)]
        Client(server.url, server.token("alice"), ...).run(...)

The faults of the next requests of a kind (hello, job, update, heartbeat, decline, leave, model, status):

    "drop before"    the server closes the connection and does nothing
    "drop after"     the server does what was asked, and closes the connection without an answer
    "cut"            the answer ends in the middle of its body
    "hang"           the server does not answer until the client gives up
    Refusal(...)       the server refuses and does nothing
    ""               no fault
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from aflock.coordination.coordinator import Coordinator
from aflock.errors import InputError
from aflock.events import Event
from aflock.net.protocol import wire
from aflock.strategies.base import Strategy
from aflock.types import Job, Receipt, Update, Vector

SECRET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFG"


@dataclass(frozen=True)
class Refusal(Exception):
    """A refusal, as the server answers with it."""

    status: int
    code: str = "busy"
    text: str = "not now"
    after: float | None = None

    def answer(self) -> web.Response:
        headers = {} if self.after is None else {"Retry-After": f"{self.after:g}"}
        return web.json_response({"error": self.text, "code": self.code}, status=self.status, headers=headers)


@dataclass
class JoinedClient:
    """What the server knows of a client."""

    number: int
    jobs: int = 0
    staleness: int = 0
    answered: int = -1
    receipt: Receipt = field(default_factory=lambda: Receipt("rejected", 0))
    version: int = 0


Fault = str | Refusal
Handler = Callable[[web.Request, str], Awaitable[web.StreamResponse]]


class FakeServer:
    """One federation; everything but `start` and `stop` happens in its own thread."""

    def __init__(
        self,
        strategy: Strategy,
        w0: Vector,
        *,
        advice: dict[str, Any] | None = None,
        encoding: str = "float32",
        lease: float = 60.0,
        steps: int = 1,
        uploads: int | None = None,
        max_staleness: int | None = None,
        order: list[int] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.coordinator = Coordinator(strategy, max_staleness=max_staleness, on_event=self.events.append)
        self.coordinator.start(w0, time.monotonic())
        self.strategy, self.encoding, self.length = strategy, encoding, w0.size
        self.uploads, self.order = uploads, order
        name, shared = strategy.client_half
        self.greeting: dict[str, Any] = {
            "protocol": 1,
            "federation": "f00d",
            "strategy": strategy.name,
            "needs": list(strategy.needs),
            "changes": list(strategy.changes),
            "length": w0.size,
            "encoding": encoding,
            "local": {"name": name, **shared, **(advice or {})},
            "steps": steps,
            "batch": 8,
            "lease": lease,
        }
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.more: dict[str, Any] = {}
        """Further keys of the status."""
        self.taken: Counter[int] = Counter()
        self.clients: dict[str, JoinedClient] = {}
        self.ended = False
        self._tls, self.port = tls, 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake server")
        self._thread.start()
        self._runner: web.AppRunner | None = None

    # -- for tests --------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def token(self, name: str = "alice") -> str:
        return f"aflock1.{name}.{SECRET}"

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.asked]

    def happened(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def forget(self, name: str) -> None:
        async def forgotten() -> None:
            self._forget(name)

        asyncio.run_coroutine_threadsafe(forgotten(), self._loop).result(10)

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> None:
        application = web.Application(client_max_size=1 << 30)
        for method, path, kind, handler in (
            ("POST", "/v1/hello", "hello", self._hello),
            ("GET", "/v1/job", "job", self._pull),
            ("POST", "/v1/jobs/{id}/update", "update", self._update),
            ("POST", "/v1/jobs/{id}/heartbeat", "heartbeat", self._heartbeat),
            ("POST", "/v1/jobs/{id}/decline", "decline", self._decline),
            ("POST", "/v1/leave", "leave", self._leave),
            ("GET", "/v1/model", "model", self._model),
            ("GET", "/v1/status", "status", self._status),
        ):
            application.router.add_route(method, path, self._with_faults(kind, handler))
        self._runner = web.AppRunner(application, shutdown_timeout=0.01, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            await asyncio.sleep(0.01)  # a transport that was closed closes its socket in a later iteration of the loop

    # -- faults ----------------------------------------------------------------------------------------------------

    def _with_faults(self, kind: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            self.asked.append((kind, {name.lower(): value for name, value in request.headers.items()}))
            fault = self.faults[kind].pop(0) if self.faults[kind] else ""
            try:
                return await self._answered(request, kind, handler, fault)
            except Refusal as refusal:
                return refusal.answer()

        return handle

    async def _answered(self, request: web.Request, kind: str, handler: Handler, fault: Fault) -> web.StreamResponse:
        if isinstance(fault, Refusal):
            await request.read()
            raise fault
        if fault == "drop before":
            return _dropped(request)
        if fault == "hang":
            await asyncio.sleep(3600)
        answer = await handler(request, "" if kind == "status" else self._who(request))
        if fault == "drop after":
            return _dropped(request)
        if fault == "cut":
            assert isinstance(answer, web.Response)
            return await _cut(request, answer)
        return answer

    def _who(self, request: web.Request) -> str:
        version, _, rest = request.headers.get("Authorization", "").removeprefix("Bearer ").partition(".")
        name, _, secret = rest.partition(".")
        if version != "aflock1" or secret != SECRET:
            raise Refusal(401, "token", "the token is not valid")
        if self.ended and request.path != "/v1/hello":
            raise Refusal(410, "ended", "the federation has ended")
        return name

    def _client(self, name: str) -> JoinedClient:
        if name not in self.clients:
            raise Refusal(403, "not-a-member", "say hello first")
        return self.clients[name]

    # -- the protocol -----------------------------------------------------------------------------------------------

    async def _hello(self, request: web.Request, name: str) -> web.StreamResponse:
        if name not in self.clients:
            number = int(name[1:]) if name[1:].isdecimal() else len(self.clients)
            while number in {client.number for client in self.clients.values()}:
                number += 1
            if not self.coordinator.knows(number):
                self.coordinator.join(number, time.monotonic())
            self.clients[name] = JoinedClient(number)
        state = "ended" if self.ended else "opening" if self.coordinator.opening else "running"
        own = {"name": name, "number": self.clients[name].number, "state": state, "version": self.strategy.version}
        return web.json_response(own | self.greeting)

    async def _pull(self, request: web.Request, name: str) -> web.StreamResponse:
        client, until = self._client(name), time.monotonic() + int(request.query.get("wait", "0"))
        while True:
            if self.ended:
                raise Refusal(410, "ended", "the federation has ended")
            job = self.coordinator.pull(client.number, time.monotonic())
            if job is not None:
                return self._job(request, client, job)
            if time.monotonic() >= until:
                return web.Response(status=204)
            await asyncio.sleep(0.005)

    def _job(self, request: web.Request, client: JoinedClient, job: Job, lines: str = "") -> web.Response:
        vectors = {"model": job.model, **job.extras}
        if request.headers.get(wire.HAVE) == str(job.version) and not job.first:
            vectors = {}
        assert job.id is not None
        lines += wire.job_lines(job.id, client.jobs, client.staleness)
        lines += wire.version_lines(job.version, job.first, tuple(vectors), self.encoding)
        client.jobs += 1
        body = b"".join(bytes(wire.encode(vector, self.encoding)) for vector in vectors.values())
        return web.Response(body=body, headers=_headers(lines))

    async def _update(self, request: web.Request, name: str) -> web.StreamResponse:
        client, id = self._client(name), int(request.match_info["id"])
        head, body = wire.UpdateHead.parse(request.headers), await request.read()
        assert request.headers["Content-Length"] == str(len(body))
        if id == client.answered:
            return self._receipt(client)
        while self.order is not None and (not self.order or self.order[0] != client.number):
            if self.ended:
                raise Refusal(410, "ended", "the federation has ended")
            await asyncio.sleep(0.001)
        if not self._holds(client, id):
            raise Refusal(409, "unknown-job", "this is not your open job")
        vectors = wire.split(body, head.vectors, head.encoding, self.length)
        update = Update(client.number, head.version, vectors, head.steps, head.examples, id)
        try:
            client.receipt = self.coordinator.push(update, time.monotonic())
        except InputError as error:
            raise Refusal(422, "unusable", str(error)) from None
        self.taken[id] += 1
        client.answered, client.version, client.staleness = id, self.strategy.version, client.receipt.staleness
        if self.order is not None:
            self.order.pop(0)
        self.ended = self.uploads is not None and self.taken.total() >= self.uploads
        if request.query.get("next") == "1" and not self.ended:
            job = self.coordinator.pull(client.number, time.monotonic())
            if job is not None:
                return self._job(request, client, job, wire.receipt_lines(client.receipt, client.version))
        return self._receipt(client)

    def _receipt(self, client: JoinedClient) -> web.Response:
        receipt = client.receipt
        document = {"outcome": receipt.outcome, "staleness": receipt.staleness, "reason": receipt.reason}
        headers = _headers(wire.receipt_lines(receipt, client.version))
        return web.json_response(document | {"version": client.version}, headers=headers)

    def _holds(self, client: JoinedClient, id: int) -> bool:
        return self.coordinator.works(client.number) and self.coordinator.ticket(client.number).job == id

    async def _heartbeat(self, request: web.Request, name: str) -> web.StreamResponse:
        if not self._holds(self._client(name), int(request.match_info["id"])):
            raise Refusal(409, "unknown-job", "this is not your open job")
        return web.json_response({"lease": self.greeting["lease"]})

    async def _decline(self, request: web.Request, name: str) -> web.StreamResponse:
        client = self._client(name)
        if not self._holds(client, int(request.match_info["id"])):
            raise Refusal(409, "unknown-job", "this is not your open job")
        self.coordinator.drop(client.number, time.monotonic(), "declined")
        return web.json_response({})

    async def _leave(self, request: web.Request, name: str) -> web.StreamResponse:
        self._forget(name)
        return web.json_response({})

    def _forget(self, name: str) -> None:
        self.coordinator.leave(self.clients.pop(name).number, time.monotonic())

    async def _model(self, request: web.Request, name: str) -> web.StreamResponse:
        version = str(self.strategy.version)
        if request.headers.get("If-None-Match") == f'"{version}"':
            return web.Response(status=304)
        headers = {wire.VERSION: version, wire.ENCODING: "float32", wire.VECTORS: "model"}
        return web.Response(body=bytes(wire.encode(self.strategy.model, "float32")), headers=headers)

    async def _status(self, request: web.Request, name: str) -> web.StreamResponse:
        return web.json_response({"version": self.strategy.version, "state": "running", **self.more})


def _dropped(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _cut(request: web.Request, whole: web.Response) -> web.StreamResponse:
    assert isinstance(whole.body, bytes)
    half = web.StreamResponse(headers=whole.headers)
    half.content_length = len(whole.body)
    await half.prepare(request)
    await half.write(whole.body[: len(whole.body) // 2])
    assert request.transport is not None
    request.transport.close()
    return half


@contextlib.contextmanager
def serving(strategy: Strategy, w0: Vector, **options: Any) -> Iterator[FakeServer]:
    """Runs a server within the block."""
    server = FakeServer(strategy, w0, **options)
    server.start()
    try:
        yield server
    finally:
        server.close()


def _headers(lines: str) -> dict[str, str]:
    """The headers in lines that each end with CR LF."""
    return dict(line.split(": ", 1) for line in lines.splitlines())
