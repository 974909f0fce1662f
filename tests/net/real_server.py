"""A real `aflock serve` on loopback, for tests: a subprocess, its address, and a plain way to talk to it.

    with running(folder, {"model": {"name": "vector", "length": 8}, ...}) as server:    # a federation file as dicts
        token = invite(folder, "alice")
        peer = Peer(server, token)
        status, headers, body = peer.request("POST", "/v1/hello")

The port is any free one, the folder is made if it is not there, and the server is ended whatever happens. `start` and
`Server.stop`, `Server.kill` are for tests that end it themselves: a second `start` in the same folder goes on where the
first one was. What the server prints and logs is in `folder/../NAME.out` and `NAME.err`, appended over restarts.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from aflock import config
from aflock.net.identity import members, tls
from aflock.net.protocol import wire

Document = Mapping[str, Mapping[str, Any]]
Answered = tuple[int, dict[str, str], bytes]

PATIENCE = 60.0
"""Seconds a server may take to start or to stop, on a machine that has other things to do."""

SMALL: Document = {
    "strategy": {"name": "asgd"},
    "model": {"name": "vector", "length": 8},
    "federation": {"clients": 1},
}
"""A federation that starts quickly and takes its first client at once."""

ONES = np.ones(8, np.float32)
"""A vector for it."""


class NotStarted(Exception):
    """The server has ended instead of starting."""

    def __init__(self, code: int, errors: str) -> None:
        super().__init__(f"exit code {code}: {errors}")
        self.code, self.errors = code, errors


@dataclass
class Server:
    """One that runs, or has run."""

    folder: Path
    url: str
    process: subprocess.Popen[bytes]
    ca: str | None = None
    """The authority's certificate, PEM, where it speaks TLS and has an authority of its own."""
    context: ssl.SSLContext | None = None
    """How to talk to it, where that authority is not enough."""
    peers: list[Peer] = field(default_factory=list, repr=False)
    """Who has talked to it: `running` closes what they leave open."""

    @property
    def port(self) -> int:
        """Where it listens."""
        return urllib.parse.urlsplit(self.url).port or 0

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    @property
    def errors(self) -> str:
        """What it has written to stderr so far, its log included."""
        return output(self.folder, "err").read_text(encoding="utf-8", errors="replace")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Asks it to end, and waits; the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Ends it at once, as a loss of power would."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def status(self) -> dict[str, Any]:
        """/v1/status, of a server that shows it to anybody."""
        with Peer(self) as peer:
            status, _, body = peer.request("GET", "/v1/status")
        assert status == 200, (status, body)
        found: dict[str, Any] = json.loads(body)
        return found

    def memory(self) -> int:
        """Its resident bytes."""
        text = Path(f"/proc/{self.pid}/statm").read_text()
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def output(folder: Path, kind: str) -> Path:
    """Where a server's stdout ("out") or stderr ("err") goes."""
    return folder.with_name(f"{folder.name}.{kind}")


def start(
    folder: Path,
    document: Document = SMALL,
    *,
    tls: bool = False,
    changes: Sequence[str] = (),
    options: Sequence[str] = (),
    level: str = "info",
    largest_file: int | None = None,
    port: int = 0,
    context: ssl.SSLContext | None = None,
    program: Sequence[str] = ("-m", "aflock"),
) -> Server:
    """Starts a server and waits until it is ready; `NotStarted` if it ends instead.

    `changes` are "section.key=value"; `options` go to the command line as they are; `largest_file` is a limit on the
    size of files (a full disk, as far as the server can tell), to be lifted with `resource.prlimit`; `context` is how
    to talk to a server with certificates from elsewhere, or that asks for one; `program` is what Python runs.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder.with_name(f"{folder.name}.toml")
    file.write_text(config.text({key: dict(values) for key, values in document.items()}), encoding="utf-8")
    command = [sys.executable, *program, "serve", str(file), "--data-dir", str(folder), "--log-level", level]
    command += [f"--set={change}" for change in (f"server.port={port}", *changes)]
    command += [*([] if tls else ["--http"]), *options]
    with output(folder, "out").open("ab") as out, output(folder, "err").open("ab") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=_limiter(largest_file)
        )
    try:
        return _when_ready(folder, process, context)
    except BaseException:
        process.kill()
        process.wait()
        raise


@contextlib.contextmanager
def running(folder: Path, document: Document = SMALL, *, orderly: bool = True, **options: Any) -> Iterator[Server]:
    """A server for the length of a `with`; the arguments are those of `start`.

    Unless it was stopped before, it is asked to at the end, or killed where an `orderly` end is not worth its time.
    """
    server = start(folder, document, **options)
    try:
        yield server
    finally:
        for peer in server.peers:
            peer.connection.close()
        try:
            if orderly and server.process.poll() is None:
                server.stop()
        finally:
            server.kill()


served = functools.partial(running, orderly=False)
"""`running` for tests that do not need an orderly end: the server is killed, which is quicker."""


def invite(folder: Path, name: str, *, again: bool = False) -> str:
    """A token; the server notices by itself."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return members.invite(folder, name, again=again)


def _limiter(largest_file: int | None) -> Any:
    if largest_file is None:
        return None

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is an error, not the end
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))

    return limit


def _when_ready(folder: Path, process: subprocess.Popen[bytes], context: ssl.SSLContext | None) -> Server:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if process.poll() is not None:
            raise NotStarted(process.returncode, output(folder, "err").read_text(encoding="utf-8"))
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            found = json.loads((folder / "address.json").read_text(encoding="utf-8"))
            if found["pid"] == process.pid:
                authority = (folder / "tls" / "ca.pem").read_text() if found["ca"] else None
                server = Server(folder, found["url"], process, authority, context)
                with Peer(server) as peer:
                    if peer.request("GET", "/readyz")[0] == 200:
                        return server
        time.sleep(0.02)
    raise NotStarted(-1, "the server was not ready in time")


