"""Heads of updates on the short way: what is understood, and what is left to the parser; deadlines; the door."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aflock.net import members
from aflock.net.deadline import Deadline
from aflock.net.door import Door
from aflock.net.http import HEADER_BYTES, HEADERS
from aflock.net.members import Members
from aflock.net.refusals import Refused
from aflock.net.short import read_head

FIRST = b"POST /v1/jobs/17/update?next=1 HTTP/1.1\r\n"
FIELDS = b"Host: x\r\nAUTHORIZATION: Bearer aflock1.Ann.Se:cret\r\nContent-Length:   4\r\nx-empty:\r\n"
HEAD = FIRST + FIELDS + b"\r\n"


def test_a_plain_head() -> None:
    head = read_head(HEAD + b"body", len(HEAD) + 4)
    assert head is not None
    job, more, headers, end = head
    assert (job, more, end) == (17, True, len(HEAD))
    assert headers == {
        "host": "x", "authorization": "Bearer aflock1.Ann.Se:cret", "content-length": "4", "x-empty": "",
    }  # fmt: skip


@pytest.mark.parametrize(("target", "more"), [(b"", False), (b"?next=0", False), (b"?next=1", True)])
def test_whether_a_job_is_asked_for(target: bytes, more: bool) -> None:
    head = read_head(HEAD.replace(b"?next=1", target), len(HEAD))
    assert head is not None
    assert head[1] is more


@pytest.mark.parametrize(
    "other",
    [
        HEAD.replace(b"POST", b"post"),
        HEAD.replace(b"POST", b"GET"),
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD.replace(b"17", b"1" * 19),
        HEAD.replace(b"17", b"-1"),
        HEAD.replace(b"?next=1", b"?next=2"),
        HEAD.replace(b"?next=1", b"?next=1&next=0"),
        HEAD.replace(b"/update", b"/decline"),
        HEAD.replace(b"/update", b"/%75pdate"),
        b"\r\n" + HEAD,
        HEAD.replace(b"\r\n", b"\n"),
        HEAD.replace(b"Host: x", b"Host : x"),
        HEAD.replace(b"Host: x", b"Host"),
        HEAD.replace(b"Host: x", b": x"),
        HEAD.replace(b"Host: x", b"Host: x "),
        HEAD.replace(b"Host: x", b"Host: \tx"),
        HEAD.replace(b"Host: x", b"Host: x\r\n y"),
        HEAD.replace(b"Host: x", b"Host: \x00x"),
        HEAD.replace(b"Host: x", b"Host: \xe4"),
        HEAD.replace(b"Host: x", b"H\xe4st: x"),
        HEAD.replace(b"Host: x", b"host: x\r\nHost: x"),
        HEAD.replace(b"Host: x", b"Content-length: 4"),
        HEAD.replace(b"Host: x", b"Transfer-Encoding: chunked"),
        HEAD.replace(b"Host: x", b"Upgrade: h2c"),
        HEAD.replace(b"Host: x", b"Expect: 100-continue"),
        HEAD.replace(b"Host: x", b"Trailer: x"),
        HEAD.replace(b"Host: x", b"Connection: close"),
        HEAD.replace(b"Host: x", b"Connection: keep-alive, upgrade"),
        FIRST + b"\r\n",
        FIRST + b"".join(b"x-%d: 1\r\n" % k for k in range(HEADERS + 1)) + b"\r\n",
        HEAD.replace(b"Host: x", b"Host: " + b"x" * HEADER_BYTES),
    ],
)
def test_whatever_is_out_of_the_ordinary_is_left_to_the_parser(other: bytes) -> None:
    assert other != HEAD
    assert read_head(other, len(other)) is None


def test_a_head_that_has_not_come_whole_is_left_to_the_parser() -> None:
    assert all(read_head(HEAD + b"body", length) is None for length in range(len(HEAD)))


@given(st.binary(max_size=300), st.integers(0, len(HEAD)))
def test_what_is_understood_is_what_was_sent(noise: bytes, place: int) -> None:
    data = HEAD[:place] + noise + HEAD[place:]
    head = read_head(data, len(data))
    if head is not None:
        _, _, headers, end = head
        lines = data[:end].decode("ascii").split("\r\n")
        sent = dict(line.split(":", 1) for line in lines[1:-2])
        assert headers == {name.lower(): value.strip(" ") for name, value in sent.items()}
        assert lines[-2:] == ["", ""]


# --- deadlines -------------------------------------------------------------------------------------------------------


def late_after(work: Callable[[Deadline], None], seconds: float) -> list[float]:
    """When a deadline that was treated so was reached, in seconds, within so many."""

    async def wait() -> list[float]:
        loop, reached = asyncio.get_running_loop(), list[float]()
        begun = loop.time()
        deadline = Deadline(loop, lambda: reached.append(loop.time() - begun))
        work(deadline)
        await asyncio.sleep(seconds)
        deadline.stop()
        return reached

    return asyncio.run(wait())


def test_a_deadline_is_reached_once() -> None:
    [reached] = late_after(lambda deadline: deadline.set(0.05), 0.3)
    assert reached >= 0.05


def test_a_deadline_is_moved_back_and_forth() -> None:
    def work(deadline: Deadline) -> None:
        deadline.set(0.05)
        deadline.set(60.0)
        deadline.set(0.1)

    [reached] = late_after(work, 0.4)
    assert reached >= 0.1


@pytest.mark.parametrize("end", [Deadline.clear, Deadline.stop])
def test_a_deadline_that_does_not_count_any_more(end: Callable[[Deadline], None]) -> None:
    def work(deadline: Deadline) -> None:
        deadline.set(0.05)
        end(deadline)

    assert late_after(work, 0.2) == []


def test_a_deadline_that_was_cleared_can_be_set_again() -> None:
    def work(deadline: Deadline) -> None:
        deadline.set(0.05)
        deadline.clear()
        deadline.set(0.1)

    [reached] = late_after(work, 0.4)
    assert reached >= 0.1


# --- the door --------------------------------------------------------------------------------------------------------


def test_a_familiar_token_is_refused_as_soon_as_it_is_revoked(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    known = Members(tmp_path)
    door = Door(known, rate=100.0, strikes=3)
    shown = {"authorization": f"Bearer {token}"}
    assert door.known(shown, None).name == door.known(shown, None).name == "ann"
    members.revoke(tmp_path, "ann")
    assert known.refresh()
    with pytest.raises(Refused, match="revoked"):
        door.known(shown, None)


def test_a_familiar_token_is_no_token_after_another_was_given(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    known = Members(tmp_path)
    door = Door(known, rate=100.0, strikes=3)
    door.known({"authorization": f"Bearer {token}"}, None)
    newer = members.invite(tmp_path, "ann", again=True)
    known.refresh()
    with pytest.raises(Refused, match="not valid"):
        door.known({"authorization": f"Bearer {token}"}, None)
    assert door.known({"authorization": f"Bearer {newer}"}, None).generation == 2


def test_a_familiar_token_does_not_make_another_certificate_right(tmp_path: Path) -> None:
    shown = {"authorization": f"Bearer {members.invite(tmp_path, 'ann')}"}
    door = Door(Members(tmp_path), rate=100.0, strikes=3)
    door.known(shown, "ann")
    with pytest.raises(Refused, match="certificate"):
        door.known(shown, "bob")


def test_a_wrong_token_never_becomes_familiar(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    door = Door(Members(tmp_path), rate=100.0, strikes=3)
    for _ in range(2):
        with pytest.raises(Refused, match="not valid"):
            door.known({"authorization": f"Bearer {token}x"}, None)
        with pytest.raises(Refused, match="send your token"):
            door.known({"authorization": token}, None)


def test_one_token_in_many_spellings_is_not_kept_in_all_of_them(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    door = Door(Members(tmp_path), rate=100.0, strikes=3)
    for spaces in range(1, 2000):
        assert door.known({"authorization": f"Bearer{' ' * spaces}{token}"}, None).name == "ann"
    assert sum(map(len, door._familiar)) < 50_000


def test_a_small_rate_lets_one_request_pass(tmp_path: Path) -> None:
    members.invite(tmp_path, "ann")
    door = Door(Members(tmp_path), rate=0.1, strikes=3)
    door.count("ann")
    with pytest.raises(Refused) as refused:
        door.count("ann")
    assert refused.value.retry_after == pytest.approx(10.0, abs=0.1)


def test_two_seconds_worth_of_requests_at_a_time_and_then_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.invite(tmp_path, "ann")
    door = Door(Members(tmp_path), rate=5.0, strikes=3)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(10):
        door.count("ann")
    with pytest.raises(Refused, match="at most 5 requests") as refused:
        door.count("ann")
    assert refused.value.retry_after == pytest.approx(0.2, abs=1e-3)
    door.count("bob")  # another's own
    now += 0.2
    door.count("ann")
    with pytest.raises(Refused):
        door.count("ann")
    now += 3600.0
    for _ in range(10):
        door.count("ann")
    with pytest.raises(Refused):
        door.count("ann")
