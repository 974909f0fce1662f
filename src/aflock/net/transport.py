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
import hashlib
import http.client
import ipaddress
import json
import logging
import math
import random
import re
import ssl
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import SplitResult, urlsplit

import aiohttp
import numpy as np

from ..errors import AflockError, InputError, ParameterError
from ..types import Job, Receipt, Vector
from . import tls, wire
from .keep import Parcel
from .refusals import Refused
from .wire import Buffer, JobHead, WireError

log = logging.getLogger("aflock.client")

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second attempt, and at most before any."""
LONGEST_PULL = 60.0
"""The most seconds the server lets a pull wait."""
SLOWEST = 16_384
"""Bytes per second a line must carry: a request may take its timeout, and this for its bodies."""

_PIECE = 1 << 18  # what is handed to the socket at a time: more would be copied
_IDLE = 60.0  # seconds a connection is kept between two requests; servers keep it a little longer
_LONGEST_JSON = 1 << 20
_LONGEST_SENTENCE = 300
_LONGEST_RETRY = 3600.0
_FEDERATION = re.compile(r"[A-Za-z0-9_-]{1,64}")  # it becomes the name of a folder
_LATER = (408, 429)
_VOID = (409, 422)
_ENDED = 410
_HOPELESS = ("CERTIFICATE", "ALERT", "VERSION", "HTTP_REQUEST")
"""What the reason of a TLS error holds if it would be the same the next time."""

T = TypeVar("T")
Reader = Callable[[aiohttp.ClientResponse], Awaitable[T]]


class Unavailable(AflockError):
    """No answer, or "not now"; `after` is how many seconds the server asks to wait."""

    def __init__(self, text: str, after: float | None = None) -> None:
        super().__init__(text)
        self.after = after


class Untrusted(AflockError):
    """The server cannot show that it is the one it should be, or does not take this client's certificate."""


class Nonsense(AflockError):
    """The server says something that is not of the protocol."""


def is_void(error: Refused) -> bool:
    """Whether a refusal means that the job is lost, and nothing worse."""
    return error.status in _VOID


def is_end(error: Refused) -> bool:
    """Whether a refusal means that the federation has ended."""
    return error.status == _ENDED


# --- what comes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """What the federation is and what it asks of a client; a `number` is given once enough clients have come."""

    federation: str
    name: str
    number: int | None
    state: str
    strategy: str
    needs: tuple[str, ...]
    changes: tuple[str, ...]
    length: int
    encoding: str
    version: int
    local: Mapping[str, Any]
    steps: int
    batch: int
    lease: float


@dataclass(frozen=True, slots=True)
class Pulled:
    """A job, how many the client had before it, and how stale its last update was."""

    job: Job
    id: int
    number: int
    delay: int
    encoding: str

    def pack(self, vectors: Mapping[str, Vector], steps: int, examples: int) -> Parcel:
        """The answer to it, ready to be pushed; where the encoding needs no other bytes, the vectors' own memory."""
        encoded: dict[str, Buffer] = {name: wire.encode(vector, self.encoding) for name, vector in vectors.items()}
        return Parcel(self.id, self.job.version, steps, examples, self.encoding, encoded)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an update, the server's version then, and the next job if one was asked for and there is one."""

    receipt: Receipt
    version: int
    next: Pulled | None = None


# --- where the server is ---------------------------------------------------------------------------------------------


def address(url: str, *, insecure: bool = False, secret: bool = True) -> SplitResult:
    """A server's URL; one over which a `secret` would travel unencrypted, to another machine, is refused."""
    try:
        found = urlsplit(url)
        port = found.port
    except (ValueError, AttributeError, TypeError):
        found, port = SplitResult("", "", "", "", ""), 0
    if found.scheme not in ("http", "https") or not found.hostname or port == 0:
        raise ParameterError(f"the URL {url!r} is not valid; expected one like https://host:8443")
    if found.username or found.password or found.query or found.fragment:
        raise ParameterError("the URL holds more than a server's address; expected one like https://host:8443")
    if secret and found.scheme == "http" and not insecure and not is_loopback(found.hostname):
        raise ParameterError(f"{url} would send the token unencrypted; use https://, or say insecure=True")
    return found


