"""Updates on the short way (short.py, intake.py): bodies that are cut, slow, many or oddly split, and their places.

Most tests talk over loopback to a server in a thread of this process, whose places can be looked at: when all is quiet,
as many must be free as there were. Those of many clients and of a stop have a server process of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import random
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import uvloop

from aflock.net import listen, members, short, tls
from aflock.net.bodies import LARGE, MOST_KEPT, Bodies
from aflock.net.commits import AT_ONCE, Commits
from aflock.net.http import Limits
from aflock.net.journal import JournalFull
from aflock.net.members import Members
from aflock.net.refusals import Refused
from aflock.net.replay import replay
from aflock.net.service import Service
from aflock.net.settings import Settings
from aflock.net.store import Store, encoded
from aflock.net.transport import Session
from net.server import (
    ONES,
    SMALL,
    Document,
    Peer,
    Server,
    Wire,
    bearer,
    invite,
    refusal,
    running,
    until,
    update_head,
    working,
)

LENGTH = 1_200_000
SIZE = 4 * LENGTH
"""Bytes of a large update: there are places for two, and a little more."""

BIG: Document = {**SMALL, "strategy": {"name": "asgd", "lr": 1.0}, "model": {"name": "vector", "length": LENGTH}}
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
QUICK = 0.7
"""Seconds of grace, where a test waits until they are over."""


# --- a server in this process ----------------------------------------------------------------------------------------


@dataclass
class Inside(Server):
    """One that runs in a thread."""

    service: Service = field(kw_only=True)
    free: tuple[int, int] = (0, 0)
    """Bytes of room, and bodies that have a place, while nothing happens."""

    @property
    def places(self) -> tuple[int, int]:
        """Bytes of room, and bodies that have a place."""
        held = self.service.intake.bodies
        return held.room, held._placed

    @property
    def waiting(self) -> int:
        """Bodies without a place."""
        return len(self.service.intake.bodies._waiting)

    def quiet(self) -> None:
        """Waits until every place is free again."""
        until(lambda: self.places == self.free and not self.waiting, 3.0)
        until(lambda: not self.service.intake._arriving and not self.service.intake._tasks, 3.0)


@contextlib.contextmanager
def inside(folder: Path, document: Document = SMALL, *, secure: bool = False, **server: Any) -> Iterator[Inside]:
    """A server in a thread, with all its places free at the end."""
    invite(folder, "nobody")
    settings = Settings.build({**document, "server": {"idle": 5.0, "rate": 1e6, **server}})
    started: queue.Queue[Any] = queue.Queue()
    certificates = tls.prepare(folder, ["localhost", "127.0.0.1"]) if secure else None
    context = tls.server_context(certificates) if certificates else None
    thread = threading.Thread(target=_in_thread, args=(folder, settings, context, started))
    thread.start()
    port, service, stop, wrong = started.get(timeout=30)
    url = f"{'https' if secure else 'http'}://127.0.0.1:{port}"
    authority = (folder / "tls" / "ca.pem").read_text() if secure else None
    made = Inside(folder, url, cast(Any, None), authority, service=service)  # there is no process
    made.free = made.places
    try:
        yield made
        made.quiet()
        assert not wrong
    finally:
        for peer in made.peers:
            peer.connection.close()
        stop()
        thread.join(30)
    assert not thread.is_alive()


def _in_thread(folder: Path, settings: Settings, context: ssl.SSLContext | None, started: queue.Queue[Any]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(folder, settings, context, started))


async def _serve(folder: Path, settings: Settings, context: ssl.SSLContext | None, started: queue.Queue[Any]) -> None:
    p, loop, wrong = settings.section("server"), asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: wrong.append(repr(context)))
    service = Service(Store(folder, settings), Members(folder))
    limits = Limits(p.idle, p.connections, service.refused)
    server = listen.Server(service, limits, service.intake.begin, context)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stop() -> None:
        service.stop()
        server.should_exit = True

    look = loop.create_task(service.look_after())
    started.put((listening.getsockname()[1], service, lambda: loop.call_soon_threadsafe(stop), wrong))
    try:
        await server.serve(sockets=[listening])
    finally:
        look.cancel()
        await service.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("small") / "fed") as server:
        yield server


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    with inside(tmp_path_factory.mktemp("large") / "fed", BIG) as server:
        yield server


@pytest.fixture(scope="module", params=["http", "https"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inside]:
    """A large one, with TLS and without."""
    with inside(tmp_path_factory.mktemp("either") / "fed", BIG, secure=request.param == "https") as server:
        yield server


def connected(server: Server, receive_buffer: int | None = None) -> Wire:
    """A bare connection, as far as TLS lets it be one."""
    made = Wire(server, receive_buffer=receive_buffer)
    if server.ca is not None:
        made.socket = tls.client_context(server.ca).wrap_socket(made.socket, server_hostname="127.0.0.1")
    return made


def ones(value: float = 1.0) -> bytes:
    """A large update."""
    return np.full(LENGTH, value, np.float32).tobytes()


def begun(server: Server, peer: Peer, sent: int, stack: contextlib.ExitStack) -> Wire:
    """A large update of which so many bytes are on their way."""
    wire_ = stack.enter_context(connected(server))
    wire_.send(update_head(peer, SIZE) + bytes(sent))
    return wire_


def reset(wire_: Wire) -> None:
    """Ends a connection the hard way."""
    wire_.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire_.socket.close()


def outcome(answered: tuple[int, Mapping[str, str], bytes]) -> tuple[int, str | None]:
    return answered[0], answered[1].get("aflock-outcome")


TAKEN = (200, "applied")


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Wire.__exit__, reset])
def test_a_client_that_is_cut_off_in_its_body_gives_its_place_to_who_waits(
    either: Inside, how: Callable[[Wire], None]
) -> None:
    with contextlib.ExitStack() as stack:
        one, two, three = (working(either, f"cut-{how.__name__.strip('_')}-{k}") for k in range(3))
        first = begun(either, one, 1000, stack)
        second = begun(either, two, 2_000_000, stack)
        until(lambda: either.places[1] == 2)
        third = begun(either, three, 0, stack)
        until(lambda: either.waiting == 1)
        how(first)
        third.send(ones())
        assert outcome(third.answer()) == TAKEN
        how(second)
        either.quiet()
        for peer in (one, two):  # their jobs are still theirs
            assert outcome(peer.push(np.ones(LENGTH))) == TAKEN


def test_a_client_that_hangs_up_while_it_waits_is_passed_over(either: Inside) -> None:
    with contextlib.ExitStack() as stack:
        peers = [working(either, f"waits-{k}") for k in range(5)]
        holding = [begun(either, peer, 10, stack) for peer in peers[:2]]
        until(lambda: either.places[1] == 2)
        gone = [begun(either, peers[2], 50_000, stack), begun(either, peers[3], 0, stack)]
        until(lambda: either.waiting == 2)
        last = begun(either, peers[4], 0, stack)
        until(lambda: either.waiting == 3)
        gone[0].socket.close()
        reset(gone[1])
        for wire_ in holding:
            wire_.send(bytes(SIZE - 10))
        last.send(ones())
        assert [outcome(wire_.answer()) for wire_ in (*holding, last)] == [TAKEN] * 3


def test_a_slow_body_loses_its_place_and_the_next_one_takes_it(large: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "GRACE", QUICK)
    with contextlib.ExitStack() as stack:
        peers = [working(large, f"slow-{k}") for k in range(3)]
        slow = [begun(large, peer, 1000, stack) for peer in peers[:2]]
        until(lambda: large.places[1] == 2)
        begin = time.monotonic()
        assert outcome(peers[2].push(np.ones(LENGTH))) == TAKEN
        assert 0.1 < time.monotonic() - begin < 5
        for wire_ in slow:
            answered = wire_.answer()
            assert refusal(answered) == (408, "slow")
            assert answered[1]["connection"] == "close"
            assert b"1000 of" in answered[2]
            wire_.socket.close()
        large.quiet()
        assert outcome(peers[0].push(np.ones(LENGTH))) == TAKEN


def test_a_steady_body_may_take_its_time(large: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it keeps the pace that is asked for."""
    monkeypatch.setattr(short, "GRACE", QUICK / 2)
    with contextlib.ExitStack() as stack:
        wire_ = begun(large, working(large, "steady"), 0, stack)
        for _ in range(16):
            wire_.send(bytes(SIZE // 16))
            time.sleep(QUICK / 8)
        assert outcome(wire_.answer()) == TAKEN


def test_nobody_takes_all_places(large: Inside) -> None:
    with working(large, "greedy") as peer, working(large, "modest") as other, contextlib.ExitStack() as stack:
        lines = [begun(large, peer, 1000, stack) for _ in range(2)]
        third = stack.enter_context(connected(large))
        third.send(update_head(peer, SIZE) + ones())
        assert refusal(third.answer()) == (503, "busy")
        lines[1].socket.close()  # its line is dead: the same update comes over another
        until(lambda: large.service.intake._coming["greedy"] == 1)
        assert outcome(other.push(np.ones(LENGTH, np.float32))) == TAKEN
        lines[0].send(bytes(SIZE - 1000))
        assert outcome(lines[0].answer()) == TAKEN


def test_who_waits_too_long_is_told_to_come_again(large: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short, "PATIENCE", QUICK)
    with contextlib.ExitStack() as stack:
        peers = [working(large, f"crowd-{k}") for k in range(3)]
        holding = [begun(large, peer, 1, stack) for peer in peers[:2]]
        until(lambda: large.places[1] == 2)
        late = begun(large, peers[2], 100_000, stack)
        answered = late.answer()
        assert refusal(answered) == (503, "busy")
        assert answered[1]["connection"] == "close"
        for wire_ in holding:
            wire_.send(bytes(SIZE - 1))
            assert outcome(wire_.answer()) == TAKEN
        assert outcome(peers[2].push(np.ones(LENGTH))) == TAKEN


def test_places_are_free_again_after_a_storm(large: Inside) -> None:
    """Whole, cut, reset and repeated bodies in any order; what was acknowledged counts, once."""
    peers = [working(large, f"storm-{k}") for k in range(6)]
    before = large.status()["updates"]

    def storm(k: int) -> int:
        chance, taken = random.Random(k), 0
        for _ in range(5):
            with Wire(large) as wire_:
                wire_.send(update_head(peers[k], SIZE) + bytes(chance.choice((0, 1, 60_000, 3_000_000))))
                if chance.random() < 0.3:
                    reset(wire_)
            pushed = peers[k].push(np.full(LENGTH, k), next=True)
            assert outcome(pushed) == TAKEN
            taken += 1
        return taken

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(storm, range(6))) == 30
    large.quiet()
    assert large.status()["updates"] == before + 30


# --- pieces ----------------------------------------------------------------------------------------------------------


def following(wire_: Wire, peer: Peer) -> None:
    """The answer to an update with `next`: the job in it is the client's."""
    status, headers, body = wire_.answer()
    assert (status, headers["aflock-outcome"], len(body)) == (200, "applied", 32)
    peer.job = headers


def with_next(head: bytes) -> bytes:
    return head.replace(b"/update ", b"/update?next=1 ")


def test_a_small_update_split_anywhere(small: Inside) -> None:
    """In the first line, a header, the empty line, the body, or the request that follows."""
    with working(small, "split") as peer, Wire(small) as wire_:
        wire_.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before, end = small.status()["updates"], len(update_head(peer, 32)) + 32 + len(HEALTH)
        cuts = range(1, end, 3)
        for cut in cuts:
            sent = with_next(update_head(peer, 32)) + ONES.tobytes() + HEALTH
            wire_.send(sent[:cut])
            time.sleep(0.001)
            wire_.send(sent[cut:])
            following(wire_, peer)
            assert wire_.answer()[::2] == (200, b"ok\n")
        assert small.status()["updates"] == before + len(cuts)


def test_a_small_update_byte_by_byte(small: Inside) -> None:
    with working(small, "bytes") as peer, Wire(small) as wire_:
        wire_.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for k in with_next(update_head(peer, 32)) + ONES.tobytes():
                wire_.send(bytes([k]))
            following(wire_, peer)


@pytest.mark.parametrize("pieces", [[0, 1, 1, 1, SIZE - 3], [1, 70_000, 1], [65_536, 65_536], [SIZE - 1, 1], [SIZE]])
def test_a_large_body_in_awkward_pieces(either: Inside, pieces: list[int]) -> None:
    """What follows it comes with its last byte, or one after the other."""
    with working(either, f"pieces-{len(pieces)}-{pieces[0]}") as peer, connected(either) as wire_:
        body = np.random.default_rng(0).integers(-3, 3, LENGTH).astype(np.float32)
        before = np.frombuffer(peer.request("GET", "/v1/model")[2], np.float32)
        rest, sent = body.tobytes(), update_head(peer, SIZE)
        for piece in pieces:
            wire_.send(sent + rest[:piece])
            sent, rest = b"", rest[piece:]
            time.sleep(0.01)
        wire_.send(rest + HEALTH + b"POST /v1/hello HTTP/1.1\r\nHost: x\r\n" + bearer(peer) + b"\r\n" + HEALTH[:5])
        assert outcome(wire_.answer()) == TAKEN
        assert wire_.answer()[::2] == (200, b"ok\n")
        assert wire_.answer()[0] == 200
        wire_.send(HEALTH[5:])
        assert wire_.answer()[::2] == (200, b"ok\n")
        after = np.frombuffer(peer.request("GET", "/v1/model")[2], np.float32)
        np.testing.assert_array_equal(after, before - body)


def test_a_waiting_body_that_is_followed_by_other_requests(either: Inside) -> None:
    with contextlib.ExitStack() as stack:
        peers = [working(either, f"followed-{k}") for k in range(3)]
        holding = [begun(either, peer, 10, stack) for peer in peers[:2]]
        until(lambda: either.places[1] == 2)
        wire_ = begun(either, peers[2], 30_000, stack)
        until(lambda: either.waiting == 1)
        sender = threading.Thread(target=wire_.send, args=(bytes(SIZE - 30_000) + HEALTH * 2,))
        sender.start()
        for each in holding:
            each.send(bytes(SIZE - 10))
            assert outcome(each.answer()) == TAKEN
        assert outcome(wire_.answer()) == TAKEN
        assert [wire_.answer()[::2] for _ in range(2)] == [(200, b"ok\n")] * 2
        sender.join()


def test_updates_one_behind_the_other_count_once(small: Inside) -> None:
    """The second one is the same again, in the same packet: it takes the ordinary way."""
    with working(small, "twice") as peer, Wire(small) as wire_:
        before = small.status()["updates"]
        wire_.send((update_head(peer, 32) + ONES.tobytes()) * 3 + HEALTH)
        answers = [wire_.answer() for _ in range(3)]
        assert [outcome(answered) for answered in answers] == [TAKEN] * 3
        assert len({answered[2] for answered in answers}) == 1
        assert wire_.answer()[0] == 200
        assert small.status()["updates"] == before + 1


def test_nonsense_behind_an_update_ends_the_connection_after_the_answer(small: Inside) -> None:
    with working(small, "nonsense") as peer, Wire(small) as wire_:
        wire_.send(update_head(peer, 32) + ONES.tobytes() + b"nonsense\r\n\r\n")
        answered = wire_.answer()
        assert outcome(answered) == TAKEN
        assert answered[1]["connection"] == "close"
        assert wire_.rest() == b""


def test_any_requests_in_any_pieces_are_answered_as_if_they_came_one_by_one(tmp_path: Path) -> None:
    with inside(tmp_path / "fed", {**SMALL, "federation": {"clients": 1, "strikes": 1000}}) as server:
        with working(server, "fuzz") as peer:
            for seed in range(3):
                chance = random.Random(seed)
                requests = [_any(peer, chance) for _ in range(150)]
                with Wire(server) as wire_:
                    wire_.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    statuses = _in_pieces(wire_, [sent for sent, _ in requests], chance)
                assert statuses == [status for _, status in requests]
        assert server.status()["version"] == server.status()["updates"] == int(peer.job["aflock-version"])


def _any(peer: Peer, chance: random.Random) -> tuple[bytes, int]:
    """A request and the status of its answer; the client's job is then the one that the answer will bring."""
    job, version = int(peer.job["aflock-job"]), int(peer.job["aflock-version"])
    update, body = with_next(update_head(peer, 32)), ONES.tobytes()
    what = chance.randrange(8)
    if what < 3:
        peer.job = {"aflock-job": str(job + 1), "aflock-version": str(version + 1)}
        return update + body, 200
    if what == 3 and job:
        return update.replace(b"jobs/%d/" % job, b"jobs/%d/" % (job - 1)) + body, 200  # the same again
    if what == 4:
        return update + (ONES * np.inf).tobytes(), 422
    if what == 5:
        return update.replace(b"jobs/%d/" % job, b"jobs/%d/" % (job + 100_000)) + body, 409
    if what == 6:
        return update.replace(b"Length: 32", b"Length: 31") + body[:31], 422
    return HEALTH, 200


def _in_pieces(wire_: Wire, requests: list[bytes], chance: random.Random) -> list[int]:
    """Sends them with few of them unanswered at a time; the statuses of the answers."""
    ends, statuses = np.cumsum([len(request) for request in requests]), list[int]()
    stream, place = b"".join(requests), 0
    while place < len(stream):
        piece = chance.choice((1, 7, 32, 200, 400, 1000, 3000))
        while np.searchsorted(ends, place + piece) - len(statuses) > 12:
            if np.searchsorted(ends, place, "right") > len(statuses):
                statuses.append(wire_.answer()[0])
            else:
                piece //= 2
        wire_.send(stream[place : place + piece])
        place += piece
    return statuses + [wire_.answer()[0] for _ in requests[len(statuses) :]]


@pytest.mark.parametrize("order", [0, 1])
def test_another_protocol_is_offered_with_an_update(large: Inside, order: int) -> None:
    """The parser then takes the body for that protocol's: an update without one must not be taken."""
    offer = [b"Connection: Upgrade\r\nUpgrade: h2c\r\n", b"Connection: keep-alive\r\n"]
    with working(large, f"earlier-{order}") as earlier, working(large, f"upgrade-{order}") as peer:
        assert outcome(earlier.push(np.ones(LENGTH))) == TAKEN  # its memory is used again
        before = large.status()["updates"]
        for body in (b"", bytes(1000)):
            with Wire(large) as wire_:
                wire_.send(update_head(peer, SIZE, offer[order] + offer[1 - order]) + body)
                assert refusal(wire_.answer()) == (400, "malformed")
        assert large.status()["updates"] == before


# --- the same twice, and the ordinary way ----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n", b"Connection: close\r\n"])
def test_the_same_update_twice_at_the_same_time(large: Inside, more: bytes) -> None:
    """One on the short way, the other on either; whichever comes to its end first counts, and both get its receipt."""
    peer = working(large, f"same-{len(more)}")
    before = large.status()["updates"]
    for slow_first in (True, False):
        with Wire(large) as first, Wire(large) as second:
            first.send(with_next(update_head(peer, SIZE)) + bytes(1000))
            second.send(with_next(update_head(peer, SIZE, more)))
            if more.startswith(b"Expect"):
                assert second.answer()[0] == 100
            second.send(bytes(1000))
            time.sleep(0.05)
            order = [second, first] if slow_first else [first, second]
            order[0].send(bytes(SIZE - 1000))
            if not slow_first:
                time.sleep(0.05)
            order[1].send(bytes(SIZE - 1000))
            answers = [wire_.answer() for wire_ in (first, second)]
            assert [outcome(answered) for answered in answers] == [TAKEN] * 2
            assert len({answered[1]["aflock-server-version"] for answered in answers}) == 1
            given = [answered[1] for answered in answers if "aflock-job" in answered[1]]
            assert len(given) == 1  # the next job is in one of the answers only
            peer.job = given[0]
    assert large.status()["updates"] == before + 2


def test_a_body_that_is_asked_for_and_a_connection_that_is_to_end(small: Inside) -> None:
    with working(small, "usual") as peer:
        with Wire(small) as wire_:
            wire_.send(with_next(update_head(peer, 32, b"Expect: 100-continue\r\n")))
            assert wire_.answer()[0] == 100
            wire_.send(ONES.tobytes())
            following(wire_, peer)
            wire_.send(with_next(update_head(peer, 32)) + ONES.tobytes())  # the short way, behind the ordinary one
            following(wire_, peer)
        for more in (b"Connection: close\r\n", b"connection: close\r\n"):
            with Wire(small) as wire_:
                wire_.send(with_next(update_head(peer, 32, more)) + ONES.tobytes())
                following(wire_, peer)
                assert wire_.rest() == b""


def test_a_request_that_takes_the_ordinary_way_counts_once(tmp_path: Path) -> None:
    """Of twice the rate that may come in a burst."""
    with inside(tmp_path / "fed", rate=5.0) as server, working(server, "rated") as peer:
        begin, statuses = time.monotonic(), list[int]()
        while len(statuses) < 30 and 429 not in statuses:
            statuses.append(peer.push(ONES)[0])  # the first takes the short way; the others are the same again
        allowed = 10 - 2 + 5 * (time.monotonic() - begin)  # a hello and a pull came before
        assert statuses.count(200) in (int(allowed), int(allowed) + 1, int(allowed) - 1)
        assert statuses[-1] == 429


# --- while a body is on its way --------------------------------------------------------------------------------------


def test_a_federation_that_ends_while_a_body_is_on_its_way(tmp_path: Path) -> None:
    document = {**BIG, "budget": {"uploads": 1}}
    with inside(tmp_path / "fed", document) as server, contextlib.ExitStack() as stack:
        one, two, three, four = (working(server, f"end-{k}") for k in range(4))
        cut, late = begun(server, one, 1000, stack), begun(server, two, 1000, stack)
        until(lambda: server.places[1] == 2)
        waits = begun(server, three, 1000, stack)
        until(lambda: server.waiting == 1)
        reset(cut)
        until(lambda: not server.waiting)
        with Wire(server) as last:
            last.send(update_head(four, SIZE))
            late.send(bytes(SIZE - 1000))
            assert outcome(late.answer()) == TAKEN
            until(lambda: server.service.federation.ended)
            waits.send(bytes(SIZE - 1000))
            assert refusal(waits.answer()) == (410, "ended")
            last.send(ones())
            assert refusal(last.answer()) == (410, "ended")
        assert refusal(four.push(np.ones(LENGTH))) == (410, "ended")
        assert server.status()["updates"] == 1


def test_a_client_that_is_revoked_while_its_body_is_on_its_way(large: Inside) -> None:
    with contextlib.ExitStack() as stack:
        peer, other = working(large, "revoked"), working(large, "stays")
        before = large.status()["updates"]
        wire_ = begun(large, peer, 1000, stack)
        until(lambda: large.places[1] == 1)
        members.revoke(large.folder, "revoked")
        until(lambda: "revoked" not in large.service.federation.seats)
        wire_.send(bytes(SIZE - 1000) + b"GET /v1/job HTTP/1.1\r\nHost: x\r\n" + bearer(peer) + b"\r\n")
        assert refusal(wire_.answer()) == (409, "unknown-job")
        assert refusal(wire_.answer()) == (403, "revoked")
        assert large.status()["updates"] == before
        assert outcome(other.push(np.ones(LENGTH))) == TAKEN


def test_a_lease_that_runs_out_while_a_body_waits(tmp_path: Path) -> None:
    with inside(tmp_path / "fed", BIG, lease=0.5) as server, contextlib.ExitStack() as stack:
        peers = [working(server, f"lease-{k}") for k in range(3)]
        wires = [begun(server, peer, 1000, stack) for peer in peers]
        until(lambda: server.places[1] == 2 and server.waiting == 1)
        until(lambda: not server.service.federation.coordinator.open_jobs)
        for wire_ in wires:
            wire_.send(bytes(SIZE - 1000) + HEALTH)
            assert refusal(wire_.answer()) == (409, "unknown-job")
            assert wire_.answer()[0] == 200
        assert server.status()["updates"] == 0


def test_useless_bodies_are_refused_and_counted(tmp_path: Path) -> None:
    document = {**SMALL, "federation": {"clients": 1, "strikes": 3}}
    with inside(tmp_path / "fed", document) as server, working(server, "useless") as peer, Wire(server) as wire_:
        for _ in range(3):
            wire_.send(update_head(peer, 32) + (ONES * np.nan).tobytes())
            assert refusal(wire_.answer()) == (422, "unusable")
        wire_.send(update_head(peer, 32) + ONES.tobytes())
        assert refusal(wire_.answer()) == (403, "suspended")


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_large_answer_comes_whole_to_a_slow_reader(either: Inside) -> None:
    """Others move the model meanwhile: the one that is being sent stays as it was, and takes a place until it is."""
    with contextlib.ExitStack() as stack:
        peer, mover = working(either, "reader"), working(either, "mover")
        wire_ = stack.enter_context(connected(either, receive_buffer=4096))
        wire_.send(with_next(update_head(peer, SIZE)) + ones())
        until(lambda: either.service.federation.counts.updates and not either.places[1])
        model = either.service.federation.model.copy()
        for _ in range(3):
            assert outcome(mover.push(np.ones(LENGTH), next=True)) == TAKEN
        until(lambda: either.places[0] < either.free[0])  # the old model is still being read
        status, headers, body = wire_.answer()
        assert (status, headers["aflock-outcome"], len(body)) == (200, "applied", SIZE)
        assert body == model.tobytes()
        either.quiet()
        peer.job = headers
        wire_.send(update_head(peer, SIZE) + ones())
        assert outcome(wire_.answer()) == TAKEN


def test_who_does_not_read_the_answer_to_an_update_is_cut_off(tmp_path: Path) -> None:
    with inside(tmp_path / "fed", BIG, idle=0.6) as server, working(server, "deaf") as peer:
        with Wire(server, receive_buffer=4096) as wire_:
            wire_.send(with_next(update_head(peer, SIZE)) + ones())
            time.sleep(1.8)
            assert len(wire_.rest()) < SIZE
        until(lambda: server.service.federation.counts.updates == 1)


def test_a_connection_that_says_nothing_after_an_update_ends(tmp_path: Path) -> None:
    with inside(tmp_path / "fed", idle=0.6) as server, contextlib.ExitStack() as stack:
        behind = {b"": b"", b"GET /healthz HT": b" 408 ", HEALTH: b" 200 OK"}
        wires = []
        for k, more in enumerate(behind):
            wire_ = stack.enter_context(Wire(server))
            wire_.send(update_head(working(server, f"silent-{k}"), 32) + ONES.tobytes())
            assert outcome(wire_.answer()) == TAKEN
            wire_.send(more)
            wires.append(wire_)
        begin = time.monotonic()
        for wire_, expected in zip(wires, behind.values(), strict=True):
            assert expected in wire_.rest()
        assert 0.2 < time.monotonic() - begin < 3


@pytest.mark.parametrize("secure", [False, True])
def test_what_our_own_client_sends_takes_the_short_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    """Else it would be answered all the same, and nobody would notice how slowly."""

    async def work(url: str, token: str, ca: str | None) -> int:
        async with Session(url, token, ca=ca, give_up=10.0) as session:
            hello = await session.hello()
            pulled = await session.pull(5.0)
            for _ in range(5):
                assert pulled is not None
                update = pulled.pack({name: np.ones(hello.length, np.float32) for name in hello.needs}, 1, 1)
                pulled = (await session.push(update, next=True)).next
        return 5

    with inside(tmp_path / "fed", secure=secure) as server:
        ordinary = list[Any]()
        monkeypatch.setattr(server.service.intake, "update", lambda *request: ordinary.append(request))
        assert asyncio.run(work(server.url, invite(server.folder, "own"), server.ca)) == 5
        assert server.service.federation.counts.updates == 5
        assert not ordinary


# --- mistakes of our own ---------------------------------------------------------------------------------------------


def _fail(*_: Any) -> None:
    raise MemoryError("on purpose")


@pytest.mark.parametrize("past_the_parser", [True, False])
def test_an_update_that_cannot_be_looked_at_is_answered_and_gives_its_place_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_the_parser: bool
) -> None:
    """Memory may run out where a body is checked: that must not cost a place for ever, nor leave the client waiting."""
    with inside(tmp_path / "fed") as server, working(server, "unlucky") as peer:
        with monkeypatch.context() as patched, Wire(server, timeout=5.0) as wire_:
            patched.setattr(server.service.federation, "check_vectors", _fail)
            wire_.send(update_head(peer, 32) + (b"" if past_the_parser else ONES.tobytes()))
            if past_the_parser:
                time.sleep(0.1)
                wire_.send(ONES.tobytes())
            with contextlib.suppress(EOFError):  # an end of the connection is an answer, too
                assert wire_.answer()[0] in (500, 503)
        server.quiet()
        assert outcome(peer.push(ONES)) == TAKEN


