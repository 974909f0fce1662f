"""The server as its clients and its enemies see it: real processes, real sockets, every row of docs/protocol.md."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import resource
import signal
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aflock import cli, data, models, strategies
from aflock.net import members, tls, warm, weights, wire
from aflock.net.settings import Settings
from net.server import (
    ONES,
    SMALL,
    Document,
    NotStarted,
    Peer,
    Server,
    Wire,
    bearer,
    invite,
    joined,
    output,
    refusal,
    running,
    start,
    until,
    update_head,
    working,
)

served = functools.partial(running, orderly=False)
"""Tests of an orderly end ask for it."""

HOST = b"Host: x\r\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A federation for tests that bring their own clients and leave no harm."""
    folder = tmp_path_factory.mktemp("shared") / "fed"
    with served(folder, SMALL, level="debug", changes=["federation.max_norm=1000.0"]) as server:
        yield server
        assert "Traceback" not in server.errors


def _aflock(*arguments: str | Path, cwd: Path | None = None) -> tuple[int, str, str]:
    """The command line: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or "."):
        code = cli.main([*map(str, arguments)])
    return code, out.getvalue(), err.getvalue()


# --- what a client does ----------------------------------------------------------------------------------------------


def test_a_client_comes_works_and_goes(shared: Server) -> None:
    with Peer(shared, invite(shared.folder, "alice")) as alice:
        hello = alice.hello()
        assert hello["protocol"] == 1
        assert re.fullmatch("[0-9a-f]{32}", hello["federation"])
        assert hello["name"] == "alice"
        assert hello["state"] == "running"
        assert (hello["strategy"], hello["needs"], hello["changes"]) == ("asgd", ["gradient"], [])
        assert (hello["length"], hello["encoding"], hello["lease"]) == (8, "float32", 600.0)
        assert hello["local"]["name"] == "sgd"
        assert (hello["steps"], hello["batch"]) == (1, 32)
        assert alice.hello() == hello  # a second one changes nothing
        status, job, body = alice.pull()
        assert (status, len(body)) == (200, 32)
        assert job["aflock-vectors"] == "model"
        assert (job["aflock-first"], job["aflock-number"]) == ("0", "0")
        assert job["content-type"] == "application/octet-stream"
        version = int(job["aflock-version"])
        status, receipt, body = alice.push(ONES)
        assert status == 200
        assert receipt["aflock-outcome"] == "applied"
        assert receipt["aflock-server-version"] == str(version + 1)
        assert json.loads(body) == {"outcome": "applied", "staleness": 0, "reason": "", "version": version + 1}
        status, model, weights = alice.request("GET", "/v1/model")
        assert (status, model["etag"], model["aflock-version"]) == (200, f'"{version + 1}"', str(version + 1))
        assert len(weights) == 32
        assert alice.pull()[1]["aflock-number"] == "1"
        assert alice.request("POST", "/v1/leave")[::2] == (200, b"{}")
        assert refusal(alice.pull()) == (403, "not-a-member")
        assert alice.hello()["number"] != hello["number"]  # somebody new, as far as the rule can tell
        assert alice.request("POST", "/v1/leave")[0] == 200


def test_the_next_job_comes_with_the_receipt(shared: Server) -> None:
    with working(shared, "nina") as nina:
        old = nina.job["aflock-job"]
        status, headers, body = nina.push(ONES, next=True)
        assert (status, len(body)) == (200, 32)
        assert headers["aflock-outcome"] == "applied"
        assert headers["aflock-job"] != old
        assert headers["aflock-version"] == headers["aflock-server-version"]


def test_a_client_that_pulls_again_has_lost_its_job(shared: Server) -> None:
    with working(shared, "petra") as petra:
        lost = petra.job["aflock-job"]
        assert petra.pull()[0] == 200
        assert petra.job["aflock-job"] != lost
        assert refusal(petra.push(ONES, job=lost)) == (409, "unknown-job")
        assert petra.push(ONES)[0] == 200


def test_an_update_counts_once(shared: Server) -> None:
    with working(shared, "olga") as olga:
        before = shared.status()["updates"]
        first = olga.push(ONES)
        for _ in range(3):
            assert olga.push(ONES * 2)[::2] == first[::2]  # whatever it says the second time
        assert shared.status()["updates"] == before + 1


def test_two_at_the_same_time_count_once(shared: Server) -> None:
    with working(shared, "olaf") as olaf:
        before, answers = shared.status()["updates"], []
        start = threading.Barrier(4)

        def push() -> None:
            with Peer(shared, olaf.token, job=olaf.job) as twin:
                start.wait()
                answers.append(twin.push(ONES)[::2])

        threads = [threading.Thread(target=push) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(answers) == 4
        assert len(set(answers)) == 1
        assert shared.status()["updates"] == before + 1


def test_a_torn_update_and_its_repetition_count_once(shared: Server) -> None:
    with working(shared, "otto") as otto, Wire(shared) as torn:
        before = shared.status()["updates"]
        head = update_head(otto, 32)
        torn.send(head + b"\0" * 16)
        time.sleep(0.1)
        whole = otto.push(ONES)
        assert whole[0] == 200
        torn.send(b"\0" * 16)  # the first one comes to its end after all
        assert torn.answer()[::2] == whole[::2]
        assert shared.status()["updates"] == before + 1


def test_a_version_the_client_has_is_not_sent_again(shared: Server) -> None:
    with working(shared, "harry") as harry:
        have = harry.job["aflock-version"]
        status, job, body = harry.pull(headers={"Aflock-Have": have})
        assert (status, body, job["aflock-vectors"]) == (200, b"", "")
        assert (job["aflock-version"], job["content-length"]) == (have, "0")
        assert len(harry.pull(headers={"Aflock-Have": str(int(have) + 1)})[2]) == 32
        status, headers, body = harry.request("GET", "/v1/model", headers={"If-None-Match": f'"{have}"'})
        assert (status, body, headers["etag"]) == (304, b"", f'"{have}"')
        assert harry.request("GET", "/v1/model", headers={"If-None-Match": '"x"'})[0] == 200


def test_a_job_can_be_given_back(shared: Server) -> None:
    with working(shared, "dora") as dora:
        job = dora.job["aflock-job"]
        dropped = shared.status()["dropped"]
        assert dora.request("POST", f"/v1/jobs/{job}/decline")[::2] == (200, b"{}")
        assert shared.status()["dropped"] == dropped + 1
        assert refusal(dora.request("POST", f"/v1/jobs/{job}/decline")) == (409, "unknown-job")
        assert refusal(dora.push(ONES)) == (409, "unknown-job")
        assert refusal(dora.request("POST", f"/v1/jobs/{job}/heartbeat")) == (409, "unknown-job")


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


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/", (404, "path")),
        ("GET", "/v1", (404, "path")),
        ("GET", "/v1/jobs/1", (404, "path")),
        ("POST", "/v1/jobs/x/update", (404, "path")),
        ("POST", "/v1/jobs/-1/update", (404, "path")),
        ("POST", "/v1/jobs/1234567890123456789/update", (404, "path")),
        ("POST", "/v1/jobs/1/update/", (404, "path")),
        ("GET", "/v1/../healthz", (404, "path")),
        ("GET", "/v1/jobs/1/update", (405, "method")),
        ("DELETE", "/v1/jobs/1/decline", (405, "method")),
        ("GET", "/v1/hello", (405, "method")),
        ("POST", "/v1/job", (405, "method")),
        ("PUT", "/healthz", (405, "method")),
    ],
)
def test_what_does_not_exist(shared: Server, method: str, path: str, expected: tuple[int, str]) -> None:
    with _joined_once(shared, "walker") as peer:
        assert refusal(peer.request(method, path)) == expected
        assert peer.request("GET", "/healthz")[::2] == (200, b"ok\n")  # the connection is as good as before


def _joined_once(server: Server, name: str) -> Peer:
    """The same client for many tests."""
    file = output(server.folder, name)
    if not file.exists():
        file.write_text(invite(server.folder, name))
    peer = Peer(server, file.read_text())
    peer.hello()
    return peer


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"version": "x"}, (400, "malformed")),
        ({"version": "-1"}, (400, "malformed")),
        ({"steps": "1.5"}, (400, "malformed")),
        ({"examples": "9" * 19}, (400, "malformed")),
        ({"vectors": "gradient,gradient"}, (400, "malformed")),
        ({"vectors": "Gradient!"}, (400, "malformed")),
        ({"encoding": "float64"}, (400, "malformed")),
        ({"encoding": "float16"}, (422, "unusable")),
        ({"vectors": ""}, (422, "unusable")),
        ({"vectors": "model"}, (422, "unusable")),
        ({"vectors": "gradient,model"}, (422, "unusable")),
        ({"steps": "0"}, (422, "unusable")),
        ({"examples": "0"}, (422, "unusable")),
        ({"version": "999"}, (422, "unusable")),
    ],
)
def test_an_update_with_a_wrong_head(shared: Server, changed: dict[str, str], expected: tuple[int, str]) -> None:
    with _joined_once(shared, "clumsy") as peer:
        assert peer.pull()[0] == 200
        before = shared.status()["updates"]
        assert refusal(peer.push(ONES, changed=changed)) == expected
        assert shared.status()["updates"] == before
        assert peer.push(ONES)[0] == 200  # the job is still open, and a good update makes up for the bad one


@pytest.mark.parametrize(
    "vectors",
    [
        [np.full(8, np.nan)],
        [np.array([1, 1, 1, 1, 1, 1, 1, np.inf])],
        [np.array([-np.inf, 1, 1, 1, 1, 1, 1, 1])],
        [np.full(8, 1e30)],
        [np.full(8, 500.0)],
        [np.ones(7)],
        [np.ones(9)],
        [],
    ],
)
def test_an_update_no_rule_can_use(shared: Server, vectors: list[np.ndarray[Any, Any]]) -> None:
    with _joined_once(shared, "careless") as peer:
        assert peer.pull()[0] == 200
        before = shared.status()
        assert refusal(peer.push(*vectors)) == (422, "unusable")
        after = shared.status()
        assert after["updates"] == before["updates"]
        assert after["refused"]["unusable"] == before["refused"].get("unusable", 0) + 1
        assert peer.push(ONES)[0] == 200


def test_queries_and_bodies_that_are_none(shared: Server) -> None:
    with _joined_once(shared, "walker") as peer:
        for wait in ("x", "-1", "1.5", "9" * 19, "%00"):
            assert refusal(peer.request("GET", f"/v1/job?wait={wait}")) == (400, "malformed"), wait
        assert refusal(peer.request("GET", "/v1/job?" + "&".join("a=1" for _ in range(9)))) == (400, "malformed")
        assert refusal(peer.request("POST", "/v1/hello", bytes(70_000))) == (413, "too-large")
    with _joined_once(shared, "walker") as peer:  # the connection was given up with that answer
        assert peer.request("POST", "/v1/hello", b"anything")[0] == 200
        assert peer.request("POST", "/v1/hello", b"anything", {"Content-Length": "8 \t"})[0] == 200
        assert peer.request("GET", "/v1/job?wait=0&other=%FF")[0] == 200
        assert peer.pull()[0] == 200
        assert refusal(peer.push(np.zeros(100))) == (413, "too-large")
        assert peer.request("GET", "/healthz")[0] == 200
        del peer.job["aflock-version"]
        path = f"/v1/jobs/{peer.job['aflock-job']}/update"
        assert refusal(peer.request("POST", path, b"x")) == (400, "malformed")


def test_a_body_must_say_how_long_it_is(shared: Server) -> None:
    with working(shared, "chunky") as chunky:
        path = f"/v1/jobs/{chunky.job['aflock-job']}/update"
        with Wire(shared) as wire_:
            head = update_head(chunky, 0).replace(b"Content-Length: 0\r\n", b"")
            wire_.send(head)
            assert refusal(wire_.answer()) == (411, "length")
            wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert wire_.answer()[0] == 200
        for more in (b"5\r\nhello\r\n0\r\n\r\n", b"0\r\nX-Trailer: x\r\n\r\n", b"zz\r\n", b""):
            with Wire(shared) as wire_:
                wire_.send(f"POST {path} HTTP/1.1\r\n".encode() + HOST + b"Transfer-Encoding: chunked\r\n\r\n" + more)
                assert refusal(wire_.answer()) == (411, "length")
                assert wire_.rest() == b""
        assert chunky.push(ONES)[0] == 200


# --- waiting ---------------------------------------------------------------------------------------------------------


def test_a_place_that_gets_free_goes_to_who_waits(tmp_path: Path) -> None:
    with served(tmp_path / "fed", SMALL, changes=["federation.concurrency=1", "server.rate=50.0"]) as server:
        alice, bob = working(server, "alice"), joined(server, "bob")
        assert bob.pull()[0] == 204
        with Wire(server) as wire_:  # whoever asks for more meanwhile gets it afterwards; nonsense ends it
            wire_.send(b"GET /v1/job?wait=1 HTTP/1.1\r\nHost: x\r\n" + bearer(bob) + b"\r\n")
            wire_.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n\x00\x01")
            assert wire_.answer()[0] == 204
            assert wire_.answer()[::2] == (200, b"ok\n")
            assert wire_.rest() == b""
        with _waiting(bob, 30) as woken:
            time.sleep(0.3)
            assert alice.push(ONES)[0] == 200
            assert woken().status == 200
        with Peer(server, alice.token) as given_up, _waiting(alice, 30) as replaced:
            time.sleep(0.3)
            with _waiting(given_up, 1) as newer:  # another request of the same client: the older one goes away
                assert replaced().status == 204
                assert replaced().seconds < 10
                assert newer().status == 204
                assert newer().seconds >= 1
        assert server.status()["refused"] == {}
        with Wire(server) as hung_up:
            hung_up.send(b"GET /v1/job?wait=30 HTTP/1.1\r\nHost: x\r\n" + bearer(alice) + b"\r\n")
            time.sleep(0.3)
        time.sleep(0.3)
        assert bob.push(ONES)[0] == 200
        time.sleep(0.3)
        found = {client["name"]: client["state"] for client in server.status()["clients"]}
        assert found == {"alice": "idle", "bob": "idle"}  # nobody works for a client that has gone
        assert bob.pull()[0] == 200


class _Waited:
    status, code, seconds = 0, "", 0.0


@contextlib.contextmanager
def _waiting(peer: Peer, seconds: int) -> Iterator[Callable[[], _Waited]]:
    """A pull that waits, in a thread; what is yielded waits for its end."""
    found = _Waited()

    def pull() -> None:
        begun = time.monotonic()
        found.status, _, body = peer.pull(wait=seconds)
        found.seconds = time.monotonic() - begun
        if found.status >= 400:
            found.code = json.loads(body)["code"]

    thread = threading.Thread(target=pull)
    thread.start()

    def end() -> _Waited:
        thread.join(60)
        return found

    yield end
    end()


# --- a federation's life ---------------------------------------------------------------------------------------------


def test_a_rule_that_asks_for_first_gradients(tmp_path: Path) -> None:
    document = {**SMALL, "strategy": {"name": "ace"}, "federation": {"clients": 2}, "budget": {"uploads": 4}}
    with served(tmp_path / "fed", document) as server:
        alice, bob = Peer(server, invite(server.folder, "alice")), Peer(server, invite(server.folder, "bob"))
        hello = alice.hello()
        assert (hello["state"], hello["number"]) == ("gathering", None)
        assert server.status()["waiting_for"] == 1
        assert alice.pull()[0] == 204
        with _waiting(alice, 30) as woken:
            assert bob.hello()["state"] == "opening"
            assert woken().status == 200
        assert alice.job["aflock-first"] == "1"
        assert alice.job["aflock-vectors"] == "model"
        assert alice.push(ONES)[1]["aflock-outcome"] == "buffered"
        assert alice.pull()[0] == 204  # nobody goes on before all have begun
        assert bob.pull()[0] == 200
        assert bob.push(ONES)[1]["aflock-outcome"] == "applied"
        assert alice.hello()["state"] == "running"
        assert alice.pull()[1]["aflock-first"] == "0"
        carol = joined(server, "carol")  # comes later: her first job is one for a first gradient
        assert carol.pull()[1]["aflock-first"] == "1"
        assert carol.push(ONES)[0] == 200
        last = alice.push(ONES)
        assert last[0] == 200
        assert alice.hello()["state"] == "ended"
        assert server.status()["state"] == "ended"
        assert refusal(bob.pull(wait=30)) == (410, "ended")
        assert refusal(carol.request("POST", "/v1/jobs/7/heartbeat")) == (410, "ended")
        assert alice.push(ONES)[::2] == last[::2]  # who got no answer still gets it
        late = Peer(server, invite(server.folder, "late"))
        assert late.hello()["state"] == "ended"
        assert refusal(late.pull()) == (410, "ended")
        assert server.stop() == 0
    with served(tmp_path / "fed", document) as server:
        assert server.status()["state"] == "ended"
        again = Peer(server, alice.token, job=alice.job)
        assert again.push(ONES)[::2] == last[::2]


def test_the_end_wakes_those_who_wait(tmp_path: Path) -> None:
    changes = ["federation.concurrency=1", "budget.versions=1"]
    with served(tmp_path / "fed", SMALL, changes=changes) as server:
        alice, bob = working(server, "alice"), joined(server, "bob")
        with _waiting(bob, 30) as woken:
            time.sleep(0.3)
            assert alice.push(ONES, next=True)[0] == 200
            assert (woken().status, woken().code) == (410, "ended")


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_vectors_travel_in_fewer_bytes(tmp_path: Path, encoding: str) -> None:
    document = {**SMALL, "strategy": {"name": "asgd", "lr": 1.0}}
    with served(tmp_path / "fed", document, changes=[f"federation.encoding={encoding}"]) as server:
        alice = Peer(server, invite(server.folder, "alice"))
        assert alice.hello()["encoding"] == encoding
        _, _, body = alice.pull()
        assert len(body) == wire.size(encoding, 8)
        gradient = np.linspace(-1, 1, 8, dtype=np.float32)
        status, headers, body = alice.push(gradient, next=True)
        assert (status, headers["aflock-encoding"]) == (200, encoding)
        assert np.allclose(wire.decode(body, encoding, 8), -gradient, atol=0.02)
        status, headers, exact = alice.request("GET", "/v1/model")
        assert (headers["aflock-encoding"], len(exact)) == ("float32", 32)
        assert refusal(alice.push(gradient, changed={"encoding": "float32"})) == (422, "unusable")
        path = f"/v1/jobs/{alice.job['aflock-job']}/update"
        bad = {"float16": np.full(8, np.inf, "<f2").tobytes(), "int8": np.float32(np.inf).tobytes() + b"\1" * 8}
        headers = {f"Aflock-{name}": value for name, value in [("Version", "1"), ("Steps", "1"), ("Examples", "1")]}
        headers |= {"Aflock-Vectors": "gradient", "Aflock-Encoding": encoding}
        assert refusal(alice.request("POST", path, bad[encoding], headers)) == (422, "unusable")
        huge = {"float16": np.full(8, 65504.0), "int8": np.full(8, 3e38)}[encoding]
        for _ in range(3):  # the model leaves what the encoding can say; the server goes on answering
            assert alice.push(huge, next=True)[0] == 200
        assert "Traceback" not in server.errors
        assert "Warning" not in server.errors


def test_who_keeps_sending_nonsense_is_suspended(tmp_path: Path) -> None:
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
        with _waiting(bob, 30) as woken:
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


def test_a_new_start_goes_on_where_the_old_one_was(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    changes = ["federation.concurrency=2", "federation.clients=3"]
    with served(folder, SMALL, changes=changes) as server:
        peers = [Peer(server, invite(folder, name)) for name in ("alice", "bob", "carol")]
        for peer in peers:
            peer.hello()
        alice, bob, carol = peers
        federation = alice.hello()["federation"]
        assert alice.pull()[0] == bob.pull()[0] == 200
        receipt = alice.push(ONES)
        assert alice.pull()[0] == 200
        with _waiting(carol, 30) as woken:
            time.sleep(0.3)
            before = server.status()
            assert server.stop() == 0
            assert (woken().status, woken().code) == (503, "stopping")
    assert sorted(folder.glob("snapshot-*"))
    assert "stopped at version 1" in server.errors
    with served(folder, SMALL, changes=[*changes, "server.lease=5.0", "server.rate=100.0"]) as server:
        after = server.status()
        for key in ("federation", "version", "updates", "applied", "open_jobs", "dropped"):
            assert after[key] == before[key], key
        ours = Peer(server, alice.token, job=alice.job)
        hello = ours.hello()
        assert (hello["federation"], hello["lease"]) == (federation, 5.0)
        assert ours.push(ONES, job=0)[::2] == receipt[::2]  # remembered
        assert ours.push(ONES)[0] == 200  # the open job is still open
        assert Peer(server, bob.token, job=bob.job).push(ONES)[1]["aflock-staleness"] == "2"
        assert server.stop(signal.SIGINT) == 0
    with pytest.raises(NotStarted) as stopped:
        start(folder, {**SMALL, "strategy": {"name": "fedbuff"}}, changes=changes)
    assert stopped.value.code == 2
    last = stopped.value.errors.strip().splitlines()[-1]
    assert last.startswith("aflock: [strategy]")
    with served(folder, SMALL, changes=changes) as server:  # and nothing was spoilt by the attempt
        assert server.status()["updates"] == 3
        with pytest.raises(NotStarted, match="another server"):
            start(folder, SMALL, changes=changes)
        with Peer(server) as peer:
            assert peer.request("GET", "/readyz")[0] == 200


def test_a_stop_waits_for_what_was_begun(tmp_path: Path) -> None:
    with served(tmp_path / "fed") as server:
        alice = working(server, "alice")
        with Wire(server) as wire_:
            wire_.send(update_head(alice, 32) + bytes(16))
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            wire_.send(bytes(16))
            status, headers, _ = wire_.answer()
            assert (status, headers["aflock-outcome"]) == (200, "applied")
        assert server.process.wait(20) == 0
        assert "Traceback" not in server.errors
    with served(tmp_path / "fed") as server:
        assert server.status()["updates"] == 1


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
        until(lambda: "can be used again" in server.errors)
        assert server.errors.count("cannot be used") == 1
        file.write_text("[]")
        assert server.stop() == 0
    with pytest.raises(NotStarted) as stopped:
        start(folder)
    assert stopped.value.code == 2
    assert "members.json cannot be used" in stopped.value.errors.splitlines()[-1]


def test_a_full_disk_passes(tmp_path: Path) -> None:
    with served(tmp_path / "fed", SMALL, largest_file=40_000) as server:
        alice = working(server, "alice")
        answered = alice.push(ONES, next=True)
        while answered[0] == 200:
            answered = alice.push(ONES, next=True)
        assert refusal(answered) == (503, "disk-full")
        updates = server.status()["updates"]
        assert updates > 20
        with Peer(server) as other:
            assert other.request("GET", "/healthz")[0] == 200
            status, headers, body = other.request("GET", "/readyz")
            assert (status, body, headers["retry-after"]) == (503, b"the disk is full\n", "2")
            assert b"aflock_disk_full 1\n" in other.request("GET", "/metrics")[2]
            for _ in range(5):
                assert refusal(alice.push(ONES)) == (503, "disk-full")
            assert server.status()["updates"] == updates
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            until(lambda: other.request("GET", "/readyz")[0] == 200)  # by itself: nobody has sent anything
        assert alice.push(ONES, next=True)[0] == 200
        assert server.status()["updates"] == updates + 1
        assert server.stop() == 0
    with served(tmp_path / "fed") as server:
        assert server.status()["updates"] == updates + 1
    lines = (tmp_path / "fed" / "trace.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "arrival" for line in lines) == updates + 1


# --- what can be seen ------------------------------------------------------------------------------------------------

_SAMPLE = re.compile(r'(aflock_[a-z_]+)((?:\{[a-z]+="[^"\\\n]*"\})?) (-?[0-9.e+-]+|\+Inf|NaN)')


def _samples(text: str) -> dict[str, float]:
    """The samples of an exposition, each announced by its help and type, every line well-formed."""
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            assert len(line.split(" ", 3)) == 4
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            assert kind in ("gauge", "counter", "histogram")
            kinds[name] = kind
        else:
            match = _SAMPLE.fullmatch(line)
            assert match, line
            base = re.sub("_(bucket|sum|count)$", "", match[1]) if match[1] not in kinds else match[1]
            assert base in kinds, line
            found[match[1] + match[2]] = float(match[3])
    assert text.endswith("\n")
    return found


def test_metrics_and_status_can_be_for_members_only(tmp_path: Path) -> None:
    document = {**SMALL, "strategy": {"name": "ace"}, "federation": {"clients": 2}}
    with served(tmp_path / "fed", document, changes=["server.status=token"]) as server:
        peers = [Peer(server, invite(server.folder, name)) for name in ("alice", "bob")]
        with Peer(server) as nobody:
            _samples(peers[0].request("GET", "/metrics")[2].decode())  # before anything has happened
            for peer in peers:
                peer.hello()
            for peer in (*peers, *peers, peers[0]):
                peer.pull()
                assert peer.push(ONES)[0] == 200
            peers[0].pull()
            for path in ("/v1/status", "/metrics"):
                assert refusal(nobody.request("GET", path)) == (401, "token")
            for path in ("/healthz", "/readyz"):
                assert nobody.request("GET", path)[0] == 200
            assert peers[1].request("GET", "/v1/status")[0] == 200
            status, headers, body = peers[1].request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    found = _samples(body.decode())
    assert found["aflock_version"] == 4
    assert found['aflock_updates_total{outcome="applied"}'] == 4
    assert found['aflock_updates_total{outcome="buffered"}'] == 1
    assert found['aflock_updates_total{outcome="rejected"}'] == 0
    assert found['aflock_refused_total{code="token"}'] == 2
    assert found["aflock_staleness_count"] == 5
    assert found['aflock_staleness_bucket{le="+Inf"}'] == 5
    assert found["aflock_buffer_fill"] == 0
    assert found["aflock_row_cache_bytes"] == 2 * 8 * 4
    assert found["aflock_state_bytes"] > found["aflock_row_cache_bytes"]
    assert found["aflock_journal_seconds_count"] >= 5
    assert found["aflock_journal_seconds_sum"] > 0
    assert found['aflock_client_updates_total{client="alice"}'] == 3
    assert found['aflock_client_share{client="bob"}'] == 0.4
    assert found["aflock_open_jobs"] == 1
    assert found["aflock_clients"] == 2
    assert found["aflock_disk_full"] == 0
    assert found["aflock_resident_bytes"] > 1e7
    buckets = [value for name, value in found.items() if name.startswith("aflock_journal_seconds_bucket")]
    assert buckets == sorted(buckets)


def test_nothing_secret_is_logged_or_readable(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    folder.mkdir(mode=0o755)
    old = os.umask(0)  # as careless as can be
    try:
        document = {**SMALL, "model": {"name": "logistic"}, "data": {"name": "digits"}, "evaluation": {"every": 1}}
        with served(folder, document, level="debug", tls=True, options=["--log-json"]) as server:
            alice = Peer(server, invite(folder, "alice"))
            length = alice.hello()["length"]
            alice.pull()
            assert alice.push(np.ones(length), next=True)[0] == 200
            alice.request("GET", f"/{alice.token}?token={alice.token}", headers={"X-Token": str(alice.token)})
            alice.request("POST", f"/v1/jobs/{alice.token}/update")
            wrong = "aflock1.alice." + "x" * 43
            Peer(server, wrong).pull()
            until(lambda: (folder / "best.json").exists())
            assert server.stop() == 0
    finally:
        os.umask(old)
    secret = str(alice.token).rpartition(".")[2]
    written = [file for file in folder.rglob("*") if file.is_file()] + [output(folder, "err"), output(folder, "out")]
    for file in written:
        assert secret.encode() not in file.read_bytes(), file
        assert b"x" * 43 not in file.read_bytes(), file
    modes = {str(file.relative_to(folder)): stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*")}
    for name in ("federation.toml", "trace.jsonl", "address.json", "best.json", "best.safetensors", "members.json"):
        assert modes.pop(name) == 0o600, name
    assert all(not mode & 0o077 for mode in modes.values()), modes
    lines = [json.loads(line) for line in server.errors.splitlines()]
    assert all({"time", "level", "message"} <= set(line) for line in lines)
    told = [(line["client"], line["method"], line["what"], line["status"]) for line in lines if "what" in line]
    assert ("alice", "POST", "/v1/hello", 200) in told
    assert ("alice", "GET", "/v1/job", 200) in told
    assert ("alice", "POST", "/v1/jobs/0/update", 200) in told
    assert ("", "GET", "?", 404) in told


# --- TLS -------------------------------------------------------------------------------------------------------------


def test_tls_and_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    folder.mkdir()
    code, _, err = _aflock("invite", folder, "early", cwd=tmp_path)  # before the first start
    assert (code, err) == (0, "")
    early = members.read_token_file(tmp_path / "early.token")
    with served(folder, SMALL, tls=True) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert early.ca == server.ca
        with Peer(server, early.token, context=tls.client_context(early.ca)) as peer:
            assert peer.hello()["name"] == "early"
            assert peer.pull()[0] == 200
            assert peer.push(ONES, next=True)[0] == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            Peer(server, context=ssl.create_default_context()).request("GET", "/healthz")
        with Wire(server) as plain:
            plain.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.rest()
        with contextlib.ExitStack() as stack:  # those who never finish their handshake
            for _ in range(50):
                stack.enter_context(Wire(server)).send(b"\x16\x03\x01")
            begun = time.monotonic()
            with Peer(server) as peer:
                assert peer.request("GET", "/healthz")[0] == 200
            assert time.monotonic() - begun < 3

        code, _, err = _aflock("invite", folder, "early", "--out", tmp_path / "again.token")
        assert code == 2
        assert "--again" in err
        assert _aflock("invite", folder, "bob", "--out", tmp_path / "early.token")[0] == 2  # it exists
        assert _aflock("invite", folder, "bob", "--out", tmp_path / "bob.token")[0] == 0
        assert stat.S_IMODE((tmp_path / "bob.token").stat().st_mode) == 0o600
        bob = members.read_token_file(tmp_path / "bob.token")
        with Peer(server, bob.token) as peer:
            assert peer.hello()["name"] == "bob"
        code, out, err = _aflock("status", folder, "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert (found["version"], len(found["clients"]), found["verified"]) == (1, 2, True)
        assert "early" in _aflock("status", server.url, "--ca", folder / "tls" / "ca.pem")[1]
        assert _aflock("revoke", folder, "bob")[0] == 0
        until(lambda: len(server.status()["clients"]) == 1)
        assert _aflock("revoke", folder, "nobody")[0] == 2
        assert _aflock("export", folder, "--out", tmp_path / "early.safetensors")[0] == 2  # nothing is saved yet
        assert server.stop() == 0
    code, out, _ = _aflock("export", folder, "--out", tmp_path / "model.safetensors")
    assert code == 0
    assert "version 1, the one of the last snapshot (a server that is stopped writes its last); 8 weights" in out
    assert (tmp_path / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert np.allclose(weights.flat(tmp_path / "model.safetensors"), -0.1)
    _check_exports_that_cannot_be(folder)
    code, _, err = _aflock("status", folder)
    says = f"the server of {folder} is not running (its last address was {server.url}); start it with aflock serve"
    assert (code, err) == (1, f"aflock: {says}\n")
    assert "not running" not in _aflock("status", server.url)[2]  # who asks for a URL may not know of a folder


def _check_exports_that_cannot_be(folder: Path) -> None:
    """Each is refused in one line, and the server's own files stay as they are."""
    before = (folder / "model.safetensors").read_bytes()
    (folder.parent / "recipe.py").write_text("from torch import nn\n\nmodel, batches = nn.Linear(7, 1), []\n")
    recipe = ["--recipe", str(folder.parent / "recipe.py")]
    cases: list[tuple[str | Path, str | Path, list[str], str]] = [
        (".", "model.safetensors", [], "is in the federation's own folder"),
        (".", "model.pt", recipe, "is in the federation's own folder"),
        (folder, folder.parent / "no" / "model.pt", recipe, f"the folder {folder.parent / 'no'} does not exist"),
        (folder, folder.parent, [], "is a folder"),
        ("nofolder", folder.parent / "x", [], "the folder nofolder does not exist"),
    ]
    for where, out, more, says in cases:
        code, _, err = _aflock("export", where, "--out", out, *more, cwd=folder)
        assert (code, err.count("\n"), says in err) == (2, 1, True), err
    assert (folder / "model.safetensors").read_bytes() == before
    assert _aflock("export", folder, "--out", folder.parent / "model.pt", *recipe)[0] == 0
    assert torch.load(folder.parent / "model.pt")["bias"].tolist() == pytest.approx([-0.1])