def is_loopback(host: str) -> bool:
    """Whether the host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def pem_text(ca: str | Path | None) -> str | None:
    """An authority's certificate, given as PEM text or as the path of a file with it."""
    if ca is None or (isinstance(ca, str) and "-----BEGIN" in ca):
        return ca
    try:
        return Path(ca).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"the certificate {ca} cannot be read ({error}); expected PEM text or its path") from None


def _proxy(where: SplitResult) -> str | None:
    """The environment's proxy for that server; this machine is reached without one."""
    host = where.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(where.scheme)


# --- the line --------------------------------------------------------------------------------------------------------


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
        own = None if certificate is None else Path(certificate), None if key is None else Path(key)
        self._tls: ssl.SSLContext | bool = True
        if where.scheme == "https":
            self._tls = tls.client_context(pem_text(ca), certificate=own[0], key=own[1])
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
            read_bufsize=_PIECE,
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
        self._hello = _hello(await self._ask("POST", "/v1/hello", _document))
        return self._hello

    async def pull(self, wait: float = 30.0) -> Pulled | None:
        """A job, or None if there was none within `wait` seconds."""
        whole = math.ceil(min(max(0.0, wait), LONGEST_PULL))
        have = {} if self._held is None else {wire.HAVE: str(self._held[0])}
        seconds = whole + self._transfer(4 * self.federation.length)
        pulled = await self._ask("GET", f"/v1/job?wait={whole}", self._maybe_job, have, seconds=seconds)
        if pulled is None or self.federation.number is not None:
            return pulled
        if (number := (await self.hello()).number) is None:
            raise _nonsense("a client that has a job has no number")
        return replace(pulled, job=replace(pulled.job, client=number))

    async def push(self, parcel: Parcel, *, next: bool = False) -> Answer:
        """Sends an update until there is an answer; it counts once however often it was sent."""
        have = {} if self._held is None or not next else {wire.HAVE: str(self._held[0])}
        headers = {**parcel.head.headers(), **have, "Content-Length": str(parcel.nbytes)}
        path = f"/v1/jobs/{parcel.job}/update{'?next=1' if next else ''}"
        seconds = self._transfer(parcel.nbytes + (4 * self.federation.length if next else 0))
        answer = await self._ask("POST", path, self._answer, headers, parcel.vectors.values(), seconds=seconds)
        if answer.next is not None and answer.next.id == parcel.job:
            raise Nonsense(f"the server gives job {parcel.job} a second time; it must be mended")
        return answer

    async def heartbeat(self, job: int, *, patient: bool = True) -> float:
        """Says that the job is being worked on; how long the lease is from now on."""
        seconds = min(self._timeout, max(1.0, self.federation.lease / 3))  # a late one is of no use
        path = f"/v1/jobs/{job}/heartbeat"
        return _seconds(await self._ask("POST", path, _document, seconds=seconds, patient=patient), "lease")

    async def decline(self, job: int, *, patient: bool = True) -> None:
        """Gives a job back."""
        await self._ask("POST", f"/v1/jobs/{job}/decline", _document, patient=patient)

    async def leave(self) -> None:
        """Leaves the federation for good."""
        await self._ask("POST", "/v1/leave", _document)

    async def model(self, have: int | None = None) -> tuple[int, Vector] | None:
        """The current version and its model; None if it is the version the client has."""
        headers = {} if have is None else {"If-None-Match": f'"{have}"'}
        seconds = self._transfer(4 * self.federation.length)
        return await self._ask("GET", "/v1/model", self._model, headers, seconds=seconds)

    async def status(self) -> dict[str, Any]:
        """The federation in numbers."""
        return await self._ask("GET", "/v1/status", _document)

    # -- one request ------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        method: str,
        path: str,
        read: Reader[T],
        headers: Mapping[str, str] | None = None,
        body: Iterable[Buffer] | None = None,
        *,
        seconds: float | None = None,
        patient: bool = True,
    ) -> T:
        """Asks until there is an answer; refusals are raised."""
        loop = asyncio.get_running_loop()
        wait, begun, expect = FIRST_WAIT, loop.time(), False
        while True:
            try:
                return await self._once(method, path, read, headers, body, seconds or self._timeout, expect)
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
        body: Iterable[Buffer] | None,
        seconds: float,
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
                asyncio.timeout(seconds),
                self._http.request(
                    method,
                    self._base + path,
                    headers=headers,
                    data=None if body is None else _pieces(body),
                    expect100=expect,
                    allow_redirects=False,  # the token is for this server
                    proxy=self._proxy,
                    timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeout, sock_read=seconds),
                ) as response,
            ):
                if response.status not in (200, 204, 304):
                    raise await _complaint(response)
                return await read(response)
        except (aiohttp.ClientError, OSError) as error:  # without its chain: it may quote the headers we sent
            raise self._trouble(error) from None
        except WireError as error:
            raise _nonsense(str(error)) from None

    def _trouble(self, error: Exception) -> AflockError:
        """What went wrong; a server that misses a certificate just hangs up, so that is guessed."""
        trouble = _trouble(error, self._base)
        if self._anonymous and self._hello is None and isinstance(error, aiohttp.ServerDisconnectedError):
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

    async def _maybe_job(self, response: aiohttp.ClientResponse) -> Pulled | None:
        return None if response.status == 204 else await self._job(response)

    async def _job(self, response: aiohttp.ClientResponse) -> Pulled:
        head = JobHead.parse(response.headers)
        vectors = await self._vectors(response, head)
        if "model" not in vectors:
            raise _nonsense("a job comes without a model")
        extras = {} if head.first else {name: vector for name, vector in vectors.items() if name != "model"}
        job = Job(self.federation.number or 0, head.version, vectors["model"], extras, head.first, head.job)
        return Pulled(job, head.job, head.number, head.staleness, head.encoding)

    async def _vectors(self, response: aiohttp.ClientResponse, head: JobHead) -> dict[str, Vector]:
        """Those in the body; if it is empty, those of the version the client said it has."""
        if not head.vectors:
            await _fill(response, 0)
            if self._held is None or self._held[0] != head.version:
                raise _nonsense(f"a job of version {head.version} comes without its vectors")
            return self._held[1]
        vectors = await self._read(response, head.vectors, head.encoding)
        if not head.first:  # a first job carries the model alone, not all there is of its version
            self._held = head.version, vectors
        return vectors

    async def _read(self, response: aiohttp.ClientResponse, names: tuple[str, ...], encoding: str) -> dict[str, Vector]:
        length = self.federation.length
        body = await _fill(response, len(names) * wire.size(encoding, length))
        vectors = wire.split(body, names, encoding, length)
        for vector in vectors.values():
            vector.flags.writeable = False  # it may be handed out again
        return vectors

    async def _answer(self, response: aiohttp.ClientResponse) -> Answer:
        receipt, version = wire.parse_receipt(response.headers)
        if wire.JOB in response.headers:
            return Answer(receipt, version, await self._job(response))
        await _json(response)  # says the same once more; read so that the connection can be used again
        return Answer(receipt, version)

    async def _model(self, response: aiohttp.ClientResponse) -> tuple[int, Vector] | None:
        if response.status == 304:
            return None
        version, encoding = wire.number(response.headers, wire.VERSION), wire.encoding(response.headers)
        return version, (await self._read(response, ("model",), encoding))["model"]