def test_without_memory_for_a_body_it_is_asked_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inside(tmp_path / "fed") as server, working(server, "unlucky") as peer:
        with monkeypatch.context() as patched:
            patched.setattr(server.service.intake.bodies, "_blank", _fail)
            with Wire(server, timeout=5.0) as wire_:
                wire_.send(update_head(peer, 32) + ONES.tobytes())
                status, headers, _ = wire_.answer()
                assert (status, headers["retry-after"]) == (503, "5")
        server.quiet()
        assert outcome(peer.push(ONES)) == TAKEN


def test_a_mistake_at_the_door_is_not_taken_for_bad_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inside(tmp_path / "fed") as server, working(server, "unlucky") as peer:
        with monkeypatch.context() as patched, Wire(server, timeout=5.0) as wire_:
            patched.setattr(server.service.federation, "check_head", _fail)
            wire_.send(update_head(peer, 32) + ONES.tobytes())
            assert wire_.answer()[0] == 500
        assert outcome(peer.push(ONES)) == TAKEN


# --- commits ---------------------------------------------------------------------------------------------------------


def commit(folder: Path, play: Callable[[Commits, Store], Any], on_settled: Callable[[], None] = lambda: None) -> None:
    """Plays with a store's commits; they must come to their end."""

    async def main(store: Store) -> None:
        commits = Commits(store, on_write=lambda seconds, count: None, on_settled=on_settled)
        try:
            async with asyncio.timeout(2):
                await play(commits, store)
        finally:
            async with asyncio.timeout(2):
                await commits.close()

    with closing(Store(folder, Settings.build(SMALL))) as store:
        asyncio.run(main(store))


