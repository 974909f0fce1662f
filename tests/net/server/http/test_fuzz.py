"""A hundred thousand hostile requests: none of them is granted, none of them hurts.

Most are HTTP with wrong contents (methods, paths, ids, tokens, headers, lengths, vectors), many at a time over
connections that are kept; the others are no HTTP at all, one to a connection. Everything comes from a seed:
AFLOCK_FUZZ is how many there are, AFLOCK_FUZZ_SEED another seed. `make fuzz` sends many more.
"""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.net.real_server import SMALL, Peer, Server, invite, running

REQUESTS = int(os.environ.get("AFLOCK_FUZZ", "100000"))
SEED = int(os.environ.get("AFLOCK_FUZZ_SEED", "20261116"))
THREADS = 4
TOGETHER = 12
"""Most requests that are sent at once; the server takes sixteen."""
GROWTH = 30 << 20

METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "LOCK", "M-SEARCH", "PURGE"]
PATHS = ["/", "/v1", "/v1/", "/v1/job", "/v1/hello", "/v1/leave", "/v1/model", "/v1/status", "/metrics", "/healthz",
         "/readyz", "/v1/jobs", "/v1/jobs/0/update", "/v1/jobs/1/heartbeat", "/v1/jobs/2/decline", "//v1/job", "*",
         "/v1/jobs/{n}/update", "/v1/jobs/{n}/heartbeat", "/v1/jobs/{n}/decline", "/v1/jobs/{s}/update", "/{s}",
         "/../../etc/passwd", "/%2e%2e/members.json", "/v1/model/../status", "/v1/hello%00", "/v1/%6aob",
         "http://x/v1/status", "/v1/jobs/%31/update"]  # fmt: skip
QUERIES = ["", "?", "?wait={n}", "?wait={s}", "?next=1", "?next={s}", "?wait=1&wait=2", "?%",
           "?a=1&b=2&c=3&d=4&e=5&f=6&g=7&h=8&i=9",
           "?%ff=%fe", "?wait=-1", "?wait=1e9", "?wait=0x10", "?{s}={s}&{s}"]  # fmt: skip
HEADERS = ["Aflock-Version", "Aflock-Steps", "Aflock-Examples", "Aflock-Vectors", "Aflock-Encoding", "Aflock-Have",
           "Aflock-Job", "If-None-Match", "Accept", "Cookie", "X-Forwarded-For", "Range", "Content-Type", "Host", "TE",
           "Content-Encoding", "Forwarded", "Upgrade-Insecure-Requests", "Aflock-First"]  # fmt: skip
VALUES = ["", "0", "1", "-1", "1.5", "1e99", "NaN", "inf", "9" * 17, "9" * 18, "9" * 19, "9" * 400, "0" * 5000,
          "gradient", "model", "gradient,gradient", "gradient,model", ",", "a" * 33, "float32", "float16", "int8",
          "float64",
          "\xb2\xb3", "\xff" * 20, "' OR 1=1 --", "${jndi:ldap://x}", "<script>", "../" * 30, "%s%n" * 20, "{s}", "{n}",
          "bytes=0-", '"0"', "\t", "a\tb", "=?utf-8?q?=00?="]  # fmt: skip
NUMBERS = [0, 1, 2, 3, 7, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 10**18 - 1, 10**18, 10**30]
NOISE = "abcxyz019 _-.,;:/\\\"'()[]{}<>|~`!@#$^&*=+\x7f\x80\xa0\xe9\xff"
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


