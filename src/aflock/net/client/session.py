"""One client's line to a federation's server: the requests of docs/protocol.md, each a method.

    async with Session("https://host:8443", token) as session:
        await session.hello()
        pulled = await session.pull(wait=30)
        answer = await session.push(pulled.pack({"gradient": g}, steps=5, examples=600), next=True)
        answer.receipt, answer.next

A body is read straight into the memory its vectors stay in, and sent from the memory they lie in. What gets no answer,
or "not now", is tried again, for ever unless `give_up` says otherwise. Every number the server sends is checked; what
is no protocol is an error, not a crash.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import ssl
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import SplitResult

import aiohttp

from ..errors import AflockError, InputError
from ..types import Vector
from . import tls, wire
from .answers import Answer, Hello, Pulled, seconds
from .glance import status
from .keep import Parcel
from .streams import LONGEST_STATUS, PIECE, document, fill, loaded, objection, pieces
from .trouble import Nonsense, Unavailable, Untrusted, failure, first_failure, nonsense
from .urls import address, is_loopback, pem_text

__all__ = [
    "Answer", "Hello", "Nonsense", "Pulled", "Session", "Unavailable", "Untrusted", "address", "jittered", "status",
]  # fmt: skip

log = logging.getLogger("aflock.client")

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second attempt, and at most before any."""
LONGEST_PULL = 60.0
"""The most seconds the server lets a pull wait."""
SLOWEST = 16_384
"""Bytes per second a line must carry: a request may take its timeout, and this for its bodies."""

_IDLE = 60.0  # seconds a connection is kept between two requests; servers keep it a little longer

T = TypeVar("T")
Reader = Callable[[aiohttp.ClientResponse], Awaitable[T]]