def test_certificates_on_both_sides(tmp_path: Path) -> None:
    folder = tmp_path / "fed"
    folder.mkdir()
    assert _aflock("invite", folder, "alice", "--mtls", cwd=tmp_path)[0] == 0
    alice = members.read_token_file(tmp_path / "alice.token")
    bob = invite(folder, "bob")
    shown = tls.client_context(alice.ca, certificate=tmp_path / "alice.pem", key=tmp_path / "alice.key")
    with running_with_client_ca(folder) as server:
        with Peer(server, alice.token, context=shown) as peer:
            assert peer.hello()["name"] == "alice"
        trust = ["--token-file", "alice.token", "--certificate", "alice.pem", "--key", "alice.key"]
        assert _aflock("status", server.url, "--json", *trust, cwd=tmp_path)[0] == 0
        assert _aflock("status", server.url, "--json", *trust[:2], cwd=tmp_path)[0] == 1
        with Peer(server, bob, context=shown) as peer:  # bob's token does not help who has alice's certificate
            assert refusal(peer.request("POST", "/v1/hello")) == (401, "token")
        trusting = tls.client_context(alice.ca)
        with pytest.raises((ssl.SSLError, ConnectionError)):  # no certificate, no answer
            Peer(server, alice.token, context=trusting).request("POST", "/v1/hello")