def jittered(pause: float) -> float:
    """A pause, and up to half of it more: clients that were cut off together do not come back together."""
    return pause * (1 + random.random() / 2)


# --- bodies ----------------------------------------------------------------------------------------------------------


async def _pieces(body: Iterable[Buffer]) -> AsyncIterator[memoryview]:
    for vector in body:
        view = memoryview(vector).cast("B")
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]


async def _fill(response: aiohttp.ClientResponse, size: int) -> memoryview:
    """A body of exactly that length, in memory that was asked for once."""
    announced = response.content_length
    if announced is not None and announced != size:
        raise _nonsense(f"a body of {announced} bytes comes where {size} are due")
    view, at = np.empty(size, np.uint8).data, 0
    async for piece in response.content.iter_any():
        end = at + len(piece)
        if end > size:
            raise _nonsense(f"a body comes with more than the {size} bytes that are due")
        view[at:end] = piece
        at = end
    if at < size:
        raise _nonsense(f"a body of {at} bytes comes where {size} are due")
    return view


async def _json(response: aiohttp.ClientResponse) -> Any:
    raw = bytearray()
    async for piece in response.content.iter_any():
        raw += piece
        if len(raw) > _LONGEST_JSON:
            raise _nonsense("a JSON document comes without end")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise _nonsense("what should be JSON is none") from None