def pull(commits: Commits, done: Callable[[Any, Refused | None], None]) -> None:
    record = {"k": "pull", "t": commits.now(), "name": "alice"}
    commits.put(record, encoded(record), b"", done)


def _tell(told: list[int], k: int, result: Any, refusal: Refused | None) -> None:
    told.append(k)


def test_a_sender_that_cannot_be_told_does_not_keep_others_from_being_told(tmp_path: Path) -> None:
    told: list[int] = []

    async def play(commits: Commits, store: Store) -> None:
        await commits.submit("hello", name="alice", gen=1)
        for k in range(3 * AT_ONCE):
            pull(commits, _fail if k == 2 else partial(_tell, told, k))
        while len(told) < 3 * AT_ONCE - 1:
            await asyncio.sleep(0.01)

    with contextlib.suppress(TimeoutError):
        commit(tmp_path / "fed", play)
    assert told == [k for k in range(3 * AT_ONCE) if k != 2]


def test_a_sender_that_cannot_be_told_of_a_full_disk_does_not_end_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise JournalFull("no room")

    async def play(commits: Commits, store: Store) -> None:
        await commits.submit("hello", name="alice", gen=1)
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", full)
            pull(commits, _fail)
            await asyncio.sleep(0.2)
        assert await commits.submit("pull", name="alice") is not None

    commit(tmp_path / "fed", play)


