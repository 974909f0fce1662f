"""Large bodies on their way in (upload.py): cut, slow, many at a time; who gets memory and who waits for it."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aflock.net.commands.replay import replay
from aflock.net.server import upload
from aflock.net.server.http import connection
from tests.net.real_server import SMALL, Document, Wire, refusal, running, until, update_head, working
from tests.net.server.in_process import BIG, LENGTH, QUICK, SIZE, TAKEN, Inside, begun, ones, outcome, reset

# --- memory for bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [Wire.__exit__, reset])
def test_a_client_that_is_cut_off_in_its_body_frees_its_memory_for_who_waits(
    either: Inside, how: Callable[[Wire], None]
) -> None:
    with contextlib.ExitStack() as stack:
        one, two, three = (working(either, f"cut-{how.__name__.strip('_')}-{k}") for k in range(3))
        first = begun(either, one, 1000, stack)
        second = begun(either, two, 2_000_000, stack)
        until(lambda: either.body_memory[1] == 2)
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
        until(lambda: either.body_memory[1] == 2)
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


def test_a_slow_body_loses_its_memory_and_the_next_one_takes_it(large: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_GRACE", QUICK)
    with contextlib.ExitStack() as stack:
        peers = [working(large, f"slow-{k}") for k in range(3)]
        slow = [begun(large, peer, 1000, stack) for peer in peers[:2]]
        until(lambda: large.body_memory[1] == 2)
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
    monkeypatch.setattr(connection, "BODY_GRACE", QUICK / 2)
    with contextlib.ExitStack() as stack:
        wire_ = begun(large, working(large, "steady"), 0, stack)
        for _ in range(16):
            wire_.send(bytes(SIZE // 16))
            time.sleep(QUICK / 8)
        assert outcome(wire_.answer()) == TAKEN


def test_no_client_takes_all_memory(large: Inside) -> None:
    """A client may have two uploads while nobody waits; the older one is given up as soon as somebody does."""
    with working(large, "greedy") as peer, working(large, "modest") as other, contextlib.ExitStack() as stack:
        lines = [begun(large, peer, 1000, stack)]
        until(lambda: large.body_memory[1] == 1)
        lines.append(begun(large, peer, 1000, stack))
        until(lambda: large.body_memory[1] == 2)
        assert outcome(other.push(np.ones(LENGTH, np.float32))) == TAKEN
        superseded = lines[0].answer()
        assert refusal(superseded) == (503, "busy")
        assert superseded[1]["connection"] == "close"
        lines[1].send(bytes(SIZE - 1000))
        assert outcome(lines[1].answer()) == TAKEN


def test_a_third_upload_of_a_client_takes_over_from_the_first(large: Inside) -> None:
    with working(large, "stubborn") as peer, contextlib.ExitStack() as stack:
        lines = list[Wire]()
        for count in (1, 2, 2):
            lines.append(begun(large, peer, 1000, stack))
            time.sleep(0.1)
            assert large.body_memory[1] == count
        assert refusal(lines[0].answer()) == (503, "busy")
        for wire_ in lines[1:]:
            wire_.send(bytes(SIZE - 1000))
        assert [outcome(wire_.answer()) for wire_ in lines[1:]] == [TAKEN] * 2


def test_a_dead_connection_does_not_keep_its_own_client_waiting(large: Inside) -> None:
    """Two uploads have all the memory; one of them is on a dead connection of the client that sends again."""
    with contextlib.ExitStack() as stack:
        one, two = working(large, "dead-line"), working(large, "lives")
        begun(large, one, 1000, stack)
        holding = begun(large, two, 1000, stack)
        until(lambda: large.body_memory[1] == 2)
        assert outcome(one.push(np.ones(LENGTH))) == TAKEN
        holding.send(bytes(SIZE - 1000))
        assert outcome(holding.answer()) == TAKEN


def _are(server: Inside, expected: tuple[int, int]) -> bool:
    """Whether so many uploads have memory, and so many wait."""
    return (server.body_memory[1], server.waiting) == expected


def test_uploads_get_memory_in_the_order_in_which_they_came(large: Inside) -> None:
    with contextlib.ExitStack() as stack:
        peers = [working(large, f"in-order-{k}") for k in range(6)]
        wires = list[Wire]()
        for k, peer in enumerate(peers):
            wires.append(begun(large, peer, 10, stack))
            expected = (min(2, k + 1), max(0, k - 1))
            until(partial(_are, large, expected))
        versions = list[int]()
        for wire_ in wires:  # whoever has memory ends, and the next one gets it; those behind have sent nothing more
            wire_.send(bytes(SIZE - 10))
            status, headers, _ = wire_.answer()
            assert status == 200
            versions.append(int(headers["aflock-server-version"]))
        assert versions == sorted(versions)


def test_who_waits_is_not_sent_away_while_bytes_come(large: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Much longer than the patience for which it would wait if nothing moved."""
    monkeypatch.setattr(upload, "PATIENCE", QUICK / 2)
    with contextlib.ExitStack() as stack:
        peers = [working(large, f"patient-{k}") for k in range(3)]
        holding = [begun(large, peer, 1, stack) for peer in peers[:2]]
        until(lambda: large.body_memory[1] == 2)
        late = begun(large, peers[2], 0, stack)
        for _ in range(20):
            holding[0].send(bytes(10_000))
            time.sleep(QUICK / 8)
        assert large.waiting == 1
        holding[0].send(bytes(SIZE - 1 - 200_000))
        assert outcome(holding[0].answer()) == TAKEN
        late.send(ones())
        assert outcome(late.answer()) == TAKEN
        reset(holding[1])