class Session:
    """One connection, kept open between requests; made anew when it breaks."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        insecure: bool = False,
        timeout: float = 60.0,
        give_up: float | None = None,
    ) -> None:
        """A line to the server at `url` for whoever has that token.

        ca               whom to trust: PEM text or its path; None: the system's authorities
        certificate, key the client's own, for servers that ask for one: paths
        insecure         whether an http:// URL may lead to another machine
        timeout          seconds a server may be silent
        give_up          seconds after which a request that gets no answer is an error; None: never
        """
        where = address(url, insecure=insecure)
        self._base, self._token, self._proxy = url.rstrip("/"), token, _proxy(where)
        self._tls: ssl.SSLContext | bool = True
        if where.scheme == "https":
            self._tls = tls.client_context(pem_text(ca), certificate=_path(certificate), key=_path(key))
        self._anonymous = where.scheme == "https" and certificate is None
        self._timeout, self._give_up = timeout, give_up
        self._http: aiohttp.ClientSession | None = None
        self._hurry = asyncio.Event()
        self._hello: Hello | None = None
        self._held: tuple[int, dict[str, Vector]] | None = None

    def __repr__(self) -> str:
        return f"Session({self._base!r})"

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1, ssl=self._tls, keepalive_timeout=_IDLE),
            headers={"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=PIECE,
            trust_env=False,  # it would look for passwords, too
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the connection."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def hurry(self) -> None:
        """From now on nothing is tried a second time: what waits for its next attempt fails at once."""
        self._hurry.set()

    @property
    def federation(self) -> Hello:
        """What the last hello said."""
        if self._hello is None:
            raise InputError("the session has not been greeted; call hello() first")
        return self._hello

    # -- requests ---------------------------------------------------------------------------------------------------

    async def hello(self) -> Hello:
        """Says who is there; the first time makes the client a member."""
        self._held = None  # in another federation, or one that was put back, a version is another model
        return await self._greet()

    async def pull(self, wait: float = 30.0) -> Pulled | None:
        """A job, or None if there was none within `wait` seconds."""
        whole = math.ceil(min(max(0.0, wait), LONGEST_PULL))
        limit = whole + self._transfer(4 * self.federation.length)
        pulled = await self._ask("GET", f"/v1/job?wait={whole}", self._maybe_job, self._have(), limit=limit)
        before = self.federation
        if pulled is None or before.number is not None:
            return pulled
        hello = await self._greet()
        if hello.number is None:
            raise nonsense("a client that has a job has no number")
        if hello.federation != before.federation:
            self._held = None
        return replace(pulled, job=replace(pulled.job, client=hello.number))

    async def push(self, parcel: Parcel, *, next: bool = False) -> Answer:
        """Sends an update until there is an answer; it counts once however often it was sent."""
        have = self._have() if next else {}
        headers = {**parcel.head.headers(), **have, "Content-Length": str(parcel.nbytes)}
        path = f"/v1/jobs/{parcel.job}/update{'?next=1' if next else ''}"
        limit = self._transfer(parcel.nbytes + (4 * self.federation.length if next else 0))
        answer = await self._ask("POST", path, self._answer, headers, parcel.vectors.values(), limit=limit)
        if answer.next is not None and answer.next.id == parcel.job:
            raise Nonsense(f"the server gives job {parcel.job} a second time; it must be mended")
        return answer

    async def heartbeat(self, job: int, *, patient: bool = True) -> float:
        """Says that the job is being worked on; how long the lease is from now on."""
        limit = min(self._timeout, max(1.0, self.federation.lease / 3))  # a late one is of no use
        path = f"/v1/jobs/{job}/heartbeat"
        return seconds(await self._ask("POST", path, document, limit=limit, patient=patient), "lease")

    async def decline(self, job: int, *, patient: bool = True) -> None:
        """Gives a job back."""
        await self._ask("POST", f"/v1/jobs/{job}/decline", document, patient=patient)

    async def leave(self) -> None:
        """Leaves the federation for good."""
        await self._ask("POST", "/v1/leave", document)

    async def model(self, have: int | None = None) -> tuple[int, Vector] | None:
        """The current version and its model; None if it is the version the client has."""
        headers = {} if have is None else {"If-None-Match": f'"{have}"'}
        limit = self._transfer(4 * self.federation.length)
        return await self._ask("GET", "/v1/model", self._model, headers, limit=limit)

    async def status(self) -> dict[str, Any]:
        """The federation in numbers."""
        return await self._ask("GET", "/v1/status", partial(document, most=LONGEST_STATUS))

    # -- one request ------------------------------------------------------------------------------------------------

    async def _greet(self) -> Hello:
        self._hello = Hello.parse(await self._ask("POST", "/v1/hello", document))
        return self._hello

    async def _ask(
        self,
        method: str,
        path: str,
        read: Reader[T],
        headers: Mapping[str, str] | None = None,
        body: Iterable[wire.Buffer] | None = None,
        *,
        limit: float | None = None,
        patient: bool = True,
    ) -> T:
        """Asks until there is an answer; refusals are raised."""
        loop = asyncio.get_running_loop()
        wait, begun, expect = FIRST_WAIT, loop.time(), False
        while True:
            try:
                return await self._once(method, path, read, headers, body, limit or self._timeout, expect)
            except Unavailable as trouble:
                pause = jittered(wait if trouble.after is None else trouble.after)
                spent = loop.time() - begun + pause
                if not patient or self._hurry.is_set() or (self._give_up is not None and spent > self._give_up):
                    raise
                log.warning("%s; trying again in %.1f s", trouble, pause)
                if await self._hurried(pause):
                    raise
            wait = min(2 * wait, LONGEST_WAIT)
            expect = body is not None and not expect

    async def _once(
        self,
        method: str,
        path: str,
        read: Reader[T],
        headers: Mapping[str, str] | None,
        body: Iterable[wire.Buffer] | None,
        limit: float,
        expect: bool,
    ) -> T:
        """One attempt.

        A server that has the update already need not read it again, and may hang up on whoever keeps sending. So every
        other attempt asks first (`expect`); not every one, because some servers do not answer to that.
        """
        if self._http is None:
            raise InputError("the session is closed; use it inside `async with Session(...)`")
        try:
            async with (
                asyncio.timeout(limit),
                self._http.request(
                    method,
                    self._base + path,
                    headers=headers,
                    data=None if body is None else pieces(body),
                    expect100=expect,
                    allow_redirects=False,  # the token is for this server
                    proxy=self._proxy,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=limit),
                ) as response,
            ):
                if response.status not in (200, 204, 304):
                    raise await objection(response)
                return await read(response)
        except (aiohttp.ClientError, OSError) as error:  # without its chain: it may quote the headers we sent
            raise self._failure(error) from None
        except wire.WireError as error:
            raise nonsense(str(error)) from None

    def _failure(self, error: Exception) -> AflockError:
        """What went wrong; a server that misses a certificate just hangs up, so that is guessed."""
        if self._hello is not None:
            return failure(error, self._base)
        trouble = first_failure(error, self._base)
        if self._anonymous and isinstance(error, aiohttp.ServerDisconnectedError):
            return Unavailable(f"{trouble}; if it asks for certificates, give this client certificate= and key=")
        return trouble

    async def _hurried(self, pause: float) -> bool:
        """Waits; true if there is no time for that any more."""
        try:
            await asyncio.wait_for(self._hurry.wait(), pause)
        except TimeoutError:
            return False
        return True

    def _transfer(self, nbytes: int) -> float:
        """How many seconds a request with so many bytes may take."""
        return self._timeout + nbytes / SLOWEST

    # -- answers with vectors ---------------------------------------------------------------------------------------

    def _have(self) -> dict[str, str]:
        """Says which version need not be sent again."""
        return {} if self._held is None else {wire.HAVE: str(self._held[0])}

    async def _maybe_job(self, response: aiohttp.ClientResponse) -> Pulled | None:
        return None if response.status == 204 else await self._job(response)

    async def _job(self, response: aiohttp.ClientResponse) -> Pulled:
        head = wire.JobHead.parse(response.headers)
        return Pulled.of(head, await self._vectors(response, head), self.federation.number or 0)

    async def _vectors(self, response: aiohttp.ClientResponse, head: wire.JobHead) -> dict[str, Vector]:
        """Those in the body; if it is empty, those of the version the client said it has."""
        if not head.vectors:
            await fill(response, 0)
            if self._held is None or self._held[0] != head.version:
                raise nonsense(f"a job of version {head.version} comes without its vectors")
            return self._held[1]
        vectors = await self._read(response, head.vectors, head.encoding)
        if not head.first:  # a first job carries the model alone, not all there is of its version
            self._held = head.version, vectors
        return vectors

    async def _read(self, response: aiohttp.ClientResponse, names: tuple[str, ...], encoding: str) -> dict[str, Vector]:
        length = self.federation.length
        body = await fill(response, len(names) * wire.size(encoding, length))
        vectors = wire.split(body, names, encoding, length)
        for vector in vectors.values():
            vector.flags.writeable = False  # it may be handed out again
        return vectors

    async def _answer(self, response: aiohttp.ClientResponse) -> Answer:
        receipt, version = wire.parse_receipt(response.headers)
        if wire.JOB in response.headers:
            return Answer(receipt, version, await self._job(response))
        await loaded(response)  # says the same once more; read so that the connection can be used again
        return Answer(receipt, version)

    async def _model(self, response: aiohttp.ClientResponse) -> tuple[int, Vector] | None:
        if response.status == 304:
            return None
        version, encoding = wire.number(response.headers, wire.VERSION), wire.encoding(response.headers)
        return version, (await self._read(response, ("model",), encoding))["model"]


def jittered(pause: float) -> float:
    """A pause, and up to half of it more: clients that were cut off together do not come back together."""
    return pause * (1 + random.random() / 2)


def _proxy(where: SplitResult) -> str | None:
    """The environment's proxy for that server; this machine is reached without one."""
    host = where.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(where.scheme)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