def test_what_happens_after_records_may_fail_without_silencing_the_server(tmp_path: Path) -> None:
    failures = [MemoryError("on purpose")]

    def settled() -> None:
        if failures:
            raise failures.pop()

    async def play(commits: Commits, store: Store) -> None:
        await commits.submit("hello", name="alice", gen=1)
        await asyncio.sleep(0.1)
        with contextlib.suppress(Refused):  # a server that stops says so; one that hangs does not
            await commits.submit("pull", name="alice")

    commit(tmp_path / "fed", play, settled)


# --- bodies ----------------------------------------------------------------------------------------------------------


def test_room_is_what_it_was_after_any_order_of_things() -> None:
    async def main(seed: int) -> None:
        chance, held = random.Random(seed), Bodies(100)
        placed: list[int] = []
        waiting: list[tuple[int, asyncio.Future[None]]] = []
        models: list[memoryview] = []
        for _ in range(500):
            what = chance.randrange(6)
            if what < 2:
                length = chance.choice((1, 10, 49, 60, 150))
                turn = held.ask(length)
                placed.append(length) if turn is None else waiting.append((length, turn))
            elif what == 2 and placed:
                held.give_back(placed.pop(chance.randrange(len(placed))))
            elif what == 3 and waiting:
                held.withdraw(*waiting.pop(chance.randrange(len(waiting))))
            elif what == 4:
                model = np.zeros(chance.randrange(1, 80), np.uint8).data
                held.lend(model)
                models.append(model)
                del model
            elif models:
                models.pop(chance.randrange(len(models)))
            placed += [length for length, turn in waiting if turn.done()]
            waiting = [(length, turn) for length, turn in waiting if not turn.done()]
            assert held._placed == len(placed)
            assert held.room == 100 - sum(placed) - sum(model.nbytes for model in models)
            assert placed or not waiting  # there is always a place for one
            assert len(placed) < 2 or sum(placed) <= 100
        models.clear()
        while placed or waiting:
            for length in placed:
                held.give_back(length)
            placed = [length for length, turn in waiting if turn.done()]
            waiting = [(length, turn) for length, turn in waiting if not turn.done()]
        assert (held.room, held._placed) == (100, 0)

    for seed in range(10):
        asyncio.run(main(seed))


