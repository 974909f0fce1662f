"""A client's requests (docs/protocol.md), each a method, with one token. `run.py` and benchmarks use it.

    async with Session("https://host:8443", token) as session:
        await session.hello()
        pulled = await session.pull(wait=30)
        answer = await session.push(pulled.pack({"gradient": g}, steps=5, examples=600), next=True)
        answer.receipt, answer.next

A response body is read straight into the memory of its vectors, and a request body is sent from the memory of its
vectors. A request that gets no answer, or is asked to try later, is sent again: for ever, unless `give_up` limits it.
Every value from the server is checked; an answer that does not follow the protocol raises `ProtocolError`.
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
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar
from urllib.parse import SplitResult

import aiohttp

from ...errors import AflockError, InputError
from ...types import Vector
from ..identity import tls
from ..protocol import wire
from ..protocol.urls import address, is_loopback, pem_text
from .answers import Answer, Hello, Pulled, seconds
from .errors import ProtocolError, Unavailable, Untrusted, connection_error, first_connection_error, protocol_error
from .state import EncodedUpdate
from .status import status
from .streams import CHUNK, chunks, error_of_response, read_body, read_json, read_json_object

__all__ = [
    "Answer", "Hello", "ProtocolError", "Pulled", "Session", "Unavailable", "Untrusted", "address", "jittered",
    "status",
]  # fmt: skip

log = logging.getLogger("aflock.client")

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second attempt, and the most before any further one."""
LONGEST_PULL = 60.0
"""The most seconds that the server holds a pull."""
SLOWEST_RATE = 16_384
"""Bytes per second that a connection must carry: a request may take its timeout, and its bytes at this rate."""

_CONNECTIONS = 2
"""One for most requests, and one for heartbeats while the first is busy with a long upload."""
_IDLE = 60.0  # seconds a connection is kept between two requests; servers keep it a little longer

T = TypeVar("T")
Reader = Callable[[aiohttp.ClientResponse], Awaitable[T]]