@contextlib.contextmanager
def running_with_client_ca(folder: Path) -> Iterator[Server]:
    """A server that asks for certificates cannot be asked whether it is ready; whoever has one can."""
    certificate, key = tls.issue_client(folder, "nobody")
    files = folder.parent / "nobody.pem", folder.parent / "nobody.key"
    for file, pem in zip(files, (certificate, key), strict=True):
        file.write_bytes(pem)
    context = tls.client_context(tls.ca_text(folder), certificate=files[0], key=files[1])
    options = ["--client-ca", str(folder / "tls" / "ca.pem")]
    with served(folder, SMALL, tls=True, options=options, context=context) as server:
        yield server


def test_certificates_from_elsewhere(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "fed"
    elsewhere.mkdir()
    theirs = tls.prepare(elsewhere, ["127.0.0.1"])
    options = ["--certificate", str(theirs.certificate), "--key", str(theirs.key)]
    context = tls.client_context(tls.ca_text(elsewhere))
    document = {**SMALL, "model": {"name": "vector", "length": 1_000_000}}
    with served(folder, document, tls=True, options=options, context=context, changes=["server.idle=1.0"]) as server:
        assert _aflock("invite", folder, "alice", cwd=tmp_path)[0] == 0
        assert members.read_token_file(tmp_path / "alice.token").ca is None
        assert not (folder / "tls").exists()
        token = members.read_token_file(tmp_path / "alice.token").token
        for last in (b"", b"Connection: close\r\n"):  # whoever reads slowly gets all of it, the end included
            with Wire(server, receive_buffer=4096) as wire_:
                wire_.socket = context.wrap_socket(wire_.socket, server_hostname="127.0.0.1")
                wire_.send(f"GET /v1/model HTTP/1.1\r\nAuthorization: Bearer {token}\r\n".encode() + last + b"\r\n")
                assert len(wire_.answer(pause=0.006)[2]) == 4_000_000


@pytest.mark.parametrize(
    ("options", "changes", "says"),
    [
        (["--http"], ["server.host=0.0.0.0"], "--insecure"),
        (["--http", "--client-ca", "x.pem"], [], "without TLS"),
        ([], ["server.port=99999"], "port"),
        (["--certificate", "x.pem"], [], "key"),
        ([], ["evaluation.every=1"], "[evaluation]"),
        ([], ["model.length=100000000000000"], "memory"),
        ([], ["strategy.name=ace", "federation.clients=100000", "model.length=10000000"], "memory"),
    ],
)
def test_a_server_that_cannot_start_says_why(tmp_path: Path, options: list[str], changes: list[str], says: str) -> None:
    with pytest.raises(NotStarted) as stopped:
        start(tmp_path / "fed", SMALL, tls=True, options=options, changes=changes)
    assert stopped.value.code == (1 if says == "memory" else 2), stopped.value.errors  # not every error is the user's
    assert stopped.value.errors.count("\n") == 1
    assert says in stopped.value.errors


def test_a_data_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fed").touch()
    (tmp_path / "federation.toml").write_text(_aflock("serve", "--example")[1])
    code, _, err = _aflock("serve", tmp_path / "federation.toml", "--data-dir", tmp_path / "fed")
    assert (code, err) == (
        2,
        f"aflock: --data-dir {tmp_path / 'fed'} is a file; expected a folder, or a name that is free\n",
    )


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_the_server_measures_and_ends_when_it_is_good_enough(tmp_path: Path) -> None:
    document: Document = {
        "strategy": {"name": "asgd", "lr": 0.5},
        "model": {"name": "logistic"},
        "data": {"name": "digits"},
        "federation": {"clients": 1},
        "evaluation": {"every": 2, "target": 0.8},
    }
    dataset = data.load("digits", seed=0)
    model = models.create("logistic", dataset)
    with served(tmp_path / "fed", document) as server:
        alice = working(server, "alice")
        body = alice.request("GET", "/v1/model")[2]
        for _ in range(400):
            gradient = _gradient(model, wire.decode(body, "float32", len(body) // 4), dataset)
            status, headers, body = alice.push(gradient, next=True)
            assert status in (200, 410)
            if status == 410 or "aflock-job" not in headers:
                break
        assert refusal(alice.pull()) == (410, "ended")
        found = server.status()
        assert "reaches the target" in found["ended"]
        assert found["evaluation"]["accuracy"] >= 0.8
        with Peer(server) as peer:
            assert "aflock_evaluation_accuracy" in peer.request("GET", "/metrics")[2].decode()
        assert "accuracy 0.8" in _aflock("status", tmp_path / "fed")[1]
        assert server.stop() == 0
        assert "the federation has ended: accuracy 0.8" in server.errors
    best = json.loads((tmp_path / "fed" / "best.json").read_text())
    assert _aflock("export", tmp_path / "fed", "--best", "--out", tmp_path / "best.safetensors")[0] == 0
    exported = weights.flat(tmp_path / "best.safetensors")
    assert model.evaluate(exported, dataset.test_inputs, dataset.test_y).accuracy == best["accuracy"] >= 0.8


def test_a_restart_does_not_put_off_the_next_measurement(tmp_path: Path) -> None:
    document: Document = {
        **SMALL, "model": {"name": "logistic"}, "data": {"name": "digits"}, "evaluation": {"every": 4},
    }  # fmt: skip
    (tmp_path / "fed").mkdir()
    token, zero = invite(tmp_path / "fed", "alice"), np.zeros(650, np.float32)
    for updates, expected in ((6, 4), (2, 8)):
        with served(tmp_path / "fed", document) as server, Peer(server, token) as alice:
            alice.hello()
            assert alice.pull()[0] == 200
            for _ in range(updates):
                assert alice.push(zero, next=True)[0] == 200
            until(lambda server=server: server.status()["evaluation"])  # type: ignore[misc]
            assert server.status()["evaluation"]["version"] == expected


def _gradient(model: Any, at: Any, dataset: Any) -> Any:
    out = np.empty_like(at)
    model.gradient(at, dataset.take(np.arange(len(dataset.train_y))), dataset.train_y, out)
    return out


# --- before the first client -----------------------------------------------------------------------------------------


def test_the_first_client_need_not_wait_for_the_kernels(shared: Server) -> None:
    for entry in strategies.entries():
        clients = {"clients": 40}
        warm.up(Settings.build({**SMALL, "strategy": {"name": entry.name}, "federation": clients}))