class Enemy:
    """Makes requests and sends them, over connections of its own."""

    def __init__(self, port: int, seed: int, count: int, tokens: list[str], job: str) -> None:
        self._port, self._count, self._tokens, self._job = port, count, tokens, job
        self._draw = random.Random(seed)
        self.sent = 0
        self.unanswered = 0
        """How often a connection ended in the middle of requests that looked like some."""
        self.statuses: Counter[int] = Counter()
        self.found: list[str] = []
        """What must not be."""

    def run(self) -> None:
        """All of them; what goes wrong is kept."""
        try:
            while self.sent < self._count and not self.found:
                self._connection()
        except BaseException as error:
            self.found.append(f"after {self.sent} requests: {error!r}")
            raise

    def _connection(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), timeout=30) as line:
            if self._draw.random() < 0.3:
                self._talk_nonsense(line)
                return
            for _ in range(self._draw.randrange(1, 20)):
                if not self._talk(line):
                    return

    def _talk(self, line: socket.socket) -> bool:
        """Some requests at once, and all their answers; false if the connection is over."""
        made = [self._request() for _ in range(self._draw.randrange(1, TOGETHER + 1))]
        self.sent += len(made)
        line.sendall(b"".join(request for request, _ in made))
        come = b""
        for request, bare in made:
            while (found := _answer(come, bare)) is None:
                chunk = line.recv(1 << 16)
                if not chunk:  # the parser did not like it, and others were due
                    self.unanswered += 1
                    return False
                come += chunk
            status, closes, come = found
            self._seen(status, request)
            if closes:  # what comes after it is void
                return False
        if come:
            self._wrong(f"more answers than requests: {come[:200]!r}", made[-1][0])
        return True

    def _talk_nonsense(self, line: socket.socket) -> None:
        sent, self.sent = self._nonsense(), self.sent + 1
        try:
            line.sendall(sent)
            if self._draw.random() < 0.1:  # gone without a word
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            line.shutdown(socket.SHUT_WR)
            come = b""
            while chunk := line.recv(1 << 16):
                come += chunk
        except ConnectionError:
            return
        for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", come):
            self._seen(int(status), sent)

    def _seen(self, status: int, request: bytes) -> None:
        self.statuses[status] += 1
        if status >= 500:
            self._wrong(f"status {status}", request)

    def _wrong(self, what: str, request: bytes) -> None:
        self.found.append(f"seed {SEED}, {what}: {request[:500]!r}")

    # -- HTTP with wrong contents -----------------------------------------------------------------------------------

    def _request(self) -> tuple[bytes, bool]:
        """One that has an answer, and whether that has no body."""
        draw = self._draw
        kind = draw.random()
        if kind < 0.3:
            return self._update(), False
        method, path = draw.choice(METHODS), self._fill(draw.choice(PATHS))
        headers = [f"{draw.choice(HEADERS)}: {self._fill(draw.choice(VALUES))}" for _ in range(draw.randrange(5))]
        token = self._authorization(path)
        body = self._body()
        headers += [token] if token else []
        headers += [f"Content-Length: {len(body)}"] if body or draw.random() < 0.5 else []
        draw.shuffle(headers)
        first = f"{method} {path}{self._fill(draw.choice(QUERIES))} HTTP/1.1"
        return _head(first, headers) + body, method == "HEAD"

    def _update(self) -> bytes:
        """One that has something wrong with it, perhaps nothing but its numbers."""
        draw = self._draw
        body = self._vector()
        sent = {"Version": "0", "Steps": "1", "Examples": "10", "Vectors": "gradient", "Encoding": "float32"}
        for _ in range(draw.randrange(3)):
            name = draw.choice([*sent])
            if draw.random() < 0.3:
                del sent[name]
            else:
                sent[name] = self._fill(draw.choice(VALUES))
        headers = [f"Aflock-{name}: {value}" for name, value in sent.items()]
        headers += [f"Authorization: Bearer {draw.choice(self._tokens)}", f"Content-Length: {len(body)}"]
        job = self._job if draw.random() < 0.7 else self._fill("{n}")
        return _head(f"POST /v1/jobs/{job}/update{draw.choice(['', '?next=1'])} HTTP/1.1", headers) + body

    def _vector(self) -> bytes:
        """Of the right length and useless, or of a wrong one."""
        draw = self._draw
        if draw.random() < 0.5:
            values = np.ones(8, np.float32)
            values[draw.randrange(8)] = draw.choice([np.nan, np.inf, -np.inf, 3e38, -3e38])
            return values.tobytes()
        return draw.randbytes(draw.choice([0, 1, 4, 28, 31, 33, 36, 64, 96, 97, 128]))

    def _authorization(self, path: str) -> str:
        draw = self._draw
        kind = draw.random()
        if kind < 0.2:
            return ""
        scheme = draw.choice(["Bearer", "bearer", "Basic", "Digest", "", "Bearer Bearer", "Token"])
        if kind < 0.6:
            noise = "".join(draw.choices("abcXYZ0_-.", k=draw.choice([0, 1, 42, 43, 44, 300])))
            name = draw.choice(["mallory", "alice", "nobody", "", "A", "a" * 65, "..", "\xe9"])
            return f"Authorization: {scheme} {draw.choice(['aflock1', 'aflock2', ''])}.{name}.{noise}"
        if path.startswith(("/v1/leave", "/v1/job", "/v1/%6aob")):  # with the right token these would be granted
            return f"Authorization: {scheme} {self._fill('{s}')}"
        token = draw.choice(self._tokens)
        if kind < 0.8:
            at = draw.randrange(len(token))
            token = token[:at] + chr(33 + (ord(token[at]) - 32) % 90) + token[at + 1 :]
        return f"Authorization: Bearer {token}"

    def _body(self) -> bytes:
        return self._draw.randbytes(self._draw.choice([0, 0, 0, 1, 2, 32, 100, 1000]))

    def _fill(self, text: str) -> str:
        while "{n}" in text:
            text = text.replace("{n}", str(self._draw.choice(NUMBERS)), 1)
        while "{s}" in text:
            some = "".join(self._draw.choices(NOISE, k=self._draw.randrange(1, 20)))
            if "/" in text or "?" in text:  # a part of the first line
                some = re.sub(r"[^!-~]|[#{}]", "-", some)
            text = text.replace("{s}", some.strip().replace("{", "-"), 1)
        return text

    # -- no HTTP ----------------------------------------------------------------------------------------------------

    def _nonsense(self) -> bytes:
        draw = self._draw
        made: list[Any] = [
            lambda: draw.randbytes(draw.choice([1, 10, 100, 1000, 5000])),
            self._mutated,
            self._mutated,
            lambda: self._request()[0][: draw.randrange(1, 60)],
            lambda: b"POST /v1/hello HTTP/1.1\r\nContent-Length: %b\r\n\r\nx" % self._length(),
            lambda: b"GET /" + b"a" * draw.choice([2000, 2100, 9000]) + b" HTTP/1.1\r\n\r\n",
            lambda: b"GET / HTTP/1.1\r\n" + b"H: x\r\n" * draw.randrange(60, 200) + b"\r\n",
            lambda: b"GET / HTTP/1.1\r\nX: " + b"y" * draw.choice([16_000, 17_000, 40_000]) + b"\r\n\r\n",
            lambda: b"GET /healthz HTTP/%b\r\n\r\n" % draw.choice([b"0.9", b"1.0", b"1.2", b"2.0", b"11", b"", b"x"]),
            lambda: b"POST /v1/hello HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + self._chunks(),
            lambda: b"POST /v1/hello HTTP/1.1\r\nTransfer-Encoding: x\r\nContent-Length: 3\r\n\r\nabc",
            lambda: b"\r\n" * draw.randrange(1, 10_000),
            lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(200),
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(30),
            lambda: b"CONNECT %b HTTP/1.1\r\n\r\n" % draw.choice([b"x:1", b"x", b"", b"/", b"http://x:1/"]),
            lambda: b"GET /healthz HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n" + draw.randbytes(9),
            lambda: b"POST /v1/hello HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n",
            lambda: b"POST /v1/hello HTTP/1.1\r\nExpect: x\r\nContent-Length: 5\r\n\r\nhello",
            lambda: b"GET /healthz HTTP/1.1\r\nContent-Length: 1000000000000\r\n\r\n" + draw.randbytes(1000),
            lambda: b"GET /healthz HTTP/1.1\r\n\r\n" * draw.randrange(2, 300),
            lambda: b"GET /healthz HTTP/1.1\n\n" + b"GET\t/healthz\tHTTP/1.1\r\n\r\n",
        ]  # fmt: skip
        sent: bytes = draw.choice(made)()
        return sent

    def _mutated(self) -> bytes:
        draw, data = self._draw, bytearray(self._update())
        for _ in range(draw.randrange(1, 6)):
            at, kind = draw.randrange(len(data)), draw.random()
            if kind < 0.4:
                data[at] = draw.randrange(256)
            elif kind < 0.7:
                data[at:at] = draw.choice([b"\r\n", b"\0", b":", b" ", b"\xff", b"\r\n\r\n", b"\n", b"\t"])
            else:
                del data[at : at + draw.randrange(1, 5)]
        return bytes(data)

    def _length(self) -> bytes:
        return self._draw.choice(
            [b"", b"-1", b"+1", b"1 1", b"0x1", b"1,2", b"9" * 19, b"9" * 30, b"0" * 5000, b"1" * 18]
        )

    def _chunks(self) -> bytes:
        return self._draw.choice(
            [b"0\r\n\r\n", b"5\r\nhello\r\n", b"zz\r\n", b"f" * 17 + b"\r\n", b"0\r\nX: y\r\n\r\n", b""]
        )


