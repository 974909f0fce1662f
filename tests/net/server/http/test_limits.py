"""The server against those who are slow, loud, rude or many: HTTP itself, and the limits in docs/protocol.md."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import aiohttp
import numpy as np
import pytest

from tests.net.real_server import (
    ONES,
    SMALL,
    Peer,
    Server,
    Wire,
    bearer,
    joined,
    refusal,
    served,
    update_head,
    working,
)

# --- HTTP itself -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", (400, "malformed")),
        (b"hello\r\n\r\n", (400, "malformed")),
        (b"GET / HTTP/9.9\r\n\r\n", (400, "malformed")),
        (b"GET /%zz\xff HTTP/1.1\r\n\r\n", (400, "malformed")),
        (b"GET /healthz HTTP/1.1\r\nbroken\r\n\r\n", (400, "malformed")),
        (b"GET /healthz HTTP/1.1\r\nContent-Length: -5\r\n\r\n", (400, "malformed")),
        (b"GET /healthz HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", (400, "malformed")),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, "malformed")),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\n", (400, "malformed")),
        (b"GET http://x HTTP/1.1\r\n\r\n", (400, "malformed")),
        (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n\r\n", (431, "headers")),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", (431, "headers")),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 100 + b"\r\n", (431, "headers")),
        (b"GET / HTTP/1.1\r\n" + (b"X: " + b"a" * 900 + b"\r\n") * 20 + b"\r\n", (431, "headers")),
        (b"\r\n" * 9000, (431, "headers")),
    ],
)
def test_what_is_not_http(shared: Server, sent: bytes, expected: tuple[int, str]) -> None:
    with Wire(shared) as wire_:
        wire_.send(sent)
        answered = wire_.answer()
        assert refusal(answered) == expected
        assert answered[1]["connection"] == "close"
        assert wire_.rest() == b""


def test_headers_without_an_end_in_many_pieces(shared: Server) -> None:
    with Wire(shared) as wire_:
        wire_.send(b"GET /healthz HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                wire_.send(b"a" * 1000)
                time.sleep(0.002)
        assert refusal(wire_.answer()) == (431, "headers")


def test_requests_one_after_the_other_without_waiting(shared: Server) -> None:
    health, ready = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"
    with Wire(shared) as wire_:
        wire_.send(health + ready + b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello" + health)
        assert [wire_.answer()[::2] for _ in range(2)] == [(200, b"ok\n"), (200, b"ready\n")]
        assert refusal(wire_.answer()) == (405, "method")
        assert wire_.answer()[::2] == (200, b"ok\n")
        wire_.send(health * 2 + b"nonsense\r\n\r\n")  # answered in order; the nonsense ends it
        assert [wire_.answer()[0] for _ in range(2)] == [200, 200]
        wire_.rest()
    with Wire(shared) as wire_:
        wire_.send(health * 1000)
        assert 16 <= wire_.rest().count(b"HTTP/1.1 200") < 1000


def test_old_and_other_protocols(shared: Server) -> None:
    with Wire(shared) as wire_:
        wire_.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert wire_.rest().endswith(b"ok\n")
    with Wire(shared) as wire_:
        wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert wire_.rest().endswith(b"ok\n")
    with Wire(shared) as wire_:
        wire_.send(b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert wire_.answer(bare=True)[0] == 405
        wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert wire_.answer()[0] == 200
    for upgrade in (b"h2c", b"websocket"):
        with Wire(shared) as wire_:
            wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: " + upgrade + b"\r\n\r\n")
            assert wire_.answer()[::2] == (200, b"ok\n")
            assert wire_.rest() == b""


def test_a_client_may_ask_before_it_sends_the_body(shared: Server) -> None:
    with working(shared, "cautious") as peer, Wire(shared) as wire_:
        wire_.send(update_head(peer, 32, b"Expect: 100-continue\r\n"))
        assert wire_.answer()[0] == 100
        wire_.send(ONES.tobytes())
        status, headers, _ = wire_.answer()
        assert (status, headers["aflock-outcome"]) == (200, "applied")
        wire_.send(update_head(peer, 32, b"Expect: 100-continue\r\n"))  # again: the receipt; no body is wanted
        status, headers, _ = wire_.answer()
        assert (status, headers["aflock-outcome"], headers["connection"]) == (200, "applied", "close")
        assert wire_.rest() == b""


@pytest.mark.parametrize("token", [True, False])
def test_the_answer_to_a_large_body_that_is_not_wanted_arrives(shared: Server, token: bool) -> None:
    with working(shared, f"large-{token}".lower()) as peer:
        if not token:
            peer.token = None
        before = shared.memory()
        answered = peer.request("POST", "/v1/jobs/123/update", bytes(20 << 20))  # http.client sends all of it first
        assert answered[0] == (413 if token else 401)
        assert answered[1]["connection"] == "close"
        assert shared.memory() - before < 10 << 20
    with Peer(shared) as other:
        assert other.request("GET", "/healthz")[0] == 200


def test_a_short_body_that_is_not_wanted_does_not_end_the_connection(shared: Server) -> None:
    with Wire(shared) as wire_:
        wire_.send(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n" + b"GET / HTTP/1.1\r\n" * 100)
        assert refusal(wire_.answer()) == (404, "path")
        wire_.send(bytes(60_000 - 1600))
        wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert wire_.answer()[::2] == (200, b"ok\n")


def test_answers_without_a_body_describe_none(shared: Server) -> None:
    async def ask(token: str) -> None:
        async with aiohttp.ClientSession(shared.url, headers={"Authorization": f"Bearer {token}"}) as session:
            for _ in range(3):  # over the same connection
                async with session.get("/v1/model") as model:
                    tag = model.headers["ETag"]
                    assert len(await model.read()) == 32
                async with session.get("/v1/model", headers={"If-None-Match": tag}) as same:
                    assert (same.status, await same.read()) == (304, b"")
                    assert not {"Content-Length", "Content-Type", "Transfer-Encoding"} & set(same.headers)

    with joined(shared, "aio") as peer:
        assert peer.token is not None
        asyncio.run(ask(peer.token))


def test_what_is_cut_off_changes_nothing(shared: Server) -> None:
    with working(shared, "cutter") as peer:
        before = shared.status()
        head = update_head(peer, 32)
        for cut in (head[:10], head[:-2], head, head + bytes(31)):
            with Wire(shared) as wire_:
                wire_.send(cut)
        with Wire(shared) as wire_:  # and one that is reset
            wire_.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            wire_.send(head + bytes(31))
        time.sleep(0.2)
        after = shared.status()
        assert (after["updates"], after["version"]) == (before["updates"], before["version"])
        assert peer.push(ONES)[0] == 200


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of little patience, with a large model."""
    document = {**SMALL, "model": {"name": "vector", "length": 8_000_000}}
    changes = ["server.idle=1.0", "server.lease=2.0", "server.connections=40", "server.rate=20.0"]
    with served(tmp_path_factory.mktemp("strict") / "fed", document, changes=changes) as server:
        yield server
        assert "Traceback" not in server.errors