class Session:
    """Keeps one connection open between requests, opens it again when it breaks, and opens a second one when needed."""

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
        """Checks the arguments; `async with` opens the session, and nothing is sent before the first request.

        ca               the authority to trust: PEM text or its path; None: the system's authorities
        certificate, key the client's own, for servers that ask for one (mTLS): paths
        insecure         whether the URL of another machine may be http://, which sends the token unencrypted
        timeout          seconds to wait for the server within one request
        give_up          seconds without an answer after which a request is an error; None: never
        """
        where = address(url, insecure=insecure)
        self._base, self._token, self._proxy = url.rstrip("/"), token, _proxy(where)
        self._tls: ssl.SSLContext | bool = True
        if where.scheme == "https":
            self._tls = tls.client_context(pem_text(ca), certificate=_path(certificate), key=_path(key))
        self._without_certificate = where.scheme == "https" and certificate is None
        self._timeout, self._give_up = timeout, give_up
        self._http: aiohttp.ClientSession | None = None
        self._no_retries = asyncio.Event()
        self._hello: Hello | None = None
        self._version_vectors: tuple[int, dict[str, Vector]] | None = None

    def __repr__(self) -> str:
        return f"Session({self._base!r})"

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS, ssl=self._tls, keepalive_timeout=_IDLE),
            headers={"Authorization": f"Bearer {self._token}", "Accept-Encoding": "identity"},
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=CHUNK,
            trust_env=False,  # with True, aiohttp would also read passwords from ~/.netrc
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def stop_retrying(self) -> None:
        """Sends no request a second time from now on; one that waits for its next attempt fails at once."""
        self._no_retries.set()

    @property
    def federation(self) -> Hello:
        """The answer to the last hello."""
        if self._hello is None:
            raise InputError("the session has not said hello; call hello() first")
        return self._hello

    # -- requests ---------------------------------------------------------------------------------------------------

    async def hello(self) -> Hello:
        """Joins the federation, or, for a client that has joined, asks for the same description again."""
        # In another federation, or one restored from a backup, the same version may be another model.
        self._version_vectors = None
        return await self._say_hello()

    async def pull(self, wait: float = 30.0) -> Pulled | None:
        """A job, or None if there was none within `wait` seconds."""
        whole_seconds = math.ceil(min(max(0.0, wait), LONGEST_PULL))
        limit = whole_seconds + self._transfer_seconds(4 * self.federation.length)
        pulled = await self._request(
            "GET", f"/v1/job?wait={whole_seconds}", self._read_job_or_none, self._have_header(), limit=limit
        )
        before = self.federation
        if pulled is None or before.number is not None:
            return pulled
        # The client joined before the federation had begun, so its hello had no number, and `_read_job` put a 0 into
        # the job. Now that there are jobs, every client has a number: another hello asks for it.
        hello = await self._say_hello()
        if hello.number is None:
            raise protocol_error("a client with a job has no number")
        if hello.federation != before.federation:
            self._version_vectors = None
        return replace(pulled, job=replace(pulled.job, client=hello.number))

    async def push(self, update: EncodedUpdate, *, next: bool = False) -> Answer:
        """Sends an update until there is an answer; the server counts it once, however often it was sent."""
        have = self._have_header() if next else {}
        headers = {**update.head.headers(), **have, "Content-Length": str(update.nbytes)}
        path = f"/v1/jobs/{update.job}/update{'?next=1' if next else ''}"
        limit = self._transfer_seconds(update.nbytes + (4 * self.federation.length if next else 0))
        answer = await self._request("POST", path, self._read_answer, headers, update.vectors.values(), limit=limit)
        if answer.next is not None and answer.next.id == update.job:
            raise ProtocolError(f"the server gave job {update.job} a second time; this is a fault of the server")
        return answer

    async def heartbeat(self, job: int, *, patient: bool = True) -> float:
        """Prolongs the lease of a job; returns its length in seconds. `patient=False` makes one attempt only."""
        limit = min(self._timeout, max(1.0, self.federation.lease / 3))  # one that comes after the lease is of no use
        path = f"/v1/jobs/{job}/heartbeat"
        return seconds(await self._request("POST", path, read_json_object, limit=limit, patient=patient), "lease")

    async def decline(self, job: int, *, patient: bool = True) -> None:
        """Gives a job back; `patient=False` makes one attempt only."""
        await self._request("POST", f"/v1/jobs/{job}/decline", read_json_object, patient=patient)

    async def leave(self) -> None:
        """Leaves the federation for good."""
        await self._request("POST", "/v1/leave", read_json_object)

    # -- one request ------------------------------------------------------------------------------------------------

    async def _say_hello(self) -> Hello:
        self._hello = Hello.parse(await self._request("POST", "/v1/hello", read_json_object))
        return self._hello

    async def _request(
        self,
        method: str,
        path: str,
        read: Reader[T],
        headers: Mapping[str, str] | None = None,
        body: Iterable[wire.BytesLike] | None = None,
        *,
        limit: float | None = None,
        patient: bool = True,
    ) -> T:
        """Sends a request until there is an answer, which `read` reads; raises refusals."""
        loop = asyncio.get_running_loop()
        wait, begun, expect = FIRST_WAIT, loop.time(), False
        while True:
            try:
                return await self._attempt(method, path, read, headers, body, limit or self._timeout, expect)
            except Unavailable as error:
                pause = jittered(wait if error.after is None else error.after)
                spent = loop.time() - begun + pause
                if not patient or self._no_retries.is_set() or (self._give_up is not None and spent > self._give_up):
                    raise
                log.warning("%s; trying again in %.1f s", error, pause)
                if await self._stopped_within(pause):
                    raise
            wait = min(2 * wait, LONGEST_WAIT)
            expect = body is not None and not expect

    async def _attempt(
        self,
        method: str,
        path: str,
        read: Reader[T],
        headers: Mapping[str, str] | None,
        body: Iterable[wire.BytesLike] | None,
        limit: float,
        expect: bool,
    ) -> T:
        """One attempt.

        A server that has already taken the update does not read its body again, and may close the connection while the
        client still sends it. So every other attempt sends `Expect: 100-continue` (`expect`) and waits with the body;
        not every attempt, because some proxies never answer to that.
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
                    data=None if body is None else chunks(body),
                    expect100=expect,
                    allow_redirects=False,  # the token must go to no other server
                    proxy=self._proxy,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=limit),
                ) as response,
            ):
                if response.status not in (200, 204):
                    raise await error_of_response(response)
                return await read(response)
        except (aiohttp.ClientError, OSError) as error:
            # `from None`, because the cause may quote the headers, and with them the token.
            raise self._error_of(error) from None
        except wire.WireError as error:
            raise protocol_error(str(error)) from None

    def _error_of(self, error: Exception) -> AflockError:
        """The error for a failed attempt.

        A server that requires a client certificate closes the connection without a reason: the error only suggests it.
        """
        if self._hello is not None:
            return connection_error(error, self._base)
        found = first_connection_error(error, self._base)
        broke = isinstance(error, aiohttp.ClientConnectionError) and not isinstance(error, aiohttp.ClientConnectorError)
        if self._without_certificate and (broke or isinstance(error, ConnectionError)):
            return Unavailable(f"{found}; if the server requires client certificates, give certificate= and key=")
        return found

    async def _stopped_within(self, pause: float) -> bool:
        """Waits before the next attempt; true if `stop_retrying` was called meanwhile."""
        try:
            await asyncio.wait_for(self._no_retries.wait(), pause)
        except TimeoutError:
            return False
        return True

    def _transfer_seconds(self, nbytes: int) -> float:
        """How many seconds a request that transfers so many bytes may take."""
        return self._timeout + nbytes / SLOWEST_RATE

    # -- answers with vectors ---------------------------------------------------------------------------------------

    def _have_header(self) -> dict[str, str]:
        """The header that names the version whose vectors the client has, so that the server need not send them."""
        return {} if self._version_vectors is None else {wire.HAVE: str(self._version_vectors[0])}

    async def _read_job_or_none(self, response: aiohttp.ClientResponse) -> Pulled | None:
        return None if response.status == 204 else await self._read_job(response)

    async def _read_job(self, response: aiohttp.ClientResponse) -> Pulled:
        head = wire.JobHead.parse(response.headers)
        return Pulled.of(head, await self._job_vectors(response, head), self.federation.number or 0)

    async def _job_vectors(self, response: aiohttp.ClientResponse, head: wire.JobHead) -> dict[str, Vector]:
        """The vectors in the body; without a body, those the client has of the job's version."""
        if not head.vectors:
            await read_body(response, 0)
            if self._version_vectors is None or self._version_vectors[0] != head.version:
                raise protocol_error(f"the job of version {head.version} has no vectors")
            return self._version_vectors[1]
        vectors = await self._read_vectors(response, head.vectors, head.encoding)
        if not head.first:  # a first job has the model only, without the extra vectors of its version
            self._version_vectors = head.version, vectors
        return vectors

    async def _read_vectors(
        self, response: aiohttp.ClientResponse, names: tuple[str, ...], encoding: str
    ) -> dict[str, Vector]:
        length = self.federation.length
        body = await read_body(response, len(names) * wire.size(encoding, length))
        vectors = wire.split(body, names, encoding, length)
        for vector in vectors.values():
            vector.flags.writeable = False  # the next job of the same version gets the same memory
        return vectors

    async def _read_answer(self, response: aiohttp.ClientResponse) -> Answer:
        receipt, version = wire.parse_receipt(response.headers)
        if wire.JOB in response.headers:
            return Answer(receipt, version, await self._read_job(response))
        await read_json(response)  # the receipt again, as JSON; read so that the connection can be used again
        return Answer(receipt, version)


def jittered(pause: float) -> float:
    """The pause and up to half of it more, at random, so that clients that lost a server do not all return at once."""
    return pause * (1 + random.random() / 2)


def _proxy(where: SplitResult) -> str | None:
    """The proxy that the environment names for that server; None for this machine."""
    host = where.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(where.scheme)


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