def test_a_place_that_is_not_awaited_any_more_goes_to_the_next() -> None:
    async def main() -> None:
        held = Bodies(10)
        await held.take(10)
        one, two = asyncio.create_task(held.take(10)), asyncio.create_task(held.take(10))
        await asyncio.sleep(0)
        held.give_back(10)  # to the first, who is given up in the same moment
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        async with asyncio.timeout(1):
            await two
        held.give_back(10)
        assert (held.room, held._placed) == (10, 0)

    asyncio.run(main())


@pytest.mark.parametrize(
    "use",
    [
        lambda body: body,
        lambda body: body[5:],
        lambda body: body.cast("B"),
        lambda body: body.toreadonly(),
        lambda body: np.frombuffer(body, "<f4"),
        lambda body: np.frombuffer(body, "<f4").astype(np.float32, copy=False)[3:9],
        lambda body: {"gradient": np.frombuffer(body, np.uint8).reshape(2, -1).T},
    ],
)
def test_memory_is_used_again_when_nobody_sees_it_and_not_before(use: Callable[[memoryview], Any]) -> None:
    held, addresses = Bodies(10 * LARGE), set[int]()

    def address(body: memoryview) -> int:
        return int(np.frombuffer(body, np.uint8).__array_interface__["data"][0])

    for _ in range(5):  # one at a time: always the same memory
        addresses.add(address(held.blank(LARGE)))
    assert len(addresses) == 1
    used = use(held.blank(LARGE))
    for _ in range(5):
        other, another = held.blank(LARGE), held.blank(LARGE)
        assert len({address(other), address(another)} | addresses) == 3
        del other, another
    del used
    assert len({address(held.blank(LARGE)) for _ in range(5)}) <= MOST_KEPT


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_many_large_bodies_get_through_two_places_once_each(tmp_path: Path, secure: bool) -> None:
    clients, rounds = 6, 3
    folder = tmp_path / "fed"
    with running(folder, BIG, tls=secure, changes=["server.archive=true"]) as server:
        peers = [working(server, f"crowd{k}") for k in range(clients)]
        start = threading.Barrier(clients)

        def work(k: int) -> list[int]:
            start.wait()
            answers = [peers[k].push(np.full(LENGTH, k + 1), next=True) for _ in range(rounds)]
            assert [outcome(answered) for answered in answers] == [TAKEN] * rounds
            assert all(len(answered[2]) == SIZE for answered in answers)
            return [int(answered[1]["aflock-server-version"]) for answered in answers]

        with ThreadPoolExecutor(clients) as threads:
            versions = [version for found in threads.map(work, range(clients)) for version in found]
        assert sorted(versions) == list(range(1, clients * rounds + 1))  # each was a step of its own
        model = np.frombuffer(peers[0].request("GET", "/v1/model")[2], np.float32)
        assert set(model) == {-rounds * sum(range(1, clients + 1))}
        assert server.stop() == 0
        assert "Traceback" not in server.errors
    lived = replay(folder / "trace.jsonl")
    assert lived["agrees"]
    assert lived["updates"] == clients * rounds