async def _document(response: aiohttp.ClientResponse) -> dict[str, Any]:
    found = await _json(response)
    if not isinstance(found, dict):
        raise _nonsense("what should be a JSON object is none")
    return found


# --- what goes wrong -------------------------------------------------------------------------------------------------


async def _complaint(response: aiohttp.ClientResponse) -> AflockError:
    """The error that an answer other than success is."""
    status = response.status
    if status < 400:
        return _nonsense(f"the answer is HTTP {status}")
    try:
        said = await _document(response)
    except Nonsense:  # somebody between us and the server
        said = {}
    return complaint(status, said, response.headers.get("Retry-After"))


def complaint(status: int, said: Mapping[str, Any], retry_after: str | None) -> AflockError:
    """The error for a status and the JSON that came with it."""
    sentence = printable(said.get("error")) or f"the server answers with HTTP {status}"
    if status in _LATER or status >= 500:
        return Unavailable(sentence, _retry_after(retry_after))
    return Refused(status, printable(said.get("code")), sentence)


def printable(text: object) -> str:
    """What a stranger says, fit for a terminal."""
    if not isinstance(text, str):
        return ""
    return "".join(c if c.isprintable() else " " for c in text[:_LONGEST_SENTENCE])


def _retry_after(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return min(seconds, _LONGEST_RETRY) if seconds >= 0 else None


def _trouble(error: Exception, base: str) -> AflockError:
    """What a failed connection means: the same again in a while, or not."""
    if isinstance(error, TimeoutError):
        return Unavailable(f"{base} does not answer in time")
    reason = getattr(getattr(error, "os_error", error), "reason", None)
    final = isinstance(reason, str) and any(word in reason.upper() for word in _HOPELESS)
    if isinstance(error, ssl.SSLCertVerificationError) or (isinstance(error, ssl.SSLError) and final):
        return Untrusted(
            f"no trust between this client and {base} ({error}); check the URL, the ca and the certificate"
        )
    return Unavailable(f"no answer from {base}: {_reason(error)}")


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "the connection could not be made"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "it was cut off"
    if isinstance(error, aiohttp.ClientConnectionError | ConnectionError):
        return "the connection broke"
    return printable(str(error)) or type(error).__name__


def _nonsense(what: str) -> Nonsense:
    return Nonsense(f"the server does not follow protocol {wire.PROTOCOL}: {what}; check the URL and its version")


# --- hello -----------------------------------------------------------------------------------------------------------


def _hello(said: Mapping[str, Any]) -> Hello:
    if said.get("protocol") != wire.PROTOCOL:
        spoken = printable(str(said.get("protocol")))
        raise Nonsense(f"the server speaks protocol {spoken}, this client {wire.PROTOCOL}; install the same version")
    federation, local = _text(said, "federation"), said.get("local")
    if not _FEDERATION.fullmatch(federation):
        raise _nonsense("the name of the federation is none")
    if not isinstance(local, dict) or not isinstance(local.get("name"), str):
        raise _nonsense("`local` names no rule")
    needs, changes = _names(said, "needs"), _names(said, "changes")
    if not needs or not set(changes) <= set(needs):
        raise _nonsense("`needs` and `changes` do not fit together")
    if said.get("encoding") not in wire.ENCODINGS:
        raise _nonsense(f"`encoding` is none of {', '.join(wire.ENCODINGS)}")
    return Hello(
        federation,
        _text(said, "name"),
        None if said.get("number") is None else _count(said, "number", 0),
        _text(said, "state"),
        _text(said, "strategy"),
        needs,
        changes,
        _count(said, "length", 1),
        said["encoding"],
        _count(said, "version", 0),
        local,
        _count(said, "steps", 1),
        _count(said, "batch", 1),
        _seconds(said, "lease"),
    )


def _text(said: Mapping[str, Any], name: str) -> str:
    if not isinstance(said.get(name), str):
        raise _nonsense(f"`{name}` is not a text")
    return printable(said[name])


def _count(said: Mapping[str, Any], name: str, least: int) -> int:
    value = said.get(name)
    if type(value) is not int or not least <= value < 2**53:
        raise _nonsense(f"`{name}` is not a whole number of at least {least}")
    return value


def _seconds(said: Mapping[str, Any], name: str) -> float:
    value: Any = said.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise _nonsense(f"`{name}` is not a positive number")
    return float(value)


def _names(said: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = said.get(name)
    if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
        raise _nonsense(f"`{name}` is not a list of names")
    try:
        return wire.names({wire.VECTORS: ",".join(value)})
    except WireError:
        raise _nonsense(f"`{name}` is not a list of names") from None


# --- the status, for whoever asks ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Look:
    """What one request without a token has found."""

    document: dict[str, Any] = field(default_factory=dict)
    certificate: str | None = None


def status(
    url: str, *, ca: str | Path | None = None, fingerprint: str | None = None, timeout: float = 10.0
) -> dict[str, Any]:
    """The federation in numbers, without a token.

    `verified` says whether the server has proved who it is: by an authority (`ca`, or one the system trusts), or by the
    `fingerprint` of its certificate. Without any of them it is asked all the same: there is no secret to lose.
    `certificate` is the SHA-256 of the one it showed.
    """
    where = address(url, secret=False)
    if where.scheme == "http":
        return {**_look(where, None, None, timeout).document, "certificate": None, "verified": False}
    if ca is None and fingerprint is not None:
        look, verified = _look(where, _trusting(), fingerprint, timeout), True
    else:
        look, verified = _verified_look(where, pem_text(ca), fingerprint, timeout)
    return {**look.document, "certificate": look.certificate, "verified": verified}


def _verified_look(where: SplitResult, ca: str | None, fingerprint: str | None, timeout: float) -> tuple[_Look, bool]:
    try:
        return _look(where, tls.client_context(ca), fingerprint, timeout), True
    except ssl.SSLCertVerificationError as error:
        if ca is not None:
            raise Untrusted(f"the certificate of {where.netloc} is not of that authority ({error.reason})") from None
        return _look(where, _trusting(), fingerprint, timeout), False


def _trusting() -> ssl.SSLContext:
    """Takes any certificate: for looking at it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _look(where: SplitResult, context: ssl.SSLContext | None, fingerprint: str | None, timeout: float) -> _Look:
    line = _line(where, context, timeout)
    try:
        line.connect()
        shown = _shown(line)
        if fingerprint is not None and _plain(shown) != _plain(fingerprint):
            raise Untrusted(f"{where.netloc} shows the certificate {shown}; expected {fingerprint}")
        line.request("GET", f"{where.path.rstrip('/')}/v1/status")
        answer = line.getresponse()
        found = _loaded(answer.read(_LONGEST_JSON))
    except ssl.SSLCertVerificationError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise _trouble(error, f"{where.scheme}://{where.netloc}") from None
    finally:
        line.close()
    if answer.status != 200:
        raise complaint(answer.status, found, answer.getheader("Retry-After"))
    return _Look(found, shown)


def _line(where: SplitResult, context: ssl.SSLContext | None, timeout: float) -> http.client.HTTPConnection:
    host = where.hostname or ""
    if context is None:
        return http.client.HTTPConnection(host, where.port, timeout=timeout)
    return http.client.HTTPSConnection(host, where.port, timeout=timeout, context=context)


def _shown(line: http.client.HTTPConnection) -> str | None:
    """The fingerprint of the certificate the other side has shown, as openssl writes it."""
    if not isinstance(line.sock, ssl.SSLSocket):
        return None
    return hashlib.sha256(line.sock.getpeercert(binary_form=True) or b"").digest().hex(":").upper()


def _plain(fingerprint: str | None) -> str:
    return (fingerprint or "").replace(":", "").strip().lower()


def _loaded(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _nonsense("what should be a JSON object is none")
    return found
