"""Who is let in: tokens, memberships, suspended and revoked clients, members that cannot be read."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from aflock.net.identity import members
from aflock.net.identity.members import Members
from aflock.net.protocol.refusals import Refused
from aflock.net.server.auth import Auth
from tests.net.real_server import (
    ONES,
    SMALL,
    NotStarted,
    Peer,
    Server,
    invite,
    joined,
    refusal,
    served,
    start,
    until,
    working,
)
from tests.net.server.waiting import waiting

# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic YWxpY2U6eA==",
        "Bearer aflock1.nobody." + "x" * 43,
        "Bearer aflock1.tina." + "x" * 43,
        "Bearer aflock1.tina.",
        "Bearer " + "a" * 5000,
        "Bearer \xff\xfe",
    ],
)
@pytest.mark.parametrize("asked", ["GET /v1/job", "POST /v1/hello", "POST /v1/jobs/0/update", "GET /v1/model"])
def test_who_has_no_token_is_not_let_in(shared: Server, authorization: str | None, asked: str) -> None:
    if "tina" not in members.names(shared.folder):
        invite(shared.folder, "tina")
    headers = {} if authorization is None else {"Authorization": authorization}
    method, path = asked.split()
    with Peer(shared) as peer:
        assert refusal(peer.request(method, path, headers=headers)) == (401, "token")


def test_a_token_without_a_hello_is_not_a_membership(shared: Server) -> None:
    with Peer(shared, invite(shared.folder, "newcomer")) as peer:
        assert refusal(peer.pull()) == (403, "not-a-member")
        assert refusal(peer.request("POST", "/v1/jobs/1/heartbeat")) == (403, "not-a-member")


def test_one_cannot_act_for_another(shared: Server) -> None:
    with working(shared, "victim") as victim, working(shared, "thief") as thief:
        mine = victim.job["aflock-job"]
        before = shared.status()
        assert refusal(thief.push(ONES, job=mine, changed={"version": victim.job["aflock-version"]})) == (
            409,
            "unknown-job",
        )
        assert refusal(thief.request("POST", f"/v1/jobs/{mine}/heartbeat")) == (409, "unknown-job")
        assert refusal(thief.request("POST", f"/v1/jobs/{mine}/decline")) == (409, "unknown-job")
        assert refusal(thief.push(ONES, job=10**17)) == (409, "unknown-job")
        after = shared.status()
        assert (after["updates"], after["dropped"]) == (before["updates"], before["dropped"])
        assert victim.push(ONES)[0] == 200


# --- a federation's life ---------------------------------------------------------------------------------------------


def test_a_client_that_keeps_sending_unusable_updates_is_suspended(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with served(folder, SMALL, changes=["federation.strikes=3"]) as server:
        alice = working(server, "alice")
        for _ in range(2):
            assert refusal(alice.push(ONES * np.nan)) == (422, "unusable")
        assert alice.push(ONES, next=True)[0] == 200  # a good one: the count begins anew
        for _ in range(3):
            assert refusal(alice.push(ONES * np.nan)) == (422, "unusable")
        for method, path in [("GET", "/v1/job"), ("POST", "/v1/hello"), ("GET", "/v1/model"), ("POST", "/v1/leave")]:
            assert refusal(alice.request(method, path)) == (403, "suspended")
        assert server.status()["clients"][0]["state"] == "suspended"
        assert server.status()["open_jobs"] == 0
        assert server.stop() == 0
    with served(folder, SMALL, changes=["federation.strikes=3"]) as server:
        assert refusal(Peer(server, alice.token).pull()) == (403, "suspended")
        again = Peer(server, invite(folder, "alice", again=True))
        until(lambda: refusal(Peer(server, alice.token).pull()) == (401, "token"))
        assert refusal(again.pull()) == (403, "suspended")
        again.hello()
        assert again.pull()[0] == 200
        for _ in range(2):
            assert refusal(again.push(ONES * np.nan)) == (422, "unusable")
        assert again.push(ONES)[0] == 200
        assert "nan" not in json.dumps(server.status()).lower()


def test_revoked_while_the_server_runs(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with served(folder, SMALL, changes=["federation.concurrency=1"]) as server:
        alice, bob = working(server, "alice"), joined(server, "bob")
        with waiting(bob, 30) as woken:
            time.sleep(0.3)
            members.revoke(folder, "bob")
            assert (woken().status, woken().code) == (403, "revoked")
            assert woken().seconds < 5
        assert refusal(bob.pull()) == (403, "revoked")
        members.revoke(folder, "alice")
        until(lambda: server.status()["clients"] == [])
        assert server.status()["open_jobs"] == 0
        assert refusal(alice.push(ONES)) == (403, "revoked")
        back = working(server, "alice")
        number = server.status()["clients"][0]["number"]
        members.revoke(folder, "alice")  # and invited again at once: the old token is out, the new one is in
        new = Peer(server, invite(folder, "alice"))
        time.sleep(1.2)
        assert refusal(back.push(ONES)) == (401, "token")
        assert new.hello()["number"] in (number, number + 1)
        assert new.pull()[0] == 200
        assert new.push(ONES)[0] == 200


def test_members_that_cannot_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    with served(folder) as server:
        alice = working(server, "alice")
        file = folder / "members.json"
        good = file.read_text()
        file.write_text("{")
        until(lambda: "members.json cannot be used" in server.errors)
        assert alice.push(ONES, next=True)[0] == 200  # those known stay
        file.write_text(good)
        until(lambda: "can be read again" in server.errors)
        assert server.errors.count("cannot be used") == 1
        file.write_text("[]")
        assert server.stop() == 0
    with pytest.raises(NotStarted) as stopped:
        start(folder)
    assert stopped.value.code == 2
    assert "members.json cannot be used" in stopped.value.errors.splitlines()[-1]


def test_a_familiar_token_is_refused_as_soon_as_it_is_revoked(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    known = Members(tmp_path)
    auth = Auth(known, rate=100.0, strikes=3)
    shown = {"authorization": f"Bearer {token}"}
    assert auth.authenticate(shown, None).name == auth.authenticate(shown, None).name == "ann"
    members.revoke(tmp_path, "ann")
    assert known.refresh()
    with pytest.raises(Refused, match="revoked"):
        auth.authenticate(shown, None)


def test_a_familiar_token_is_no_token_after_another_was_given(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    known = Members(tmp_path)
    auth = Auth(known, rate=100.0, strikes=3)
    auth.authenticate({"authorization": f"Bearer {token}"}, None)
    newer = members.invite(tmp_path, "ann", again=True)
    known.refresh()
    with pytest.raises(Refused, match="not valid"):
        auth.authenticate({"authorization": f"Bearer {token}"}, None)
    assert auth.authenticate({"authorization": f"Bearer {newer}"}, None).generation == 2


def test_a_familiar_token_does_not_make_another_certificate_right(tmp_path: Path) -> None:
    shown = {"authorization": f"Bearer {members.invite(tmp_path, 'ann')}"}
    auth = Auth(Members(tmp_path), rate=100.0, strikes=3)
    auth.authenticate(shown, "ann")
    with pytest.raises(Refused, match="certificate"):
        auth.authenticate(shown, "bob")


def test_a_wrong_token_never_becomes_familiar(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    auth = Auth(Members(tmp_path), rate=100.0, strikes=3)
    for _ in range(2):
        with pytest.raises(Refused, match="not valid"):
            auth.authenticate({"authorization": f"Bearer {token}x"}, None)
        with pytest.raises(Refused, match="send your token"):
            auth.authenticate({"authorization": token}, None)


def test_one_token_in_many_spellings_is_not_kept_in_all_of_them(tmp_path: Path) -> None:
    token = members.invite(tmp_path, "ann")
    auth = Auth(Members(tmp_path), rate=100.0, strikes=3)
    tracemalloc.start()
    try:
        for spaces in range(1, 2000):  # two million bytes, if all of them were kept
            assert auth.authenticate({"authorization": f"Bearer{' ' * spaces}{token}"}, None).name == "ann"
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_a_small_rate_lets_one_request_pass(tmp_path: Path) -> None:
    members.invite(tmp_path, "ann")
    auth = Auth(Members(tmp_path), rate=0.1, strikes=3)
    auth.count_request("ann")
    with pytest.raises(Refused) as refused:
        auth.count_request("ann")
    assert refused.value.retry_after == pytest.approx(10.0, abs=0.1)


def test_two_seconds_worth_of_requests_at_a_time_and_then_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members.invite(tmp_path, "ann")
    auth = Auth(Members(tmp_path), rate=5.0, strikes=3)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in range(10):
        auth.count_request("ann")
    with pytest.raises(Refused, match="at most 5 requests") as refused:
        auth.count_request("ann")
    assert refused.value.retry_after == pytest.approx(0.2, abs=1e-3)
    auth.count_request("bob")  # another's own
    now += 0.2
    auth.count_request("ann")
    with pytest.raises(Refused):
        auth.count_request("ann")
    now += 3600.0
    for _ in range(10):
        auth.count_request("ann")
    with pytest.raises(Refused):
        auth.count_request("ann")