@pytest.mark.parametrize("document", [SMALL, BIG])
def test_a_stop_while_bodies_arrive_loses_nothing_that_was_acknowledged(tmp_path: Path, document: Document) -> None:
    clients, folder, length = 6, tmp_path / "fed", int(document["model"]["length"])
    with running(folder, document, changes=["server.archive=true"]) as server:
        peers = [working(server, f"stop{k}") for k in range(clients)]
        stopped = threading.Event()

        def work(k: int) -> int:
            taken = 0
            with contextlib.suppress(OSError, HTTPException):
                while True:
                    status, headers, body = peers[k].push(np.ones(length), next=True)
                    if status != 200:
                        assert refusal((status, headers, body)) == (503, "stopping")
                        return taken
                    taken += 1
                    if headers.get("connection") == "close":
                        return taken
            assert stopped.is_set()  # else nobody may hang up
            return taken

        with ThreadPoolExecutor(clients) as threads:
            working_ = [threads.submit(work, k) for k in range(clients)]
            time.sleep(0.7)
            stopped.set()
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            taken = sum(each.result(30) for each in working_)
            assert server.process.wait(20) == 0
            assert time.monotonic() - begin < 15
        assert "Traceback" not in server.errors
    lived = replay(folder / "trace.jsonl")
    assert lived["agrees"]
    assert taken <= lived["updates"] <= taken + clients  # an answer may be lost on its way
    assert taken > clients