def test_who_waits_too_long_is_told_to_come_again(large: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "PATIENCE", QUICK)
    with contextlib.ExitStack() as stack:
        peers = [working(large, f"crowd-{k}") for k in range(3)]
        holding = [begun(large, peer, 1, stack) for peer in peers[:2]]
        until(lambda: large.body_memory[1] == 2)
        late = begun(large, peers[2], 100_000, stack)
        answered = late.answer()
        assert refusal(answered) == (503, "busy")
        assert answered[1]["connection"] == "close"
        for wire_ in holding:
            wire_.send(bytes(SIZE - 1))
            assert outcome(wire_.answer()) == TAKEN
        assert outcome(peers[2].push(np.ones(LENGTH))) == TAKEN


def test_memory_is_free_again_after_many_uploads_that_end_in_every_way(large: Inside) -> None:
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
            while pushed[0] == 503:  # the server has seen the cut connection after this one, and took it for the newer
                assert refusal(pushed) == (503, "busy")
                pushed = peers[k].push(np.full(LENGTH, k), next=True)
            assert outcome(pushed) == TAKEN
            taken += 1
        return taken

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(storm, range(6))) == 30
    large.quiet()
    assert large.status()["updates"] == before + 30


def test_memory_of_bodies_is_free_as_soon_as_they_are_dealt_with(
    either: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when the garbage collector comes round: there is memory for two of them."""
    made = list[weakref.ref[Any]]()
    blank = either.app.updates.bodies.allocate

    def watched(length: int) -> memoryview:
        body = blank(length)
        made.append(weakref.ref(body.obj))
        return body

    peers = [working(either, f"memory-{k}") for k in range(6)]
    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patched, ThreadPoolExecutor(6) as threads:
            patched.setattr(either.app.updates.bodies, "allocate", watched)
            for _ in range(3):
                pushed = threads.map(lambda peer: peer.push(np.ones(LENGTH, np.float32), next=True), peers)
                assert [outcome(each) for each in pushed] == [TAKEN] * 6
                either.quiet()
                until(lambda: sum(body() is not None for body in made) <= 1, 3.0)
        assert len(made) == 18
    finally:
        gc.enable()


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secure", [False, True])
def test_many_large_bodies_get_through_memory_for_two_once_each(tmp_path: Path, secure: bool) -> None:
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