@dataclass(eq=False)
class Peer:
    """A client of few words over one connection that is kept: no retries, no memory but its token and job."""

    server: Server
    token: str | None = None
    timeout: float = 60.0
    context: ssl.SSLContext | None = None
    job: dict[str, str] = field(default_factory=dict)
    """The headers of the last job."""

    def __post_init__(self) -> None:
        self.connection = self._connect()
        self.server.peers.append(self)

    def _connect(self) -> http.client.HTTPConnection:
        if self.server.url.startswith("http://"):
            return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=self.timeout)
        context = self.context or self.server.context or tls.client_context(self.server.ca)
        return http.client.HTTPSConnection("127.0.0.1", self.server.port, timeout=self.timeout, context=context)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()
        self.server.peers.remove(self)

    def request(
        self, method: str, path: str, body: bytes | memoryview | None = None, headers: Mapping[str, str] | None = None
    ) -> Answered:
        """Status, headers (names in lower case) and body of the answer."""
        sent = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        self.connection.request(method, path, body, sent | dict(headers or {}))
        answer = self.connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()

    def hello(self) -> dict[str, Any]:
        """What the federation is; the client is a member then."""
        status, _, body = self.request("POST", "/v1/hello")
        assert status == 200, (status, body)
        found: dict[str, Any] = json.loads(body)
        return found

    def pull(self, wait: int = 0, headers: Mapping[str, str] | None = None) -> Answered:
        """A job, or why there is none; its headers are kept in `job`."""
        status, found, body = self.request("GET", f"/v1/job?wait={wait}", headers=headers)
        if status == 200:
            self.job = found
        return status, found, body

    def push(
        self,
        *vectors: npt.NDArray[Any],
        next: bool = False,
        names: str = "gradient",
        job: object = None,
        changed: Mapping[str, str] | None = None,
    ) -> Answered:
        """An update for the last job; what is `changed` ({"steps": "0"}, say) stands for what it would have."""
        encoding = self.job.get("aflock-encoding", "float32")
        body = b"".join(bytes(wire.encode(np.asarray(vector, np.float32), encoding)) for vector in vectors)
        headers = {
            "Aflock-Version": self.job["aflock-version"],
            "Aflock-Steps": "1",
            "Aflock-Examples": "10",
            "Aflock-Vectors": names,
            "Aflock-Encoding": encoding,
        }
        headers |= {f"Aflock-{name.capitalize()}": value for name, value in (changed or {}).items()}
        number = self.job["aflock-job"] if job is None else job
        path = f"/v1/jobs/{number}/update" + ("?next=1" if next else "")
        status, found, answer = self.request("POST", path, body, headers)
        if status == 200 and "aflock-job" in found:
            self.job = found
        return status, found, answer


class Wire:
    """A bare connection: bytes as they are, answers one by one."""

    def __init__(self, server: Server, *, timeout: float = 20.0, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        self.socket.connect(("127.0.0.1", server.port))
        self._come = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """All of it."""
        self.socket.sendall(data)

    def answer(self, *, bare: bool = False, pause: float = 0.0) -> Answered:
        """The next answer; `bare`: it has no body, whatever its headers say (HEAD); `pause` makes a slow reader."""
        while b"\r\n\r\n" not in self._come:
            self._more()
        head, _, self._come = self._come.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = 0 if bare else int(headers.get("content-length", "0"))
        while len(self._come) < length:
            self._more()
            time.sleep(pause)
        body, self._come = self._come[:length], self._come[length:]
        return int(first.split()[1]), headers, body

    def rest(self) -> bytes:
        """Everything until the other side ends the connection."""
        with contextlib.suppress(ConnectionError):
            while chunk := self.socket.recv(1 << 16):
                self._come += chunk
        return self._come

    def _more(self) -> None:
        chunk = self.socket.recv(1 << 16)
        if not chunk:
            raise EOFError(f"the connection ended after {self._come!r}")
        self._come += chunk


# --- what tests say often ---------------------------------------------------------------------------------------------


def joined(server: Server, name: str) -> Peer:
    """A client that has said hello."""
    peer = Peer(server, invite(server.folder, name))
    peer.hello()
    return peer


def working(server: Server, name: str) -> Peer:
    """A client that has a job."""
    peer = joined(server, name)
    assert peer.pull()[0] == 200
    return peer


def refusal(answered: Answered) -> tuple[int, str]:
    """Status and code of a refusal, which has the form of one."""
    status, headers, body = answered
    found = json.loads(body)
    assert set(found) == {"error", "code"}, found
    assert headers["content-type"] == "application/json"
    assert found["error"]
    if status in (429, 503):
        assert headers["retry-after"].isdecimal()
        assert int(headers["retry-after"]) >= 1
    return status, found["code"]


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def update_head(peer: Peer, length: int | str, more: bytes = b"") -> bytes:
    """An update for the client's job as far as its body, for a bare connection."""
    return (
        f"POST /v1/jobs/{peer.job['aflock-job']}/update HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {peer.token}\r\n"
        f"Aflock-Version: {peer.job['aflock-version']}\r\nAflock-Steps: 1\r\nAflock-Examples: 1\r\n"
        f"Aflock-Vectors: gradient\r\nContent-Length: {length}\r\n"
    ).encode() + more + b"\r\n"  # fmt: skip


def bearer(peer: Peer) -> bytes:
    """The client's token as a header, for a bare connection."""
    return f"Authorization: Bearer {peer.token}\r\n".encode()