def test_silence_ends_a_connection(strict: Server) -> None:
    sent = [b"", b"G", b"GET /healthz HTTP/1.1\r\n", b"GET /healthz HTTP/1.1\r\nX: y", b"\r\n"]
    health = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    sent += [health, health + b"\r\n", health + b"GET /he"]
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(strict)) for _ in sent]
        begun = time.monotonic()
        for wire_, some in zip(wires, sent, strict=True):
            wire_.send(some)
        ends = [wire_.rest() for wire_ in wires]
        assert time.monotonic() - begun < 5
    for some, end in zip(sent, ends, strict=True):
        assert end.count(b" 200 OK") == some.count(health)
        begun_one = some.removeprefix(health)
        assert (b" 408 " in end) == (begun_one not in (b"", b"\r\n") or some == b"\r\n"), (some, end)


def test_drop_by_drop_is_too_slow(strict: Server) -> None:
    with Wire(strict) as wire_:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for letter in b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 20:
                wire_.send(bytes([letter]))
                time.sleep(0.05)
        assert b" 408 " in wire_.rest()
        assert time.monotonic() - begun < 10
    with Wire(strict) as wire_:  # empty lines are no sign of life
        wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert wire_.answer()[0] == 200
        for _ in range(10):
            wire_.send(b"\r\n")
            time.sleep(0.2)
        begun = time.monotonic()
        assert b" 408 " in wire_.rest()
        assert time.monotonic() - begun < 3


