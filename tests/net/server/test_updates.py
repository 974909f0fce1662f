"""One update (updates.py): sent twice, overtaken by other events, answered to a slow reader, not checkable."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from aflock.net.identity import members
from aflock.net.server import bodies
from aflock.net.storage.journal import JournalFull
from tests.net.real_server import ONES, SMALL, Wire, bearer, refusal, until, update_head, working
from tests.net.server.in_process import (
    BIG,
    HEALTH,
    LENGTH,
    SIZE,
    TAKEN,
    Inside,
    begun,
    connected,
    fail,
    inside,
    ones,
    outcome,
    reset,
    with_next,
)

# --- the same twice ----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n", b"Connection: close\r\n"])
def test_the_same_update_twice_at_the_same_time(large: Inside, more: bytes) -> None:
    """Whichever comes to its end first counts, and both get its receipt."""
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


def test_a_request_counts_once_against_the_rate(tmp_path: Path) -> None:
    """Of twice the rate that may come in a burst."""
    with inside(tmp_path / "fed", rate=5.0) as server, working(server, "rated") as peer:
        begin, statuses = time.monotonic(), list[int]()
        while len(statuses) < 30 and 429 not in statuses:
            statuses.append(peer.push(ONES)[0])  # but for the first they are the same again
        allowed = 10 - 2 + 5 * (time.monotonic() - begin)  # a hello and a pull came before
        assert statuses.count(200) in (int(allowed), int(allowed) + 1, int(allowed) - 1)
        assert statuses[-1] == 429


# --- while a body is on its way --------------------------------------------------------------------------------------


def test_a_federation_that_ends_while_a_body_is_on_its_way(tmp_path: Path) -> None:
    document = {**BIG, "budget": {"uploads": 1}}
    with inside(tmp_path / "fed", document) as server, contextlib.ExitStack() as stack:
        one, two, three, four = (working(server, f"end-{k}") for k in range(4))
        cut, late = begun(server, one, 1000, stack), begun(server, two, 1000, stack)
        until(lambda: server.body_memory[1] == 2)
        waits = begun(server, three, 1000, stack)
        until(lambda: server.waiting == 1)
        reset(cut)
        until(lambda: not server.waiting)
        with Wire(server) as last:
            last.send(update_head(four, SIZE))
            late.send(bytes(SIZE - 1000))
            assert outcome(late.answer()) == TAKEN
            until(lambda: server.app.federation.ended)
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
        until(lambda: large.body_memory[1] == 1)
        members.revoke(large.folder, "revoked")
        until(lambda: "revoked" not in large.app.federation.clients)
        wire_.send(bytes(SIZE - 1000) + b"GET /v1/job HTTP/1.1\r\nHost: x\r\n" + bearer(peer) + b"\r\n")
        assert refusal(wire_.answer()) == (409, "unknown-job")
        assert refusal(wire_.answer()) == (403, "revoked")
        assert large.status()["updates"] == before
        assert outcome(other.push(np.ones(LENGTH))) == TAKEN


def test_a_lease_that_runs_out_while_a_body_does_not_come(tmp_path: Path) -> None:
    """Bytes that have come are a sign of life, once; who is made to wait for memory need not give any."""
    with inside(tmp_path / "fed", BIG, lease=0.5) as server, contextlib.ExitStack() as stack:
        peers = [working(server, f"lease-{k}") for k in range(3)]
        wires = [begun(server, peer, 1000, stack) for peer in peers]
        until(lambda: server.body_memory[1] == 2 and server.waiting == 1)
        until(lambda: server.app.federation.coordinator.open_jobs == 1)
        for wire_, expected in zip(wires, (409, 409, 200), strict=True):
            wire_.send(bytes(SIZE - 1000) + HEALTH)
            assert wire_.answer()[0] == expected
            assert wire_.answer()[0] == 200
        assert server.status()["updates"] == 1


def test_a_lease_is_shorter_than_the_upload(tmp_path: Path) -> None:
    with inside(tmp_path / "fed", BIG, lease=0.5) as server, contextlib.ExitStack() as stack:
        wire_ = begun(server, working(server, "long"), 0, stack)
        for _ in range(20):
            wire_.send(bytes(SIZE // 20))
            time.sleep(0.2)
        assert outcome(wire_.answer()) == TAKEN


def test_a_client_that_is_silent_after_a_full_disk_loses_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease does not run while the update is being written; it begins anew when the record was not written."""

    def full(*_: object) -> None:
        raise JournalFull("the disk is full")

    with inside(tmp_path / "fed", lease=0.5) as server, working(server, "silent") as peer:
        with monkeypatch.context() as patched:
            patched.setattr(server.app.store, "write", full)
            assert refusal(peer.push(ONES)) == (503, "disk-full")
        assert server.app.federation.coordinator.open_jobs == 1
        until(lambda: server.app.federation.coordinator.open_jobs == 0, 10.0)
        assert refusal(peer.push(ONES)) == (409, "unknown-job")


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
    """Others move the model meanwhile: the one that is being sent stays as it was, and takes memory meanwhile."""
    with contextlib.ExitStack() as stack:
        peer, mover = working(either, "reader"), working(either, "mover")
        wire_ = stack.enter_context(connected(either, receive_buffer=4096))
        wire_.send(with_next(update_head(peer, SIZE)) + ones())
        until(lambda: either.app.federation.counts.updates and not either.body_memory[1])
        model = either.app.federation.model.copy()
        for _ in range(3):
            assert outcome(mover.push(np.ones(LENGTH), next=True)) == TAKEN
        until(lambda: either.body_memory[0] < either.free[0])  # the old model is still being read
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
        until(lambda: server.app.federation.counts.updates == 1)


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


# --- mistakes of our own ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("past_the_parser", [True, False])
def test_an_update_that_cannot_be_checked_is_answered_and_frees_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, past_the_parser: bool
) -> None:
    """Memory may run out where a body is checked: it must be free again, and the client must get an answer."""
    with inside(tmp_path / "fed") as server, working(server, "unlucky") as peer:
        with monkeypatch.context() as patched, Wire(server, timeout=5.0) as wire_:
            patched.setattr(server.app.federation, "check_vectors", fail)
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
            patched.setattr(bodies, "np", SimpleNamespace(empty=fail, uint8=np.uint8))
            with Wire(server, timeout=5.0) as wire_:
                wire_.send(update_head(peer, 32) + ONES.tobytes())
                status, headers, _ = wire_.answer()
                assert (status, headers["retry-after"]) == (503, "5")
        server.quiet()
        assert outcome(peer.push(ONES)) == TAKEN


def test_an_error_in_a_heads_check_is_not_taken_for_bad_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inside(tmp_path / "fed") as server, working(server, "unlucky") as peer:
        with monkeypatch.context() as patched, Wire(server, timeout=5.0) as wire_:
            patched.setattr(server.app.federation, "check_head", fail)
            wire_.send(update_head(peer, 32) + ONES.tobytes())
            assert wire_.answer()[0] == 500
        assert outcome(peer.push(ONES)) == TAKEN