def _head(first: str, headers: list[str]) -> bytes:
    return "\r\n".join([first, *headers, "", ""]).encode("latin-1")


def _answer(come: bytes, bare: bool) -> tuple[int, bool, bytes] | None:
    """The first answer: its status, whether the connection ends with it, and what comes after it."""
    found = ANSWER.match(come)
    if found is None:
        return None
    length = LENGTH.search(found[2])
    end = found.end() + (int(length[1]) if length and not bare else 0)
    if len(come) < end:
        return None
    return int(found[1]), b"connection: close" in found[2], come[end:]


def _state(server: Server) -> dict[str, Any]:
    """What must stay as it is."""
    found = server.status()
    kept = {
        key: found[key] for key in ("federation", "state", "version", "updates", "rejected", "dropped", "open_jobs")
    }
    clients = [
        {key: client[key] for key in ("name", "number", "state", "jobs", "updates")} for client in found["clients"]
    ]
    return kept | {"clients": clients}


def _attack(server: Server, count: int, seed: int, tokens: list[str], job: str) -> list[Enemy]:
    enemies = [Enemy(server.port, seed + k, count // THREADS, tokens, job) for k in range(THREADS)]
    threads = [threading.Thread(target=enemy.run) for enemy in enemies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for enemy in enemies:
        assert not enemy.found, enemy.found
    return enemies


def test_hostile_requests_change_nothing(tmp_path: Path) -> None:
    changes = ["server.rate=1e6", "federation.strikes=1000000000", "federation.max_norm=1e6"]
    with running(tmp_path / "fed", SMALL, changes=changes) as server:
        alice, mallory = (Peer(server, invite(server.folder, name)) for name in ("alice", "mallory"))
        alice.hello()
        mallory.hello()
        assert mallory.pull()[0] == 200
        tokens, job = [str(mallory.token), "aflock1.alice." + "x" * 43], mallory.job["aflock-job"]
        before = _state(server)
        _attack(server, REQUESTS // 10, SEED, tokens, job)  # whatever is loaded late is loaded now
        memory, begun = server.memory(), time.monotonic()
        enemies = _attack(server, REQUESTS, SEED + 100, tokens, job)
        seconds, growth = time.monotonic() - begun, server.memory() - memory
        statuses = sum((enemy.statuses for enemy in enemies), Counter[int]())
        sent = sum(enemy.sent for enemy in enemies)
        print(f"{sent} requests in {seconds:.1f} s, {growth / 1e6:.1f} MB, {dict(statuses)}")  # noqa: T201
        assert sent >= REQUESTS
        assert sum(enemy.unanswered for enemy in enemies) < 0.05 * sent
        assert sum(statuses.values()) > 0.8 * sent
        assert {400, 401, 404, 405, 409, 411, 413, 422, 431} <= set(statuses)
        assert growth < GROWTH
        assert server.process.poll() is None
        with Peer(server) as anybody:
            assert anybody.request("GET", "/healthz")[::2] == (200, b"ok\n")
            assert anybody.request("GET", "/readyz")[0] == 200
        assert _state(server) == before
        for peer in (Peer(server, alice.token), Peer(server, mallory.token)):
            assert peer.pull()[0] == 200
            assert peer.push(np.ones(8, np.float32))[0] == 200
        assert server.status()["version"] == before["version"] + 2
        assert server.stop() == 0
        assert "Traceback" not in server.errors
        assert "rror" not in server.errors, server.errors