def test_a_body_that_does_not_come_blocks_nobody(strict: Server) -> None:
    """There is memory for three bodies of 32 MB; the fourth waits."""
    peers = [working(strict, f"slow{k}") for k in range(4)]
    with contextlib.ExitStack() as stack:
        for peer in peers[:3]:
            stack.enter_context(Wire(strict)).send(update_head(peer, 32_000_000) + b"x")
        body = stack.enter_context(Wire(strict))
        begun = time.monotonic()
        body.send(b"POST /v1/hello HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n" + bearer(peers[0]) + b"\r\nx")
        for _ in range(10):  # others are not held up
            with Peer(strict) as other:
                assert other.request("GET", "/healthz")[0] == 200
        assert time.monotonic() - begun < 3
        last = peers[3]
        last.connection.close()
        for peer in peers:  # leases are short here
            threading.Thread(target=_keep_alive, args=(strict, peer, 14), daemon=True).start()
        assert last.push(np.ones(8_000_000))[0] == 200
        assert 5 < time.monotonic() - begun < 25
        assert refusal(body.answer()) == (408, "slow")


def _keep_alive(server: Server, peer: Peer, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError), Peer(server, peer.token) as twin:
            twin.request("POST", f"/v1/jobs/{peer.job['aflock-job']}/heartbeat")
        time.sleep(0.5)


def test_who_does_not_read_the_answer_is_cut_off(strict: Server) -> None:
    with joined(strict, "reader") as peer, Wire(strict, receive_buffer=4096) as wire_:
        before = strict.memory()
        wire_.send(b"GET /v1/model HTTP/1.1\r\nHost: x\r\n" + bearer(peer) + b"\r\n")
        time.sleep(4)
        assert len(wire_.rest()) < 32_000_000
        assert strict.memory() - before < 40 << 20


def test_too_many_connections_and_then_fewer(strict: Server) -> None:
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(strict)) for _ in range(60)]
        time.sleep(0.3)
        for wire_ in wires:
            with contextlib.suppress(ConnectionError):
                wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = [wire_.rest() for wire_ in wires]
        assert sum(b" 200 OK" in each for each in found) >= 30
        refused = [each for each in found if b" 503 " in each]
        assert refused
        assert all(b"retry-after" in each and b'"busy"' in each for each in refused)
    with Peer(strict) as peer:
        assert peer.request("GET", "/healthz")[0] == 200


def test_too_many_requests(strict: Server) -> None:
    with joined(strict, "hasty") as hasty, Peer(strict) as other:
        statuses = [hasty.request("POST", "/v1/jobs/1/heartbeat") for _ in range(200)]
        fast = [answered for answered in statuses if answered[0] == 429]
        assert fast
        assert all(refusal(answered) == (429, "too-fast") for answered in fast)
        assert {answered[0] for answered in statuses} == {409, 429}
        assert other.request("GET", "/healthz")[0] == 200
        time.sleep(1.1)
    with Peer(strict, hasty.token) as hasty:
        assert hasty.request("POST", "/v1/jobs/1/heartbeat")[0] == 409


def test_a_lease_runs_out_unless_there_are_heartbeats(strict: Server) -> None:
    silent, alive = working(strict, "silent"), working(strict, "alive")
    job = alive.job["aflock-job"]
    end = time.monotonic() + 4
    while time.monotonic() < end:
        status, _, body = Peer(strict, alive.token).request("POST", f"/v1/jobs/{job}/heartbeat")
        assert (status, json.loads(body)) == (200, {"lease": 2.0})
        time.sleep(0.4)
    with Peer(strict, silent.token, job=silent.job) as silent:
        assert refusal(silent.push(np.ones(8_000_000))) == (409, "unknown-job")
    states = {client["name"]: client["state"] for client in strict.status()["clients"]}
    assert (states["silent"], states["alive"]) == ("idle", "working")
    with Peer(strict, alive.token, job=alive.job) as alive:
        assert alive.request("POST", f"/v1/jobs/{job}/decline")[0] == 200
