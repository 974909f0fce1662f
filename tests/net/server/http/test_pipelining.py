"""Requests in any pieces, and one behind the other on a connection."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.net.real_server import ONES, SMALL, Peer, Wire, bearer, refusal, until, update_head, working
from tests.net.server.in_process import (
    HEALTH,
    LENGTH,
    SIZE,
    TAKEN,
    Inside,
    begun,
    connected,
    following,
    inside,
    outcome,
    with_next,
)

# --- pieces ----------------------------------------------------------------------------------------------------------


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
        until(lambda: either.body_memory[1] == 2)
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
    """The second one is the same again, in the same packet."""
    with working(small, "twice") as peer, Wire(small) as wire_:
        before = small.status()["updates"]
        wire_.send((update_head(peer, 32) + ONES.tobytes()) * 3 + HEALTH)
        answers = [wire_.answer() for _ in range(3)]
        assert [outcome(answered) for answered in answers] == [TAKEN] * 3
        assert len({answered[2] for answered in answers}) == 1
        assert wire_.answer()[0] == 200
        assert small.status()["updates"] == before + 1


def test_bad_http_behind_an_update_ends_the_connection_after_the_answer(small: Inside) -> None:
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
    stream, offset = b"".join(requests), 0
    while offset < len(stream):
        piece = chance.choice((1, 7, 32, 200, 400, 1000, 3000))
        while np.searchsorted(ends, offset + piece) - len(statuses) > 12:
            if np.searchsorted(ends, offset, "right") > len(statuses):
                statuses.append(wire_.answer()[0])
            else:
                piece //= 2
        wire_.send(stream[offset : offset + piece])
        offset += piece
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


# --- the same twice ----------------------------------------------------------------------------


def test_a_body_that_is_asked_for_and_a_connection_that_is_to_end(small: Inside) -> None:
    with working(small, "usual") as peer:
        with Wire(small) as wire_:
            wire_.send(with_next(update_head(peer, 32, b"Expect: 100-continue\r\n")))
            assert wire_.answer()[0] == 100
            wire_.send(ONES.tobytes())
            following(wire_, peer)
            wire_.send(with_next(update_head(peer, 32)) + ONES.tobytes())
            following(wire_, peer)
        for more in (b"Connection: close\r\n", b"connection: close\r\n"):
            with Wire(small) as wire_:
                wire_.send(with_next(update_head(peer, 32, more)) + ONES.tobytes())
                following(wire_, peer)
                assert wire_.rest() == b""
